"""CpuOp against the oracle: exact decodes, canonical tensors given back bit for bit, products
within the bound of 16-bit activations, and the same bits for every instruction set, number of
threads and batch. How fast it is belongs to `billfish bench`."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from thorough import one_each
from torch import Tensor

from billfish.errors import UserError
from billfish.formats.grid import group_count
from billfish.kernels import cpu as processor
from billfish.kernels import llvm
from billfish.schemes.base import Reference
from billfish.schemes.w4a16 import cpu
from billfish.schemes.w4a16.cpu import CpuOp
from billfish.schemes.w4a16.scheme import W4A16

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ISAS = [isa for isa in processor.ISAS.values() if isa.needs <= processor.features()]


@dataclass(frozen=True)
class Case:
    scheme: W4A16
    n: int = 128
    k: int = 256
    scale_dtype: torch.dtype = BF16

    def __str__(self) -> str:
        kind = f"{self.scheme.bits}bit-g{self.scheme.group_size}"
        kind += "-sym" if self.scheme.symmetric else "-asym"
        kind += "-gidx" if self.scheme.has_g_idx else ""
        return f"{kind}-{self.n}x{self.k}-{str(self.scale_dtype).removeprefix('torch.')}"

    def tensors(self) -> dict[str, Tensor]:
        """Every code, zero and scale that can be stored: not only what a solver would choose."""
        random = torch.Generator().manual_seed(self.n * self.k + self.scheme.bits)
        levels, groups = self.scheme.grid.levels, group_count(self.k, self.scheme.group_size)
        codes = torch.randint(levels, (self.n, self.k), generator=random)
        zeros = torch.randint(levels, (self.n, groups), generator=random)
        scales = torch.rand(self.n, groups, generator=random) * 0.02 + 1e-4
        packed = self.scheme.pack(
            codes.to(torch.uint8), scales.to(self.scale_dtype), zeros.to(torch.uint8)
        )
        if self.scheme.has_g_idx:
            g_idx = torch.arange(self.k) // self.scheme.group_size
            packed["weight_g_idx"] = g_idx[torch.randperm(self.k, generator=random)].int()
        return packed


CASES = [
    *(Case(W4A16(4, g, s)) for g in (32, 64, 128, 256, -1) for s in (True, False)),
    *(Case(W4A16(bits, 64, s)) for bits in (2, 3, 5, 6, 7, 8) for s in (True, False)),
    *(Case(W4A16(bits, 12, False), k=96) for bits in (4, 8)),  # groups padded to blocks
    *(Case(W4A16(bits, 16, False)) for bits in (4, 8)),  # chunks of 16
    *(Case(W4A16(4, g, s), k=384) for g in (96, 192) for s in (True, False)),  # chunks of 32, 64
    *(Case(W4A16(bits, -1, s), k=100) for bits in (4, 8) for s in (True, False)),  # k padded
    *(Case(W4A16(bits, 64, s), n=100) for bits in (4, 8) for s in (True, False)),  # n padded
    *(Case(W4A16(bits, 64, s, True), n=72) for bits in (4, 8) for s in (True, False)),
    *(Case(W4A16(4, 16, s, True)) for s in (True, False)),
    *(
        Case(W4A16(bits, 32, s), 96, 128, d)
        for bits in (4, 8)
        for s in (True, False)
        for d in (FP16, FP32)
    ),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_typed_case = pytest.mark.parametrize(
    ("case", "dtype"), one_each(CASES, [BF16, FP16, FP32]), ids=str
)
every_dtype = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
every_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)


def on(isa: processor.Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "isa", lambda: isa)


@every_case
def test_canonical_gives_back_the_tensors(case: Case) -> None:
    tensors = case.tensors()
    back = CpuOp(case.scheme, tensors).canonical()
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name


@every_typed_case
def test_decodes_exactly(case: Case, dtype: torch.dtype) -> None:
    """One-hot rows of x."""
    tensors = case.tensors()
    op, eye = CpuOp(case.scheme, tensors), torch.eye(case.k, dtype=dtype)
    want = case.scheme.dequantize(tensors).to(dtype)
    for rows in (1, 5, 37):
        y = torch.cat([op(x) for x in eye[:100].split(rows)])
        assert y.dtype == dtype and torch.equal(y.T, want[:, :100]), rows


@every_typed_case
def test_within_its_bound(case: Case, dtype: torch.dtype) -> None:
    """Of x, 2^-15 of the largest of a chunk is lost; of the result, what its type rounds off and
    fp32 sums lose."""
    tensors = case.tensors()
    op, reference = CpuOp(case.scheme, tensors), Reference(case.scheme, tensors)
    weight = case.scheme.dequantize(tensors).double().abs()
    for m in (1, 5, 130):
        x = torch.randn(m, case.k, generator=torch.Generator().manual_seed(m)).to(dtype)
        x[0, 7] *= 300  # spoils no more than its own chunk
        exact, y = reference(x.double()), op(x)
        assert y.dtype == dtype and y.shape == (m, case.n)
        bound = chunk_largest(op, x).double() @ weight.T * 2**-15 * 1.004  # TOP is below 2^15
        bound += exact.abs() * torch.finfo(dtype).eps / 2 + x.double().abs() @ weight.T * 2**-20
        rounded = dtype == BF16 and op.isa.matrices and m >= 32  # the weights, too
        if rounded:
            bound += x.double().abs() @ weight.T * 2**-9
        assert ((y.double() - exact).abs() <= bound).all()
        rms = float((y.double() - exact).norm() / exact.norm())
        assert rms <= {BF16: 3e-3 if rounded else 2e-3, FP16: 4e-4, FP32: 2e-4}[dtype]


def chunk_largest(op: CpuOp, x: Tensor) -> Tensor:  # (m, k)
    """The largest x of the chunk that each input is in."""
    chunks = op._inputs(x).view(len(x), -1, op.chunk).abs()
    largest = chunks.amax(-1, keepdim=True).expand_as(chunks)
    largest = largest.reshape(len(x), op.groups, -1)[:, :, : op.group].flatten(1)
    return largest if op.order is None else largest[:, torch.argsort(op.order)]


@every_isa
@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_every_instruction_set_gives_the_same_bits(
    case: Case, isa: processor.Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = case.tensors()
    best = CpuOp(case.scheme, tensors)
    on(isa, monkeypatch)
    op = CpuOp(case.scheme, tensors)
    assert op.words.shape[4] == 2 * isa.lanes
    back = op.canonical()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())
    x = torch.randn(39, case.k)
    assert torch.equal(op(x), best(x))
    for rows in (1, 2, 3, 7, 16):
        assert torch.equal(op(x[:rows]), best(x)[:rows])


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch) -> processor.Isa:
    """AMX on any processor: its instructions as plain code, its registers as memory."""
    registers = torch.zeros(8, 16, 16, dtype=torch.int32)
    written = llvm.Writer.intrinsic

    def intrinsic(w: llvm.Writer, name: str, result: Any, *values: llvm.Value) -> Any:
        if not name.startswith(("llvm.x86.tile", "llvm.x86.tdp", "llvm.x86.ldtile")):
            return written(w, name, result, *values)
        tiles = [
            w.number(registers[v.raw.constant].data_ptr()) for v in values if v.type == llvm.I8
        ]
        lane, zero = llvm.vector(llvm.I32, 16), w.number(0)
        with w.loop(zero, w.number(16)) as row:
            if name.endswith("tilezero"):
                w.store(w.constant(lane, 0), tiles[0] + row * 64)
            if name.endswith(("tileloadd64", "tilestored64")):
                memory = llvm.Value(w, w.builder.ptrtoint(values[1].raw, llvm.I64))
                places = memory + row * values[2], tiles[0] + row * 64
                source, target = places if "load" in name else places[::-1]
                w.store(w.load(source, lane), target)
            if name.endswith("tdpbf16ps"):
                with w.loop(zero, w.number(16)) as k:
                    a = w.spread(w.load(tiles[1] + row * 64 + k * 4, llvm.I32), 16)
                    b = w.load(tiles[2] + k * 64, lane)
                    floats = llvm.vector(llvm.F32, 16)
                    even = (a << 16).as_bits(floats) * (b << 16).as_bits(floats)
                    odd = (a & 0xFFFF0000).as_bits(floats) * (b & 0xFFFF0000).as_bits(floats)
                    total = w.load(tiles[0] + row * 64, floats) + even + odd
                    w.store(total, tiles[0] + row * 64)
        return None

    monkeypatch.setattr(llvm.Writer, "intrinsic", intrinsic)
    isa = replace(processor.ISAS["amx"], name="amx, emulated", dot="plain", needs=frozenset())
    on(isa, monkeypatch)
    return isa


AMX = [
    Case(W4A16(4, 64), n=200, k=192),
    Case(W4A16(4, 32, False), n=64, k=32),
    Case(W4A16(8, 128, False), 128, 256, FP16),
    Case(W4A16(4, 8), n=96, k=40),
]


@pytest.mark.parametrize("case", AMX, ids=str)
def test_matrices(case: Case, amx: processor.Isa) -> None:
    """32 rows of bf16 at a time by AMX, the rest and inputs that are no multiple of 32 by codes."""
    one = torch.get_num_threads()
    torch.set_num_threads(1)  # the emulated registers are one set
    tensors = case.tensors()
    op, weight = CpuOp(case.scheme, tensors), case.scheme.dequantize(tensors)
    assert op.isa is amx
    eye = torch.eye(case.k, dtype=BF16).repeat(3, 1)[:101]
    assert torch.equal(op(eye), weight.bfloat16().T.repeat(3, 1)[:101])
    x = torch.randn(70, case.k).bfloat16()
    exact = x.double() @ weight.double().T
    assert (op(x).double() - exact).norm() <= 3e-3 * exact.norm()
    # In whole numbers nothing is rounded but the result: any slip of an address shows.
    whole = Case(case.scheme, case.n, case.k, case.scale_dtype).tensors()
    whole["weight_scale"].fill_(1)
    op, numbers = CpuOp(case.scheme, whole), torch.randint(-3, 4, (64, case.k)).bfloat16()
    wanted = numbers.double() @ case.scheme.dequantize(whole).double().T
    assert torch.equal(op(numbers), wanted.bfloat16())
    torch.set_num_threads(one)


def test_a_row_depends_on_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(W4A16(4, 64, False), n=640, k=512)
    op, x = CpuOp(case.scheme, case.tensors()), torch.randn(23, 512)
    whole = op(x)
    assert all(torch.equal(op(x[i : i + 1]), whole[i : i + 1]) for i in range(23))
    monkeypatch.setattr(cpu, "SLICE", 5 * 512)  # split into bytes five rows at a time
    assert torch.equal(op(x), whole)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_threads_change_nothing(threads: int) -> None:
    case = Case(W4A16(4, 32, False), n=200, k=96)
    op, x = CpuOp(case.scheme, case.tensors()), torch.randn(9, 96)
    before, whole = torch.get_num_threads(), op(x)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(op(x), whole)
    finally:
        torch.set_num_threads(before)


@every_dtype
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(dtype: torch.dtype, wrong: float) -> None:
    case = Case(W4A16(4, 64, False))
    op, x = CpuOp(case.scheme, case.tensors()), torch.randn(3, case.k).to(dtype)
    clean = op(x)
    x[1, 70] = wrong
    y = op(x)
    assert not y[1].isfinite().any()
    assert torch.equal(y[0], clean[0]) and torch.equal(y[2], clean[2])


def test_tiny_huge_and_no_numbers_at_all() -> None:
    case = Case(W4A16(4, 64))
    tensors = case.tensors()
    op, reference = CpuOp(case.scheme, tensors), Reference(case.scheme, tensors)
    assert torch.equal(op(torch.zeros(2, case.k)), torch.zeros(2, case.n))
    for size in (2.0**-90, 2.0**120):
        x = torch.randn(3, case.k) * size
        exact = reference(x.double())
        assert (op(x).double() - exact).norm() <= 2e-4 * exact.norm()
    assert (op(torch.full((1, case.k), 1e-42)).abs() < 1e-36).all()  # below all steps


@pytest.mark.parametrize("symmetric", [True, False])
def test_shapes_of_x(symmetric: bool) -> None:
    case = Case(W4A16(4, 64, symmetric), n=100)
    op = CpuOp(case.scheme, case.tensors())
    for dtype in (BF16, FP16, FP32):
        for lead in ((), (0,), (2, 0), (3,), (2, 3), (2, 3, 41)):
            x = torch.randn(*lead, case.k).to(dtype)
            y = op(x)
            assert y.shape == (*lead, case.n) and y.dtype == dtype and y.is_contiguous()
            if y.numel():
                rows = op(x.reshape(-1, case.k))
                assert torch.equal(y.reshape(-1, case.n), rows)
        for m in (3, 99):
            x = torch.randn(case.k, 2 * m).to(dtype)[:, ::2].T  # neither dimension is dense
            before = x.clone()
            assert torch.equal(op(x), op(x.contiguous())) and torch.equal(x, before)
    with pytest.raises(UserError, match="float64"):
        op(torch.zeros(1, case.k, dtype=torch.float64))


def test_the_operator_is_traced() -> None:
    """torch.compile and dispatch modes see an operator with an honest shape."""
    case = Case(W4A16(4, 64, False))
    op, x = CpuOp(case.scheme, case.tensors()), torch.randn(3, case.k)
    torch.library.opcheck(torch.ops.billfish.w4a16_cpu, (x, *op._weights))
    assert torch.equal(torch.compile(op, backend="eager", fullgraph=True)(x), op(x))


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_memory(group_size: int, symmetric: bool) -> None:
    case = Case(W4A16(4, group_size, symmetric), n=1024, k=1024)
    op = CpuOp(case.scheme, case.tensors())
    for m in (1, 70):
        op(torch.randn(m, case.k).to(BF16))
    assert op.nbytes() <= 0.32 * 2 * case.n * case.k
    kept = [value for value in vars(op).values() if isinstance(value, Tensor)]
    assert op.nbytes() == sum(tensor.untyped_storage().nbytes() for tensor in kept)


def test_refuses_other_devices() -> None:
    assert CpuOp.refuses(W4A16(), 64, 128, torch.device("cpu")) is None
    assert "model.to('cpu')" in (CpuOp.refuses(W4A16(), 64, 128, torch.device("cuda", 0)) or "")


def test_groups_of_unequal_size_are_refused() -> None:
    case = Case(W4A16(4, 64, has_g_idx=True))
    tensors = case.tensors()
    column = int((tensors["weight_g_idx"] == 0).nonzero()[0])
    tensors["weight_g_idx"][column] = 1
    with pytest.raises(UserError, match=r'63 to 65 columns.*op="reference"'):
        CpuOp(case.scheme, tensors)


def test_refuses_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("billfish.kernels.cpu.find_spec", lambda name: None)
    reason = CpuOp.refuses(W4A16(), 64, 128, torch.device("cpu"))
    assert "pip install llvmlite" in (reason or "")


def test_an_instruction_set_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = processor.isa.__wrapped__
    monkeypatch.setenv(processor.VARIABLE, ISAS[-1].name)
    assert choose() is ISAS[-1]
    monkeypatch.setenv(processor.VARIABLE, "z80")
    with pytest.raises(UserError, match=r"BILLFISH_CPU_ISA=z80: this processor has .*plain"):
        choose()
