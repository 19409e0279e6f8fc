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

DAMPING = (0.01, 0.03, 0.1, 0.3, 1.0)  # of the mean diagonal
# How much of the drift to undo. SmolLM2, 4-bit symmetric g64, WikiText-2: 0 -> 23.56, 0.5 -> 22.54,
# 1 -> 22.57; the smaller value leans less on the calibration text.
UNDRIFT = 0.5
BLOCK = 128  # columns updated together; the rest of the matrix follows in one matmul


def undrift(hessian: Tensor, drift: Tensor) -> Tensor | None:
    """(k, k) M such that W + W M is the weight to aim for behind quantized layers.

    The V whose product with the spoiled input x is nearest to W y, y the original input, minimises
    |V x - W y|^2: V = W (y x^T) (x x^T)^-1 = W + W drift H^-1; we go UNDRIFT of the way. None where
    the damped Hessian still cannot be solved.
    """
    damped = hessian.clone()
    damped.diagonal().add_(DAMPING[0] * hessian.diagonal().mean())
    lower, failed = torch.linalg.cholesky_ex(damped)
    del damped
    if failed:
        return None
    step = UNDRIFT * torch.cholesky_solve(drift.T, lower).T
    return step if bool(torch.isfinite(step).all()) else None


def inverse_factor(hessian: Tensor) -> tuple[Tensor, str | None] | None:
    """Upper Cholesky factor U of the damped inverse (H^-1 = U^T U), and a note if it took more than
    the first try. None: even fp64 with full damping fails (NaN or Inf inside)."""
    mean = hessian.diagonal().mean()
    for dtype in (torch.float32, torch.float64):
        for damping in DAMPING:
            # One k x k matrix is 0.8 GB at k = 14336, so each is dropped as soon as it has served.
            factor = hessian.to(dtype, copy=True)
            factor.diagonal().add_(damping * mean)
            for step in (torch.linalg.cholesky_ex, _inverse_cholesky):
                factor, failed = step(factor)
                if failed or not bool(torch.isfinite(factor).all()):
                    break
            else:
                plain = damping == DAMPING[0] and dtype == torch.float32
                name = str(dtype).removeprefix("torch.")
                return factor.float(), None if plain else f"damping {damping}, {name}"
    return None


def _inverse_cholesky(lower: Tensor) -> tuple[Tensor, Tensor]:
    """Upper factor of the inverse of L L^T, and whether it failed."""
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return upper, failed


@dataclass(frozen=True)
class Factor:
    """What all rows of a weight share: the order of columns and how errors spread in that order."""

    order: Tensor  # (k,) int64
    upper: Tensor  # (k, k) fp32
    note: str | None

    @staticmethod
    def of(hessian: Tensor) -> "Factor | None":
        """None when the Hessian cannot be factored."""
        hessian = hessian.clone()
        # Inputs that are never on: any code does, their weight cannot matter. They get the mean of
        # the others and not 1, which would drown small activations in damping.
        diagonal = hessian.diagonal()
        dead = diagonal == 0
        diagonal[dead] = 1.0 if bool(dead.all()) else diagonal[~dead].mean()
        order = torch.argsort(diagonal, descending=True, stable=True)
        found = inverse_factor(hessian[order[:, None], order])
        return None if found is None else Factor(order, *found)


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
    todo, scale, zero = weight[:, order], scale[:, group], zero[:, group]
    codes = torch.empty_like(todo)
    for start in range(0, k, BLOCK):
        end = min(start + BLOCK, k)
        # Transposed, so that a column, which is what every step reads and writes, is contiguous.
        block = todo[:, start:end].T.contiguous()
        steps, origins = scale[:, start:end].T.contiguous(), zero[:, start:end].T.contiguous()
        spread = upper[start:end, start:end]
        errors = torch.empty_like(block)
        for i in range(end - start):
            code = grid.encode(block[i], steps[i], origins[i])
            errors[i] = (block[i] - grid.decode(code, steps[i], origins[i])) / spread[i, i]
            block[i + 1 :].addr_(spread[i, i + 1 :], errors[i], alpha=-1.0)
            codes[:, start + i] = code
        todo[:, end:].addmm_(errors.T, upper[start:end, end:], alpha=-1.0)
    return codes[:, torch.argsort(order)]
