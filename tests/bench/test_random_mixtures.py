"""Random mixtures of experts for benchmarks: the sizes of known models, and bytes that are read."""

import pytest
import torch
import transformers
from tiny import MIXTURES

from billfish.bench import random_model
from billfish.models.experts import Experts
from billfish.models.linear import QuantLinear
from billfish.schemes.w4a16 import W4A16


@pytest.mark.parametrize(("name", "billions"), [("qwen3-30b-a3b", 30.53), ("mixtral-8x7b", 46.70)])
def test_known_mixtures_have_their_size(name, billions):
    model = random_model.empty_model(random_model.config_of(name), torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("scheme", [None, W4A16(4, 32)])
def test_a_token_reads_its_own_experts_alone(scheme):
    config_class, values = MIXTURES["Qwen2MoeForCausalLM"]
    config = getattr(transformers, config_class)(**values)
    model = random_model.empty_model(config, torch.bfloat16)
    random_model.planned_bytes(model, scheme)
    random_model.fill(model, scheme, torch.device("cpu"))
    assert not [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    experts = [m for m in model.modules() if isinstance(m, Experts) or hasattr(m, "gate_up_proj")]
    held = sum(
        sum(p.nbytes for p in each.parameters())
        + sum(m.nbytes() for m in each.modules() if isinstance(m, QuantLinear))
        for each in experts
    )
    routers = sum(layer.mlp.gate.weight.nbytes for layer in model.model.layers)
    norms = sum(p.nbytes for p in model.parameters() if p.ndim == 1)
    biases = sum(p.nbytes for n, p in model.named_parameters() if n.endswith("_proj.bias"))
    left = model.model.embed_tokens.weight.nbytes + routers + norms - biases
    read = random_model.held_bytes(model) - left - held + held * 2 / 4
    assert random_model.read_bytes(model) == pytest.approx(read)
    logits = model(torch.arange(9)[None]).logits
    assert logits.isfinite().all() and logits.std() > 0.01
    gate = model.model.layers[0].mlp.shared_expert_gate
    assert type(gate) is torch.nn.Linear
