"""Template instances of the w4a16_24 CUDA kernels, and which of them a layer may need."""

import functools
from pathlib import Path

import torch

from billfish.kernels import tiles
from billfish.kernels.jit import Program
from billfish.kernels.launch import Kernel
from billfish.schemes.w4a16_24.cuda.arrange import record_group

HERE = Path(__file__).parent
ARCH = "sm_90a"
TYPES = {torch.float16: "billfish::Half", torch.bfloat16: "billfish::Bfloat"}
INSTANCES = (*tiles.INSTANCES, (64, 2))  # tokens, bands of w4a16_24_batch


@functools.cache
def decode_kernel(
    dtype: torch.dtype, scale_dtype: torch.dtype, group: int, tokens: int, bands: int
) -> Kernel:
    return _kernel("decode", TYPES[dtype], TYPES[scale_dtype], group, tokens, bands)


@functools.cache
def batch_kernel(dtype: torch.dtype, group: int, tokens: int, bands: int) -> Kernel:
    """For scales of x's dtype alone: weights are rounded to it once."""
    return _kernel("batch", TYPES[dtype], group, tokens, bands)


def _kernel(name: str, *parameters: str | int) -> Kernel:
    arguments = ", ".join(map(str, parameters))
    return Kernel(Program(HERE / f"{name}.cuh", f"billfish::w4a16_24_{name}<{arguments}>"))


def programs(group_size: int, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
    """All kernels that layers with such groups in a model of `dtype` may need on `arch`."""
    if dtype not in TYPES or arch != ARCH:
        return ()
    group = record_group(group_size)
    kernels = [decode_kernel(dtype, dtype, group, t, b) for t in (8, 16) for b in (1, 2, 4)]
    kernels += [batch_kernel(dtype, group, *instance) for instance in INSTANCES]
    return tuple(kernel.program for kernel in kernels)
