"""What every scheme stores and every op of it computes (every.py has the cases). LOOSE names
the ops that also round x."""

import torch
from every import (
    CASES,
    EVERY,
    VARIANTS,
    every_case,
    every_dtype,
    every_layer,
    same,
    seeded,
    solved,
    stored,
    without_zeros,
)

from billfish.schemes import SCHEMES
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cpu import CpuOp
from billfish.schemes.w4a16.cuda import CudaOp

# --- what is stored ------------------------------------------------------------------------------


def test_every_scheme_has_a_shape_and_its_name():
    assert {scheme for scheme, _, _ in CASES} == set(EVERY)
    for name, make in SCHEMES.items():
        assert make.name == name
        assert make.__module__.startswith(f"billfish.schemes.{name}")
        assert make.__dataclass_params__.frozen
        names = [op.name for op in make().ops()]
        assert len(set(names)) == len(names) and names[-1] == "reference" and "auto" not in names
    assert VARIANTS.keys() <= SCHEMES.keys()


@every_case
@every_dtype
def test_quantize_yields_exactly_tensors(scheme, n, k, dtype):
    specs, tensors = scheme.tensors(n, k, dtype), stored(scheme, n, k, dtype)
    assert tensors.keys() == specs.keys()
    for name, spec in specs.items():
        assert spec.mismatch(tensors[name]) is None, name
        assert tensors[name].is_contiguous() and spec.nbytes == tensors[name].nbytes
        assert spec.mismatch(spec.empty("meta")) is None
    bits = 8 * sum(tensor.nbytes for tensor in tensors.values()) / (n * k)
    assert scheme.bits_per_weight(n, k, dtype) == bits >= scheme.bits


@every_case
def test_what_the_solver_decoded_is_what_is_stored(scheme, n, k):
    """The next layers are calibrated on `decoded`: it must be the weight that will run."""
    if not scheme.has_g_idx:
        decoded = solved(scheme, n, k, torch.bfloat16).decoded
        assert torch.equal(decoded, scheme.dequantize(stored(scheme, n, k)))


@every_case
def test_unpack_inverts_pack(scheme, n, k):
    """Any codes and zeros, not only those that a solver would choose."""
    groups = scheme.tensors(n, k, torch.float16)["weight_scale"].shape[1]
    source = seeded(k, n)
    codes = torch.randint(0, scheme.grid.levels, (n, k), generator=source).to(torch.uint8)
    zeros = torch.randint(0, scheme.grid.levels, (n, groups), generator=source).to(torch.uint8)
    scales = (torch.rand(n, groups, generator=source) + 0.5).to(torch.float16)
    tensors = scheme.pack(codes, scales, zeros)
    assert torch.equal(scheme.codes(tensors), codes)
    assert torch.equal(tensors["weight_scale"], scales)
    middle = torch.full_like(zeros, 2 ** (scheme.bits - 1))
    assert torch.equal(scheme.zeros(tensors), middle if scheme.symmetric else zeros)
    same(scheme.pack(scheme.codes(tensors), scales, scheme.zeros(tensors)), tensors)


@every_case
def test_dequantize_is_the_formula(scheme, n, k):
    """(code - zero) * scale in fp32, one element at a time."""
    tensors = stored(scheme, n, k)
    weight, group = scheme.dequantize(tensors), scheme.group_of_column(tensors).tolist()
    assert weight.dtype == torch.float32 and tuple(weight.shape) == (n, k)
    codes, zeros = scheme.codes(tensors).tolist(), scheme.zeros(tensors).tolist()
    for i in (0, n // 2, n - 1):
        for j in range(0, k, 7):
            scale = tensors["weight_scale"][i, group[j]].float()
            assert weight[i, j] == (codes[i][j] - zeros[i][group[j]]) * scale


# --- ops -----------------------------------------------------------------------------------------


def w4a16_cpu(scheme, tensors, x):
    """By how much an output may be off, beside the rounding of the result: x is taken in 16 bits,
    with an error of 2^-15 of the largest x of at most 128 inputs of a group."""
    weight, group = scheme.dequantize(tensors).double(), scheme.group_of_column(tensors)
    largest = torch.stack([x[:, group == g].abs().amax(1) for g in range(int(group.max()) + 1)], 1)
    return (largest.double()[:, group] @ weight.abs().T).max() * 2**-15


def w4a16_kleidiai(scheme, tensors, x):
    """x is taken in 8 bits: a step of 1/255 of what a row spans."""
    span = x.double().amax(1) - x.double().amin(1)
    return span.max() / 255 * without_zeros(scheme, tensors).abs().sum(1).max()


LOOSE = {("w4a16", "cpu"): w4a16_cpu, ("w4a16", "kleidiai"): w4a16_kleidiai}


def ops_on_cpu(scheme, n, k):
    runs = [op for op in scheme.ops() if op.refuses(scheme, n, k, torch.device("cpu")) is None]
    assert runs[-1].name == "reference"
    return runs


@every_case
@every_dtype
def test_identity_gives_dequantize_rounded_once(scheme, n, k, dtype):
    tensors = stored(scheme, n, k)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    weight, eye = scheme.dequantize(tensors), torch.eye(k, dtype=dtype)
    for op in ops_on_cpu(scheme, n, k):
        ready = op(scheme, tensors)
        for rows in (1, 16, k):  # few rows and many may take another path
            count = min(k, 4 * rows)
            y = torch.cat([ready(x) for x in eye[:count].split(rows)]).T
            assert y.dtype == dtype and tuple(y.shape) == (n, count)
            want = weight[:, :count].to(dtype)
            if op.name == "kleidiai":  # it adds up all of the row, in fp32, and subtracts it
                lost = 2**-21 * without_zeros(scheme, tensors).abs().sum(1, keepdim=True)
                lost = lost + torch.finfo(dtype).eps * want.abs()
                assert ((y.double() - want).abs() <= lost).all(), rows
                continue
            assert torch.equal(y, want), (op.name, rows)
        same(ready.canonical(), before)
    same(tensors, before)


@every_case
@every_dtype
def test_ops_match_the_reference(scheme, n, k, dtype):
    """err(ours, fp64) <= 2 * err(torch in the same dtype, fp64) + what LOOSE allows."""
    tensors = stored(scheme, n, k)
    weight = scheme.dequantize(tensors).double()
    for op in ops_on_cpu(scheme, n, k):
        ready = op(scheme, tensors)
        for m in (1, 7, 65):
            x = torch.randn(m, k, generator=seeded(m, k)).to(dtype)
            exact = x.double() @ weight.T
            torch_error = (x @ weight.to(dtype).T - exact).abs().max()
            atol = 1e-6 * exact.abs().max()
            if loose := LOOSE.get((scheme.name, op.name)):
                atol += loose(scheme, tensors, x)
            error = (ready(x).double() - exact).abs().max()
            assert error <= 2 * torch_error + atol, (op.name, m)


@every_case
def test_ops_take_any_leading_shape(scheme, n, k):
    tensors = stored(scheme, n, k)
    x = torch.randn(2, 3, k, generator=seeded(n, k)).bfloat16()
    for op in ops_on_cpu(scheme, n, k):
        ready = op(scheme, tensors)
        y = ready(x)
        assert tuple(y.shape) == (2, 3, n) and y.dtype == x.dtype
        assert torch.equal(y.reshape(6, n), ready(x.reshape(6, k)))
        assert torch.equal(ready(x.transpose(0, 1)), y.transpose(0, 1))  # not contiguous
        assert tuple(ready(x[0, 0]).shape) == (n,)
        assert tuple(ready(x[:, :0]).shape) == (2, 0, n)


@every_case
def test_canonical_survives_calls_and_the_sources_end(scheme, n, k):
    """An op may be asked for its tensors at any time, also when those it was made from are gone."""
    tensors = stored(scheme, n, k)
    for op in ops_on_cpu(scheme, n, k):
        given = {name: tensor.clone() for name, tensor in tensors.items()}
        ready = op(scheme, given)
        ready(torch.randn(2, k).bfloat16())
        del given
        same(ready.canonical(), tensors)
        codes = sum(tensor.nbytes for name, tensor in tensors.items() if "packed" in name)
        assert ready.nbytes() >= codes


# --- joined --------------------------------------------------------------------------------------


def all_ops(scheme, n, k):
    """Those that run here, and those of a GPU as far as they only arrange."""
    arranges = scheme.group_size == -1 or scheme.group_size % 32 == 0
    ops = [op for op in scheme.ops() if arranges or not issubclass(op, CudaOp)]
    return [op for op in ops if op.name != "kleidiai" or op in ops_on_cpu(scheme, n, k)]


@every_layer
def test_joined_ops_are_the_ops_one_after_the_other(scheme, n, k, monkeypatch):
    """The same words once, the same outputs, and each op as it was."""
    monkeypatch.setattr(CudaOp, "_prepare", lambda op: None)
    each = [stored(scheme, rows, k) for rows in (128, 64, 33)]
    for op in all_ops(scheme, n, k):
        parts = [op(scheme, tensors) for tensors in each]
        before = sum(part.nbytes() for part in parts)
        whole = op.join(parts)
        if scheme.has_g_idx or op.name in ("kleidiai", "reference"):
            assert whole is None
            continue
        assert type(whole) is op and whole.nbytes() == before
        assert sum(part.nbytes() for part in parts) == before
        for part, tensors in zip(parts, each, strict=True):
            same(part.canonical(), tensors)
        storages = {name: t.untyped_storage().data_ptr() for name, t in vars(whole).items()
                    if isinstance(t, torch.Tensor)}  # fmt: skip
        for part in parts:
            for name, storage in storages.items():
                assert getattr(part, name).untyped_storage().data_ptr() == storage, name
        codes = torch.cat([scheme.codes(tensors) for tensors in each])
        together = whole.canonical()
        assert torch.equal(scheme.codes(together), codes)
        assert torch.equal(scheme.dequantize(together)[128:192], scheme.dequantize(each[1]))
        if op.name != "cpu":
            continue
        for m, dtype in ((1, torch.bfloat16), (5, torch.bfloat16), (40, torch.bfloat16),
                         (5, torch.float32)):  # fmt: skip
            x = torch.randn(m, k, generator=seeded(m, k)).to(dtype)
            alone = [op(scheme, tensors)(x) for tensors in each]
            assert all(map(torch.equal, (part(x) for part in parts), alone))
            assert torch.equal(whole(x), torch.cat(alone, dim=1))


def test_ops_that_do_not_fit_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(CudaOp, "_prepare", lambda op: None)
    scheme, k = W4A16(4, 32), 96
    for op in (CpuOp, CudaOp):
        for first, second in (
            (stored(scheme, 33, k), stored(scheme, 64, k)),  # outputs that end within a band
            (stored(scheme, 64, k), stored(scheme, 64, 256)),
            (stored(scheme, 64, k), stored(scheme, 64, k, torch.float16)),
        ):
            parts = [op(scheme, first), op(scheme, second)]
            assert op.join(parts) is None
            same(parts[0].canonical(), first)
            same(parts[1].canonical(), second)
        other = op(W4A16(4, 96), stored(W4A16(4, 96), 64, k))
        assert op.join([op(scheme, stored(scheme, 64, k)), other]) is None
