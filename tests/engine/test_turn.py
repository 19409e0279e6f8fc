"""kv4's turn of K: scores stay what they are, and coding does less harm to them."""

import pytest
import torch
from tiny import write_checkpoint

from billfish.engine.attention import Batch, PagedAttention
from billfish.engine.cache import Kv4, Kv4Plain, Room
from billfish.engine.turn import Moments, Turn, calibrate, hadamard, positions
from billfish.errors import UserError
from billfish.models.decoder import Decoder, Shape
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


def turn_of(shape):
    moments = []
    for layer in range(LAYERS):
        moments.append(Moments(shape, CPU))
        moments[-1].attend(*draw(256, shape.head_dim, layer))
    return Turn.of(moments)


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
def test_scores_differ_by_the_same_for_all_keys(head_dim):
    turn = turn_of(shape_of(head_dim))
    q, k, _ = draw(20, head_dim, 7)
    turned_q, turned_k = turn.queries(1, q), turn.keys(1, k)
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
    exact = Moments(shape, CPU).attend(q, k, v)
    for kind in (Kv4, Kv4Plain):
        made = kind(Room(LAYERS, 4, 64, KV_HEADS, head_dim, torch.float32, CPU))
        if kind is Kv4:
            made.turn = turn_of(shape)
        found = PagedAttention(made, shape.scale, shape.windows)(0, q, k, v, batch)
        off[kind] = float((found - exact).norm() / exact.norm())
    assert off[Kv4] < 0.7 * off[Kv4Plain], off


def test_hadamard():
    for size in (64, 96, 128):
        matrix = hadamard(size, torch.zeros(1, dtype=torch.float64))
        assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    assert (hadamard(64, torch.zeros(1))[0] == 0.125).all()


def test_positions_rise_and_reach_far():
    places = positions(512, 8192, 3)
    assert len(places) == 512 and (places.diff() > 0).all()
    assert places[0] == 0 and 4000 < places[-1] < 8192 + 512
    assert torch.equal(positions(512, 8192, 3), places)
    assert positions(40, 64, 0).max() < 128  # a short context


def test_stored_and_read_again():
    shape = shape_of(64)
    turn = turn_of(shape)
    again = Turn.from_tensors(turn.tensors(), shape)
    assert torch.equal(again.to_keys, turn.to_keys)
    assert torch.allclose(again.to_queries, turn.to_queries, rtol=1e-3, atol=1e-5)
    with pytest.raises(UserError, match="Calibrate again"):
        Turn.from_tensors(turn.tensors(), shape_of(128))


def test_a_model_is_calibrated(tmp_path):
    model, _ = load(write_checkpoint(tmp_path / "model"), torch.float32)
    decoder = Decoder.of(model)
    turn = calibrate(decoder, [list(range(2, 90)), list(range(5, 100))])
    assert turn.to_keys.isfinite().all() and turn.to_queries.isfinite().all()
    assert turn.mean.shape == (3, 2, 16)
