"""Records of K and V: a bijection, a token's bytes are its own, the numbers are cache.py's."""

import pytest
import torch

from billfish.engine.cuda import pool
from billfish.engine.cuda.pool import POOLS
from billfish.engine.kv.cache import Kv4Plain, Kv8, Kv16, Room
from billfish.errors import UserError

CPU = torch.device("cpu")
PEERS = {"kv16": Kv16, "kv8": Kv8, "kv4": Kv4Plain}
LAYERS, PAGES, KV_HEADS = 2, 4, 3
every_kind = pytest.mark.parametrize("kind", POOLS.values(), ids=POOLS)
every_size = pytest.mark.parametrize("head_dim", pool.HEAD_DIMS)
every_dtype = pytest.mark.parametrize("dtype", pool.DTYPES, ids=str)


def build(kind, head_dim=64, dtype=torch.float16):
    return kind(Room(LAYERS, PAGES, 64, KV_HEADS, head_dim, dtype, CPU))


def draw(tokens, head_dim, dtype):
    k = torch.randn(tokens, KV_HEADS, head_dim) + torch.randn(KV_HEADS, head_dim) * 3
    return k.to(dtype), torch.randn(tokens, KV_HEADS, head_dim).to(dtype)


@every_kind
@every_size
def test_every_place_is_taken_once(kind, head_dim):
    found = pool.places(kind.bits, head_dim).flatten()
    assert found.sort().values.equal(torch.arange(2 * 64 * head_dim))
    if kind.bits < 16:
        grids = pool.grid_places(kind.bits, head_dim)
        assert grids.min() * 16 == len(found) * kind.bits
        assert grids.max() * 2 + 2 == kind.record_bytes(head_dim)


@every_kind
@every_size
def test_a_token_has_whole_bytes(kind, head_dim):
    """So that nobody's write reads what a neighbour writes."""
    found = pool.places(kind.bits, head_dim) * kind.bits // 8
    owners = torch.full((kind.record_bytes(head_dim),), -1)
    for part in range(2):
        for token in range(64):
            mine = found[part, token].unique()
            assert (owners[mine] == -1).all()
            owners[mine] = token


def test_record_bytes_are_the_layouts():
    sizes = [[kind.record_bytes(d) for d in pool.HEAD_DIMS] for kind in POOLS.values()]
    assert sizes == [[256 * 64, 256 * 128], [128 * 64 + 512, 128 * 128 + 512], [4608, 8704]]


def test_words_split_into_neighbours():
    """What a kernel's masks give, as the layout has it."""
    for head_dim in pool.HEAD_DIMS:
        four = pool.places(4, head_dim)[0, 5]
        word = [int(four[32 + 8 + i]) % 8 for i in range(8)]  # j = 1, c = 1
        assert word == [0, 4, 1, 5, 2, 6, 3, 7]
        assert int(four[40]) // 2 == 5 * head_dim // 2 + head_dim // 8 + 4
        eight = pool.places(8, head_dim)[0, 5]
        assert [int(eight[40 + i]) % 8 for i in range(8)] == [0, 2, 1, 3, 4, 6, 5, 7]
        sixteen = pool.places(16, head_dim)[0]
        assert int(sixteen[4, 0]) == 4 * head_dim and int(sixteen[5, 0]) == 5 * head_dim + 32
    # V, token 13 = group 1, c = 2, odd; channel 3 + 8 * 6: kv4 word 1, nibble 2
    assert int(pool.places(4, 64)[1, 13, 51]) == 64 * 64 + 8 * 64 + (3 * 4 + 2) * 16 + 8 + 4 + 2
    assert int(pool.places(8, 128)[1, 13, 3 + 8 * 11]) == 72 * 128 + 512 + 14 * 16 + 4 + 2 + 1
    assert int(pool.places(16, 128)[1, 13, 51]) == 72 * 128 + 256 + 14 * 8 + 2 * 2 + 1


@every_kind
@every_size
@every_dtype
def test_numbers_are_the_caches(kind, head_dim, dtype):
    mine = build(kind, head_dim, dtype)
    theirs = build(PEERS[kind.name], head_dim, dtype)
    pages = torch.tensor([2, 0, 3])
    slots = (pages[:, None] * 64 + torch.arange(64)).flatten()[:150]
    k, v = draw(150, head_dim, dtype)
    k[3], v[4], k[7, 1, 2], v[9, 0, 5] = 0, -2.5, torch.nan, torch.inf
    order = torch.randperm(150)
    for some in order.split(40):
        for one in (mine, theirs):
            one.write(1, slots[some], k[some], v[some])
    for one, other in zip(mine.read(1, pages, 150), theirs.read(1, pages, 150), strict=True):
        assert one.dtype == dtype and one.shape == other.shape
        assert torch.equal(one.nan_to_num(7e4), other.nan_to_num(7e4))
    assert not mine.records[0].any() and not mine.records[1, 1].any()


@every_kind
@every_dtype
def test_bytes_a_token_tells_nbytes(kind, dtype):
    told = kind.bytes_a_token(LAYERS, KV_HEADS, 128, dtype)
    assert build(kind, 128, dtype).nbytes() == told * PAGES * 64


def test_what_has_no_record_is_refused():
    for head_dim, page_tokens, dtype in (
        (96, 64, torch.float16),
        (64, 16, torch.float16),
        (64, 64, torch.float32),
    ):
        with pytest.raises(UserError, match="64 tokens a page"):
            POOLS["kv4"](Room(1, 1, page_tokens, 1, head_dim, dtype, CPU))
