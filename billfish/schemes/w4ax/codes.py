"""The solution of a w4ax weight, as solvers leave it and as training changes it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from billfish.schemes.base import Solved
from billfish.schemes.w4ax.scheme import MIDDLE, MOST_Q, W4AX
from billfish.solvers import straight

LEVELS = 2 * MIDDLE


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

    def trainable(self) -> "TrainableWhole":
        target = self.decoded if self.target is None else self.target
        return TrainableWhole(self.scheme, self.codes, self.q, self.base, target, self.note)


class TrainableWhole:
    """Codes, q and bases in training, or, without a target, bases alone.

    Implements Trainable of solvers/training.py.
    """

    scale_rate = 1.0

    def __init__(
        self,
        scheme: W4AX,
        codes: Tensor,
        q: Tensor,
        base: Tensor,
        target: Tensor | None,
        note: str | None = None,
    ) -> None:
        self.scheme, self.note, self.dtype = scheme, note, base.dtype
        self.start = codes.view(*q.shape, -1)  # (n, g, size)
        self.q, self.base = q.float()[..., None], base.float()[..., None]  # (n, g, 1), (n, 1, 1)
        self.change, self.change_q = torch.zeros_like(self.base), torch.zeros_like(self.q)
        self.position: Tensor | None = None
        if target is not None:
            steps = self.start.float() - MIDDLE
            self.position = straight.start(target.view(steps.shape), steps, self.q * self.base)

    @property
    def codes(self) -> list[Tensor]:
        return [] if self.position is None else [self.position]

    @property
    def scales(self) -> list[Tensor]:
        return [self.change] if self.position is None else [self.change, self.change_q]

    def weight(self, dtype: torch.dtype) -> Tensor:
        q, base = self._stored()
        if self.position is None:
            decoded = ((self.start.float() - MIDDLE) * q * base).to(dtype)
        else:
            middle = torch.full_like(q, float(MIDDLE))
            decoded = straight.rounded(self.position, q * base, middle, LEVELS, dtype)
        return decoded.view(len(decoded), -1)

    @torch.no_grad()
    def settle(self) -> WholeScaled:
        q, base = self._stored()
        codes = self.start
        if self.position is not None:
            middle = torch.full_like(q, float(MIDDLE))
            codes = (straight.whole_steps(self.position, middle, LEVELS) + MIDDLE).to(torch.uint8)
        return WholeScaled(
            None,
            self.note,
            None,
            self.scheme,
            codes.view(len(codes), -1),
            q[..., 0].round().to(torch.uint8),
            base[..., 0].to(self.dtype),
        )

    @torch.no_grad()
    def changed(self) -> dict[str, Tensor]:
        if self.position is not None:
            return self.settle().tensors()
        return {"weight_scale": self._stored()[1][..., 0].to(self.dtype)}

    def _stored(self) -> tuple[Tensor, Tensor]:
        """q and base as the checkpoint would hold them now."""
        base = straight.changed_scale(self.base, self.change, self.dtype)
        if self.position is None:
            return self.q, base
        exact = self.q * (1 + self.change_q)
        return straight.through(exact.detach().round().clamp(1, MOST_Q), exact), base
