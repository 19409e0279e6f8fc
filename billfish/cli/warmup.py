"""`billfish kernels warmup`: compile the CUDA kernels of a checkpoint before they are needed.

Reads the layers' schemes from headers, and no weights. The kernels go into the kernel cache, where
loading the model finds them. Needs NVRTC and no GPU: a container image can be built without one.
"""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from billfish.checkpoints.experts import SINGLE
from billfish.checkpoints.packed import packed_linears, recognize
from billfish.checkpoints.read import Checkpoint
from billfish.errors import UserError
from billfish.kernels import cache, jit
from billfish.kernels.device import gpu
from billfish.schemes.base import Scheme
from billfish.schemes.registry import programs

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def warmup(
    model: Path,
    arch: str | None = None,  # None: that of the GPU here
    dtype: str = "auto",  # of the activations
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Compile what is not cached; returns counts, seconds and each kernel's resources."""
    arch = target(arch)
    checkpoint = Checkpoint(model)
    schemes, experts = schemes_of(checkpoint)
    activations = DTYPES.get(dtype) or dtype_of(checkpoint)
    wanted = programs(schemes, activations, arch, experts)
    begin = time.perf_counter()
    cached = {program: jit.is_cached(program, arch) for program in wanted}
    cubins = jit.build_all(wanted, arch, say)
    return {
        "model": str(model),
        "arch": arch,
        "dtype": str(activations).removeprefix("torch."),
        "linears": schemes.total(),
        "compiled": len(cached) - sum(cached.values()),
        "cached": sum(cached.values()),
        "seconds": time.perf_counter() - begin,
        "cache": str(cache.directory()),
        "kernels": [
            {
                "name": program.name,
                "registers": cubin.registers,
                "spill_bytes": cubin.spill_bytes,
                "smem_bytes": cubin.smem_bytes,
                "cached": cached[program],
            }
            for program, cubin in zip(wanted, cubins, strict=True)
        ],
    }


def target(arch: str | None) -> str:
    if arch is None:
        if not torch.cuda.is_available():
            raise UserError(
                "there is no GPU here to compile for. Name the one the model will run on: --arch "
                "sm_90a (H100, H200), sm_100a (B200), sm_89 (L4, RTX 40), sm_86 (A10, RTX 30) or "
                "sm_80 (A100)."
            )
        return gpu().arch
    if arch not in (known := jit.architectures()):
        raise UserError(f"--arch {arch}: known are {', '.join(known)}.")
    return arch


def schemes_of(checkpoint: Checkpoint) -> tuple[Counter[Scheme], list[Scheme]]:
    """The schemes of the packed linears, and how many linears have each; and those of experts that
    may run all at once, which biases prevent (models/joined.py, stack)."""
    dialect, name, unsupported = recognize(checkpoint)
    if unsupported:
        raise UserError(f"{checkpoint.path}: {unsupported}")
    layers = list(packed_linears(checkpoint, dialect))
    if not layers:
        raise UserError(
            f"{checkpoint.path}: not a quantized model ({name}), so it needs no kernels of ours. "
            "`billfish quantize` makes one."
        )
    single = [layer for layer in layers if SINGLE.fullmatch(f"{layer.module}.weight")]
    experts = [layer.scheme for layer in single if f"{layer.module}.bias" not in checkpoint]
    return Counter(layer.scheme for layer in layers), list(dict.fromkeys(experts))


def dtype_of(checkpoint: Checkpoint) -> torch.dtype:
    """Of activations: config.json's, else that of the first 16-bit tensor."""
    said = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    stored = (entry.dtype for entry in checkpoint.entries.values())
    found = next((dtype for dtype in stored if dtype in DTYPES.values()), torch.bfloat16)
    return DTYPES.get(str(said), found)
