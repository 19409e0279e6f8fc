"""What every scheme and every op of the registry must keep: opt-out, never opt-in. A new line in
SCHEMES is tested without another word; LOOSE names the one op that may round more than once."""

import ast
import copy
import importlib
import inspect
import sys
import textwrap
from functools import cache

import pytest
import torch

from billfish.errors import UserError
from billfish.kernels import jit
from billfish.models.linear import QuantLinear
from billfish.schemes import SCHEMES
from billfish.schemes.base import choose
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cpu import CpuOp
from billfish.schemes.w4a16.cuda import CudaOp

VARIANTS = {
    "w4a16": [
        *(W4A16(bits, 32, symmetric) for bits in range(2, 9) for symmetric in (True, False)),
        *(W4A16(bits, -1, symmetric) for bits in (3, 4, 8) for symmetric in (True, False)),
        *(W4A16(4, size, symmetric) for size in (16, 64, 256) for symmetric in (True, False)),
        *(W4A16(bits, 32, symmetric, True) for bits in (4, 8) for symmetric in (True, False)),
        W4A16(4, 48),
    ]
}
SHAPES = ((33, 47), (24, 96), (70, 256))  # (n, k); a scheme is tested with those that it takes
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = tuple(map(torch.device, ("cpu", "cuda", "cuda:1", "meta")))
EVERY = [scheme for name, make in SCHEMES.items() for scheme in (make(), *VARIANTS.get(name, []))]
CASES = [
    (scheme, *shape)
    for scheme in EVERY
    for shape in SHAPES
    if scheme.group_size == -1 or shape[1] % scheme.group_size == 0
]
every_case = pytest.mark.parametrize(("scheme", "n", "k"), CASES, ids=str)
# QuantLinear knows no shape and no bit: the last shape of each scheme will do.
every_layer = pytest.mark.parametrize(
    ("scheme", "n", "k"), list({case[0]: case for case in CASES}.values()), ids=str
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


@pytest.fixture(autouse=True)
def one_thread():
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def seeded(n, k):
    return torch.Generator().manual_seed(1000 * n + k)


@cache
def solved(scheme, n, k, dtype):
    """What the scheme's own folder makes of a random weight with some outliers and a dead group."""
    weight = torch.randn(n, k, generator=seeded(n, k))
    weight[:, 3] *= 20
    weight[-1, : k // 2] = 0
    folder = importlib.import_module(f"billfish.schemes.{scheme.name}.quantize")
    return folder.quantize(scheme, weight, None, "rtn", dtype)


def stored(scheme, n, k, dtype=torch.bfloat16):
    """Canonical tensors of `solved`. Reordered columns are never made by us, only read."""
    result = solved(scheme, n, k, dtype)
    tensors = scheme.pack(result.codes, result.scales, result.zeros)
    if scheme.has_g_idx:
        plain = torch.arange(k, dtype=torch.int32) // scheme.group_size
        tensors["weight_g_idx"] = plain[torch.randperm(k, generator=seeded(n, k))]
    return tensors


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


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


def w4a16_shift(scheme):
    """Of a step: what cpu's kernel for few bf16 rows may move a whole asymmetric group by.

    Its shift (8 - zero) * scale is rounded to bf16, half a unit in the last place being 2^-8 of it.
    More than 4 bits are two planes, and the second shift takes what the first one, 136 steps, lost.
    """
    return 8 * 2**-8 if scheme.bits <= 4 else 136 * 2**-16


def w4a16_cpu(scheme, tensors, dtype):
    """(n, k) by which the op may differ from the weight; None: only by the one rounding."""
    if dtype != torch.bfloat16 or scheme.symmetric:
        return None
    shift = tensors["weight_scale"].float()[:, scheme.group_of_column(tensors)]
    shift = shift * w4a16_shift(scheme)
    return shift + (scheme.dequantize(tensors).abs() + shift) * 2**-8


def w4a16_cpu_output(scheme, tensors, x):
    """The same for an output: shifted are all columns of a group together."""
    if x.dtype != torch.bfloat16 or scheme.symmetric:
        return 0.0
    scales, group = tensors["weight_scale"].double(), scheme.group_of_column(tensors)
    sums = torch.zeros(len(x), scales.shape[1], dtype=torch.float64)
    sums.index_add_(1, group, x.double())
    return (sums.abs() @ scales.T).max() * w4a16_shift(scheme)


LOOSE = {("w4a16", "cpu"): (w4a16_cpu, w4a16_cpu_output)}


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
        loose = LOOSE.get((scheme.name, op.name))
        bound = loose and loose[0](scheme, tensors, dtype)
        ready = op(scheme, tensors)
        for rows in (1, 16, k):  # few rows and many may take another path
            count = min(k, 4 * rows)
            y = torch.cat([ready(x) for x in eye[:count].split(rows)]).T
            assert y.dtype == dtype and tuple(y.shape) == (n, count)
            if bound is None:
                assert torch.equal(y, weight[:, :count].to(dtype)), (op.name, rows)
            else:
                off = (y.float() - weight[:, :count]).abs() / bound[:, :count]
                assert float(off.max()) <= 1, (op.name, rows)
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
                atol += loose[1](scheme, tensors, x)
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


def all_ops(scheme):
    """Those that run here, and those of a GPU as far as they only arrange."""
    arranges = scheme.group_size == -1 or scheme.group_size % 32 == 0
    return [op for op in scheme.ops() if arranges or not issubclass(op, CudaOp)]


@every_layer
def test_joined_ops_are_the_ops_one_after_the_other(scheme, n, k, monkeypatch):
    """The same words once, the same outputs, and each op as it was."""
    monkeypatch.setattr(CudaOp, "_prepare", lambda op: None)
    each = [stored(scheme, rows, k) for rows in (128, 64, 33)]
    for op in all_ops(scheme):
        parts = [op(scheme, tensors) for tensors in each]
        before = sum(part.nbytes() for part in parts)
        whole = op.join(parts)
        if scheme.has_g_idx or op.name == "reference":
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
        for m, dtype in ((1, torch.bfloat16), (5, torch.bfloat16), (50, torch.bfloat16),
                         (5, torch.float32)):  # fmt: skip
            x = torch.randn(m, k, generator=seeded(m, k)).to(dtype)
            alone = [op(scheme, tensors)(x) for tensors in each]
            expected = torch.cat(alone, dim=1)
            assert all(map(torch.equal, (part(x) for part in parts), alone))
            if dtype == torch.bfloat16 and m <= 40 and whole.sz is not None:  # sums along k alone
                assert torch.equal(whole(x), expected)
            else:  # the library may add in another order for another n
                torch.testing.assert_close(whole(x), expected, rtol=2**-7, atol=1e-4)


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


# --- refusals ------------------------------------------------------------------------------------

QUESTIONS = [(*case, device) for case in CASES for device in DEVICES]


def no_nvrtc():
    raise UserError("not here")


# What this machine may not be: (compute capability of its GPU, whether NVRTC is there).
MACHINES = [None, ((7, 5), True), ((9, 0), True), ((9, 0), False), ((10, 0), True)]


def ask_everything(op):
    for machine in MACHINES:
        with pytest.MonkeyPatch.context() as patch:
            if machine is not None:
                patch.setattr(torch.cuda, "is_available", lambda: True)
                patch.setattr(torch.cuda, "current_device", lambda: 0)
                patch.setattr(torch.cuda, "get_device_capability", lambda index, m=machine: m[0])
                if not machine[1]:
                    patch.setattr(jit, "version", no_nvrtc)
            yield from (op.refuses(*question) for question in QUESTIONS)


def reached_returns(op):
    """Lines of op.refuses that returned a reason for one of QUESTIONS, found by tracing."""
    code, lines = inspect.unwrap(op.refuses).__code__, set()

    def watch(frame, event, value):
        if frame.f_code is code:
            if event == "return" and value is not None:
                lines.add(frame.f_lineno)
            return watch
        return None

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        reasons = [reason for reason in ask_everything(op) if reason]
    finally:
        sys.settrace(before)
    return lines, reasons


@pytest.mark.parametrize("op", sorted({op for s in EVERY for op in s.ops()}, key=str), ids=str)
def test_every_refusal_is_reached_and_readable(op):
    lines, reasons = reached_returns(op)
    source, start = inspect.getsourcelines(op.refuses)
    for node in ast.walk(ast.parse(textwrap.dedent("".join(source)))):
        if isinstance(node, ast.Return) and ast.unparse(node) not in ("return None", "return"):
            where = range(start + node.lineno - 1, start + node.end_lineno)
            assert lines & {*where}, f"add a case that reaches {op.name}: {ast.unparse(node)}"
    for reason in set(reasons):
        assert reason.endswith(".") and len(reason.split()) > 5 and "\n" not in reason
        assert "None" not in reason and "Error" not in reason


@pytest.mark.parametrize("device", [torch.device("cuda"), torch.device("cuda:3")], ids=str)
@pytest.mark.parametrize("scheme", EVERY, ids=str)
def test_auto_on_a_gpu_that_no_op_takes_names_every_refusal(scheme, device):
    """No GPU is asked and no tensor exists: a device is only a name here."""
    ops, (n, k) = scheme.ops(), (64, 768)
    refusals = {op.name: op.refuses(scheme, n, k, device) for op in ops[:-1]}
    if None in refusals.values():
        assert refusals[choose(scheme, n, k, device).name] is None
        return
    with pytest.raises(UserError) as error:
        choose(scheme, n, k, device)
    text = str(error.value)
    assert f"{n} x {k}" in text and str(device) in text and scheme.name in text
    for name, reason in refusals.items():
        assert f"{name}: {reason}" in text
    assert 'op="reference"' in text
    assert choose(scheme, n, k, device, "reference") is ops[-1]
    for name, reason in refusals.items():
        with pytest.raises(UserError) as error:
            choose(scheme, n, k, device, name)
        assert reason in str(error.value) and repr(name) in str(error.value)


@pytest.mark.parametrize("scheme", EVERY, ids=str)
def test_choose_on_the_cpu(scheme):
    device = torch.device("cpu")
    assert choose(scheme, 64, 768, device).name == "cpu"
    willing = [op for op in scheme.ops() if op.refuses(scheme, 64, 768, device) is None]
    assert {op.name for op in willing} >= {"cpu", "reference"}
    for op in willing:
        assert choose(scheme, 64, 768, device, op.name) is op
    with pytest.raises(UserError, match=r"op 'marlin9'.*known are auto, .*cpu, reference"):
        choose(scheme, 64, 768, device, "marlin9")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"bits": 1}, "2 to 8 bits"),
        ({"bits": 9}, "2 to 8 bits"),
        ({"group_size": 0}, "1 or more"),
        ({"group_size": -2}, "1 or more"),
    ],
)
def test_parameters_that_w4a16_refuses(parameters, message):
    with pytest.raises(UserError, match=message):
        W4A16(**parameters)


# --- QuantLinear ---------------------------------------------------------------------------------


def layer_of(scheme, n, k, bias=False, dtype=torch.bfloat16):
    layer = QuantLinear(scheme, n, k, bias=bias, dtype=dtype)
    layer.set_tensors(stored(scheme, n, k, dtype))
    if bias:
        layer.bias.data = torch.randn(n, generator=seeded(n, n)).to(dtype)
    return layer


def some_x(k, dtype=torch.bfloat16):
    return torch.randn(5, k, generator=seeded(5, k)).to(dtype)


@every_layer
def test_linear_is_born_with_the_schemes_tensors(scheme, n, k):
    layer = QuantLinear(scheme, n, k, bias=True, dtype=torch.float16, device="meta")
    specs = scheme.tensors(n, k, torch.float16)
    assert layer.state_dict().keys() == {*specs, "bias"}
    for name, spec in specs.items():
        assert spec.mismatch(layer.get_buffer(name)) is None
    assert tuple(layer.bias.shape) == (n,) and layer.bias.dtype == torch.float16
    assert layer.nbytes() == sum(spec.nbytes for spec in specs.values())
    assert "not arranged" in repr(layer)
    assert QuantLinear(scheme, n, k).bias is None


@every_layer
def test_linear_state_dict_is_canonical_whatever_happened(scheme, n, k):
    tensors, layer = stored(scheme, n, k), layer_of(scheme, n, k, bias=True)
    expected = {**tensors, "bias": layer.bias.data}
    same(layer.state_dict(), expected)
    for op in ("auto", "reference", "auto", "auto"):  # arranged twice and back
        layer.arrange(op)
        assert all(getattr(layer, name) is None for name in tensors)  # kept once, by the op
        assert layer.nbytes() == layer.op.nbytes()
        same(layer.state_dict(), expected)
        same(layer.tensors(), tensors)
        assert torch.equal(layer.weight, scheme.dequantize(tensors))


@every_layer
def test_linear_loads_a_state_dict(scheme, n, k):
    source = layer_of(scheme, n, k, bias=True)
    source.arrange()
    fresh = QuantLinear(scheme, n, k, bias=True)
    assert fresh.load_state_dict(source.state_dict()).missing_keys == []
    assert torch.equal(fresh(some_x(k)), source(some_x(k)))
    # Over an arranged layer with other numbers: the old ones must be gone.
    other = layer_of(scheme, n, k, bias=True)
    changed = {**other.tensors(), "weight_scale": other.tensors()["weight_scale"] * 2}
    other.set_tensors(changed)
    other.arrange()
    assert not torch.equal(other(some_x(k)), source(some_x(k)))
    other.load_state_dict(source.state_dict())
    assert torch.equal(other(some_x(k)), source(some_x(k)))
    broken = source.state_dict()
    del broken["weight_scale"]
    with pytest.raises(RuntimeError, match="weight_scale"):
        other.load_state_dict(broken)
    same(source.state_dict(), other.state_dict())


@every_layer
def test_linear_forward_and_set_tensors(scheme, n, k):
    layer, x = layer_of(scheme, n, k, bias=True), some_x(k)
    op = choose(scheme, n, k, torch.device("cpu"))
    y = layer(x)  # arranges by itself
    assert layer.op.name == op.name and op.name in repr(layer)
    assert torch.equal(y, op(scheme, stored(scheme, n, k))(x) + layer.bias)
    tensors = stored(scheme, n, k)
    tensors["weight_scale"] = tensors["weight_scale"] * 4
    layer.set_tensors(tensors)
    assert layer.op is None
    assert torch.equal(layer(x), op(scheme, tensors)(x) + layer.bias)
    with pytest.raises(KeyError, match="weight_shape"):
        layer.set_tensors({name: tensors[name] for name in tensors if name != "weight_shape"})


@every_layer
def test_linear_to_float32_keeps_the_numbers(scheme, n, k):
    for op in ("auto", "reference"):
        layer = layer_of(scheme, n, k, bias=True)
        weight = layer.weight
        layer.arrange(op)
        name = layer.op.name
        assert layer.to(torch.float32) is layer
        assert layer.op.name == name and layer.bias.dtype == torch.float32
        assert layer.tensors()["weight_scale"].dtype == torch.float32
        assert layer.tensors()["weight_packed"].dtype == torch.int32
        assert torch.equal(layer.weight, weight)
        x = some_x(k, torch.float32)
        exact = x.double() @ weight.double().T + layer.bias.double()
        assert torch.allclose(layer(x).double(), exact, rtol=1e-5, atol=1e-5 * float(exact.std()))


@every_layer
def test_linear_deepcopy_is_independent(scheme, n, k):
    layer, x = layer_of(scheme, n, k), some_x(k)
    layer.arrange()
    y = layer(x)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), y)
    changed = {**twin.tensors(), "weight_scale": twin.tensors()["weight_scale"] * 2}
    twin.set_tensors(changed)
    assert not torch.equal(twin(x), y)
    assert torch.equal(layer(x), y)


def test_linear_inside_a_model_speaks_by_name():
    model = torch.nn.Sequential(layer_of(W4A16(4, 32), 64, 96), layer_of(W4A16(8, 32), 24, 64))
    names = {f"{i}.{part}" for i in (0, 1) for part in W4A16().tensors(1, 128, torch.float16)}
    assert model.state_dict().keys() == names
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(some_x(96))
    same(model.state_dict(), before)
    assert not list(model.parameters())  # nothing to train by accident
