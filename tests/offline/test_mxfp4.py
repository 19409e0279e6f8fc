"""gpt-oss as it is published, with experts in MXFP4: the numbers are transformers', and the result
is that of the model in bf16."""

import json

import pytest
import torch
from jobs import request as asked
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint
from transformers import GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from typer.testing import CliRunner

from billfish.checkpoints.experts import unfused
from billfish.checkpoints.inspect import inspect
from billfish.checkpoints.mxfp4 import Decoded, decode
from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.tensors import differences, read_tensors
from billfish.checkpoints.verify import verify
from billfish.cli.app import app
from billfish.errors import UserError
from billfish.models.load import load
from billfish.offline.driver import quantize
from billfish.offline.plan import plan
from billfish.schemes.w4a16 import W4A16

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PREFIX = "model.layers.0.mlp.experts"
BLOCKS, SCALES = f"{PREFIX}.gate_up_proj_blocks", f"{PREFIX}.gate_up_proj_scales"
TOLD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}


def write_config(path, **changes):
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )


def published(path):
    """A random gpt-oss with experts in MXFP4, scales in a shard of their own."""
    write_checkpoint(path, "GptOssForCausalLM")
    held = {n: t.bfloat16() for n, t in load_file(path / "model.safetensors").items()}
    for name in [n for n in held if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = held.pop(name).shape
        shape = experts, outputs, inputs // 32
        held[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        held[f"{name}_scales"] = torch.randint(121, 124, shape, dtype=torch.uint8)
    (path / "model.safetensors").unlink()
    files = {name: SHARDS[name.endswith("_scales")] for name in held}
    for shard in SHARDS:
        tensors = {name: held[name] for name in held if files[name] == shard}
        save_file(tensors, path / shard, {"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    write_config(path, quantization_config=TOLD, dtype="bfloat16")
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(0)
    return published(tmp_path_factory.mktemp("mxfp4") / "source")


@pytest.fixture(scope="module")
def dense(source, tmp_path_factory):
    """The source in bf16, by transformers."""
    told = Mxfp4Config(dequantize=True)
    model = GptOssForCausalLM.from_pretrained(
        source, quantization_config=told, dtype=torch.bfloat16
    )
    path = write_checkpoint(tmp_path_factory.mktemp("dense") / "dense", "GptOssForCausalLM")
    save_file(dict(model.state_dict()), path / "model.safetensors", {"format": "pt"})
    write_config(path, dtype="bfloat16")
    return path


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    (folder / "text.txt").write_text("experts of sixteen codes and their scales, 0123. " * 40)
    report = quantize(asked(source, folder / "out", str(folder / "text.txt"), check=True))
    return folder / "out", report


def test_numbers_are_those_of_the_standard_and_of_transformers():
    """Every byte of codes with every scale that is a number, bit for bit."""
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 16).contiguous()
    found = decode(blocks, scales)  # (scales, bytes and halves)
    theirs = convert_moe_packed_tensors(blocks[None], scales[None])[0].T
    assert torch.equal(found.view(torch.int16), theirs.contiguous().view(torch.int16))
    for byte in (0x00, 0x31, 0x7F, 0xE5):
        for half, code in enumerate((byte & 15, byte >> 4)):
            exponent, fraction = code >> 1 & 3, code & 1
            value = fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
            value = -value if code & 8 else value
            for scale in (0, 1, 127, 200):
                assert found[scale, 2 * byte + half].item() == value * 2.0 ** (scale - 127)


def test_experts_are_shown_as_transformers_decodes_them(source, dense):
    view, held = unfused(Checkpoint(source)), load_file(dense / "model.safetensors")
    both, down = held[f"{PREFIX}.gate_up_proj"], held[f"{PREFIX}.down_proj"]
    for expert in range(4):
        name = f"{PREFIX}.{expert}"
        assert torch.equal(view.tensor(f"{name}.gate_proj.weight"), both[expert, :, ::2].T)
        assert torch.equal(view.tensor(f"{name}.up_proj.weight"), both[expert, :, 1::2].T)
        assert torch.equal(view.tensor(f"{name}.down_proj.weight"), down[expert].T)
    assert torch.equal(Decoded(Checkpoint(source)).tensor(f"{PREFIX}.down_proj"), down)
    same = unfused(Checkpoint(dense))
    assert {n: (e.shape, e.dtype) for n, e in view.entries.items()} == {
        n: (e.shape, e.dtype) for n, e in same.entries.items()
    }
    assert view.nbytes == Checkpoint(source).nbytes


def test_the_result_is_that_of_the_dense_model(made, dense, tmp_path):
    """Byte for byte; and it says nothing of MXFP4."""
    out, report = made
    text = str(out.parent / "text.txt")
    quantize(asked(dense, tmp_path / "out", text))
    for shard in sorted(out.glob("*.safetensors")):
        assert shard.read_bytes() == (tmp_path / "out" / shard.name).read_bytes()
    assert "mxfp4" not in (out / "config.json").read_text()
    assert report["check"]["problem"] is None
    assert sum(".experts." in layer["name"] for layer in report["layers"]) == 2 * 4 * 3


def test_nothing_of_the_source_is_lost(made, source):
    out, report = made
    placed, held = read_tensors(out), Checkpoint(out).entries
    assert placed.keys() == Checkpoint(source).entries.keys()
    for name in (BLOCKS, SCALES):
        assert placed[name].how == "quantized" and placed[name].dtype == "uint8"
        assert len(placed[name].names) == 4 * 2 * 3  # experts; gate and up; tensors of each
    assert placed[BLOCKS].shape == (4, 256, 2, 16) and placed[SCALES].shape == (4, 256, 2)
    assert {name for each in placed.values() for name in each.names} == held.keys()
    assert report["tensors"]["quantized"] == 2 * (4 + 4)  # attention; two halves of two tensors
    told = verify(out)
    assert told["ok"] and told["checked"]["source_tensors"] == len(placed)


def test_the_result_writes_text(made):
    asks = ["generate", str(made[0]), "--prompt", "experts of", "--max-tokens", "6", "--json"]
    done = CliRunner().invoke(app, asks)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["tokens"] > 0


def test_experts_that_stay_dense_are_decoded(source, dense, tmp_path):
    """Groups of 128 fit down alone."""
    few = {"method": "rtn", "scheme": W4A16(4, 128), "allow_skipped": True}
    report = quantize(asked(source, tmp_path / "out", "", **few))
    placed, found = read_tensors(tmp_path / "out"), Checkpoint(tmp_path / "out")
    assert report["tensors"]["decoded"] == 4 and inspect(found.path)["source"]["decoded"] == 4
    assert placed[BLOCKS].how == placed[SCALES].how == "decoded"
    assert placed[SCALES].names == placed[BLOCKS].names and len(placed[SCALES].names) == 4 * 2
    held = load_file(dense / "model.safetensors")[f"{PREFIX}.gate_up_proj"]
    assert torch.equal(found.tensor(f"{PREFIX}.3.up_proj.weight"), held[3, :, 1::2].T)
    assert verify(found.path)["ok"]
    lost = {name: entry for name, entry in found.entries.items() if ".2.up_proj.weight" not in name}
    assert [name for name, _ in differences(placed, lost)] == [f"{PREFIX}.2.up_proj.weight"] * 2 + [
        f"{PREFIX.replace('0', '1')}.2.up_proj.weight"
    ] * 2


def test_commands_read_the_source(source, dense, text):
    assert verify(source)["problems"] == []
    found, same = inspect(source), inspect(dense)
    assert found["dialect"] == "mxfp4" and found["unsupported"] is None
    assert found["parameters"] == same["parameters"] and found["problems"] == []
    told, expected = (plan(asked(path, None, text)) for path in (source, dense))
    for key in ("parameters", "bytes_after", "quantized"):
        assert told["totals"][key] == expected["totals"][key]
    assert told["totals"]["bytes_before"] == Checkpoint(source).nbytes
    rows = [row for row in told["layers"] if ".experts." in row["module"]]
    assert sum(row["bytes_before"] * 8 for row in rows) == sum(
        row["n"] * row["k"] * 4.25 for row in rows
    )
    model, _ = load(source, dtype=torch.float32)
    experts = load_file(dense / "model.safetensors")[f"{PREFIX}.down_proj"]
    assert torch.equal(model.model.layers[0].mlp.experts.down_proj, experts.float())


BAD = {
    "no scales": (lambda one, two: two.pop(SCALES), rf"{SCALES}' missing: .*needs both"),
    "no blocks": (lambda one, two: one.pop(BLOCKS), rf"{BLOCKS}' missing: .*needs both"),
    "shapes": (
        lambda one, two: two.update({SCALES: two[SCALES][:, :-1].clone()}),
        rf"{BLOCKS}' has shape \(4, 256, 2, 16\), its scales \(4, 255, 2\); expected",
    ),
    "blocks of 16": (
        lambda one, two: one.update({BLOCKS: one[BLOCKS][..., :8].clone()}),
        rf"{BLOCKS}' has shape \(4, 256, 2, 8\)",
    ),
    "floats": (
        lambda one, two: two.update({SCALES: two[SCALES].bfloat16()}),
        rf"{SCALES}' holds torch.bfloat16; MXFP4's scales are bytes",
    ),
    "twice": (
        lambda one, two: one.update({f"{PREFIX}.gate_up_proj": torch.zeros(4, 64, 256)}),
        rf"{BLOCKS}' is in the files, and so is {PREFIX}.gate_up_proj",
    ),
    "another model": (
        lambda one, two: (
            one.update({BLOCKS: one[BLOCKS][:, :128].clone()}),
            two.update({SCALES: two[SCALES][:, :128].clone()}),
        ),
        "gate_up_proj' has shape",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_blocks_are_one_clear_error(source, tmp_path, text, case):
    path = damage(source, tmp_path / "bad", BAD[case][0])
    for command in (
        lambda: quantize(asked(path, tmp_path / "out", text)),
        lambda: plan(asked(path, None, text)),
        lambda: load(path),
    ):
        with pytest.raises(UserError, match=BAD[case][1]):
            command()
    assert len(verify(path)["problems"]) == 1
    assert len(inspect(path)["problems"]) == (case != "another model")


def damage(source, path, change):
    path.mkdir()
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tensors = [load_file(path / shard) for shard in SHARDS]
    change(*tensors)
    for shard, held in zip(SHARDS, tensors, strict=True):
        save_file(held, path / shard, {"format": "pt"})
    files = {name: shard for shard, held in zip(SHARDS, tensors, strict=True) for name in held}
    index = {"metadata": {}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_a_scale_that_is_no_number_is_named(source, tmp_path, text):
    path = damage(source, tmp_path / "bad", lambda one, two: two[SCALES].view(-1)[5].fill_(255))
    with pytest.raises(UserError, match=r"experts\.0\.\w+_proj\.weight holds nan at"):
        quantize(asked(path, tmp_path / "out", text))
    (problem,) = verify(path)["problems"]
    assert problem["tensor"] == SCALES and "holds nan at [0, 2, 1]" in problem["problem"]
