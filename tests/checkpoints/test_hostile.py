"""Damaged and hostile checkpoints give an error that names the file or the tensor, in every
command; checkpoints that transformers loads without loss still load."""

import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from damage import DAMAGES, PACKED
from safetensors.torch import load_file, save_file
from tiny import GROUPED, SMALL, character_tokenizer, write_checkpoint

from billfish import LLM, load
from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.verify import verify
from billfish.cli import app as cli
from billfish.errors import UserError
from billfish.models.load import load_model
from billfish.offline.driver import quantize
from billfish.offline.request import QuantizeRequest
from billfish.schemes.w4a16 import W4A16

DENSE = """
    overlapping_offsets gapped_offsets shape_negative shape_overflowing shape_fraction shape_other
    offsets_reversed offsets_text dtype_unknown dtype_list header_deep header_list header_nothing
    entry_null header_twice_the_same_name header_length_huge shard_short shard_long index_list
    index_number index_not_json index_map_empty index_deep index_entry_outside index_entry_number
    index_entry_pickle index_names_more tensor_in_two_shards config_missing config_deep
    config_list config_deep_inside config_empty_object too_large_config too_large_tokenizer
    key_num_hidden_layers_huge key_num_hidden_layers_more key_num_hidden_layers_less
    key_num_hidden_layers_text key_hidden_size_huge key_vocab_size_less
    key_num_attention_heads_zero key_num_attention_heads_three key_rms_norm_eps_nan
    key_rms_norm_eps_text key_rope_parameters_nan key_model_type_unknown key_model_type_other
    key_architectures_unknown key_architectures_function key_dtype_function key_auto_map_text
    key_auto_map_number tensor_deleted tensor_renamed tensor_added_module tensor_reshaped_wide
    number_nan irregular_fifo_config irregular_fifo_weights irregular_device_weights
    irregular_fifo_tokenizer irregular_socket_tokenizer irregular_directory_config
    irregular_dangling_weights pickles_alone adapter generation_deep generation_list
    generation_eos tokenizer_missing tokenizer_not_json tokenizer_vocab tokenizer_deep
    tokenizer_id_huge
    tokenizer_config_list tokenizer_of_another_model
""".split()  # noqa: SIM905
QUANTIZED = """
    quantization_deleted quant_method_unknown quant_method_gptq quant_method_list
    quantization_config_list weights_num_bits_zero weights_num_bits_negative
    weights_num_bits_fraction weights_num_bits_text weights_group_size_zero
    weights_group_size_negative weights_group_size_other groups_ignore_all groups_ignore_regex
    tensor_deleted tensor_added_part tensor_added_bias scale_nan scale_inf packed_part_huge
    packed_part_minus packed_part_words
""".split()  # noqa: SIM905
# What the error names, where that is not what the damage returns.
NAMED = {
    "index_entry_outside": "../x",
    "index_entry_number": "model.safetensors.index",
    "index_entry_pickle": "pytorch_model.bin",
    "key_num_hidden_layers_more": "model.layers.2.",
    "key_num_hidden_layers_less": "model.layers.1.",
    "key_vocab_size_less": "embed_tokens",
    "key_num_attention_heads_three": "attention heads",
    "key_rope_parameters_nan": "rope_theta",
    "key_model_type_other": "GPT2",
    "irregular_dangling_weights": "safetensors",
    "generation_eos": "eos_token_id",
    "generation_ends": "eos_token_id",
    "tokenizer_config_list": "tokenizer",
    "tokenizer_id_huge": "4294967295",
    "quantization_deleted": "weight",
    "quant_method_unknown": "nonsense",
    "quant_method_gptq": "pack-quantized",
    "quant_method_list": "quant_method",
    "quant_method_false": "quant_method",
    "weights_num_bits_zero": "bits",
    "weights_num_bits_negative": "bits",
    "weights_num_bits_fraction": "num_bits",
    "weights_num_bits_text": "num_bits",
    "weights_group_size_zero": "group_size",
    "weights_group_size_negative": "group_size",
    "weights_group_size_other": "16",
    "groups_ignore_all": "not quantized",
    "groups_ignore_regex": "regular expression",
    "packed_part_huge": "up_proj",
    "packed_part_minus": "up_proj",
}
CASES = [("dense", name) for name in DENSE] + [("packed", name) for name in QUANTIZED]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """{"dense": a checkpoint, "packed": the same in 4 bits}"""
    folder = tmp_path_factory.mktemp("whole")
    write_checkpoint(folder / "dense", num_hidden_layers=2)
    quantize(QuantizeRequest(folder / "dense", folder / "packed", W4A16(4, 32), "rtn"))
    return folder


def damaged(whole, tmp_path, base, name):
    """(folder, words that an error must hold)"""
    folder = Path(shutil.copytree(whole / base, tmp_path / "model"))
    told = DAMAGES[name](folder, random.Random(1))
    words = NAMED.get(name, told)
    whole_name = words.startswith("model.layers") and not words.endswith(".")
    return folder, words.rsplit(".", 1) if whole_name else [words]  # "q_proj: weight_scale is"


@pytest.mark.parametrize(("base", "name"), CASES, ids=lambda value: value)
def test_nothing_broken_is_loaded_or_called_whole(whole, tmp_path, base, name):
    folder, words = damaged(whole, tmp_path, base, name)
    with pytest.raises(UserError) as caught:
        load(folder)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
    told = verify(folder)
    assert not told["ok"]
    assert any(all(word in str(p) for word in words) for p in told["problems"]), told["problems"]


COMMANDS = {
    "inspect": (),
    "verify": (),
    "plan": (),
    "quantize": ("--output", "OUT", "--method", "rtn"),
    "convert": ("OUT", "--to", "gptq"),
    "generate": ("--prompt", "a"),
    "eval": ("--limit", "1"),
    "serve": ("--port", "0"),
}


@pytest.mark.parametrize(
    "name",
    [
        "overlapping_offsets",
        "index_list",
        "config_deep",
        "pickles_alone",
        "irregular_fifo_config",
        "key_num_hidden_layers_huge",
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_one_sentence(whole, tmp_path, monkeypatch, capsys, command, name):
    folder, words = damaged(whole, tmp_path, "dense", name)
    rest = [str(tmp_path / "out") if word == "OUT" else word for word in COMMANDS[command]]
    monkeypatch.setattr(sys, "argv", ["billfish", command, str(folder), *rest])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr()
    said = "".join((told.out + told.err).split())  # lines are wrapped
    assert ended.value.code == 1 and "Traceback" not in said
    assert all(word in said for word in words), said
    assert not (tmp_path / "out").exists()


def test_a_baseline_is_read_as_the_model_is(whole, tmp_path, monkeypatch, capsys):
    folder, _ = damaged(whole, tmp_path, "dense", "pickles_alone")
    argv = ["billfish", "eval", str(whole / "packed"), "--baseline", str(folder), "--limit", "1"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit):
        cli.main()
    assert "pickles" in capsys.readouterr().err


def test_the_calibration_of_the_cache(whole, tmp_path):
    folder = Path(shutil.copytree(whole / "packed", tmp_path / "model"))
    DAMAGES["kv_file_header"](folder, random.Random(1))
    with pytest.raises(UserError, match="billfish_kv"):
        LLM(folder, kv="kv4")
    assert verify(folder)["problems"][0]["file"] == "billfish_kv.safetensors"


def test_python_users_get_a_user_error(whole, tmp_path):
    folder, _ = damaged(whole, tmp_path, "dense", "tensor_deleted")
    with pytest.raises(UserError, match="would be random"):
        LLM(folder)


@pytest.mark.parametrize("name", ["tensor_deleted", "tensor_added_module", "scale_nan"])
def test_transformers_with_our_quantizer_refuses_too(whole, tmp_path, name):
    folder = Path(shutil.copytree(whole / "packed", tmp_path / "model"))
    DAMAGES[name](folder, random.Random(1))
    with pytest.raises(UserError):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


# -- what must keep loading

ARCHITECTURES = {
    "Llama": GROUPED,
    "Mistral": GROUPED,
    "Qwen2": GROUPED,
    "Qwen3": {**GROUPED, "head_dim": 16},
    "Phi3": GROUPED,
    "GPT2": {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "Gemma": {**GROUPED, "head_dim": 16},
    "Gemma3Text": {**GROUPED, "head_dim": 16},
    "OPT": {**SMALL, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "GPTNeoX": SMALL,
    "Bloom": {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "Mixtral": GROUPED,
}


def tiny(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**ARCHITECTURES[name])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_transformers_loads_without_loss_loads(name, tmp_path):
    model, ids = tiny(name), torch.arange(3, 15)[None]
    model.save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    found = load_model(tmp_path, torch.float32)
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)
    assert verify(tmp_path)["problems"] == []


def test_names_without_the_base_models_prefix(tmp_path):
    model = tiny("GPT2")  # as GPT-2's own files are, with the masks that it once stored
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path, torch.float32)(ids).logits, model(ids).logits)


def test_what_old_files_hold_besides(whole, tmp_path):
    """Rotary tables, and a tied head stored on its own."""
    folder = write_checkpoint(tmp_path / "model", num_hidden_layers=2, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load(folder)
    assert verify(folder)["problems"] == []


def test_a_folder_of_links_as_the_hubs_cache_is(whole, tmp_path):
    for file in (whole / "packed").iterdir():
        (tmp_path / file.name).symlink_to(file)
    load(tmp_path)


def test_two_sets_of_weights(whole, tmp_path):
    folder = Path(shutil.copytree(whole / "packed", tmp_path / "model"))
    shutil.copy(whole / "dense" / "model.safetensors", folder)
    with pytest.raises(UserError, match="readers differ"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("attn_implementation", "evil/kernel"), ("transformers_weights", "other.safetensors")],
)
def test_config_names_no_code_and_no_other_weights(whole, tmp_path, key, value):
    folder = Path(shutil.copytree(whole / "dense", tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(UserError, match=key):
        Checkpoint(folder)


def test_the_table_speaks_of_damages_that_exist():
    assert {*DENSE, *QUANTIZED} <= DAMAGES.keys() and PACKED.isdisjoint(DENSE)
