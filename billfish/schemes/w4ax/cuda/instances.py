"""Template instances of the w4ax CUDA kernels, and which of them a layer may need."""

import functools
from pathlib import Path

import torch

from billfish.kernels import tiles
from billfish.kernels.jit import Program
from billfish.kernels.launch import Kernel
from billfish.schemes.w4ax.cuda.arrange import record_group

HERE = Path(__file__).parent
ARCH = "sm_90a"
TYPES = {torch.float16: "billfish::Half", torch.bfloat16: "billfish::Bfloat"}
INSTANCES = (*tiles.INSTANCES, (64, 2))  # tokens, bands of w4ax_batch


@functools.cache
def quant_kernel(dtype: torch.dtype, mixed: bool) -> Kernel:
    return _kernel("quant", "quant", dtype, mixed)


@functools.cache
def norm_kernel(dtype: torch.dtype, mixed: bool) -> Kernel:
    return _kernel("quant", "norm", dtype, mixed)


@functools.cache
def decode_kernel(
    dtype: torch.dtype, group: int, asymmetric: bool, tokens: int, bands: int
) -> Kernel:
    return _kernel("decode", "decode", dtype, group, asymmetric, tokens, bands)


@functools.cache
def batch_kernel(
    dtype: torch.dtype, group: int, asymmetric: bool, tokens: int, bands: int
) -> Kernel:
    return _kernel("batch", "batch", dtype, group, asymmetric, tokens, bands)


def _kernel(file: str, name: str, dtype: torch.dtype, *numbers: int) -> Kernel:
    arguments = ", ".join(str(each).lower() for each in numbers)
    return Kernel(
        Program(HERE / f"{file}.cuh", f"billfish::w4ax_{name}<{TYPES[dtype]}, {arguments}>")
    )


def programs(
    group_size: int, dtype: torch.dtype, arch: str, mixed: bool = False, asymmetric: bool = False
) -> tuple[Program, ...]:
    """All kernels that layers with such groups in a model of `dtype` may need on `arch`; `mixed`:
    with activations of 4 and 8 bits."""
    if dtype not in TYPES or arch != ARCH:
        return ()
    kind = (dtype, record_group(group_size), asymmetric)
    kernels = [quant_kernel(dtype, mixed), norm_kernel(dtype, mixed)]
    kernels += [decode_kernel(*kind, t, b) for t in (8, 16) for b in (1, 2, 4)]
    kernels += [batch_kernel(*kind, *instance) for instance in INSTANCES]
    return tuple(kernel.program for kernel in kernels)
