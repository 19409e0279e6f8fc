"""kv4's rotation of K: scores stay what they are, and coding does less harm to them."""

from dataclasses import replace

import pytest
import torch
from tiny import write_checkpoint

from billfish.engine.attention import Batch, PagedAttention
from billfish.engine.cuda.pool import Pool4
from billfish.engine.kv.cache import Kv4, Kv4Plain, Room
from billfish.engine.kv.codes import channel_blocks
from billfish.engine.kv.rotation import Moments, Rotation, find_rotation, hadamard, shifts
from billfish.errors import UserError
from billfish.models.decoder import Decoder, Shape, apply_rope
from billfish.models.load import load

CPU = torch.device("cpu")
LAYERS, KV_HEADS, GROUP = 2, 2, 3


def shape_of(head_dim):
    heads = KV_HEADS * GROUP
    return Shape(LAYERS, heads, KV_HEADS, head_dim, 9, 999, (None,) * LAYERS, head_dim**-0.5)


def draw(tokens, head_dim, seed):
    """Keys as models have them: a few directions are large, and others matter to queries."""
    source = torch.Generator().manual_seed(1)
    mixing = torch.randn(head_dim, head_dim, generator=source) * torch.logspace(1, -1, head_dim)
    asking = torch.randn(head_dim, head_dim, generator=source) / torch.logspace(1, -1, head_dim)
    source = torch.Generator().manual_seed(seed)
    k = torch.randn(tokens, KV_HEADS, head_dim, generator=source) @ mixing.T / 8 + 3
    q = torch.randn(tokens, KV_HEADS * GROUP, head_dim, generator=source) @ asking / 60
    v = torch.randn(tokens, KV_HEADS, head_dim, generator=source)
    return q, k, v


def rotation_of(shape):
    moments = []
    for layer in range(LAYERS):
        moments.append(Moments(shape, layer, CPU))
        moments[-1].attend(*draw(256, shape.head_dim, layer))
    still = torch.ones(1, shape.head_dim), torch.zeros(1, shape.head_dim)
    parts = zip(*(moment.balanced(*still) for moment in moments), strict=True)
    return Rotation.of(*(torch.stack(part) for part in parts))


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
def test_scores_differ_by_the_same_for_all_keys(head_dim):
    rotation = rotation_of(shape_of(head_dim))
    q, k, _ = draw(20, head_dim, 7)
    turned_q, turned_k = rotation.queries(1, q), rotation.keys(1, k)
    for head in range(KV_HEADS * GROUP):
        plain = q[:, head] @ k[:, head // GROUP].T
        moved = turned_q[:, head] @ turned_k[:, head // GROUP].T - plain
        spread = (moved - moved.mean(1, keepdim=True)).abs().max()
        assert spread < 1e-3 * plain.abs().max()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_in_four_bits_is_nearer_to_the_truth(head_dim):
    shape = shape_of(head_dim)
    q, k, v = draw(200, head_dim, 9)
    page = torch.arange(4)
    batch = Batch([0], [200], [200], [page], torch.arange(200))
    off = {}
    exact = Moments(shape, 0, CPU).attend(q, k, v)
    for kind in (Kv4, Kv4Plain):
        made = kind(Room(LAYERS, 4, 64, KV_HEADS, head_dim, torch.float32, CPU))
        if kind is Kv4:
            made.rotation = rotation_of(shape)
        found = PagedAttention(made, shape.scale, shape.windows)(0, q, k, v, batch)
        off[kind] = float((found - exact).norm() / exact.norm())
    assert off[Kv4] < 0.7 * off[Kv4Plain], off


def test_sinks_count_as_much_beside_rotated_keys():
    """A rotation takes the keys' mean off, and so from each query's scores what a sink keeps."""
    shape = shape_of(64)
    q, k, v = draw(200, 64, 9)
    rotation, sinks = rotation_of(shape), torch.linspace(-1, 3, KV_HEADS * GROUP)
    assert (torch.einsum("hi,hi->h", rotation.mean[0], k.mean(0)) > 9).all()  # keys have a mean
    batch = Batch([0], [200], [200], [torch.arange(4)], torch.arange(200))
    made = Kv4(Room(LAYERS, 4, 64, KV_HEADS, 64, torch.float32, CPU))
    made.rotation = rotation
    off = []
    for given in (sinks.view(KV_HEADS, GROUP), None):
        exact = Moments(shape, 0, CPU, given).attend(q, k, v)
        found = PagedAttention(made, shape.scale, shape.windows, [given] * LAYERS)
        off.append(float((found(0, q, k, v, batch) - exact).norm() / exact.norm()))
    assert off[0] < 1.5 * off[1], off


def test_hadamard():
    for size in (64, 96, 128):
        matrix = hadamard(size, torch.zeros(1, dtype=torch.float64))
        assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    assert (hadamard(64, torch.zeros(1))[0] == 0.125).all()


def test_what_is_carried_over_makes_scores_better():
    """The same codes and steps, chosen with and without it."""
    shape = shape_of(64)
    q, k, v = draw(200, 64, 9)
    rotation, off = rotation_of(shape), {}
    for feedback in (rotation.feedback, torch.zeros_like(rotation.feedback)):
        made = Kv4(Room(LAYERS, 4, 64, KV_HEADS, 64, torch.float32, CPU))
        made.rotation = replace(rotation, feedback=feedback)
        made.write(0, torch.arange(200), k, v)
        error = made.read(0, torch.arange(4), 200)[0] - rotation.keys(0, k)
        seen = torch.einsum("qhgi,khi->qhgk", rotation.queries(0, q).unflatten(1, (2, 3)), error)
        off[bool(feedback.any())] = float(seen.square().mean())
    assert off[True] < 0.95 * off[False], off


def test_pages_of_kernels_hold_the_same_codes():
    rotation = rotation_of(shape_of(64))
    _, k, v = draw(100, 64, 5)
    room = Room(LAYERS, 2, 64, KV_HEADS, 64, torch.bfloat16, CPU)
    made, pool = Kv4(room), Pool4(room)
    made.rotation = rotation
    made.write(1, torch.arange(100), k, v)
    pool.write(1, torch.arange(100), rotation.keys(1, k), v, rotation.feedback[1])
    (k_made, v_made), carried = (x.read(1, torch.arange(2), 100) for x in (made, pool))
    assert torch.equal(k_made, carried[0]) and torch.equal(v_made, carried[1])
    pool.write(1, torch.arange(100), rotation.keys(1, k), v)
    assert not torch.equal(pool.read(1, torch.arange(2), 100)[0], carried[0])


def test_blocks_are_all_channels_once():
    for size in (2, 6, 64, 96):
        parts = channel_blocks(size)
        assert [now.start for now, _ in parts] == sorted({now.start for now, _ in parts})
        assert all(now.stop == later.start and later.stop == size for now, later in parts)
        assert parts[0][0].start == 0


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    model, _ = load(write_checkpoint(tmp_path_factory.mktemp("turn") / "model"), torch.float32)
    return Decoder.of(model)


def test_shifts_move_keys_as_rope_would(decoder):
    """Scores of a text do not depend on where it begins; keys and queries do."""
    cos, sin = shifts(decoder, 20, 120)
    seen = []

    def attend(layer, q, k, v):
        seen.append(k)
        return torch.zeros_like(q)

    for begin in (0, 100):
        decoder.forward(torch.arange(2, 22), torch.arange(begin, begin + 20), attend)
    moved = apply_rope(seen[0].double(), cos[-1], sin[-1])
    assert torch.allclose(moved.float(), seen[3], atol=1e-4)  # the first layer's
    assert not torch.allclose(seen[0], seen[3], atol=0.1)
    assert torch.equal(cos[0], torch.ones_like(cos[0]))
    short, _ = shifts(decoder, 20, 10)  # a limit below the text's own size
    assert torch.equal(short, torch.ones_like(short))


def test_a_window_is_kept():
    shape = replace(shape_of(16), windows=(None, 5))
    q, k, v = draw(30, 16, 3)
    near, far = (Moments(shape, layer, CPU).attend(q, k, v) for layer in (1, 0))
    assert torch.allclose(near[:5], far[:5], atol=1e-5)
    changed = Moments(shape, 1, CPU).attend(q, k + (torch.arange(30) == 0)[:, None, None] * 9.0, v)
    assert torch.allclose(changed[5:], near[5:], atol=1e-5)


def test_stored_and_read_again():
    shape = shape_of(64)
    rotation = rotation_of(shape)
    again = Rotation.from_tensors(rotation.tensors(), shape)
    assert torch.equal(again.to_keys, rotation.to_keys) and torch.equal(
        again.feedback, rotation.feedback
    )
    assert torch.allclose(again.to_queries, rotation.to_queries, rtol=1e-3, atol=1e-5)
    with pytest.raises(UserError, match="Calibrate again"):
        Rotation.from_tensors(rotation.tensors(), shape_of(128))
    old = {name: tensor for name, tensor in rotation.tensors().items() if name != "kv_carry"}
    with pytest.raises(UserError, match="quantize --kv kv4"):
        Rotation.from_tensors(old, shape)


def test_a_model_is_calibrated(decoder):
    seen = []
    rotation = find_rotation(
        decoder, [list(range(2, 90)), [5, 6, 7]], 128, lambda layer, k, v: seen.append((layer, k))
    )
    assert all(tensor.isfinite().all() for tensor in vars(rotation).values())
    assert rotation.mean.shape == (3, 2, 16) and rotation.feedback.shape == (3, 2, 16, 16)
    assert {layer for layer, _ in seen} == {0, 1, 2}
    empty = find_rotation(decoder, [[3]], 128)
    assert all(tensor.isfinite().all() for tensor in vars(empty).values())
    assert not torch.equal(seen[0][1], seen[1][1])  # K as it is further on
