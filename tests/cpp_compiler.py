"""The C++ compiler of the tests: $CXX, else g++, clang++ or c++, else that of the package ziglang.

python tests/cpp_compiler.py says which, and fails where there is none.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys

import pytest

# Kernels read the same bytes as several types, as on a GPU; and a * b + c is rounded twice wherever
# the CPU could do it at once, so that numbers do not depend on it.
# -Og: compiling and running ten tests took 25 s, with -O1 31, with -O0 27, with -O2 36. Checks of
# _FORTIFY_SOURCE would forbid the jumps between its stacks.
FLAGS = ["-Og", "-std=c++17", "-w", "-fno-strict-aliasing", "-ffp-contract=off"]
FLAGS += ["-U_FORTIFY_SOURCE"]
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
    subprocess.run([*find(), *FLAGS, *flags, source, "-o", target], check=True)
    return target


needs_compiler = pytest.mark.skipif(find() is None, reason=NONE)

if __name__ == "__main__":
    print(shlex.join(find() or []) or NONE)
    sys.exit(find() is None)
