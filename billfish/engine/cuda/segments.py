"""Steps with prompts, as CUDA graphs of all that lies between attention and attention.

    [embedding, norm, q k v, store] attention [o, norm, gate up, down, norm, q k v, store] ...

Launches of prompts' attention depend on their lengths; all others depend on the number of tokens,
and a step is padded to the next size that has graphs. Steps with few chunks are one graph instead
(prefill.py). 16 decodes and twelve prompts of 60 tokens of 8B took the host 2.8 ms this way, 1.2
as one graph and, in an earlier run, 8.0 kernel by kernel (LOG 2026-11-19).
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOST = 1024
PADDING = 0, 0, -1  # token, position, slot


@dataclass
class Space:
    """Where attention's inputs and results are, a row a token."""

    q: Tensor  # (rows, heads, head_dim)
    mixed: Tensor  # the same
    x: Tensor  # (rows, hidden)

    def first(self, rows: int) -> "Space":
        return Space(self.q[:rows], self.mixed[:rows], self.x[:rows])


# Of a layer and q. It fills mixed, or puts another tensor there; but for Segments it fills mixed,
# which their graphs read.
Attend = Callable[[int, Tensor, "Space"], None]
# Yields layers, and what their attention reads.
Between = Callable[[Tensor, Tensor, Tensor, Space], Iterator[tuple[int, Tensor]]]


def sizes(most: int) -> list[int]:
    """Of steps of up to `most` tokens, the largest first."""
    steps = (*range(32, 257, 32), *range(320, MOST + 1, 64))
    most = min(most, MOST)
    return sorted({size for size in steps if size < most} | {most}, reverse=True)


def padding(rows: int, device: torch.device) -> Tensor:
    """Tokens, positions and slots of rows that are not read."""
    column = torch.tensor(PADDING, dtype=torch.int32, device=device)
    return column[:, None].repeat(1, rows)


def padded(columns: NDArray[Any], rows: int) -> NDArray[np.int32]:
    """(3, count) -> (3, rows)"""
    count = columns.shape[1]
    found = np.empty((3, rows), np.int32)
    found[:, :count] = columns
    found[:, count:] = np.array(PADDING)[:, None]
    return found


class Segments:
    """The graphs of each size; all share their inputs and results."""

    def __init__(self, between: Between, space: Space, numbers: Many[int]) -> None:
        """`space` for the largest of `numbers`."""
        self.space = space
        space.mixed.zero_()  # padding rows are multiplied as well
        self.flat = torch.zeros(3 * max(numbers), dtype=torch.int32, device=space.x.device)
        self.graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        pool = torch.cuda.graph_pool_handle()
        for rows in numbers:
            columns = self.columns(rows)
            columns.copy_(padding(rows, space.x.device))
            given = (*columns, space.first(rows))
            for _ in between(*given):  # loads kernels: none can be loaded in a capture
                pass
            parts, found = between(*given), list[torch.cuda.CUDAGraph]()
            more = True
            while more:
                found.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(found[-1], pool=pool):
                    more = next(parts, None) is not None
            self.graphs[rows] = found

    def columns(self, rows: int) -> Tensor:
        """Tokens, positions and slots of the graphs of so many rows; sizes share one memory."""
        return self.flat[: 3 * rows].view(3, rows)

    def size(self, count: int) -> int | None:
        """The next size with graphs."""
        return min((rows for rows in self.graphs if rows >= count), default=None)

    def run(
        self,
        rows: int,
        pinned: Callable[[NDArray[np.int32]], Tensor],  # a copy in memory that the GPU reads
        columns: NDArray[np.int32],
        attend: Attend,
    ) -> Tensor:
        """Hidden states of tokens, given by their `columns`: token, position and slot; padded to
        `rows`, one of the sizes. The next run overwrites them."""
        self.columns(rows).copy_(pinned(padded(columns, rows)), non_blocking=True)
        given = self.space.first(columns.shape[1])
        first, *others = self.graphs[rows]
        first.replay()
        for layer, graph in enumerate(others):
            attend(layer, given.q, given)
            graph.replay()
        return given.x
