"""Which groups of a w2416 weight get 4 bits, which weights become outliers, and the scales and
zeros of 2-bit groups: by the error that they cause in the layer's output.

The error of one group of one row is e^T M e. M is the group's block of the Hessian, or, where
columns not yet rounded will compensate errors, what they leave of it (walk.py).
"""

import torch
from torch import Tensor

from billfish.schemes.w2416.scheme import ZERO, ZERO_STEP, round_base, spread
from billfish.schemes.w2416.shares import BAND, GROUP, Shares

FRACTIONS = (1.0, 0.9, 0.8, 0.72, 0.65, 0.58, 0.5)  # of the step that covers a group's whole range
NEAR = (-2, -1, 0, 1, 2)  # codes of a scale that are tried around the nearest


class Groups:
    """2-bit groups of some rows while their scales are searched."""

    def __init__(
        self,
        weights: Tensor,  # (g, n, 16)
        metric: Tensor | None,  # (g, 16, 16); None: all inputs count alike
        counts: Tensor | None = None,  # (g, n, 16): 0 for outliers, which have no error, else 1
    ) -> None:
        self.weights, self.metric, self.counts = weights, metric, counts
        of = weights if counts is None else weights * counts
        self.range = (of.amax(-1, keepdim=True) - of.amin(-1, keepdim=True)).div_(3)  # (g, n, 1)
        self.range.clamp_(min=1e-12)
        self.zeros = ZERO + ZERO_STEP * torch.arange(4.0, device=weights.device).view(4, 1, 1, 1)
        self.best = torch.full_like(self.range, torch.inf)
        self.scale, self.zero, self.code = (torch.zeros_like(self.range) for _ in range(3))

    def attempt(self, scale: Tensor, code: Tensor | None = None) -> None:
        """Take this scale with the best of the four zeros, where that is better than what was
        found."""
        error = (self.weights / scale).add(self.zeros).round_().clamp_(0, 3)  # (4, g, n, 16)
        error.sub_(self.zeros).mul_(scale).sub_(self.weights)
        if self.counts is not None:
            error *= self.counts
        weighted = error if self.metric is None else error @ self.metric
        cost, zero = (weighted * error).sum(-1, keepdim=True).min(0)
        better = cost < self.best
        self.best = torch.where(better, cost, self.best)
        self.scale = torch.where(better, scale, self.scale)
        self.zero = torch.where(better, zero.float(), self.zero)
        if code is not None:
            self.code = torch.where(better, code, self.code)

    def search(self) -> None:
        for fraction in FRACTIONS:
            self.attempt(self.range * fraction)

    def search_stored(self) -> tuple[Tensor, Tensor]:
        """Search, then round scales to second order: base and offset, (n / 16, g); `code`, `zero`
        and `scale` are then those that can be stored."""
        self.search()
        base, offset = second_order(self.scale[..., 0].T)
        wide, shift = (spread(of).T[..., None] for of in (base, offset))  # (g, n, 1)
        around = (self.scale / wide - shift).round_()
        self.best.fill_(torch.inf)
        for step in NEAR:
            code = (around + step).clamp_(0, 15)
            code = code + (code + shift == 0)  # a scale is not 0
            self.attempt((code + shift) * wide, code)
        return base, offset

    @property
    def errors(self) -> Tensor:  # (g, n, 16)
        zero = self.zero * ZERO_STEP + ZERO
        return nearest(self.weights, self.scale, zero).sub_(self.weights)


def nearest(weights: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return (weights / scale).add_(zero).round_().clamp_(0, 3).sub_(zero).mul_(scale)


def second_order(scale: Tensor) -> tuple[Tensor, Tensor]:
    """(n, g) scales -> base and offset, (n / 16, g) fp32: those of which (code + offset) * base
    with codes 0 to 15 comes closest to all scales of a band, relative to them."""
    bands = scale.reshape(-1, BAND, scale.shape[1])
    offsets = torch.arange(16.0, device=scale.device).view(16, 1, 1)
    base = round_base(bands.amax(1) / (15 + offsets))  # (16, n / 16, g)
    steps = bands / base[:, :, None]
    low, high = offsets.clamp(min=1)[..., None], (15 + offsets)[..., None]
    code = torch.minimum(torch.maximum(steps.round(), low), high)
    chosen = (code / steps - 1).square_().sum(2).argmin(0, keepdim=True)
    return base.gather(0, chosen)[0], chosen[0].float()


def choose_four(cost: Tensor, share: Shares) -> Tensor:
    """(k / 16,) bool: the groups of each part with the largest `cost` get 4 bits."""
    of_parts = cost.view(share.parts, -1)
    chosen = torch.zeros_like(of_parts, dtype=torch.bool)
    chosen.scatter_(1, of_parts.topk(share.four, 1).indices, True)
    return chosen.flatten()


def choose_outliers(cost: Tensor, share: Shares) -> Tensor:
    """(n / 16, parts, outliers) int64: places with the largest `cost`, (n, k), of each band and
    part, ascending."""
    return of_bands(cost, share).topk(share.outliers, -1).indices.sort(-1).values


def of_bands(of_weights: Tensor, share: Shares) -> Tensor:
    """(n, k) -> (n / 16, parts, places)."""
    n = len(of_weights)
    bands = of_weights.reshape(n // BAND, BAND, share.parts, share.part)
    return bands.transpose(1, 2).reshape(n // BAND, share.parts, -1)


def grouped(rows: Tensor) -> Tensor:  # (n, g * 16) -> (g, n, 16)
    return rows.reshape(len(rows), -1, GROUP).transpose(0, 1).contiguous()
