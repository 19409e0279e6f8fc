"""The GPU runner's norms on the CPU, with torch instead of its kernels: where products norm their
own input, and the residual sum is in another place every time, a step gives the same numbers; and
where norms are deferred to the product after them."""

import pytest
import torch
import transformers
from torch.nn.functional import silu

from billfish.engine.cuda.runner import GpuRunner
from billfish.kernels.deferred import PART, Norm, Stream
from billfish.models.decoder import Decoder


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Kernels:
    """Those of Fused, but for RoPE and the cache."""

    norms = 0

    def embed(self, tokens, found, table, out):
        out.copy_(table[tokens])

    def norm(self, hidden, delta, weight, eps, out):
        self.norms += 1
        if delta is not None:
            hidden += delta
        out.copy_(rms_norm(hidden, weight, eps))

    def swiglu(self, both, out):
        gate, up = both.chunk(2, -1)
        out.copy_(silu(gate) * up)

    def store(self, index, qkv, positions, slots, q, norms):
        q.copy_(qkv[:, : q[0].numel()].view_as(q))


class Norming:
    """A product that norms its input when it runs, not when it is asked."""

    def __init__(self, product):
        self.product = product

    def norm_input(self, hidden, delta, weight, eps):
        summed = hidden if delta is None else torch.full_like(hidden, torch.nan)
        return (hidden, delta, weight, eps, summed), summed

    def __call__(self, given):
        hidden, delta, weight, eps, summed = given
        summed.copy_(hidden if delta is None else hidden + delta)
        return self.product(rms_norm(summed, weight, eps))


def runner_on_cpu():
    """Of three layers, without graphs."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    decoder = Decoder.of(transformers.LlamaForCausalLM(config).eval())
    runner = object.__new__(GpuRunner)
    runner.decoder, runner.shape, runner.found = decoder, decoder.shape, None
    runner.fused = Kernels()
    runner.norms, runner.deferred = [], frozenset()
    return runner


@pytest.mark.parametrize("which", [(), ("_qkv",), ("_gate_up",), ("_qkv", "_gate_up")], ids=str)
@torch.inference_mode()
def test_products_may_norm_their_input(which):
    runner = runner_on_cpu()
    decoder = runner.decoder
    tokens = torch.tensor([3, 39, 0])

    def step():
        runner.fused = Kernels()
        given = (tokens, None, None, lambda layer, q, space: space.mixed.copy_(q.sin()))
        return runner._forward(*given), runner.fused.norms

    wanted, norms = step()
    assert norms == 7
    for name in which:
        products = getattr(decoder, name)
        places = products if isinstance(products, dict) else range(len(products))
        for place in places:
            products[place] = Norming(products[place])
    found, norms = step()
    assert torch.equal(found, wanted) and norms == 7 - 3 * len(which)


class Deferring(torch.nn.Module):
    """A product with deferred norms, for up to three rows."""

    def __init__(self, product):
        super().__init__()
        self.product = product

    def defers(self, m, dtype):
        return m <= 3

    def add_to(self, stream, x, norm):
        stream.hidden += self.product(x)
        stream.x.copy_(stream.hidden * norm.weight)
        stream.squares.copy_(stream.hidden.square().unflatten(1, (-1, PART)).sum(-1))
        stream.norm = norm

    def forward(self, given):
        if not isinstance(given, Stream):
            return self.product(given)
        mean = given.squares.sum(-1, keepdim=True) / given.x.shape[1]
        scale = given.norm.unit * torch.rsqrt(mean + given.norm.eps)
        if isinstance(self.product, Gated):
            return self.product(given.x, scale)
        return self.product(given.x) * scale


class Gated:
    """SwiGLU of a layer."""

    def __init__(self, both):
        self.both = both

    def __call__(self, x, scale=1):
        gate, up = (self.both(x) * scale).chunk(2, -1)
        return silu(gate) * up


@torch.inference_mode()
def test_norms_may_be_deferred():
    runner = runner_on_cpu()
    decoder, layers = runner.decoder, runner.decoder.layers
    for i, layer in enumerate(layers):
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.copy_(torch.rand(32) * 5)
            norm.variance_epsilon = 0.1 * (i + 1)

    def step(count):
        runner.fused = Kernels()
        tokens = torch.tensor([3, 39, 0, 7])[:count]
        given = (tokens, None, None, lambda layer, q, space: space.mixed.copy_(q.sin()))
        return runner._forward(*given), runner.fused.norms

    wanted = step(3)[0]
    assert runner._deferred()[1] == frozenset()
    for i, layer in enumerate(layers):
        decoder._qkv[i] = Deferring(decoder._qkv[i])
        decoder._gated[i] = Deferring(Gated(decoder._gate_up[i]))
        layer.self_attn.o_proj = Deferring(layer.self_attn.o_proj)
        layer.mlp.down_proj = Deferring(layer.mlp.down_proj)
    runner.norms, runner.deferred = runner._deferred()
    assert runner.deferred == {1, 2, 3}
    found, norms = step(3)
    assert norms == 2  # the first and the last
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert step(4)[1] == 7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_of_deferred_norms(dtype):
    """Their largest is at most 1: no finite number times them overflows; and nothing is rounded."""
    for weight in ([0.3, 17.0, -31.9], [1.0, 0.5], [4.0, -4.0], [0.01, 0.002], [0.0, 0.0]):
        given = torch.tensor(weight, dtype=dtype)
        norm = Norm.of(given, 1e-5)
        most = norm.weight.abs().max()
        assert norm.weight.dtype == dtype and most <= 1 and (most > 0.5 or not given.any())
        assert torch.equal(norm.weight.double() * norm.unit, given.double())
