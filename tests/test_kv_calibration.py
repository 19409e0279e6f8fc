"""`quantize --kv kv4`: what is stored beside a checkpoint, and who reads it."""

import json

import pytest
from tiny import write_checkpoint
from typer.testing import CliRunner

from billfish import LLM, SamplingParams
from billfish.cli import app
from billfish.engine import calibrated
from billfish.errors import UserError
from billfish.inspection import verify

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    room = tmp_path_factory.mktemp("kv")
    source = write_checkpoint(room / "source")
    text = room / "text.txt"
    text.write_text("What swims at the speed that memory allows? " * 400)
    done = CliRunner().invoke(
        app, ["quantize", str(source), "-o", str(room / "packed"), "--method", "rtn",
              "--group-size", "32", "--kv", "kv4", "--data", str(text), "--json"]
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["kv"]["file"] == calibrated.KV_FILE and told["kv"]["tokens"] > 500
    return room / "packed"


def test_the_checkpoint_is_whole(packed):
    assert verify(packed)["ok"]
    (packed / calibrated.KV_FILE).rename(packed / "elsewhere")
    try:
        assert not verify(packed)["ok"]  # it is in the manifest
    finally:
        (packed / "elsewhere").rename(packed / calibrated.KV_FILE)


def test_kv4_takes_what_is_stored(packed, monkeypatch):
    def refuse(*_):
        raise AssertionError("calibrated again")

    monkeypatch.setattr(calibrated, "calibrate", refuse)
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


def test_other_formats_need_none(tmp_path):
    done = CliRunner().invoke(
        app, ["quantize", str(tmp_path), "-o", str(tmp_path / "x"), "--kv", "kv8"]
    )
    assert done.exit_code != 0
