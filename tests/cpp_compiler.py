"""The C++ compiler of the tests: $CXX, else g++, clang++ or c++, else that of the package ziglang.

python tests/cpp_compiler.py says which, and fails where there is none.
"""

import atexit
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

# Kernels read the same bytes as several types, as on a GPU; and a * b + c is rounded twice wherever
# the CPU could do it at once, so that numbers do not depend on it.
# -Og: compiling and running ten tests took 25 s, with -O1 31, with -O0 27, with -O2 36. Checks of
# _FORTIFY_SOURCE would forbid the jumps between its stacks.
FLAGS = ["-Og", "-std=c++17", "-w", "-fno-strict-aliasing", "-ffp-contract=off"]
FLAGS += ["-U_FORTIFY_SOURCE"]
EMULATOR = Path(__file__).parent / "kernels" / "emulator"
KINDS = (
    "-fPIC",
    "-DSTATIC_SMEM",
)  # flags that machine.cpp and machine.h must be compiled with, too
NONE = "no C++ compiler: install g++ or clang++, name one in CXX, or pip install ziglang"


def find():
    """The command's words, or None."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    found = next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if found is None and importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    return found and [found]


def compile_cpp(source, target, *flags):
    """Programs of the emulator get its machine, which is compiled once."""
    if Path(source).parent == EMULATOR:
        flags += machine(tuple(flag for flag in flags if flag in KINDS))
    subprocess.run([*find(), *FLAGS, source, "-o", target, *flags], check=True)
    return target


@cache
def machine(kind):
    """machine.cpp as an object, and machine.h precompiled: a program took 1.5 s, and takes 0.5.

    A compiler that makes no such header, or does not take it, reads the text.
    """
    folder = Path(tempfile.mkdtemp(prefix="billfish-emulator-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header, made = folder / "machine.h", folder / "machine.o"
    header.write_text(f'#include "{EMULATOR / "machine.h"}"\n')
    command = [*find(), *FLAGS, *kind]
    subprocess.run([*command, "-x", "c++-header", header, "-o", f"{header}.gch"], check=False)
    subprocess.run([*command, "-O2", "-c", EMULATOR / "machine.cpp", "-o", made], check=True)
    return ("-include", str(header), str(made))


needs_compiler = pytest.mark.skipif(find() is None, reason=NONE)

if __name__ == "__main__":
    print(shlex.join(find() or []) or NONE)
    sys.exit(find() is None)
