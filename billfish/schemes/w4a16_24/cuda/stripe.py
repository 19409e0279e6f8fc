"""Template instances of w4a16_24_stripe and w4a16_24_panel, and which of them a layer may need.
kernels/striped.py has their sizes and launches."""

import functools

import torch

from billfish.kernels.clusters import MOST_TOKENS
from billfish.kernels.device import HOPPER, capability
from billfish.kernels.jit import Program
from billfish.kernels.launch import Kernel
from billfish.kernels.striped import BANDS
from billfish.schemes.w4a16_24.cuda.arrange import record_group
from billfish.schemes.w4a16_24.cuda.instances import HERE, TYPES


@functools.cache
def stripe_kernel(dtype: torch.dtype, scale_dtype: torch.dtype, group: int, tokens: int) -> Kernel:
    return _kernel("stripe", dtype, scale_dtype, group, tokens, BANDS[tokens])


@functools.cache
def panel_kernel(dtype: torch.dtype, scale_dtype: torch.dtype, group: int) -> Kernel:
    return _kernel("panel", dtype, scale_dtype, group)


def _kernel(name: str, dtype: torch.dtype, scale_dtype: torch.dtype, *numbers: int) -> Kernel:
    arguments = ", ".join(map(str, (TYPES[dtype], TYPES[scale_dtype], *numbers)))
    return Kernel(Program(HERE / f"{name}.cuh", f"billfish::w4a16_24_{name}<{arguments}>"))


def tokens_of(dtype: torch.dtype, scale_dtype: torch.dtype) -> list[int]:
    """Sizes of w4a16_24_stripe. More than 16 tokens are multiplied by decoded weights, which are
    rounded once only if scales have x's dtype."""
    most = max(BANDS) if dtype == scale_dtype else MOST_TOKENS
    return [tokens for tokens in BANDS if tokens <= most]


def stripe_programs(group_size: int, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
    """None from Hopper on, where the op runs by name, and compiles what it needs."""
    if dtype not in TYPES or capability(arch) >= HOPPER:
        return ()
    group = record_group(group_size)
    kernels = [stripe_kernel(dtype, dtype, group, tokens) for tokens in tokens_of(dtype, dtype)]
    return tuple(kernel.program for kernel in (*kernels, panel_kernel(dtype, dtype, group)))
