"""Which groups of a w2416 weight get 4 bits, which weights become outliers, and the scales and
zeros of 2-bit groups: by the error that they cause in the layer's output.

The error of one group of one row is e^T H_gg e, as in solvers/clip.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from billfish.schemes.w2416.scheme import ZERO, ZERO_STEP, round_base
from billfish.schemes.w2416.shares import BAND, GROUP, Shares

FRACTIONS = (1.0, 0.9, 0.8, 0.72, 0.65, 0.58, 0.5)  # of the step that covers a group's whole range
ZEROS = tuple(ZERO + ZERO_STEP * i for i in range(4))
NEAR = (-2, -1, 0, 1, 2)  # codes of a scale that are tried around the nearest


@dataclass
class Groups:
    """2-bit groups of some rows while their scales are searched: (g, n, 16), and H_gg of each."""

    weights: Tensor
    blocks: Tensor | None  # (g, 16, 16); None: all inputs count alike
    counts: Tensor | None = None  # (g, n, 16): 0 for outliers, which have no error, else 1

    def __post_init__(self) -> None:
        of = self.weights if self.counts is None else self.weights * self.counts
        low, high = of.amin(-1, keepdim=True), of.amax(-1, keepdim=True)
        self.range = ((high - low) / 3).clamp_(min=1e-12)  # (g, n, 1)
        self.best = torch.full_like(low, torch.inf)
        self.scale, self.zero = torch.ones_like(low), torch.ones_like(low)
        self.code = torch.zeros_like(low)

    def error(self, scale: Tensor, zero: Tensor | float) -> Tensor:
        error = nearest(self.weights, scale, zero).sub_(self.weights)
        return error if self.counts is None else error.mul_(self.counts)

    def attempt(self, scale: Tensor, code: Tensor | None = None) -> None:
        """Take this scale with the best zero, where that is better than what was found."""
        for index, value in enumerate(ZEROS):
            error = self.error(scale, value)
            weighted = error if self.blocks is None else error @ self.blocks
            cost = weighted.mul(error).sum(-1, keepdim=True)
            better = cost < self.best
            self.best = torch.where(better, cost, self.best)
            self.scale = torch.where(better, scale, self.scale)
            self.zero = torch.where(better, float(index), self.zero)
            if code is not None:
                self.code = torch.where(better, code, self.code)

    def search(self) -> None:
        for fraction in FRACTIONS:
            self.attempt(self.range * fraction)

    @property
    def errors(self) -> Tensor:  # (g, n, 16)
        return self.error(self.scale, self.zero * ZERO_STEP + ZERO)


def nearest(weights: Tensor, scale: Tensor, zero: Tensor | float) -> Tensor:
    return (weights / scale).add_(zero).round_().clamp_(0, 3).sub_(zero).mul_(scale)


def second_order(scale: Tensor) -> tuple[Tensor, Tensor]:
    """(n, g) scales -> base and offset, (n / 16, g) fp32: those of which (code + offset) * base
    with codes 0 to 15 comes closest to all scales of a band, relative to them."""
    bands = scale.view(-1, BAND, scale.shape[1])
    high = bands.amax(1)
    best = torch.full_like(high, torch.inf)
    base, offset = torch.ones_like(high), torch.zeros_like(high)
    for candidate in range(16):
        trial = round_base(high / (15 + candidate))
        steps = bands / trial[:, None]
        code = steps.round().clamp_(max(candidate, 1), 15 + candidate)
        cost = (code / steps - 1).square_().sum(1)
        better = cost < best
        best = torch.where(better, cost, best)
        base = torch.where(better, trial, base)
        offset = torch.where(better, float(candidate), offset)
    return base, offset


def choose_four(cost: Tensor, share: Shares) -> Tensor:
    """(k / 16,) bool: the groups of each part with the largest `cost` get 4 bits."""
    of_parts = cost.view(share.parts, -1)
    chosen = torch.zeros_like(of_parts, dtype=torch.bool)
    chosen.scatter_(1, of_parts.topk(share.four, 1).indices, True)
    return chosen.flatten()


def choose_outliers(cost: Tensor, share: Shares) -> Tensor:
    """(n / 16, parts, outliers) int64: places with the largest `cost`, (n, k), of each band and
    part, ascending."""
    n, k = cost.shape
    bands = cost.view(n // BAND, BAND, share.parts, k // share.parts).transpose(1, 2)
    places = bands.reshape(n // BAND, share.parts, -1).topk(share.outliers, -1).indices
    return places.sort(-1).values


def columns_of(groups: Tensor) -> Tensor:
    """Indices of groups -> indices of their columns."""
    inside = torch.arange(GROUP, device=groups.device)
    return (groups[:, None] * GROUP + inside).flatten()
