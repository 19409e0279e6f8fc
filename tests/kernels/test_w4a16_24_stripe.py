"""w4a16_24_stripe and w4a16_24_panel without a GPU: registers, sizes, and their own text on the
emulated GPU (emulator/, test_emulated.py) against the oracle, in any order of events."""

import itertools
import re
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cpp_compiler import compile_cpp, needs_compiler
from thorough import also, every_third
from torch.nn.functional import pad

import billfish
from billfish.kernels import jit, striped, stripes
from billfish.schemes.w4a16_24 import W4A16Sparse
from billfish.schemes.w4a16_24.cuda import arrange, stripe_plan
from billfish.schemes.w4a16_24.cuda.stripe import (
    panel_kernel,
    stripe_kernel,
    stripe_programs,
    tokens_of,
)

HERE = Path(__file__).parent / "emulator"
PACKAGE = Path(billfish.__file__).parent
INCLUDE = PACKAGE / "kernels" / "include" / "billfish"
CUDA = PACKAGE / "schemes" / "w4a16_24" / "cuda"
FP16, BF16 = torch.float16, torch.bfloat16
TYPES = {FP16: "Half", BF16: "Bfloat"}
ONE_ROUNDING = {FP16: 2**-11, BF16: 2**-8}


# -- what compiles


# sm_86 and sm_89 run the text of sm_80: one group size each, with the instances that need most.
@pytest.mark.parametrize(
    ("arch", "group", "dtype"),
    [("sm_80", -1, FP16), also("sm_80", 32, BF16), also("sm_86", 64, FP16), ("sm_89", 128, BF16)],
)
def test_nothing_spills(arch, group, dtype):
    wanted = stripe_programs(group, dtype, arch)
    assert len(set(wanted)) == 5
    check(wanted if arch == "sm_80" else wanted[1:4], arch)


def test_nothing_spills_on_hopper_either():
    """There the op runs by name; and scales of another type than x."""
    assert not stripe_programs(128, FP16, "sm_90a") and not stripe_programs(128, None, "sm_80")
    assert tokens_of(FP16, FP16) == [8, 16, 32, 64] and tokens_of(FP16, BF16) == [8, 16]
    kernels = [stripe_kernel(dtype, dtype, 128, 64) for dtype in TYPES]
    kernels += [stripe_kernel(FP16, BF16, 32, 16), panel_kernel(BF16, FP16, 64)]
    check([kernel.program for kernel in kernels], "sm_90a")


def check(programs, arch):
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda program: (program, jit.compile(program, arch)), programs)
    for program, cubin in made:
        assert cubin.spill_bytes == 0 and cubin.stack_bytes == 0, program.name
        most = 64 if "panel" in program.name else 255
        assert 16 <= cubin.registers <= most, (program.name, cubin.registers)


def test_shared_memory():
    """Four stages up to 16 tokens, three of more, whatever the groups."""
    for (tokens, bands), group in itertools.product(striped.BANDS.items(), (32, 64, 128)):
        size = arrange.Shape(64, 128, 1, group, FP16).record_bytes
        assert size == 3072 + 128 * (128 // group)
        assert striped.stages(tokens, bands, size) == (4 if tokens <= 16 else 3)
        assert striped.smem_bytes(tokens, bands, size) <= stripes.MOST_SMEM


# -- on the emulated GPU


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder, known = tmp_path_factory.mktemp("emulator"), {}

    def build(kernel, arguments, text=None):
        key = (kernel, arguments, text)
        if key not in known:
            source, changed = CUDA / f"{kernel}.cuh", HERE
            if text is not None:  # of the kernel, or of a header that is found before the real one
                changed = folder / str(len(known))
                (changed / "billfish").mkdir(parents=True)
                name, content = text
                (changed / "billfish" / name).write_text(content)
                source = changed / "billfish" / name if name == source.name else source
            known[key] = compile_cpp(
                HERE / ("panel.cpp" if kernel == "panel" else "run.cpp"),
                folder / f"run{len(known)}",
                f"-I{changed}",
                f"-I{HERE}",
                f"-I{PACKAGE / 'kernels' / 'include'}",
                f'-DKERNEL_FILE="{source}"',
                "-DSTRIPE",
                f"-DTHREADS={stripes.THREADS}",
                f"-DKERNEL=w4a16_24_{kernel}<{arguments}>",
            )
        return known[key]

    return build


def bytes_of(tensor):
    content = b"" if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return struct.pack("<Q", len(content)) + content


def run(program, numbers, *inputs):
    given = b"".join(map(bytes_of, inputs))
    ran = subprocess.run([program, *map(str, numbers)], input=given, capture_output=True)
    assert ran.returncode == 0, ran.stdout[-200:].decode(errors="replace")
    return bytearray(ran.stdout)


def product(compiled, scheme, tensors, x, bias, sms, seed, text=None):
    (shape, records), (m, k) = arrange.pack(scheme, tensors), x.shape
    x = pad(x, (0, -k % 8))
    tokens = min(each for each in striped.BANDS if each >= m)
    bands = striped.BANDS[tokens]
    names = (TYPES[x.dtype], TYPES[shape.scale_dtype], shape.record_group, tokens, bands)
    program = compiled("stripe", ",".join(map(str, names)), text)
    blocks = stripes.Stripes(shape.n, shape.k_tiles, bands, sms).blocks
    smem = striped.smem_bytes(tokens, bands, shape.record_bytes)
    numbers = (seed, m, shape.n, x.shape[1], shape.k_tiles, blocks, 0, smem, sms, 1, 0, 0, 0)
    return torch.frombuffer(run(program, numbers, records, x, bias), dtype=x.dtype).view(m, -1)


def layer(n, k, scheme, dtype, scale_dtype=None):
    source = torch.Generator().manual_seed(n + k)
    tensors = scheme.random_tensors(n, k, scale_dtype or dtype, source)
    x = torch.randn(64, k, generator=source).to(dtype)
    return tensors, x, torch.randn(n, generator=source).to(dtype)


# n, k, scheme, dtype, SMs, tokens: one tile and several, tails of n and k (fours that are cut), 1
# to 7 stripes
CASES = [
    (65, 1001, W4A16Sparse(-1), BF16, 5, (1, 16)),
    (300, 640, W4A16Sparse(128), FP16, 4, (1, 8, 9)),
    (600, 384, W4A16Sparse(32), FP16, 7, (5, 13)),
    (130, 320, W4A16Sparse(64), BF16, 3, (2,)),
    (7, 30, W4A16Sparse(-1), FP16, 2, (3,)),
]


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}x{case[1]}")
def test_products_of_few_tokens(case, compiled):
    """Whole numbers, scaled once a group: nothing is rounded before the result."""
    n, k, scheme, dtype, sms, tokens = case
    tensors, x, bias = layer(n, k, scheme, dtype)
    wanted = scheme.reference(tensors, x) + bias.double()
    alone = product(compiled, scheme, tensors, x[:1], bias, sms, seed=1)
    for m in tokens:
        for seed in (1, 2):  # another order of everything
            y = product(compiled, scheme, tensors, x[:m], bias, sms, seed)
            error = (y.double() - wanted[:m]).norm() / wanted[:m].norm()
            assert error < ONE_ROUNDING[dtype], (m, seed, float(error))
            assert torch.equal(y[:1], alone), "a row depends on the others"


MANY = [
    (300, 640, W4A16Sparse(128), FP16, (17, 32)),
    (600, 384, W4A16Sparse(32), BF16, (61,)),
    (130, 256, W4A16Sparse(64), FP16, (33,)),
    (270, 203, W4A16Sparse(-1), BF16, (64,)),
]


@needs_compiler
@pytest.mark.parametrize("case", MANY, ids=lambda case: f"{case[0]}x{case[1]}")
def test_products_of_more_tokens(case, compiled):
    n, k, scheme, dtype, tokens = case
    tensors, x, bias = layer(n, k, scheme, dtype)
    rounded = scheme.dequantize(tensors).to(dtype).double()
    wanted = x.double() @ rounded.T + bias.double()
    for m in tokens:
        first, other = (product(compiled, scheme, tensors, x[:m], bias, 4, s) for s in (1, 2))
        error = (first.double() - wanted[:m]).norm() / wanted[:m].norm()
        assert error < ONE_ROUNDING[dtype], (m, float(error))
        assert torch.equal(first, other), "another order of events, another result"


@needs_compiler
def test_scales_of_another_type(compiled):
    scheme = W4A16Sparse(64)
    tensors, x, _ = layer(70, 192, scheme, FP16, BF16)
    y, wanted = product(compiled, scheme, tensors, x[:9], None, 3, 1), scheme.reference(tensors, x)
    assert (y.double() - wanted[:9]).norm() / wanted[:9].norm() < ONE_ROUNDING[FP16]


@needs_compiler
@pytest.mark.parametrize("step", [16, 48])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_identity_returns_the_weights_rounded_once(dtype, step, compiled):
    """Every place of every four, few tokens and more."""
    scheme = W4A16Sparse(32)
    tensors, _, _ = layer(70, 96, scheme, dtype)
    eye = torch.eye(96, dtype=dtype)
    rows = [
        product(compiled, scheme, tensors, eye[i : i + step], None, 4, 1)
        for i in range(0, 96, step)
    ]
    assert torch.equal(torch.cat(rows), scheme.dequantize(tensors).to(dtype).T)


PANELS = [
    (W4A16Sparse(32), 70, 160, FP16, FP16),
    (W4A16Sparse(128), 64, 256, BF16, FP16),
    (W4A16Sparse(64), 1, 64, BF16, BF16),
    (W4A16Sparse(-1), 130, 203, FP16, BF16),  # rows of odd length
]


@needs_compiler
@pytest.mark.parametrize("case", PANELS, ids=str)
def test_panels_are_the_weights_rounded_once(case, compiled):
    scheme, n, k, dtype, scale_dtype = case
    tensors = layer(n, k, scheme, dtype, scale_dtype)[0]
    shape, records = arrange.pack(scheme, tensors)
    names = f"{TYPES[dtype]},{TYPES[scale_dtype]},{shape.record_group}"
    threads, smem = stripe_plan.PANEL_THREADS, stripe_plan.PANEL_SMEM
    for seed in (1, 2):
        numbers = (seed, n, k, shape.k_tiles, shape.bands, threads, smem)
        made = run(compiled("panel", names), numbers, records)
        made = torch.frombuffer(made, dtype=dtype).view(n, k)
        assert torch.equal(made, scheme.dequantize(tensors).to(dtype))


MISTAKES = [
    ("striped", r"wait_copies<Stage::kStages - 2>\(\);", "wait_copies<Stage::kStages - 1>();", 3),
    ("stripe", r"thread / 32 % 2", "0", 3),
    ("stripe", r"half \* 64", "0", 30),
    ("stripe", r"places\[step / 2\], step % 2", "places[step / 2], 0", 30),
    ("stripe", r"places\[step / 2\]", "places[0]", 30),
    ("stripe", r"k / kGroup \* 128", "0", 30),
    ("stripe", r"upper_twice\(both\)", "lower_twice(both)", 30),
]


@needs_compiler
@pytest.mark.parametrize(
    "mistake", every_third(MISTAKES), ids=lambda mistake: f"{mistake[0]}: {mistake[1]}"
)
def test_the_emulator_sees_mistakes(mistake, compiled):
    name, pattern, replacement, m = mistake
    path = (CUDA if name == "stripe" else INCLUDE) / f"{name}.cuh"
    broken, count = re.subn(pattern, replacement, path.read_text())
    assert count, "the text has changed: mend the pattern"
    scheme = W4A16Sparse(64)
    tensors, x, _ = layer(100, 5120, scheme, FP16)
    wanted = scheme.reference(tensors, x[:m])
    for seed in (1, 2, 3):  # stripes of one tile end at about the same time, in some order
        try:
            y = product(compiled, scheme, tensors, x[:m], None, 4, seed, (path.name, broken))
        except AssertionError:
            return  # the emulator stopped it
        if not torch.allclose(y.double(), wanted, rtol=1e-2, atol=1e-2):
            return
    raise AssertionError("seen in no order of events")
