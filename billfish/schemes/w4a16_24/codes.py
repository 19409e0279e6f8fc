"""The solution of a w4a16_24 weight, as solvers leave it and as training changes it."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from billfish.schemes.base import Solved
from billfish.schemes.w4a16_24.scheme import MIDDLE, W4A16Sparse, kept_at, spread
from billfish.solvers import straight

LEVELS = 16


@dataclass(frozen=True)
class Kept(Solved):
    scheme: W4A16Sparse
    k: int
    codes: Tensor  # (n, 2 f) uint8, f = ceil(k / 4)
    places: Tensor  # (n, 2 f) uint8: in each four, ascending
    scales: Tensor  # (n, g) in the stored dtype

    @property
    def decoded(self) -> Tensor:
        return self.scheme.decode(self.codes, self.places, self.scales, self.k)

    def rows(self, start: int, end: int) -> "Kept":
        cut = slice(start, end)
        return replace(
            self,
            energy=None if self.energy is None else self.energy[cut],
            target=None if self.target is None else self.target[cut],
            codes=self.codes[cut],
            places=self.places[cut],
            scales=self.scales[cut],
        )

    def tensors(self) -> dict[str, Tensor]:
        return self.scheme.pack(self.codes, self.places, self.scales, len(self.codes), self.k)

    def trainable(self) -> "TrainableKept":
        return TrainableKept(self, self.decoded if self.target is None else self.target)


class TrainableKept:
    """Codes and scales in training, or, without a target, scales alone. Places stay as the solver
    chose them. Implements Trainable of solvers/training.py."""

    scale_rate = 1.0
    rounding = None

    def __init__(self, solved: Kept, target: Tensor | None) -> None:
        self.solved = replace(solved, energy=None, target=None)
        shape = (*solved.scales.shape, -1)
        self.places = solved.places.long()  # scatter's own type: not converted in every step
        self.start = (solved.codes.float() - MIDDLE).view(shape)  # (n, g, kept of a group)
        self.scale = solved.scales.float()[..., None]
        self.change = torch.zeros_like(self.scale)
        self.position: Tensor | None = None
        if target is not None:
            kept = kept_at(target, solved.places, 0.0).view(shape)
            self.position = straight.start(kept, self.start, self.scale)
            self.zero = torch.full_like(self.scale, float(MIDDLE))

    @property
    def codes(self) -> list[Tensor]:
        return [] if self.position is None else [self.position]

    @property
    def scales(self) -> list[Tensor]:
        return [self.change]

    def weight(self, dtype: torch.dtype) -> Tensor:
        scale = self._stored()
        if self.position is None:
            kept = (self.start * scale).to(dtype)
        else:
            kept = straight.rounded(self.position, scale, self.zero, LEVELS, dtype)
        return spread(kept.flatten(1), self.places, self.solved.k)

    @torch.no_grad()
    def settle(self) -> Kept:
        codes = self.solved.codes
        if self.position is not None:
            steps = straight.whole_steps(self.position, self.zero, LEVELS)
            codes = (steps + MIDDLE).to(torch.uint8).view_as(codes)
        scales = self._stored()[..., 0].to(self.solved.scales.dtype)
        return replace(self.solved, codes=codes, scales=scales)

    @torch.no_grad()
    def changed(self) -> dict[str, Tensor]:
        tensors = self.settle().tensors()
        return tensors if self.position is not None else {"weight_scale": tensors["weight_scale"]}

    def _stored(self) -> Tensor:
        """Scales as the checkpoint would hold them now."""
        return straight.changed_scale(self.scale, self.change, self.solved.scales.dtype)
