"""NVRTC without a GPU: cubins, what ptxas says of them, messages, and compiling side by side."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from billfish.errors import UserError
from billfish.kernels import cache, jit
from billfish.kernels.jit import CompileError, Program

PROBE = Program(Path(jit.__file__).parent / "probe.cuh", "billfish::probe<3>")
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("BILLFISH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("BILLFISH_JIT_DEBUG", raising=False)
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_told", set())


@pytest.fixture
def write(monkeypatch, tmp_path):
    """A source, and headers in an include directory of its own."""
    monkeypatch.setattr(jit, "INCLUDE", tmp_path / "include")
    (tmp_path / "include" / "billfish").mkdir(parents=True)

    def write(text, **headers):
        for name, content in headers.items():
            (tmp_path / "include" / "billfish" / f"{name}.cuh").write_text(content)
        (tmp_path / "kernel.cuh").write_text(text)
        return tmp_path / "kernel.cuh"

    return write


# -- one program


@pytest.mark.parametrize("arch", ARCHS)
def test_probe(arch):
    cubin = jit.compile(PROBE, arch)
    assert cubin.code.startswith(b"\x7fELF") and cubin.symbol.encode() in cubin.code
    assert cubin.symbol == "_ZN8billfish5probeILi3EEEvPfPKfi"
    assert 0 < cubin.registers <= 32
    assert (cubin.spill_bytes, cubin.stack_bytes, cubin.smem_bytes) == (0, 0, 0)


def test_spills_and_static_memory_are_seen(write):
    values = " ".join(f"float v{i} = x[{i} * 32 + threadIdx.x];" for i in range(64))
    total = " ".join(f"x[{i} * 32 + threadIdx.x] = v{63 - i} * s[{i}];" for i in range(64))
    source = write(
        "__global__ void other(float* x) { x[0] = 1; }\n"
        "template <int N, int kBlocks>\n"
        "__global__ void __launch_bounds__(512, kBlocks) heavy(float* x) {\n"
        "  __shared__ float s[N]; s[threadIdx.x] = x[threadIdx.x]; __syncthreads();\n"
        f"  {values} __syncthreads(); {total}\n}}\n"
    )
    easy = jit.compile(Program(source, "heavy<256, 1>"), "sm_90a")
    assert easy.smem_bytes == 1024 and easy.spill_bytes == 0 and easy.registers > 64
    tight = jit.compile(Program(source, "heavy<256, 4>"), "sm_90a")
    assert tight.spill_bytes > 0 and tight.stack_bytes > 0 and tight.registers <= 32


def test_what_ptxas_says():
    older = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1bv' for 'sm_90a'
ptxas info    : Function properties for _Z1bv
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size, 4096 bytes smem
ptxas info    : Compiling entry function '_Z1av' for 'sm_90a'
ptxas info    : Function properties for _Z1av
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers, 380 bytes cmem[0]
"""
    names = ("registers", "spill_bytes", "stack_bytes", "smem_bytes")
    assert [jit.resources(older, "_Z1bv")[name] for name in names] == [255, 16, 8, 4096]
    assert [jit.resources(older, "_Z1av")[name] for name in names] == [12, 0, 0, 0]
    assert set(jit.resources(older, "_Z1cv").values()) == {jit.UNKNOWN}  # never 0: not "no spills"


def test_message_of_a_failure_has_file_and_line(write):
    source = write('#include "billfish/a.cuh"\n\n__global__ void k() { wrong(); }\n', a="// fine\n")
    with pytest.raises(CompileError) as caught:
        jit.compile(Program(source, "k"), "sm_90a")
    for part in ("k does not compile for sm_90a", f"{source}(3): error", '"wrong" is undefined'):
        assert part in str(caught.value)
    assert isinstance(caught.value, UserError)
    source = write('#include "billfish/a.cuh"\n__global__ void k() {}\n', a="\n\n\nnonsense;\n")
    with pytest.raises(CompileError) as caught:
        jit.compile(Program(source, "k"), "sm_90a")
    assert f"{jit.INCLUDE / 'billfish' / 'a.cuh'}(4): error" in str(caught.value)


def test_unknown_names_and_architectures():
    with pytest.raises(CompileError, match='has no member "prob"'):
        jit.compile(Program(PROBE.source, "billfish::prob<3>"), "sm_90a")
    with pytest.raises(CompileError, match="gpu-architecture"):
        jit.compile(PROBE, "sm_12")


@pytest.mark.parametrize("package", ["bindings", "core"])
def test_no_nvrtc(monkeypatch, package):
    jit._cuda.cache_clear()
    monkeypatch.setitem(sys.modules, f"cuda.{package}", None)
    monkeypatch.delattr(sys.modules["cuda"], package)
    try:
        with pytest.raises(UserError, match=r"pip install 'billfish\[cuda\]'"):
            jit.build(PROBE, "sm_90a")
    finally:
        jit._cuda.cache_clear()


def test_importing_touches_no_cuda():
    code = """
import sys, torch
before = set(sys.modules)  # torch imports cuda.bindings itself where it finds it
import billfish, billfish.kernels.launch
print([name for name in set(sys.modules) - before if name.split(".")[0] == "cuda"])
print(torch.cuda.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False"]


def test_debug_adds_lines_and_says_so(monkeypatch, capsys):
    plain = jit.build(PROBE, "sm_90a")
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("BILLFISH_JIT_DEBUG", "1")
    detailed = jit.build(PROBE, "sm_90a")  # another key: the plain one would have no lines
    said = capsys.readouterr().err
    assert PROBE.name in said and "lineinfo" in said and "registers" in said
    assert b".debug_line" in detailed.code and b".debug_line" not in plain.code


# -- many, and the cache


def test_build_compiles_once(monkeypatch):
    first = jit.build(PROBE, "sm_90a")
    monkeypatch.setattr(cache, "_memory", {})  # as another process would find it
    monkeypatch.setattr(jit, "compile", lambda *args: pytest.fail("was cached"))
    assert jit.build(PROBE, "sm_90a") == first
    with pytest.raises(pytest.fail.Exception):
        jit.build(PROBE, "sm_80")


def test_build_all_compiles_what_is_missing(monkeypatch):
    programs = [Program(PROBE.source, f"billfish::probe<{i}>") for i in (5, 1, 3, 1)]
    jit.build(programs[2], "sm_90a")
    compiled, plain = [], jit.compile

    def note(program, arch):
        compiled.append(program.name)
        return plain(program, arch)

    monkeypatch.setattr(jit, "compile", note)
    said: list[str] = []
    cubins = jit.build_all(programs, "sm_90a", said.append)
    numbers = [cubin.symbol.partition("ILi")[2][0] for cubin in cubins]
    assert numbers == ["5", "1", "3", "1"]
    assert sorted(compiled) == ["billfish::probe<1>", "billfish::probe<5>"]
    assert said == [f"compiling kernels {i}/2 for sm_90a" for i in range(3)]
    assert jit.build_all(programs, "sm_90a", said.append) == cubins and len(said) == 3


def test_build_all_tells_the_failure():
    programs = [PROBE, Program(PROBE.source, "billfish::nothing")]
    with pytest.raises(CompileError, match="billfish::nothing"):
        jit.build_all(programs, "sm_90a")
    assert jit.build_all([], "sm_90a") == []


def test_build_all_runs_side_by_side(monkeypatch):
    meeting, plain = threading.Barrier(2, timeout=20), jit.compile

    def meet(program, arch):
        meeting.wait()  # breaks, and fails, if the other one has not begun as well
        return plain(program, arch)

    monkeypatch.setattr(jit, "compile", meet)
    monkeypatch.setattr(jit.os, "cpu_count", lambda: 2)
    programs = [Program(PROBE.source, f"billfish::probe<{i}>") for i in (7, 8)]
    assert len(jit.build_all(programs, "sm_90a")) == 2
