"""w4ax's op on an NVIDIA GPU: weights in records, Billfish's kernels, PyTorch's current stream.

plan.py launches. Kernels are compiled when a layer is loaded, never during a CUDA graph capture.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.kernels import jit
from billfish.kernels.device import HOPPER, index_of
from billfish.kernels.jit import Program
from billfish.schemes.base import Op, Tensors, watched
from billfish.schemes.gated import Gated, order
from billfish.schemes.w4ax.cuda import arrange
from billfish.schemes.w4ax.cuda.instances import programs
from billfish.schemes.w4ax.cuda.plan import RUN, linear, operator, plan

UNKNOWN = 'its kernels run symmetric a8 layers alone; op="reference" runs any, slowly.'


class Grouped(Protocol):
    """What kernels know of the scheme."""

    @property
    def group_size(self) -> int: ...
    @property
    def symmetric(self) -> bool: ...
    @property
    def mixed(self) -> bool: ...


class CudaOp(Op):
    """For Hopper: bulk copies, TMA, wgmma on bytes, programmatic dependent launch (PDL)."""

    name: ClassVar[str] = "cuda"
    run: ClassVar[int] = RUN
    batch_invariant: ClassVar[bool] = True  # sums are exact, scales those of a token

    @classmethod
    def refuses(cls, scheme: Grouped, n: int, k: int, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its weights are on {device}; move the model to a GPU with model.to('cuda')."
        if not torch.cuda.is_available():
            return "PyTorch finds no CUDA GPU; `billfish doctor` says why."
        found = torch.cuda.get_device_capability(index_of(device))
        if found != HOPPER:
            here = ".".join(map(str, found))
            return (
                f"its kernels are for Hopper, compute capability 9.0; this GPU has {here}. "
                'op="reference" runs anywhere, slowly.'
            )
        try:
            jit.version()
        except UserError:
            return "NVRTC, which compiles its kernels, is not here; pip install 'billfish[cuda]'."
        return UNKNOWN if scheme.mixed or not scheme.symmetric else None

    @classmethod
    def programs(cls, scheme: Grouped, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        return programs(scheme.group_size, dtype, arch)

    def __init__(self, scheme: Grouped, tensors: Tensors) -> None:
        if scheme.mixed or not scheme.symmetric:
            raise UserError(UNKNOWN)
        self.scheme = scheme
        self.packed = arrange.pack(scheme.group_size, tensors)
        self._prepare()

    def _prepare(self) -> None:
        # With PDL a kernel fetches weights before earlier kernels end, so packing must be complete.
        torch.cuda.current_stream(self.device).synchronize()
        plan(index_of(self.device), self.packed.shape, self.packed.dtype)

    def __call__(self, x: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
        call, packed, shape = operator if watched(x) else linear, self.packed, self.packed.shape
        sizes = (shape.k, shape.groups, shape.record_group)
        y: Tensor = call(x, packed.records, packed.bases, bias, *sizes, gated)
        return y

    @property
    def n(self) -> int:
        return self.packed.shape.n

    @property
    def device(self) -> torch.device:
        return self.packed.records.device

    def canonical(self) -> dict[str, Tensor]:
        return arrange.unpack(self.packed)

    def rows(self, which: Tensor) -> dict[str, Tensor]:
        return {name: tensor[which] for name, tensor in self.canonical().items()}

    def nbytes(self) -> int:
        return self.packed.records.nbytes + self.packed.bases.nbytes

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
        both = {name: torch.cat([each[name] for each in tensors])[rows] for name in tensors[0]}
        return Gated.of(cls(ops[0].scheme, both), sizes)


def _alike(ops: Sequence[CudaOp]) -> bool:
    kinds = {(op.scheme, op.device, op.packed.dtype, replace(op.packed.shape, n=0)) for op in ops}
    return len(kinds) == 1
