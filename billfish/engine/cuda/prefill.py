"""Attention of prefill chunks, and steps with a few of them as CUDA graphs.

A chunk attends to its sequence from the first token on: FlashAttention, over K and V gathered from
the pages. Its operator reads on the GPU where each chunk's rows and keys begin, so one graph of a
whole step serves all steps of as many rows, with up to MOST_CHUNKS chunks:

    rows   [decodes][chunk][chunk] ... [padding]     the padding is one more chunk, without keys:
    keys            [chunk][chunk] ...               FlashAttention gives zeros for it

Steps with more chunks, or more keys, are graphs between attention and attention (segments.py).
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from billfish.engine.cuda.fused import Fused
from billfish.engine.cuda.segments import Attend, Space, padded, padding
from billfish.engine.cuda.tables import PAGE
from billfish.engine.scheduler import Piece
from billfish.models.decoder import Shape

Numbers = NDArray[Any]
Upload = Callable[[Numbers], Tensor]
# Of a graph. FlashAttention launches blocks for every chunk that there may be; beside those without
# work, long ones met on an SM: 200 tokens behind 4000 others took 14 ms a step instead of 12.
MOST_CHUNKS, MOST_KEYS = 8, 2048


def slots_of(piece: Piece, first: int) -> Numbers:
    """Slots of tokens [first, end of the piece) of its sequence."""
    place = np.arange(first, piece.start + piece.count)
    return np.array(piece.sequence.pages)[place // PAGE] * PAGE + place % PAGE


def edges(pieces: Many[Piece], first: int = 0) -> tuple[Numbers, Numbers]:
    """Where each piece's rows begin, from `first` on, and its keys; and the ends of the last."""
    counts, keys = [p.count for p in pieces], [p.start + p.count for p in pieces]
    return first + np.cumsum([0, *counts]), np.cumsum([0, *keys])


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
        cls, kernels: Fused, shape: Shape, dtype: torch.dtype, pieces: Many[Piece], upload: Upload
    ) -> "Prefill":
        both, slots = edges(pieces), [slots_of(piece, 0) for piece in pieces]
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
    """A graph of a whole step for each number of rows; all share their inputs."""

    def __init__(
        self,
        forward: Callable[[Tensor, Attend], Tensor],  # of (token, position, slot) of each row
        decodes: Attend,
        prefill: Callable[[Tensor, Tensor, Tensor, tuple[int, int]], Prefill],
        numbers: Many[int],
        device: torch.device,
    ) -> None:
        self.columns = padding(max(numbers), device)
        self.edges = torch.zeros(2, MOST_CHUNKS + 2, dtype=torch.int32, device=device)
        self.slots = torch.zeros(MOST_KEYS, dtype=torch.int32, device=device)
        queries, keys = self.edges
        # Kept: graphs know the addresses of its K and V.
        self.chunks = chunks = prefill(queries, keys, self.slots, (max(numbers), MOST_KEYS))
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()

        def attend(layer: int, q: Tensor, space: Space) -> None:
            # Of one query FlashAttention would take the heads of a group for queries.
            chunks.most = max(len(q), 2), MOST_KEYS
            space.mixed = chunks(layer, q)
            decodes(layer, q, space)

        for rows in numbers:
            self.edges[0, 1:] = rows  # one chunk without keys
            forward(self.columns[:, :rows], attend)  # loads kernels: a capture cannot
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                found = forward(self.columns[:, :rows], attend)
            self.graphs[rows] = graph, found

    def size(self, count: int, chunks: Many[Piece]) -> int | None:
        """The next size with a graph, if it has room for these chunks."""
        if len(chunks) > MOST_CHUNKS or sum(p.start + p.count for p in chunks) > MOST_KEYS:
            return None
        return min((rows for rows in self.graphs if rows >= count), default=None)

    def run(
        self, rows: int, upload: Upload, columns: Numbers, single: int, chunks: Many[Piece]
    ) -> Tensor:
        """Hidden states of `single` decodes, which the tables describe, and of chunks; as
        Segments.run."""
        queries, keys = edges(chunks, single)
        slots = np.concatenate([np.empty(0, np.int32), *(slots_of(p, 0) for p in chunks)])
        both = np.empty(self.edges.shape, np.int32)
        both[0], both[1] = rows, keys[-1]
        both[0, : len(queries)], both[1, : len(keys)] = queries, keys
        self.columns[:, :rows].copy_(upload(padded(columns, rows)))
        self.edges.copy_(upload(both))
        self.slots[: len(slots)].copy_(upload(slots))
        graph, found = self.graphs[rows]
        graph.replay()
        return found[: columns.shape[1]]
