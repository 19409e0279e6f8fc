"""The base of each row of a w4ax weight, and the whole scales q and zeros of its groups: those with
the smallest error in the layer's output.

First every group gets the best scale of any size (solvers/clip.py). Bases are tried so that the
largest of a row's scales becomes about 16 of them; then each group's q is searched around its best
scale, and in asymmetric weights its zero. The error of one group of one row is e^T M e. M is the
group's block of the Hessian, or, where columns not yet rounded will compensate errors, what they
leave of it (walk.py).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from billfish.formats.grid import Grid, round_scale
from billfish.schemes.w4ax.scheme import HIGH, LOW, MOST_Q
from billfish.solvers.clip import SEARCHED, diagonal_blocks, search_scales

# The largest scale of a row in bases. Output error of SmolLM2's linears, one top of 16: 1.005 times
# as large. Asymmetric groups may have a largest q as small as 8, so there smaller ones are tried.
TOPS = {
    True: tuple(17.5 - i / 2 for i in range(12)),
    False: tuple(17.0 - i for i in range(10)),
}
NEAR = (-1, 1, -2, 2)
MOVES = (-1, 1, -2, 2)  # of zeros


def search(
    weight: Tensor,  # (n, k) fp32
    hessian: Tensor | None,  # (k, k) fp32; None: all inputs count alike
    grid: Grid,
    size: int,
    dtype: torch.dtype,  # of the stored base
) -> tuple[Tensor, Tensor, Tensor]:
    """base (n, 1), q and zero (n, g), fp32."""
    blocks = None if hessian is None else diagonal_blocks(hessian, size)
    pieces = []
    for rows in torch.split(weight, max(16, SEARCHED[weight.device.type] // weight.shape[1])):
        groups = rows.view(len(rows), -1, size).transpose(0, 1).contiguous()
        if hessian is None:
            scale, zero = (
                found.T for found in grid.fit(groups.amin(-1), groups.amax(-1), torch.float32)
            )
        else:
            scale, zero = search_scales(rows, hessian, grid, size, torch.float32)
        base, q = choose_base(groups, blocks, grid, scale, zero, dtype)
        pieces.append((base, *choose_q(groups, blocks, grid, base, q, zero, NEAR)))
    base, q, zero = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return base, q, zero


def largest_q(zero: Tensor) -> Tensor:
    """So that every code's value is a byte: 16 for a zero of 8, 8 for one of 0 or 15."""
    below, above = LOW / zero.clamp(min=1), HIGH / (15 - zero).clamp(min=1)
    return torch.minimum(below, above).floor().clamp(max=MOST_Q)


def choose_base(
    groups: Tensor,  # (g, n, size)
    metric: Tensor | None,  # (g, size, size); None: all inputs count alike
    grid: Grid,
    scale: Tensor,  # (n, g): the best scales of any size
    zero: Tensor,  # (n, g): and their zeros
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The base of each row, (n, 1), and the whole numbers of it that are nearest to the scales."""
    largest, most = scale.amax(1, keepdim=True), largest_q(zero)
    base, q = largest, scale
    best = torch.full_like(largest, torch.inf)
    for top in TOPS[grid.symmetric]:
        tried = round_scale(largest / top, dtype)
        whole = torch.minimum((scale / tried).round_().clamp_(min=1), most)
        cost = _cost(groups, metric, grid, tried * whole, zero).sum(1, keepdim=True)
        better = cost < best
        best = torch.where(better, cost, best)
        base, q = torch.where(better, tried, base), torch.where(better, whole, q)
    return base, q


def choose_q(
    groups: Tensor,
    metric: Tensor | None,
    grid: Grid,
    base: Tensor,
    q: Tensor,
    zero: Tensor,
    near: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """(n, g) each: of `q` and its neighbours those with the smallest error; then of `zero`."""
    best, moved, lowest = q, zero, _cost(groups, metric, grid, base * q, zero)
    most = largest_q(zero)
    for step in near:
        tried = torch.minimum((q + step).clamp_(min=1), most)
        cost = _cost(groups, metric, grid, base * tried, zero)
        best = torch.where(cost < lowest, tried, best)
        lowest = torch.minimum(cost, lowest)
    found = best
    for step in () if grid.symmetric else MOVES:
        at = (zero + step).clamp_(0, grid.levels - 1)
        tried = torch.minimum(found, largest_q(at))
        cost = _cost(groups, metric, grid, base * tried, at)
        better = cost < lowest
        best, moved = torch.where(better, tried, best), torch.where(better, at, moved)
        lowest = torch.minimum(cost, lowest)
    return best, moved


def _cost(groups: Tensor, metric: Tensor | None, grid: Grid, scale: Tensor, zero: Tensor) -> Tensor:
    """(n, g)"""
    error = grid.nearest(groups, scale.T[..., None], zero.T[..., None]).sub_(groups)
    weighted = error if metric is None else error @ metric
    return (weighted * error).sum(-1).T
