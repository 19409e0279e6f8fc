"""Sizes of w4ax_stripe and w4ax_stripe_quant as pure functions, tested without a GPU, and their
template instances. kernels/stripes.py has the partition."""

import functools
from dataclasses import dataclass

import torch

from billfish.kernels import stripes
from billfish.kernels.device import HOPPER, capability
from billfish.kernels.jit import Program
from billfish.kernels.launch import Kernel
from billfish.kernels.stripes import CostStripes
from billfish.schemes.w4ax.cuda.arrange import K, Shape, record_group
from billfish.schemes.w4ax.cuda.instances import HERE, TYPES

BANDS = {8: 2, 16: 2, 32: 2, 64: 4}  # tokens -> bands of a tile: MARLIN's 128 and 256 outputs
MOST_TOKENS = max(BANDS)  # of a tile
QUANT_THREADS, QUANT_SMEM = 1024, 256  # at most; stripe_quant.cuh
HALF = 64  # inputs: w4ax_stripe counts 4-bit inputs in halves of records
# COMET 4.4: 8 bits take twice the time of 4. As long as every record is read once, which is up to
# 64 tokens, both wait for memory: an A100's SM gets 10 bytes a clock, 410 clocks a record, and
# multiplies its bytes with 64 tokens in 256.
HEAVY = 2


@dataclass(frozen=True)
class Mix:
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
def stripe_kernel(dtype: torch.dtype, group: int, asymmetric: bool, tokens: int) -> Kernel:
    return _kernel("stripe", dtype, group, str(asymmetric).lower(), tokens, BANDS[tokens])


@functools.cache
def quant_kernel(dtype: torch.dtype, block: int, rotated: bool) -> Kernel:
    return _kernel("stripe_quant", dtype, block, str(rotated).lower())


def _kernel(name: str, dtype: torch.dtype, *numbers: int | str) -> Kernel:
    arguments = ", ".join(map(str, (TYPES[dtype], *numbers)))
    return Kernel(Program(HERE / f"{name}.cuh", f"billfish::w4ax_{name}<{arguments}>"))


def stripe_programs(
    group_size: int, asymmetric: bool, mix: Mix, dtype: torch.dtype, arch: str
) -> tuple[Program, ...]:
    """None from Hopper on, where the op runs by name, or compiles what it needs."""
    if dtype not in TYPES or capability(arch) >= HOPPER:
        return ()
    group = record_group(group_size)
    kernels = [stripe_kernel(dtype, group, asymmetric, tokens) for tokens in BANDS]
    return tuple(
        kernel.program for kernel in (quant_kernel(dtype, mix.block, mix.rotated), *kernels)
    )
