"""Dense weights in oneDNN's layout or in 16 bits: same products, stored once, and only in models
that the engine owns."""

import pytest
import torch
from test_decoder import causal, packed, tiny_model
from tiny import write_checkpoint
from torch import nn

from billfish.engine.llm import LLM
from billfish.models import prepacked
from billfish.models.decoder import Decoder
from billfish.models.linear import QuantLinear
from billfish.models.load import load
from billfish.models.prepacked import FEW, Halves, Prepacked, prepack
from billfish.schemes.w4a16 import W4A16

LENGTHS = (5, 40, 1)
works = pytest.mark.skipif(not prepacked._works(), reason="no bf16 products of oneDNN here")


def logits(decoder):
    torch.manual_seed(1)
    tokens = torch.randint(decoder.shape.vocabulary, (sum(LENGTHS),))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return decoder.logits(decoder.forward(tokens, positions, causal(decoder, LENGTHS)))


@works
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"]
)
def test_a_model_is_the_same_and_its_linears_are_empty(architecture, tied):
    model = tiny_model(architecture, torch.bfloat16, tie_word_embeddings=tied)
    decoder = Decoder.of(model)
    before, modules = logits(decoder), list(model.modules())
    decoder.prepack()
    after = logits(decoder)
    assert (after - before).abs().max() < 0.02 * before.abs().max()  # bf16, in another order
    full = [m for m in modules if type(m) is nn.Linear and m.weight.numel()]
    assert full == ([model.lm_head] if tied else [])
    assert len(decoder.embed.weight) == decoder.shape.vocabulary  # a tied head's, too
    layer = decoder.layers[0]
    products = [decoder.qkv(0), layer.self_attn.o_proj, decoder.gate_up(0), layer.mlp.down_proj]
    assert all(isinstance(product, Prepacked) for product in (*products, decoder.head))


@works
def test_bias_and_shapes():
    linear = nn.Linear(48, 40).bfloat16()
    x = torch.randn(3, 7, 48).bfloat16()
    wanted = linear(x)
    made = prepack(linear)
    assert linear.weight.numel() == 0 and made is not linear
    for part in (x, x[0], x[0, :1], x[0, :0]):
        assert made(part).shape == (*part.shape[:-1], 40)
    assert torch.allclose(made(x).float(), wanted.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_fp32_that_was_16_bits_is_stored_in_16(dtype, bias):
    """All its numbers are fp32's; sums are only added in another order."""
    linear = nn.Linear(80, 43, bias)
    linear.weight.data = linear.weight.data.to(dtype).float()
    weight = linear.weight.data.double()
    made = prepack(linear)
    assert isinstance(made, Halves) and made.weight.dtype == dtype and linear.weight.numel() == 0
    for rows in (1, 2, 3, 4, 7, FEW, FEW + 1, 130):
        x = torch.randn(rows, 80)
        wanted = x.double() @ weight.T + (linear.bias.double() if bias else 0)
        assert torch.allclose(made(x).double(), wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(made(x[None]), made(x)[None])
    assert made(torch.zeros(2, 0, 80)).shape == (2, 0, 43)
    turned = torch.randn(80, 3).T  # not contiguous
    assert torch.equal(made(turned), made(turned.contiguous()))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_fp32_reads_16_bits(tied):
    model = tiny_model("LlamaForCausalLM", torch.float32, tie_word_embeddings=tied)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    decoder = Decoder.of(model)
    before = logits(decoder)
    decoder.prepack()
    assert torch.allclose(logits(decoder), before, rtol=1e-4, atol=1e-4)
    layer = decoder.layers[0]
    products = [decoder.qkv(0), layer.self_attn.o_proj, decoder.gate_up(0), layer.mlp.down_proj]
    assert all(isinstance(product, Halves) for product in (*products, decoder.head))
    assert decoder.embed.weight.dtype == torch.float32


def test_what_would_gain_nothing_stays_as_it_is(monkeypatch):
    dense = nn.Linear(64, 32)
    assert prepack(dense) is dense and dense.weight.numel() == 2048  # its numbers need fp32
    odd = nn.Linear(40, 32)
    odd.weight.data = odd.weight.data.bfloat16().float()
    assert prepack(odd) is odd
    quant = QuantLinear(W4A16(group_size=32), 64, 32, dtype=torch.bfloat16)
    assert prepack(quant) is quant
    monkeypatch.setattr(prepacked, "_works", lambda: False)
    half = dense.bfloat16()
    assert prepack(half) is half and half.weight.numel() == 2048


@works
def test_packed_linears_among_dense_ones():
    model = tiny_model("LlamaForCausalLM", torch.bfloat16)
    attention, scheme = model.model.layers[0].self_attn, W4A16(group_size=32)
    for module, name in ((model, "lm_head"), (attention, "k_proj")):
        setattr(module, name, packed(getattr(module, name), scheme, torch.bfloat16))
    decoder = Decoder.of(model)
    before = logits(decoder)
    decoder.prepack()
    assert decoder.head is model.lm_head and attention.q_proj.weight.numel()
    assert (logits(decoder) - before).abs().max() <= 0.02 * before.abs().max()


@works
def test_a_model_of_the_caller_is_left_alone(tmp_path):
    path = write_checkpoint(tmp_path / "model")
    model, tokenizer = load(path, torch.bfloat16)
    ids = torch.arange(1, 20)
    before = model(ids[None]).logits
    with LLM.of(model, tokenizer) as theirs, LLM(path, dtype=torch.bfloat16) as ours:
        assert isinstance(ours.engine.decoder.qkv(0), Prepacked)
        assert not isinstance(theirs.engine.decoder.qkv(0), Prepacked)
        (one,), (other,) = theirs.score([ids.tolist()]), ours.score([ids.tolist()])
    assert torch.equal(model(ids[None]).logits, before)
    assert torch.tensor(one).sub(torch.tensor(other)).abs().max() < 0.1
    with LLM.of(model, tokenizer, given=True) as given:
        assert isinstance(given.engine.decoder.qkv(0), Prepacked)
