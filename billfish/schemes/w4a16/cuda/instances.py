"""Template instances of the w4a16 CUDA kernels, and which of them a layer may need."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from billfish.kernels import clusters, striped, tiles
from billfish.kernels.device import capability
from billfish.kernels.jit import Program
from billfish.kernels.launch import Kernel
from billfish.schemes.w4a16.cuda import arrange, batch, tile
from billfish.schemes.w4a16.scheme import W4A16

HERE = Path(__file__).parent
TYPES = {torch.float16: "billfish::Half", torch.bfloat16: "billfish::Bfloat"}
BATCH_ARCH = "sm_90a"


@dataclass(frozen=True)
class Kind:
    """Template parameters of the kernels, except the activations' dtype and the tile."""

    kernel: Literal["decode", "stripe"]
    group: int  # group size in a record: 32, 64, 128
    zeros: bool
    planes: int
    scale_dtype: torch.dtype

    @property
    def record_bytes(self) -> int:
        groups = arrange.K // self.group
        return arrange.WORDS * 4 + groups * (128 + (32 if self.zeros else 0))


KINDS = [
    Kind(kernel, group, zeros, planes, dtype)
    for kernel in ("decode", "stripe")
    for group in (32, 64, 128)
    for zeros in (False, True)
    for planes in (1, 2)
    for dtype in TYPES
]

BESIDE = clusters.MOST_TOKENS, 1, 128  # tokens, bands, group: w4a16_decode_beside


@functools.cache
def few_kernel(
    kind: Kind, dtype: torch.dtype, tokens: int, bands: int, cluster: int = clusters.CLUSTER
) -> Kernel:
    """w4a16_decode, or w4a16_stripe."""
    if kind.kernel == "decode" and (tokens, bands, kind.group) == BESIDE:
        return _kernel("decode", kind, dtype, name="decode_beside")
    return _kernel(kind.kernel, kind, dtype, tokens, bands, *_other(cluster))


@functools.cache
def normed_kernel(
    kind: Kind, dtype: torch.dtype, bands: int, cluster: int = clusters.CLUSTER
) -> Kernel:
    """Of up to two tokens, as few_kernel, that are normed first."""
    return _kernel("decode", kind, dtype, 2, bands, *_other(cluster), name="normed")


def _other(cluster: int) -> list[int]:
    return [] if cluster == clusters.CLUSTER else [cluster]


@functools.cache
def batch_kernel(kind: Kind, dtype: torch.dtype, instance: tiles.Instance) -> Kernel:
    teams = () if len(instance) > 2 else (tiles.TEAMS,)
    return _kernel("batch", kind, dtype, *instance, *teams)


@functools.cache
def panel_kernel(kind: Kind, dtype: torch.dtype) -> Kernel:
    return _kernel("panel", kind, dtype, kind.planes)


def _kernel(
    file: str, kind: Kind, dtype: torch.dtype, *numbers: int, name: str | None = None
) -> Kernel:
    types = [TYPES[dtype]] if file == "batch" else [TYPES[dtype], TYPES[kind.scale_dtype]]
    arguments = ", ".join(map(str, (*types, kind.group, str(kind.zeros).lower(), *numbers)))
    return Kernel(Program(HERE / f"{file}.cuh", f"billfish::w4a16_{name or file}<{arguments}>"))


def runs_batches(kind: Kind, dtype: torch.dtype, arch: str) -> bool:
    """w4a16_batch decodes weights to x's dtype, which must be that of the scales: else they would
    be rounded twice."""
    return kind.scale_dtype == dtype and kind.kernel == "decode" and arch == BATCH_ARCH


def runs_norms(kind: Kind, dtype: torch.dtype, arch: str) -> bool:
    """w4a16_normed runs where the engine's runner does, which alone asks for it. Of two planes each
    CTA would norm all of a row, not half."""
    return kind.planes == 1 and runs_batches(kind, dtype, arch)


def runs_experts(kind: Kind, dtype: torch.dtype, arch: str) -> bool:
    return kind.planes == 1 and runs_batches(kind, dtype, arch)


def stripe_tokens(kind: Kind, dtype: torch.dtype) -> list[int]:
    """More than 16 are decoded in registers, too: codes of one plane."""
    decodes = kind.planes == 1 and kind.scale_dtype == dtype
    most = max(striped.BANDS) if decodes else clusters.MOST_TOKENS
    return [tokens for tokens in striped.BANDS if tokens <= most]


def kind_of(scheme: W4A16, kernel: Literal["decode", "stripe"], scale_dtype: torch.dtype) -> Kind:
    # any multiple of the group size gives the same kind
    k = scheme.group_size if scheme.group_size > 0 else arrange.K
    shape = arrange.record_shape(scheme, 1, k, scale_dtype)
    return Kind(kernel, shape.record_group, shape.zeros, shape.planes, scale_dtype)


def programs(
    scheme: W4A16, kernel: Literal["decode", "stripe"], dtype: torch.dtype, arch: str
) -> tuple[Program, ...]:
    """All kernels that layers of this scheme in a model of `dtype` may need on `arch`. The "decode"
    kernels are for sm_90 and later, the "stripe" kernels for earlier GPUs."""
    if dtype not in TYPES or (kernel == "decode") != (capability(arch) >= (9, 0)):
        return ()
    kind = kind_of(scheme, kernel, dtype)
    if kernel == "decode":
        kernels = [few_kernel(kind, dtype, t, *each) for t in tile.TOKENS for each in tile.SHARES]
    else:
        tokens = stripe_tokens(kind, dtype)
        kernels = [few_kernel(kind, dtype, t, striped.BANDS[t]) for t in tokens]
    if runs_norms(kind, dtype, arch):
        kernels += [normed_kernel(kind, dtype, *each) for each in tile.SHARES]
    if runs_batches(kind, dtype, arch):
        kernels += [batch_kernel(kind, dtype, instance) for instance in batch.INSTANCES]
    return tuple(kernel.program for kernel in (*kernels, panel_kernel(kind, dtype)))
