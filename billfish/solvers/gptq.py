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

from dataclasses import dataclass

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
    def of(hessian: Tensor) -> "Factor | None":
        """None when the Hessian cannot be factored."""
        # Inputs that are never on: any code does, their weight cannot matter. They get the mean of
        # the others and not 1, which would drown small activations in damping.
        diagonal = hessian.diagonal().clone()
        dead = diagonal == 0
        diagonal[dead] = 1.0 if bool(dead.all()) else diagonal[~dead].mean()
        order = torch.argsort(diagonal, descending=True, stable=True)
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


def solve(
    weight: Tensor,  # (n, k) fp32; rows are independent, so any slice of them gives the same codes
    factor: Factor,
    grid: Grid,
    scale: Tensor,  # (n, g) fp32
    zero: Tensor,  # (n, g) fp32
) -> Tensor:
    """(n, k) codes as fp32 integers."""
    k, order, upper = weight.shape[1], factor.order, factor.upper
    group = order // (k // scale.shape[1])
    # Transposed: a column, which is what every step reads and writes, is contiguous.
    todo, scale, zero = weight.T[order], scale.T, zero.T
    codes = torch.empty_like(todo)
    for start in range(0, k, BLOCK):
        end = min(start + BLOCK, k)
        its = group[start:end]
        rounded, errors = round_columns(
            todo[start:end], scale[its], zero[its], upper[start:end, start:end], grid.levels
        )
        codes[order[start:end]] = rounded
        todo[end:].addmm_(upper[start:end, end:].T, errors, alpha=-1.0)
    return codes.T
