"""w4ax on a Hopper GPU with activations of 4 and 8 bits (fmpq), and with the RMS norm in the launch
that rounds them: the bits of Scheme.reference, and of the norm and the op apart."""

from types import SimpleNamespace

import pytest
import torch
from test_engine_gpu import TEXT, llm_of, model_of, room  # noqa: F401
from torch.nn.functional import silu

import billfish
from billfish.engine.cuda import runner
from billfish.engine.cuda.fused import Fused
from billfish.engine.cuda.pool import POOLS
from billfish.engine.kv.cache import Room
from billfish.kernels import cache
from billfish.kernels.launch import plain_launches
from billfish.models.decoder import Shape
from billfish.models.joined import joined, norm_input, side_by_side
from billfish.models.linear import QuantLinear
from billfish.schemes.w4ax.cuda.inputs import Rounded
from billfish.schemes.w4ax.cuda.op import CudaOp
from billfish.schemes.w4ax.scheme import W4AX

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_here")]

DEVICE = torch.device("cuda", 0)
FP16, BF16 = torch.float16, torch.bfloat16
ROWS = (1, 2, 3, 8, 16, 17, 33, 64, 65, 129, 257, 300)
EPS = 1e-5
every_dtype = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
SCHEMES = [
    W4AX(128, True, "fmpq", 0.84, True),
    W4AX(64, False, "fmpq", 0.5, True),
    W4AX(32, True, "fmpq", 0.84, False),
    W4AX(256, False, "fmpq", 1.0, True),
    W4AX(128, False),
    W4AX(64),
]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.describe())


@pytest.fixture(scope="module")
def compiled_here(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BILLFISH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(cache, "_memory", {})
        yield


def layer_of(scheme, n, k, dtype, plain=False, rows=300):
    """Canonical tensors, x with zeros, Inf, NaN and outliers, bias."""
    source = torch.Generator(DEVICE).manual_seed(n + k)
    tensors = scheme.random_tensors(n, k, dtype, source)
    if plain and scheme.mixed:
        tensors["input_order"] = torch.arange(k, dtype=torch.int32, device=DEVICE)
    x = torch.randn(rows, k, generator=source, device=DEVICE)
    x[::3, :: max(1, k // 5)] *= 30
    x[20], x[21, 3], x[22, -1], x[23, 0] = 0, torch.inf, torch.nan, -torch.inf
    x[24] *= 1e-3
    x[24, k // 2] = -6e4
    return tensors, x.to(dtype), torch.randn(n, generator=source, device=DEVICE).to(dtype)


def exactly(scheme, tensors, x, bias=None):
    y = scheme.reference(tensors, x).float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def same(one, other):
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(), other.nan_to_num()
    )


def fused_of(dtype):
    """The engine's launches, for its norm."""
    pool = POOLS["kv16"](Room(1, 1, 64, 1, 64, dtype, DEVICE))
    table = torch.ones(1, 32, dtype=dtype, device=DEVICE)
    return Fused(Shape(1, 1, 1, 64, 9, 99, (None,), 1.0), dtype, DEVICE, pool, table, table)


@every_dtype
@every_scheme
@pytest.mark.parametrize(
    ("n", "k", "plain"),
    [
        (65, 512, False),
        (576, 1536, False),
        (4096, 4096, False),
        (1024, 14336, True),
        (72, 28672, False),
    ],
    ids=str,
)
def test_products(n, k, plain, scheme, dtype):
    tensors, x, bias = layer_of(scheme, n, k, dtype, plain)
    op = CudaOp(scheme, tensors)
    again = op.canonical()
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    exact, more = exactly(scheme, tensors, x), exactly(scheme, tensors, x, bias)
    assert exact.isnan().all(-1).nonzero().flatten().tolist() == [21, 22, 23]
    for m in ROWS:
        assert same(op(x[:m]), exact[:m]), m
        assert same(op(x[:m], bias), more[:m]), m
    assert same(op(op.prepare(x[5:90]), bias), more[5:90])
    assert op(x[:0]).shape == (0, n)


@every_dtype
@every_scheme
@pytest.mark.parametrize("k", [512, 4096, 8192, 16384])
def test_norms(k, scheme, dtype):
    """In one launch, and one after the other: the same bits of hidden and of y."""
    tensors, x, bias = layer_of(scheme, 200, k, dtype)
    op, kernels = CudaOp(scheme, tensors), fused_of(dtype)
    weight = (torch.rand(k, device=DEVICE) + 0.5).to(dtype)
    for m in (1, 7, 16, 33, 300):
        for delta in (None, torch.randn(m, k, device=DEVICE).to(dtype)):
            mine, theirs = x[:m].clone(), x[:m].clone()
            out = torch.empty_like(theirs)
            kernels.norm(theirs, delta, weight, EPS, out)
            made, _ = op.norm_input(mine, delta, weight, EPS)
            apart = op.prepare(out)
            assert torch.equal(made.bytes, apart.bytes) and same(mine, theirs)
            assert torch.equal(made.tokens[:m, 1], apart.tokens[:m, 1])
            assert same(op(made, bias), op(out, bias))


def test_norms_that_it_does_not_take():
    scheme = SCHEMES[0]
    op = CudaOp(scheme, layer_of(scheme, 64, 512, FP16)[0])
    hidden, weight = torch.ones(4, 512, dtype=FP16, device=DEVICE), torch.ones(512, device=DEVICE)
    assert op.norm_input(hidden, None, weight, EPS) is None  # fp32 weights
    half = weight.half()
    assert op.norm_input(hidden.T.contiguous().T, None, half, EPS) is None
    assert op.norm_input(hidden[:, :256].contiguous(), None, half[:256], EPS) is None
    assert op.norm_input(hidden[:0], None, half, EPS) is None
    assert isinstance(op.norm_input(hidden, None, half, EPS)[0], Rounded)
    with pytest.raises(ValueError, match="columns"):
        other = CudaOp(scheme, layer_of(scheme, 64, 1024, FP16)[0])
        other(op.prepare(hidden))


@every_dtype
@every_scheme
def test_graphs(scheme, dtype):
    tensors, x, bias = layer_of(scheme, 4096, 4096, dtype)
    op, weight = CudaOp(scheme, tensors), torch.ones(4096, dtype=dtype, device=DEVICE)
    x = x[30:].contiguous()
    for m in (1, 16, 100):
        given, delta = x[:m].clone(), x[100 : 100 + m].clone()

        def step(given=given, delta=delta):
            y = op(given, bias)
            hidden = given.clone()
            return y, op(op.norm_input(hidden, delta, weight, EPS)[0]), hidden

        with plain_launches():
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = [step() for _ in range(10)]
        for shift in (0, 1):
            given.copy_(x[:m].roll(shift, 0))
            graph.replay()
            torch.cuda.synchronize()
            wanted = step()
            assert same(wanted[0], exactly(scheme, tensors, given, bias))
            for found in made:
                assert all(map(same, found, wanted))


def test_compiled():
    scheme = SCHEMES[1]
    tensors, x, _ = layer_of(scheme, 256, 512, FP16)
    op = CudaOp(scheme, tensors)
    compiled = torch.compile(lambda v: op(op.prepare(v)) * 1, fullgraph=True, backend="aot_eager")
    assert same(compiled(x[:30]), exactly(scheme, tensors, x[:30]))


@every_dtype
def test_joined_and_gated(dtype):
    scheme, k = SCHEMES[1], 1024
    parts = [layer_of(scheme, n, k, dtype) for n in (512, 128, 136)]
    x = parts[0][1]
    ops = [CudaOp(scheme, tensors) for tensors, _, _ in parts]
    exact = torch.cat([exactly(scheme, tensors, x) for tensors, _, _ in parts], -1)
    whole = CudaOp.join(ops)
    assert same(whole(x), exact) and whole.takes == ops[1].takes
    for op, (tensors, _, _) in zip(ops, parts, strict=True):
        assert all(torch.equal(op.canonical()[name], tensors[name]) for name in tensors)
    pair = [layer_of(scheme, 264, k, dtype)[0] for _ in range(2)]
    for name in ("weight_packed", "weight_scale"):
        pair[1][name] = pair[1][name].flip(0)
    gated = CudaOp.gate([CudaOp(scheme, tensors) for tensors in pair])
    gate, up = (exactly(scheme, tensors, x) for tensors in pair)
    weight = torch.ones(k, dtype=dtype, device=DEVICE)
    for m in (1, 16, 100):
        assert same(gated.both(x[:m]), torch.cat([gate, up], -1)[:m])
        wanted = silu(gate[:m]) * up[:m]
        torch.testing.assert_close(gated(x[:m]), wanted, rtol=0.02, atol=1e-30, equal_nan=True)
        made, _ = gated.norm_input(x[:m].clone(), None, weight, EPS)
        out = torch.empty_like(x[:m])
        fused_of(dtype).norm(x[:m].clone(), None, weight, EPS, out)
        assert same(gated(made), gated(out))
    for part, tensors in zip(gated.parts, pair, strict=True):
        assert all(torch.equal(part.canonical()[name], tensors[name]) for name in tensors)
    changed = {**parts[1][0], "input_bits": 12 - parts[1][0]["input_bits"]}
    odd = [CudaOp(scheme, parts[0][0]), CudaOp(scheme, changed)]
    assert CudaOp.join(odd) is None and CudaOp.gate([odd[0], CudaOp(scheme, changed)]) is None


def test_linears_side_by_side_round_their_input_once(monkeypatch):
    scheme, k = SCHEMES[0], 512
    module = torch.nn.Module()
    sizes, x = {"q": 72, "k": 64, "v": 40}, None  # q does not fill its bands: no join
    for name, n in sizes.items():
        tensors, x, _ = layer_of(scheme, n, k, FP16)
        linear = QuantLinear(scheme, n, k, False, FP16, DEVICE)
        linear.set_tensors(tensors)
        module.add_module(name, linear)
    assert joined(module, *sizes) is None
    wanted = torch.cat([getattr(module, name)(x) for name in sizes], -1)
    counted, original = [], CudaOp.prepare
    monkeypatch.setattr(CudaOp, "prepare", lambda op, x: counted.append(1) or original(op, x))
    product = side_by_side(module, *sizes)
    assert same(product(x), wanted) and len(counted) == 1
    weight, out = torch.ones(k, dtype=FP16, device=DEVICE), torch.empty_like(x)
    fused_of(FP16).norm(x.clone(), None, weight, EPS, out)
    made, _ = norm_input(product, x.clone(), None, weight, EPS)
    assert same(product(made), product(out))


def w4ax_model(scheme, dtype):
    model = model_of("llama", dtype)
    source = torch.Generator(DEVICE).manual_seed(0)
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for child, linear in list(part.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    n, k = linear.weight.shape
                    made = QuantLinear(scheme, n, k, False, dtype, DEVICE)
                    made.set_tensors(scheme.random_tensors(n, k, dtype, source))
                    made.arrange()
                    setattr(part, child, made)
    return model


@every_dtype
@pytest.mark.parametrize("scheme", [SCHEMES[0], SCHEMES[1], SCHEMES[5]], ids=str)
def test_the_engine_writes_the_same_with_norms_apart(scheme, dtype, monkeypatch):
    params = billfish.SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=0)
    prompts = [TEXT[i : i + 9 + 11 * i] for i in range(5)]

    def written():
        with llm_of(w4ax_model(scheme, dtype)) as llm:
            outputs = [out.outputs[0] for out in llm.generate(prompts, params)]
            scores = llm.score([TEXT])
        return [(o.token_ids, [c.logprob for c in o.logprobs]) for o in outputs], scores

    together = written()
    monkeypatch.setattr(runner, "norm_input", lambda *given: None)
    assert written() == together


def test_launches_of_a_layer():
    """Norm and rounding are one; o and down have a launch that rounds."""
    with llm_of(w4ax_model(SCHEMES[0], FP16)) as llm:
        step = SimpleNamespace(run=llm.engine.runner._step, layers=llm.engine.runner.shape.layers)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            step.run(4)
            torch.cuda.synchronize()
    kernels = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    names = [event.name for event in kernels]
    assert sum("w4ax_norm" in name for name in names) == 2 * step.layers
    assert sum("w4ax_quant" in name for name in names) == 2 * step.layers
    assert sum("rms_norm" in name for name in names) == 1  # the last
