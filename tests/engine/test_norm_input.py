"""The GPU runner's norms on the CPU, with torch instead of its kernels: where products norm their
own input, and the residual sum is in another place every time, a step gives the same numbers."""

import pytest
import torch
import transformers
from torch.nn.functional import silu

from billfish.engine.cuda.runner import GpuRunner
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
