"""w4a16_24's op for sm_80 to sm_89: Sparse-MARLIN's partition. stripe_plan.py launches. Kernels are
compiled when a layer is loaded, never during a CUDA graph capture."""

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from billfish.kernels.device import index_of
from billfish.kernels.jit import Program
from billfish.schemes.base import watched
from billfish.schemes.gated import Gated
from billfish.schemes.gpu import AMPERE, at_least
from billfish.schemes.w4a16_24.cuda.arrange import SCALE_DTYPES
from billfish.schemes.w4a16_24.cuda.op import CudaOp
from billfish.schemes.w4a16_24.cuda.stripe import stripe_programs
from billfish.schemes.w4a16_24.cuda.stripe_plan import multiply, operator, stripe_plan
from billfish.schemes.w4a16_24.scheme import W4A16Sparse


class StripeOp(CudaOp):
    """For GPUs from Ampere on, the first with sparse tensor cores."""

    name: ClassVar[str] = "stripe"

    @classmethod
    def refuses_gpu(cls, scheme: W4A16Sparse, found: tuple[int, int]) -> str | None:
        return at_least(AMPERE, found)

    @classmethod
    def programs(cls, scheme: W4A16Sparse, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        return stripe_programs(scheme.group_size, dtype, arch)

    def _prepare(self) -> None:
        stripe_plan(index_of(self.device), self.shape, self.shape.scale_dtype)

    def __call__(self, x: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
        assert not gated, "gate() makes no such layer"
        shape = self.shape
        if not watched(x):
            return multiply(x, self.records, bias, shape)
        kind = SCALE_DTYPES.index(shape.scale_dtype)
        sizes = (shape.n, shape.k, shape.groups, shape.record_group, kind)
        y: Tensor = operator(x, self.records, bias, *sizes)
        return y

    @classmethod
    def gate(cls, ops: Sequence[Self]) -> Gated | None:
        return None
