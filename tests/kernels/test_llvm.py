"""CPU kernels for processors that this machine is not: they compile, and use the instruction that
they are written for."""

import re

import llvmlite.binding as binding
import pytest
import torch
from llvmlite import ir

from billfish.kernels import cpu, llvm
from billfish.schemes.w4a16 import cpu_kernels

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
WANTED = {  # isa -> (triple, processor, instruction)
    "amx": (X86, "sapphirerapids", r"tdpbf16ps"),
    "avx512vnni": (X86, "cascadelake", r"vpdpbusd.*zmm"),
    "avx512": (X86, "skylake-avx512", r"vpmaddubsw.*zmm"),
    "avxvnni": (X86, "alderlake", r"vpdpbusd.*ymm"),
    "avx2": (X86, "haswell", r"vpmaddubsw.*ymm"),
    "dotprod": (ARM, "neoverse-n1", r"sdot\s+v\d+\.4s, v\d+\.16b, v\d+\.4b\[[01]\]"),  # by lane
    "plain": (ARM, "cortex-a72", r"mla\s+v"),
}


@pytest.fixture(scope="module", autouse=True)
def targets():
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()


def test_every_instruction_set_is_tried():
    assert WANTED.keys() == cpu.ISAS.keys()


@pytest.mark.parametrize("name", WANTED)
def test_the_instruction_is_used(name, monkeypatch):
    triple, processor, instruction = WANTED[name]
    monkeypatch.setattr(
        cpu_kernels, "compiled", lambda module, isa: llvm.Compiled(module, triple, processor, "")
    )
    kind = cpu_kernels.Kind(cpu.ISAS[name], torch.bfloat16, torch.bfloat16, True)
    assembly = cpu_kernels.product(kind).assembly
    assert re.search(instruction, assembly)


def test_sums_over_a_loop_and_lanes():
    module = ir.Module()
    w = llvm.Writer(module, "total", 3)
    x, count, out = w.arguments
    total = w.variable(w.constant(llvm.vector(llvm.F32, 4), 0.0))
    with w.loop(w.number(0), count, 4) as i:
        total.set(total.get() + llvm.load_floats(w, x + i * 2, torch.bfloat16, 4))
    with w.when(w.less(w.number(3), count)):
        w.store(w.summed(total.get()), out)
    w.end()
    function = llvm.compiled(module, cpu.isa()).function("total", 3)
    numbers, result = torch.arange(1, 14).bfloat16(), torch.zeros(1)
    function(numbers.data_ptr(), 13, result.data_ptr())
    assert result.item() == sum(range(1, 13))  # thirteen is no whole step
    function(numbers.data_ptr(), 3, result.data_ptr())
    assert result.item() == 78  # untouched
