"""`quantize --kv kv4`: the file that it adds to a checkpoint, and who reads it."""

import json

import pytest
from tiny import write_checkpoint
from typer.testing import CliRunner

from billfish import LLM, SamplingParams
from billfish.checkpoints import write as files
from billfish.checkpoints.verify import verify
from billfish.cli.app import app
from billfish.engine.kv import stored
from billfish.errors import UserError
from billfish.offline import driver, kv
from billfish.offline.request import QuantizeRequest
from billfish.schemes.w4a16 import W4A16

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    room = tmp_path_factory.mktemp("kv")
    source = write_checkpoint(room / "source")
    text = room / "text.txt"
    text.write_text("What swims at the speed that memory allows? " * 400)
    done = CliRunner().invoke(
        app,
        [
            "quantize",
            str(source),
            "-o",
            str(room / "packed"),
            "--method",
            "rtn",
            "--group-size",
            "32",
            "--kv",
            "kv4",
            "--data",
            str(text),
            "--json",
        ],
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["kv"]["file"] == stored.KV_FILE and told["kv"]["tokens"] > 500
    return room / "packed"


def test_the_checkpoint_is_whole(packed):
    assert verify(packed)["ok"]
    (packed / stored.KV_FILE).rename(packed / "elsewhere")
    try:
        assert not verify(packed)["ok"]  # it is in the manifest
    finally:
        (packed / "elsewhere").rename(packed / stored.KV_FILE)


def test_kv4_takes_what_is_stored(packed, monkeypatch):
    def refuse(*_):
        raise AssertionError("calibrated again")

    monkeypatch.setattr(stored, "find_rotation", refuse)
    with LLM(packed, kv="kv4") as made:
        (output,) = made.generate(["a billfish"], GREEDY)
        assert len(output.outputs[0].token_ids) == 12


def test_channels_have_their_ranges(packed, tmp_path):
    with LLM(packed, kv="kv4-channel") as made:
        near = made.score(["What swims at the speed of memory?"])[0]
    with LLM(packed) as made:
        exact = made.score(["What swims at the speed of memory?"])[0]
    assert max(abs(a - b) for a, b in zip(near, exact, strict=True)) < 0.5
    with pytest.raises(UserError, match="quantize --kv kv4"):
        LLM(write_checkpoint(tmp_path / "plain"), kv="kv4-channel")


@pytest.mark.parametrize("stage", ["calibrate", "write", "clean"])
def test_stopped_in_any_stage_the_same_request_goes_on(packed, tmp_path, monkeypatch, stage):
    """Fails in the calibration of K and V, then before each write behind it, then in the clean-up,
    as a kill there would; ends in the bytes of a job that was never stopped."""
    data = packed.parent / "text.txt"
    wanted = QuantizeRequest(
        packed.parent / "source", tmp_path / "out", W4A16(4, 32), "rtn", str(data), kv="kv4"
    )

    def stop(*_, **__):
        raise KeyboardInterrupt

    def stop_at(place):
        def write(path, fill):
            if path.name == place:
                path.with_name(path.name + files.TEMPORARY).write_bytes(b"half")
                raise KeyboardInterrupt
            real(path, fill)

        return write

    real = files.write_atomically
    places = [files.INDEX, "config.json", stored.KV_FILE, driver.REPORT, files.MANIFEST]
    patches = {
        "calibrate": [(kv, "find_rotation", stop)],
        "write": [(files, "write_atomically", stop_at(place)) for place in places],
        "clean": [(driver.shutil, "rmtree", stop)],
    }
    for module, name, replaced in patches[stage]:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, name, replaced)
            driver.quantize(wanted)
        if stage != "clean":
            assert not (wanted.output / files.MANIFEST).exists()
    result = driver.quantize(wanted)
    assert result["kv"]["file"] == stored.KV_FILE
    assert contents(wanted.output) == contents(packed)


@pytest.mark.parametrize(
    ("architecture", "data", "message"),
    [
        ("OPTForCausalLM", "sample", "the engine does not run this OPT"),
        ("LlamaForCausalLM", "no.txt", "no such calibration"),
    ],
)
def test_what_would_stop_it_is_told_before_any_work(tmp_path, architecture, data, message):
    source = write_checkpoint(tmp_path / "source", architecture)
    wanted = QuantizeRequest(source, tmp_path / "out", method="rtn", data=data, kv="kv4")
    with pytest.raises(UserError, match=message):
        driver.quantize(wanted)
    assert not wanted.output.exists()


def test_other_formats_need_none(tmp_path):
    done = CliRunner().invoke(
        app, ["quantize", str(tmp_path), "-o", str(tmp_path / "x"), "--kv", "kv8"]
    )
    assert done.exit_code != 0
