"""Gate and up of a SwiGLU layer as one product that stores silu(gate) * up.

Their rows are interleaved by 8: of every 16 the first are gates and the next their ups, so that a
thread of a kernel that holds rows r and r + 8 of a tensor-core tile holds a gate and its up. The
two layers keep a reference and where their rows lie.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from billfish.schemes.base import Tensors

if TYPE_CHECKING:
    from billfish.schemes.w4a16.cuda import CudaOp
    from billfish.schemes.w4a16.scheme import W4A16

RUN = 8  # rows of one kind


def order(n: int) -> Tensor:
    """Place among the n interleaved rows -> place among all gates, then all ups."""
    return torch.arange(n).view(2, -1, RUN).transpose(0, 1).flatten()


def interleaved(scheme: "W4A16", layers: Sequence[Tensors]) -> dict[str, Tensor]:
    """Canonical tensors of [gates, ups], from one layer or two, in the kernels' order of rows."""
    codes = torch.cat([scheme.codes(each) for each in layers])
    scales = torch.cat([each["weight_scale"] for each in layers])
    zeros = torch.cat([scheme.zeros(each) for each in layers])
    rows = order(len(codes)).to(codes.device)
    return scheme.pack(codes[rows], scales[rows], zeros[rows])


def apart(y: Tensor) -> Tensor:
    """(..., n) in the kernels' order -> all gates, then all ups."""
    return y.view(*y.shape[:-1], -1, 2, RUN).transpose(-3, -2).reshape(y.shape)


@dataclass(frozen=True)
class Gated:
    whole: "CudaOp"
    parts: list["Part"]  # what the layers run with from now on

    @classmethod
    def of(cls, whole: "CudaOp", sizes: Sequence[int]) -> "Gated":
        places = torch.argsort(order(whole.shape.n)).to(whole.records.device)
        rows = torch.split(places, list(sizes))
        return cls(whole, [Part(whole, each) for each in rows])

    def __call__(self, x: Tensor) -> Tensor:  # (..., k) -> (..., n / 2): silu(gate) * up
        return self.whole(x, gated=True)

    def both(self, x: Tensor) -> Tensor:  # (..., k) -> (..., n): gates, then ups
        return apart(self.whole(x))


class Part:
    """One of the layers on its own: it runs the whole product and takes its rows. Twice the work,
    for whoever calls a model's modules beside its decoder."""

    name: ClassVar[str] = "gated"

    @staticmethod
    def refuses(scheme: "W4A16", n: int, k: int, device: torch.device) -> str:
        return "it is made of a gate and an up layer that are arranged already."

    def __init__(self, whole: "CudaOp", rows: Tensor) -> None:
        self.whole, self.rows = whole, rows

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.whole(x)[..., self.rows]
        return y if bias is None else y + bias

    def canonical(self) -> dict[str, Tensor]:
        scheme, tensors = self.whole.scheme, self.whole.canonical()
        codes, zeros = scheme.codes(tensors), scheme.zeros(tensors)
        scales = tensors["weight_scale"]
        return scheme.pack(codes[self.rows], scales[self.rows], zeros[self.rows])

    def nbytes(self) -> int:
        return self.whole.nbytes() * len(self.rows) // self.whole.shape.n

    @classmethod
    def join(cls, ops: Sequence[Any]) -> None:
        """What there was to join, is."""

    @classmethod
    def gate(cls, ops: Sequence["Part"]) -> Gated | None:
        """The one that they belong to: for another decoder of the same model."""
        found = Gated.of(ops[0].whole, [len(op.rows) for op in ops])
        pairs = zip(ops, found.parts, strict=True)
        same = all(a.whole is b.whole and torch.equal(a.rows, b.rows) for a, b in pairs)
        return found if same else None
