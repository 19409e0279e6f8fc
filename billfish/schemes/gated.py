"""Gate and up as one product with SwiGLU in its epilogue: the order of its rows, and the ops of the
two layers.

Rows are interleaved by a run of 8 or 16 rows: gates, followed by their ups. A warp that stores a
gate then has its up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from billfish.schemes.base import NormInput, Op


def order(n: int, run: int) -> Tensor:
    """Index among the n interleaved rows -> index in [all gates, all ups]."""
    return torch.arange(n).view(2, -1, run).transpose(0, 1).flatten()


def apart(y: Tensor, run: int) -> Tensor:
    """(..., n) interleaved -> all gates, then all ups."""
    return y.view(*y.shape[:-1], -1, 2, run).transpose(-3, -2).reshape(y.shape)


class Whole(Protocol):
    """The op of a layer with interleaved rows."""

    run: ClassVar[int]

    @property
    def n(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def norm_input(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> NormInput: ...

    def __call__(self, x: Any, bias: Tensor | None = None, gated: bool = False) -> Tensor: ...

    def rows(self, which: Tensor) -> dict[str, Tensor]:
        """Canonical tensors of some of its rows."""

    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Gated:
    whole: Whole
    parts: list["Part"]  # the layers' ops from now on

    @classmethod
    def of(cls, whole: Whole, sizes: Sequence[int]) -> "Gated":
        places = torch.argsort(order(whole.n, whole.run)).to(whole.device)
        rows = torch.split(places, list(sizes))
        return cls(whole, [Part(whole, each) for each in rows])

    def norm_input(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> NormInput:
        return self.whole.norm_input(hidden, delta, weight, eps)

    def __call__(self, x: Any) -> Tensor:  # (..., k) -> (..., n / 2): silu(gate) * up
        return self.whole(x, gated=True)

    def both(self, x: Tensor) -> Tensor:  # (..., k) -> (..., n): gates, then ups
        return apart(self.whole(x), self.whole.run)


class Part(Op):
    """Op of the gate or the up layer alone, for code that calls the model's modules instead of the
    decoder: it computes both and takes its rows, twice the work."""

    name: ClassVar[str] = "gated"

    @classmethod
    def refuses(cls, scheme: Any, n: int, k: int, device: torch.device) -> str:
        return "it is made of a gate and an up layer that are arranged already."

    def __init__(self, whole: Whole, rows: Tensor) -> None:
        self.whole, self.rows = whole, rows

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.whole(x)[..., self.rows]
        return y if bias is None else y + bias

    def canonical(self) -> dict[str, Tensor]:
        return self.whole.rows(self.rows)

    def nbytes(self) -> int:
        return self.whole.nbytes() * len(self.rows) // self.whole.n

    @classmethod
    def join(cls, ops: Sequence[Any]) -> None:
        """Gate and up are joined already."""

    @classmethod
    def gate(cls, ops: Sequence["Part"]) -> Gated | None:
        """The op that they are parts of, for a second decoder of the same model."""
        found = Gated.of(ops[0].whole, [len(op.rows) for op in ops])
        pairs = zip(ops, found.parts, strict=True)
        same = all(a.whole is b.whole and torch.equal(a.rows, b.rows) for a, b in pairs)
        return found if same else None
