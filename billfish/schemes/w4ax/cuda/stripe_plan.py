"""Launches of one w4ax layer on sm_80 to sm_89: w4ax_stripe_quant, then w4ax_stripe. Both are one
torch operator for torch.compile and dispatch modes.

Sums are integers, so that neither m nor the partition changes a bit of the result.
"""

from collections.abc import Callable
from functools import cache

import numpy
import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.kernels import stripes, workspace
from billfish.kernels.device import gpu
from billfish.schemes.w4ax.activations import REACH
from billfish.schemes.w4ax.cuda.arrange import K, N, Shape
from billfish.schemes.w4ax.cuda.inputs import Rounded
from billfish.schemes.w4ax.cuda.instances import TYPES
from billfish.schemes.w4ax.cuda.stripe import (
    BANDS,
    MOST_TOKENS,
    QUANT_SMEM,
    Mix,
    partition,
    quant_kernel,
    quant_threads,
    smem_bytes,
    stripe_kernel,
    tokens_of,
)

Product = Callable[[Rounded, Tensor, Tensor, Tensor | None, Tensor], None]
"""x, records, bases, bias, out"""


class StripePlan:
    """Everything about one layer's launches on one device that is the same in every call."""

    def __init__(self, index: int, shape: Shape, mix: Mix, dtype: torch.dtype) -> None:
        self.shape, self.mix, self.gpu = shape, mix, gpu(index)
        self.quant = quant_kernel(dtype, mix.block, mix.rotated).load(index)
        kind = (dtype, shape.record_group, shape.asymmetric)
        self.kernels = {tokens: stripe_kernel(*kind, tokens).load(index) for tokens in BANDS}
        self.products: dict[tuple[int, bool], Product] = {}

    def quantize(self, x: Tensor, order: Tensor | None) -> Rounded:
        """Lines (m, k tiles * 128 bytes), as stripe_quant.cuh says."""
        shape, m = self.shape, x.numel() // self.shape.k
        if not x.is_contiguous():
            x = x.contiguous()
        if x.data_ptr() % 4:
            x = x.clone()
        lines = torch.empty(m, shape.k_tiles * K, dtype=torch.int8, device=x.device)
        tokens = torch.empty(m + m % 2, 2, dtype=torch.int32, device=x.device)
        arguments = (
            x.data_ptr(),
            0 if order is None else order.data_ptr(),
            lines.data_ptr(),
            tokens.data_ptr(),
            shape.k,
            shape.k_tiles,
            self.mix.fours,
            numpy.float32(REACH),
        )
        if m:
            self.quant.launch(m, quant_threads(shape.k_tiles), arguments, QUANT_SMEM)
        return Rounded(lines, tokens, x.dtype, tuple(x.shape[:-1]))

    def product(self, m: int, gated: bool) -> Product:
        found = self.products.get((m, gated))
        if found is None:
            found = self.products[m, gated] = self._product(m, gated)
        return found

    def _product(self, m: int, gated: bool) -> Product:
        shape, index, sms, size = self.shape, self.gpu.index, self.gpu.sms, tokens_of(m)
        how = partition(m, shape, self.mix.halves, sms)
        kernel, smem = self.kernels[size], smem_bytes(size, shape.record_bytes)
        sizes = (m, shape.n, shape.k_tiles, how.light, how.heavy, gated)
        sums = sms * N * BANDS[MOST_TOKENS] * MOST_TOKENS  # all launches share one workspace

        def run(
            x: Rounded, records: Tensor, bases: Tensor, bias: Tensor | None, out: Tensor
        ) -> None:
            partial, locks = workspace.of_stream(index, sums, sms)
            arguments = (
                records.data_ptr(),
                x.bytes.data_ptr(),
                x.tokens.data_ptr(),
                bases.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                partial.data_ptr(),
                locks.data_ptr(),
                *sizes,
            )
            kernel.launch(how.blocks, stripes.THREADS, arguments, smem)

        return run


@cache
def stripe_plan(index: int, shape: Shape, mix: Mix, dtype: torch.dtype) -> StripePlan:
    return StripePlan(index, shape, mix, dtype)


def rounded(
    x: Tensor, order: Tensor | None, shape: Shape, mix: Mix, device: torch.device
) -> Rounded:
    """x (..., k) as w4ax_stripe reads it."""
    if x.dtype not in TYPES:
        raise UserError(f"activations are {x.dtype}; CUDA kernels take float16 and bfloat16.")
    if x.shape[-1] != shape.k:
        raise ValueError(f"activations have {x.shape[-1]} columns, the layer takes {shape.k}")
    if x.device != device:
        raise ValueError(f"activations are on {x.device}, the layer on {device}")
    return stripe_plan(x.get_device(), shape, mix, x.dtype).quantize(x, order)


def multiply(
    x: Rounded,
    records: Tensor,
    bases: Tensor,
    bias: Tensor | None,
    shape: Shape,
    mix: Mix,
    gated: bool = False,
) -> Tensor:
    """(..., n) in x's dtype. `gated`: (..., n / 2), silu(gate) * up of rows interleaved by RUN,
    without bias."""
    m, columns = x.bytes.shape
    if columns != shape.k_tiles * K:
        raise ValueError(f"activations have {columns} columns, the layer takes {shape.k}")
    if x.bytes.device != records.device:
        raise ValueError(f"activations are on {x.bytes.device}, the layer on {records.device}")
    n = shape.n // 2 if gated else shape.n
    out = torch.empty((*x.lead, n), dtype=x.dtype, device=records.device)
    if m:
        if bias is not None:
            bias = bias.to(records.device, x.dtype).contiguous()
        found = stripe_plan(records.get_device(), shape, mix, x.dtype)
        found.product(m, gated)(x, records, bases, bias, out)
    return out


def linear(
    x: Tensor,
    records: Tensor,
    bases: Tensor,
    bias: Tensor | None,
    k: int,
    groups: int,
    record_group: int,
    asymmetric: bool,
    order: Tensor | None,
    block: int,
    fours: int,
    rotated: bool,
    gated: bool = False,
) -> Tensor:
    """x (..., k) rounded, then multiplied. `order`: of Blocks, None for a8."""
    shape, mix = Shape(len(bases), k, groups, record_group, asymmetric), Mix(block, fours, rotated)
    lines = rounded(x, order, shape, mix, records.device)
    return multiply(lines, records, bases, bias, shape, mix, gated)


# The operator that torch.compile and dispatch modes see; eager calls need none.
_library = torch.library.Library("billfish", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "w4ax_stripe(Tensor x, Tensor records, Tensor bases, Tensor? bias, int k, int groups, "
    "int record_group, bool asymmetric, Tensor? order, int block, int fours, bool rotated, "
    "bool gated=False) -> Tensor"
)
_library.impl("w4ax_stripe", linear, "CUDA")  # type: ignore[no-untyped-call]
operator = torch.ops.billfish.w4ax_stripe.default


@torch.library.register_fake("billfish::w4ax_stripe", lib=_library)  # type: ignore[untyped-decorator]
def _fake(
    x: Tensor,
    records: Tensor,
    bases: Tensor,
    bias: Tensor | None,
    k: int,
    groups: int,
    record_group: int,
    asymmetric: bool,
    order: Tensor | None,
    block: int,
    fours: int,
    rotated: bool,
    gated: bool = False,
) -> Tensor:
    n = len(bases)
    return x.new_empty(*x.shape[:-1], n // 2 if gated else n)
