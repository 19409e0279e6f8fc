"""All experts of a layer in few launches on a GPU: against the oracle, in graphs, in the engine."""

import gc

import pytest
import torch
import transformers
from test_engine_gpu import DEVICE, SIZES, TEXT, llm_of, logprobs, quantized
from torch.nn.functional import silu
from w4a16_layers import BF16, FP16, UNIT, every_dtype, make, name, same, some_x

import billfish
from billfish.engine.cuda import runner
from billfish.models.decoder import Decoder
from billfish.models.experts import Choice, Experts, split_experts
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda import experts_tile
from billfish.schemes.w4a16.cuda.op import CudaOp, InvariantOp, StripeOp

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 8, 9, 16, 17, 40, 64, 130, 256, 300, 1500)
SCHEMES = [W4A16(4, 128), W4A16(4, 64, False), W4A16(4, 32), W4A16(4, 32, False), W4A16(3, 64)]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=name)


@pytest.fixture(autouse=True)
def room():
    yield
    gc.collect()
    torch.cuda.empty_cache()


class Layer:
    """Tensors of all experts, their ops as one, and the decoded weights."""

    def __init__(self, count, hidden, wide, scheme, dtype):
        sizes = ((wide, hidden), (wide, hidden), (hidden, wide))
        self.tensors = [[make(scheme, n, k, dtype) for n, k in sizes] for _ in range(count)]
        for each in self.tensors:  # sums of hundreds of products that stay within fp16
            for tensors in each:
                tensors["weight_scale"] = tensors["weight_scale"] / 4
        self.weights = [[scheme.dequantize(one) for one in each] for each in self.tensors]
        ops = [[CudaOp(scheme, one) for one in each] for each in self.tensors]
        self.op = CudaOp.stack(ops, dtype)
        self.count, self.dtype = count, dtype

    def exact(self, x, index, weights):
        """In fp64, with gate * up and each expert's output rounded as they are stored."""
        out = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
        for expert in range(self.count):
            gate, up, down = (one.double() for one in self.weights[expert])
            rows, places = (index == expert).nonzero(as_tuple=True)
            if len(rows):
                mine = x[rows].double()
                y = (silu(mine @ gate.T) * (mine @ up.T)) @ down.T
                out.index_add_(0, rows, y * weights[rows, places, None].double())
        return out


def some_routing(m, count, several, dtype, hot=False):
    """Random experts; `hot`: the first expert has every token."""
    scores = torch.rand(m, count, device=DEVICE)
    if hot:
        scores[:, 0] = 2
    weights, index = scores.topk(several, -1)
    return index, (weights / weights.sum(-1, keepdim=True)).to(dtype)


def judge(layer, y, x, index, weights):
    wanted = layer.exact(x, index, weights)
    error = (y.double() - wanted).norm() / wanted.norm()
    assert error < 8 * UNIT[layer.dtype], (len(x), float(error))


@every_dtype
@every_scheme
def test_sums_of_experts(scheme, dtype):
    hidden, wide = (640, 384) if scheme.group_size == 128 else (576, 320)
    layer = Layer(16, hidden, wide, scheme, dtype)
    for parts, tensors in zip(layer.op.parts, layer.tensors, strict=True):
        for part, one in zip(parts, tensors, strict=True):
            same(part.canonical(), one)
    for m in ROWS:
        for several, hot in ((2, False), (3, True)):
            x = some_x(m, hidden, dtype)
            for kind in (torch.float32, dtype):
                index, weights = some_routing(m, 16, several, kind, hot)
                y = layer.op(x, index, weights)
                judge(layer, y, x, index, weights)
                assert torch.equal(layer.op(x, index, weights), y)
    assert layer.op(x[:0], index[:0], weights[:0]).shape == (0, hidden)


@pytest.mark.parametrize(
    ("count", "several", "hidden", "wide"), [(128, 8, 2048, 768), (8, 2, 4096, 14336)]
)
def test_layers_of_known_models(count, several, hidden, wide):
    """Qwen3-30B-A3B and Mixtral. A row does not depend on the batch while w4a16_experts runs it."""
    layer = Layer(count, hidden, wide, W4A16(4, 128), BF16)
    x = some_x(1024, hidden, BF16)
    index, weights = some_routing(1024, count, several, BF16)
    alone = layer.op(x[:1], index[:1], weights[:1])
    for m in (1, 16, 64, 256, 1024):
        y = layer.op(x[:m], index[:m], weights[:m])
        judge(layer, y, x[:m], index[:m], weights[:m])
        if experts_tile.runs_few(m * several, count):
            assert torch.equal(y[:1], alone)
    uneven = some_routing(256, count, several, BF16, hot=True)
    y = layer.op(x[:256], *uneven)
    judge(layer, y, x[:256], *uneven)
    assert torch.equal(layer.op(x[:256], *uneven), y)


@pytest.mark.parametrize(("m", "hidden"), [(1, 512), (20, 512), (300, 512), (300, 4096)])
def test_a_graph_follows_the_routing(m, hidden):
    """One capture, another routing at each replay, without the host; with 4096 inputs and 300
    tokens tiles of gate and up are split."""
    layer = Layer(16, hidden, 256, W4A16(4, 128), BF16)
    x = some_x(m, hidden, BF16)
    index, weights = some_routing(m, 16, 4, BF16)
    layer.op(x, index, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.op(x, index, weights)
        again = layer.op(y, index, weights)  # back to back, each launch before the last has ended
    for hot in (False, True, False):
        other, more = some_routing(m, 16, 4, BF16, hot)
        index.copy_(other), weights.copy_(more)
        graph.replay()
        torch.cuda.synchronize()
        judge(layer, y, x, index, weights)
        assert torch.equal(layer.op(x, index, weights), y)
        assert torch.equal(layer.op(y, index, weights), again)


def test_what_is_not_stacked():
    def stack(op, scheme, dtype=FP16):
        sizes = ((128, 256), (128, 256), (256, 128))
        return op.stack([[op(scheme, make(scheme, *size, FP16)) for size in sizes]], dtype)

    assert stack(CudaOp, W4A16(4, 128)) is not None
    assert stack(InvariantOp, W4A16(4, 128)) is None and stack(StripeOp, W4A16(4, 128)) is None
    assert stack(CudaOp, W4A16(4, 128), BF16) is None  # scales of another type than activations
    assert stack(CudaOp, W4A16(8, 128)) is None  # two planes


@every_dtype
@pytest.mark.parametrize("m", [1, 5, 1000])
def test_a_routers_choice(dtype, m):
    layer = Layer(4, 256, 128, W4A16(4, 128), dtype)
    logits = torch.randn(m, 128, device=DEVICE).to(dtype)
    for choice in (Choice(8, True, dtype), Choice(2, False, torch.float32)):
        wanted, order = choice(logits)
        index, weights = layer.op.choose(logits, choice.several, choice.normalized, choice.dtype)
        # Equal logits: in any order, and any of them if not all are chosen.
        assert torch.equal(logits.gather(-1, index), logits.gather(-1, order))
        ascending = index.sort(-1).values
        assert bool((ascending[:, 1:] > ascending[:, :-1]).all())
        torch.testing.assert_close(weights, wanted, rtol=4 * UNIT[dtype], atol=1e-7)


# -- the engine

QWEN = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
MODELS = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2Moe", {**QWEN, "shared_expert_intermediate_size": 512}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN, "head_dim": 64, "norm_topk_prob": True}),
}


def model_of(which, dtype):
    kind, more = MODELS[which]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    fused = [layer.mlp.experts for layer in model.model.layers]
    kept = [(each.gate_up_proj.data, each.down_proj.data) for each in fused]
    assert len(split_experts(model)) == len(fused)
    for layer, (gate_up, down) in zip(model.model.layers, kept, strict=True):
        for number, expert in enumerate(layer.mlp.experts.all()):
            for linear, weight in zip(
                expert.children(), (*gate_up[number].chunk(2), down[number]), strict=True
            ):
                linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    model.to(DEVICE, dtype)
    for part in [m for m in model.model.layers.modules() if list(m.children())]:
        for child, linear in list(part.named_children()):
            if type(linear) is torch.nn.Linear and linear.weight.shape[0] > 16:
                setattr(part, child, quantized(linear, dtype))
    return model


@pytest.mark.parametrize("which", MODELS)
@every_dtype
def test_logits_are_those_of_transformers(which, dtype):
    """Experts one after the other, in transformers, and all at once in the engine. Routers pick
    other experts where two are nearly equal, so that single tokens may differ."""
    model = model_of(which, dtype)
    wanted = logprobs(model, TEXT)
    assert all(m.op is None for m in model.modules() if isinstance(m, Experts))
    assert runner.refuses(Decoder.of(model), "kv16") is None
    assert all(m.op is not None for m in model.modules() if isinstance(m, Experts))
    with llm_of(model, max_batched_tokens=64) as llm:  # in chunks, over pages
        scores = torch.tensor(llm.score([TEXT])[0], device=DEVICE)
    off = (scores - wanted).abs()
    assert float(off.median()) < (0.01 if dtype is FP16 else 0.06)
    assert float(off.mean()) < (0.03 if dtype is FP16 else 0.2)


@pytest.mark.parametrize("which", MODELS)
def test_graphs_change_nothing(which):
    model = model_of(which, FP16)
    params = billfish.SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompts = [TEXT[i : i + 9 + 11 * i] for i in range(5)]
    with llm_of(model) as llm:
        assert llm.engine.runner.graphs
        with_graphs = llm.generate(prompts, params)
        llm.engine.runner.graphs.clear()
        without = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in with_graphs] == [
        o.outputs[0].token_ids for o in without
    ]


def test_a_model_that_is_moved_runs_one_expert_after_the_other():
    model = model_of("mixtral", FP16)
    Decoder.of(model)
    before = model(torch.tensor([TEXT[:50]], device=DEVICE)).logits
    state = {key: value.cpu() for key, value in model.state_dict().items()}
    model.to("cpu").to(DEVICE)
    assert all(m.op is None for m in model.modules() if isinstance(m, Experts))
    after = model(torch.tensor([TEXT[:50]], device=DEVICE)).logits
    assert float((after - before).abs().median()) < 0.02
    same(state, {key: value.cpu() for key, value in model.state_dict().items()})
