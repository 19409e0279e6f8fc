"""w4ax's op on an NVIDIA GPU: weights in records, Billfish's kernels, PyTorch's current stream.

rounding.py and plan.py launch. Kernels are compiled when a layer is loaded, never during a CUDA
graph capture.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from billfish.kernels.device import index_of
from billfish.kernels.jit import Program
from billfish.schemes.base import Tensors, watched
from billfish.schemes.gated import Gated, order
from billfish.schemes.gpu import GpuOp
from billfish.schemes.w4ax.cuda import arrange
from billfish.schemes.w4ax.cuda.inputs import MOST_ORDERED, TAKES, Rounded
from billfish.schemes.w4ax.cuda.instances import programs
from billfish.schemes.w4ax.cuda.plan import RUN, multiply, operator, plan
from billfish.schemes.w4ax.cuda.rounding import normalized, rounded, rounding
from billfish.schemes.w4ax.scheme import SHARED


class Grouped(Protocol):
    """What kernels know of the scheme."""

    @property
    def group_size(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def symmetric(self) -> bool: ...
    @property
    def mixed(self) -> bool: ...
    @property
    def rotation(self) -> bool: ...


class CudaOp(GpuOp):
    """For Hopper: bulk copies, TMA, wgmma on bytes, programmatic dependent launch (PDL)."""

    name: ClassVar[str] = "cuda"
    run: ClassVar[int] = RUN
    batch_invariant: ClassVar[bool] = True  # sums are exact, scales those of a token
    doubled: ClassVar[bool] = True

    @classmethod
    def refuses_layer(cls, scheme: Grouped, n: int, k: int) -> str | None:
        if scheme.mixed and k > MOST_ORDERED:
            return f"its kernels order up to {MOST_ORDERED} inputs, the layer has {k}."
        return None

    @classmethod
    def programs(cls, scheme: Grouped, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        return programs(scheme.group_size, dtype, arch, scheme.mixed, not scheme.symmetric)

    def __init__(self, scheme: Grouped, tensors: Tensors) -> None:
        self.scheme = scheme
        self.packed = arrange.pack(scheme.group_size, tensors, scheme.rotation)
        inputs = self.packed.inputs
        self.takes = TAKES if inputs is None else inputs.takes()
        self._prepare()

    def _prepare(self) -> None:
        # With PDL a kernel fetches weights before earlier kernels end, so packing must be complete.
        torch.cuda.current_stream(self.device).synchronize()
        index, packed = index_of(self.device), self.packed
        plan(index, packed.shape, packed.dtype)
        rounding(index, packed.dtype, packed.shape.k, packed.inputs is not None)

    def prepare(self, x: Tensor) -> Tensor | Rounded:
        if watched(x):  # the operator rounds it
            return x
        packed = self.packed
        return rounded(x, packed.shape.k, packed.inputs, self.device)

    def norm_input(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Rounded, Tensor] | None:
        if watched(hidden) or hidden.shape[-1] != self.packed.shape.k:
            return None
        made = normalized(hidden, delta, weight, eps, self.packed.inputs)
        return made and (made, hidden)

    def __call__(
        self, x: Tensor | Rounded, bias: Tensor | None = None, gated: bool = False
    ) -> Tensor:
        packed, shape = self.packed, self.packed.shape
        if isinstance(x, Tensor):
            if watched(x):
                sizes = (shape.k, shape.groups, shape.record_group, shape.asymmetric)
                inputs = packed.inputs or (None, None, False)
                tensors = (packed.records, packed.bases, bias)
                y: Tensor = operator(x, *tensors, *sizes, *inputs, gated)
                return y
            x = rounded(x, shape.k, packed.inputs, self.device)
        return multiply(x, packed.records, packed.bases, bias, shape, gated)

    @property
    def n(self) -> int:
        return self.packed.shape.n

    @property
    def device(self) -> torch.device:
        return self.packed.records.device

    def canonical(self) -> dict[str, Tensor]:
        return arrange.unpack(self.packed)

    def rows(self, which: Tensor) -> dict[str, Tensor]:
        return {
            name: tensor if name in SHARED else tensor[which]
            for name, tensor in self.canonical().items()
        }

    def nbytes(self) -> int:
        packed = self.packed
        more = 0 if packed.inputs is None else packed.inputs.nbytes()
        return packed.records.nbytes + packed.bases.nbytes + more

    @classmethod
    def join(cls, ops: Sequence[Self]) -> Self | None:
        # Every op but the last must fill its bands of 64 outputs.
        if not _alike(ops) or any(op.n % arrange.N for op in ops[:-1]):
            return None
        whole = copy(ops[0])
        whole.packed, parts = arrange.Packed.joined([op.packed for op in ops])
        whole._prepare()
        for op, part in zip(ops, parts, strict=True):
            op.packed = part
        return whole

    @classmethod
    def gate(cls, ops: Sequence[Self]) -> Gated | None:
        sizes = [op.n for op in ops]
        if not _alike(ops) or len(set(sizes)) > 1 or sum(sizes) % (2 * RUN):
            return None
        tensors = [op.canonical() for op in ops]
        rows = order(sum(sizes), RUN).to(ops[0].device)
        both = {
            name: tensor if name in SHARED else torch.cat([each[name] for each in tensors])[rows]
            for name, tensor in tensors[0].items()
        }
        return Gated.of(cls(ops[0].scheme, both), sizes)


def _alike(ops: Sequence[CudaOp]) -> bool:
    """`takes` says whether they store and round inputs alike."""
    kinds = {
        (op.scheme, op.takes, op.device, op.packed.dtype, replace(op.packed.shape, n=0))
        for op in ops
    }
    return len(kinds) == 1
