"""w4a16 on an NVIDIA GPU: records in memory, our own kernels, torch's current stream.

Up to 16 tokens run in one launch at the speed of memory (w4a16_decode from sm_90 on, w4a16_stripe
from sm_80 on), more on Hopper's tensor cores (w4a16_batch); without these up to four slices, of 16
tokens (decode) or 64 (stripe), and more through decoded panels and the library's matrix product.
All of it is one operator of torch, so that torch.compile traces it and CUDA graphs capture it.
Kernels are compiled when a layer is arranged, never during a capture.
"""

import functools
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from billfish.errors import UserError
from billfish.kernels import jit, meeting, tensor_map
from billfish.kernels.device import gpu, index_of
from billfish.kernels.launch import Loaded
from billfish.schemes.base import Tensors, together, watched
from billfish.schemes.w4a16 import arrange, batch, columns, stripe, tile
from billfish.schemes.w4a16.gated import RUN, Gated, apart, interleaved
from billfish.schemes.w4a16.instances import (
    BATCH_ARCH,
    KINDS,
    TYPES,
    Kind,
    batch_kernel,
    few_kernel,
    panel_kernel,
    prepare,
    programs,
    runs_batches,
    stripe_tokens,
)

if TYPE_CHECKING:
    from billfish.schemes.w4a16.scheme import W4A16

__all__ = [
    "BATCH_ARCH", "KINDS", "CudaOp", "InvariantOp", "Kind", "Plan", "StripeOp", "linear", "plan",
    "prepare", "programs",
]  # fmt: skip
PANEL_THREADS = 256  # panel.cuh
# Each slice reads the weights again; decoding writes and reads them at 16 bits, 8 times as much.
MOST_SLICES = 4
PANEL_WEIGHTS = 2**25  # decoded at once: 64 MB, about what L2 keeps


class Plan:
    """One layer's launches on one device: all that does not change from call to call."""

    def __init__(self, index: int, n: int, k: int, kind: Kind, dtype: torch.dtype) -> None:
        self.n, self.k, self.kind, self.dtype = n, k, kind, dtype
        self.bands, self.k_tiles = -(-n // arrange.N), -(-k // arrange.K) * kind.planes
        self.panel = panel_kernel(kind, dtype).load(index)
        if kind.kernel == "decode":
            self.few = {tokens: self._decode(index, tokens) for tokens in (8, 16)}
        else:
            self.few = {t: self._stripe(index, t) for t in stripe_tokens(kind, dtype)}
        self.most = max(self.few)
        self.gpu, self.cuts = gpu(index), dict[tuple[int, bool], batch.Launch]()
        self.batches: dict[tuple[int, int], Loaded] = {}
        if runs_batches(kind, dtype, self.gpu.arch):
            for instance in batch.STAGE_US:
                self.batches[instance] = batch_kernel(kind, dtype, *instance).load(index)

    def batch(
        self,
        x: Tensor,
        records: Tensor,
        bias: Tensor | None,
        out: Tensor,
        m: int,
        invariant: bool,
        gated: bool = False,
    ) -> None:
        how = self.cuts.get((m, invariant))
        if how is None:
            pick = batch.pick_invariant if invariant else batch.pick
            how = pick(m, self.n, self.k_tiles, self.kind.record_bytes, self.gpu)
            self.cuts[m, invariant] = how
        cut, index = how.cut, self.gpu.index
        rows = tensor_map.of_rows(x.data_ptr(), m, self.k + -self.k % 8, cut.tokens)
        sums = locks = 0
        if how.sums:
            left = meeting.place(index, how.sums, how.blocks * batch.FLAGS)
            sums, locks = left[0].data_ptr(), left[1].data_ptr()
        arguments = (records.data_ptr(), rows, 0 if bias is None else bias.data_ptr(),
                     out.data_ptr(), sums, locks, m, self.n, how.m_tiles, how.n_tiles, self.k_tiles,
                     how.whole, how.stages, how.early, gated)  # fmt: skip
        kernel = self.batches[cut.tokens, cut.bands]
        kernel.launch(how.blocks, batch.THREADS, arguments, how.smem, pdl=True)

    def _decode(self, index: int, tokens: int) -> Callable[..., None]:
        how = tile.pick_tile(tokens, self.n, self.kind.record_bytes, gpu(index))
        kernel = few_kernel(self.kind, self.dtype, tokens, how.bands).load(index)
        n, x_k, k_tiles = self.n, self.k + -self.k % 8, self.k_tiles

        def run(
            x: Tensor, records: Tensor, bias: Tensor | None, out: Tensor, m: int, gated: bool
        ) -> None:
            arguments = (records.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(),
                         out.data_ptr(), m, n, x_k, k_tiles, how.stages, gated)  # fmt: skip
            kernel.launch(how.blocks, tile.THREADS, arguments, how.smem, tile.CLUSTER, True)

        return run

    def _stripe(self, index: int, tokens: int) -> Callable[..., None]:
        bands = stripe.BANDS[tokens]
        how = stripe.Stripes(self.n, self.k_tiles, bands, gpu(index).sms)
        smem = stripe.smem_bytes(tokens, bands, self.kind.record_bytes)
        kernel = few_kernel(self.kind, self.dtype, tokens, bands).load(index)
        n, x_k, k_tiles = self.n, self.k + -self.k % 8, self.k_tiles
        sums = arrange.N * tokens * bands

        def run(
            x: Tensor, records: Tensor, bias: Tensor | None, out: Tensor, m: int, gated: bool
        ) -> None:
            assert not gated
            workspace, locks = meeting.place(index, gpu(index).sms * sums, gpu(index).sms)
            arguments = (records.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(),
                         out.data_ptr(), workspace.data_ptr(), locks.data_ptr(), m, n, x_k,
                         k_tiles)  # fmt: skip
            kernel.launch(how.blocks, stripe.THREADS, arguments, smem)

        return run

    def decoded(self, records: Tensor, start: int, end: int) -> Tensor:
        """Weights of bands [start, end): (rows, k)."""
        rows = min(end * arrange.N, self.n) - start * arrange.N
        out = torch.empty(rows, self.k, dtype=self.dtype, device=records.device)
        grid = (self.k_tiles // self.kind.planes, end - start)
        arguments = (records[start].data_ptr(), out.data_ptr(), rows, self.k)
        self.panel.launch(grid, PANEL_THREADS, arguments)
        return out


@functools.cache
def plan(index: int, n: int, k: int, kind: int, dtype: torch.dtype) -> Plan:
    return Plan(index, n, k, KINDS[kind], dtype)


def linear(
    x: Tensor,
    records: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    kind: int,
    invariant: bool,
    gated: bool = False,
) -> Tensor:
    """x (..., k) -> (..., n), in x's dtype. Allocates the result and, for many tokens, a panel.
    `gated`: (..., n / 2), silu(gate) * up of rows that lie as gated.py has them, without bias."""
    shape, dtype = x.shape, x.dtype
    if dtype not in TYPES:
        raise UserError(f"activations are {dtype}; CUDA kernels take float16 and bfloat16.")
    if shape[-1] != k:
        raise ValueError(f"activations have {shape[-1]} columns, the layer takes {k}")
    if x.device != records.device:
        raise ValueError(f"activations are on {x.device}, the layer on {records.device}")
    out = x.new_empty((*shape[:-1], n // 2 if gated else n))
    m = x.numel() // k
    if m == 0:
        return out
    how = plan(x.get_device(), n, k, kind, dtype)
    if gated and not how.batches:  # x of another type than the scales
        gate, up = apart(linear(x, records, bias, n, k, kind, invariant)).chunk(2, -1)
        return silu(gate).mul_(up)
    if invariant and not how.batches:
        raise UserError(
            f"activations are {dtype}, scales of this layer {how.kind.scale_dtype}: an invariant "
            "layer takes those of its scales' type. Load the model in that dtype."
        )
    if bias is not None:
        bias = bias.to(x.device, dtype).contiguous()
    if not how.batches and m > how.most * MOST_SLICES:
        return _many(x, records, bias, how, out)
    if k % 8:
        x = pad(x, (0, -k % 8))
    if not x.is_contiguous():
        x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    if invariant:
        rows, outs = x.view(m, -1), out.view(m, -1)
        for start in range(0, m, batch.MOST_INVARIANT):
            some = rows[start : start + batch.MOST_INVARIANT]
            how.batch(some, records, bias, outs[start:], len(some), True, gated)
    elif m <= tile.MOST_TOKENS:
        how.few[8 if m <= 8 else 16](x, records, bias, out, m, gated)
    elif how.batches:
        how.batch(x, records, bias, out, m, False, gated)
    else:
        rows, outs = x.view(m, -1), out.view(m, n)
        for start in range(0, m, how.most):
            some = rows[start : start + how.most]
            tokens = min(each for each in how.few if each >= len(some))
            how.few[tokens](some, records, bias, outs[start:], len(some), False)
    return out


def _many(x: Tensor, records: Tensor, bias: Tensor | None, how: Plan, out: Tensor) -> Tensor:
    """A panel of decoded weights at a time, and the library's product."""
    rows, outs = x.reshape(-1, how.k), out.view(-1, how.n)
    step = max(1, PANEL_WEIGHTS // (how.k * arrange.N))
    for start in range(0, how.bands, step):
        weight = how.decoded(records, start, min(start + step, how.bands))
        end = start * arrange.N + len(weight)
        outs[:, start * arrange.N : end] = rows @ weight.T
    return out if bias is None else out.add_(bias)


# For torch.compile and whatever else must see an operator. Library.impl costs 5 us a call around a
# launch of 5 us, the custom_op decorator 22: plain eager calls go straight to `linear`.
_library = torch.library.Library("billfish", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "w4a16_linear(Tensor x, Tensor records, Tensor? bias, int n, int k, int kind, "
    "bool invariant, bool gated=False) -> Tensor"
)
_library.impl("w4a16_linear", linear, "CUDA")  # type: ignore[no-untyped-call]
_operator = torch.ops.billfish.w4a16_linear.default


@torch.library.register_fake("billfish::w4a16_linear", lib=_library)  # type: ignore[untyped-decorator]
def _fake(
    x: Tensor,
    records: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    kind: int,
    invariant: bool,
    gated: bool = False,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], n // 2 if gated else n)


class CudaOp:
    """Hopper's kernel: bulk copies, clusters, dependent launches."""

    name: ClassVar[str] = "cuda"
    kernel: ClassVar[Literal["decode", "stripe"]] = "decode"
    least: ClassVar[tuple[int, int]] = (9, 0)  # compute capability
    invariant: ClassVar[bool] = False

    @classmethod
    def refuses(cls, scheme: "W4A16", n: int, k: int, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"its weights are on {device}; move the model to a GPU with model.to('cuda')."
        size = k if scheme.group_size == -1 else scheme.group_size
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

    def __init__(self, scheme: "W4A16", tensors: Tensors) -> None:
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
        # A kernel fetches weights before it waits for earlier kernels: these must have ended.
        torch.cuda.current_stream(self.records.device).synchronize()
        plan(index_of(self.records.device), shape.n, shape.k, self.kind, shape.scale_dtype)

    def _sorted(self, tensors: Tensors, g_idx: Tensor) -> dict[str, Tensor]:
        """As of a scheme whose groups are runs of columns."""
        scales, codes = tensors["weight_scale"], self.scheme.codes(tensors)
        groups = scales.shape[1]
        self.order = columns.by_group(g_idx, groups, self.name)
        size = codes.shape[1] // groups
        self.inner = replace(self.scheme, has_g_idx=False, group_size=size)
        return self.inner.pack(codes[:, self.order], scales, self.scheme.zeros(tensors))

    def __call__(self, x: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
        if self.order is not None:
            x = x[..., self.order]
        call = _operator if watched(x) else linear
        shape = self.shape
        y: Tensor = call(x, self.records, bias, shape.n, shape.k, self.kind, self.invariant, gated)
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
        # Bands of 64 outputs must line up.
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


def _alike(ops: Sequence[CudaOp]) -> bool:
    kinds = {(op.scheme, op.records.device, replace(op.shape, n=0)) for op in ops}
    return len(kinds) == 1 and ops[0].g_idx is None


class StripeOp(CudaOp):
    """MARLIN's own way, for GPUs from Ampere on."""

    name: ClassVar[str] = "stripe"
    kernel: ClassVar[Literal["decode", "stripe"]] = "stripe"
    least: ClassVar[tuple[int, int]] = (8, 0)


class InvariantOp(CudaOp):
    """A row's result does not depend on the batch it is in: one order of sums for all m."""

    name: ClassVar[str] = "invariant"
    invariant: ClassVar[bool] = True

    @classmethod
    def refuses(cls, scheme: "W4A16", n: int, k: int, device: torch.device) -> str | None:
        if scheme.bits > 4:
            return f"codes of {scheme.bits} bits; its kernel takes up to 4."
        reason = super().refuses(scheme, n, k, device)
        if reason is None and torch.cuda.get_device_capability(index_of(device)) != cls.least:
            return f"its kernel is for {BATCH_ARCH} alone, which this GPU is not."
        return reason
