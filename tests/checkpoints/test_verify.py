"""verify finds every kind of damage, names file and tensor, and reports no false problems."""

import json
import shutil
import struct
from math import prod
from pathlib import Path

import pytest
import torch
from foreign_fixtures import write_case
from safetensors.torch import load_file, save_file
from tiny import character_tokenizer
from tiny_checkpoint import all_tensors, edit, edit_json, tiny_llama

from billfish.checkpoints.verify import verify
from billfish.checkpoints.write import INDEX, MANIFEST, write_manifest
from billfish.errors import UserError
from billfish.offline.driver import quantize
from billfish.offline.request import QuantizeRequest
from billfish.schemes.w4a16 import W4A16

BLOCK0 = "model-00002-of-00003.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj"
HEADER = 8  # bytes that say how long a safetensors header is


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    path = tmp_path_factory.mktemp("dense") / "model"
    tiny_llama().save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def made(dense, tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "model"
    quantize(QuantizeRequest(dense, path, W4A16(4, 32, symmetric=False), "rtn"))
    return path


@pytest.fixture
def ours(made, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(made, tmp_path / "ours"))


def one_problem(path):
    result = verify(path)
    assert not result["ok"]
    assert len(result["problems"]) == 1, result["problems"]
    return result["problems"][0]


def test_whole_checkpoints_are_ok(dense, made):
    result = verify(dense)
    count = len(all_tensors(dense))
    assert result["ok"] and result["problems"] == []
    assert result["checked"]["tensors"] == result["checked"]["dense_tensors"] == count
    assert result["checked"]["hashes"] == 0
    result = verify(made)
    assert result["ok"], result["problems"]
    tensors = all_tensors(made)
    hashed = json.loads((made / MANIFEST).read_text())["sha256"]
    assert result["checked"] == {
        "files": 3,
        "hashes": len(hashed),
        "tensors": len(tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "packed_linears": 14,
        "dense_tensors": len(tensors) - 14 * 4,
        "parameters": count,
        "source_tensors": count,
    }


def test_flipped_byte(ours):
    """In the words any byte is a code: only the hash can tell."""
    raw = bytearray((ours / BLOCK0).read_bytes())
    header = json.loads(raw[HEADER : HEADER + struct.unpack("<Q", raw[:HEADER])[0]])
    begin = HEADER + struct.unpack("<Q", raw[:HEADER])[0]
    raw[begin + header[f"{Q_PROJ}.weight_packed"]["data_offsets"][0] + 5] ^= 1
    (ours / BLOCK0).write_bytes(raw)
    problem = one_problem(ours)
    assert problem["file"] == BLOCK0 and "sha256" in problem["problem"]


def test_file_of_the_manifest_is_gone(ours):
    (ours / "generation_config.json").unlink()
    problem = one_problem(ours)
    assert problem["file"] == "generation_config.json" and "missing" in problem["problem"]


def test_manifest_without_hashes(ours):
    edit_json(ours / MANIFEST, lambda content: content.pop("sha256"))
    assert one_problem(ours)["file"] == MANIFEST


def test_truncated_shard(ours):
    raw = (ours / BLOCK0).read_bytes()
    (ours / BLOCK0).write_bytes(raw[:-7])
    write_manifest(ours)
    problem = one_problem(ours)
    assert problem["file"] == BLOCK0 and "truncated" in problem["problem"]
    assert "30 tensors are lost" in problem["problem"]


@pytest.mark.parametrize("damage", ["name", "offsets", "length"])
def test_damaged_header(damage, ours):
    raw = (ours / BLOCK0).read_bytes()
    changes = {
        "name": (b'"data_offsets"', b'"data_offsetz"'),
        "offsets": (b'"shape":[64]', b'"shape":[63]'),
        "length": (raw[:HEADER], b"\xff" * HEADER),
    }
    (ours / BLOCK0).write_bytes(raw.replace(*changes[damage], 1))
    (ours / MANIFEST).unlink()
    assert one_problem(ours)["file"] == BLOCK0


def test_missing_shard(ours):
    (ours / BLOCK0).unlink()
    (ours / MANIFEST).unlink()
    problem = one_problem(ours)
    assert problem["file"] == BLOCK0 and "missing" in problem["problem"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_unusable_scale(value, ours):
    name = f"{Q_PROJ}.weight_scale"
    edit(ours, BLOCK0, lambda tensors: tensors[name].__setitem__((3, 1), value))
    problem = one_problem(ours)
    assert (problem["file"], problem["tensor"]) == (BLOCK0, name)
    assert "[3, 1]" in problem["problem"]


def test_nan_in_a_dense_tensor(ours):
    name = "model.layers.0.input_layernorm.weight"
    edit(ours, BLOCK0, lambda tensors: tensors[name].__setitem__(9, float("nan")))
    problem = one_problem(ours)
    assert (problem["file"], problem["tensor"]) == (BLOCK0, name) and "nan" in problem["problem"]


WRONG = {
    "weight_packed": torch.zeros(64, 7, dtype=torch.int32),
    "weight_zero_point": torch.zeros(8, 3, dtype=torch.int32),
    "weight_scale": torch.ones(64, 3, dtype=torch.bfloat16),
    "weight_shape": torch.tensor([64, 96]),
}


@pytest.mark.parametrize("part", WRONG)
def test_wrong_shape(part, ours):
    name = f"{Q_PROJ}.{part}"
    edit(ours, BLOCK0, lambda tensors: tensors.update({name: WRONG[part]}))
    problem = one_problem(ours)
    assert (problem["file"], problem["tensor"]) == (BLOCK0, name)


@pytest.mark.parametrize(
    "wrong", [torch.tensor([64]), torch.tensor([[64, 64]]), torch.tensor([64, 65])]
)
def test_weight_shape_of_no_use(wrong, ours):
    name = f"{Q_PROJ}.weight_shape"
    edit(ours, BLOCK0, lambda tensors: tensors.update({name: wrong}))
    assert one_problem(ours)["tensor"] == name


def test_wrong_dtype(ours):
    name = f"{Q_PROJ}.weight_zero_point"
    edit(ours, BLOCK0, lambda tensors: tensors.update({name: tensors[name].long()}))
    problem = one_problem(ours)
    assert problem["tensor"] == name and "int64" in problem["problem"]


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_shape"])
def test_missing_tensor(part, ours):
    """First the index still promises it, then nothing does."""
    name = f"{Q_PROJ}.{part}"
    edit(ours, BLOCK0, lambda tensors: tensors.pop(name))
    problem = one_problem(ours)
    assert (problem["file"], problem["tensor"]) == (BLOCK0, name)
    edit_json(ours / INDEX, lambda index: index["weight_map"].pop(name))
    problem = one_problem(ours)
    assert problem["tensor"] == name and "missing" in problem["problem"]


def test_missing_layer_is_missed_by_the_model_class(ours):
    gone = "model.layers.0.mlp.up_proj"

    def drop(names):
        for name in [name for name in names if name.startswith((gone, "model.layers.0.input"))]:
            names.pop(name)

    edit(ours, BLOCK0, drop)
    edit_json(ours / INDEX, lambda index: drop(index["weight_map"]))
    problems = verify(ours)["problems"]
    assert {problem["tensor"] for problem in problems} == {
        f"{gone}.weight",
        "model.layers.0.input_layernorm.weight",
    }


def test_config_of_another_model(ours):
    edit_json(ours / "config.json", lambda config: config.update(intermediate_size=96))
    (ours / MANIFEST).unlink()
    problems = verify(ours)["problems"]
    assert {problem["tensor"].split(".")[4] for problem in problems} == {
        "gate_proj",
        "up_proj",
        "down_proj",
    }


def test_config_that_no_model_has(ours):
    edit_json(ours / "config.json", lambda config: config.update(num_attention_heads=0))
    (ours / MANIFEST).unlink()
    problem = one_problem(ours)
    assert problem["file"] == "config.json" and "num_attention_heads is 0" in problem["problem"]


def test_tensors_nobody_reads(ours):
    stray, forgotten = f"{Q_PROJ}.weight_offset", "model.layers.0.extra"
    new = {stray: torch.zeros(1), forgotten: torch.zeros(1)}
    edit(ours, BLOCK0, lambda tensors: tensors.update(new))
    edit_json(ours / INDEX, lambda index: index["weight_map"].update({stray: BLOCK0}))
    problems = {problem["tensor"]: problem for problem in verify(ours)["problems"]}
    assert set(problems) == {stray, forgotten}
    assert "unknown" in problems[stray]["problem"] and INDEX in problems[forgotten]["problem"]
    assert problems[stray]["file"] == problems[forgotten]["file"] == BLOCK0


def test_every_problem_is_collected(ours):
    """A truncated shard, a NaN and a changed file do not hide each other."""
    last = "model-00003-of-00003.safetensors"
    name = "model.layers.1.mlp.up_proj.weight_scale"
    tensors = load_file(ours / last)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, ours / last, metadata={"format": "pt"})
    write_manifest(ours)
    (ours / BLOCK0).write_bytes((ours / BLOCK0).read_bytes()[:-1])
    (ours / "generation_config.json").write_text("{}")
    found = {(problem["file"], problem["tensor"]) for problem in verify(ours)["problems"]}
    assert found == {(BLOCK0, None), (last, name), ("generation_config.json", None)}


def test_groups_out_of_range(tmp_path):
    write_case("gptq desc_act", tmp_path)
    name = f"{Q_PROJ}.g_idx"
    edit(tmp_path, "model.safetensors", lambda tensors: tensors[name].__setitem__(0, 99))
    problem = one_problem(tmp_path)
    assert problem["tensor"] == name and "99" in problem["problem"]


def test_zeros_that_a_symmetric_config_denies(tmp_path):
    write_case("gptq", tmp_path)
    name = f"{Q_PROJ}.qzeros"
    edit(tmp_path, "model.safetensors", lambda tensors: tensors[name].fill_(0))
    assert one_problem(tmp_path)["tensor"] == name


def test_words_of_another_size_are_blamed_themselves(tmp_path):
    _, _, _, stored = write_case("awq", tmp_path)
    name = f"{Q_PROJ}.qweight"
    wrong = torch.zeros(prod(stored[name].shape) // 32, 32, dtype=torch.int32)
    edit(tmp_path, "model.safetensors", lambda tensors: tensors.update({name: wrong}))
    assert one_problem(tmp_path)["tensor"] == name


def test_damaged_config_and_unfinished_job(ours):
    (ours / MANIFEST).unlink()
    (ours / "config.json").write_text("{")
    (ours / ".billfish").mkdir()
    found = {problem["file"] for problem in verify(ours)["problems"]}
    assert found == {"config.json", ".billfish"}


def test_no_directory(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        verify(tmp_path / "nothing")
    problems = {problem["file"] for problem in verify(tmp_path)["problems"]}
    assert problems == {"config.json", "model.safetensors"}
