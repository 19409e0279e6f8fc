"""The solution of a w4ax weight, as solvers leave it."""

from dataclasses import dataclass

from torch import Tensor

from billfish.schemes.base import Solved
from billfish.schemes.w4ax.scheme import MIDDLE, W4AX


@dataclass(frozen=True)
class WholeScaled(Solved):
    scheme: W4AX
    codes: Tensor  # (n, k) uint8
    q: Tensor  # (n, g) uint8: 1 to 16
    base: Tensor  # (n, 1) in the stored dtype

    @property
    def decoded(self) -> Tensor:
        steps = self.codes.float().sub_(MIDDLE).view(*self.q.shape, -1)
        return steps.mul_(self.q.float()[..., None]).view(self.codes.shape) * self.base.float()

    def rows(self, start: int, end: int) -> "WholeScaled":
        cut = slice(start, end)
        return WholeScaled(
            None if self.energy is None else self.energy[cut],
            self.note,
            None if self.target is None else self.target[cut],
            self.scheme,
            self.codes[cut],
            self.q[cut],
            self.base[cut],
        )

    def tensors(self) -> dict[str, Tensor]:
        return self.scheme.pack(self.codes, self.q, self.base)
