"""GPTQ as in MARLIN 3.5: columns are rounded one after the other, with error feedback to the
columns not yet rounded through the inverse Hessian.

Activation order is static: columns are rounded by decreasing diagonal of H, but keep their place
and their group, so the checkpoint needs no g_idx. solvers/clip.py chooses the scales beforehand. If
the Hessian cannot be factored, more and more damping is tried, then fp64; then the result is None.

Beyond the paper, `undrift` changes the target weight so that the layer also compensates part of the
error that quantized layers before it caused in its input. It gains more than everything else here
(docs/LOG.md, 2026-11-15).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from billfish.formats.grid import Grid
from billfish.kernels.feedback import round_columns

DAMPING = (0.01, 0.03, 0.1, 0.3, 1.0)  # times the mean of the diagonal
# Share of the drift to compensate. Perplexity of SmolLM2, g64, WikiText-2 valid, means of three
# seeds, 4-bit symmetric: 0.25 -> 21.27, 0.5 -> 21.04, 0.75 -> 21.04, 1 -> 21.12; 3-bit asymmetric,
# of two seeds: 0.5 -> 25.55, 0.75 -> 25.74, 1 -> 26.27.
UNDRIFT = 0.5
BLOCK = 128  # columns rounded before the columns after them are updated by one matmul


def inverse_factor(hessian: Tensor) -> tuple[Tensor, str | None] | None:
    """Upper Cholesky factor U of the damped inverse (H^-1 = U^T U), and a note if the first attempt
    failed. None if even fp64 with full damping fails (H holds NaN or Inf).

    H with rows and columns reversed is L L^T. Reversing L gives H = R R^T with R upper triangular,
    and U = R^-1: one factorization and one triangular solve, without inverting H.
    """
    for dtype in (torch.float32, torch.float64):
        mean = hessian.diagonal().to(dtype).mean()
        for damping in DAMPING:
            # A k x k matrix has 0.8 GB at k = 14336, so each is freed as early as possible.
            factor = hessian.flip(0, 1).to(dtype)
            factor.diagonal().add_(damping * mean)
            factor, failed = torch.linalg.cholesky_ex(factor)
            if failed:
                continue
            one = torch.eye(len(factor), dtype=dtype, device=factor.device)
            factor = torch.linalg.solve_triangular(factor, one, upper=False, out=one)
            # OpenBLAS factors an infinite diagonal without failing; its inverse has zeros in it.
            if bool(torch.isfinite(factor).all() & (factor.diagonal() > 0).all()):
                plain = damping == DAMPING[0] and dtype == torch.float32
                name = str(dtype).removeprefix("torch.")
                upper = factor.flip(0, 1).float()
                return upper, None if plain else f"damping {damping}, {name}"
    return None


@dataclass(frozen=True)
class Factor:
    """Shared by all rows of a weight: the order of columns and the error feedback in that order."""

    order: Tensor  # (k,) int64
    upper: Tensor  # (k, k) fp32
    note: str | None

    @staticmethod
    def of(hessian: Tensor, together: int = 1, order: Tensor | None = None) -> "Factor | None":
        """None if the Hessian cannot be factored. `together`: number of neighbouring columns that
        the rounder takes at once; they stay neighbours in the order. Or the order itself."""
        # Inputs that are always zero: their weights do not matter. Their diagonal becomes the mean
        # of the others, not 1, as damping relative to 1 would dominate small activations.
        diagonal = hessian.diagonal().clone()
        dead = diagonal == 0
        diagonal[dead] = 1.0 if bool(dead.all()) else diagonal[~dead].mean()
        if order is None:
            weight = diagonal.view(-1, together).sum(1)
            order = torch.argsort(weight, descending=True, stable=True)
            inside = torch.arange(together, device=order.device)
            order = (order[:, None] * together + inside).flatten()
        ordered = hessian[order[:, None], order]
        ordered.diagonal().copy_(diagonal[order])
        found = inverse_factor(ordered)
        return None if found is None else Factor(order, *found)


def undrift(weight: Tensor, factor: Factor, drift: Tensor) -> Tensor:
    """(n, k): the target weight for an input x that quantized layers changed from y
    (Statistics.drift).

    |V x - W y|^2 is smallest for V = W (y x^T) (x x^T)^-1 = W + W drift H^-1, with H^-1 = U^T U
    from the factor. The result is W + UNDRIFT (V - W), or W if that is not finite.
    """
    order, upper = factor.order, factor.upper
    few = weight.shape[0] < weight.shape[1]  # rows: then it is cheaper to multiply by W first
    step = weight @ drift if few else drift
    step = (step[:, order] @ upper.T @ upper)[:, torch.argsort(order)]
    target = weight + UNDRIFT * (step if few else weight @ step)
    return target if bool(torch.isfinite(target).all()) else weight


class Rounder(Protocol):
    """Rounds columns of one weight: it decides each column's grid, and whether columns are rounded
    one by one or several together (2:4 keeps two of four)."""

    def __call__(
        self,
        block: Tensor,  # (columns, n) fp32, in rounding order; may be overwritten
        places: Tensor,  # (columns,) int64: their indices in the weight
        spread: Tensor,  # (columns, columns) fp32: their diagonal block of Factor.upper
    ) -> tuple[Tensor, Tensor]:
        """The rounded weights (codes, for example), and their errors divided by the diagonal of
        `spread`; both (columns, n) fp32. Within the block the rounder itself applies the error
        feedback to later columns."""


class GridRounder:
    """Rounds columns one by one on a uniform grid with a scale and a zero for each group; gives
    codes."""

    def __init__(self, grid: Grid, scale: Tensor, zero: Tensor, k: int) -> None:  # (n, g) each
        self.levels, self.size = grid.levels, k // scale.shape[1]
        self.scale, self.zero = scale.T, zero.T

    def __call__(self, block: Tensor, places: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        group = places // self.size
        return round_columns(block, self.scale[group], self.zero[group], spread, self.levels)


@dataclass(frozen=True)
class GroupRounder:
    """Rounds `width` columns together by any rule `nearest`: (width, n) weights and their indices
    -> decoded weights, which are also the result."""

    width: int
    nearest: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, block: Tensor, places: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        kept, errors = torch.empty_like(block), torch.empty_like(block)
        for start in range(0, len(block), self.width):
            own = slice(start, start + self.width)
            kept[own] = self.nearest(block[own], places[own])
            # The errors that rounding the columns one by one to these values would give.
            factor = spread[own, own].T
            errors[own] = torch.linalg.solve_triangular(factor, block[own] - kept[own], upper=False)
            rest = start + self.width
            block[rest:].addmm_(spread[own, rest:].T, errors[own], alpha=-1.0)
        return kept, errors


def solve(
    weight: Tensor,  # (n, k) fp32; rows are independent, so a slice of rows gives the same codes
    factor: Factor,
    rounder: Rounder,
) -> Tensor:
    """(n, k) fp32: the rounder's result for each weight."""
    k, order, upper = weight.shape[1], factor.order, factor.upper
    # Transposed, so that columns, which every step reads and writes, are contiguous.
    todo = weight.T[order]
    kept = torch.empty_like(todo)
    for start in range(0, k, BLOCK):
        end = min(start + BLOCK, k)
        places, spread = order[start:end], upper[start:end, start:end]
        rounded, errors = rounder(todo[start:end], places, spread)
        kept[places] = rounded
        todo[end:].addmm_(upper[start:end, end:].T, errors, alpha=-1.0)
    return kept.T
