"""GPTQ as MARLIN 3.5 has it: one column after the other is rounded, and the columns not yet rounded absorb its
error through the inverse Hessian.

Activation order is static: columns are solved by decreasing H diagonal, but keep their place and their group, so
the checkpoint needs no g_idx and shards freely. Scales come from solvers/clip.py before the first column.
A Hessian that will not factor is damped up a ladder, then tried in fp64, and then the caller is told (None).

Beyond the paper: `undrift` moves the target so that the layer also undoes part of what the quantized layers
before it did to its input. It is worth more than everything else here (docs/LOG.md, 2026-11-15).
"""

import torch
from torch import Tensor

from billfish.formats.grid import Grid

DAMPING = (0.01, 0.03, 0.1, 0.3, 1.0)  # of the mean diagonal
# How much of the drift to undo. SmolLM2, 4-bit symmetric g64, WikiText-2: 0 -> 23.56, 0.5 -> 22.54, 1 -> 22.57; the
# smaller value leans less on the calibration text.
UNDRIFT = 0.5
BLOCK = 128  # columns updated together; the rest of the matrix follows in one matmul


def undrift(weight: Tensor, hessian: Tensor, drift: Tensor) -> Tensor:
    """The weight whose product with the spoiled input x is nearest to W y, y the original input.

    min |V x - W y|^2 has V = W (y x^T) (x x^T)^-1 = W + W drift H^-1; we go UNDRIFT of the way. Falls back
    to W where the damped Hessian still cannot be solved.
    """
    damping = DAMPING[0] * hessian.diagonal().mean()
    damped = hessian + damping * torch.eye(len(hessian), device=hessian.device)
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        return weight
    step = torch.cholesky_solve((weight @ drift).T, lower).T
    return weight + UNDRIFT * step if bool(torch.isfinite(step).all()) else weight


def inverse_factor(hessian: Tensor) -> tuple[Tensor, str | None] | None:
    """Upper Cholesky factor U of the damped inverse (H^-1 = U^T U), and a note if it took more than the
    first try. None: even fp64 with full damping fails (NaN or Inf inside)."""
    mean = hessian.diagonal().mean()
    for dtype in (torch.float32, torch.float64):
        for damping in DAMPING:
            damped = hessian.to(dtype)
            damped = damped + torch.eye(len(damped), dtype=dtype, device=damped.device) * (
                damping * mean
            )
            lower, failed = torch.linalg.cholesky_ex(damped)
            if failed or not torch.isfinite(lower).all():
                continue
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if failed or not torch.isfinite(upper).all():
                continue
            plain = damping == DAMPING[0] and dtype == torch.float32
            return upper.float(), None if plain else f"damping {damping}, {dtype}".replace("torch.", "")
    return None


def solve(
    weight: Tensor,  # (n, k) fp32
    hessian: Tensor,  # (k, k) fp32
    grid: Grid,
    scale: Tensor,  # (n, g) fp32
    zero: Tensor,  # (n, g) fp32
) -> tuple[Tensor, str | None] | None:
    """(n, k) codes as fp32 integers and a note, or None when the Hessian cannot be factored."""
    n, k = weight.shape
    hessian = hessian.clone()
    dead = hessian.diagonal() == 0  # inputs that are never on: any code does, their weight cannot matter
    hessian.diagonal()[dead] = 1.0

    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    factored = inverse_factor(hessian[order][:, order])
    if factored is None:
        return None
    upper, note = factored
    group = order // (k // scale.shape[1])
    todo, scale, zero = weight[:, order].clone(), scale[:, group], zero[:, group]
    codes = torch.empty_like(todo)
    for start in range(0, k, BLOCK):
        end = min(start + BLOCK, k)
        block, factor = todo[:, start:end], upper[start:end, start:end]
        errors = torch.empty_like(block)
        for i in range(end - start):
            column, step, origin = block[:, i], scale[:, start + i], zero[:, start + i]
            code = grid.encode(column, step, origin)
            codes[:, start + i] = code
            errors[:, i] = (column - grid.decode(code, step, origin)) / factor[i, i]
            block[:, i + 1 :].addr_(errors[:, i], factor[i, i + 1 :], alpha=-1.0)
        todo[:, end:].addmm_(errors, upper[start:end, end:], alpha=-1.0)
    return codes[:, torch.argsort(order)], note
