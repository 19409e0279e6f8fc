"""Kernels on the emulated GPU (kernels/emulator/engine.cpp), launched as launch.Loaded does, on the
CPU's tensors; and the engine's norm as such a launch."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
from cpp_compiler import compile_cpp

import billfish
from billfish.engine.cuda import fused

HERE = Path(__file__).parent / "kernels" / "emulator"
PACKAGE = Path(billfish.__file__).parent


class Emulated:
    """launch.Loaded, on the CPU."""

    gpu = SimpleNamespace(sms=3)  # few, so that turned tokens share blocks
    seed = 1

    def __init__(self, library, name):
        self.library, self.name = library, name

    def launch(self, grid, block, args, smem=0, cluster=1, pdl=False):
        assert pdl and cluster == 1 and 0 < block <= 1024
        x, y = grid if isinstance(grid, tuple) else (grid, 1)
        bits = [int(v.view(numpy.uint32)) if isinstance(v, numpy.float32) else v for v in args]
        values = (ctypes.c_uint64 * len(bits))(*bits)
        code = self.library.run(self.name.encode(), x, y, block, smem, values, self.seed)
        assert code == 0, self.name


def library(folder, source, programs, text=None, *flags):
    """Of the programs of one source, or of the text instead of it. -DDYNAMIC_SMEM: their shared
    memory is that of the launch."""
    if text is not None:
        source = folder / source.name
        source.write_text(text)
    (folder / "instances.h").write_text("".join(f"ENTRY({each.name})\n" for each in programs))
    target = compile_cpp(
        HERE / "engine.cpp",
        folder / "engine.so",
        "-shared",
        "-fPIC",
        *(() if "-DDYNAMIC_SMEM" in flags else ("-DSTATIC_SMEM",)),
        f"-I{HERE}",
        f"-I{PACKAGE / 'kernels' / 'include'}",
        f'-DKERNEL_FILE="{source}"',
        f'-DINSTANCES="{folder / "instances.h"}"',
        *flags,
    )
    return ctypes.CDLL(str(target))


def engine_norm(folder):
    """(hidden, delta, weight, eps) -> norm of hidden += delta, launched as Fused.norm launches
    it."""
    programs = {
        dtype: fused.programs(dtype, "kv16", 64, False)[0]
        for dtype in (torch.float16, torch.bfloat16)
    }
    made = library(folder, PACKAGE / "engine" / "cuda" / "small.cuh", list(programs.values()))

    def run(hidden, delta, weight, eps):
        out = torch.empty_like(hidden)
        launcher = SimpleNamespace(_norm=Emulated(made, programs[hidden.dtype].name))
        fused.Fused.norm(launcher, hidden, delta, weight, eps, out)
        return out

    return run
