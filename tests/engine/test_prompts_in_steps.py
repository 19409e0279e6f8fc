"""What the host computes for a step with prompts, by the GPU's runner on a CPU: against the same in
plain loops."""

import itertools

import numpy as np
import pytest
import torch
from test_norm_input import runner_on_cpu

from billfish.engine.cuda import prefill
from billfish.engine.cuda.chunks import Chunking
from billfish.engine.cuda.prefill import EDGES, FIXED, MOST_KEYS
from billfish.engine.cuda.tables import PAGE, Tables
from billfish.engine.scheduler import Piece, Sequence

CPU = torch.device("cpu")


def pieces_of(seed, decodes, chunks):
    """Pieces of one token, then chunks, in shuffled pages; some of text that a model wrote."""
    draw = np.random.default_rng(seed)
    pages, pieces = draw.permutation(300).tolist(), []
    starts = draw.integers(0, 300, decodes + chunks).tolist()
    counts = [1] * decodes + draw.integers(2, 90, chunks).tolist()
    for start, count in zip(starts, counts, strict=True):
        end = start + count
        held = [pages.pop() for _ in range(-(-end // PAGE))]
        text, edge = draw.integers(-9, 999, end).tolist(), int(draw.integers(1, end + 1))
        one = Sequence("", text[:edge], 2048, output=text[edge:], pages=held)
        pieces.append(Piece(one, start, count, bool(draw.integers(0, 4))))
    return pieces


def slot(piece, at):
    return piece.sequence.pages[at // PAGE] * PAGE + at % PAGE


def columns_of(pieces):
    """(token, position, slot) of each row."""
    return [
        [piece.sequence.tokens[at], at, slot(piece, at)]
        for piece in pieces
        for at in range(piece.start, piece.start + piece.count)
    ]


@pytest.fixture
def runner():
    """Without graphs; hidden states are the rows' numbers, logits their negatives."""
    made = runner_on_cpu()
    made.by_rows, made.joins, made.steps, made.segments = False, False, None, None
    made.tables = Tables(64, 2048, (None,), Chunking("kv16", 8, 132), CPU)
    made.found, made._upload = torch.zeros(64, 2, dtype=torch.int32), torch.from_numpy
    made.decoder.head = torch.neg

    def forward(tokens, positions, slots, attend):
        made.given = torch.stack((tokens, positions, slots), 1).tolist()
        return torch.arange(len(tokens))[:, None]

    made._forward = forward
    return made


SIZES = [(0, 1), (16, 1), (5, 3), (3, 0), (0, 8)]


@pytest.mark.parametrize(("decodes", "chunks"), SIZES)
def test_rows_of_a_step_and_those_that_sample(runner, decodes, chunks):
    pieces = pieces_of(decodes + chunks, decodes, chunks)
    pieces[-1] = Piece(pieces[-1].sequence, pieces[-1].start, pieces[-1].count, False)
    decoded = runner.run(pieces)
    assert runner.given == columns_of(pieces)
    ends = itertools.accumulate(piece.count for piece in pieces)
    last = [end - 1 for end, piece in zip(ends, pieces, strict=True) if piece.samples]
    assert decoded.logits[:, 0].tolist() == [-row for row in last]


@pytest.mark.parametrize(("decodes", "chunks"), SIZES)
def test_keys_of_chunks(runner, monkeypatch, decodes, chunks):
    made, inner = [], prefill.Prefill.of.__func__
    monkeypatch.setattr(
        prefill.Prefill, "of", classmethod(lambda *args: made.append(inner(*args)) or made[-1])
    )
    pieces = pieces_of(decodes + chunks, decodes, chunks)
    runner.hidden(pieces)
    assert len(made) == bool(chunks)
    for one in made:
        given = pieces[decodes:]
        lengths = [piece.start + piece.count for piece in given]
        assert one.queries.tolist() == np.cumsum([0, *(p.count for p in given)]).tolist()
        assert one.keys.tolist() == np.cumsum([0, *lengths]).tolist()
        wanted = [slot(p, at) for p, end in zip(given, lengths, strict=True) for at in range(end)]
        assert one.slots.tolist() == wanted
        assert one.most == (max(piece.count for piece in given), max(lengths))


class Graph:
    def replay(self):
        pass


@pytest.mark.parametrize(("decodes", "chunks"), SIZES)
def test_inputs_of_a_graph_of_the_whole_step(runner, decodes, chunks):
    pieces = pieces_of(decodes + chunks, decodes, chunks)
    count, keys = sum(p.count for p in pieces), [p.start + p.count for p in pieces[decodes:]]
    rows = count + 7
    steps = runner.steps = object.__new__(prefill.Steps)
    steps.flat = torch.full((FIXED + 3 * (rows + 9),), -5, dtype=torch.int32)
    steps.graphs = {rows: (Graph(), torch.arange(rows)[:, None])}
    runner._pinned = torch.from_numpy
    if sum(keys) > MOST_KEYS:
        assert steps.size(count, pieces[decodes:]) is None
        return
    assert len(runner.hidden(pieces)) == count
    queries = np.cumsum([decodes, *(piece.count for piece in pieces[decodes:])]).tolist()
    queries += [rows] * (EDGES - len(queries))
    edges = np.cumsum([0, *keys]).tolist()
    edges += edges[-1:] * (EDGES - len(edges))
    assert steps.flat[: 2 * EDGES].tolist() == queries + edges
    slots = [slot(p, at) for p in pieces[decodes:] for at in range(p.start + p.count)]
    assert steps.flat[2 * EDGES :][: len(slots)].tolist() == slots
    wanted = columns_of(pieces) + [[0, 0, -1]] * 7
    assert steps.columns(rows).T.tolist() == wanted
    assert (steps.flat[FIXED + 3 * rows :] == -5).all()


def test_rows_that_sample_of_a_step_by_rows(runner):
    pieces = pieces_of(1, 3, 1)
    count = sum(piece.count for piece in pieces)
    pieces[1:3] = [Piece(p.sequence, p.start, 1, i > 1) for i, p in enumerate(pieces[1:3], 1)]
    runner.by_rows, runner.graphs = True, {}
    runner.tables = Tables(128, 2048, (None,), Chunking("kv16", 8, 132), CPU)
    runner.found = torch.arange(256, dtype=torch.int32).view(128, 2)
    runner._step = lambda rows, apart: torch.arange(rows)[:, None]
    decoded = runner.run(pieces)
    ends = itertools.accumulate(piece.count for piece in pieces)
    last = [end - 1 for end, piece in zip(ends, pieces, strict=True) if piece.samples]
    assert len(last) > 1 and last[-1] < count
    assert decoded.logits[:, 0].tolist() == last
    assert runner.found[: len(last), 0].tolist() == [2 * row for row in last]
