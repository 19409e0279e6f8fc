"""A packed head (--head-bits): every scheme for the rest, tied and untied, read by everything that
reads a checkpoint; a stopped job ends in the same bytes."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationConfig
from jobs import contents, request
from safetensors.torch import load_file, save_file
from thorough import also, some
from tiny import ARCHITECTURES, write_checkpoint
from typer.testing import CliRunner

import billfish
from billfish.checkpoints import write as files
from billfish.checkpoints.convert import convert
from billfish.checkpoints.inspect import inspect
from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.verify import verify
from billfish.cli.app import app
from billfish.errors import UserError
from billfish.evaluate.run import EvalRequest, evaluate
from billfish.models.linear import QuantLinear
from billfish.models.load import load_model
from billfish.offline import head as heads
from billfish.offline.driver import JOB, quantize
from billfish.offline.plan import plan
from billfish.offline.task import Task
from billfish.schemes.registry import from_options
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.quantize import quantize as quantize_whole
from billfish.schemes.w4a16.quantize import quantize_rows
from billfish.solvers.statistics import Statistics

OPTIONS = {"w4a16": {"bits": 4}, "w2416": {"budget": 3.9}, "w4ax": {}, "w4a16_24": {}}
both_ways = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def tensors_of(folder):
    shards = sorted(folder.glob("*.safetensors"))
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


def small(path, tied):
    return write_checkpoint(path, tie_word_embeddings=tied, num_hidden_layers=2)


def rest_of(name):
    size = {} if name == "w2416" else {"group_size": 32}
    return from_options(name, {**OPTIONS[name], **size})


@both_ways
def test_the_check_runs_the_packed_head(tmp_path, text, tied):
    """The model that is compared with the original has the head of the files, tied or not."""
    source = small(tmp_path / "s", tied)
    kl = {}
    for bits in (None, 8, 4):
        changes = {"method": "rtn", "head_bits": bits, "check": True}
        wanted = request(source, tmp_path / str(bits), text, **changes)
        kl[bits] = quantize(wanted)["check"]["kl"]
    assert kl[4] > 1.02 * kl[None] and kl[8] != kl[None]
    assert abs(kl[8] - kl[None]) < 0.2 * abs(kl[4] - kl[None])


@pytest.mark.parametrize(
    ("rest", "bits", "tied"),
    [
        *(("w4a16", 8, True), ("w2416", 4, False), ("w4ax", 8, True), ("w4a16_24", 4, False)),
        *(also("w4a16", 4, False), also("w2416", 8, True)),
        *(also("w4ax", 4, False), also("w4a16_24", 8, True)),
    ],
)
def test_a_head_beside_every_scheme(tmp_path, text, rest, bits, tied):
    """Its codes are w4a16's, whatever the blocks hold; every reader finds them."""
    source, out = small(tmp_path / "s", tied), tmp_path / "out"
    wanted = request(source, out, text, scheme=rest_of(rest), head_bits=bits)
    report = quantize(wanted)
    assert verify(out)["ok"], verify(out)["problems"]
    expected = W4A16(bits, 64)
    model = load_model(out, torch.float32).eval()
    assert isinstance(model.lm_head, QuantLinear) and model.lm_head.scheme == expected
    kinds = {type(m) for n, m in model.named_modules() if n.endswith("_proj")}
    assert kinds == {QuantLinear} and config_of(out)["tie_word_embeddings"] is False
    # the rest is that of a job without the option
    plain = tmp_path / "plain"
    quantize(replace(wanted, output=plain, head_bits=None))
    ours, theirs = tensors_of(out), tensors_of(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs if name in ours)
    assert set(theirs) - set(ours) == (set() if tied else {"lm_head.weight"})
    # the logits are those of the decoded head
    ids = torch.randint(1, 100, (1, 30))
    with torch.inference_mode():
        hidden, got = model.model(ids)[0], model(ids).logits
        exact = hidden.double() @ model.lm_head.weight.double().T
        assert (got - exact).abs().max() < 1e-3 * exact.abs().max()
    row = next(row for row in inspect(out)["kinds"] if row["kind"] == "lm_head")
    assert row["scheme"]["bits"] == bits and row["bits_per_weight"] < bits + 1
    entry = report["layers"][-1]
    assert entry["name"] == "lm_head" and 0 < entry["error"] < 0.02
    assert "lm_head" not in report["skipped"]


TAKEN = [(name, "gptq") for name in ARCHITECTURES if "Causal" in name]
TAKEN += [("LlamaForCausalLM", method) for method in ("rtn", "awq")]


@pytest.mark.parametrize(
    ("architecture", "method", "tied"),
    [
        *((*one, place % 2 == 0) for place, one in enumerate(TAKEN)),
        *(also(*one, place % 2 == 1) for place, one in enumerate(TAKEN)),
    ],
)
def test_every_architecture(tmp_path, text, architecture, method, tied):
    source = write_checkpoint(
        tmp_path / "s", architecture, tie_word_embeddings=tied, num_hidden_layers=2
    )
    scheme = W4A16(bits=8, group_size=32)
    quantize(
        request(
            source,
            tmp_path / "out",
            text,
            method=method,
            scheme=scheme,
            head_bits=8,
            stored_dtype=torch.float32,
        )
    )
    original = load_model(source, torch.float32).eval()
    packed = load_model(tmp_path / "out", torch.float32).eval()
    assert isinstance(packed.get_output_embeddings(), QuantLinear)
    ids = torch.randint(1, 100, (1, 30))
    with torch.inference_mode():
        expected, got = original(ids)[0], packed(ids)[0]
    assert (got - expected).norm() < 0.05 * expected.norm()


@both_ways
def test_engine_transformers_eval_and_convert_take_it(tmp_path, text, tied):
    source, out = small(tmp_path / "s", tied), tmp_path / "out"
    quantize(request(source, out, text, method="rtn", head_bits=8))
    stock = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    prompt = list(range(5, 25))
    greedy = stock.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, 20:]
    with billfish.LLM(out, dtype="float32") as llm:
        params = billfish.SamplingParams(max_tokens=8, temperature=0)
        assert llm.generate([prompt], params)[0].outputs[0].token_ids == greedy.tolist()
    assert evaluate(EvalRequest(out, limit=1))["tasks"][0]["model"]["value"] > 1
    convert(out, tmp_path / "gptq", "gptq")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "gptq", dtype=torch.float32
    ).eval()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, stock(ids).logits)
    convert(tmp_path / "gptq", tmp_path / "back", "compressed-tensors")
    written = tensors_of(tmp_path / "back")
    assert all(torch.equal(tensor, written[name]) for name, tensor in tensors_of(out).items())
    with pytest.raises(UserError, match="lm_head"):
        convert(out, tmp_path / "awq", "awq")


@pytest.mark.parametrize("bits", [8, 4])
def test_what_the_config_says(tmp_path, text, bits):
    """Two kinds: a group each, by names alone. One kind: the head by name beside "Linear", since
    vLLM's head is of another class. The package reads both."""
    source, out = write_checkpoint(tmp_path / "s", hidden_size=128), tmp_path / "out"
    scheme = W4A16(4, 128) if bits == 4 else W4A16(4, 32)
    quantize(request(source, out, text, method="rtn", scheme=scheme, head_bits=bits))
    written = config_of(out)["quantization_config"]
    groups = list(written["config_groups"].values())
    if bits == 4:
        assert [group["targets"] for group in groups] == [["Linear", "lm_head"]]
    else:
        assert len(groups[0]["targets"]) == 21 and groups[1]["targets"] == ["lm_head"]
        assert [group["weights"]["num_bits"] for group in groups] == [4, 8]
    assert written["ignore"] == []
    read = QuantizationConfig.model_validate(written)
    assert len(read.config_groups) == len(groups)
    quantize(request(source, tmp_path / "own", text, scheme=rest_of("w4ax"), head_bits=bits))
    own = config_of(tmp_path / "own")["quantization_config"]
    assert own["schemes"][own["linear"]]["name"] == "w4ax"
    assert own["schemes"][own["layers"]["lm_head"]] == {
        "name": "w4a16",
        "bits": bits,
        "group_size": 128,
        "symmetric": True,
        "has_g_idx": False,
    }


@pytest.mark.parametrize("method", some(["rtn", "gptq", "finetune"], 1))
def test_a_job_stopped_at_any_late_write_ends_in_the_same_bytes(
    tmp_path, text, monkeypatch, method
):
    """From the last block on: before the head's shard, its report, after them, in distillation."""
    source = small(tmp_path / "s", tied=True)
    changes = {"steps": 2, "end_to_end": 3} if method == "finetune" else {}
    whole = request(source, tmp_path / "whole", text, method=method, head_bits=4, **changes)
    real, writes = files.write_atomically, []

    def count(path, write):
        writes.append(path.name)
        real(path, write)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_atomically", count)
        quantize(whole)
    expected = contents(whole.output)
    first = writes.index("model-00004-of-00004.safetensors")
    assert writes[first + 1] == "head.json"
    for stop in range(first - 1, len(writes), 3 if method == "finetune" else 1):
        left = [stop]

        def fail(path, write, left=left):
            if left[0] == 0:
                path.with_name(path.name + files.TEMPORARY).write_bytes(b"half")
                raise KeyboardInterrupt
            left[0] -= 1
            real(path, write)

        stopped = replace(whole, output=tmp_path / f"stopped{stop}")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(files, "write_atomically", fail)
            quantize(stopped)
        solved = (stopped.output / JOB / "head.json").exists()
        seen = []
        quantize(stopped, on_progress=lambda told, seen=seen: seen.append(told.linear))
        assert contents(stopped.output) == expected, writes[stop]
        assert ("lm_head" in seen) != solved  # it is not solved twice


def test_distillation_sees_the_packed_head(tmp_path, text):
    """The student's divergence is that of the model with the head it will run with."""
    source = small(tmp_path / "s", tied=True)
    gains = {}
    for bits in (None, 4):
        wanted = request(
            source,
            tmp_path / str(bits),
            text,
            method="finetune",
            scheme=W4A16(8, 32),
            head_bits=bits,
            steps=0,
            end_to_end=5,
        )
        gains[bits] = quantize(wanted)["training"]["whole_model"]["before"]
    # the blocks have 8 bits: nearly all of the divergence is the 4-bit head's
    assert gains[4] > 3 * gains[None], gains


def test_another_number_of_bits_is_another_job(tmp_path, llama, text):
    quantize(request(llama, tmp_path / "out", text, method="rtn", head_bits=8))
    with pytest.raises(UserError, match="head_bits was 8, is 4"):
        quantize(request(llama, tmp_path / "out", text, method="rtn", head_bits=4))


def test_portions_give_the_codes_of_the_whole(monkeypatch):
    """Rows of several portions, also with zeros, which are packed along n."""
    weight, known = torch.randn(200, 64), Statistics(64)
    x = torch.randn(500, 64)
    known.add(x, x + 0.1 * torch.randn_like(x))
    for scheme in (W4A16(8, 64), W4A16(4, 32, symmetric=False)):
        for method, statistics in (("rtn", None), ("awq", known), ("gptq", known)):
            given = (scheme, weight, statistics, method, torch.bfloat16)
            whole = quantize_whole(*given)
            parts = quantize_rows(scheme, torch.split(weight, 64), *given[2:])
            assert parts.tensors().keys() == whole.tensors().keys()
            for name, tensor in whole.tensors().items():
                assert torch.equal(parts.tensors()[name], tensor), (scheme, method, name)
            assert parts.error == (whole.error and pytest.approx(whole.error, rel=1e-4))
            assert torch.equal(parts.rows(32, 96).decoded, whole.rows(32, 96).decoded)


def test_gptq_uses_the_inputs_of_the_head(tmp_path, text, monkeypatch):
    """Error on the calibration inputs: less than rounding's; the same for small portions."""
    source = small(tmp_path / "s", tied=True)
    errors = {}
    for method in ("rtn", "gptq"):
        out = tmp_path / method
        quantize(request(source, out, text, method=method, head_bits=4, nsamples=24))
        errors[method] = out
    task = Task(request(source, None, text, head_bits=4), Checkpoint(source))
    model = load_model(tmp_path / "gptq", torch.float32)
    found = task.read_calibration()
    normed = [model.model(ids)[0].flatten(0, 1) for ids in found.batches(1024)]
    x, dense = torch.cat(normed), load_model(source, torch.float32).lm_head.weight
    with torch.no_grad():
        lost = {
            method: float((x @ (load_model(out, torch.float32).lm_head.weight - dense).T).norm())
            for method, out in errors.items()
        }
    assert lost["gptq"] < 0.9 * lost["rtn"], lost
    monkeypatch.setattr(heads, "PORTION", 64 * 64)
    again = request(source, tmp_path / "again", text, head_bits=4, nsamples=24)
    quantize(again)
    ours, theirs = tensors_of(again.output), tensors_of(tmp_path / "gptq")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@both_ways
def test_plan_and_report_say_what_it_costs_and_saves(tmp_path, text, tied):
    source, out = small(tmp_path / "s", tied), tmp_path / "out"
    wanted = request(source, out, text, method="rtn", head_bits=8)
    told, plain = plan(wanted), plan(replace(wanted, head_bits=None))
    report = quantize(wanted)
    dense, packed = 128 * 64 * 2, 128 * 64 + 128 * 2 + 16
    added = packed if tied else packed - dense
    assert told["head"] == report["head"]
    assert told["head"]["tied"] is tied and told["head"]["bytes"] == packed
    assert told["head"]["bytes_added"] == added
    assert told["head"]["bytes_saved_per_step"] == dense - packed
    sizes = [each["totals"]["bytes_after"] for each in (told, plain)]
    assert sizes[0] - sizes[1] == added
    held = sum(entry.nbytes for entry in Checkpoint(out).entries.values())
    assert sizes[0] == held
    for command in ("plan", "quantize"):
        place = ["--output", str(tmp_path / "cli")] if command == "quantize" else []
        options = ["--method", "rtn", "--group-size", "32", "--head-bits", "8", *place]
        said = CliRunner().invoke(app, [command, str(source), *options])
        assert said.exit_code == 0, said.output
        assert "8 bit g64 sym" in said.output and "a decode step reads 7.9 kB less" in said.output
        assert ("beside the 16-bit embedding" in said.output) is tied


def test_a_copy_of_a_tied_head_in_the_source_is_left_out(tmp_path, text):
    source = write_checkpoint(tmp_path / "s", tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    wanted = request(source, tmp_path / "out", text, method="rtn", head_bits=8)
    size = plan(wanted)["totals"]["bytes_after"]
    quantize(wanted)
    found = tensors_of(tmp_path / "out")
    assert "lm_head.weight_packed" in found and "lm_head.weight" not in found
    assert size == sum(tensor.nbytes for tensor in found.values())
    assert verify(tmp_path / "out")["ok"]


@pytest.mark.parametrize("bits", [0, 3, 16, -4])
def test_other_bits_are_refused(tmp_path, llama, text, bits):
    with pytest.raises(UserError, match=f"--head-bits {bits}: known are 8 and 4"):
        quantize(request(llama, tmp_path / "out", text, head_bits=bits))
    assert not (tmp_path / "out").exists()


def test_models_without_a_head_that_fits_are_refused(tmp_path, text):
    bert = write_checkpoint(tmp_path / "bert", "BertModel")
    with pytest.raises(UserError, match=r"BertModel has no head .*--head-bits 8"):
        plan(request(bert, None, text, method="rtn", head_bits=8))
    odd = write_checkpoint(tmp_path / "odd", hidden_size=48)
    scheme = W4A16(4, 16)
    with pytest.raises(UserError, match=r"head is 128 x 48, and no group size fits"):
        plan(request(odd, None, text, method="rtn", scheme=scheme, head_bits=8))
