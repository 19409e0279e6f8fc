"""The base of each row of a w4ax weight and the whole scales q of its groups: those with the
smallest error in the layer's output.

First every group gets the best scale of any size (solvers/clip.py). Bases are tried so that the
largest of a row's scales becomes about 16 of them; then each group's q is searched around its best
scale. The error of one group of one row is e^T M e. M is the group's block of the Hessian, or,
where columns not yet rounded will compensate errors, what they leave of it (walk.py).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from billfish.formats.grid import Grid, round_scale
from billfish.schemes.w4ax.scheme import MOST_Q
from billfish.solvers.clip import SEARCHED, diagonal_blocks, search_scales

GRID = Grid(4, symmetric=True)
# The largest scale of a row in bases. Output error of SmolLM2's linears, one top of 16: 1.005 times
# as large.
TOPS = tuple(17.5 - i / 2 for i in range(12))
NEAR = (-1, 1, -2, 2)


def search(
    weight: Tensor,  # (n, k) fp32
    hessian: Tensor | None,  # (k, k) fp32; None: all inputs count alike
    size: int,
    dtype: torch.dtype,  # of the stored base
) -> tuple[Tensor, Tensor]:
    """base (n, 1) and q (n, g), fp32."""
    blocks = None if hessian is None else diagonal_blocks(hessian, size)
    pieces = []
    for rows in torch.split(weight, max(16, SEARCHED[weight.device.type] // weight.shape[1])):
        groups = rows.view(len(rows), -1, size).transpose(0, 1).contiguous()
        if hessian is None:
            scale = GRID.fit(groups.amin(-1), groups.amax(-1), torch.float32)[0].T
        else:
            scale = search_scales(rows, hessian, GRID, size, torch.float32)[0]
        base, q = choose_base(groups, blocks, scale, dtype)
        pieces.append((base, choose_q(groups, blocks, base, q, NEAR)))
    bases, qs = zip(*pieces, strict=True)
    return torch.cat(bases), torch.cat(qs)


def choose_base(
    groups: Tensor,  # (g, n, size)
    metric: Tensor | None,  # (g, size, size); None: all inputs count alike
    scale: Tensor,  # (n, g): the best scales of any size
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The base of each row, (n, 1), and the whole numbers of it that are nearest to the scales."""
    largest = scale.amax(1, keepdim=True)
    base, q = largest, scale
    best = torch.full_like(largest, torch.inf)
    for top in TOPS:
        tried = round_scale(largest / top, dtype)
        whole = (scale / tried).round_().clamp_(1, MOST_Q)
        cost = _cost(groups, metric, tried * whole).sum(1, keepdim=True)
        better = cost < best
        best = torch.where(better, cost, best)
        base, q = torch.where(better, tried, base), torch.where(better, whole, q)
    return base, q


def choose_q(
    groups: Tensor, metric: Tensor | None, base: Tensor, q: Tensor, near: Sequence[int]
) -> Tensor:
    """(n, g): of `q` and its neighbours those with the smallest error."""
    best, lowest = q, _cost(groups, metric, base * q)
    for step in near:
        tried = (q + step).clamp_(1, MOST_Q)
        cost = _cost(groups, metric, base * tried)
        best = torch.where(cost < lowest, tried, best)
        lowest = torch.minimum(cost, lowest)
    return best


def _cost(groups: Tensor, metric: Tensor | None, scale: Tensor) -> Tensor:  # (n, g)
    steps = scale.T[..., None]
    error = GRID.nearest(groups, steps, steps).sub_(groups)
    weighted = error if metric is None else error @ metric
    return (weighted * error).sum(-1).T
