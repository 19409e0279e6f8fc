"""Prompts of small steps as decodes, a row for every token: the same texts. On a CPU, with a runner
that does what the GPU's does."""

import numpy as np
import pytest
import torch
from ahead import Ahead, drawn
from test_ahead import facts, requests
from tiny import write_checkpoint

from billfish import LLM
from billfish.engine.cuda import rows
from billfish.engine.cuda.rows import as_rows, rules_of_rows
from billfish.engine.cuda.runner import GpuRunner
from billfish.engine.runner import Decoded, last_rows
from billfish.engine.sampling import RULE
from billfish.engine.scheduler import Piece, Sequence


class ByRows(Ahead):
    taken = 0

    def run(self, pieces, rules=None):
        found = as_rows(pieces)
        if found is None or rules is None:
            return super().run(pieces, rules)
        self.taken += any(piece.count > 1 for piece in pieces)
        logits = self.decoder.logits(self.hidden(found))
        tokens = [drawn(*each) for each in zip(logits, rules_of_rows(rules, pieces), strict=True)]
        at, peaks = last_rows(pieces), logits.amax(-1).view(torch.int32)
        whole = torch.stack((torch.tensor(tokens, dtype=torch.int32), peaks), 1)
        self.found = whole[at]
        return Decoded(logits[at], self.found.clone(), Now())


class Now:
    def synchronize(self):
        pass


@pytest.mark.parametrize("kv", ["kv16", "kv8"])
def test_texts_are_the_same(kv, tmp_path):
    path = write_checkpoint(tmp_path / "model")
    prompts, params = map(list, zip(*requests(40, 3, plain=True), strict=True))
    with LLM(path, dtype="float32", kv=kv) as llm:
        wanted = [facts(output) for output in llm.generate(prompts, params)]
    with LLM(path, dtype="float32", kv=kv, max_batched_tokens=24, max_num_seqs=20) as llm:
        runner = llm.engine.runner = ByRows(llm.engine.runner)
        assert [facts(output) for output in llm.generate(prompts, params)] == wanted
    assert runner.taken > 10 and runner.promised > 100


def piece(start, count, samples=True):
    return Piece(Sequence("", [0] * 9999, 9999), start, count, samples)


def test_which_steps_are_rows(monkeypatch):
    chunk, decode = piece(30, 40), piece(9000, 1)
    made = as_rows([decode, chunk])
    assert [(each.sequence, each.start, each.count) for each in made] == [
        (decode.sequence, 9000, 1),
        *((chunk.sequence, at, 1) for at in range(30, 70)),
    ]
    assert as_rows([piece(0, 256)]) and as_rows([piece(0, 257)]) is None
    assert (
        as_rows([decode] * 200 + [piece(0, 56)]) and as_rows([decode] * 200 + [chunk] * 2) is None
    )
    assert as_rows([piece(960, 64)]) and as_rows([piece(961, 64)]) is None
    monkeypatch.setattr(rows, "MOST_READ", 10**9)
    assert as_rows([piece(961, 64)])


def test_rules_of_rows():
    first, second = np.arange(1, RULE + 1, dtype=np.int32), np.full(RULE, 7, np.int32)
    made = rules_of_rows([first, second], [piece(5, 1), piece(0, 2, False), piece(0, 3)])
    wanted = np.zeros((6, RULE), np.int32)
    wanted[0], wanted[5] = first, second
    assert np.array_equal(np.stack(made), wanted)


class Graph:
    def __init__(self, taken, key):
        self.taken, self.key = taken, key

    def replay(self):
        self.taken.append(self.key)


class Filled:
    """Notes what the tables are filled for."""

    def fill(self, pieces, rows, rules, fresh):
        self.last = len(pieces), rows, fresh


@pytest.mark.parametrize("joins", [True, False])
def test_which_graph_a_step_takes(joins):
    """Rows of prompts read keys of their own step: where attention of decodes stores K and V
    itself, they take graphs that store them before."""
    runner, taken = object.__new__(GpuRunner), []
    runner.joins, runner.tables = joins, Filled()
    runner._step = lambda rows, apart: taken.append(("step", rows, apart)) or torch.zeros(rows, 1)
    sizes = {True: (2, 4, 64), False: (1, 4, 16)} if joins else {True: (1, 4, 16, 64)}
    runner.graphs = {
        (rows, apart): (Graph(taken, (rows, apart)), torch.zeros(rows, 1))
        for apart, each in sizes.items()
        for rows in each
    }
    apart = not joins
    for count, fresh, key in (
        (1, False, (1, apart)),
        (3, False, (4, apart)),
        (16, False, (16, apart)),
        (17, False, ("step", 17, False) if joins else (64, True)),
        (3, True, (4, True)),
        (60, True, (64, True)),
        (65, True, ("step", 65, True)),
    ):
        assert len(runner._decode([None] * count, None, fresh)) == count
        assert taken.pop() == key and not taken
        assert runner.tables.last == (count, key[-2] if key[0] != "step" else count, fresh)
