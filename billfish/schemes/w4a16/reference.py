"""The oracle op of w4a16: decode, then an fp64 matmul. Obviously right, slow, runs anywhere."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from billfish.schemes.base import Tensors

if TYPE_CHECKING:
    from billfish.schemes.w4a16.scheme import W4A16


class ReferenceOp:
    name: ClassVar[str] = "reference"

    @staticmethod
    def refuses(scheme: "W4A16", n: int, k: int, device: torch.device) -> str | None:
        return None

    def __init__(self, scheme: "W4A16", tensors: Tensors) -> None:
        self.scheme, self.tensors = scheme, dict(tensors)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = self.scheme.dequantize(self.tensors).double()
        y = x.double() @ weight.T
        return (y if bias is None else y + bias.double()).to(x.dtype)

    def canonical(self) -> dict[str, Tensor]:
        return dict(self.tensors)

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @classmethod
    def join(cls, ops: Sequence[Any]) -> None:
        """It keeps canonical tensors as they came, and is in no hurry."""

    @classmethod
    def gate(cls, ops: Sequence[Any]) -> None:
        """It has no such kernel."""
