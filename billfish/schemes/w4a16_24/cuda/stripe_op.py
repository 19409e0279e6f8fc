"""w4a16_24's op for sm_80 to sm_89: Sparse-MARLIN's kernel on sparse tensor cores. stripe_plan.py
launches. Kernels are compiled when a layer is loaded, never during a CUDA graph capture."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.kernels import jit
from billfish.kernels.device import index_of
from billfish.kernels.jit import Program
from billfish.schemes.base import Op, Tensors, together, watched
from billfish.schemes.w4a16_24.cuda import arrange
from billfish.schemes.w4a16_24.cuda.stripe import stripe_programs
from billfish.schemes.w4a16_24.cuda.stripe_plan import linear, operator, stripe_plan
from billfish.schemes.w4a16_24.scheme import W4A16Sparse

AMPERE = (8, 0)  # compute capability


class StripeOp(Op):
    """MARLIN's striped partition, for GPUs from Ampere on, the first with sparse tensor cores."""

    name: ClassVar[str] = "stripe"

    @classmethod
    def refuses(cls, scheme: W4A16Sparse, n: int, k: int, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its weights are on {device}; move the model to a GPU with model.to('cuda')."
        if not torch.cuda.is_available():
            return "PyTorch finds no CUDA GPU; `billfish doctor` says why."
        found = torch.cuda.get_device_capability(index_of(device))
        if found < AMPERE:
            return f"it needs compute capability 8.0; this GPU has {found[0]}.{found[1]}."
        try:
            jit.version()
        except UserError:
            return "NVRTC, which compiles its kernels, is not here; pip install 'billfish[cuda]'."
        return None

    @classmethod
    def programs(cls, scheme: W4A16Sparse, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        return stripe_programs(scheme.group_size, dtype, arch)

    def __init__(self, scheme: W4A16Sparse, tensors: Tensors) -> None:
        self.scheme = scheme
        self.shape, self.records = arrange.pack(scheme, tensors)
        self._prepare()

    def _prepare(self) -> None:
        stripe_plan(index_of(self.device), self.shape, self.shape.scale_dtype)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        call, shape = operator if watched(x) else linear, self.shape
        sizes = (shape.n, shape.k, shape.groups, shape.record_group)
        y: Tensor = call(x, self.records, bias, *sizes, shape.scale_dtype == torch.float16)
        return y

    @property
    def n(self) -> int:
        return self.shape.n

    @property
    def device(self) -> torch.device:
        return self.records.device

    def canonical(self) -> dict[str, Tensor]:
        return arrange.unpack(self.scheme, self.shape, self.records)

    def nbytes(self) -> int:
        return self.records.nbytes

    @classmethod
    def join(cls, ops: Sequence[Self]) -> Self | None:
        # Every op but the last must fill its bands of 64 outputs.
        kinds = {(op.scheme, op.device, replace(op.shape, n=0)) for op in ops}
        if len(kinds) > 1 or any(op.n % arrange.N for op in ops[:-1]):
            return None
        whole = copy(ops[0])
        whole.shape = replace(whole.shape, n=sum(op.n for op in ops))
        whole.records, parts = together([op.records for op in ops])
        whole._prepare()
        for op, part in zip(ops, parts, strict=True):
            op.records = part
        return whole
