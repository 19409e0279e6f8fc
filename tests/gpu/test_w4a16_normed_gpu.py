"""Products that norm their input, on a Hopper GPU: the bits of the engine's norm and the product
apart, in graphs and in the engine, too."""

import pytest
import torch
from test_engine_gpu import TEXT, llm_of, model_of, room  # noqa: F401
from test_w4ax_mixed_gpu import fused_of
from w4a16_layers import DEVICE, FP16, every_dtype, make, name, some_x

import billfish
from billfish.engine.cuda import runner
from billfish.kernels import norm
from billfish.models.joined import Joined
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda.op import CudaOp, InvariantOp

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled")]

EPS = 1e-5
every_scheme = pytest.mark.parametrize(
    "scheme", [W4A16(4, 128), W4A16(4, 64, False), W4A16(4, 32)], ids=name
)
TOKENS = range(1, norm.MOST_NORMED + 1)


def given(m, k, dtype):
    hidden, delta = some_x(m, k, dtype) * 3, some_x(m, k, dtype)
    hidden[-1, k // 3] = 3000
    return hidden, delta, (torch.rand(k, device=DEVICE) + 0.5).to(dtype)


def apart(product, hidden, delta, weight):
    summed, x = hidden.clone(), torch.empty_like(hidden)
    fused_of(hidden.dtype).norm(summed, delta, weight, EPS, x)
    return product(x), summed


def check(product, m, k, dtype):
    hidden, more, weight = given(m, k, dtype)
    before = hidden.clone()
    for delta in (None, more):
        wanted, total = apart(product, hidden, delta, weight)
        made, summed = product.norm_input(hidden, delta, weight, EPS)
        for _ in range(3):
            assert torch.equal(product(made), wanted)
        assert torch.equal(summed, total) and torch.equal(hidden, before)


@every_dtype
@every_scheme
@pytest.mark.parametrize(
    ("n", "k"),
    [(64, 128), (576, 1536), (4800, 4992), (6144, 4096), (10240, 8192), (28672, 4096)],
    ids=str,
)
def test_products(n, k, scheme, dtype):
    whole = CudaOp(scheme, make(scheme, n, k, dtype))
    for product in (whole, Joined(whole, some_x(1, n, dtype)[0])):
        for m in TOKENS:
            check(product, m, k, dtype)


@every_dtype
@pytest.mark.parametrize(("n", "k"), [(72, 640), (14336, 4096)], ids=str)
def test_gated(n, k, dtype):
    scheme = W4A16(4, 128)
    gated = CudaOp.gate([CudaOp(scheme, make(scheme, n, k, dtype)) for _ in range(2)])
    for m in TOKENS:
        check(gated, m, k, dtype)


def test_rows_of_other_sizes():
    """k that ends within a tile, and groups of all of it."""
    for k in (40, 104, 1000, 4184):
        op = CudaOp(W4A16(4, -1), make(W4A16(4, -1), 200, k, FP16))
        for m in TOKENS:
            check(op, m, k, FP16)


def test_what_is_normed_apart():
    scheme, (hidden, delta, weight) = W4A16(4, 128), given(3, 512, FP16)
    tensors = make(scheme, 256, 512, FP16)
    assert CudaOp(scheme, tensors).norm_input(hidden, delta, weight, EPS) is None
    few = hidden[:1], delta[:1], weight
    assert InvariantOp(scheme, tensors).norm_input(*few, EPS) is None
    assert CudaOp(scheme, tensors).norm_input(*few, EPS) is not None


@every_dtype
def test_graphs(dtype):
    """A chain, in which each launch reads what the one before it has just written."""
    scheme, k = W4A16(4, 128), 4096
    ops = [CudaOp(scheme, make(scheme, k, k, dtype)) for _ in range(2)]
    for m in TOKENS:
        start, delta, weight = given(m, k, dtype)

        def chain(together, start=start, delta=delta, weight=weight):
            hidden, more = start, delta
            for step in range(12):
                op = ops[step % 2]
                if together:
                    made, hidden = op.norm_input(hidden, more, weight, EPS)
                    more = op(made) / 64
                else:
                    more, hidden = apart(op, hidden, more, weight)
                    more = more / 64
            return more, hidden

        wanted = chain(False)
        chain(True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain(True)
        for _ in range(5):
            graph.replay()
            torch.cuda.synchronize()
            assert all(map(torch.equal, found, wanted))


@every_dtype
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_engine_writes_the_same_with_norms_apart(kind, dtype, monkeypatch):
    params = billfish.SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=0)
    prompts = [TEXT[i : i + 9 + 11 * i] for i in range(5)]

    def written():
        with llm_of(model_of(kind, dtype, packed=True)) as llm:
            few = [llm.generate(prompts[:m], params) for m in (1, 2, 5)]  # batches of 1, 2 and 8
        outputs = [out.outputs[0] for each in few for out in each]
        return [(o.token_ids, [c.logprob for c in o.logprobs]) for o in outputs]

    together = written()
    monkeypatch.setattr(runner, "norm_input", lambda *given: None)
    assert written() == together


def test_launches_of_a_layer():
    """One and two tokens are normed by q/k/v and by gate and up."""
    with llm_of(model_of("llama", packed=True)) as llm:
        step, layers = llm.engine.runner._step, llm.engine.runner.shape.layers
        for rows, inside in ((1, 2 * layers), (2, 2 * layers), (4, 0)):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
                step(rows, False)
                torch.cuda.synchronize()
            names = [
                event.name
                for event in found.events()
                if event.device_type == torch.autograd.DeviceType.CUDA
            ]
            assert sum("w4a16_normed" in each for each in names) == inside
            assert sum("rms_norm" in each for each in names) == 2 * layers - inside + 1
