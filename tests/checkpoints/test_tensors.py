"""The tensor manifest: every tensor of a source is quantized, kept or copied, and what is lost or
changed later is found."""

import json
import shutil

import pytest
import torch
import transformers
from jobs import request
from safetensors.torch import load_file, save_file
from tiny import ARCHITECTURES, write_checkpoint
from typer.testing import CliRunner

from billfish.checkpoints import write as files
from billfish.checkpoints.convert import convert
from billfish.checkpoints.inspect import inspect
from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.tensors import TENSORS, differences, read_tensors
from billfish.checkpoints.verify import verify
from billfish.cli.app import app
from billfish.errors import UserError
from billfish.models.load import load
from billfish.offline.driver import quantize
from billfish.offline.plan import plan

# What real checkpoints have beside their model: a draft for speculative decoding, a value head, a
# rotary table of each block, as older Llama checkpoints store it.
STRANGERS = {
    "mtp.fc.weight": torch.randn(64, 128),
    "mtp.layers.0.mlp.up_proj.weight": torch.randn(128, 64).half(),
    "v_head.summary.bias": torch.arange(3),
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.rand(8) / 3,
}


@pytest.fixture
def more(llama):
    add(llama, STRANGERS)
    return llama


def add(folder, tensors):
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def rtn(source, output, text, **changes):
    return quantize(request(source, output, text, method="rtn", **changes))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_of_the_source_is_placed(tmp_path, text, architecture):
    source, out = write_checkpoint(tmp_path / "source", architecture), tmp_path / "out"
    report = rtn(source, out, text)
    placed, held = read_tensors(out), Checkpoint(out).entries
    assert placed.keys() == Checkpoint(source).entries.keys()
    assert differences(placed, held) == []
    assert sorted(name for each in placed.values() for name in each.names) == sorted(held)
    quantized = [name for name, each in placed.items() if each.how == "quantized"]
    assert len(quantized) == len(report["layers"]) == report["tensors"]["quantized"] > 0
    assert report["tensors"]["copied"] == 0 and inspect(out)["source"]["copied"] == 0
    assert verify(out)["checked"]["source_tensors"] == len(placed)


def test_what_is_no_part_of_the_model_is_copied_byte_for_byte(tmp_path, more, text):
    wanted = request(more, tmp_path / "out", text, method="rtn", check=True)
    told = plan(wanted)
    assert {each["name"] for each in told["copied"]} == STRANGERS.keys()
    report = quantize(wanted)
    assert report["tensors"]["copied"] == len(STRANGERS) and report["check"]["problem"] is None
    found = Checkpoint(wanted.output)
    assert told["totals"]["bytes_after"] == found.nbytes
    for name, tensor in STRANGERS.items():
        assert torch.equal(found.tensor(name), tensor)
        assert found.entries[name].dtype == tensor.dtype, name
    assert inspect(wanted.output)["source"]["copied_names"] == sorted(STRANGERS)
    assert verify(wanted.output)["ok"], verify(wanted.output)["problems"]
    load(wanted.output)
    transformers.AutoModelForCausalLM.from_pretrained(wanted.output)
    convert(wanted.output, tmp_path / "gptq", "gptq")
    assert verify(tmp_path / "gptq")["ok"], verify(tmp_path / "gptq")["problems"]
    load(tmp_path / "gptq")


def test_the_commands_list_what_is_copied(tmp_path, more, text):
    run = lambda *given: CliRunner().invoke(app, list(map(str, given))).output  # noqa: E731
    common = ["--method", "rtn", "--group-size", 32]
    planned = run("plan", more, *common)
    assert "copied as they are" in planned and all(name in planned for name in STRANGERS)
    made = run("quantize", more, "--output", tmp_path / "out", *common)
    assert "4 tensors are no part of the model" in made
    assert "21 quantized" in run("inspect", tmp_path / "out")
    assert "of the source" in run("verify", tmp_path / "out")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.up_proj.weight",  # more blocks than config.json says
        "model.layers.0.self_attn.q_norm.weight",  # another architecture's block
        "model.norm.bias",
        "lm_head.bias",
    ],
)
def test_tensors_of_another_model_are_refused(tmp_path, llama, text, name):
    add(llama, {name: torch.randn(64)})
    with pytest.raises(UserError, match=r"has no such tensor.*belongs to another"):
        rtn(llama, tmp_path / "out", text)
    assert not (tmp_path / "out").exists()


def test_files_beside_the_checkpoint_are_told(tmp_path, llama, text):
    shutil.copy(llama / "model.safetensors", llama / "draft.safetensors")
    assert "draft.safetensors" in plan(request(llama, None, text, method="rtn"))["warnings"][0]
    assert "draft.safetensors" in rtn(llama, tmp_path / "out", text)["warnings"][0]


# -- later damage


def rewrite(out, change):
    """Change the tensors of the last shard; the index says the same again, hashes are gone."""
    shard = sorted(out.glob("model-*.safetensors"))[-1]
    tensors = load_file(shard)
    change(tensors)
    files.write_shard(shard, tensors)
    (out / files.MANIFEST).unlink()
    files.write_index(out, [path.name for path in sorted(out.glob("model-*.safetensors"))])


PACKED = "model.layers.2.mlp.up_proj.weight_scale"
NORM = "model.layers.2.input_layernorm.weight"
DAMAGES = {
    "lost": (lambda t: t.pop(PACKED), PACKED, "missing"),
    "added": (lambda t: t.update({"x.y": torch.ones(1)}), "x.y", "is in the files"),
    "flat": (lambda t: t.update({NORM: t[NORM][:9]}), NORM, "has shape (9,)"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_told_once(tmp_path, llama, text, damage):
    change, tensor, told = DAMAGES[damage]
    rtn(llama, tmp_path / "out", text)
    rewrite(tmp_path / "out", change)
    found = [p for p in verify(tmp_path / "out")["problems"] if p["tensor"] == tensor]
    assert len(found) == 1 and told in found[0]["problem"]


def test_a_copied_tensor_that_is_lost_or_cast_is_found(tmp_path, more, text):
    out = tmp_path / "out"
    rtn(more, out, text)
    shard = sorted(out.glob("model-*.safetensors"))[0]
    tensors = load_file(shard)
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].bfloat16()
    del tensors["v_head.summary.bias"]
    files.write_shard(shard, tensors)
    (out / files.MANIFEST).unlink()
    files.write_index(out, [path.name for path in sorted(out.glob("model-*.safetensors"))])
    found = {p["tensor"]: p["problem"] for p in verify(out)["problems"]}
    assert found.keys() == {"mtp.fc.weight", "v_head.summary.bias"}
    assert "is bfloat16" in found["mtp.fc.weight"] and "missing" in found["v_head.summary.bias"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"version": 2, "tensors": {}}, "version 2"),
        ({"version": 1}, "names no tensors"),
        ({"version": 1, "tensors": {"a": 1}}, "says of 'a' 1"),
        ({"version": 1, "tensors": {"a": {"how": "lost"}}}, "says of 'a'"),
        ({"version": 1, "tensors": {"a": {"how": "kept", "names": [1]}}}, "says of 'a'"),
    ],
)
def test_a_damaged_manifest_is_called_so(tmp_path, llama, text, content, told):
    out = tmp_path / "out"
    rtn(llama, out, text)
    (out / TENSORS).write_text(json.dumps(content))
    (out / files.MANIFEST).unlink()
    problems = verify(out)["problems"]
    assert [p["file"] for p in problems] == [TENSORS] and told in problems[0]["problem"]
    assert told in inspect(out)["problems"][0]
