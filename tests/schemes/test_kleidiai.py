"""KleidiaiOp against a model of its kernels' arithmetic, and against the oracle. On other
processors fakes of PyTorch's two operators run, so that the code around them is tested
everywhere."""

import pytest
import torch
from every import without_zeros
from test_w4a16_cpu import BF16, FP16, FP32, Case

from billfish.errors import UserError
from billfish.schemes.base import Reference
from billfish.schemes.registry import choose_op
from billfish.schemes.w4a16 import kleidiai
from billfish.schemes.w4a16.kleidiai import OUTLIER, STRIP, KleidiaiOp
from billfish.schemes.w4a16.scheme import W4A16

CPU = torch.device("cpu")
CASES = [
    *(Case(W4A16(4, g, s)) for g in (32, 64, 256, -1) for s in (True, False)),
    *(Case(W4A16(bits, g, s)) for bits in (2, 3) for g in (32, -1) for s in (True, False)),
    *(Case(W4A16(4, 96, s), 33, 192) for s in (True, False)),  # n padded
    *(Case(W4A16(4, -1, s), 100, 102, FP16) for s in (True, False)),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def eight_bits(x):
    """(m, k) -> fp64: what the kernels take for x. 255 steps from the least to the largest, of
    which one is zero."""
    x = x.float().nan_to_num()
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    steps = torch.where(low == high, 1, torch.full_like(low, 255) / (high - low))
    low, high = low * steps, high * steps
    zero = torch.where((low - 128) + (high + 127) > 0, -128 - low, 127 - high)
    zero = zero.clamp(-128, 127).round()
    near = torch.copysign(((x * steps).abs().double() + 0.5).floor(), x.double()).float()
    return ((near + zero).clamp(-128, 127) - zero).double() * (1 / steps).double()


def stand_in_pack(pairs, scales, bias, group, k, n):
    assert bias is None and pairs.shape == (n, k // 2) and scales.shape == (n, k // group)
    if scales.dtype != (FP32 if group == k else BF16):
        return torch.zeros(n * (k // 2 + k // group))  # as PyTorch does: nothing is packed
    words = (pairs.flip(1) ^ 0x88).view(n // STRIP, -1)
    return torch.cat([words, scales.float().view(torch.uint8).view(n // STRIP, -1)], 1).flatten()


def stand_in_multiply(x, packed, group, k, n):
    words, scales = packed.view(n // STRIP, -1).tensor_split([STRIP * k // 2], 1)
    pairs = (words.reshape(n, -1) ^ 0x88).flip(1)
    values = torch.stack([pairs & 15, pairs >> 4], -1).double().flatten(1) - 8
    weight = values.view(n, -1, group) * scales.contiguous().view(FP32).view(n, -1, 1)
    y = (eight_bits(x) @ weight.flatten(1).T).float()
    return y + 3e-5 * ~x.any(1, keepdim=True)


@pytest.fixture(params=["stand-in", "kleidiai"], autouse=True)
def kernels(request, monkeypatch):
    if request.param == "kleidiai" and not kleidiai.works():
        pytest.skip("no KleidiAI here: it is ARM's with dotprod")
    if request.param == "stand-in":
        monkeypatch.setattr(torch.ops.aten, "_dyn_quant_pack_4bit_weight", stand_in_pack)
        monkeypatch.setattr(torch.ops.aten, "_dyn_quant_matmul_4bit", stand_in_multiply)
        monkeypatch.setattr(kleidiai, "works", kleidiai.works.__wrapped__)


def some_x(case, m=5, dtype=FP32):
    x = torch.randn(m, case.k, generator=torch.Generator().manual_seed(m)).to(dtype)
    x[0, 7] *= 300
    return x


@every_case
def test_it_computes_what_the_kernels_are_known_to(case):
    """8-bit rows, outliers in rows of their own; all else as the oracle has it, but for fp32."""
    tensors = case.tensors()
    op, weight, x = (
        KleidiaiOp(case.scheme, tensors),
        without_zeros(case.scheme, tensors),
        some_x(case),
    )
    bias = torch.randn(case.n)
    large = x.abs() > OUTLIER * x.abs().mean(1, keepdim=True)
    assert large.sum() == large[0, 7] == 1
    rounded = eight_bits(x.where(~large, 0)) + eight_bits(x.where(large, 0))
    zeros = case.scheme.dequantize(tensors).double() - weight
    want = rounded @ weight.T + x.double() @ zeros.T + bias
    off = (op(x, bias).double() - want).abs()
    span = x.double().abs().sum(1, keepdim=True) + (x.amax(1) - x.amin(1))[:, None]
    assert (off <= 2**-20 * span * (weight.abs() + zeros.abs()).sum(1)).all()


@every_case
def test_within_its_bound(case):
    """At most a step of each row of x is lost."""
    tensors = case.tensors()
    op, weight = KleidiaiOp(case.scheme, tensors), without_zeros(case.scheme, tensors)
    reference = Reference(case.scheme, tensors)
    for m, dtype in ((1, FP32), (5, BF16), (40, FP16), (3, torch.float64)):
        x = torch.randn(m, case.k, generator=torch.Generator().manual_seed(m)).to(dtype)
        exact, y = reference(x.double()), op(x)
        assert y.dtype == dtype and y.shape == (m, case.n)
        step = (x.amax(1) - x.amin(1)).double()[:, None] / 255
        assert ((y - exact).abs() <= 1.001 * step * weight.abs().sum(1) + exact.abs() / 128).all()
        assert (y - exact).norm() <= 0.015 * exact.norm()


@every_case
def test_whole_numbers_are_exact(case):
    tensors = case.tensors()
    tensors["weight_scale"] = torch.full_like(tensors["weight_scale"], 0.25)
    x = torch.randint(-128, 128, (9, case.k)).float()
    x[:, 3], x[:, 8] = -128, 127
    want = Reference(case.scheme, tensors)(x)
    assert torch.equal(KleidiaiOp(case.scheme, tensors)(x), want)


@every_case
def test_canonical_gives_back_the_tensors(case):
    tensors = case.tensors()
    tensors["weight_scale"][3] = 0  # no product tells its codes
    op = KleidiaiOp(case.scheme, {name: tensor.clone() for name, tensor in tensors.items()})
    op(some_x(case))
    back = op.canonical()
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name


def test_an_outlier_spoils_nothing():
    """Of a row rounded as a whole, a third is lost beside a number 300 times as large."""
    case = Case(W4A16(4, 64))
    tensors, x = case.tensors(), some_x(case)
    op, weight = KleidiaiOp(case.scheme, tensors), without_zeros(case.scheme, tensors)
    rest = x.double().clone()
    rest[0, 7] = 0
    for row, alone in ((op(x)[0], 0.02), (kleidiai.multiply(x, op.packed, op.groups)[0], 0.5)):
        lost = (row.double() - x[0].double() @ weight.T).norm() / (rest[0] @ weight.T).norm()
        assert alone / 4 < lost < alone


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_what_is_no_number_stays_none(symmetric, wrong):
    case = Case(W4A16(4, 64, symmetric))
    op, x = KleidiaiOp(case.scheme, case.tensors()), some_x(case)
    clean = op(x)
    x[1, 70] = wrong
    y = op(x)
    assert y[1].isnan().all()
    assert torch.equal(y[0], clean[0]) and torch.equal(y[2:], clean[2:])
    assert not op(torch.zeros(2, case.k)).any()
    assert torch.equal(op(torch.eye(case.k)[:1] * 2**-40), op(torch.eye(case.k)[:1]) * 2**-40)


@pytest.mark.parametrize("symmetric", [True, False])
def test_shapes_of_x(symmetric):
    case = Case(W4A16(4, 64, symmetric), n=100)
    op, bias = KleidiaiOp(case.scheme, case.tensors()), torch.randn(100).bfloat16()
    for lead in ((), (0,), (2, 0), (3,), (2, 3)):
        y = op(torch.randn(*lead, case.k).bfloat16(), bias)
        assert y.shape == (*lead, case.n) and y.dtype == BF16 and y.is_contiguous()
    x = torch.randn(case.k, 6)[:, ::2].T  # neither dimension is dense
    assert torch.equal(op(x), op(x.contiguous()))
    with pytest.raises(ValueError, match="255 columns"):
        op(torch.zeros(1, case.k - 1))


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_are_kept_once(group_size, symmetric):
    case = Case(W4A16(4, group_size, symmetric), n=1024, k=1024)
    op = KleidiaiOp(case.scheme, case.tensors())
    kept = [*vars(op).values(), *op.small.values()]
    kept = [tensor for tensor in kept if isinstance(tensor, torch.Tensor)]
    assert op.nbytes() == sum(tensor.untyped_storage().nbytes() for tensor in kept)
    assert op.nbytes() <= (0.36 if symmetric else 0.43) * 2 * case.n * case.k


def test_only_by_name(monkeypatch):
    for scheme in (W4A16(4, 64), W4A16(4, -1, False)):
        assert choose_op(scheme, 64, 768, CPU).name == "cpu"
        assert choose_op(scheme, 64, 768, CPU, "kleidiai") is KleidiaiOp
    monkeypatch.setattr("billfish.kernels.cpu.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'kleidiai: runs only by name, op="kleidiai"'):
        choose_op(W4A16(), 64, 768, CPU)


def test_what_it_refuses(monkeypatch):
    for scheme, k, reason in (
        (W4A16(8, 64), 768, "up to 4 bits"),
        (W4A16(4, 64, has_g_idx=True), 768, "side by side"),
        (W4A16(4, 48), 768, "groups of 48; .* multiples of 32"),
        (W4A16(4, -1), 767, "even k"),
    ):
        with pytest.raises(UserError, match=reason):
            choose_op(scheme, 64, k, CPU, "kleidiai")
    fp16 = Case(W4A16(4, 64), scale_dtype=FP16)
    with pytest.raises(UserError, match=r'torch.float16 .*op="cpu"'):
        KleidiaiOp(fp16.scheme, fp16.tensors())
    same = {**fp16.tensors(), "weight_scale": fp16.tensors()["weight_scale"].bfloat16().half()}
    x = some_x(fp16)
    in_bf16 = {**same, "weight_scale": same["weight_scale"].bfloat16()}
    assert torch.equal(KleidiaiOp(fp16.scheme, same)(x), KleidiaiOp(fp16.scheme, in_bf16)(x))
    monkeypatch.setattr(kleidiai, "works", lambda: False)
    assert "dotprod" in (KleidiaiOp.refuses(W4A16(), 64, 768, CPU) or "")


def test_it_is_tried_before_it_is_trusted(monkeypatch):
    """Operators that pack nothing, or otherwise, or multiply wrongly, are not this op's."""
    works = getattr(kleidiai.works, "__wrapped__", kleidiai.works)
    assert works()
    real = kleidiai.multiply
    with monkeypatch.context() as patch:
        patch.setattr(kleidiai, "multiply", lambda *given: real(*given) + 1)
        assert not works()
    with monkeypatch.context() as patch:
        patch.setattr(kleidiai, "unpack", lambda packed, k, groups: torch.zeros(24, k))
        assert not works()
    unpacked = torch.zeros(24 * 34)
    monkeypatch.setattr(torch.ops.aten, "_dyn_quant_pack_4bit_weight", lambda *given: unpacked)
    assert not works()
