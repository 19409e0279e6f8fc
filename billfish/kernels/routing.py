"""Pairs of tokens and experts on a GPU (include/billfish/routing.cuh): how many items they can be,
and the launches of experts.cuh around the products of a layer's experts.

Nothing is read back, so that all of it can be captured in a CUDA graph.
"""

import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from billfish.kernels.jit import Program
from billfish.kernels.launch import Kernel

SOURCE = Path(__file__).parent / "experts.cuh"
TYPES = {torch.float16: "billfish::Half", torch.bfloat16: "billfish::Bfloat"}
MOST_EXPERTS = 512  # of a layer: 16 logits a lane, and route's counts take 66 KB of shared memory
# As in experts.cuh; tests/kernels/test_layouts.py compares.
ROUTE_THREADS, GATHER_THREADS, COMBINE_THREADS, CHOOSE_THREADS = 1024, 256, 128, 128
MOST_CHOICES = 32  # of a token: a lane each
ITEM_INTS = 4
CHUNK = 8  # 16-bit numbers in 16 bytes


def most_items(pairs: int, experts: int, tokens: int) -> int:
    """However the pairs are spread: `experts` with one pair each, and full items."""
    active = min(pairs, experts)
    return active + (pairs - active) // tokens


def likely_experts(pairs: int, experts: int) -> float:
    """Of experts drawn at random."""
    return experts * (1 - (1 - 1 / experts) ** pairs)


def likely_items(pairs: int, experts: int, tokens: int) -> float:
    """Of experts drawn at random, as pairs of each are spread about normally: many pairs."""
    mean = pairs / experts
    deviation = math.sqrt(2 * mean * (1 - 1 / experts)) or 1.0
    items, more, first = 0.0, 1.0, 0
    while more > 1e-4:  # the share of experts that have more than `first` pairs
        more = math.erfc((first + 0.5 - mean) / deviation) / 2
        items, first = items + more, first + tokens
    return experts * items


def table_bytes(pairs: int, experts: int, own: int, tokens: int) -> int:
    """Shared memory of a cluster's tables, of `own` items at most (routing.cuh, Routing)."""
    items = most_items(pairs, experts, tokens)
    return 16 + 4 * experts + (4 + 2 * tokens) * own + 2 * (pairs + pairs % 2) + 4 * items


def programs(dtype: torch.dtype) -> tuple[Program, ...]:
    number = TYPES[dtype]
    return (
        Program(SOURCE, "billfish::route"),
        Program(SOURCE, "billfish::gather_rows"),
        Program(SOURCE, f"billfish::combine<{number}, false>"),
        Program(SOURCE, f"billfish::combine<{number}, true>"),
        Program(SOURCE, f"billfish::choose<{number}, false>"),
        Program(SOURCE, f"billfish::choose<{number}, true>"),
    )


class Routed(NamedTuple):
    place: Tensor  # (pairs,) int32: the row of each pair, sorted by expert
    items: Tensor  # (1 + items, 4) int32: their number; expert, first row, end of its rows


class Router:
    """Launches for layers of one dtype on one device. Tensors are contiguous; widths are multiples
    of 8."""

    def __init__(self, dtype: torch.dtype, device: torch.device | int) -> None:
        self._route, self._gather, *both = (kernel(p).load(device) for p in programs(dtype))
        self._combine = dict(zip((dtype, torch.float32), both[:2], strict=True))
        self._choose = dict(zip((dtype, torch.float32), both[2:], strict=True))

    def choose(
        self, logits: Tensor, several: int, normalized: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """logits (m, experts) -> the largest of their softmax: (m, several) int64, and their
        weights in `dtype`, fp32 or that of the logits; `normalized`: which add up to 1."""
        m, experts = logits.shape
        if several > MOST_CHOICES or experts > MOST_EXPERTS:
            raise ValueError(
                f"{several} of {experts} experts: at most {MOST_CHOICES} of {MOST_EXPERTS}"
            )
        index = torch.empty(m, several, dtype=torch.int64, device=logits.device)
        weights = torch.empty(m, several, dtype=dtype, device=logits.device)
        at = (logits.data_ptr(), index.data_ptr(), weights.data_ptr())
        grid = -(-m // (CHOOSE_THREADS // 32))
        args = (*at, m, experts, several, normalized)
        self._choose[dtype].launch(grid, CHOOSE_THREADS, args, pdl=True)
        return index, weights

    def route(self, index: Tensor, experts: int, tokens: int) -> Routed:
        """index (m, several) int64 -> rows sorted by expert, in items of up to `tokens`."""
        pairs = index.numel()
        place = torch.empty(pairs, dtype=torch.int32, device=index.device)
        size = (1 + most_items(pairs, experts, tokens), ITEM_INTS)
        items = torch.empty(size, dtype=torch.int32, device=index.device)
        args = (index.data_ptr(), place.data_ptr(), items.data_ptr(), pairs, experts, tokens)
        smem = (1 + ROUTE_THREADS // 32) * experts * 4
        self._route.launch(1, ROUTE_THREADS, args, smem, pdl=True)
        return Routed(place, items)

    def gather(self, x: Tensor, place: Tensor) -> Tensor:
        """x (m, width) -> (pairs, width): each token's row at the places of its pairs."""
        pairs, (m, width) = len(place), x.shape
        out = x.new_empty(pairs, width)
        args = (
            x.data_ptr(),
            place.data_ptr(),
            out.data_ptr(),
            pairs,
            pairs // m,
            width // CHUNK,
        )
        self._gather.launch(-(-pairs // (GATHER_THREADS // 32)), GATHER_THREADS, args, pdl=True)
        return out

    def combine(self, rows: Tensor, place: Tensor | None, weights: Tensor) -> Tensor:
        """rows (pairs, width) -> (m, width): sums of each token's rows, times weights (m, several)
        in rows' dtype or fp32. Without `place` row i is pair i's."""
        (m, several), width = weights.shape, rows.shape[1]
        out = rows.new_empty(m, width)
        at = 0 if place is None else place.data_ptr()
        args = (rows.data_ptr(), at, weights.data_ptr(), out.data_ptr(), several, width // CHUNK)
        grid = (-(-width // CHUNK // COMBINE_THREADS), m)
        self._combine[weights.dtype].launch(grid, COMBINE_THREADS, args, pdl=True)
        return out


@functools.cache
def kernel(program: Program) -> Kernel:
    return Kernel(program)
