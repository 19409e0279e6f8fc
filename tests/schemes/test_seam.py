"""A scheme is one folder and one line of the registry: a toy scheme (toy.py) that is only
registered works in every command, the engine, transformers and the tests of all schemes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toy
import transformers
from fake_card import RULES, FakeCard
from tiny import write_checkpoint
from typer.testing import CliRunner

import billfish
from billfish.bench.kernels import KernelBench, KernelRequest
from billfish.bench.shapes import parse_shapes
from billfish.checkpoints.dialects import dialect_of, read_dialect
from billfish.checkpoints.own import Own
from billfish.cli.app import app
from billfish.cli.doctor import diagnose
from billfish.errors import UserError
from billfish.models.linear import QuantLinear
from billfish.schemes import SCHEMES
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.dialects.compressed import CompressedTensors

HERE = Path(__file__).parent
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module", autouse=True)
def registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCHEMES, toy.FAMILY.scheme.name, toy.FAMILY)
        yield


def command(*arguments):
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def made(registered, tmp_path_factory):
    """The source, and what `quantize` makes of it."""
    folder = tmp_path_factory.mktemp("seam")
    source = write_checkpoint(folder / "source")
    asked = (source, "--scheme", "w8f", "--method", "rtn", "--set", "margin=2")
    planned = command("plan", *asked)
    report = command("quantize", *asked, "--output", folder / "out")
    assert planned["scheme"] == report["scheme"] == {"name": "w8f", "margin": 2}
    shards = (folder / "out").glob("*.safetensors")
    assert planned["totals"]["bytes_after"] == pytest.approx(
        sum(shard.stat().st_size for shard in shards), rel=0.1
    )
    return folder


def test_commands_know_it(made):
    out = made / "out"
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "billfish" and config["format_version"] == 1
    found = command("inspect", out)
    assert found["schemes"] == [{"name": "w8f", "margin": 2, "count": 21}]
    assert found["dialect"] == "billfish" and found["packed_linears"] == 21
    shown = CliRunner().invoke(app, ["inspect", str(out)], env={"COLUMNS": "200"}).stdout
    assert "w8f 8 bit float" in " ".join(shown.split())
    assert command("verify", out)["ok"]
    scores = command("eval", out, "--baseline", made / "source", "--limit", 1, "--seqlen", 64)
    assert scores["tasks"][0]["kl"]["value"] < 0.01
    assert 1 <= command("generate", out, "--prompt", PROMPT, "--max-tokens", 8)["tokens"] <= 8
    with pytest.raises(UserError, match="is made by rtn"):
        command("plan", made / "source", "--scheme", "w8f")
    with pytest.raises(UserError, match="w8f has no group_size"):
        command("plan", made / "source", "--scheme", "w8f", "--group-size", 32)
    with pytest.raises(UserError, match=r"'w9'.*known are w4a16, w2416, w4ax, w4a16_24, w8f"):
        command("plan", made / "source", "--scheme", "w9")


def test_verify_names_what_is_bad(made, tmp_path):
    config = json.loads((made / "out" / "config.json").read_text())
    for change, told in (
        ({"format_version": 2}, "format_version 2; this Billfish reads 1"),
        ({"schemes": {"0": {"name": "w9"}}}, "scheme 'w9': known are"),
        ({"schemes": {"0": {"name": "w8f", "colour": 1}}}, "do not fit it"),
        ({"schemes": {"0": {"name": "w8f", "margin": True}}}, "do not fit it"),
        ({"schemes": {"0": {"name": "w4a16", "symmetric": "no"}}}, "do not fit it"),
        ({"linear": "7"}, "has the scheme '7'; known are 0"),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for path in (made / "out").iterdir():
            (folder / path.name).symlink_to(path)
        (folder / "config.json").unlink()
        (folder / "billfish_manifest.json").unlink(missing_ok=True)
        changed = {**config, "quantization_config": {**config["quantization_config"], **change}}
        (folder / "config.json").write_text(json.dumps(changed))
        done = CliRunner().invoke(app, ["verify", str(folder), "--json"])
        assert done.exit_code == 1 and told in done.stdout, done.stdout
        with pytest.raises(UserError, match=re.escape(told)):
            billfish.load(folder)


def test_schemes_of_two_families_are_written_in_our_own_dialect():
    mixed = {"a": W4A16(4, 32), "b": toy.W8F(), "c": W4A16(4, 32)}
    writer = dialect_of(mixed.values())
    assert writer is Own and dialect_of([mixed["a"]]) is CompressedTensors
    read = read_dialect(json.loads(json.dumps(writer.config(mixed, ["d"]))))
    assert {name: read.scheme(name) for name in "abcd"} == {**mixed, "d": None}


def test_it_runs_in_transformers_and_is_saved_as_it_was(made, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(made / "out", dtype=torch.float32)
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    assert len(layers) == 21 and {layer.op.name for layer in layers} == {"cpu"}
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        logits = model(ids).logits
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32
    )
    with torch.no_grad():
        assert torch.equal(again(ids).logits, logits)


def test_the_engine_runs_it_and_makes_inputs_once(made):
    """q, k and v take one x, gate and up another: what their op takes is made once for each."""
    llm = billfish.LLM(made / "out", dtype="float32", device="cpu", max_model_len=64)
    toy.Rounded.count = 0
    (answer,) = llm.generate(["A"], billfish.SamplingParams(max_tokens=4, temperature=0))
    assert len(answer.outputs[0].token_ids) == 4
    passes, blocks = 4, 3
    assert toy.Rounded.count == passes * blocks * 4  # q k v, o, gate up, down
    plain, tokenizer = billfish.load(made / "out", dtype="float32")
    ids = tokenizer("A", return_tensors="pt").input_ids
    greedy = plain.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    assert greedy.tolist() == list(answer.outputs[0].token_ids)


def test_benchmarks_and_doctor_take_it():
    request = KernelRequest(parse_shapes("128x64"), (1, 2), scheme="w8f", op="cpu", modes=("pdl",))
    result = KernelBench(request, FakeCard(), RULES).measure()
    assert {point["op"] for point in result["points"]} == {"cpu"}
    assert all(point["error"] is None for point in result["points"])
    assert all(finding.status in ("ok", "note", "problem") for finding in diagnose())


def test_the_tests_of_all_schemes_take_it():
    files = ("test_every.py", "test_refusals.py", "test_quant_linear.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [
        "-p",
        "register_toy",
        "-m",
        "not gpu",
        "-k",
        "W8F or toy",
        *(str(HERE / file) for file in files),
    ]
    paths = {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **paths}
    )
    assert done.returncode == 0 and done.stdout.count(".") > 80, done.stdout[-3000:]
