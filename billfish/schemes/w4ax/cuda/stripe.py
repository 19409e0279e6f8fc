"""Launches of one w4ax layer on sm_80 to sm_89: w4ax_stripe_quant, then w4ax_stripe; their sizes as
pure functions (kernels/stripes.py has the partition). Both are one torch operator.

Sums are integers, so that neither m nor the partition changes a bit of the result.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.kernels import stripes, workspace
from billfish.kernels.device import HOPPER, capability, gpu
from billfish.kernels.jit import Program
from billfish.kernels.launch import Kernel
from billfish.kernels.stripes import CostStripes
from billfish.schemes.w4ax.activations import REACH
from billfish.schemes.w4ax.cuda.arrange import K, N, Shape, record_group

HERE = Path(__file__).parent
TYPES = {torch.float16: "billfish::Half", torch.bfloat16: "billfish::Bfloat"}
BANDS = {8: 2, 16: 2, 32: 2, 64: 4}  # tokens -> bands of a tile: MARLIN's 128 and 256 outputs
MOST_TOKENS = max(BANDS)  # of a tile
RUN = 8  # gates, then ups: a thread has rows r and r + 8
QUANT_THREADS, QUANT_SMEM = 1024, 256  # at most; stripe_quant.cuh
HALF = 64  # inputs: w4ax_stripe counts 4-bit inputs in halves of records
# COMET 4.4: 8 bits take twice the time of 4. As long as every record is read once, which is up to
# 64 tokens, both wait for memory: an A100's SM gets 10 bytes a clock, 410 clocks a record, and
# multiplies its bytes with 64 tokens in 256.
HEAVY = 2


@dataclass(frozen=True)
class Rounding:
    """How a layer rounds its inputs; a8 has no 4-bit blocks."""

    block: int = K
    fours: int = 0  # 4-bit blocks, the first
    rotated: bool = False

    @property
    def halves(self) -> int:
        """Halves of records that are multiplied as 4 bits: blocks of 32 are not."""
        return self.fours * (self.block // HALF)


def tokens_of(m: int) -> int:
    return min((tokens for tokens in BANDS if tokens >= m), default=MOST_TOKENS)


def stage_bytes(tokens: int, record_bytes: int) -> int:
    """Bytes of a pipeline stage: four records, and the inputs of their one or two slices."""
    records = stripes.STAGE_RECORDS
    return records * record_bytes + records // BANDS[tokens] * tokens * K


def smem_bytes(tokens: int, record_bytes: int) -> int:
    """Dynamic shared memory of a CTA: 4 stages, or 3 of 32 and more tokens with groups of 32."""
    size = stage_bytes(tokens, record_bytes)
    return stripes.ring_stages(size) * size


def partition(m: int, shape: Shape, halves: int, sms: int) -> CostStripes:
    m_tiles, bands = -(-m // MOST_TOKENS), BANDS[tokens_of(m)]
    heavy = 1 if m_tiles == 1 else HEAVY
    return CostStripes(shape.n, shape.k_tiles, bands, sms, m_tiles, halves, heavy)


def quant_threads(k_tiles: int) -> int:
    """A thread has 8 inputs, and keeps them if it has no others."""
    return min(QUANT_THREADS, -(-k_tiles * K // 8 // 32) * 32)


@functools.cache
def stripe_kernel(dtype: torch.dtype, group: int, tokens: int) -> Kernel:
    arguments = f"{TYPES[dtype]}, {group}, {tokens}, {BANDS[tokens]}"
    return Kernel(Program(HERE / "stripe.cuh", f"billfish::w4ax_stripe<{arguments}>"))


@functools.cache
def quant_kernel(dtype: torch.dtype, block: int, rotated: bool) -> Kernel:
    arguments = f"{TYPES[dtype]}, {block}, {str(rotated).lower()}"
    return Kernel(Program(HERE / "stripe_quant.cuh", f"billfish::w4ax_stripe_quant<{arguments}>"))


def stripe_programs(
    group_size: int, block: int, rotated: bool, dtype: torch.dtype, arch: str
) -> tuple[Program, ...]:
    """None for Hopper and later, where the op runs by name only, or where none other does."""
    if dtype not in TYPES or capability(arch) >= HOPPER:
        return ()
    group = record_group(group_size)
    kernels = [stripe_kernel(dtype, group, tokens) for tokens in BANDS]
    return tuple(kernel.program for kernel in (quant_kernel(dtype, block, rotated), *kernels))


Run = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor], None]
"""x, records, bases, order, bias, out"""


class StripePlan:
    """Everything about one layer's launches on one device that is the same in every call."""

    def __init__(self, index: int, shape: Shape, rounding: Rounding, dtype: torch.dtype) -> None:
        self.shape, self.rounding, self.gpu = shape, rounding, gpu(index)
        self.quant = quant_kernel(dtype, rounding.block, rounding.rotated).load(index)
        self.kernels = {
            tokens: stripe_kernel(dtype, shape.record_group, tokens).load(index) for tokens in BANDS
        }
        self.paths: dict[tuple[int, bool], Run] = {}

    def path(self, m: int, gated: bool) -> Run:
        found = self.paths.get((m, gated))
        if found is None:
            found = self.paths[m, gated] = self._path(m, gated)
        return found

    def quantize(self, x: Tensor, order: Tensor | None, m: int) -> tuple[Tensor, Tensor]:
        """Lines (m, k tiles * 128 bytes); {scale, 128 * sum} of each token, with room for an even
        number of them, since they are read in pairs."""
        shape = self.shape
        lines = torch.empty(m, shape.k_tiles * K, dtype=torch.int8, device=x.device)
        tokens = torch.empty(m + m % 2, 2, dtype=torch.int32, device=x.device)
        arguments = (
            x.data_ptr(),
            0 if order is None else order.data_ptr(),
            lines.data_ptr(),
            tokens.data_ptr(),
            shape.k,
            shape.k_tiles,
            self.rounding.fours,
            numpy.float32(REACH),
        )
        self.quant.launch(m, quant_threads(shape.k_tiles), arguments, QUANT_SMEM)
        return lines, tokens

    def _path(self, m: int, gated: bool) -> Run:
        shape, index, sms, size = self.shape, self.gpu.index, self.gpu.sms, tokens_of(m)
        how = partition(m, shape, self.rounding.halves, sms)
        kernel, smem = self.kernels[size], smem_bytes(size, shape.record_bytes)
        sizes = (m, shape.n, shape.k_tiles, how.light, how.heavy, gated)
        sums = sms * N * MOST_TOKENS * BANDS[MOST_TOKENS]  # all launches share one workspace

        def run(
            x: Tensor,
            records: Tensor,
            bases: Tensor,
            order: Tensor | None,
            bias: Tensor | None,
            out: Tensor,
        ) -> None:
            if not x.is_contiguous():
                x = x.contiguous()
            if x.data_ptr() % 4:
                x = x.clone()
            lines, tokens = self.quantize(x, order, m)
            partial, locks = workspace.of_stream(index, sums, sms)
            arguments = (
                records.data_ptr(),
                lines.data_ptr(),
                tokens.data_ptr(),
                bases.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                partial.data_ptr(),
                locks.data_ptr(),
                *sizes,
            )
            kernel.launch(how.blocks, stripes.THREADS, arguments, smem)

        return run


@functools.cache
def stripe_plan(index: int, shape: Shape, rounding: Rounding, dtype: torch.dtype) -> StripePlan:
    return StripePlan(index, shape, rounding, dtype)


def linear(
    x: Tensor,
    records: Tensor,
    bases: Tensor,
    order: Tensor | None,
    bias: Tensor | None,
    k: int,
    groups: int,
    record_group: int,
    block: int,
    fours: int,
    rotated: bool,
    gated: bool = False,
) -> Tensor:
    """x (..., k) -> (..., n) in x's dtype. `gated`: (..., n / 2), silu(gate) * up of rows
    interleaved by RUN, without bias."""
    if x.dtype not in TYPES:
        raise UserError(f"activations are {x.dtype}; CUDA kernels take float16 and bfloat16.")
    if x.shape[-1] != k:
        raise ValueError(f"activations have {x.shape[-1]} columns, the layer takes {k}")
    if x.device != records.device:
        raise ValueError(f"activations are on {x.device}, the layer on {records.device}")
    n = len(bases)
    out = x.new_empty((*x.shape[:-1], n // 2 if gated else n))
    m = x.numel() // k
    if m:
        if bias is not None:
            bias = bias.to(x.device, x.dtype).contiguous()
        shape, rounding = Shape(n, k, groups, record_group), Rounding(block, fours, rotated)
        found = stripe_plan(x.get_device(), shape, rounding, x.dtype)
        found.path(m, gated)(x, records, bases, order, bias, out)
    return out


# The operator that torch.compile and dispatch modes see; eager calls use `linear` directly.
_library = torch.library.Library("billfish", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "w4ax_stripe(Tensor x, Tensor records, Tensor bases, Tensor? order, Tensor? bias, int k, "
    "int groups, int record_group, int block, int fours, bool rotated, bool gated=False) -> Tensor"
)
_library.impl("w4ax_stripe", linear, "CUDA")  # type: ignore[no-untyped-call]
operator = torch.ops.billfish.w4ax_stripe.default


@torch.library.register_fake("billfish::w4ax_stripe", lib=_library)  # type: ignore[untyped-decorator]
def _fake(
    x: Tensor,
    records: Tensor,
    bases: Tensor,
    order: Tensor | None,
    bias: Tensor | None,
    k: int,
    groups: int,
    record_group: int,
    block: int,
    fours: int,
    rotated: bool,
    gated: bool = False,
) -> Tensor:
    n = len(bases)
    return x.new_empty(*x.shape[:-1], n // 2 if gated else n)
