"""Graphs of what lies between attention, on the CPU: graphs that record PyTorch's operators with
the tensors that they were called with, as CUDA's record launches with addresses."""

import contextlib

import numpy as np
import pytest
import torch
from test_norm_input import runner_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from billfish.engine.cuda import segments
from billfish.engine.cuda.segments import Segments, sizes


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


def attend(layer, q, out):
    """Of another kind than rows': each sees those before it."""
    out.copy_((q + layer).cumsum(0).sin())


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
        assert (made.columns[2, count : count + last] == segments.PADDING[2]).all()
    assert made.size(17) is None and made.size(9) == 16


@torch.inference_mode()
def test_a_graph_lost_or_in_the_wrong_place_shows(runner, graphs):
    made = Segments(runner.between, runner.space(8), [8])
    wanted = made.run(8, torch.from_numpy, padded(5), attend).clone()
    parts = made.graphs[8]
    made.graphs[8] = [parts[0], parts[2], parts[1], parts[3]]
    assert not torch.allclose(made.run(8, torch.from_numpy, padded(5), attend), wanted)


def test_sizes():
    assert sizes(10**6)[0] == segments.MOST and sizes(10**6)[-1] == 32
    assert sizes(400) == [400, 384, 320, 256, 224, 192, 160, 128, 96, 64, 32]
    assert sizes(20) == [20] and sizes(32) == [32]
    for count in range(129, 1025):
        rows = min(size for size in sizes(4096) if size >= count)
        assert rows - count < count / 4
