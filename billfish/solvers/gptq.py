"""GPTQ as MARLIN 3.5 has it: one column after the other is rounded, and the columns not yet rounded
absorb its error through the inverse Hessian.

Activation order is static: columns are solved by decreasing H diagonal, but keep their place and
their group, so the checkpoint needs no g_idx and shards freely. Scales come from solvers/clip.py
before the first column. A Hessian that will not factor is damped up a ladder, then tried in fp64,
and then the caller is told (None).

Beyond the paper: `undrift` moves the target so that the layer also undoes part of what the
quantized layers before it did to its input. It is worth more than everything else here
(docs/LOG.md, 2026-11-15).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from billfish.formats.grid import Grid
from billfish.kernels.feedback import round_columns

DAMPING = (0.01, 0.03, 0.1, 0.3, 1.0)  # of the mean diagonal
# How much of the drift to undo. SmolLM2, g64, WikiText-2 valid, means of three seeds, 4-bit
# symmetric: 0.25 -> 21.27, 0.5 -> 21.04, 0.75 -> 21.04, 1 -> 21.12; 3-bit asymmetric, of two seeds:
# 0.5 -> 25.55, 0.75 -> 25.74, 1 -> 26.27.
UNDRIFT = 0.5
BLOCK = 128  # columns updated together; the rest of the matrix follows in one matmul


def inverse_factor(hessian: Tensor) -> tuple[Tensor, str | None] | None:
    """Upper Cholesky factor U of the damped inverse (H^-1 = U^T U), and a note if it took more than
    the first try. None: even fp64 with full damping fails (NaN or Inf inside).

    With rows and columns in reverse H is L L^T; reversed again that is H = R R^T, R upper
    triangular, and U is R^-1: one factorization and one triangular solve, no inverse of H.
    """
    for dtype in (torch.float32, torch.float64):
        mean = hessian.diagonal().to(dtype).mean()
        for damping in DAMPING:
            # One k x k matrix is 0.8 GB at k = 14336, so each is dropped as soon as it has served.
            factor = hessian.flip(0, 1).to(dtype)
            factor.diagonal().add_(damping * mean)
            factor, failed = torch.linalg.cholesky_ex(factor)
            if failed:
                continue
            one = torch.eye(len(factor), dtype=dtype, device=factor.device)
            factor = torch.linalg.solve_triangular(factor, one, upper=False, out=one)
            if bool(torch.isfinite(factor).all()):
                plain = damping == DAMPING[0] and dtype == torch.float32
                name = str(dtype).removeprefix("torch.")
                upper = factor.flip(0, 1).float()
                return upper, None if plain else f"damping {damping}, {name}"
    return None


@dataclass(frozen=True)
class Factor:
    """What all rows of a weight share: the order of columns and how errors spread in that order."""

    order: Tensor  # (k,) int64
    upper: Tensor  # (k, k) fp32
    note: str | None

    @staticmethod
    def of(hessian: Tensor, together: int = 1) -> "Factor | None":
        """None when the Hessian cannot be factored. `together`: neighbouring columns that a rounder
        takes at once, and that stay neighbours in the order."""
        # Inputs that are never on: any code does, their weight cannot matter. They get the mean of
        # the others and not 1, which would drown small activations in damping.
        diagonal = hessian.diagonal().clone()
        dead = diagonal == 0
        diagonal[dead] = 1.0 if bool(dead.all()) else diagonal[~dead].mean()
        weight = diagonal.view(-1, together).sum(1)
        order = torch.argsort(weight, descending=True, stable=True)
        if together > 1:
            order = (
                order[:, None] * together + torch.arange(together, device=order.device)
            ).flatten()
        ordered = hessian[order[:, None], order]
        ordered.diagonal().copy_(diagonal[order])
        found = inverse_factor(ordered)
        return None if found is None else Factor(order, *found)


def undrift(weight: Tensor, factor: Factor, drift: Tensor) -> Tensor:
    """(n, k): the weight to aim for behind quantized layers.

    The V whose product with the spoiled input x is nearest to W y, y the original input, minimises
    |V x - W y|^2: V = W (y x^T) (x x^T)^-1 = W + W drift H^-1; we go UNDRIFT of the way. H^-1 is
    U^T U of the factor. W itself where that is not finite.
    """
    order, upper = factor.order, factor.upper
    few = weight.shape[0] < weight.shape[1]  # rows: then all products are with them
    step = weight @ drift if few else drift
    step = (step[:, order] @ upper.T @ upper)[:, torch.argsort(order)]
    target = weight + UNDRIFT * (step if few else weight @ step)
    return target if bool(torch.isfinite(target).all()) else weight


class Rounder(Protocol):
    """How the columns of one weight become codes: which grid each has, and whether they are rounded
    one by one or several together (2:4 chooses two of four)."""

    def __call__(
        self,
        block: Tensor,  # (columns, n) fp32, in the order in which they are solved; not kept
        places: Tensor,  # (columns,) int64: which columns of the weight they are
        spread: Tensor,  # (columns, columns) fp32, upper triangular: how errors spread
    ) -> tuple[Tensor, Tensor]:
        """What is kept of each weight (codes, say), and the errors divided by the diagonal of
        `spread`; both (columns, n) fp32. The columns behind take up the errors as they come."""


class GridRounder:
    """One column after the other, on a uniform grid with a scale and a zero for each group."""

    def __init__(self, grid: Grid, scale: Tensor, zero: Tensor, k: int) -> None:  # (n, g) each
        self.levels, self.size = grid.levels, k // scale.shape[1]
        self.scale, self.zero = scale.T, zero.T

    def __call__(self, block: Tensor, places: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        group = places // self.size
        return round_columns(block, self.scale[group], self.zero[group], spread, self.levels)


@dataclass(frozen=True)
class GroupRounder:
    """`width` columns together, by any rule: (width, n) weights and their places -> decoded
    weights, which are what is kept."""

    width: int
    nearest: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, block: Tensor, places: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        kept, errors = torch.empty_like(block), torch.empty_like(block)
        for start in range(0, len(block), self.width):
            own = slice(start, start + self.width)
            kept[own] = self.nearest(block[own], places[own])
            # Column after column, as if each were rounded alone to what was chosen together.
            factor = spread[own, own].T
            errors[own] = torch.linalg.solve_triangular(factor, block[own] - kept[own], upper=False)
            behind = start + self.width
            block[behind:].addmm_(spread[own, behind:].T, errors[own], alpha=-1.0)
        return kept, errors


def solve(
    weight: Tensor,  # (n, k) fp32; rows are independent, so any slice of them gives the same codes
    factor: Factor,
    rounder: Rounder,
) -> Tensor:
    """(n, k) fp32: what the rounder keeps of each weight."""
    k, order, upper = weight.shape[1], factor.order, factor.upper
    # Transposed: a column, which is what every step reads and writes, is contiguous.
    todo = weight.T[order]
    kept = torch.empty_like(todo)
    for start in range(0, k, BLOCK):
        end = min(start + BLOCK, k)
        places, spread = order[start:end], upper[start:end, start:end]
        rounded, errors = rounder(todo[start:end], places, spread)
        kept[places] = rounded
        todo[end:].addmm_(upper[start:end, end:].T, errors, alpha=-1.0)
    return kept.T
