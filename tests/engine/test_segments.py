"""Graphs of what lies between attention, on the CPU: graphs that record PyTorch's operators with
the tensors that they were called with, as CUDA's record launches with addresses."""

import contextlib

import numpy as np
import pytest
import torch
from test_norm_input import runner_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from billfish.engine.cuda import prefill, segments
from billfish.engine.cuda.segments import Segments, sizes
from billfish.engine.scheduler import Piece, Sequence


class Recorded(TorchDispatchMode):
    """Runs every operator, and again in replay(), into the memory of its first results."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, given=(), named=None):
        made = function(*given, **(named or {}))
        self.calls.append((function, given, named or {}, made))
        return made

    def replay(self):
        for function, given, named, made in self.calls:
            again = function(*given, **named)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def graphs(monkeypatch):
    @contextlib.contextmanager
    def capture(graph, pool):
        with graph:
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


@pytest.fixture
def runner():
    return runner_on_cpu()


def attend(layer, q, space):
    """Of another kind than rows': each sees those before it."""
    space.mixed.copy_((q + layer).cumsum(0).sin())


def padded(count, most=40):
    chance = np.random.default_rng(count)
    return np.stack([chance.integers(0, most, count), np.arange(count), np.arange(count)])


@torch.inference_mode()
def test_steps_of_all_sizes_give_what_they_give_without_graphs(runner, graphs):
    made = Segments(runner.between, runner.space(16), [16, 8])
    assert sorted(made.graphs) == [8, 16] and all(len(each) == 4 for each in made.graphs.values())
    kernels = runner.fused.norms
    for count in (3, 16, 8, 9, 1, 12):
        columns = padded(count)
        found = made.run(made.size(count), torch.from_numpy, columns, attend).clone()
        assert runner.fused.norms == kernels  # nothing was launched but graphs and attention
        wanted = runner._forward(*torch.from_numpy(columns), attend)
        kernels = runner.fused.norms
        torch.testing.assert_close(found, wanted)
        last = -(-count // 8) * 8 - count
        assert (made.columns(count + last)[2, count:] == segments.PADDING[2]).all()
    assert made.size(17) is None and made.size(9) == 16


@torch.inference_mode()
def test_a_graph_lost_or_in_the_wrong_place_shows(runner, graphs):
    made = Segments(runner.between, runner.space(8), [8])
    wanted = made.run(8, torch.from_numpy, padded(5), attend).clone()
    parts = made.graphs[8]
    made.graphs[8] = [parts[0], parts[2], parts[1], parts[3]]
    assert not torch.allclose(made.run(8, torch.from_numpy, padded(5), attend), wanted)


class Chunks:
    """Attention of prefill chunks by the tables that FlashAttention reads: a row sees those of its
    chunk up to itself, the number of its keys and the slot of their first."""

    def __init__(self, queries, keys, slots, most):
        self.queries, self.keys, self.slots, self.most = queries, keys, slots, most

    def __call__(self, layer, q):
        rows = torch.arange(len(q))
        chunk = (rows[:, None] >= self.queries[None]).sum(1) - 1  # -1: a decode
        seen = (chunk[:, None] == chunk[None]) & (rows[:, None] >= rows[None])
        count = torch.diff(self.keys)[chunk.clamp(min=0, max=prefill.MOST_CHUNKS)]
        first = self.slots[self.keys[chunk.clamp(min=0)].clamp(max=len(self.slots) - 1).long()]
        mixed = (seen.to(q.dtype) @ q.flatten(1)).view_as(q).sin()
        return (mixed + (count + first)[:, None, None]) * (count > 0)[:, None, None]


def decodes(layer, q, space):
    """Of the first two rows; others are the chunks'."""
    space.mixed[:2] = q[:2].cos() + layer


@torch.inference_mode()
def test_whole_steps_in_one_graph(runner, graphs):
    """Against the same step without a graph, by tables of just its size."""

    def forward(columns, attend):
        return runner._forward(*columns, attend)

    made = prefill.Steps(forward, decodes, Chunks, [16, 8], torch.device("cpu"))
    assert sorted(made.graphs) == [8, 16]
    kernels = runner.fused.norms
    for given in ([(0, 3)], [(4, 2), (0, 3)], [(0, 6), (9, 8)], [(0, 1)] * 8, []):
        chunks = [
            Piece(Sequence(str(i), list(range(start + count)), 99, pages=[i + 3]), start, count, 0)
            for i, (start, count) in enumerate(given)
        ]
        columns = padded(2 + sum(piece.count for piece in chunks))
        rows = made.size(columns.shape[1], chunks)
        assert rows == (8 if columns.shape[1] <= 8 else 16)
        own = [prefill.slots_of(piece) for piece in chunks]
        found = made.run(rows, torch.from_numpy, columns, 2, chunks, own).clone()
        assert runner.fused.norms == kernels  # nothing was launched but the graph
        queries, keys = map(torch.tensor, prefill.edges(chunks, 2))
        slots = torch.tensor(
            [
                piece.sequence.pages[0] * 64 + i
                for piece in chunks
                for i in range(piece.start + piece.count)
            ]
            + [0]
        )
        exact = Chunks(queries, keys, slots, 0)

        def attend(layer, q, space, exact=exact, chunks=chunks):
            if chunks:
                space.mixed = exact(layer, q)
            decodes(layer, q, space)

        wanted = runner._forward(*torch.from_numpy(columns), attend)
        kernels = runner.fused.norms
        torch.testing.assert_close(found, wanted)
    assert made.size(17, []) is None
    many = [Piece(Sequence("x", [1], 9, pages=[0]), 0, 1, False)]
    assert made.size(9, many * prefill.MOST_CHUNKS) == 16
    assert made.size(9, many * (prefill.MOST_CHUNKS + 1)) is None
    for start, rows in ((prefill.MOST_KEYS - 9, 16), (prefill.MOST_KEYS - 8, None)):
        assert made.size(16, [Piece(Sequence("x", [], 9999, pages=[]), start, 9, False)]) == rows


def test_sizes():
    assert sizes(10**6)[0] == segments.MOST and sizes(10**6)[-1] == 32
    assert sizes(400) == [400, 384, 320, 256, 224, 192, 160, 128, 96, 64, 32]
    assert sizes(20) == [20] and sizes(32) == [32]
    for count in range(129, 1025):
        rows = min(size for size in sizes(4096) if size >= count)
        assert rows - count < count / 4
