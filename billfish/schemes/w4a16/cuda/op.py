"""w4a16's ops on an NVIDIA GPU: weights in records, Billfish's kernels, PyTorch's current stream.

plan.py launches. Kernels are compiled when a layer is loaded, never during a CUDA graph capture.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from billfish.kernels import norm
from billfish.kernels.device import gpu, index_of
from billfish.kernels.jit import Program
from billfish.schemes.base import LinearOp, Tensors, together, watched
from billfish.schemes.gated import Gated, Part
from billfish.schemes.gpu import GpuOp, at_least
from billfish.schemes.w4a16 import columns
from billfish.schemes.w4a16.cuda import arrange
from billfish.schemes.w4a16.cuda.experts import CudaExperts, Stack, refuses
from billfish.schemes.w4a16.cuda.experts import programs as experts_programs
from billfish.schemes.w4a16.cuda.gated import RUN, interleaved, order
from billfish.schemes.w4a16.cuda.instances import (
    BATCH_ARCH,
    KINDS,
    TYPES,
    Kind,
    kind_of,
    programs,
    runs_batches,
    runs_experts,
)
from billfish.schemes.w4a16.cuda.normed import Normed
from billfish.schemes.w4a16.cuda.plan import linear, normed_linear, operator, plan
from billfish.schemes.w4a16.scheme import W4A16


class CudaOp(GpuOp):
    """For Hopper and later: bulk copies, clusters, programmatic dependent launch (PDL)."""

    name: ClassVar[str] = "cuda"
    kernel: ClassVar[Literal["decode", "stripe"]] = "decode"
    least: ClassVar[tuple[int, int]] = (9, 0)  # compute capability
    run: ClassVar[int] = RUN

    @classmethod
    def refuses_gpu(cls, scheme: W4A16, found: tuple[int, int]) -> str | None:
        return at_least(cls.least, found)

    @classmethod
    def refuses_layer(cls, scheme: W4A16, n: int, k: int) -> str | None:
        size = scheme.group_of(k)
        if size != k and size % 32:
            return f"groups of {size}; its kernels take multiples of 32, and -1."
        return None

    @classmethod
    def programs(cls, scheme: W4A16, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        return programs(scheme, cls.kernel, dtype, arch)

    @classmethod
    def stack_programs(cls, scheme: W4A16, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        if dtype not in TYPES or scheme.has_g_idx:
            return ()
        kind = kind_of(scheme, cls.kernel, dtype)
        return experts_programs(kind) if runs_experts(kind, dtype, arch) else ()

    def __init__(self, scheme: W4A16, tensors: Tensors) -> None:
        self.scheme = self.inner = scheme
        self.g_idx = tensors["weight_g_idx"] if scheme.has_g_idx else None
        self.order: Tensor | None = None
        if self.g_idx is not None:
            tensors = self._sorted(tensors, self.g_idx)
        self.shape, self.records = arrange.pack(self.inner, tensors)
        shape = self.shape
        kind = Kind(self.kernel, shape.record_group, shape.zeros, shape.planes, shape.scale_dtype)
        self.kind = KINDS.index(kind)
        self._prepare()

    def _prepare(self) -> None:
        shape = self.shape
        # With PDL a kernel fetches weights before earlier kernels end, so packing must be complete.
        torch.cuda.current_stream(self.records.device).synchronize()
        plan(index_of(self.records.device), shape.n, shape.k, self.kind, shape.scale_dtype)

    def _sorted(self, tensors: Tensors, g_idx: Tensor) -> dict[str, Tensor]:
        """The tensors with columns sorted by group, and `inner`, the scheme without g_idx."""
        scales, codes = tensors["weight_scale"], self.scheme.codes(tensors)
        groups = scales.shape[1]
        self.order = columns.by_group(g_idx, groups, self.name)
        size = codes.shape[1] // groups
        self.inner = replace(self.scheme, has_g_idx=False, group_size=size)
        return self.inner.pack(codes[:, self.order], scales, self.scheme.zeros(tensors))

    def norm_input(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Normed, Tensor] | None:
        shape = self.shape
        if self.batch_invariant or self.order is not None or watched(hidden):
            return None
        if not norm.takes(hidden, delta, weight) or hidden.device != self.device:
            return None
        if (hidden.shape[1], hidden.dtype) != (shape.k, shape.scale_dtype):
            return None
        found = plan(hidden.get_device(), shape.n, shape.k, self.kind, hidden.dtype)
        if len(hidden) not in found.normed:
            return None
        summed = hidden if delta is None else torch.empty_like(hidden)
        return Normed(hidden, delta, weight, eps, summed), summed

    def __call__(
        self, x: Tensor | Normed, bias: Tensor | None = None, gated: bool = False
    ) -> Tensor:
        shape = self.shape
        if isinstance(x, Normed):
            return normed_linear(x, self.records, bias, shape.n, shape.k, self.kind, gated)
        if self.order is not None:
            x = x[..., self.order]
        call = operator if watched(x) else linear
        y: Tensor = call(
            x, self.records, bias, shape.n, shape.k, self.kind, self.batch_invariant, gated
        )
        return y

    def canonical(self) -> dict[str, Tensor]:
        tensors = arrange.unpack(self.inner, self.shape, self.records)
        if self.g_idx is None or self.order is None:
            return tensors
        codes = self.inner.codes(tensors)[:, torch.argsort(self.order)]
        zeros = self.inner.zeros(tensors)
        packed = self.scheme.pack(codes, tensors["weight_scale"], zeros)
        return {**packed, "weight_g_idx": self.g_idx}

    @property
    def n(self) -> int:
        return self.shape.n

    @property
    def device(self) -> torch.device:
        return self.records.device

    def rows(self, which: Tensor) -> dict[str, Tensor]:
        scheme, tensors = self.scheme, self.canonical()
        codes, zeros = scheme.codes(tensors), scheme.zeros(tensors)
        return scheme.pack(codes[which], tensors["weight_scale"][which], zeros[which])

    def nbytes(self) -> int:
        kept = (self.records, self.g_idx, self.order)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    @classmethod
    def join(cls, ops: Sequence[Self]) -> Self | None:
        # Every op but the last must fill its bands of 64 outputs.
        if not _alike(ops) or any(op.shape.n % arrange.N for op in ops[:-1]):
            return None
        whole = copy(ops[0])
        whole.shape = replace(whole.shape, n=sum(op.shape.n for op in ops))
        whole.records, parts = together([op.records for op in ops])
        whole._prepare()
        for op, part in zip(ops, parts, strict=True):
            op.records = part
        return whole

    @classmethod
    def gate(cls, ops: Sequence[Self]) -> Gated | None:
        sizes, device = [op.shape.n for op in ops], ops[0].records.device
        runs = runs_batches(KINDS[ops[0].kind], ops[0].shape.scale_dtype, gpu(device).arch)
        if not runs or not _alike(ops) or len(set(sizes)) > 1 or sum(sizes) % (2 * RUN):
            return None
        whole = cls(ops[0].scheme, interleaved(ops[0].scheme, [op.canonical() for op in ops]))
        return Gated.of(whole, sizes)

    @classmethod
    def stack(cls, experts: Sequence[Sequence[Self]], dtype: torch.dtype) -> CudaExperts | None:
        gates, downs = [op for each in experts for op in each[:2]], [each[2] for each in experts]
        gate, down = gates[0], downs[0]
        if not _alike(gates) or not _alike(downs) or gate.kind != down.kind:
            return None
        if len({op.shape.n for op in gates}) > 1 or len({op.shape.n for op in downs}) > 1:
            return None
        kind, arch = KINDS[gate.kind], gpu(gate.device).arch
        if not runs_experts(kind, dtype, arch) or refuses(len(experts), down.n, gate.n):
            return None
        shapes = replace(gate.shape, n=2 * gate.n), down.shape
        gate_up, downward = (Stack.empty(len(experts), each, gate.device) for each in shapes)
        rows = torch.argsort(order(2 * gate.n)).to(gate.device).chunk(2)
        parts: list[list[LinearOp]] = []
        for number, (one, other, last) in enumerate(experts):
            tensors = interleaved(one.scheme, [one.canonical(), other.canonical()])
            whole = cls(one.scheme, tensors)
            for stacked, op in ((gate_up, whole), (downward, last)):
                stacked.records[number] = op.records
                op.records = stacked.records[number]
            parts.append([*(Part(whole, each) for each in rows), last])
        torch.cuda.current_stream(gate.device).synchronize()  # as in _prepare
        return CudaExperts(kind, gate_up, downward, parts)


def _alike(ops: Sequence[CudaOp]) -> bool:
    kinds = {(op.scheme, op.records.device, replace(op.shape, n=0)) for op in ops}
    return len(kinds) == 1 and ops[0].g_idx is None


class StripeOp(CudaOp):
    """MARLIN's striped partition, for GPUs from Ampere on."""

    name: ClassVar[str] = "stripe"
    kernel: ClassVar[Literal["decode", "stripe"]] = "stripe"
    least: ClassVar[tuple[int, int]] = (8, 0)


class InvariantOp(CudaOp):
    """Batch invariant: sums are added in the same order for every m."""

    name: ClassVar[str] = "invariant"
    batch_invariant: ClassVar[bool] = True

    @classmethod
    def stack_programs(cls, scheme: W4A16, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        return ()

    @classmethod
    def stack(cls, experts: Sequence[Sequence[Self]], dtype: torch.dtype) -> None:
        """None: which kernel runs, and so the bits, would follow from the batch. Experts run one
        after the other."""

    @classmethod
    def refuses(cls, scheme: W4A16, n: int, k: int, device: torch.device) -> str | None:
        if scheme.bits > 4:
            return f"codes of {scheme.bits} bits; its kernel takes up to 4."
        reason = super().refuses(scheme, n, k, device)
        if reason is None and torch.cuda.get_device_capability(index_of(device)) != cls.least:
            return f"its kernel is for {BATCH_ARCH} alone, which this GPU is not."
        return reason
