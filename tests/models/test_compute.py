"""The compute dtype on a CPU: how it is chosen, and that every way to run a model uses it.

The tests observe every matrix product in every thread. On a CPU without bf16 instructions a single
product in 16 bits costs more than all the others together.
"""

import json
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from jobs import contents, stop_before_the_end
from jobs import request as job
from safetensors.torch import load_file
from tiny import GROUPED, write_checkpoint
from tiny_checkpoint import all_tensors, edit_json
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from billfish import LLM, SamplingParams
from billfish.bench import generation, local_server
from billfish.bench.generate import GenerateBench
from billfish.bench.variants import GenerateRequest as Bench
from billfish.bench.variants import parse_variants, usual
from billfish.cli import doctor
from billfish.cli.app import app
from billfish.engine.single import generate
from billfish.errors import UserError
from billfish.evaluate.run import EvalRequest, evaluate
from billfish.integrations import transformers as integration
from billfish.models import compute
from billfish.models.compute import VARIABLE, compute_dtype, cpu_type
from billfish.models.generate import Sampling
from billfish.models.load import load
from billfish.offline import costs
from billfish.offline.driver import quantize
from billfish.server import run as server

CPU = torch.device("cpu")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SHORT = {"batches": (2,), "input": 6, "output": 5, "rounds": 1, "group_size": 32}


@pytest.fixture
def unset(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    compute._measured.cache_clear()
    yield
    compute._measured.cache_clear()


@pytest.fixture
def in_fp32(monkeypatch):
    monkeypatch.setenv(VARIABLE, "float32")


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A model that is stored in bf16, as models are."""
    return stored_in(BF16, tmp_path_factory.mktemp("half"))


def stored_in(dtype, folder):
    source = write_checkpoint(folder / "source")
    AutoModelForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(source)
    return source


@pytest.fixture(scope="module")
def packed(half):
    sample = job(half, half.parent / "packed", "sample", method="rtn")
    quantize(sample)
    return sample.output


# -- how it is chosen


def times(monkeypatch, bf16, first=None):
    """A CPU that takes a second in fp32."""
    asked = []

    def seconds(dtype):
        asked.append(dtype)
        return 1.0 if dtype == FP32 else first if first and len(asked) == 2 else bf16

    monkeypatch.setattr(compute, "_seconds", seconds)
    return asked


@pytest.mark.parametrize(
    ("bf16", "chosen"), [(0.1, BF16), (0.8, BF16), (0.9, FP32), (1.0, FP32), (4.0, FP32)]
)
def test_bf16_must_be_clearly_faster(unset, monkeypatch, bf16, chosen):
    times(monkeypatch, bf16)
    found = cpu_type()
    assert found.dtype == chosen and found.name == str(chosen)[6:]
    assert f"{bf16:.2g} times as long" in found.why and f"{bf16 * 1e3:.2f} ms" in found.why


def test_a_hopeless_type_is_not_tried_again_and_the_first_call_is_no_measure(unset, monkeypatch):
    asked = times(monkeypatch, 280.0)
    assert cpu_type().dtype == FP32 and len(asked) == 4
    compute._measured.cache_clear()
    times(monkeypatch, 0.2, first=100.0)  # kernels are made in it
    assert cpu_type().dtype == BF16


@pytest.fixture
def onednn():
    """PyTorch turns it off for good at the first product in bf16 of an Arm that has none."""
    with torch.backends.mkldnn.flags(enabled=True, allow_tf32=None):
        yield


def test_it_is_measured_once_for_each_state_of_onednn(unset, onednn, monkeypatch):
    asked = times(monkeypatch, 0.5)
    assert cpu_type() is cpu_type() and len(asked) == 2 * compute.ROUNDS
    times(monkeypatch, 50.0)
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        assert cpu_type().dtype == FP32
    assert cpu_type().dtype == BF16


def test_the_probe_ends_soon_and_leaves_threads_alone(unset):
    told = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        cpu_type()
        other = threading.Thread(target=lambda: told.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert torch.get_num_threads() == 2 and told == [2]
    finally:
        torch.set_num_threads(before)


def test_the_environment_has_the_last_word(unset, monkeypatch):
    monkeypatch.setattr(compute, "_probe", lambda: pytest.fail("measured in vain"))
    for name in ("float32", "bfloat16"):
        monkeypatch.setenv(VARIABLE, name)
        assert cpu_type().name == name and VARIABLE in cpu_type().why
    for wrong in ("float16", "fp32", "int8"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(UserError, match=rf"{VARIABLE}={wrong}: .*float32 or bfloat16.*unset"):
            cpu_type()


def test_what_is_stored_where_and_asked(monkeypatch):
    for name, fast in (("float32", FP32), ("bfloat16", BF16)):
        monkeypatch.setenv(VARIABLE, name)
        for stored, here in ((FP16, fast), (BF16, fast), (FP32, FP32), (torch.float64, FP32)):
            assert compute_dtype(stored, "cpu") == here
            assert compute_dtype(stored, "cuda:1") == stored
            assert compute_dtype(stored, CPU, "float16") == compute_dtype(stored, CPU, FP16) == FP16
    with pytest.raises(UserError, match="'int4': known are auto, float32"):
        compute_dtype(BF16, "cpu", "int4")


def test_a_config_that_says_nothing(in_fp32, monkeypatch, tmp_path):
    path = stored_in(FP16, tmp_path)
    edit_json(path / "config.json", lambda config: config.pop("dtype"))
    assert load(path)[0].dtype == FP32
    monkeypatch.setenv(VARIABLE, "bfloat16")
    assert load(path)[0].dtype == BF16


# -- who keeps it


class Watch(TorchDispatchMode):
    """Notes every matrix product and the types it is of."""

    words = ("mm", "mv", "dot", "matmul", "linear", "conv")

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(word in func.name() for word in self.words):
            found = {
                x.dtype
                for x in tree_leaves((args, kwargs))
                if isinstance(x, torch.Tensor) and x.device == CPU and x.is_floating_point()
            }
            self.seen.extend((func.name(), dtype) for dtype in found)
        return func(*args, **kwargs or {})


@contextmanager
def watching():
    """This thread and those that it starts."""
    seen, run = [], threading.Thread.run

    def watched(thread):
        with Watch(seen):
            run(thread)

    with pytest.MonkeyPatch.context() as patch, Watch(seen):
        patch.setattr(threading.Thread, "run", watched)
        yield seen


@pytest.fixture
def products():
    """None of the test's may be of 16 bits."""
    with watching() as seen:
        yield
    assert FP32 in {dtype for _, dtype in seen}, "nothing was seen"
    assert not {(name, dtype) for name, dtype in seen if dtype in (BF16, FP16)}


def speak(path, kv):
    with LLM(path, kv=kv, max_num_seqs=4) as made:
        outputs = made.generate(["a billfish", "x", "0123456789" * 5], GREEDY)
        assert [one.outputs[0].error for one in outputs] == [None] * 3
        assert made.engine.decoder.dtype == FP32


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_watch_sees_other_threads(half, monkeypatch, name):
    monkeypatch.setenv(VARIABLE, name)
    with watching() as seen, LLM(half) as made:
        made.generate("a billfish", GREEDY)
    assert (BF16 in {dtype for _, dtype in seen}) == (name == "bfloat16")


@pytest.mark.usefixtures("in_fp32", "products")
class TestNothingMultipliesIn16Bits:
    @pytest.mark.parametrize("method", ["gptq", "awq"])
    def test_quantize(self, half, text, tmp_path, method):
        report = quantize(job(half, tmp_path / "out", text, method=method, check=True))
        assert report["dtype"] == report["fingerprint"]["stored_dtype"] == "bfloat16"
        assert report["fingerprint"]["dtype"] == "float32"
        scales = {t.dtype for n, t in all_tensors(tmp_path / "out").items() if "scale" in n}
        assert scales == {BF16}

    def test_rounding_and_eval(self, half, text, tmp_path):
        quantize(job(half, tmp_path / "out", text, method="rtn"))
        asked = EvalRequest(tmp_path / "out", ("sample",), half, kl=True, limit=1, seqlen=64)
        assert set(evaluate(asked)["settings"]["dtype"].values()) == {"float32"}

    @pytest.mark.parametrize("name", ["half", "packed"])
    def test_generate(self, request, name):
        pieces, _ = generate(*load(request.getfixturevalue(name)), "hello", Sampling(max_tokens=4))
        assert "".join(pieces)

    @pytest.mark.parametrize("kv", ["kv16", "kv8", "kv4"])
    @pytest.mark.parametrize("name", ["half", "packed"])
    def test_the_engine(self, request, name, kv):
        speak(request.getfixturevalue(name), kv)

    def test_calibration_of_the_cache(self, packed, text, tmp_path):
        quantize(job(packed.parent / "source", tmp_path / "out", text, method="rtn", kv="kv4"))
        speak(tmp_path / "out", "kv4-channel")

    def test_bench_generate(self, tmp_path, packed):
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"model_type": "llama", **GROUPED, "num_hidden_layers": 2}))
        assert usual(True, CPU) == "fp32+kv16,w4a16+kv16"
        for path, random in ((config, True), (packed, False)):
            asked = Bench(str(path), random, parse_variants(usual(random, CPU)), **SHORT)
            told = GenerateBench(asked, CPU).measure()["variants"]
            assert {variant["dtype"] for variant in told} == {"float32"}
            assert not any(point["error"] for variant in told for point in variant["points"])

    def test_bench_generation(self, half, packed):
        assert generation.compare(str(packed), str(half), 8, 2, 1)["dtype"] == "float32"


def test_without_onednn_and_a_word_it_is_fp32(unset, request, half, text, tmp_path):
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        chosen = cpu_type()  # before anybody watches: it multiplies in bf16 itself
        assert chosen.dtype == FP32, chosen.why
        request.getfixturevalue("products")
        quantize(job(half, tmp_path / "out", text))
        speak(tmp_path / "out", "kv16")


# -- the command line


def told(*args):
    done = CliRunner().invoke(app, [*map(str, args), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(params=["bfloat16", "float32"])
def asked(request, monkeypatch):
    """What a command is told, where the environment says the opposite."""
    other = {"bfloat16": "float32", "float32": "bfloat16"}
    monkeypatch.setenv(VARIABLE, other[request.param])
    return request.param


def test_plan_quantize_generate_and_eval_obey(asked, half, text, tmp_path, monkeypatch):
    # An Arm without bf16 takes 18 s for a product of 1024.
    monkeypatch.setitem(costs.PRODUCT, "cpu", 64)
    options = ["--data", text, "--group-size", 32, "--nsamples", 4, "--seqlen", 64]
    plan = told("plan", half, *options, "--dtype", asked, "--stored-dtype", "float16")
    assert (plan["dtype"], plan["stored_dtype"]) == (asked, "float16")
    loaded = []
    monkeypatch.setattr(
        "billfish.offline.kv.load", lambda *given: loaded.append(load(*given)) or loaded[0]
    )
    out = tmp_path / "out"
    report = told("quantize", half, "-o", out, *options, "--dtype", asked, "--kv", "kv4")
    assert report["fingerprint"]["dtype"] == asked and report["dtype"] == "bfloat16"
    assert str(loaded[0][0].dtype) == f"torch.{asked}"
    prompt = ["--prompt", "hello", "--max-tokens", 2]
    assert told("generate", out, *prompt, "--dtype", asked)["dtype"] == asked
    scored = told("eval", out, "--limit", 1, "--seqlen", 32, "--dtype", asked)
    assert scored["settings"]["dtype"] == {"model": asked}


def test_serve_obeys(asked, half, monkeypatch):
    def run(llm, *_):
        with llm:
            assert str(llm.engine.decoder.dtype) == f"torch.{asked}"

    monkeypatch.setattr(server, "run_server", run)
    command = ["serve", str(half), "--port", "0", "--device", "cpu", "--dtype", asked]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.exception


def test_benches_obey(asked, half, packed, tmp_path, monkeypatch, capsys):
    written, config = tmp_path / "g.json", tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", **GROUPED, "num_hidden_layers": 2}))
    lengths = ["--input", "6", "--output", "5", "--rounds", "1", "--batch", "1"]
    lengths += ["--group-size", "32", "--device", "cpu", "--dtype", asked, "--save", str(written)]
    name = {"bfloat16": "bf16", "float32": "fp32"}[asked]
    for source, first in (([str(half)], "stored"), (["--config", str(config)], name)):
        done = CliRunner().invoke(app, ["bench", "generate", *source, *lengths])
        assert done.exit_code == 0, done.output
        found = json.loads(written.read_text())["variants"]
        assert {variant["dtype"] for variant in found} == {asked}
        assert found[0]["variant"] == f"{first}+kv16"
    arguments = ["generation", str(packed), str(half), "8", "2", "1", "--dtype", asked]
    monkeypatch.setattr(sys, "argv", arguments)
    capsys.readouterr()
    generation.main()
    assert json.loads(capsys.readouterr().out)["dtype"] == asked

    def stop(own, *_):
        assert own.request.dtype == asked and own.request.variants[0].weights == name
        raise UserError("seen")

    monkeypatch.setattr(local_server, "measure_variants", stop)
    command = ["bench", "serve", "--config", str(config), "--device", "cpu", "--dtype", asked]
    assert str(CliRunner().invoke(app, command).exception) == "seen"
    command = ["bench", "serve", "http://127.0.0.1:9", "--dtype", asked]
    assert "drop it" in str(CliRunner().invoke(app, command).exception)


def test_doctor_says_which_and_why(monkeypatch):
    monkeypatch.setenv(VARIABLE, "float32")
    found = doctor.check_compute_type()
    assert found.status == "ok" and found.detail.startswith("models of 16 bits compute in float32")
    assert "--dtype" in found.detail and VARIABLE in found.detail and found in doctor.diagnose()
    monkeypatch.setenv(VARIABLE, "float16")
    found = doctor.check_compute_type()
    assert found.status == "problem" and found.fix == f"unset {VARIABLE}"


# -- jobs


def test_a_job_goes_on_in_its_own_type(half, text, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "float32")
    whole, out = job(half, tmp_path / "whole", text), job(half, tmp_path / "out", text)
    quantize(whole)
    stop_before_the_end(monkeypatch, out)
    monkeypatch.setenv(VARIABLE, "bfloat16")
    way_out = r"dtype was float32, is bfloat16\).*again, with --dtype float32, or .*--fresh"
    with pytest.raises(UserError, match=way_out):
        quantize(out)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.raises(UserError, match=r"again, with --dtype float32 and OMP_NUM_THREADS=\d"):
        quantize(out)
    monkeypatch.undo()
    quantize(replace(out, dtype="float32"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_rounding_does_not_depend_on_it(half, text, tmp_path, monkeypatch):
    for name in ("float32", "bfloat16"):
        monkeypatch.setenv(VARIABLE, name)
        # without the sentinel, which runs the model: its figures do depend on it
        quantize(job(half, tmp_path / name, text, method="rtn"))
    assert contents(tmp_path / "float32") == contents(tmp_path / "bfloat16")


def test_models_of_fp16_are_calibrated_in_fp32(text, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "bfloat16")
    report = quantize(job(stored_in(FP16, tmp_path), tmp_path / "out", text))
    assert (report["dtype"], report["fingerprint"]["dtype"]) == ("float16", "float32")


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_is_not_quantized_is_not_rounded_on_its_way(llama, text, tmp_path, method):
    wanted = job(llama, tmp_path / "out", text, method=method, dtype="bfloat16")
    quantize(replace(wanted, stored_dtype=FP32))
    before, after = load_file(llama / "model.safetensors"), all_tensors(tmp_path / "out")
    norms = [name for name in before if "norm" in name]
    kept = [name for name in norms if torch.equal(before[name], after[name])]
    assert kept == norms if method == "gptq" else "model.norm.weight" in kept


# -- transformers


@pytest.mark.parametrize(
    ("options", "here", "gpu", "warned"),
    [
        ({}, "float32", False, 1),
        ({"device_map": "cpu"}, "float32", True, 1),
        ({}, "float32", True, 0),  # it may yet go there
        ({"dtype": FP32}, "float32", False, 0),
        ({}, "bfloat16", False, 0),
        ({"dtype": FP16}, "bfloat16", False, 1),
    ],
)
def test_from_pretrained_says_that_it_is_slow(packed, monkeypatch, options, here, gpu, warned):
    said = []
    monkeypatch.setenv(VARIABLE, here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(integration.logger, "warning", said.append)
    type(integration.logger).warning_once.cache_clear()
    for _ in range(2):
        AutoModelForCausalLM.from_pretrained(packed, **{"dtype": "auto", **options})
    assert len(said) == warned
    for message in said:
        assert f"torch.{here}" in message and "billfish.load" in message and VARIABLE in message
