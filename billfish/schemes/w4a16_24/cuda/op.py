"""w4a16_24's op on a Hopper GPU: weights in records, Billfish's kernels, PyTorch's current stream.

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
from billfish.schemes.base import Tensors, together, watched
from billfish.schemes.gated import Gated, order
from billfish.schemes.gpu import GpuOp
from billfish.schemes.w4a16_24.cuda import arrange
from billfish.schemes.w4a16_24.cuda.instances import programs
from billfish.schemes.w4a16_24.cuda.plan import RUN, multiply, operator, plan
from billfish.schemes.w4a16_24.scheme import W4A16Sparse


class CudaOp(GpuOp):
    """For Hopper: bulk copies, TMA, sparse tensor cores, programmatic dependent launch (PDL)."""

    name: ClassVar[str] = "cuda"
    run: ClassVar[int] = RUN
    doubled: ClassVar[bool] = True

    @classmethod
    def programs(cls, scheme: W4A16Sparse, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        return programs(scheme.group_size, dtype, arch)

    def __init__(self, scheme: W4A16Sparse, tensors: Tensors) -> None:
        self.scheme = scheme
        self.shape, self.records = arrange.pack(scheme, tensors)
        self._prepare()

    def _prepare(self) -> None:
        # With PDL a kernel fetches weights before earlier kernels end, so packing must be complete.
        torch.cuda.current_stream(self.device).synchronize()
        plan(index_of(self.device), self.shape, self.shape.scale_dtype)

    def __call__(self, x: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
        shape = self.shape
        if not watched(x):
            return multiply(x, self.records, bias, shape, gated)
        kind = arrange.SCALE_DTYPES.index(shape.scale_dtype)
        sizes = (shape.n, shape.k, shape.groups, shape.record_group, kind)
        y: Tensor = operator(x, self.records, bias, *sizes, gated)
        return y

    @property
    def n(self) -> int:
        return self.shape.n

    @property
    def device(self) -> torch.device:
        return self.records.device

    def canonical(self) -> dict[str, Tensor]:
        return arrange.unpack(self.scheme, self.shape, self.records)

    def rows(self, which: Tensor) -> dict[str, Tensor]:
        return _rows(self.scheme, [self.canonical()], which)

    def nbytes(self) -> int:
        return self.records.nbytes

    @classmethod
    def join(cls, ops: Sequence[Self]) -> Self | None:
        # Every op but the last must fill its bands of 64 outputs.
        if not _alike(ops) or any(op.n % arrange.N for op in ops[:-1]):
            return None
        whole = copy(ops[0])
        whole.shape = replace(whole.shape, n=sum(op.n for op in ops))
        whole.records, parts = together([op.records for op in ops])
        whole._prepare()
        for op, part in zip(ops, parts, strict=True):
            op.records = part
        return whole

    @classmethod
    def gate(cls, ops: Sequence[Self]) -> Gated | None:
        sizes = [op.n for op in ops]
        if not _alike(ops) or len(set(sizes)) > 1 or sum(sizes) % (2 * RUN):
            return None
        rows = order(sum(sizes), RUN).to(ops[0].device)
        both = _rows(ops[0].scheme, [op.canonical() for op in ops], rows)
        return Gated.of(cls(ops[0].scheme, both), sizes)


def _alike(ops: Sequence[CudaOp]) -> bool:
    return len({(op.scheme, op.device, replace(op.shape, n=0)) for op in ops}) == 1


def _rows(scheme: W4A16Sparse, layers: Sequence[Tensors], which: Tensor) -> dict[str, Tensor]:
    """Canonical tensors of some rows of the layers, which lie one below the other."""
    codes, places = map(torch.cat, zip(*map(scheme.kept, layers), strict=True))
    scales = torch.cat([each["weight_scale"] for each in layers])
    _, k = scheme.size(layers[0])
    return scheme.pack(codes[which], places[which], scales[which], len(which), k)
