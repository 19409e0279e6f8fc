"""AWQ: weights of input channels with large activations are scaled up before rounding, and the
preceding layer's outputs are scaled down to match.

The scale of channel j is magnitude_j^a / mean|w_j|^b; the exponents are searched. A candidate is
judged by the squared error of the layer's output, tr(E H E^T), computed from the Hessian, so that
no activations need to be kept. solvers/clip.py searches the clipping afterwards.
"""

import torch
from torch import Tensor

from billfish.formats.grid import Grid
from billfish.solvers.clip import search_scales

RATIOS = tuple(i / 10 for i in range(1, 10))
COARSE_CLIP = (1.0, 0.85, 0.7)


def search_fold(
    weight: Tensor,  # (n, k) fp32: all linears that share this input, stacked
    hessian: Tensor,  # (k, k) fp32
    magnitude: Tensor,  # (k,) mean |x|
    share: Tensor,  # (k,) int64: channels with equal values share a scale (grouped-query attention)
    grid: Grid,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """(k,) fp32: the factor of each column; all ones if no candidate has a smaller error."""
    columns = weight.abs().mean(0).clamp(min=1e-6)
    magnitude = magnitude.clamp(min=1e-6)
    best = torch.ones_like(magnitude)
    lowest = _error(weight, best, hessian, grid, group_size, dtype)
    for ratio in RATIOS:
        for power in (0.0, 1.0 - ratio):
            factor = _shared(magnitude**ratio / columns**power, share)
            factor = factor / (factor.max() * factor.min()).sqrt()
            error = _error(weight, factor, hessian, grid, group_size, dtype)
            if error < lowest:
                lowest, best = error, factor
    return best


def _shared(factor: Tensor, share: Tensor) -> Tensor:
    """Replace factors of channels that share a scale by their geometric mean."""
    count = int(share.max()) + 1
    total = torch.zeros(count, device=factor.device).index_add_(0, share, factor.log())
    members = torch.zeros(count, device=factor.device).index_add_(0, share, torch.ones_like(factor))
    return (total / members).exp()[share]


def _error(
    weight: Tensor, factor: Tensor, hessian: Tensor, grid: Grid, group_size: int, dtype: torch.dtype
) -> float:
    scaled = weight * factor
    inner = hessian / (factor[:, None] * factor[None, :])
    scale, zero = search_scales(scaled, inner, grid, group_size, dtype, COARSE_CLIP, ())
    groups = scaled.view(len(weight), -1, group_size)
    scale, zero = scale[..., None], zero[..., None]
    difference = grid.nearest(groups, scale, zero).sub_(groups).view_as(weight)
    return float(((difference @ inner) * difference).sum())
