"""Real numbers <-> codes: the uniform grid, symmetric or asymmetric, one scale per group of
columns.

    weight = (code - zero) * scale        code and zero in [0, 2^bits)

Symmetric means zero = 2^(bits-1) everywhere, which is not stored. Knows nothing of packing, files
or the search for a good scale (solvers/clip.py). A scale is rounded to the dtype it is stored in
before codes are computed from it, so that solvers and kernels use the same scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from billfish.errors import UserError

MIN_BITS, MAX_BITS = 2, 8


@dataclass(frozen=True)
class Grid:
    bits: int = 4
    symmetric: bool = True

    def __post_init__(self) -> None:
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise UserError(f"bits={self.bits}: a uniform grid has {MIN_BITS} to {MAX_BITS} bits.")

    @property
    def levels(self) -> int:
        return 1 << self.bits

    @property
    def middle(self) -> int:
        """The zero point of the symmetric grid."""
        return 1 << (self.bits - 1)

    def fit(
        self,
        low: Tensor,  # (...) fp32, smallest weight of each group
        high: Tensor,  # (...) fp32, largest
        dtype: torch.dtype,  # in which the scale will be stored
    ) -> tuple[Tensor, Tensor]:
        """Scale (fp32 holding values of `dtype`) and integer zero (fp32) that cover [low, high].

        Symmetric: the grid spans -2^(b-1) to 2^(b-1) - 1; the scale is absmax / (2^(b-1) - 0.5), so
        that an extreme of either sign is off by half a step at most.
        """
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        if self.symmetric:
            scale = torch.maximum(-low, high) / (self.middle - 0.5)
        else:
            scale = (high - low) / (self.levels - 1)
        scale = round_scale(scale, dtype)
        if self.symmetric:
            zero = torch.full_like(scale, float(self.middle))
        else:
            zero = torch.round(-low / scale).clamp(0, self.levels - 1)
        return scale, zero

    def encode(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Nearest code, as fp32 integers; the three broadcast."""
        return torch.clamp(torch.round(weight / scale) + zero, 0, self.levels - 1)

    def decode(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return (codes - zero) * scale

    def nearest(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """decode(encode(weight)) in one go, for searches that try many scales."""
        steps = (weight / scale).round_()
        if self.symmetric:  # scalar bounds: clamping takes a third of the time
            return steps.clamp_(-self.middle, self.middle - 1).mul_(scale)
        return steps.clamp_(-zero, self.levels - 1 - zero).mul_(scale)


def round_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """To the nearest value of `dtype`, kept positive, finite and normal: a group of zeros gets the
    smallest normal number, under which every code still decodes to a finite value."""
    info = torch.finfo(dtype)
    return scale.clamp(info.tiny, info.max).to(dtype).float()


def group_count(k: int, group_size: int) -> int:
    """Groups along k; -1 is one group per output channel. Raises with the sizes that divide k."""
    if group_size == -1:
        return 1
    if group_size < 1:
        raise UserError(
            f"group size {group_size}: it is 1 or more, or -1 for one scale per channel."
        )
    if k % group_size:
        fits = [size for size in (16, 32, 64, 96, 128, 192, 256, 512) if k % size == 0]
        raise UserError(
            f"group size {group_size} does not divide k = {k}. Sizes that do: "
            f"{', '.join(map(str, fits)) or 'none of the usual ones'}; "
            "-1 (one scale per channel) always fits."
        )
    return k // group_size
