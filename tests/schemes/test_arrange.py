"""Records of the CUDA kernels: unpacking inverts packing bit for bit, and an independent reader
agrees.

The reader below follows the opening comments of record.cuh and dequant.cuh and uses nothing of
arrange.py or layout.py: plain loops from (row, column) to a bit of a record.
"""

import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from billfish.errors import UserError
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda import arrange

N, K = 64, 128  # of a record
DTYPES = (torch.float16, torch.bfloat16)
ONE_GROUP = 0  # in place of a group size: as large as k


def draw(n, k, bits, group, symmetric, dtype, seed, any_bits=False):
    """A scheme and canonical tensors with every code and zero that can be stored."""
    scheme = W4A16(bits, k if group == ONE_GROUP else group, symmetric)
    source = torch.Generator().manual_seed(seed)
    groups = 1 if group in (-1, ONE_GROUP) else k // group
    codes = torch.randint(0, 2**bits, (n, k), generator=source).to(torch.uint8)
    zeros = torch.randint(0, 2**bits, (n, groups), generator=source).to(torch.uint8)
    scales = (torch.rand(n, groups, generator=source) + 0.01).to(dtype)
    if any_bits:  # NaN, infinities, negative zeros: what comes in goes out
        words = torch.randint(-(2**15), 2**15, (n, groups), generator=source).to(torch.int16)
        scales = words.view(dtype)
        if scheme.bits > 4:  # the high plane has 16 times as much, which must be a number
            scales = torch.where((scales * 16).isfinite(), scales, torch.ones_like(scales))
    return scheme, scheme.pack(codes, scales, zeros)


def bits_of(tensor):
    return tensor.view(torch.int16) if tensor.is_floating_point() else tensor


def same(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and tensor.shape == right[name].shape, name
        assert torch.equal(bits_of(tensor), bits_of(right[name])), name


@settings(max_examples=120, deadline=None)
@given(
    n=st.integers(1, 140),
    tiles=st.integers(1, 5),
    ragged=st.integers(1, 300),
    bits=st.integers(2, 8),
    group=st.sampled_from([-1, 32, 64, 96, 128, 256, ONE_GROUP]),
    symmetric=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
@example(n=1, tiles=1, ragged=1, bits=4, group=-1, symmetric=True, dtype=DTYPES[0], seed=0)
@example(n=64, tiles=4, ragged=1, bits=8, group=32, symmetric=False, dtype=DTYPES[1], seed=0)
def test_unpack_inverts_pack(n, tiles, ragged, bits, group, symmetric, dtype, seed):
    k = ragged if group in (-1, ONE_GROUP) else tiles * group
    scheme, tensors = draw(n, k, bits, group, symmetric, dtype, seed, any_bits=True)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    shape, records = arrange.pack(scheme, tensors)
    same(tensors, before)  # its sources are the caller's
    assert records.dtype == torch.int32 and records.is_contiguous()
    assert tuple(records.shape) == (shape.bands, shape.planes * shape.k_tiles, shape.record_words)
    assert records.shape[0] == -(-n // N) and records.shape[1] == -(-k // K) * (1 + (bits > 4))
    same(arrange.unpack(scheme, shape, records), before)


# -- the reader


def record_group(group, k):
    """All of k in one group takes whole records; another size the largest that divides it."""
    if group in (-1, ONE_GROUP, k):
        return 128
    return next(size for size in (128, 64, 32) if group % size == 0)


def code_at(record, row, column):
    """Words [k64 (2)][n16 (4)][lane (32)][k16 step (4)]: a lane's A fragments of mma.m16n8k16."""
    k64, n16, step = column // 64, row // 16, column % 64 // 16
    quad, lower = row % 8, row % 16 // 8
    lane = 4 * quad + column % 8 // 2
    register = 2 * (column % 16 // 8) + lower  # a0: row r; a1: row r + 8; a2, a3: k + 8
    at = 4 * (((k64 * 4 + n16) * 32 + lane) * 4 + step)
    (word,) = struct.unpack_from("<I", record, at)
    return word >> (16 * (column % 2) + 4 * register) & 15


def place(row, group):
    """[group][half (2)][quad (8)][row q, q + 8, q + 16, q + 24]"""
    half, q, i = row // 32, row % 8, row % 32 // 8
    return ((group * 2 + half) * 8 + q) * 4 + i


def scale_at(record, row, group, dtype):
    (found,) = struct.unpack_from("<H", record, 4096 + 2 * place(row, group))
    bits = torch.tensor([found if found < 2**15 else found - 2**16], dtype=torch.int16)
    return bits.view(dtype).item()


def zero_at(record, row, group, groups):
    index = place(row, group)
    return record[4096 + 128 * groups + index // 2] >> 4 * (index % 2) & 15


def read(records, n, k, size, zeros, planes, dtype):
    """(n, k) fp64: the planes' numbers, added. One plane's records follow the other's along k."""
    groups, tiles = K // size, -(-k // K)
    stored = 4096 + groups * (128 + (32 if zeros else 0))
    pieces = [[tile.numpy().tobytes() for tile in band] for band in records]
    assert {len(piece) for band in pieces for piece in band} == {stored}
    weight = [[0.0] * k for _ in range(n)]
    for plane in range(planes):
        for row in range(n):
            for tile in range(tiles):
                record = pieces[row // N][plane * tiles + tile]
                for group in range(groups):
                    scale = scale_at(record, row % N, group, dtype)
                    zero = zero_at(record, row % N, group, groups) if zeros else 8
                    for column in range(group * size, min((group + 1) * size, k - tile * K)):
                        step = code_at(record, row % N, column) - zero
                        weight[row][tile * K + column] += step * scale
    return torch.tensor(weight, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "n", "k", "group"),
    [
        (4, 66, 256, 32),
        (4, 33, 128, 64),
        (4, 9, 256, 128),
        (4, 7, 512, 256),
        (4, 7, 192, 96),
        (4, 17, 131, -1),
        (4, 17, 40, ONE_GROUP),
        (2, 20, 64, 32),
        (3, 20, 70, -1),
        (5, 10, 192, 64),
        (8, 66, 160, 32),
        (8, 5, 300, -1),
        (8, 5, 256, 128),
    ],
)
def test_a_plain_reader_finds_the_weights(bits, n, k, group, symmetric, dtype):
    scheme, tensors = draw(n, k, bits, group, symmetric, dtype, seed=bits * n * k)
    _, records = arrange.pack(scheme, tensors)
    planes = 1 if bits <= 4 else 2
    zeros = not symmetric or planes == 2
    found = read(records, n, k, record_group(group, k), zeros, planes, dtype)
    # (code - zero) * scale has 20 bits at most: exact in fp32 and in fp64.
    assert torch.equal(found, scheme.dequantize(tensors).double())


def test_rows_that_do_not_exist_are_zero():
    """A kernel computes whole bands and columns of whole records: what is cut off adds nothing."""
    for group, k in ((32, 160), (-1, 100)):
        scheme, tensors = draw(70, k, 4, group, False, torch.float16, seed=1)
        _, records = arrange.pack(scheme, tensors)
        size = record_group(group, k)
        padded = read(records, 128, -(-k // K) * K, size, True, 1, torch.float16)
        assert not padded[70:].any()
        if group == 32:  # the scale of all of k repeats: there activations must be zeros
            assert not padded[:, k:].any()
        assert torch.equal(padded[:70, :k], scheme.dequantize(tensors).double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_scales_and_zeros_land(dtype):
    """64 outputs, four groups: scale number 4 row + group at [group][half][quad][row q + 8 i]."""
    values = torch.arange(256, dtype=torch.float32).view(64, 4)  # exact in bf16 too
    zeros = (torch.arange(64)[:, None] * 7 + torch.arange(4) * 3) % 16
    scheme = W4A16(4, 32, symmetric=False)
    codes = torch.zeros(64, 128, dtype=torch.uint8)
    tensors = scheme.pack(codes, values.to(dtype), zeros.to(torch.uint8))
    _, records = arrange.pack(scheme, tensors)
    assert tuple(records.shape) == (1, 1, 1024 + 4 * (32 + 8))
    assert not records[0, 0, :1024].any()
    scales = records[0, 0, 1024 : 1024 + 128].contiguous().view(dtype).float().tolist()
    nibbles = []
    for word in records[0, 0, 1024 + 128 :].tolist():
        nibbles += [word >> 4 * i & 15 for i in range(8)]
    at = 0
    for group in range(4):
        for half in range(2):
            for quad in range(8):
                for i in range(4):
                    row = 32 * half + quad + 8 * i
                    assert scales[at] == 4 * row + group, (group, half, quad, i)
                    assert nibbles[at] == (row * 7 + group * 3) % 16, (group, half, quad, i)
                    at += 1


def test_larger_groups_repeat_their_scale():
    scheme, tensors = draw(64, 768, 4, 384, True, torch.float16, seed=3)
    shape, records = arrange.pack(scheme, tensors)
    assert (shape.groups, shape.record_group, shape.repeats) == (2, 128, 3)
    parts = records[0, :, 1024:]
    assert all(torch.equal(parts[i], parts[i // 3 * 3]) for i in range(6))
    assert not torch.equal(parts[0], parts[3])


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_symmetric_codes_have_their_middle_at_eight(bits):
    """So that a kernel without stored zeros needs no number of its own for each width."""
    scheme, tensors = draw(8, 32, bits, 32, True, torch.float16, seed=bits)
    _, records = arrange.pack(scheme, tensors)
    record = records[0, 0].numpy().tobytes()
    codes = scheme.codes(tensors).tolist()
    for row in range(8):
        for column in range(32):
            assert code_at(record, row, column) - 8 == codes[row][column] - 2 ** (bits - 1)


# -- refusals


@pytest.mark.parametrize("bits", [4, 8])
def test_fp32_scales_are_refused(bits):
    scheme, tensors = draw(8, 64, bits, 32, True, torch.float16, seed=0)
    tensors["weight_scale"] = tensors["weight_scale"].float()
    with pytest.raises(UserError, match=r"float32.*float16 and bfloat16.*Load the model"):
        arrange.pack(scheme, tensors)


@pytest.mark.parametrize("size", [8, 16, 48])
def test_small_and_odd_groups_are_refused(size):
    scheme, tensors = draw(8, 4 * size, 4, size, True, torch.float16, seed=0)
    with pytest.raises(UserError, match=rf"groups of {size}: .*multiples of 32"):
        arrange.pack(scheme, tensors)
    one = draw(8, size, 4, ONE_GROUP, True, torch.float16, seed=0)  # a group that is all of k
    shape, records = arrange.pack(*one)
    same(arrange.unpack(one[0], shape, records), one[1])


def test_scales_too_large_for_two_planes_are_refused():
    scheme = W4A16(8, 32)
    codes, scales = torch.zeros(64, 32, dtype=torch.uint8), torch.full((64, 1), 5000.0).half()
    with pytest.raises(UserError, match="bfloat16"):
        arrange.pack(scheme, scheme.pack(codes, scales, codes[:, :1]))
    arrange.pack(scheme, scheme.pack(codes, scales.bfloat16(), codes[:, :1]))
