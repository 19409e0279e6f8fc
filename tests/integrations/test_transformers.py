"""Packed checkpoints of every dialect through from_pretrained, and what must not be taken over."""

import json
import subprocess
import sys

import pytest
import torch
from foreign_fixtures import (
    CASES,
    config_of,
    dense_twin,
    linear_names,
    quantized,
    tiny_model,
    write_case,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file
from thorough import also
from transformers import AutoModel, AutoModelForCausalLM, CompressedTensorsConfig, LlamaForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer

from billfish.checkpoints.read import Checkpoint
from billfish.errors import UserError
from billfish.integrations import register_when_imported
from billfish.integrations.transformers import BillfishQuantizer, cast_renamed
from billfish.models.linear import QuantLinear
from billfish.offline.driver import quantize
from billfish.offline.request import QuantizeRequest
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.dialects.compressed import CompressedTensors
from billfish.schemes.w4a16.dialects.gptq import Gptq

register_when_imported()
TOKENS = torch.arange(3, 27).reshape(2, 12)
NEAR = {"rtol": 5e-4, "atol": 5e-4}  # packed layers take activations in 16 bits


def load(path, **kwargs):
    kwargs.setdefault("dtype", torch.float32)
    return AutoModelForCausalLM.from_pretrained(path, **kwargs)


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits.float()


def packed(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def edit(path, change):
    """Rewrite the checkpoint's tensors."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def edit_config(path, change):
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("case", CASES)
def test_logits_save_and_load(case, tmp_path):
    model, schemes, canonical, _ = write_case(case, tmp_path / "a")
    loaded = load(tmp_path / "a", dtype=torch.float16)
    layers = packed(loaded)
    assert {name: layer.scheme for name, layer in layers.items()} == schemes
    assert all(layer.op is not None for layer in layers.values())
    loaded.save_pretrained(tmp_path / "b")
    saved = load_file(tmp_path / "b/model.safetensors")
    for name, tensors in canonical.items():
        assert set(layers[name].tensors()) == set(tensors)
        for key, tensor in tensors.items():
            found = saved[f"{name}.{key}"]
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), (name, key)
    config = json.loads((tmp_path / "b/config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"

    expected = logits(dense_twin(model, canonical, schemes))
    assert expected.std() > 0.05
    loaded.to(torch.float32)
    torch.testing.assert_close(logits(loaded), expected, **NEAR)
    again = load(tmp_path / "b")
    assert {name: layer.scheme for name, layer in packed(again).items()} == schemes
    assert torch.equal(logits(again), logits(loaded))


def test_our_own_checkpoint_is_saved_as_it_was(tmp_path):
    _, _, _, stored = write_case("compressed-tensors asym", tmp_path / "a")
    load(tmp_path / "a", dtype="auto", device_map="cpu").save_pretrained(tmp_path / "b")
    saved = load_file(tmp_path / "b/model.safetensors")
    assert saved.keys() == stored.keys()
    for name, tensor in stored.items():
        assert saved[name].dtype == tensor.dtype and torch.equal(saved[name], tensor), name
    first, second = (
        json.loads((tmp_path / d / "config.json").read_text())["quantization_config"] for d in "ab"
    )
    assert first == second


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_stay_what_they_are_and_to_works(dtype, tmp_path):
    model, schemes, canonical, _ = write_case("gptq", tmp_path)
    loaded = load(tmp_path, dtype=dtype)
    assert loaded.dtype == dtype
    layer = loaded.model.layers[0].mlp.down_proj
    assert layer.tensors()["weight_scale"].dtype == torch.float16
    expected = logits(dense_twin(model, canonical, schemes))
    close = 0.15 if dtype == torch.bfloat16 else 0.03
    assert (logits(loaded) - expected).abs().max() < close * expected.abs().max()
    loaded.to(torch.float32)
    assert layer.tensors()["weight_scale"].dtype == torch.float32
    assert (logits(loaded) - expected).abs().max() < close * expected.abs().max()
    assert torch.equal(
        layer.tensors()["weight_packed"], canonical["model.layers.0.mlp.down_proj"]["weight_packed"]
    )


@pytest.mark.parametrize("case", ["compressed-tensors", "gptq"])
def test_tied_lm_head_survives(case, tmp_path):
    model, schemes, canonical, stored = write_case(case, tmp_path / "a", tie_word_embeddings=True)
    assert "lm_head.weight" not in stored
    # stock writers do not always list a tied lm_head
    edit_config(tmp_path / "a", lambda c: c["quantization_config"].pop("ignore", None))
    loaded = load(tmp_path / "a", dtype=torch.float16)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    loaded.save_pretrained(tmp_path / "b")
    again = load(tmp_path / "b")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    expected = logits(dense_twin(model, canonical, schemes))
    torch.testing.assert_close(logits(again), expected, **NEAR)


@pytest.mark.parametrize("name", ["compressed-tensors", "gptq"])
def test_quantized_lm_head(name, tmp_path):
    model, scheme = tiny_model(), W4A16(4, 32)
    schemes = dict.fromkeys(linear_names(model, lm_head=True), scheme)
    canonical = quantized(model, schemes)
    config = config_of(name, scheme, list(schemes))
    write_checkpoint(tmp_path / "a", model, canonical, schemes, config)
    loaded = load(tmp_path / "a")
    assert isinstance(loaded.lm_head, QuantLinear)
    expected = logits(dense_twin(model, canonical, schemes))
    torch.testing.assert_close(logits(loaded), expected, **NEAR)
    loaded.save_pretrained(tmp_path / "b")
    torch.testing.assert_close(logits(load(tmp_path / "b")), expected, **NEAR)
    edit_config(tmp_path / "a", lambda c: c.update(tie_word_embeddings=True))
    with pytest.raises(UserError, match=r"lm_head.*tie_word_embeddings"):
        load(tmp_path / "a")


@pytest.mark.parametrize("name", ["compressed-tensors", "gptq"])
def test_mixed_bits_and_a_layer_left_alone(name, tmp_path):
    model = tiny_model()
    schemes = dict.fromkeys(linear_names(model), W4A16(4, 32))
    schemes["model.layers.0.mlp.down_proj"] = W4A16(8, 64)
    del schemes["model.layers.1.mlp.gate_proj"]
    canonical = quantized(model, schemes)
    dialect = {"compressed-tensors": CompressedTensors, "gptq": Gptq}[name]
    config = dialect.config(schemes, ["lm_head", "model.layers.1.mlp.gate_proj"])
    write_checkpoint(tmp_path / "a", model, canonical, schemes, config)
    loaded = load(tmp_path / "a")
    assert {n: layer.scheme for n, layer in packed(loaded).items()} == schemes
    expected = logits(dense_twin(model, canonical, schemes))
    torch.testing.assert_close(logits(loaded), expected, **NEAR)
    loaded.save_pretrained(tmp_path / "b")
    assert {n: layer.scheme for n, layer in packed(load(tmp_path / "b")).items()} == schemes


def test_generate(tmp_path):
    model, schemes, canonical, _ = write_case("compressed-tensors", tmp_path)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    loaded = load(tmp_path, device_map="cpu")
    out = loaded.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), **settings)
    twin = dense_twin(model, canonical, schemes)
    assert torch.equal(
        out, twin.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), **settings)
    )


def test_base_model_of_a_causal_checkpoint(tmp_path):
    """LlamaModel drops the prefix `model.`, which the config's names have."""
    model = tiny_model()
    names = linear_names(model)
    schemes = dict.fromkeys(names[1:], W4A16(4, 32))
    canonical = quantized(model, schemes)
    config = CompressedTensors.config(schemes, ["lm_head", names[0]])
    write_checkpoint(tmp_path / "a", model, canonical, schemes, config)
    loaded = AutoModel.from_pretrained(tmp_path / "a", dtype=torch.float32)
    expected = {name.removeprefix("model."): scheme for name, scheme in schemes.items()}
    assert {name: layer.scheme for name, layer in packed(loaded).items()} == expected
    loaded.save_pretrained(tmp_path / "b")
    again = AutoModel.from_pretrained(tmp_path / "b", dtype=torch.float32)
    assert {name: layer.scheme for name, layer in packed(again).items()} == expected


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("case", "tensor"),
    [
        ("compressed-tensors asym", "weight_packed"),
        ("compressed-tensors asym", "weight_scale"),
        ("compressed-tensors asym", "weight_shape"),
        ("compressed-tensors asym", "weight_zero_point"),
        ("gptq", "qweight"),
        ("gptq", "qzeros"),
        ("gptq", "scales"),
        ("gptq desc_act", "g_idx"),
        ("awq", "qzeros"),
        ("marlin", "B"),
        ("marlin", "s"),
    ],
)
def test_a_missing_tensor_is_an_error(case, tensor, tmp_path):
    write_case(case, tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop(f"{DOWN}.{tensor}"))
    with pytest.raises(UserError, match=rf"{DOWN}: {tensor} is missing"):
        load(tmp_path)


def test_a_missing_dense_weight_is_an_error(tmp_path):
    write_case("gptq", tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(UserError, match=r"does not hold lm_head\.weight: .* random"):
        load(tmp_path)


def test_a_missing_trivial_g_idx_is_none(tmp_path, caplog):
    _, schemes, _, _ = write_case("gptq", tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop(f"{DOWN}.g_idx"))
    assert {name: layer.scheme for name, layer in packed(load(tmp_path)).items()} == schemes
    assert "MISSING" not in caplog.text  # transformers' report of random weights


def test_a_wrong_shape_is_an_error(tmp_path):
    write_case("compressed-tensors", tmp_path)
    edit(
        tmp_path,
        lambda t: t.update({f"{DOWN}.weight_scale": t[f"{DOWN}.weight_scale"][:, :-1].clone()}),
    )
    with pytest.raises(
        UserError, match=rf"{DOWN}: weight_scale has shape \(128, 7\), expected \(128, 8\)"
    ):
        load(tmp_path)


def test_a_config_for_another_group_size_is_an_error(tmp_path):
    write_case("gptq", tmp_path)
    edit_config(tmp_path, lambda c: c["quantization_config"].update(group_size=64))
    with pytest.raises(UserError, match="expected"):
        load(tmp_path)


def test_packed_where_the_config_says_dense_is_an_error(tmp_path):
    write_case("compressed-tensors", tmp_path)
    edit_config(tmp_path, lambda c: c["quantization_config"]["ignore"].append(DOWN))
    with pytest.raises(UserError, match=rf"{DOWN}: the file holds it packed"):
        load(tmp_path)


def test_a_tensor_nobody_reads_is_an_error(tmp_path):
    """A g_idx the config does not announce would be dropped, and the result wrong."""
    write_case("compressed-tensors", tmp_path)
    g_idx = torch.zeros(256, dtype=torch.int32)
    edit(tmp_path, lambda tensors: tensors.update({f"{DOWN}.weight_g_idx": g_idx}))
    with pytest.raises(UserError, match=rf"{DOWN}: weight_g_idx is unknown"):
        load(tmp_path)


def test_dense_in_a_gptq_file_is_dense(tmp_path):
    """GPTQ configs do not list what was left out (a router, for example)."""
    model = tiny_model()
    schemes = dict.fromkeys(linear_names(model), W4A16(4, 32))
    del schemes[DOWN]
    canonical = quantized(model, schemes)
    config = config_of("gptq", W4A16(4, 32), list(schemes))
    assert DOWN not in json.dumps(config)
    write_checkpoint(tmp_path, model, canonical, schemes, config)
    loaded = load(tmp_path)
    assert set(packed(loaded)) == set(schemes)
    expected = logits(dense_twin(model, canonical, schemes))
    torch.testing.assert_close(logits(loaded), expected, **NEAR)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_bias_the_model_does_not_expect(value, tmp_path):
    """AutoGPTQ wrote zero biases everywhere: dropped. A real one is used, not lost."""
    model, schemes, canonical, _ = write_case("gptq", tmp_path)
    bias = torch.full((128,), value, dtype=torch.float16)
    edit(tmp_path, lambda tensors: tensors.update({f"{DOWN}.bias": bias}))
    loaded = load(tmp_path)
    twin = dense_twin(model, canonical, schemes)
    layer = loaded.get_submodule(DOWN)
    if value:
        assert torch.equal(layer.bias, bias.float())
        twin.get_submodule(DOWN).bias = torch.nn.Parameter(bias.float())
    else:
        assert layer.bias is None
    torch.testing.assert_close(logits(loaded), logits(twin), **NEAR)


def test_biases_of_the_model(tmp_path):
    model, schemes, canonical, _ = write_case("awq", tmp_path / "a", mlp_bias=True)
    biases = {
        name: torch.randn_like(tensor).half()
        for name, tensor in model.state_dict().items()
        if name.endswith(".bias")
    }
    assert len(biases) == 6
    edit(tmp_path / "a", lambda tensors: tensors.update(biases))
    loaded = load(tmp_path / "a", dtype=torch.float16)
    loaded.save_pretrained(tmp_path / "b")
    twin = dense_twin(model, canonical, schemes)
    twin.load_state_dict({n: t.float() for n, t in biases.items()}, strict=False)
    torch.testing.assert_close(logits(load(tmp_path / "b")), logits(twin), **NEAR)
    edit(tmp_path / "a", lambda tensors: tensors.pop(f"{DOWN}.bias"))
    with pytest.raises(UserError, match=rf"{DOWN}: bias is missing"):
        load(tmp_path / "a")


FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
    "ignore": ["lm_head"],
}


def test_what_we_cannot_read_goes_to_transformers(tmp_path):
    merged = AutoHfQuantizer.merge_quantization_configs(FP8, None)
    assert type(merged) is CompressedTensorsConfig
    model = tiny_model(num_hidden_layers=1)
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    for name in linear_names(model):
        weight = state[f"{name}.weight"].float()
        scale = weight.abs().amax(1, keepdim=True) / 448
        state[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        state[f"{name}.weight_scale"] = scale.half()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": FP8, "dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path)
    assert not packed(loaded)
    assert type(loaded.hf_quantizer).__name__ == "CompressedTensorsHfQuantizer"
    assert (logits(loaded) - logits(model)).abs().max() < 0.3 * logits(model).abs().max()


@pytest.mark.parametrize(
    "case", ["compressed-tensors", "compressed-tensors asym", "compressed-tensors channel"]
)
def test_stock_transformers_reads_what_we_write(case, tmp_path):
    """An explicit quantization_config is the way to transformers' own quantizer."""
    model, schemes, canonical, _ = write_case(case, tmp_path)
    stock = load(tmp_path, quantization_config=CompressedTensorsConfig(dequantize=True))
    assert not packed(stock)
    expected = logits(dense_twin(model, canonical, schemes))
    torch.testing.assert_close(logits(stock), expected, rtol=1e-3, atol=1e-3)


def test_stock_transformers_reads_what_we_save(tmp_path):
    """Mixed bits, from a GPTQ file, through our save_pretrained."""
    model = tiny_model()
    schemes = dict.fromkeys(linear_names(model), W4A16(4, 32))
    schemes[DOWN] = W4A16(8, 64)
    canonical = quantized(model, schemes)
    write_checkpoint(tmp_path / "a", model, canonical, schemes, Gptq.config(schemes, ["lm_head"]))
    load(tmp_path / "a", dtype=torch.float16).save_pretrained(tmp_path / "b")
    stock = load(tmp_path / "b", quantization_config=CompressedTensorsConfig(dequantize=True))
    assert not packed(stock)
    expected = logits(dense_twin(model, canonical, schemes))
    torch.testing.assert_close(logits(stock), expected, rtol=1e-3, atol=1e-3)


def test_dense_checkpoints_are_untouched(tmp_path):
    model = tiny_model(num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert type(loaded) is LlamaForCausalLM and not packed(loaded)
    assert torch.equal(logits(loaded), logits(model))


def test_registering_twice_changes_nothing():
    before = AutoHfQuantizer.merge_quantization_configs.__func__
    register_when_imported()
    assert AutoHfQuantizer.merge_quantization_configs.__func__ is before


OURS = (
    "from billfish.integrations import register_when_imported as r; r(); r();"
    "import sys; early = 'transformers.quantizers.auto' in sys.modules;"
)
THEIRS = "import transformers.quantizers.auto as a; import transformers;"
CHECK = (
    "assert 'billfish' in a.AUTO_QUANTIZER_MAPPING;"
    "assert 'billfish' in a.AUTO_QUANTIZATION_CONFIG_MAPPING;"
    "assert not [f for f in sys.meta_path if type(f).__module__.startswith('billfish')];"
    "assert a.__spec__.loader is a.__loader__ and 'billfish' not in type(a.__loader__).__module__;"
    "q = {'quant_method': 'gptq', 'bits': 4, 'group_size': 128};"
    "c = a.AutoHfQuantizer.merge_quantization_configs(q, None);"
    "assert type(c).__name__ == 'BillfishConfig';"
    "print('early' if early else 'late')"
)


@pytest.mark.parametrize(("code", "said"), [(OURS + THEIRS, "late"), also(THEIRS + OURS, "early")])
def test_either_import_order(code, said):
    done = subprocess.run([sys.executable, "-c", code + CHECK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [said]
    assert "Warning" not in done.stderr


def test_an_unknown_transformers_is_a_warning_not_a_failure():
    code = (
        "import sys, types;"
        "from billfish.integrations import register_when_imported, AWAITED;"
        "sys.modules['transformers'] = types.ModuleType('transformers');"
        "sys.modules[AWAITED] = types.ModuleType(AWAITED);"
        "register_when_imported()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "cannot register" in done.stderr


def test_the_hook_itself_imports_next_to_nothing():
    code = (
        "import sys, billfish.integrations as i; i.register_when_imported();"
        "assert 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_type_it_runs_in_changes_no_weight(llama, tmp_path, dtype):
    """Scales of fp16 stay what they are on a CPU; bf16 would round them by up to 2^-9."""
    request = QuantizeRequest(
        llama, tmp_path / "w4", W4A16(4, 32), "rtn", stored_dtype=torch.float16
    )
    quantize(request)
    stored, model = Checkpoint(tmp_path / "w4"), load(tmp_path / "w4", dtype=dtype)
    assert packed(model) and model.dtype == dtype
    for name, layer in packed(model).items():
        scales = layer.tensors()["weight_scale"]
        assert scales.dtype == torch.float16
        assert torch.equal(scales, stored.tensor(f"{name}.weight_scale"))


@pytest.mark.parametrize("given", [(), ("the model",)], ids=["up to 5.20", "from 5.21 on"])
def test_transformers_asks_for_conversions_with_and_without_the_model(monkeypatch, given):
    """Rules that fuse experts are taken out, whichever transformers asks."""
    seen = []

    def own(self, rules, *model):
        seen.append((rules, model))
        return rules

    monkeypatch.setattr(HfQuantizer, "update_weight_conversions", own, raising=False)
    rules = [WeightRenaming("a", "b"), *get_checkpoint_conversion_mapping("mixtral")]
    left = BillfishQuantizer.update_weight_conversions(
        BillfishQuantizer.__new__(BillfishQuantizer), rules, *given
    )
    assert seen == [(left, given)]
    assert left == [rule for rule in rules if isinstance(rule, WeightRenaming)] and len(left) == 2


def test_renamed_tensors_have_the_models_type():
    """Up to transformers 5.21 they come in that of the files."""
    model = torch.nn.ParameterDict(
        {
            "same": torch.ones(2, dtype=torch.bfloat16),
            "renamed": torch.ones(2, dtype=torch.bfloat16),
            "wide": torch.ones(2, dtype=torch.float64),  # some are kept wider than the model
        }
    )
    cast_renamed(model, torch.float32, {"same"})
    assert {name: parameter.dtype for name, parameter in model.items()} == {
        "same": torch.bfloat16,
        "renamed": torch.float32,
        "wide": torch.float64,
    }
