"""The CPU that kernels are compiled for: its vector width, its dot-product instruction, and its
threads, which are PyTorch's.

BILLFISH_CPU_ISA selects a smaller instruction set than the CPU has, to test or time it.
"""

import ctypes
import os
import platform
import re
import threading
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from billfish.errors import UserError

VARIABLE = "BILLFISH_CPU_ISA"
CPUINFO = Path("/proc/cpuinfo")
BYTES = 127 * 256 + 127  # the largest number of two signed bytes: of x in integer kernels


@dataclass(frozen=True)
class Isa:
    name: str
    needs: frozenset[str]  # features, by LLVM's names
    lanes: int  # 32-bit numbers in a vector
    rows: tuple[int, ...]  # rows of x in a register tile of two vectors of outputs
    dot: Literal["vnni", "pairs", "neon", "plain"]  # the instruction, see kernels/llvm.py
    matrices: bool = False  # AMX: 16 rows by 16 outputs by 32 inputs of bf16 at once


_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl"})
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_ALL = (
    Isa("amx", _AVX512 | {"avx512vnni", "amx-tile", "amx-bf16"}, 16, (4, 2, 1), "vnni", True),
    Isa("avx512vnni", _AVX512 | {"avx512vnni"}, 16, (4, 2, 1), "vnni"),
    Isa("avx512", _AVX512, 16, (4, 2, 1), "pairs"),
    Isa("avxvnni", _AVX2 | {"avxvnni"}, 8, (2, 1), "vnni"),
    Isa("avx2", _AVX2, 8, (2, 1), "pairs"),
    Isa("dotprod", frozenset({"dotprod"}), 4, (4, 2, 1), "neon"),
    Isa("plain", frozenset(), 4, (2, 1), "plain"),
)
ISAS = {each.name: each for each in _ALL}  # fastest first


@cache
def features() -> frozenset[str]:
    """Features of this CPU, by LLVM's names, as far as the system lets a process use them."""
    import llvmlite.binding as llvm  # 0.1 s, and a GPU needs none of it

    found = llvm.get_host_cpu_features()
    names = {name for name in found if found[name]}
    if platform.machine().lower() in ("aarch64", "arm64"):  # LLVM does not detect sdot there
        told = CPUINFO.read_text() if CPUINFO.is_file() else ""
        if platform.system() == "Darwin" or re.search(
            r"^Features.*\basimddp\b", told, re.MULTILINE
        ):
            names.add("dotprod")
    # The kernel grants AMX's tile registers on request, for all threads of the process.
    if "amx-tile" in names and not torch.cpu._init_amx():
        names -= {name for name in names if name.startswith("amx")}
    return frozenset(names)


@cache
def isa() -> Isa:
    """The fastest that this CPU has, or the one that BILLFISH_CPU_ISA names."""
    here = [each for each in _ALL if each.needs <= features()]
    named = os.environ.get(VARIABLE)
    if not named:
        return here[0]
    for each in here:
        if each.name == named:
            return each
    raise UserError(
        f"{VARIABLE}={named}: this processor has {', '.join(each.name for each in here)}. "
        "Choose one of them, or unset it."
    )


# -- threads


@cache
def openmp() -> dict[str, int] | None:
    """Addresses of functions in the OpenMP runtime that PyTorch has loaded: a second runtime would
    have threads of its own, which wait for cores that the first one's threads spin on."""
    library = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"), None)
    if library is None:
        return None
    names = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
    try:
        loaded = ctypes.CDLL(str(library))
        found = {name: ctypes.cast(loaded[name], ctypes.c_void_p).value for name in names}
    except (AttributeError, OSError):
        return None
    return {name: address for name, address in found.items() if address is not None}


def threads() -> int:
    return torch.get_num_threads() if openmp() else 1


class Room(threading.local):
    """Scratch memory that a thread keeps between calls."""

    address, size = 0, 0

    def of(self, nbytes: int) -> int:
        if self.size < nbytes:
            self.kept = torch.empty(nbytes + 64, dtype=torch.uint8)
            self.address = self.kept.data_ptr() + -self.kept.data_ptr() % 64
            self.size = nbytes
        return self.address


def refusal(device: torch.device) -> str | None:
    """Why kernels that kernels/llvm.py writes cannot run weights there, as advice; or None."""
    if device.type != "cpu":
        return f"its weights are on {device}; move the model to the CPU with model.to('cpu')."
    if find_spec("llvmlite") is None:
        return "llvmlite, which compiles its kernels, is not here; pip install llvmlite."
    return None
