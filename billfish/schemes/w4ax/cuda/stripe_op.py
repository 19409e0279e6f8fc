"""w4ax's op for sm_80 to sm_89: COMET's kernel of INT4 and INT8 tiles. stripe_plan.py launches.

Kernels are compiled when a layer is loaded, never during a CUDA graph capture.
"""

from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from billfish.kernels.device import index_of
from billfish.kernels.jit import Program
from billfish.schemes.base import Tensors, watched
from billfish.schemes.gpu import AMPERE, at_least
from billfish.schemes.w4ax.cuda import arrange
from billfish.schemes.w4ax.cuda.blocks import Blocks
from billfish.schemes.w4ax.cuda.inputs import Rounded
from billfish.schemes.w4ax.cuda.op import CudaOp, Grouped
from billfish.schemes.w4ax.cuda.stripe import Mix, stripe_programs
from billfish.schemes.w4ax.cuda.stripe_plan import multiply, operator, rounded, stripe_plan

TAKES = "w4ax stripe"  # what a8 layers multiply


class StripeOp(CudaOp):
    """From Ampere on. 4-bit activations are multiplied by INT4 tensor cores, which sm_80 to sm_89
    have; later GPUs emulate them."""

    name: ClassVar[str] = "stripe"

    @classmethod
    def refuses_gpu(cls, scheme: Grouped, found: tuple[int, int]) -> str | None:
        return at_least(AMPERE, found)

    @classmethod
    def refuses_layer(cls, scheme: Grouped, n: int, k: int) -> str | None:
        return None

    @classmethod
    def programs(cls, scheme: Grouped, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        mix = Mix(scheme.block, 0, scheme.rotation) if scheme.mixed else Mix()
        return stripe_programs(scheme.group_size, not scheme.symmetric, mix, dtype, arch)

    def __init__(self, scheme: Grouped, tensors: Tensors) -> None:
        self.scheme, self.mix, self.takes = scheme, Mix(), TAKES
        self.blocks: Blocks | None = None
        if scheme.mixed:
            blocks = self.blocks = Blocks.of(scheme.group_size, scheme.block, tensors)
            self.mix = Mix(scheme.block, blocks.fours, scheme.rotation)
            self.takes = f"{TAKES} {scheme.rotation} {blocks.digest()}"
            self.packed = arrange.pack(scheme.block, blocks.sorted(tensors))
        else:
            self.packed = arrange.pack(scheme.group_size, tensors)
        self._prepare()

    def _prepare(self) -> None:
        packed = self.packed
        stripe_plan(index_of(self.device), packed.shape, self.mix, packed.dtype)

    @property
    def order(self) -> Tensor | None:
        return None if self.blocks is None else self.blocks.order

    def prepare(self, x: Tensor) -> Tensor | Rounded:
        if watched(x):  # the operator rounds it
            return x
        return rounded(x, self.order, self.packed.shape, self.mix, self.device)

    def norm_input(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> None:
        return None

    def __call__(
        self, x: Tensor | Rounded, bias: Tensor | None = None, gated: bool = False
    ) -> Tensor:
        packed, shape, mix = self.packed, self.packed.shape, self.mix
        if isinstance(x, Tensor):
            if watched(x):
                sizes = (shape.k, shape.groups, shape.record_group, shape.asymmetric)
                rounding = (self.order, mix.block, mix.fours, mix.rotated)
                y: Tensor = operator(
                    x, packed.records, packed.bases, bias, *sizes, *rounding, gated
                )
                return y
            x = rounded(x, self.order, shape, mix, self.device)
        return multiply(x, packed.records, packed.bases, bias, shape, mix, gated)

    def canonical(self) -> dict[str, Tensor]:
        tensors = arrange.unpack(self.packed)
        return tensors if self.blocks is None else self.blocks.canonical(tensors)

    def nbytes(self) -> int:
        return super().nbytes() + (0 if self.blocks is None else self.blocks.nbytes)

    @classmethod
    def join(cls, ops: Sequence[Self]) -> Self | None:
        whole = super().join(ops)
        if whole is not None:
            for op in ops:  # alike: `takes` says so
                op.blocks = whole.blocks
        return whole
