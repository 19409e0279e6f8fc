"""w4ax's op for sm_80 to sm_89: COMET's kernel of INT4 and INT8 tiles. stripe.py launches.

Kernels are compiled when a layer is loaded, never during a CUDA graph capture.
"""

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
from billfish.schemes.base import Op, Tensors, watched
from billfish.schemes.gated import Gated, order
from billfish.schemes.w4ax.cuda import arrange
from billfish.schemes.w4ax.cuda.blocks import Blocks
from billfish.schemes.w4ax.cuda.stripe import (
    RUN,
    Rounding,
    linear,
    operator,
    stripe_plan,
    stripe_programs,
)
from billfish.schemes.w4ax.scheme import W4AX

AMPERE = (8, 0)  # compute capability
SHARED = ("input_order", "input_bits")  # of all rows


class StripeOp(Op):
    """From Ampere on. 4-bit activations are multiplied by INT4 tensor cores, which sm_80 to sm_89
    have; later GPUs emulate them."""

    name: ClassVar[str] = "stripe"
    run: ClassVar[int] = RUN
    batch_invariant: ClassVar[bool] = True  # sums are exact, scales those of a token

    @classmethod
    def refuses(cls, scheme: W4AX, n: int, k: int, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its weights are on {device}; move the model to a GPU with model.to('cuda')."
        if not torch.cuda.is_available():
            return "PyTorch finds no CUDA GPU; `billfish doctor` says why."
        found = torch.cuda.get_device_capability(index_of(device))
        if found < AMPERE:
            here = ".".join(map(str, found))
            return f"it needs compute capability 8.0; this GPU has {here}."
        try:
            jit.version()
        except UserError:
            return "NVRTC, which compiles its kernels, is not here; pip install 'billfish[cuda]'."
        return None if scheme.symmetric else 'it runs symmetric weights; op="reference" runs any.'

    @classmethod
    def programs(cls, scheme: W4AX, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        if not scheme.symmetric:
            return ()
        block = scheme.block if scheme.mixed else Rounding().block
        return stripe_programs(scheme.group_size, block, scheme.rotation, dtype, arch)

    def __init__(self, scheme: W4AX, tensors: Tensors) -> None:
        self.scheme, self.blocks, self.rounding = scheme, None, Rounding()
        if scheme.mixed:
            self.blocks = Blocks.of(scheme.group_size, scheme.block, tensors)
            self.rounding = Rounding(scheme.block, self.blocks.fours, scheme.rotation)
            self.packed = arrange.pack(scheme.block, self.blocks.sorted(tensors))
        else:
            self.packed = arrange.pack(scheme.group_size, tensors)
        self._prepare()

    def _prepare(self) -> None:
        packed = self.packed
        stripe_plan(index_of(self.device), packed.shape, self.rounding, packed.dtype)

    def __call__(self, x: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
        call, packed, shape = operator if watched(x) else linear, self.packed, self.packed.shape
        inputs = None if self.blocks is None else self.blocks.order
        sizes = (shape.k, shape.groups, shape.record_group)
        rounding = (self.rounding.block, self.rounding.fours, self.rounding.rotated)
        y: Tensor = call(x, packed.records, packed.bases, inputs, bias, *sizes, *rounding, gated)
        return y

    @property
    def n(self) -> int:
        return self.packed.shape.n

    @property
    def device(self) -> torch.device:
        return self.packed.records.device

    def canonical(self) -> dict[str, Tensor]:
        tensors = arrange.unpack(self.packed)
        return tensors if self.blocks is None else self.blocks.canonical(tensors)

    def rows(self, which: Tensor) -> dict[str, Tensor]:
        return _rows(self.canonical(), which)

    def nbytes(self) -> int:
        inputs = 0 if self.blocks is None else self.blocks.nbytes
        return self.packed.records.nbytes + self.packed.bases.nbytes + inputs

    @classmethod
    def join(cls, ops: Sequence[Self]) -> Self | None:
        # Every op but the last must fill its bands of 64 outputs.
        if not _alike(ops) or any(op.n % arrange.N for op in ops[:-1]):
            return None
        whole = copy(ops[0])
        whole.packed, parts = arrange.Packed.joined([op.packed for op in ops])
        whole._prepare()
        for op, part in zip(ops, parts, strict=True):
            op.packed, op.blocks = part, whole.blocks
        return whole

    @classmethod
    def gate(cls, ops: Sequence[Self]) -> Gated | None:
        sizes = [op.n for op in ops]
        if not _alike(ops) or len(set(sizes)) > 1 or sum(sizes) % (2 * RUN):
            return None
        tensors = [op.canonical() for op in ops]
        both = {
            name: tensor if name in SHARED else torch.cat([each[name] for each in tensors])
            for name, tensor in tensors[0].items()
        }
        rows = order(sum(sizes), RUN).to(ops[0].device)
        return Gated.of(cls(ops[0].scheme, _rows(both, rows)), sizes)


def _rows(tensors: Tensors, which: Tensor) -> dict[str, Tensor]:
    return {name: tensor if name in SHARED else tensor[which] for name, tensor in tensors.items()}


def _alike(ops: Sequence[StripeOp]) -> bool:
    kinds = {(op.scheme, op.device, op.packed.dtype, replace(op.packed.shape, n=0)) for op in ops}
    if len(kinds) > 1:
        return False
    first = ops[0].blocks
    return all(first is None or op.blocks is None or first.same(op.blocks) for op in ops)
