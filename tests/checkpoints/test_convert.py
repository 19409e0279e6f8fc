"""convert between dialects: numbers are unchanged, the result loads, a failure leaves no files."""

import json

import pytest
import torch
from foreign_fixtures import (
    CASES,
    config_of,
    linear_names,
    quantized,
    tiny_model,
    write_case,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import billfish.checkpoints.convert
from billfish.checkpoints.convert import convert
from billfish.checkpoints.dialects import read_dialect
from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.write import check_manifest
from billfish.errors import UserError
from billfish.integrations import register_when_imported
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.dialects.compressed import CompressedTensors

register_when_imported()
DOWN = "model.layers.1.mlp.down_proj"


def tensors_of(path):
    checkpoint = Checkpoint(path)
    return {name: checkpoint.tensor(name) for name in checkpoint}


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name


def canonical_of(path):
    """{module: (scheme, canonical tensors)}, read through the dialect."""
    dialect = read_dialect(json.loads((path / "config.json").read_text())["quantization_config"])
    tensors, found = tensors_of(path), {}
    for name in tensors:
        module, _, part = name.rpartition(".")
        if part == dialect.words:
            stored = {
                key.removeprefix(f"{module}."): tensor
                for key, tensor in tensors.items()
                if key.startswith(f"{module}.")
            }
            scheme = dialect.resolve_scheme(dialect.scheme(module), stored)
            n, k = dialect.size(scheme, stored)
            found[module] = scheme, dialect.to_canonical(scheme, stored, n, k)
    return found


@pytest.mark.parametrize(
    ("case", "to"),
    [
        ("gptq", "compressed-tensors"),
        ("gptq v2", "compressed-tensors"),
        ("gptq desc_act", "compressed-tensors"),
        ("awq", "compressed-tensors"),
        ("awq", "gptq"),
        ("gptq v2", "awq"),
        ("compressed-tensors", "gptq"),
        ("compressed-tensors asym", "gptq"),
        ("compressed-tensors asym", "awq"),
        ("compressed-tensors channel", "gptq"),
        ("compressed-tensors 3 bit", "gptq"),
    ],
)
def test_there_and_back(case, to, tmp_path):
    _, schemes, canonical, stored = write_case(case, tmp_path / "a")
    report = convert(tmp_path / "a", tmp_path / "b", to)
    assert report["layers"] == len(schemes)
    if to == "gptq":
        assert report["to"] == ("gptq" if CASES[case].symmetric else "gptq_v2")
    found = canonical_of(tmp_path / "b")
    assert {module: scheme for module, (scheme, _) in found.items()} == schemes
    for module, (_, tensors) in found.items():
        same(tensors, canonical[module])
    convert(tmp_path / "b", tmp_path / "c", case.split()[0])
    same(tensors_of(tmp_path / "c"), stored)


@pytest.mark.parametrize("case", ["marlin", "marlin channel"])
def test_marlin_becomes_something_that_lives(case, tmp_path):
    _, schemes, canonical, _ = write_case(case, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", "compressed-tensors")
    for module, (scheme, tensors) in canonical_of(tmp_path / "b").items():
        assert scheme == schemes[module]
        same(tensors, canonical[module])


def test_a_symmetric_model_through_awq_keeps_its_numbers(tmp_path):
    _, schemes, canonical, _ = write_case("compressed-tensors", tmp_path / "a")
    report = convert(tmp_path / "a", tmp_path / "b", "awq")
    assert "all 8" in report["notes"][0]
    for module, (scheme, tensors) in canonical_of(tmp_path / "b").items():
        assert not scheme.symmetric
        assert torch.equal(tensors["weight_packed"], canonical[module]["weight_packed"])
        assert torch.equal(tensors["weight_scale"], canonical[module]["weight_scale"])
        assert torch.equal(
            scheme.dequantize(tensors), schemes[module].dequantize(canonical[module])
        )


@pytest.mark.parametrize("to", ["gptq", "awq"])
def test_the_result_is_a_whole_checkpoint(to, tmp_path):
    """Companions, manifest, config; transformers computes the same from both."""
    write_case("compressed-tensors asym", tmp_path / "a")
    (tmp_path / "a/tokenizer.json").write_text("{}")
    convert(tmp_path / "a", tmp_path / "b", to)
    assert (tmp_path / "b/tokenizer.json").read_text() == "{}"
    assert check_manifest(tmp_path / "b") == []
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert config["hidden_size"] == 128 and config["quantization_config"]["quant_method"] == to
    assert (tmp_path / "b/quantize_config.json").exists() == (to == "gptq")
    if to == "gptq":
        assert (
            json.loads((tmp_path / "b/quantize_config.json").read_text())
            == (config["quantization_config"])
        )
        assert config["quantization_config"]["checkpoint_format"] == "gptq_v2"
        assert config["quantization_config"]["format"] == "gptq_v2"
        assert config["quantization_config"]["method"] == "gptq"
    tokens = torch.arange(3, 15)[None]
    first, second = (
        AutoModelForCausalLM.from_pretrained(tmp_path / d, dtype=torch.float32) for d in "ab"
    )
    with torch.no_grad():
        assert torch.equal(first(tokens).logits, second(tokens).logits)


def test_mixed_bits_lm_head_and_a_dense_layer(tmp_path):
    model = tiny_model()
    schemes = dict.fromkeys(linear_names(model, lm_head=True), W4A16(4, 32))
    schemes["model.layers.0.mlp.up_proj"] = W4A16(8, 64, symmetric=False)
    del schemes[DOWN]
    canonical = quantized(model, schemes)
    config = CompressedTensors.config(schemes, [DOWN])
    stored = write_checkpoint(tmp_path / "a", model, canonical, schemes, config)
    convert(tmp_path / "a", tmp_path / "b", "gptq")
    written = json.loads((tmp_path / "b/config.json").read_text())["quantization_config"]
    assert written["lm_head"] is True
    assert read_dialect(written).scheme(DOWN) is None
    convert(tmp_path / "b", tmp_path / "c", "compressed-tensors")
    same(tensors_of(tmp_path / "c"), stored)
    again = read_dialect(
        json.loads((tmp_path / "c/config.json").read_text())["quantization_config"]
    )
    assert {module: again.scheme(module) for module in schemes} == schemes
    assert again.scheme(DOWN) is None
    with pytest.raises(UserError, match="lm_head: AWQ loaders"):
        convert(tmp_path / "a", tmp_path / "d", "awq")
    assert not (tmp_path / "d").exists()


def test_a_tied_lm_head_is_ignored_by_name(tmp_path):
    """Stock loaders would wait for a packed lm_head otherwise."""
    write_case("gptq", tmp_path / "a", tie_word_embeddings=True)
    convert(tmp_path / "a", tmp_path / "b", "compressed-tensors")
    config = json.loads((tmp_path / "b/config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"]


def test_legacy_config_file(tmp_path):
    _, _, canonical, _ = write_case("gptq", tmp_path / "a")
    config = json.loads((tmp_path / "a/config.json").read_text())
    legacy = config.pop("quantization_config")
    (tmp_path / "a/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="billfish quantize"):
        convert(tmp_path / "a", tmp_path / "b", "compressed-tensors")
    for key in ("quant_method", "method", "format", "checkpoint_format"):
        del legacy[key]
    (tmp_path / "a/quantize_config.json").write_text(json.dumps(legacy))
    convert(tmp_path / "a", tmp_path / "b", "compressed-tensors")
    for module, (_, tensors) in canonical_of(tmp_path / "b").items():
        same(tensors, canonical[module])


def test_several_shards(tmp_path, monkeypatch):
    _, _, _, stored = write_case("compressed-tensors", tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", "gptq")
    monkeypatch.setattr(billfish.checkpoints.convert, "SHARD_BYTES", 40_000)
    report = convert(tmp_path / "b", tmp_path / "c", "compressed-tensors")
    assert len(report["shards"]) > 3
    assert sorted(p.name for p in (tmp_path / "c").glob("*.safetensors")) == report["shards"]
    same(tensors_of(tmp_path / "c"), stored)


def test_biases_and_other_tensors_are_copied(tmp_path):
    _, _, _, stored = write_case("gptq", tmp_path / "a")
    stored = {name: tensor.clone() for name, tensor in stored.items()}
    stored[f"{DOWN}.bias"] = torch.randn(128, dtype=torch.float16)
    save_file(stored, tmp_path / "a/model.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "a", tmp_path / "b", "compressed-tensors")
    found = tensors_of(tmp_path / "b")
    assert torch.equal(found[f"{DOWN}.bias"], stored[f"{DOWN}.bias"])
    assert torch.equal(found["model.embed_tokens.weight"], stored["model.embed_tokens.weight"])


# --- refusals ------------------------------------------------------------------------------------


def test_refusals_before_anything_is_written(tmp_path):
    write_case("gptq desc_act", tmp_path / "a")
    target = tmp_path / "b"
    with pytest.raises(UserError, match="known are compressed-tensors, gptq, awq"):
        convert(tmp_path / "a", target, "gguf")
    with pytest.raises(UserError, match="is gptq already"):
        convert(tmp_path / "a", target, "gptq")
    with pytest.raises(UserError, match="AWQ cannot store reordered columns"):
        convert(tmp_path / "a", target, "awq")
    assert not target.exists()
    target.mkdir()
    (target / "precious").write_text("x")
    with pytest.raises(UserError, match="exists and is not empty"):
        convert(tmp_path / "a", target, "compressed-tensors")
    assert [path.name for path in target.iterdir()] == ["precious"]


def edit(path, change):
    tensors = {
        name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()
    }
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{DOWN}.scales"), "scales is missing"),
        (lambda t: t.update({f"{DOWN}.extra": torch.zeros(1)}), "extra is unknown"),
        (lambda t: t.update({f"{DOWN}.qweight": t[f"{DOWN}.qweight"][:8].clone()}), "has shape"),
        (lambda t: t.update({f"{DOWN}.qzeros": t[f"{DOWN}.qzeros"] ^ 1}), "every zero must be 8"),
        (
            lambda t: t.update({"lm_head.qweight": t.pop("lm_head.weight")}),
            "says this layer is not quantized",
        ),
    ],
)
@pytest.mark.parametrize("existed", [True, False])
def test_a_damaged_source_leaves_no_target(change, message, existed, tmp_path):
    write_case("gptq", tmp_path / "a")
    edit(tmp_path / "a", change)
    if existed:
        (tmp_path / "b").mkdir()
    with pytest.raises(UserError, match=message) as error:
        convert(tmp_path / "a", tmp_path / "b", "compressed-tensors")
    assert "down_proj" in str(error.value) or "lm_head" in str(error.value)
    assert (tmp_path / "b").exists() == existed
    assert not existed or not any((tmp_path / "b").iterdir())


def test_a_config_without_a_packed_layer(tmp_path):
    model = tiny_model(num_hidden_layers=1)
    config = config_of("gptq", CASES["gptq"], linear_names(model))
    write_checkpoint(tmp_path / "a", model, {}, {}, config)
    with pytest.raises(UserError, match="no layer of it is packed"):
        convert(tmp_path / "a", tmp_path / "b", "compressed-tensors")
