"""Statistics of a layer's inputs for the solvers, as means over all calibration tokens:

    hessian    x x^T          x  the layer's input in the model quantized so far
    drift      (y - x) x^T    y  its input in the original model
    magnitude  |x|

Sequences of different lengths are weighted by their tokens (MARLIN 3.5 (b)). One instance serves
all linears that share an input (q/k/v, gate/up).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

STRIPE = 512  # rows of x x^T in one product, from the diagonal on: with four stripes 3/8 are saved


@dataclass
class Statistics:
    k: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tokens: int = 0
    placed: bool = False  # channels are in the order that the scheme wants (offline/block.py)

    def __post_init__(self) -> None:
        self._outer = torch.zeros(self.k, self.k, device=self.device)
        self._magnitude = torch.zeros(self.k, device=self.device)
        self._drift: Tensor | None = None
        self._averaged = False

    def add(self, x: Tensor, original: Tensor | None = None) -> None:  # (..., k) any float dtype
        assert not self._averaged, "add() after the means were read"
        x = x.detach().reshape(-1, self.k).float()
        for start in range(0, self.k, STRIPE):  # upper triangle only; _average mirrors it
            stripe = self._outer[start : start + STRIPE, start:]
            stripe.addmm_(x[:, start : start + STRIPE].T, x[:, start:])
        if original is not None:
            if self._drift is None:
                self._drift = torch.zeros_like(self._outer)
            self._drift.addmm_((original.reshape(-1, self.k).float() - x).T, x)
        self._magnitude += x.abs().sum(0)
        self.tokens += x.shape[0]

    def _average(self) -> None:
        """Turn the sums into means, once and in place: memory is short for a second k x k
        matrix."""
        if not self._averaged:
            for start in range(0, self.k, STRIPE):
                stop = start + STRIPE
                self._outer[stop:, start:stop] = self._outer[start:stop, stop:].T
            for total in (self._outer, self._magnitude, self._drift):
                if total is not None:
                    total /= max(self.tokens, 1)
            self._averaged = True

    @property
    def hessian(self) -> Tensor:  # (k, k) fp32; not a copy
        self._average()
        return self._outer

    @property
    def drift(self) -> Tensor | None:  # (k, k) fp32
        self._average()
        return self._drift

    @property
    def magnitude(self) -> Tensor:  # (k,) fp32
        self._average()
        return self._magnitude

    def rescale(self, factor: Tensor) -> None:  # (k,)
        """Statistics of inputs multiplied by `factor`, which AWQ folds into the preceding layer."""
        for total in (self._outer, self._drift):
            if total is not None:
                total *= factor[:, None] * factor[None, :]
        self._magnitude *= factor

    def transformed(self, turn: Callable[[Tensor], Tensor]) -> "Statistics":
        """Hessian and drift of inputs T x, where turn(rows) is rows T^t."""
        made = Statistics(0, self.device, self.tokens, self.placed)
        made._outer = turn(turn(self.hessian).T.contiguous())
        if self.drift is not None:
            made._drift = turn(turn(self.drift).T.contiguous()).T.contiguous()
        made._averaged = True
        return made


def output_energy(weight: Tensor, decoded: Tensor, hessian: Tensor) -> Tensor:  # (n, 2)
    """For each row: e^T H e of the error e = weight - decoded, and w^T H w of the weight."""
    return torch.stack([_energy(weight - decoded, hessian), _energy(weight, hessian)], dim=1)


def _energy(rows: Tensor, hessian: Tensor) -> Tensor:
    return (rows @ hessian).mul_(rows).sum(1)
