"""bench generate --head-bits: random models with a packed lm_head."""

import json

import pytest
import torch
from tiny import GROUPED
from torch import nn

from billfish.bench import random_model
from billfish.bench.generate import GenerateBench
from billfish.bench.variants import GenerateRequest, parse_variants
from billfish.errors import UserError
from billfish.models.linear import QuantLinear
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4ax.scheme import W4AX

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path):
    def write(tied):
        path = tmp_path / "config.json"
        told = {**GROUPED, "model_type": "llama", "tie_word_embeddings": tied}
        path.write_text(json.dumps(told))
        return str(path)

    return write


def request(config, variants, **changes):
    asked = {"batches": (2,), "input": 6, "output": 5, "rounds": 1, "group_size": 32}
    return GenerateRequest(config, True, parse_variants(variants), **{**asked, **changes})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("scheme", [W4A16(4, 32), W4AX(group_size=32)])
def test_a_packed_head_is_planned_filled_and_read(config, scheme, bits, tied):
    told = random_model.config_of(config(tied))
    model = random_model.empty_model(told, torch.float32)
    plain = random_model.planned_bytes(model, scheme)
    planned = random_model.planned_bytes(model, scheme, bits)
    dense = 128 * 64 * 4
    packed = sum(spec.nbytes for spec in W4A16(bits, 64).tensors(128, 64, torch.float32).values())
    assert planned - plain == (packed if tied else packed - dense)
    random_model.fill(model, scheme, CPU, head_bits=bits)
    assert isinstance(model.lm_head, QuantLinear) and model.lm_head.scheme == W4A16(bits, 64)
    assert model.model.layers[0].mlp.up_proj.scheme == scheme
    logits = model(torch.arange(9)[None]).logits
    assert logits.isfinite().all() and logits.std() > 0.01
    # the embedding is held beside the head, and no longer read whole
    assert isinstance(model.model.embed_tokens, nn.Embedding)
    norms = sum(p.nbytes for p in model.parameters() if p.ndim == 1)
    assert random_model.read_bytes(model) + dense + norms == random_model.held_bytes(model)
    assert told.tie_word_embeddings is tied  # other variants are made of the same config


def test_dense_variants_keep_a_dense_head(config):
    told = request(config(True), "fp32+kv16,w4a16+kv16", head_bits=4, dtype="float32")
    found = GenerateBench(told, CPU).measure()
    dense, packed = found["variants"]
    assert [point["error"] for each in (dense, packed) for point in each["points"]] == [None, None]
    assert found["settings"]["head_bits"] == 4
    again = GenerateBench(request(config(True), "w4a16+kv16", dtype="float32"), CPU).measure()
    saved = again["variants"][0]["read_bytes"] - packed["read_bytes"]
    assert saved > 0.7 * 128 * 64 * 4
    assert dense["read_bytes"] > 128 * 64 * 4


def test_refusals(config):
    path = config(False)
    with pytest.raises(UserError, match="--head-bits 5: known are 8 and 4"):
        GenerateBench(request(path, "w4a16+kv16", head_bits=5), CPU)
    with pytest.raises(UserError, match=r"--head-bits 8: bf16\+kv16 has dense weights"):
        request(path, "bf16+kv16", head_bits=8)
    with pytest.raises(UserError, match="--head-bits 8: a checkpoint runs with the head it has"):
        GenerateRequest("there", False, parse_variants("stored+kv16"), head_bits=8)
