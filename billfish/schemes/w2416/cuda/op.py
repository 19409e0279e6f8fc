"""w2416's ops on an NVIDIA GPU: weights in records, Billfish's kernels, PyTorch's current stream.

plan.py launches. Kernels are compiled when a layer is loaded, never during a CUDA graph capture.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from billfish.kernels.device import index_of
from billfish.kernels.jit import Program
from billfish.schemes.base import Tensors, watched
from billfish.schemes.gated import Gated, order
from billfish.schemes.gpu import AMPERE, GpuOp, at_least
from billfish.schemes.w2416.cuda import arrange
from billfish.schemes.w2416.cuda.instances import programs, stripe_programs
from billfish.schemes.w2416.cuda.plan import RUN, linear, operator, plan
from billfish.schemes.w2416.scheme import W2416
from billfish.schemes.w2416.shares import BAND


class CudaOp(GpuOp):
    """For Hopper: bulk copies, clusters, programmatic dependent launch (PDL)."""

    name: ClassVar[str] = "cuda"
    run: ClassVar[int] = RUN
    striped: ClassVar[bool] = False

    @classmethod
    def programs(cls, scheme: W2416, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        return programs(dtype, arch)

    @classmethod
    def tolerance(cls, scheme: W2416, tensors: Tensors, x: Tensor) -> float:
        """A 2-bit weight is rounded to x's type after its scale and its zero were."""
        unit = torch.finfo(x.dtype).eps / 2
        scale = float(scheme.scales_2(tensors).max())
        # scale and weight of up to 3 steps, the zero's weight of up to 2
        return 8 * unit * scale * float(x.double().abs().sum(-1).max())

    def __init__(self, scheme: W2416, tensors: Tensors) -> None:
        self.scheme = scheme
        self.packed = arrange.pack(scheme, tensors)
        self._prepare()

    def _prepare(self) -> None:
        # With PDL a kernel fetches weights before earlier kernels end, so packing must be complete.
        torch.cuda.current_stream(self.device).synchronize()
        plan(index_of(self.device), self.packed.shape, self.striped)

    def __call__(self, x: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
        call, packed, shape = operator if watched(x) else linear, self.packed, self.packed.shape
        half = shape.dtype == torch.float16
        sizes = (shape.n, shape.parts, shape.two, shape.four, shape.longest, half)
        y: Tensor = call(x, packed.records, packed.columns, bias, *sizes, gated, self.striped)
        return y

    @property
    def n(self) -> int:
        return self.packed.shape.n

    @property
    def device(self) -> torch.device:
        return self.packed.records.device

    def canonical(self) -> dict[str, Tensor]:
        return arrange.unpack(self.scheme, self.packed)

    def rows(self, which: Tensor) -> dict[str, Tensor]:
        """Whole bands of 16, as gates and ups are."""
        return _bands(self.canonical(), which[::BAND] // BAND)

    def nbytes(self) -> int:
        packed = self.packed
        kept = (packed.records, packed.columns, packed.ranks, packed.unused)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    @classmethod
    def join(cls, ops: Sequence[Self]) -> Self | None:
        # Every op but the last must fill its bands of 64 outputs.
        if not _alike(ops) or any(op.n % arrange.N for op in ops[:-1]):
            return None
        whole = copy(ops[0])
        whole.packed, parts = arrange.joined([op.packed for op in ops])
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
        both = {name: torch.cat([each[name] for each in tensors]) for name in tensors[0]}
        both["input_bits"] = tensors[0]["input_bits"]
        rows = order(sum(sizes), RUN)[::BAND].to(ops[0].device)
        return Gated.of(cls(ops[0].scheme, _bands(both, rows // BAND)), sizes)


class StripeOp(CudaOp):
    """MARLIN's striped partition, for GPUs from Ampere on."""

    name: ClassVar[str] = "stripe"
    striped: ClassVar[bool] = True

    @classmethod
    def refuses_gpu(cls, scheme: W2416, found: tuple[int, int]) -> str | None:
        return at_least(AMPERE, found)

    @classmethod
    def programs(cls, scheme: W2416, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        return stripe_programs(dtype, arch)

    @classmethod
    def gate(cls, ops: Sequence[Self]) -> Gated | None:
        return None


def _bands(tensors: Tensors, which: Tensor) -> dict[str, Tensor]:
    """Canonical tensors of some bands of 16 outputs."""
    count = len(tensors["scale_base"])
    made = {}
    for name, tensor in tensors.items():
        if name != "input_bits":
            of_bands = tensor.reshape(count, len(tensor) // count, *tensor.shape[1:])
            tensor = of_bands[which].flatten(0, 1)
        made[name] = tensor
    return made


def _alike(ops: Sequence[CudaOp]) -> bool:
    kinds = {(op.scheme, op.device, replace(op.packed.shape, n=0, longest=0)) for op in ops}
    columns = [op.packed.columns for op in ops]
    return len(kinds) == 1 and all(torch.equal(columns[0], each) for each in columns)
