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
from billfish.engine.cuda.chunks import Chunking
from billfish.engine.cuda.rows import can_be_rows
from billfish.engine.cuda.runner import GpuRunner
from billfish.engine.cuda.tables import PAGE, ROW, Tables
from billfish.engine.runner import Decoded, last_rows
from billfish.engine.sampling import RULE
from billfish.engine.scheduler import Piece, Sequence

CPU = torch.device("cpu")


def tables_of(windows=(None,)):
    return Tables(64, 1024, windows, Chunking("kv16", 8, 132), CPU)


def as_rows(pieces):
    return [
        Piece(piece.sequence, at, 1, False)
        for piece in pieces
        for at in range(piece.start, piece.start + piece.count)
    ]


class ByRows(Ahead):
    """Draws by the rules that the tables have for each row."""

    taken = 0

    def run(self, pieces, rules=None):
        if rules is None or not can_be_rows(pieces):
            return super().run(pieces, rules)
        self.taken += any(piece.count > 1 for piece in pieces)
        at, found, tables = last_rows(pieces), as_rows(pieces), tables_of()
        tables.fill(
            [Piece(Sequence("", [0] * 99, 99, pages=[0]), 0, len(found), 0)], 64, rules, True, at
        )
        logits = self.decoder.logits(self.hidden(found))
        each = tables.columns["rules"].view(-1, RULE).numpy()[: len(found)]
        tokens, peaks = list(map(drawn, logits, each)), logits.amax(-1).view(torch.int32)
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
    assert can_be_rows([piece(0, 256)]) and not can_be_rows([piece(0, 257)])
    assert can_be_rows([decode] * 200 + [piece(0, 56)])
    assert not can_be_rows([decode] * 200 + [chunk] * 2)
    assert can_be_rows([piece(960, 64)]) and not can_be_rows([piece(961, 64)])
    monkeypatch.setattr(rows, "MOST_READ", 10**9)
    assert can_be_rows([piece(961, 64)])


def test_rules_of_rows():
    """Of those that sample; other rows draw what nobody reads."""
    first, second = np.arange(1, RULE + 1, dtype=np.int32), np.full(RULE, 7, np.int32)
    pieces = [
        Piece(Sequence("", [1] * 9, 99, pages=[0]), start, count, samples)
        for start, count, samples in ((5, 1, True), (0, 2, False), (0, 3, True))
    ]
    tables = tables_of()
    tables.fill([pieces[0]] * 9, 16, [second] * 9)  # of a step before: none of these is left
    tables.fill(pieces, 8, [first, second], True, last_rows(pieces))
    wanted = torch.zeros(8, RULE, dtype=torch.int32)
    wanted[0], wanted[5] = torch.from_numpy(first), torch.from_numpy(second)
    assert torch.equal(tables.columns["rules"].view(-1, RULE)[:8], wanted)
    assert tables.columns["last"][:2].tolist() == [0, 5]


def read(tables, rows):
    """The step that tables describe: columns, and each window's chunks with their pages."""
    card, heads = tables.card.numpy(), tables.columns["heads"].view(-1, ROW).tolist()
    chunks = []
    for count, at, *_ in heads[: len(tables.kinds)]:
        for one in card[at : at + count * ROW].reshape(-1, ROW).tolist():
            table = card[one[1] : one[1] + one[3]].tolist()
            chunks.append([one[0], table, *one[2:]])
    names = ("tokens", "positions", "slots")
    return [tables.columns[name][:rows].tolist() for name in names], chunks


@pytest.mark.parametrize("windows", [(None,), (None, 128)], ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_tables_of_rows_are_those_of_a_decode_for_each(windows, seed):
    draw = np.random.default_rng(seed)
    pages, pieces = draw.permutation(400).tolist(), []
    for start, count in zip(draw.integers(0, 900, 5), draw.integers(1, 13, 5), strict=True):
        held = [pages.pop() for _ in range(-(-(start + count) // PAGE))]
        text = draw.integers(-9, 999, start + count).tolist()
        edge = int(draw.integers(1, start + count + 1))
        one = Sequence("", text[:edge], 1024, output=text[edge:], pages=held)
        pieces.append(Piece(one, int(start), int(count), True))
    count = sum(piece.count for piece in pieces)
    together, each = tables_of(windows), tables_of(windows)
    together.fill(pieces, 64, fresh=True)
    each.fill(as_rows(pieces), 64)
    found = read(together, 64)
    assert found == read(each, 64)
    wanted = [
        (p.sequence.tokens[at], at, p.sequence.pages[at // PAGE] * PAGE + at % PAGE)
        for p in pieces
        for at in range(p.start, p.start + p.count)
    ]
    columns = np.array(found[0]).T.tolist()
    assert columns == [*map(list, wanted), *[[0, 0, -1]] * (64 - count)]


def test_rules_reach_the_gpu_in_a_first_step_without_decodes():
    rule = np.arange(1, RULE + 1, dtype=np.int32)
    tables = tables_of()
    tables.fill([], 0, [rule, -rule], last=[299, 399])
    assert tables.columns["rules"][: 2 * RULE].tolist() == [*rule, *-rule]
    assert tables.columns["last"][:2].tolist() == [299, 399]


class Graph:
    def __init__(self, taken, key):
        self.taken, self.key = taken, key

    def replay(self):
        self.taken.append(self.key)


class Filled:
    """Notes what the tables are filled for."""

    def fill(self, pieces, rows, rules, fresh, last):
        self.last = sum(piece.count for piece in pieces), rows, fresh, last


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
        last = [count - 1] if fresh else None
        given = [piece(0, 1), piece(0, count - 1)] if fresh else [piece(0, 1)] * count
        assert len(runner._decode(given, None, last)) == count
        assert taken.pop() == key and not taken
        rows = key[-2] if key[0] != "step" else count
        assert runner.tables.last == (count, rows, fresh, last or ())
