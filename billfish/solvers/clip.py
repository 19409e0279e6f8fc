"""Clipping search for group scales: the fraction of a group's range with the smallest
Hessian-weighted error (MARLIN 3.5 (a)).

The error of one group of one row is e^T H_gg e, where H_gg is the group's diagonal block of the
Hessian: columns with large or correlated inputs weigh more.
"""

import torch
from torch import Tensor

from billfish.formats.grid import Grid

# Fractions of the full range that are tried first, and offsets that are tried around the best of
# them: the resolution of steps of 0.01 from 1.09 to 0.43 at a quarter of the cost. Perplexity on
# WikiText-2 valid (SmolLM2, 4-bit symmetric, three seeds): 20.97; twice as many fractions 21.04; 20
# steps of 0.025 down from 1.0 21.27. 1.0 comes first, so that a group whose inputs are all zero
# keeps its range.
COARSE = (1.0, 1.06, *(0.94 - 0.06 * i for i in range(9)))
FINE = (-0.03, -0.02, -0.01, 0.01, 0.02, 0.03)
# Weights in one step: on a CPU temporaries of 1 MB stay in L2; on a GPU few launches are faster.
SEARCHED = {"cpu": 2**18, "cuda": 2**24}


def search_scales(
    weight: Tensor,  # (n, k) fp32
    hessian: Tensor,  # (k, k) fp32
    grid: Grid,
    group_size: int,  # divides k
    dtype: torch.dtype,  # of the stored scale
    coarse: tuple[float, ...] = COARSE,
    fine: tuple[float, ...] = FINE,
) -> tuple[Tensor, Tensor]:
    """(scale, zero), each (n, g) fp32, that minimise each group's own error."""
    k = weight.shape[1]
    blocks = diagonal_blocks(hessian, group_size)
    pieces = [
        _search(rows, blocks, grid, group_size, dtype, coarse, fine)
        for rows in torch.split(weight, max(16, SEARCHED[weight.device.type] // k))
    ]
    scale, zero = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return scale, zero


def _search(
    weight: Tensor,
    blocks: Tensor,  # (g, size, size)
    grid: Grid,
    size: int,
    dtype: torch.dtype,
    coarse: tuple[float, ...],
    fine: tuple[float, ...],
) -> tuple[Tensor, Tensor]:
    groups = weight.view(len(weight), -1, size).transpose(0, 1).contiguous()  # (g, n, size)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    best = torch.full_like(low, torch.inf)
    fraction = torch.ones_like(low)

    def try_fractions(candidate: Tensor) -> None:
        nonlocal best, fraction
        scale, zero = grid.fit(low * candidate, high * candidate, dtype)
        error = grid.nearest(groups, scale, zero).sub_(groups)
        cost = (error @ blocks).mul_(error).sum(-1, keepdim=True)
        better = cost < best
        best = torch.where(better, cost, best)
        fraction = torch.where(better, candidate, fraction)

    for value in coarse:
        try_fractions(torch.full_like(low, value))
    around = fraction
    for step in fine:
        try_fractions(around + step)
    scale, zero = grid.fit(low * fraction, high * fraction, dtype)
    return scale[..., 0].T, zero[..., 0].T


def diagonal_blocks(hessian: Tensor, size: int) -> Tensor:  # (g, size, size)
    count = hessian.shape[0] // size
    index = torch.arange(count)
    return hessian.view(count, size, count, size)[index, :, index, :]
