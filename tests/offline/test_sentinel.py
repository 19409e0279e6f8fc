"""The sentinel: a layer that is broken on purpose is found and named, a healthy model of any scheme
is not called broken, and a job that is stopped while it looks goes on."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from jobs import contents
from jobs import request as job
from thorough import some
from tiny import ARCHITECTURES, write_checkpoint
from typer.testing import CliRunner

from billfish.checkpoints import write as files
from billfish.cli.app import app
from billfish.models.load import load
from billfish.offline import block as solving
from billfish.offline import driver, sentinel
from billfish.offline.driver import JOB, quantize
from billfish.offline.verdict import Answers, Block, faults, verdict
from billfish.schemes import SCHEMES
from billfish.schemes.registry import quantizer, with_options
from billfish.schemes.w4a16 import W4A16

BROKEN = 1  # block
request = partial(job, check=True)
# The fewest bits of w4a16 and its usual ones, the usual ones of all others, and 4-bit activations.
WRITTEN = [
    W4A16(2, 32, False),
    *map(with_options, SCHEMES),
    with_options("w4ax", activations="fmpq", symmetric=False),
]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Takes the groups of every scheme."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    return write_checkpoint(tmp_path_factory.mktemp("wide") / "model", **sizes)


def broken_quantizer(monkeypatch, path, change):
    """From now on the stored tensors of one linear of block BROKEN are changed as they are made."""
    collect = solving.BlockJob._quantize

    def quantize_badly(self, paths, weight, statistics, on_linear):
        def hand_on(each, solved):
            if self.index == BROKEN and each == path:
                made = solved.tensors()
                scale = made["weight_scale"]
                wrong = {**made, "weight_scale": change(scale).to(scale.dtype)}
                object.__setattr__(solved, "tensors", lambda: wrong)
            on_linear(each, solved)

        collect(self, paths, weight, statistics, hand_on)

    monkeypatch.setattr(solving.BlockJob, "_quantize", quantize_badly)


@pytest.mark.parametrize("path", ["mlp.down_proj", "mlp.gate_proj", "self_attn.v_proj"])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_broken_layer_is_named(tmp_path, llama, text, monkeypatch, path, method):
    broken_quantizer(monkeypatch, path, lambda scale: 50 * scale)
    check = quantize(request(llama, tmp_path / "out", text, method=method))["check"]
    assert check["faults"] == [BROKEN]
    assert f"model.layers.{BROKEN} begins to fail" in check["problem"]
    assert check["blocks"][BROKEN]["own_error"] > 10
    others = [block["own_error"] for block in check["blocks"] if block["block"] != BROKEN]
    assert max(others) < 0.3
    stored = json.loads((tmp_path / "out" / driver.REPORT).read_text())
    assert stored["check"] == check


def test_a_fault_that_the_answers_hide_stands_out(tmp_path, llama, text, monkeypatch):
    """Half of a layer's outputs are lost."""
    broken_quantizer(monkeypatch, "mlp.down_proj", lambda scale: scale * (scale > scale.median()))
    check = quantize(request(llama, tmp_path / "out", text, scheme=W4A16(8, 32)))["check"]
    assert check["faults"] == [BROKEN] and "it stands out" in check["problem"]
    assert check["kl"] < check["kl_uniform"] and "noise" not in check["problem"]


@pytest.mark.parametrize("scheme", WRITTEN, ids=str)
def test_healthy_models_are_not_called_broken(tmp_path, wide, text, scheme):
    check = quantize(request(wide, tmp_path / "out", text, scheme=scheme))["check"]
    assert check["problem"] is None and check["faults"] == [], check
    assert check["experts"] is None
    assert 0 <= check["kl"] < check["kl_uniform"]
    assert 0 < check["greedy_same"] <= check["greedy_tokens"] == 4 * 32


@pytest.mark.parametrize("architecture", some(ARCHITECTURES, 0, 4, 5, 8))
def test_what_it_measures_is_what_the_models_compute(tmp_path, text, architecture):
    """KL and greedy tokens again, from both models as they are loaded."""
    source = write_checkpoint(tmp_path / "source", architecture)
    wanted = request(source, tmp_path / "out", text, method="rtn", dtype=torch.float32)
    check = quantize(wanted)["check"]
    assert check["problem"] is None and check["text"] == "sample"
    assert len(check["blocks"]) == 3 and all(0 < b["own_error"] < 1 for b in check["blocks"])
    if architecture == "BertModel":
        assert check["kl"] is None and check["greedy_tokens"] is None
        return
    task = driver.Task(wanted, driver.Checkpoint(source))
    ids = sentinel.prompts(task).ids
    both = []
    for path in (source, tmp_path / "out"):
        model, _ = load(path, torch.float32)
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[:, ids.shape[1] // 2 :]
        both.append(logits.float().log_softmax(-1).flatten(0, 1))
    again = Answers.of(*both)
    assert check["kl"] == pytest.approx(again.kl, rel=0.02)
    assert check["kl_uniform"] == pytest.approx(again.uniform, rel=1e-3)
    assert abs(check["greedy_same"] - again.same) <= 1


def test_activations_are_rounded_as_the_scheme_says(tmp_path, wide, text):
    """w4ax: the states of the sentinel are those of the packed model, whose op rounds them."""
    scheme = WRITTEN[-1]
    wanted = request(wide, tmp_path / "out", text, scheme=scheme, dtype=torch.float32)
    check = quantize(wanted)["check"]
    task = driver.Task(wanted, driver.Checkpoint(wide))
    ids, both = sentinel.prompts(task).ids, []
    for path in (wide, tmp_path / "out"):
        model, _ = load(path, torch.float32)
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[:, ids.shape[1] // 2 :]
        both.append(logits.float().log_softmax(-1).flatten(0, 1))
    assert check["kl"] == pytest.approx(Answers.of(*both).kl, rel=0.05)
    assert hasattr(quantizer(scheme), "input_rounding")


def test_a_damaged_shard_is_seen(tmp_path, llama, text, monkeypatch):
    """It reads what was written: a norm outside the blocks that is wrong on disk alone."""
    real = driver.Job._write_outside

    def wrong(self):
        real(self)
        tensors = driver.load_file(self._shard(0))
        tensors["model.norm.weight"] *= -30
        files.write_shard(self._shard(0), tensors)

    monkeypatch.setattr(driver.Job, "_write_outside", wrong)
    check = quantize(request(llama, tmp_path / "out", text))["check"]
    assert "writes noise" in check["problem"] and "No block stands out" in check["problem"]
    assert check["faults"] == []


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_a_model_without_a_tokenizer_is_checked_on_random_tokens(tmp_path, text, architecture):
    """For Qwen2 transformers makes an empty tokenizer of no files."""
    path = write_checkpoint(tmp_path / "model", architecture)
    for file in path.glob("tokenizer*"):
        file.unlink()
    report = quantize(request(path, tmp_path / "out", text, method="rtn"))
    assert report["check"]["text"] == "random tokens" and report["check"]["problem"] is None


@pytest.mark.parametrize("stop", [1, 3])
def test_a_job_stopped_in_the_sentinel_goes_on(tmp_path, llama, text, stop):
    whole, stopped = (request(llama, tmp_path / name, text) for name in ("whole", "stopped"))
    quantize(whole)

    def interrupt(told):
        if told.checked == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(stopped, on_progress=interrupt)
    assert not (stopped.output / files.MANIFEST).exists() and (stopped.output / JOB).exists()
    seen = []
    quantize(stopped, on_progress=seen.append)
    assert all(told.linear is None for told in seen) and seen[-1].checked == 3
    assert contents(stopped.output) == contents(whole.output)


def test_no_check_ends_a_stopped_job_and_changes_no_tensor(tmp_path, llama, text):
    whole, stopped = (request(llama, tmp_path / name, text) for name in ("whole", "stopped"))
    quantize(whole)

    def interrupt(told):
        if told.checked is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(stopped, on_progress=interrupt)
    report = quantize(replace(stopped, check=False), on_progress=interrupt)
    assert report["check"] is None
    one, other = contents(stopped.output), contents(whole.output)
    changed = {name for name in one if one[name] != other[name]}
    assert changed == {driver.REPORT, files.MANIFEST}


def test_the_command_says_it_loudly(tmp_path, llama, text, monkeypatch):
    arguments = ["--group-size", 32, "--data", text, "--nsamples", 8, "--seqlen", 64]
    run = lambda name, *more: CliRunner().invoke(  # noqa: E731
        app, list(map(str, ["quantize", llama, "--output", tmp_path / name, *arguments, *more]))
    )
    healthy = run("healthy")
    assert healthy.exit_code == 0 and "BROKEN" not in healthy.output
    assert "greedy tokens as the original" in healthy.output
    broken_quantizer(monkeypatch, "mlp.down_proj", lambda scale: 50 * scale)
    broken = run("broken")
    assert "BROKEN" in broken.output and f"model.layers.{BROKEN} begins" in broken.output
    quiet = run("quiet", "--no-check")
    assert quiet.exit_code == 0 and "BROKEN" not in quiet.output and "not run" in quiet.output


# -- the rule


def blocks(*errors):
    return [Block(i, error, error) for i, error in enumerate(errors)]


@pytest.mark.parametrize(
    ("errors", "found"),
    [
        ((0.02, 0.03, 0.02, 0.03), []),
        ((0.02, 0.03, 0.42, 0.03), [2]),
        ((0.001, 0.001, 0.03, 0.001), []),  # thirty times the others, and small
        ((0.9, 1.4, 1.2, 1.0), []),  # 2 bits, rounded: no block is to blame
        ((0.9, 1.4, 2.0, math.inf), [2, 3]),
        ((math.nan, 0.1, 0.1), [0]),
        ((math.nan, math.nan), [0, 1]),
    ],
)
def test_faults(errors, found):
    assert [block.index for block in faults(blocks(*errors))] == found


def test_answers_worse_than_equally_likely_tokens():
    torch.manual_seed(0)
    wanted = torch.randn(64, 50).mul(3).log_softmax(-1)
    likely = torch.zeros(64, 50).log_softmax(-1)
    at_rest = Answers.of(wanted, wanted)
    assert at_rest.kl == pytest.approx(0, abs=1e-6) and at_rest.same == at_rest.tokens == 64
    assert Answers.of(wanted, likely).kl == pytest.approx(at_rest.uniform, rel=1e-5)
    assert verdict(blocks(0.1, 0.1), at_rest, "h") is None
    other = Answers.of(wanted, torch.randn(64, 50).mul(3).log_softmax(-1))
    assert "writes noise" in verdict(blocks(0.1, 0.1), other, "h")
    lost = Answers.of(wanted, wanted * math.nan)
    assert "not finite" in verdict(blocks(0.1, 0.1), lost, "h") and lost.figures()["kl"] is None
