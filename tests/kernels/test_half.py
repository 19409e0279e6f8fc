"""emulator/half.h against numpy: every half, and floats around every rounding."""

import subprocess
from pathlib import Path

import numpy as np
from cpp_compiler import compile_cpp, needs_compiler

HERE = Path(__file__).parent / "emulator"
PROGRAM = """
#include <cstdio>
#include "half.h"
int main() {
    for (int half = 0; half < 65536; ++half) {
        const float v = half_to_float(half);
        fwrite(&v, 4, 1, stdout);
    }
    for (float v; fread(&v, 4, 1, stdin) == 1;) {
        const uint16_t half = float_to_half(v);
        fwrite(&half, 2, 1, stdout);
    }
}
"""


@needs_compiler
def test_halves_are_those_of_numpy(tmp_path):
    source = tmp_path / "half.cpp"
    source.write_text(PROGRAM)
    program = compile_cpp(source, tmp_path / "half", f"-I{HERE}")

    random = np.random.default_rng(0).integers(2**32, size=1 << 20, dtype=np.uint32)
    powers = np.ldexp(np.float32(1), np.arange(-149, 128, dtype=np.int32))
    with np.errstate(all="ignore"):
        exact = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
        steps = np.append(exact[:0x7C00], np.float32(65536))
        ties = (steps[:-1] + steps[1:]) / 2
        floats = np.concatenate([exact, ties, -ties, powers, random.view(np.float32)])
        beside = [np.nextafter(floats, np.float32(end)) for end in (-np.inf, np.inf)]
        floats = np.concatenate([floats, *beside])
        wanted = floats.astype(np.float16)
    ran = subprocess.run([program], input=floats.tobytes(), capture_output=True, check=True)
    same(np.frombuffer(ran.stdout[: 4 * 65536], np.float32), exact)
    same(np.frombuffer(ran.stdout[4 * 65536 :], np.float16), wanted)


def same(one, other):
    assert one.shape == other.shape
    assert (np.isnan(one) == np.isnan(other)).all()
    numbers, bits = ~np.isnan(other), f"u{other.itemsize}"
    assert (one[numbers].view(bits) == other[numbers].view(bits)).all()
    assert (np.signbit(one) == np.signbit(other)).all()


def test_the_emulator_has_no_type_that_some_compilers_lack():
    for path in (each for each in HERE.rglob("*") if each.is_file()):
        for word in ("_Float16", "__fp16", "float16_t", "__bf16", "immintrin"):
            assert word not in path.read_text(), path
