"""Deferred norms on a Hopper GPU: products after one beside fp64, the bits of sums before one, in
graphs and in the engine."""

import pytest
import torch
from test_engine_gpu import TEXT, llm_of, model_of, room  # noqa: F401
from w4a16_layers import DEVICE, every_dtype, make, name, some_x

import billfish
from billfish.engine.cuda import runner
from billfish.kernels.deferred import Norm, Stream
from billfish.models.joined import Joined
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda.op import CudaOp

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled")]

EPS = 1e-5
every_scheme = pytest.mark.parametrize(
    "scheme", [W4A16(4, 128), W4A16(4, 64, False), W4A16(4, 32)], ids=name
)
# Clusters of two with one band, two, four, several passes; clusters of four.
SHAPES = [(64, 128), (576, 1536), (4096, 4096), (6144, 4096), (5120, 13824), (28672, 4096)]


def norm_of(width, dtype):
    return Norm.of((torch.rand(width, device=DEVICE) * 5 + 0.5).to(dtype), EPS)


def stream_of(m, width, dtype, unit):
    """Hidden states with an outlier, added by a product with weights of zero."""
    hidden = some_x(m, width, dtype) * 3
    hidden[-1, width // 3] = 300
    stream = Stream.of(hidden)
    scheme, x = W4A16(4, 128), torch.zeros(m, 128, dtype=dtype, device=DEVICE)
    CudaOp(scheme, make(scheme, width, 128, dtype)).add_to(stream, x, unit)
    return stream


def normed(stream):
    x = stream.hidden.double()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return x * scale * stream.norm.weight.double() * stream.norm.unit


@every_dtype
@every_scheme
@pytest.mark.parametrize(("n", "k"), SHAPES, ids=str)
def test_products_after_a_norm(n, k, scheme, dtype):
    tensors = make(scheme, n, k, dtype)
    op, weights = CudaOp(scheme, tensors), scheme.dequantize(tensors).double().T
    stream = stream_of(16, k, dtype, norm_of(k, dtype))
    wanted, rows = normed(stream) @ weights, {}
    rounding = torch.finfo(dtype).eps / 2
    for m in (m for m in range(1, 17) if op.defers(m, dtype)):
        few = Stream(stream.hidden[:m], stream.x[:m], stream.squares[:m], stream.norm)
        y = op(few)
        error = (y.double() - wanted[:m]).norm(dim=1) / wanted[:m].norm(dim=1)
        assert error.max() < 2 * rounding, m
        assert torch.equal(op(few), y)
        rows[m] = y[:1]
    assert set(range(1, 9)) <= set(rows)
    assert all(torch.equal(row, rows[1]) for row in rows.values())


@every_dtype
@every_scheme
@pytest.mark.parametrize(("n", "k"), SHAPES, ids=str)
def test_products_before_a_norm(n, k, scheme, dtype):
    """Those of the product and an addition, bit for bit."""
    op, norm = CudaOp(scheme, make(scheme, n, k, dtype)), norm_of(n, dtype)
    for m in (m for m in range(1, 17) if op.defers(m, dtype)):
        hidden, x = some_x(m, n, dtype), some_x(m, k, dtype)
        wanted, stream = hidden + op(x), Stream.of(hidden.clone())
        op.add_to(stream, x, norm)
        assert torch.equal(stream.hidden, wanted), m
        assert torch.equal(stream.x, wanted * norm.weight), m
        torch.testing.assert_close(
            stream.squares.sum(-1), wanted.float().square().sum(-1), rtol=1e-5, atol=0
        )


@every_dtype
def test_graphs(dtype):
    """A chain of layers, in which each launch reads what the one before it has just written."""
    scheme, k, wide = W4A16(4, 128), 4096, 14336
    square = CudaOp(scheme, make(scheme, k, k, dtype))
    gated = CudaOp.gate([CudaOp(scheme, make(scheme, wide, k, dtype)) for _ in range(2)])
    down = CudaOp(scheme, make(scheme, k, wide, dtype))
    norm = norm_of(k, dtype)
    for m in (1, 2, 8, 16):
        start = some_x(m, k, dtype)

        def chain(start=start, m=m):
            stream = Stream.of(start.clone())
            square.add_to(stream, start / 64, norm)
            for _ in range(6):
                square.add_to(stream, Joined(square, None)(stream) / 64, norm)
                down.add_to(stream, gated(stream) / 64, norm)
            return stream.hidden, stream.x, stream.squares

        wanted = chain()
        assert all(tensor.isfinite().all() for tensor in wanted)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain()
        for _ in range(20):
            graph.replay()
            torch.cuda.synchronize()
            assert all(map(torch.equal, found, wanted))


@every_dtype
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_engine_writes_much_the_same(kind, dtype, monkeypatch):
    """Log probabilities of the same text, token by token in batches of 1, 2 and 8: as far from
    those of norms of their own as rounding takes them."""
    params = billfish.SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=0)
    prompts = [TEXT[i : i + 9 + 11 * i] for i in range(5)]

    def written():
        with llm_of(model_of(kind, dtype, packed=True)) as llm:
            numbers = llm.engine.runner.deferred
            few = [llm.generate(prompts[:m], params) for m in (1, 2, 5)]
        outputs = [out.outputs[0] for each in few for out in each]
        return numbers, [(o.token_ids, [c.logprob for c in o.logprobs]) for o in outputs]

    none, apart = written()
    monkeypatch.setattr(runner, "DEFERS", True)
    some, deferred = written()
    assert not none and set(range(1, 9)) <= some
    for (tokens, numbers), (others, more) in zip(apart, deferred, strict=True):
        # to the first token that differs, where two were about as likely
        same = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), 40)
        far = max((abs(a - b) for a, b in zip(numbers[:same], more[:same], strict=True)), default=0)
        assert same >= 5 and far < (0.02 if dtype == torch.float16 else 0.15)


def test_launches_of_a_layer(monkeypatch):
    monkeypatch.setattr(runner, "DEFERS", True)
    with llm_of(model_of("llama", packed=True)) as llm:
        step, layers = llm.engine.runner._step, llm.engine.runner.shape.layers
        for rows in (1, 4, 16):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
                step(rows, False)
                torch.cuda.synchronize()
            names = [
                event.name
                for event in found.events()
                if event.device_type == torch.autograd.DeviceType.CUDA
            ]
            # all products but the first
            assert sum("w4a16_deferred" in each for each in names) == 4 * layers - 1
            assert sum("rms_norm" in each for each in names) == 1 + (rows > 2)
