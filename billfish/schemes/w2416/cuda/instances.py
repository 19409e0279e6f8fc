"""Template instances of the w2416 CUDA kernels, and which of them a model may need."""

import functools
from pathlib import Path

import torch

from billfish.kernels import tiles
from billfish.kernels.device import HOPPER, capability
from billfish.kernels.jit import Program
from billfish.kernels.launch import Kernel
from billfish.schemes.w2416.scheme import ZERO, ZERO_STEP

HERE = Path(__file__).parent
ARCH = "sm_90a"
TYPES = {torch.float16: "billfish::Half", torch.bfloat16: "billfish::Bfloat"}
SIXTEENTHS = (round(ZERO * 16), round(ZERO_STEP * 16))  # kernels know zeros in sixteenths of a step
assert SIXTEENTHS == (ZERO * 16, ZERO_STEP * 16)


@functools.cache
def decode_kernel(dtype: torch.dtype, tokens: int, bands: int) -> Kernel:
    return _kernel("decode", dtype, tokens, bands)


@functools.cache
def stripe_kernel(dtype: torch.dtype, tokens: int) -> Kernel:
    return _kernel("stripe", dtype, tokens)


@functools.cache
def panel_kernel(dtype: torch.dtype) -> Kernel:
    return _kernel("panel", dtype)


@functools.cache
def batch_kernel(dtype: torch.dtype, tokens: int, bands: int) -> Kernel:
    return _kernel("batch", dtype, tokens, bands)


@functools.cache
def order_kernel() -> Kernel:
    """The same for both types."""
    return Kernel(Program(HERE / "order.cuh", "billfish::w2416_order"))


def _kernel(name: str, dtype: torch.dtype, *numbers: int) -> Kernel:
    arguments = ", ".join(map(str, (TYPES[dtype], *SIXTEENTHS, *numbers)))
    return Kernel(Program(HERE / f"{name}.cuh", f"billfish::w2416_{name}<{arguments}>"))


def programs(dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
    if dtype not in TYPES or arch != ARCH:
        return ()
    kernels = [decode_kernel(dtype, tokens, bands) for tokens in (8, 16) for bands in (1, 2, 4)]
    kernels += [batch_kernel(dtype, *instance) for instance in tiles.INSTANCES]
    return tuple(kernel.program for kernel in (*kernels, order_kernel(), panel_kernel(dtype)))


def stripe_programs(dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
    if dtype not in TYPES or capability(arch) >= HOPPER:
        return ()
    kernels = [stripe_kernel(dtype, tokens) for tokens in (8, 16)]
    return tuple(kernel.program for kernel in (*kernels, panel_kernel(dtype)))
