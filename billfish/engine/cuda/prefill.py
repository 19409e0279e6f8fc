"""Attention of prefill chunks, and steps with a few of them as CUDA graphs.

A chunk attends to its sequence from the first token on: FlashAttention, over K and V gathered from
the pages. Its operator reads on the GPU where each chunk's rows and keys begin, so one graph of a
whole step serves all steps of as many rows, with up to MOST_CHUNKS chunks:

    rows   [decodes][chunk][chunk] ... [padding]     the padding is one more chunk, without keys:
    keys            [chunk][chunk] ...               FlashAttention gives zeros for it

Steps with more chunks, or more keys, are graphs between attention and attention (segments.py).
"""

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from billfish.engine.cuda.fused import Fused
from billfish.engine.cuda.segments import Attend, Space, padded, padding
from billfish.engine.cuda.tables import PAGE
from billfish.engine.scheduler import Piece
from billfish.models.decoder import Shape

Numbers = NDArray[np.int32]
# Of a graph. FlashAttention launches blocks for every chunk that there may be; beside those without
# work, long ones met on an SM: 200 tokens behind 4000 others took 14 ms a step instead of 12. With
# 16 chunks instead of 8 other steps take as long within 2 %, and twelve prompts beside 16 decodes
# take the host 1.2 ms instead of 2.8.
MOST_CHUNKS, MOST_KEYS = 16, 2048
EDGES = MOST_CHUNKS + 2  # with padding's and the end
FIXED = 2 * EDGES + MOST_KEYS  # numbers of every graph's inputs


def slots_of(piece: Piece) -> Numbers:
    """Slots of all tokens of its sequence up to the piece's last."""
    firsts = np.array(piece.sequence.pages, np.int32) * PAGE
    found: Numbers = np.add.outer(firsts, np.arange(PAGE, dtype=np.int32)).reshape(-1)
    return found[: piece.start + piece.count]


def edges(pieces: Many[Piece], first: int = 0) -> tuple[list[int], list[int]]:
    """Where each piece's rows begin, from `first` on, and its keys; and the ends of the last."""
    rows = itertools.accumulate((piece.count for piece in pieces), initial=first)
    keys = itertools.accumulate((piece.start + piece.count for piece in pieces), initial=0)
    return list(rows), list(keys)


class Prefill:
    """Chunks given by tensors of int32: where their queries and keys begin, and the keys' slots."""

    def __init__(
        self,
        kernels: Fused,
        shape: Shape,
        dtype: torch.dtype,
        queries: Tensor,
        keys: Tensor,
        slots: Tensor,
        most: tuple[int, int],  # queries and keys of a chunk
    ) -> None:
        self.kernels, self.shape, self.most = kernels, shape, most
        self.queries, self.keys, self.slots = queries, keys, slots
        size = (len(slots), shape.kv_heads, shape.head_dim)
        self.k, self.v = torch.empty((2, *size), dtype=dtype, device=slots.device)

    @classmethod
    def of(
        cls,
        kernels: Fused,
        shape: Shape,
        dtype: torch.dtype,
        pieces: Many[Piece],
        slots: list[Numbers],  # slots_of each
        upload: Callable[[Numbers], Tensor],
    ) -> "Prefill":
        both = np.array(edges(pieces), np.int32)
        flat, edge = upload(np.concatenate([*both, *slots])), len(pieces) + 1
        tables = flat[:edge], flat[edge : 2 * edge], flat[2 * edge :]
        most = max(p.count for p in pieces), max(p.start + p.count for p in pieces)
        return cls(kernels, shape, dtype, *tables, most)

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        self.kernels.gather(layer, self.slots, self.keys[-1:], self.k, self.v)
        window = self.shape.windows[layer]
        # The operator behind torch.nn.attention.varlen, whose arguments change from release to
        # release. Its causal mask is aligned to the last token, as a chunk needs it.
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q,
            self.k,
            self.v,
            self.queries,
            self.keys,
            *self.most,
            0.0,
            True,
            False,
            scale=self.shape.scale,
            window_size_left=None if window is None else window - 1,
            window_size_right=None if window is None else 0,
        )[0]
        return out


class Steps:
    """A graph of a whole step for each number of rows. All share their inputs, one buffer for one
    copy to the GPU:

    [where chunks' rows begin][where their keys begin][slots of keys][tokens][positions][slots]

    The copy is in the stream of the graphs, so it waits until the step before has read the buffer.
    """

    def __init__(
        self,
        forward: Callable[[Tensor, Attend], Tensor],  # of (token, position, slot) of each row
        decodes: Attend,
        prefill: Callable[[Tensor, Tensor, Tensor, tuple[int, int]], Prefill],
        numbers: Many[int],
        device: torch.device,
    ) -> None:
        most = max(numbers)
        self.flat = torch.zeros(FIXED + 3 * most, dtype=torch.int32, device=device)
        queries, keys = self.flat[: 2 * EDGES].view(2, EDGES)
        slots = self.flat[2 * EDGES : FIXED]
        # Kept: graphs know the addresses of its K and V.
        self.chunks = chunks = prefill(queries, keys, slots, (most, MOST_KEYS))
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()

        def attend(layer: int, q: Tensor, space: Space) -> None:
            # Of one query FlashAttention would take the heads of a group for queries.
            chunks.most = max(len(q), 2), MOST_KEYS
            space.mixed = chunks(layer, q)
            decodes(layer, q, space)

        for rows in numbers:
            columns = self.columns(rows)
            columns.copy_(padding(rows, device))
            queries[1:] = rows  # one chunk without keys
            forward(columns, attend)  # loads kernels: a capture cannot
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                found = forward(columns, attend)
            self.graphs[rows] = graph, found

    def columns(self, rows: int) -> Tensor:
        """Tokens, positions and slots of a graph of so many rows."""
        return self.flat[FIXED : FIXED + 3 * rows].view(3, rows)

    def size(self, count: int, chunks: Many[Piece]) -> int | None:
        """The next size with a graph, if it has room for these chunks."""
        if len(chunks) > MOST_CHUNKS or sum(p.start + p.count for p in chunks) > MOST_KEYS:
            return None
        return min((rows for rows in self.graphs if rows >= count), default=None)

    def run(
        self,
        rows: int,
        pinned: Callable[[Numbers], Tensor],  # a copy in memory that the GPU reads
        columns: Numbers,
        single: int,
        chunks: Many[Piece],
        slots: list[Numbers],  # slots_of each chunk
    ) -> Tensor:
        """Hidden states of `single` decodes, which the tables describe, and of chunks; as
        Segments.run."""
        queries, keys = edges(chunks, single)
        flat, rest = np.zeros(FIXED + 3 * rows, np.int32), EDGES - len(queries)
        flat[: 2 * EDGES] = [*queries, *[rows] * rest, *keys, *[keys[-1]] * rest]
        if slots:
            np.concatenate(slots, out=flat[2 * EDGES : 2 * EDGES + keys[-1]])
        flat[FIXED:] = padded(columns, rows).reshape(-1)
        self.flat[: len(flat)].copy_(pinned(flat), non_blocking=True)
        graph, found = self.graphs[rows]
        graph.replay()
        return found[: columns.shape[1]]
