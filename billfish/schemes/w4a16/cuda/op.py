"""w4a16's ops on an NVIDIA GPU: weights in records, Billfish's kernels, PyTorch's current stream.

plan.py launches. Kernels are compiled when a layer is loaded, never during a CUDA graph capture.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.kernels import jit
from billfish.kernels.device import gpu, index_of
from billfish.kernels.jit import Program
from billfish.schemes.base import Op, Tensors, together, watched
from billfish.schemes.w4a16 import columns
from billfish.schemes.w4a16.cuda import arrange
from billfish.schemes.w4a16.cuda.gated import RUN, apart, interleaved, order
from billfish.schemes.w4a16.cuda.instances import BATCH_ARCH, KINDS, Kind, programs, runs_batches
from billfish.schemes.w4a16.cuda.plan import linear, operator, plan
from billfish.schemes.w4a16.scheme import W4A16


class CudaOp(Op):
    """For Hopper and later: bulk copies, clusters, programmatic dependent launch (PDL)."""

    name: ClassVar[str] = "cuda"
    kernel: ClassVar[Literal["decode", "stripe"]] = "decode"
    least: ClassVar[tuple[int, int]] = (9, 0)  # compute capability

    @classmethod
    def refuses(cls, scheme: W4A16, n: int, k: int, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its weights are on {device}; move the model to a GPU with model.to('cuda')."
        size = scheme.group_of(k)
        if size != k and size % 32:
            return f"groups of {size}; its kernels take multiples of 32, and -1."
        if not torch.cuda.is_available():
            return "PyTorch finds no CUDA GPU; `billfish doctor` says why."
        found = torch.cuda.get_device_capability(index_of(device))
        if found < cls.least:
            asked = ".".join(map(str, cls.least))
            return f"it needs compute capability {asked}; this GPU has {found[0]}.{found[1]}."
        try:
            jit.version()
        except UserError:
            return "NVRTC, which compiles its kernels, is not here; pip install 'billfish[cuda]'."
        return None

    @classmethod
    def programs(cls, scheme: W4A16, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        return programs(scheme, cls.kernel, dtype, arch)

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

    def __call__(self, x: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
        if self.order is not None:
            x = x[..., self.order]
        call = operator if watched(x) else linear
        shape = self.shape
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
    def gate(cls, ops: Sequence[Self]) -> "Gated | None":
        sizes, device = [op.shape.n for op in ops], ops[0].records.device
        runs = runs_batches(KINDS[ops[0].kind], ops[0].shape.scale_dtype, gpu(device).arch)
        if not runs or not _alike(ops) or len(set(sizes)) > 1 or sum(sizes) % (2 * RUN):
            return None
        whole = cls(ops[0].scheme, interleaved(ops[0].scheme, [op.canonical() for op in ops]))
        return Gated.of(whole, sizes)


def _alike(ops: Sequence[CudaOp]) -> bool:
    kinds = {(op.scheme, op.records.device, replace(op.shape, n=0)) for op in ops}
    return len(kinds) == 1 and ops[0].g_idx is None


@dataclass(frozen=True)
class Gated:
    whole: "CudaOp"
    parts: list["Part"]  # the layers' ops from now on

    @classmethod
    def of(cls, whole: "CudaOp", sizes: Sequence[int]) -> "Gated":
        places = torch.argsort(order(whole.shape.n)).to(whole.records.device)
        rows = torch.split(places, list(sizes))
        return cls(whole, [Part(whole, each) for each in rows])

    def __call__(self, x: Tensor) -> Tensor:  # (..., k) -> (..., n / 2): silu(gate) * up
        return self.whole(x, gated=True)

    def both(self, x: Tensor) -> Tensor:  # (..., k) -> (..., n): gates, then ups
        return apart(self.whole(x))


class Part(Op):
    """Op of the gate or the up layer alone, for code that calls the model's modules instead of the
    decoder: it computes both and takes its rows, twice the work."""

    name: ClassVar[str] = "gated"

    @classmethod
    def refuses(cls, scheme: W4A16, n: int, k: int, device: torch.device) -> str:
        return "it is made of a gate and an up layer that are arranged already."

    def __init__(self, whole: "CudaOp", rows: Tensor) -> None:
        self.whole, self.rows = whole, rows

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.whole(x)[..., self.rows]
        return y if bias is None else y + bias

    def canonical(self) -> dict[str, Tensor]:
        scheme, tensors = self.whole.scheme, self.whole.canonical()
        codes, zeros = scheme.codes(tensors), scheme.zeros(tensors)
        scales = tensors["weight_scale"]
        return scheme.pack(codes[self.rows], scales[self.rows], zeros[self.rows])

    def nbytes(self) -> int:
        return self.whole.nbytes() * len(self.rows) // self.whole.shape.n

    @classmethod
    def join(cls, ops: Sequence[Any]) -> None:
        """Gate and up are joined already."""

    @classmethod
    def gate(cls, ops: Sequence["Part"]) -> Gated | None:
        """The op that they are parts of, for a second decoder of the same model."""
        found = Gated.of(ops[0].whole, [len(op.rows) for op in ops])
        pairs = zip(ops, found.parts, strict=True)
        same = all(a.whole is b.whole and torch.equal(a.rows, b.rows) for a, b in pairs)
        return found if same else None


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
    def refuses(cls, scheme: W4A16, n: int, k: int, device: torch.device) -> str | None:
        if scheme.bits > 4:
            return f"codes of {scheme.bits} bits; its kernel takes up to 4."
        reason = super().refuses(scheme, n, k, device)
        if reason is None and torch.cuda.get_device_capability(index_of(device)) != cls.least:
            return f"its kernel is for {BATCH_ARCH} alone, which this GPU is not."
        return reason
