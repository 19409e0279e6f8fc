"""Every kernel that w4a16 can need compiles, for every architecture, and keeps to registers.

No GPU and no cache: NVRTC compiles what is in the tree now. And the rules of the kernels' text.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from thorough import also

import billfish
from billfish.errors import UserError
from billfish.kernels import cache, jit
from billfish.schemes import registry
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda import arrange, experts
from billfish.schemes.w4a16.cuda.instances import kind_of

PACKAGE = Path(billfish.__file__).parent
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a")
BLACKWELL = ("sm_100a", "sm_120a")  # w4a16_decode and w4a16_panel run there; w4a16_batch does not
BLACKWELL_SPILLS = 24  # bytes, of w4a16_decode of 16 tokens: two CTAs an SM leave 96 registers
SCHEMES = [
    W4A16(bits, group, symmetric)
    for bits in (4, 8)
    for group in (32, 64, 128, -1)
    for symmetric in (True, False)
]
DTYPES = (torch.float16, torch.bfloat16)
TEXTS = sorted(PACKAGE.rglob("*.cuh"))
ASM_FOLDER = PACKAGE / "kernels" / "include" / "billfish"
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# A body that an #if of the architecture leaves empty needs fewer than ten.
FEWEST_REGISTERS = 16


@pytest.fixture(scope="module", autouse=True)
def no_cache_of_the_user(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BILLFISH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("BILLFISH_JIT_DEBUG", raising=False)
        patch.setattr(cache, "_memory", {})
        yield


def programs(arch, dtype, schemes=SCHEMES):
    """Each once, though schemes share them."""
    return registry.programs(schemes, dtype, arch)


def complaints(program, arch):
    """What is wrong with a program; an empty list as a rule."""
    try:
        cubin = jit.compile(program, arch)
    except UserError as error:
        return [str(error)]
    found = []
    if not cubin.code.startswith(b"\x7fELF"):
        found.append("no machine code")
    wide = re.search(r"w4a16_decode(_beside|<.*, 16, \d>)", program.name)
    most = BLACKWELL_SPILLS if arch in BLACKWELL and wide else 0
    if not 0 <= cubin.spill_bytes <= most:
        found.append(f"{cubin.spill_bytes} bytes spilled")
    if not 0 <= cubin.stack_bytes <= most:
        found.append(f"{cubin.stack_bytes} bytes of stack")
    if "Performance Loss" in cubin.log:  # wgmma one after the other
        found.append(cubin.log)
    if cubin.registers < FEWEST_REGISTERS:
        found.append(f"{cubin.registers} registers: unknown, or no body on this architecture")
    return found


# bfloat16 is the same text with as many registers, and sm_86, sm_89 and Blackwell have no text of
# their own: few schemes each. All of them take 150 s.
ONE, TWO = [W4A16(4, 128)], [W4A16(4, 128), W4A16(8, 32, False)]
COMPILED = [
    ("sm_80", torch.float16, TWO),
    ("sm_90a", torch.float16, ONE),
    also("sm_90a", torch.bfloat16, ONE),
    ("sm_100a", torch.bfloat16, ONE),
    *(also(arch, torch.float16, SCHEMES) for arch in ("sm_80", "sm_90a")),
    *(also(arch, torch.float16, TWO) for arch in ("sm_86", "sm_100a")),
    *(also(arch, torch.bfloat16, TWO) for arch in ("sm_80", "sm_89", "sm_90a", "sm_120a")),
]


@pytest.mark.parametrize(
    ("arch", "dtype", "schemes"),
    COMPILED,
    ids=lambda value: f"{len(value)} schemes" if isinstance(value, list) else str(value),
)
def test_every_program_compiles_without_spills(arch, dtype, schemes):
    wanted = programs(arch, dtype, schemes)
    assert "panel.cuh" in {program.source.name for program in wanted}
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda program: complaints(program, arch), wanted))
    wrong = [
        f"{program.name}: {complaint}"
        for program, told in zip(wanted, found, strict=True)
        for complaint in told
    ]
    bad = sum(map(bool, found))
    assert not wrong, f"{bad} of {len(wanted)} for {arch}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("arch", BLACKWELL)
def test_what_runs_on_blackwell(arch):
    names = {program.source.name for program in programs(arch, torch.float16)}
    assert names == {"decode.cuh", "panel.cuh"}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_programs_are_named_once_and_follow_the_scheme(arch, dtype):
    for scheme in SCHEMES:
        found = registry.programs([scheme], dtype, arch)
        assert found and len(set(found)) == len(found), scheme
        assert found == registry.programs([scheme], dtype, arch)  # the same order, too
        assert all(program.source in TEXTS for program in found)
    for one, other in ((W4A16(4, 32), W4A16(4, 64)), (W4A16(4, 32), W4A16(4, 32, False))):
        assert set(registry.programs([one], dtype, arch)) != set(
            registry.programs([other], dtype, arch)
        )


def test_programs_of_experts_are_listed_where_they_run():
    """Those that the experts' plan builds: Hopper, up to 4 bits, no order of columns."""
    for scheme in (W4A16(4, 128), W4A16(3, 32, False)):
        for dtype in DTYPES:
            own = registry.programs([scheme], dtype, "sm_90a")
            listed = registry.programs([scheme], dtype, "sm_90a", [scheme])
            expected = experts.programs(kind_of(scheme, "decode", dtype))
            assert listed == [*own, *expected] and len(expected) == 12
    for scheme, arch in (
        (W4A16(4, 128), "sm_80"),
        (W4A16(4, 128), "sm_100a"),
        (W4A16(8, 128), "sm_90a"),
        (W4A16(4, 128, has_g_idx=True), "sm_90a"),
    ):
        listed = registry.programs([scheme], torch.float16, arch, [scheme])
        assert listed == registry.programs([scheme], torch.float16, arch)


@pytest.mark.parametrize("group", [32, 64, 96])
def test_programs_know_a_layer_of_one_group(group):
    """k == group_size: its records may have another group than those of longer layers."""
    scheme = W4A16(4, group)
    for k in (group, 4 * group):
        size = arrange.record_shape(scheme, 64, k, torch.float16).record_group
        for arch in ("sm_80", "sm_90a"):
            listed = [program.name for program in registry.programs([scheme], torch.float16, arch)]
            assert any(f", {size}, " in each for each in listed), (k, arch, size)


def test_complaints_can_be_heard(tmp_path):
    """The judge itself: spills, empty bodies and broken text are seen."""
    values = " ".join(f"float v{i} = x[{i} * 32 + threadIdx.x];" for i in range(64))
    total = " ".join(f"x[{i} * 32 + threadIdx.x] = v{63 - i};" for i in range(64))
    source = tmp_path / "broken.cuh"
    source.write_text(
        "__global__ void empty(float* x) {}\n"
        "__global__ void stack(float* x, int n) {\n"
        "  float local[64];\n"
        "  for (int i = 0; i < 64; ++i) local[i * n % 64] = x[i];\n"
        "  for (int i = 0; i < 64; ++i) x[i] = local[i * 7 * n % 64];\n}\n"
        "__global__ void __launch_bounds__(1024, 2) heavy(float* x) {\n"
        f"  {values} __syncthreads(); {total}\n}}\n"
    )

    def heard(name):
        return " ".join(complaints(jit.Program(source, name), "sm_90a"))

    assert "no body" in heard("empty")
    assert "bytes of stack" in heard("stack")
    assert "spilled" in heard("heavy")
    assert "nothing" in heard("nothing")


# -- the text


def relative(path):
    return str(path.relative_to(PACKAGE))


def test_there_is_text():
    assert {"record.cuh", "ptx.cuh", "probe.cuh"} <= {path.name for path in TEXTS}


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_asm_is_in_one_folder(path):
    code = COMMENT.sub("", path.read_text())
    assert path.parent == ASM_FOLDER or not re.search(r"\b(asm|__asm__)\b", code)


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_kernels_include_nothing_but_billfish(path):
    """CUDA's headers cost seconds a kernel, and the cache would not see another file change."""
    for included in re.findall(r"^[ \t]*#[ \t]*include\b(.*)$", path.read_text(), re.MULTILINE):
        name = re.fullmatch(r'\s*"(billfish/\w+\.cuh)"\s*', included)
        assert name, f"#include {included.strip()}"
        assert (jit.INCLUDE / name[1]).is_file()


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_kernels_are_short_and_narrow(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 450, "split it along an idea"
    wide = [f"{i}: {len(line)} columns" for i, line in enumerate(lines, 1) if len(line) > 100]
    assert not wide, f"{path.name}: {', '.join(wide)}"
    assert not any("\t" in line or line != line.rstrip() for line in lines)
