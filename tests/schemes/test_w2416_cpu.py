"""CpuOp of w2416 against the oracle: exact decodes, canonical tensors given back bit for bit,
products within the bound of 16-bit activations, and the same bits for every instruction set, number
of threads and batch. How fast it is belongs to `billfish bench`."""

import copy
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.kernels import cpu as processor
from billfish.kernels import llvm
from billfish.schemes.w2416 import cpu, cpu_kernels
from billfish.schemes.w2416.cpu import CpuOp
from billfish.schemes.w2416.cpu_layer import Kind
from billfish.schemes.w2416.cpu_words import SIXTEENTHS, TOP, ZEROS
from billfish.schemes.w2416.scheme import W2416, ZERO, ZERO_STEP
from billfish.schemes.w2416.shares import BAND, GROUP

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ISAS = [isa for isa in processor.ISAS.values() if isa.needs <= processor.features()]
ROWS = (1, 2, 3, 7, 8, 21)  # narrow and wide tiles, whole and in pieces


@dataclass(frozen=True)
class Case:
    scheme: W2416
    n: int = 48
    k: int = 256
    dtype: torch.dtype = BF16

    def __str__(self) -> str:
        kind = f"{self.scheme.budget:g}-{self.scheme.outliers:g}"
        return f"{kind}-{self.n}x{self.k}-{str(self.dtype).removeprefix('torch.')}"

    @cache  # noqa: B019 - cases live as long as the tests
    def tensors(self) -> dict[str, Tensor]:
        """Every code, zero, scale and offset that can be stored, not only what a solver would
        choose; some outliers have the same place."""
        random = torch.Generator().manual_seed(self.n * self.k)
        made = self.scheme.random_tensors(self.n, self.k, self.dtype, random)
        for name in ("weight_zero", "scale_base"):
            kind = torch.iinfo(made[name].dtype)
            made[name].random_(kind.min, kind.max, generator=random)
        made["scale_base"] = (made["scale_base"] & 0x0FFF) | 0x1000  # below Inf, and all alike
        places = made["outlier_place"]
        if places.shape[2] > 3:
            places[..., 2] = places[..., 0]
            places[..., 3] = places[..., 0]
        self.scheme.check(made)
        return made

    @cache  # noqa: B019
    def weight(self) -> Tensor:
        return self.scheme.dequantize(self.tensors())

    @property
    def op(self) -> CpuOp:
        return CpuOp(self.scheme, self.tensors())


CASES = [
    Case(W2416()),
    Case(W2416(2.91), 16, 48),  # three groups
    Case(W2416(2.91), 80, 1040),  # parts cannot be halved
    Case(W2416(2.91), 32, 2048),  # four parts
    Case(W2416(2.5, 0.0), 176, 576),  # no group of 4 bits
    Case(W2416(2.6, 0.0), 144, 576),  # no outliers
    Case(W2416(3.9, 0.05), 112, 512),  # many outliers
    Case(W2416(3.3, 0.005), 64, 1024, FP32),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
# Every kernel takes seconds to compile: activations of all types with scales of one.
every_pair = pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, d) for case in CASES for d in (BF16, FP16, FP32) if case.dtype == BF16 or d == FP32],
    ids=str,
)
every_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)


def inputs(m: int, k: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m + k)).to(dtype)


def test_the_cases_are_what_they_say() -> None:
    shares = [case.scheme.shares(case.k) for case in CASES]
    assert [share.parts for share in shares[:4]] == [1, 1, 1, 4]
    assert any(share.part > 1000 for share in shares)
    assert shares[4].four == 0 and shares[5].outliers == 0 and shares[5].four > 0
    assert shares[6].outliers >= 0.04 * BAND * 512
    assert any(share.two % 2 and share.two % 8 for share in shares)
    places = CASES[6].tensors()["outlier_place"]
    assert torch.equal(places[..., 0], places[..., 3])


def test_zeros_are_whole_sixteenths() -> None:
    assert tuple((ZERO + ZERO_STEP * i) * SIXTEENTHS for i in range(4)) == ZEROS
    furthest = max(abs(SIXTEENTHS * code - zero) for code in range(4) for zero in ZEROS)
    assert furthest * GROUP * TOP <= 2**24 and 2**14 < TOP < 2**15


@every_case
def test_canonical_gives_back_the_tensors(case: Case) -> None:
    op, tensors = case.op, case.tensors()
    back = op.canonical()
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name
        assert back[name].is_contiguous()
    kept = [value for value in vars(op).values() if isinstance(value, Tensor)]
    assert op.nbytes() == sum(tensor.untyped_storage().nbytes() for tensor in kept)


@every_pair
def test_decodes_exactly(case: Case, dtype: torch.dtype) -> None:
    """One-hot rows of x."""
    op, want, eye = case.op, case.weight().to(dtype), torch.eye(case.k, dtype=dtype)
    for rows in (1, 7, 100):
        some = min(case.k, 20 * rows)
        y = torch.cat([op(x) for x in eye[-some:].split(rows)])
        assert y.dtype == dtype and torch.equal(y.T, want[:, -some:]), rows


@every_pair
def test_within_its_bound(case: Case, dtype: torch.dtype) -> None:
    """Of x, 1 / TOP of the largest of a group is lost; of the result, what its type rounds off and
    fp32 sums lose."""
    op, weight = case.op, case.weight().double()
    for m in (1, 5, 40):
        x = inputs(m, case.k, dtype)
        x[0, 7] *= 300  # spoils no more than its own group
        exact, y = case.scheme.reference(case.tensors(), x), op(x)
        assert y.dtype == dtype and y.shape == (m, case.n)
        largest = x.double().abs().unflatten(1, (-1, GROUP)).amax(2)
        bound = largest.repeat_interleave(GROUP, 1) @ weight.abs().T / TOP
        assert float(bound.max()) <= CpuOp.tolerance(case.scheme, case.tensors(), x) * (1 + 1e-9)
        bound += (
            exact.abs() * torch.finfo(dtype).eps / 2 + x.double().abs() @ weight.abs().T / 2**20
        )
        assert ((y.double() - exact).abs() <= bound).all()
        x = inputs(m, case.k, dtype)  # with nothing spoiled
        exact = case.scheme.reference(case.tensors(), x)
        rms = float((op(x).double() - exact).norm() / exact.norm())
        assert rms <= {BF16: 2.5e-3, FP16: 4e-4, FP32: 1e-4}[dtype]


@every_isa
@pytest.mark.parametrize("case", [CASES[2], CASES[3], CASES[6]], ids=str)
def test_every_instruction_set_gives_the_same_bits(
    case: Case, isa: processor.Isa, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, best = inputs(21, case.k), case.op
    monkeypatch.setattr(processor, "isa", lambda: isa)
    op, whole = case.op, best(x)
    assert op.isa is isa
    for rows in ROWS:
        assert torch.equal(op(x[:rows]), whole[:rows]), rows


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_threads_and_other_rows_change_nothing(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[2]
    op, x = case.op, inputs(21, case.k)
    before, whole = torch.get_num_threads(), op(x)
    try:
        torch.set_num_threads(threads)
        for rows in ROWS:
            assert torch.equal(op(x[-rows:]), whole[-rows:]), rows
    finally:
        torch.set_num_threads(before)
    op._product = None
    monkeypatch.setattr(cpu, "SLICE", 5 * case.k)
    monkeypatch.setattr(cpu, "LEAST", 5)  # rows at a time
    assert torch.equal(op(x), whole)


@every_dtype
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rows", [3, 9])
def test_what_is_no_number_stays_none(dtype: torch.dtype, wrong: float, rows: int) -> None:
    op, x = CASES[0].op, inputs(rows, 256, dtype)
    clean = op(x)
    x[1, 70] = wrong
    y = op(x)
    assert not y[1].isfinite().any()
    others = [row for row in range(rows) if row != 1]
    assert torch.equal(y[others], clean[others])


def test_tiny_huge_and_no_numbers_at_all() -> None:
    case = CASES[0]
    op = case.op
    assert torch.equal(op(torch.zeros(2, case.k)), torch.zeros(2, case.n))
    for size in (2.0**-90, 2.0**100):
        x = inputs(3, case.k) * size
        exact = case.scheme.reference(case.tensors(), x)
        assert (op(x).double() - exact).norm() <= 1e-4 * exact.norm()


def test_shapes_of_x() -> None:
    op = CASES[0].op
    for dtype in (BF16, FP16, FP32):
        for lead in ((), (0,), (2, 0), (3,), (2, 3), (2, 3, 5)):
            x = torch.randn(*lead, 256).to(dtype)
            y = op(x)
            assert y.shape == (*lead, 48) and y.dtype == dtype and y.is_contiguous()
            assert torch.equal(y.reshape(-1, 48), op(x.reshape(-1, 256)))
        x = torch.randn(256, 18).to(dtype)[:, ::2].T  # neither dimension is dense
        assert torch.equal(op(x), op(x.contiguous()))
    bias = torch.randn(48)
    x = inputs(3, 256)
    assert torch.equal(op(x, bias), op(x) + bias)
    with pytest.raises(UserError, match="float64"):
        op(torch.zeros(1, 256, dtype=torch.float64))
    with pytest.raises(ValueError, match="240 columns, the layer takes 256"):
        op(torch.zeros(1, 240))


def test_the_operator_is_traced() -> None:
    """torch.compile and dispatch modes see an operator with an honest shape."""
    op, x = CASES[0].op, inputs(3, 256)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.billfish.w2416_cpu, (x, op._weights), test_utils=checks)
    assert torch.equal(torch.compile(op, backend="eager", fullgraph=True)(x), op(x))
    assert torch.equal(op(x.clone().requires_grad_()).detach(), op(x))
    twin = copy.deepcopy(op)
    assert torch.equal(twin(x), op(x)) and twin._product is not op._product


def test_joined_is_its_parts() -> None:
    scheme, k = W2416(), 576
    random = torch.Generator().manual_seed(1)
    each = [scheme.random_tensors(n, k, BF16, random) for n in (192, 64, 80)]
    parts = [CpuOp(scheme, tensors) for tensors in each]
    x, bits = inputs(9, k), sum(part.nbytes() for part in parts)
    alone = [part(x) for part in parts]
    whole = CpuOp.join(parts)
    assert whole is not None and whole.n == 336 and whole.nbytes() == bits
    for rows in (1, 9):
        assert torch.equal(whole(x[:rows]), torch.cat(alone, 1)[:rows])
    for part, tensors, y in zip(parts, each, alone, strict=True):
        assert torch.equal(part(x), y)
        assert all(torch.equal(part.canonical()[name], t) for name, t in tensors.items())
        for name in cpu.WEIGHTS:
            stored = (getattr(op, name).untyped_storage().data_ptr() for op in (part, whole))
            assert len(set(stored)) == 1, name
    back = whole.canonical()
    assert torch.equal(scheme.dequantize(back), torch.cat([*map(scheme.dequantize, each)]))


def test_other_inputs_are_not_joined() -> None:
    scheme, random = W2416(), torch.Generator().manual_seed(1)
    first, second = (scheme.random_tensors(64, 576, BF16, random) for _ in range(2))
    second["input_bits"] = second["input_bits"].flip(0)
    assert not torch.equal(first["input_bits"], second["input_bits"])
    assert CpuOp.join([CpuOp(scheme, first), CpuOp(scheme, second)]) is None
    half = {**first, **{n: t.half() for n, t in first.items() if t.is_floating_point()}}
    assert CpuOp.join([CpuOp(scheme, first), CpuOp(scheme, half)]) is None


@pytest.mark.parametrize("size", [(576, 576), (1536, 576), (576, 1536), (2048, 2048)])
def test_memory(size: tuple[int, int]) -> None:
    scheme = W2416()
    tensors = scheme.random_tensors(*size, BF16, torch.Generator().manual_seed(0))
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert stored <= CpuOp(scheme, tensors).nbytes() <= 1.02 * stored


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CpuOp.refuses(W2416(), 64, 128, torch.device("cpu")) is None
    assert "model.to('cpu')" in (CpuOp.refuses(W2416(), 64, 128, torch.device("cuda", 0)) or "")
    monkeypatch.setattr("billfish.kernels.cpu.find_spec", lambda name: None)
    assert "pip install llvmlite" in (CpuOp.refuses(W2416(), 64, 128, torch.device("cpu")) or "")


TARGETS = {  # isa -> (triple, processor, instructions)
    "avxvnni": ("x86_64-unknown-linux-gnu", "alderlake", ("vpdpbusd", "vpmaddwd", "ymm")),
    "dotprod": ("aarch64-unknown-linux-gnu", "neoverse-n1", ("sdot",)),
}


@pytest.mark.parametrize("name", TARGETS)
def test_other_processors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for processors that this machine is not compile, with their instructions."""
    llvm.llvm.initialize_all_targets()
    llvm.llvm.initialize_all_asmprinters()
    triple, target, instructions = TARGETS[name]
    monkeypatch.setattr(
        cpu_kernels, "compiled", lambda module, isa: llvm.Compiled(module, triple, target, "")
    )
    kind = Kind(processor.ISAS[name], BF16, BF16)
    assembly = cpu_kernels.product(kind).assembly
    assert all(each in assembly for each in instructions)
