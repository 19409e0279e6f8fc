"""Decode on a GPU: the inputs of a step, one new token of each sequence, as tables for the kernels.

`Tables` holds a step's tokens, positions, slots, chunks and page tables in one buffer, for one copy
to the GPU. `DecodeAttention` launches attention.cuh over them. Both are allocated once, for the
largest batch, so that addresses in CUDA graphs stay valid.
"""

import itertools
import math
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from billfish.engine.cuda.chunks import BLOCKS, MOST, Chunking
from billfish.engine.cuda.pool import POOLS, Pool
from billfish.engine.runner import Rules
from billfish.engine.sampling import RULE
from billfish.engine.scheduler import Piece, Sequence
from billfish.kernels.jit import Program
from billfish.kernels.launch import Kernel, Loaded
from billfish.models.decoder import Shape

PAGE = 64  # tokens
MOST_GROUP = 8  # query heads that share a KV head: n of mma.m16n8k16
HEAD_DIMS = (64, 128)
TYPES = {torch.float16: "Half", torch.bfloat16: "Bfloat"}
# As in the headers; tests/kernels/test_layouts.py compares.
THREADS = 160  # kTakers warps that multiply, one that fetches
MOST_SMEM = 230400  # kAttendBytes
ROW = 8  # int32 fields of a Chunk
STAGE_TOKENS = {"kv16": 16, "kv8": 32, "kv4": 64}
# Whose decode attention can do RoPE and store K and V. Rotated K (kv4) takes matrices that it has
# no room for.
JOINED = ("kv16", "kv8")


def shared_bytes(kv: str, head_dim: int) -> int:
    """Shared memory of a CTA, as attend_stage.cuh's AttendBlock lays it out."""
    tokens = STAGE_TOKENS[kv]
    stage = tokens * POOLS[kv].record_bytes(head_dim) // PAGE + 16
    fixed = 2 * (head_dim * 20 + 48) + 4 * (head_dim * 32 + 64) + 48
    step = PAGE // tokens
    return fixed + min((MOST_SMEM // BLOCKS[kv] - fixed) // stage, 8) // step * step * stage


def part_floats(head_dim: int) -> int:
    """Of one chunk and KV head in the split-KV workspace: attention.cuh's ChunkParts."""
    return head_dim * 8 + 16


def rows_of(
    lengths: NDArray[np.int32],
    starts: NDArray[np.int32],  # where each sequence's page table begins
    window: int | None,
    chunking: Chunking,
) -> NDArray[np.int32]:  # (chunks, 8): attention.cuh's Chunk
    """All chunks. Those of one sequence differ by one page at most."""
    begin = np.maximum(lengths - window, 0) if window else np.zeros_like(lengths)
    first = begin // PAGE
    pages = -(-lengths // PAGE) - first
    counts = chunking.chunks(pages)
    ends = np.cumsum(counts)
    each = np.empty((len(lengths), ROW), np.int32)  # of a sequence that is one chunk
    columns = np.arange(len(lengths)), starts + first, first * PAGE, pages
    for i, column in enumerate((*columns, ends - counts, counts, begin, lengths)):
        each[:, i] = column
    rows = np.repeat(each, counts, axis=0)
    number = np.arange(len(rows), dtype=np.int32) - rows[:, 4]
    before, after = (n * rows[:, 3] // rows[:, 5] for n in (number, number + 1))
    rows[:, 1] += before
    rows[:, 2] += before * PAGE
    rows[:, 3] = after - before
    rows[:, 4] = number
    return rows


class Tables:
    """One int32 buffer on the GPU, and the same on the host:

    [tokens][positions][slots][number of chunks, offset of their rows, fresh; for each window size]
    [rows that sample, of a step with prompts][sampling rules][rows of chunks][page tables]

    It goes to the GPU through two pinned buffers by turns: when one is filled again, the copy from
    it is done, since the host has read the results of the decode that it was for.
    """

    def __init__(
        self,
        sequences: int,
        most_tokens: int,
        windows: tuple[int | None, ...],
        chunking: Chunking,
        device: torch.device,
    ) -> None:
        self.sequences, self.chunking = sequences, chunking
        self.kinds = list(dict.fromkeys(windows))  # of windows
        widths = dict.fromkeys(("tokens", "positions", "slots"), sequences + -sequences % ROW)
        widths["heads"] = len(self.kinds) * ROW
        widths["last"] = widths["tokens"]
        widths["rules"] = sequences * RULE
        self._fixed = sum(widths.values())
        rows = len(self.kinds) * chunking.most_chunks(sequences) * ROW
        self.most_pages = math.ceil(most_tokens / PAGE)  # of a sequence
        size = self._fixed + rows + sequences * self.most_pages
        pinned = device.type == "cuda"
        places = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._places = itertools.cycle(places)
        self.card = torch.zeros(size, dtype=torch.int32, device=device)
        self.columns: dict[str, Tensor] = {}
        self._numbers: dict[str, NDArray[np.int32]] = {}
        self._flat, at = np.zeros(size, np.int32), 0
        for name, width in widths.items():
            self.columns[name] = self.card[at : at + width]
            self._numbers[name] = self._flat[at : at + width]
            at += width
        # Of the last step: each row's sequence and its number of pages.
        self._last: tuple[list[Sequence], list[int]] = [], []
        self._shape = (-1, 0, 0)  # rows, end of the chunks' rows, end of all

    def fill(
        self,
        pieces: Many[Piece],
        rows: int,
        rules: Rules | None = None,
        fresh: bool = False,
        last: Many[int] = (),
    ) -> None:
        """A row for every token of the pieces, padded to `rows`. Without rules sampling is greedy.
        `fresh`: pieces may have several tokens, which read what this step writes; rules are those
        of rows `last`. Else pieces have one token, and rules may be more: a step's other pieces
        sample, too. `last` goes to the GPU as it is."""
        numbers, places = self._numbers, np.array(last, np.int32)
        numbers["rules"][: rows * RULE] = 0
        if rules:
            given = np.concatenate(rules).reshape(-1, RULE)
            numbers["rules"].reshape(-1, RULE)[places if fresh else slice(len(given))] = given
        numbers["last"][: len(last)] = places
        sequences = [piece.sequence for piece in pieces]
        known = sequences, [len(sequence.pages) for sequence in sequences]
        if fresh:
            parts = [p.sequence.part(p.start, p.start + p.count) for p in pieces]
            tokens = list(itertools.chain.from_iterable(parts))
        else:
            tokens = [p.sequence.token(p.start) for p in pieces]
        numbers["tokens"][: len(tokens)] = tokens
        where = np.array([piece.start for piece in pieces], np.int32)
        if fresh or rows != self._shape[0] or known != self._last or not self._advance(where):
            self._build(pieces, where, rows, fresh)
        self._last = ([], []) if fresh else known
        end, place = self._shape[2], next(self._places)
        place.numpy()[:end] = self._flat[:end]
        self.card[:end].copy_(place[:end], non_blocking=True)

    def column(self, name: str, count: int) -> NDArray[np.int32]:
        """The first rows' numbers of the step, on the host."""
        return self._numbers[name][:count]

    def _advance(self, where: NDArray[np.int32]) -> bool:
        """Increments the last step's tables, of the same sequences in as many pages, if every one
        has one token more in the same page: a fifth of the time of building them."""
        count = len(where)
        positions = self._numbers["positions"][:count]
        if self.kinds != [None] or (where != positions + 1).any() or (where % PAGE == 0).any():
            return False
        positions += 1
        self._numbers["slots"][:count] += 1
        self._flat[self._fixed : self._shape[1]][ROW - 1 :: ROW] += 1  # lengths
        return True

    def _build(self, pieces: Many[Piece], where: NDArray[np.int32], rows: int, fresh: bool) -> None:
        numbers, flat = self._numbers, self._flat
        lists = [piece.sequence.pages for piece in pieces]
        sizes = np.array(list(map(len, lists)), np.int32)
        starts = np.cumsum(sizes, dtype=np.int32) - sizes
        pages = np.fromiter(itertools.chain.from_iterable(lists), np.int32, int(sizes.sum()))
        if fresh:  # all tokens of a piece share its page table
            counts = np.array([piece.count for piece in pieces], np.int32)
            of = np.repeat(np.arange(len(pieces)), counts)
            ends = np.cumsum(counts, dtype=np.int32)
            where = np.arange(len(of), dtype=np.int32) + (where - (ends - counts))[of]
            starts = starts[of]
        count = len(where)
        for name, padding in (("tokens", 0), ("positions", 0), ("slots", -1)):
            numbers[name][count:rows] = padding
        numbers["positions"][:count] = where
        numbers["slots"][:count] = pages[starts + where // PAGE] * PAGE + where % PAGE
        made = [rows_of(where + 1, starts, window, self.chunking) for window in self.kinds]
        at = self._fixed
        pages_at = at + sum(each.size for each in made)
        for i, each in enumerate(made):
            each[:, 1] += pages_at
            numbers["heads"][i * ROW : i * ROW + 3] = len(each), at, fresh
            flat[at : at + each.size] = each.reshape(-1)
            at += each.size
        flat[at : at + len(pages)] = pages
        self._shape = rows, pages_at, at + len(pages)


class HeadNorms(NamedTuple):
    """RMS norms of q and k heads (Qwen3): weights (head_dim,)."""

    q: Tensor
    k: Tensor
    eps: float


class DecodeAttention:
    """attention.cuh over a pool: one launch a layer."""

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        pool: Pool,
        tables: Tables,
        rope: tuple[Tensor, Tensor] | None = None,  # cos, sin (positions, rotary / 2)
    ) -> None:
        """With `rope` it can take what a projection gives, where JOINED has the pool's format."""
        self.shape, self.pool, self.tables = shape, pool, tables
        device = pool.records.device
        self.kernel = Kernel(program(shape, dtype, pool.name)).load(device)
        self.smem = shared_bytes(pool.name, shape.head_dim)
        self.most_chunks = min(tables.most_pages, MOST)  # of a sequence: bounds the grid
        items = tables.chunking.most_chunks(tables.sequences) * shape.kv_heads
        self.parts = torch.empty(
            items * part_floats(shape.head_dim), dtype=torch.float32, device=device
        )
        self.arrived = torch.zeros(
            tables.sequences * shape.kv_heads, dtype=torch.int32, device=device
        )
        self.scale = np.float32(shape.scale * math.log2(math.e))
        self.rope = rope
        if rope is not None:
            self.joined = Kernel(program(shape, dtype, pool.name, True)).load(device)

    def __call__(self, layer: int, q: Tensor, out: Tensor) -> None:
        """q and out are (rows, heads, head_dim); padding rows of out are not written."""
        self._launch(self.kernel, layer, (q.data_ptr(),), out)

    def of_projection(
        self, layer: int, qkv: Tensor, out: Tensor, norms: HeadNorms | None = None
    ) -> None:
        """The same of qkv (rows, (heads + 2 kv_heads) * head_dim), with RoPE; stores K and V. For
        a step that writes no more than the newest token of each sequence."""
        assert self.rope is not None
        cos, sin = self.rope
        numbers = (
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            norms.q.data_ptr() if norms else 0,
            norms.k.data_ptr() if norms else 0,
            2 * cos.shape[1],
            np.float32(norms.eps if norms else 0),
            np.float32(self.pool.limit),
        )
        self._launch(self.joined, layer, numbers, out)

    def _launch(self, kernel: Loaded, layer: int, given: tuple[Any, ...], out: Tensor) -> None:
        shape, tables = self.shape, self.tables
        head = tables.columns["heads"][tables.kinds.index(shape.windows[layer]) * ROW :]
        arguments = (
            self.pool.records[layer].data_ptr(),
            *given,
            out.data_ptr(),
            tables.card.data_ptr(),
            head.data_ptr(),
            self.parts.data_ptr(),
            self.arrived.data_ptr(),
            shape.kv_heads,
            shape.heads // shape.kv_heads,
            self.scale,
        )
        blocks = min(tables.chunking.blocks, len(out) * shape.kv_heads * self.most_chunks)
        kernel.launch(blocks, THREADS, arguments, self.smem, pdl=True)


def program(shape: Shape, dtype: torch.dtype, kv: str, joined: bool = False) -> Program:
    kind = f"billfish::{TYPES[dtype]}, billfish::{kv.capitalize()}, {shape.head_dim}"
    name = "rope_attend" if joined else "attend"
    return Program(Path(__file__).parent / "attention.cuh", f"billfish::{name}<{kind}>")
