"""CpuOp against the oracle: exact decodes, canonical tensors given back bit for bit, matmuls no
worse than PyTorch's own of the rounded weights. How fast it is belongs to `billfish bench`."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.formats.grid import group_count
from billfish.schemes.w4a16 import cpu
from billfish.schemes.w4a16.cpu import MAX_KERNEL_ROWS, CpuOp
from billfish.schemes.w4a16.reference import ReferenceOp
from billfish.schemes.w4a16.scheme import W4A16

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


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
    *(Case(W4A16(bits, 16, False)) for bits in (4, 8)),  # no kernel: panels at every m
    *(Case(W4A16(4, g, s), k=384) for g in (96, 192) for s in (True, False)),  # kernel 32, 64
    *(Case(W4A16(bits, -1, s), k=100) for bits in (4, 8) for s in (True, False)),  # k padded
    *(Case(W4A16(bits, 64, s), n=100) for bits in (4, 8) for s in (True, False)),  # n padded
    *(Case(W4A16(bits, 64, s, True), n=72) for bits in (4, 8) for s in (True, False)),
    *(Case(W4A16(4, 16, s, True)) for s in (True, False)),
    *(Case(W4A16(bits, 32, s), 96, 128, d) for bits in (4, 8) for s in (True, False)
      for d in (FP16, FP32)),
]  # fmt: skip
KERNEL_CASES = [case for case in CASES if case.scale_dtype == BF16 and case.scheme.group_size != 16]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)


@every_case
def test_canonical_gives_back_the_tensors(case: Case) -> None:
    tensors = case.tensors()
    back = CpuOp(case.scheme, tensors).canonical()
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name


@every_dtype
@every_case
def test_panels_decode_exactly(case: Case, dtype: torch.dtype) -> None:
    tensors = case.tensors()
    assert case.k > MAX_KERNEL_ROWS
    y = CpuOp(case.scheme, tensors)(torch.eye(case.k, dtype=dtype))
    assert y.dtype == dtype
    assert torch.equal(y.T, case.scheme.dequantize(tensors).to(dtype))


def test_many_panels_decode_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(W4A16(4, 64, False), n=5 * 64 + 8)
    monkeypatch.setattr(cpu, "PANEL_CODES", 2 * 64 * case.k)
    tensors = case.tensors()
    y = CpuOp(case.scheme, tensors)(torch.eye(case.k, dtype=BF16))
    assert torch.equal(y.T, case.scheme.dequantize(tensors).to(BF16))


@pytest.mark.parametrize("case", KERNEL_CASES, ids=str)
def test_kernel_decodes_within_its_bound(case: Case) -> None:
    """Symmetric: exact. Asymmetric: a group is shifted by at most 1/32 of a step, then rounded."""
    if cpu.kernel_half() is None:
        pytest.skip("no int4 kernel on this CPU: every call decodes panels")
    tensors = case.tensors()
    op = CpuOp(case.scheme, tensors)
    assert op.sz is not None
    eye = torch.eye(case.k, dtype=BF16)
    if op.order is not None:
        eye = eye[:, op.order]
    starts = range(0, case.k, MAX_KERNEL_ROWS)
    got = torch.cat([op._kernel(eye[i : i + MAX_KERNEL_ROWS], op.sz) for i in starts]).T.double()
    want = case.scheme.dequantize(tensors)
    if case.scheme.symmetric:
        assert torch.equal(got, want.bfloat16().double())
    scales = tensors["weight_scale"].double()[:, case.scheme.group_of_column(tensors)]
    shift = scales * (1 / 32 if case.scheme.bits <= 4 else 136 * 2**-16)
    bound = shift + (want.abs() + shift) * 2**-8
    assert ((got - want.double()).abs() <= bound).all()


@every_dtype
@every_case
def test_no_worse_than_torch(case: Case, dtype: torch.dtype) -> None:
    tensors = case.tensors()
    op, reference = CpuOp(case.scheme, tensors), ReferenceOp(case.scheme, tensors)
    rounded = case.scheme.dequantize(tensors).to(dtype)
    for m in (1, 5, MAX_KERNEL_ROWS, MAX_KERNEL_ROWS + 1, 130):
        x = torch.randn(m, case.k, generator=torch.Generator().manual_seed(m)).to(dtype)
        exact = reference(x.double())
        y = op(x)
        assert y.dtype == dtype and y.shape == (m, case.n)
        assert error(y, exact) <= 2 * error(x @ rounded.T, exact) + 1e-6, m


def error(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


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


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_memory(group_size: int, symmetric: bool) -> None:
    case = Case(W4A16(4, group_size, symmetric), n=1024, k=1024)
    op = CpuOp(case.scheme, case.tensors())
    for m in (1, MAX_KERNEL_ROWS + 1):
        op(torch.randn(m, case.k).to(BF16))
    assert op.nbytes() <= 0.35 * 2 * case.n * case.k
    kept = [value for value in vars(op).values() if isinstance(value, Tensor)]
    assert op.nbytes() == sum(tensor.untyped_storage().nbytes() for tensor in kept)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_without_the_kernel(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "kernel_half", lambda: None)
    tensors = case.tensors()
    op = CpuOp(case.scheme, tensors)
    assert op.sz is None
    rounded = case.scheme.dequantize(tensors).to(BF16)
    for m in (1, 41):
        x = torch.eye(case.k, dtype=BF16)[:m]
        assert torch.equal(op(x), rounded.T[:m])
    back = op.canonical()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


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
