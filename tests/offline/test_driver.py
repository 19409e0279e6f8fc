"""The driver: every architecture ends in a checkpoint that runs, a stopped job ends in the same
bytes, and every kind of wrong input gets one clear error and leaves nothing half-written."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from jobs import contents, request, stop_before_the_end
from safetensors.torch import load_file, save_file
from thorough import also, some
from tiny import ARCHITECTURES, write_checkpoint
from typer.testing import CliRunner

import billfish
from billfish.checkpoints import write as files
from billfish.checkpoints.convert import convert
from billfish.checkpoints.inspect import inspect
from billfish.cli.app import app
from billfish.errors import UserError
from billfish.evaluate.run import EvalRequest, evaluate
from billfish.models.linear import QuantLinear
from billfish.models.load import load
from billfish.offline import driver
from billfish.offline.driver import JOB, quantize
from billfish.offline.plan import plan
from billfish.offline.request import QuantizeRequest
from billfish.offline.streaming import BackgroundWriter
from billfish.schemes.w4a16 import W4A16


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        *((name, ("gptq", "awq")[place % 2]) for place, name in enumerate(ARCHITECTURES)),
        ("LlamaForCausalLM", "rtn"),
        *(also(name, ("awq", "gptq")[place % 2]) for place, name in enumerate(ARCHITECTURES)),
        *(also(name, "rtn") for name in ARCHITECTURES if name != "LlamaForCausalLM"),
    ],
)
def test_every_architecture_becomes_a_checkpoint_that_runs(tmp_path, text, architecture, method):
    source = write_checkpoint(tmp_path / "source", architecture)
    scheme = W4A16(bits=8, group_size=32, symmetric=False)
    wanted = request(
        source, tmp_path / "out", text, method=method, scheme=scheme, stored_dtype=torch.float32
    )
    report = quantize(wanted)
    assert not (tmp_path / "out" / JOB).exists()
    model_class = getattr(transformers, architecture)
    original = model_class.from_pretrained(source, dtype=torch.float32).eval()
    packed = model_class.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    layers = [m for m in packed.modules() if isinstance(m, QuantLinear)]
    assert len(layers) == len(report["layers"]) > 0
    ids = torch.randint(1, 100, (1, 30))
    with torch.inference_mode():
        expected, got = original(ids)[0], packed(ids)[0]
    # 8 bits, fp32 for the rest: a folded scale or a wrong zero would be off by far more
    error = (got - expected).norm() / expected.norm()
    assert error < 0.05, error


def test_gptq_beats_awq_beats_rtn_on_the_calibration_inputs(tmp_path, llama, text):
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    seen = [json.loads(row)["text"] for row in Path(text).read_text().splitlines()]
    inputs = [tokenizer(row, return_tensors="pt").input_ids[:, :64] for row in seen]
    original = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    errors = {}
    for method in ("rtn", "awq", "gptq"):
        out = tmp_path / method
        wanted = request(llama, out, text, method=method, scheme=W4A16(3, 32, False))
        quantize(replace(wanted, nsamples=24))
        packed = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        with torch.inference_mode():
            errors[method] = sum(
                float((packed(ids).logits - original(ids).logits).square().sum()) for ids in inputs
            )
    assert errors["gptq"] < errors["rtn"] and errors["awq"] < errors["rtn"], errors


def test_same_request_same_bytes_and_a_full_checkpoint(tmp_path, llama, text):
    for name in ("a", "b"):
        quantize(request(llama, tmp_path / name, text))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    names = set(contents(tmp_path / "a"))
    assert {"config.json", "tokenizer.json", "generation_config.json", files.MANIFEST} <= names
    assert files.check_manifest(tmp_path / "a") == []
    quantize(request(llama, tmp_path / "c", text, seed=1))
    assert contents(tmp_path / "a") != contents(tmp_path / "c")


@pytest.mark.parametrize("method", some(["rtn", "gptq"], 1))
def test_a_job_stopped_at_any_write_ends_in_the_same_bytes(
    tmp_path, llama, text, monkeypatch, method
):
    """Fails before and after each write in turn, as a crash there would, then runs again."""
    whole = request(llama, tmp_path / "whole", text, method=method)
    real, writes = files.write_atomically, []

    def count(path, write):
        writes.append(path.name)
        real(path, write)

    monkeypatch.setattr(files, "write_atomically", count)
    quantize(whole)
    expected = contents(tmp_path / "whole")
    assert len(writes) > 10
    for stop in range(1, len(writes)):
        left = [stop]

        def fail(path, write, left=left):
            left[0] -= 1
            if left[0] == 0:  # dies with the temporary file half there
                path.with_name(path.name + files.TEMPORARY).write_bytes(b"half")
                raise KeyboardInterrupt
            real(path, write)

        out = request(llama, tmp_path / f"stopped{stop}", text, method=method)
        monkeypatch.setattr(files, "write_atomically", fail)
        with pytest.raises(KeyboardInterrupt):
            quantize(out)
        monkeypatch.setattr(files, "write_atomically", real)
        ready = sum(1 for _ in (out.output / JOB).glob("block-*.json"))
        seen = []
        quantize(out, on_progress=lambda told, seen=seen: seen.append(told.block))
        assert contents(out.output) == expected, writes[stop - 1]
        assert min(seen, default=ready) == ready  # finished blocks are not done again


@pytest.mark.parametrize(("saved", "stop"), [((), 2), ((1,), 3), ((1, 3), 4)])
def test_a_job_that_saves_few_activations_ends_in_the_same_bytes(
    tmp_path, text, monkeypatch, saved, stop
):
    """As on a GPU: a thread writes, and activations are saved after some blocks only."""
    source = write_checkpoint(tmp_path / "source", num_hidden_layers=6)
    quantize(request(source, tmp_path / "whole", text))

    class Seldom(BackgroundWriter):
        def __init__(self, synchronous):
            super().__init__(synchronous=False)
            self.blocks = iter(range(6))

        accepts_large = property(lambda self: next(self.blocks) in saved)

    def interrupt(told):
        if told.linear is None and told.block == stop:
            raise KeyboardInterrupt

    stopped = request(source, tmp_path / "stopped", text)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "BackgroundWriter", Seldom)
        with pytest.raises(KeyboardInterrupt):
            quantize(stopped, on_progress=interrupt)
    seen = []
    quantize(stopped, on_progress=lambda told: seen.append(told.block))
    assert seen[0] == max((block + 1 for block in saved), default=0)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def start_cli(*args):
    command = [sys.executable, "-m", "billfish", *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, env=environment)


def test_sigterm_then_kill_9_then_the_same_command(tmp_path, text):
    """Processes are stopped; what runs to its end runs here, and a process starts in 6 s."""
    source = write_checkpoint(tmp_path / "source", num_hidden_layers=6)
    arguments = ["--group-size", 32, "--data", text, "--nsamples", 8, "--seqlen", 64, "--no-check"]
    whole, command = (
        ["quantize", source, "--output", tmp_path / name, *arguments]
        for name in ("whole", "stopped")
    )
    for block, sent in ((0, signal.SIGTERM), (3, signal.SIGKILL)):
        job = start_cli(*command)
        while not (tmp_path / "stopped" / JOB / f"block-{block:05d}.json").exists():
            assert job.poll() is None, job.stderr.read()
            time.sleep(0.001)
        job.send_signal(sent)
        _, told = job.communicate(timeout=60)
        if sent == signal.SIGTERM:
            assert job.returncode == 75 and "same command" in told
        assert not (tmp_path / "stopped" / files.MANIFEST).exists()
    for each in (whole, [*command, "--resume"]):
        done = CliRunner().invoke(app, list(map(str, each)))
        assert done.exit_code == 0, done.output
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


# -- what is already there


def test_an_existing_directory_is_refused_without_resume_or_fresh(tmp_path, llama, text):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="--fresh"):
        quantize(request(llama, out, text))
    with pytest.raises(UserError, match="will not delete"):
        quantize(request(llama, out, text), resume=False)
    assert contents(out) == {"precious.txt": b"mine"}


def test_a_finished_directory_is_kept_resumed_or_replaced(tmp_path, llama, text):
    out = tmp_path / "out"
    quantize(request(llama, out, text, method="rtn"))
    before = contents(out)
    quantize(request(llama, out, text, method="rtn"))
    assert contents(out) == before
    with pytest.raises(UserError, match="method was rtn, is gptq"):
        quantize(request(llama, out, text))
    assert contents(out) == before
    quantize(request(llama, out, text, method="rtn", scheme=W4A16(8, 32)), resume=False)
    assert contents(out) != before


def test_fresh_stopped_while_it_deletes_can_go_on(tmp_path, llama, text, monkeypatch):
    wanted = request(llama, tmp_path / "out", text, method="rtn")
    quantize(wanted)
    real = Path.unlink
    for count in range(1, len(contents(wanted.output))):
        left = [count]

        def stop(path, missing_ok=False, left=left):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            real(path, missing_ok)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "unlink", stop)
            quantize(wanted, resume=False)
        quantize(wanted, resume=False)
    assert files.check_manifest(wanted.output) == []


def test_a_text_that_cannot_be_read_leaves_nothing(tmp_path, llama, text):
    with pytest.raises(UserError, match="no such calibration"):
        quantize(request(llama, tmp_path / "out", "no.txt"))
    quantize(request(llama, tmp_path / "out", text))


@pytest.mark.parametrize("command", ["inspect", "generate", "eval", "engine", "convert", "plan"])
def test_an_unfinished_job_is_called_so(tmp_path, llama, text, monkeypatch, command):
    out = tmp_path / "out"
    stop_before_the_end(monkeypatch, request(llama, out, text, method="rtn"))
    doors = {
        "inspect": lambda: inspect(out),
        "generate": lambda: load(out),
        "eval": lambda: evaluate(EvalRequest(out)),
        "engine": lambda: billfish.LLM(out),
        "convert": lambda: convert(out, tmp_path / "converted", "gptq"),
        "plan": lambda: plan(QuantizeRequest(out, tmp_path / "again")),
    }
    with pytest.raises(UserError, match=r"unfinished job of `billfish quantize`, 3 .*same command"):
        doors[command]()


def test_an_unfinished_job_of_another_kind_is_not_mixed(tmp_path, llama, text, monkeypatch):
    stop_before_the_end(monkeypatch, request(llama, tmp_path / "out", text))
    with pytest.raises(UserError, match="seed was 0, is 7"):
        quantize(request(llama, tmp_path / "out", text, seed=7))


def test_edited_text_or_other_weights_are_another_job(tmp_path, llama, text, monkeypatch):
    stop_before_the_end(monkeypatch, request(llama, tmp_path / "out", text))
    original = Path(text).read_text()
    Path(text).write_text(original.replace("a", "b"))
    with pytest.raises(UserError, match="data was"):
        quantize(request(llama, tmp_path / "out", text))
    Path(text).write_text(original)
    tensors = load_file(llama / "model.safetensors")
    finetuned = {name: tensor + 0.01 for name, tensor in tensors.items()}
    save_file(finetuned, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="model_samples_sha256 was"):
        quantize(request(llama, tmp_path / "out", text))


# -- wrong input


def test_values_too_large_for_fp16_are_named(tmp_path, llama, text):
    tensors = load_file(llama / "model.safetensors")
    tensors["model.norm.weight"][2] = 1e6
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight holds inf at \[2\] once it is cast"):
        quantize(request(llama, tmp_path / "out", text, stored_dtype=torch.float16))


def test_errors_name_what_is_wrong_and_write_nothing(tmp_path, llama, text):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="no such directory"):
        quantize(request(tmp_path / "nowhere", out, text))
    with pytest.raises(UserError, match=r"48 does not divide k = 64.*16, 32, 64"):
        quantize(request(llama, out, text, scheme=W4A16(4, 48)))
    with pytest.raises(UserError, match="known are gptq, awq, rtn"):
        request(llama, out, text, method="magic")
    assert not out.exists()


def test_groups_that_fit_only_some_layers_skip_the_others_and_say_so(tmp_path, text):
    source = write_checkpoint(tmp_path / "source", intermediate_size=96)
    wanted = request(source, tmp_path / "out", text, scheme=W4A16(4, 64), allow_skipped=True)
    report = quantize(wanted)
    skipped = report["skipped"]
    assert "20.0% of the weights" in report["warnings"][0]
    assert set(skipped) == {"lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in range(3))}
    assert "does not divide k = 96" in skipped["model.layers.0.mlp.down_proj"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert set(config["quantization_config"]["ignore"]) == set(skipped)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_weights_are_named(tmp_path, llama, text, value):
    tensors = load_file(llama / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"{name} holds {value} at \[3, 5\]"):
        quantize(request(llama, tmp_path / "out", text))


def test_missing_and_truncated_shards_are_found_synchronous(tmp_path, text):
    source = write_checkpoint(tmp_path / "source", shard="100KB")
    shard = sorted(source.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-7])
    with pytest.raises(UserError, match=rf"{shard.name}: truncated"):
        quantize(request(source, tmp_path / "out", text))
    shard.write_bytes(whole[:5])
    with pytest.raises(UserError, match=rf"{shard.name}: truncated or not a safetensors"):
        quantize(request(source, tmp_path / "out", text))
    shard.unlink()
    with pytest.raises(UserError, match=rf"{shard.name}.*missing"):
        quantize(request(source, tmp_path / "out", text))
    assert not (tmp_path / "out").exists()


def test_remote_code_and_pickles_are_refused(tmp_path, llama, text):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "x.Y"}}))
    with pytest.raises(UserError, match="remote code"):
        quantize(request(llama, tmp_path / "out", text))
    (llama / "config.json").write_text(json.dumps(config))
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickles can run code"):
        quantize(request(llama, tmp_path / "out", text))


def test_a_quantized_model_is_not_quantized_again(tmp_path, llama, text):
    quantize(request(llama, tmp_path / "once", text, method="rtn"))
    with pytest.raises(UserError, match="quantized already"):
        quantize(request(tmp_path / "once", tmp_path / "twice", text))


def test_a_full_disk_keeps_what_is_finished(tmp_path, llama, text, monkeypatch):
    real, calls = files.save_file, []

    def full(tensors, path, metadata):
        calls.append(path)
        if len(calls) == 6:
            Path(path).write_bytes(b"some")
            raise RuntimeError("I/O error: No space left on device (os error 28)")
        real(tensors, path, metadata)

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        quantize(request(llama, tmp_path / "out", text))
    assert not list((tmp_path / "out").rglob("*" + files.TEMPORARY))
    for shard in (tmp_path / "out").glob("*.safetensors"):
        load_file(shard)  # whole
    monkeypatch.setattr(files, "save_file", real)
    quantize(request(llama, tmp_path / "out", text))
    quantize(request(llama, tmp_path / "whole", text))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_hessian_that_cannot_be_factored_is_reported(tmp_path, llama, text, monkeypatch):
    from billfish.solvers import gptq

    monkeypatch.setattr(gptq, "inverse_factor", lambda hessian: None)
    report = quantize(request(llama, tmp_path / "out", text))
    assert all("rounded to nearest" in layer["note"] for layer in report["layers"])
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
