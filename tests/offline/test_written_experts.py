"""Mixtures of experts as they are written: one packed linear per expert, run by transformers and by
the engine, traced by the tensor manifest, compared with the original by the sentinel."""

import json
import math
import shutil

import pytest
import torch
from jobs import request as asked
from safetensors.torch import load_file, save_file
from tiny import MIXTURES, write_checkpoint

from billfish.checkpoints import write as files
from billfish.checkpoints.convert import convert
from billfish.checkpoints.inspect import inspect
from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.tensors import differences, read_tensors
from billfish.checkpoints.verify import verify
from billfish.engine.llm import LLM
from billfish.engine.sampling import SamplingParams
from billfish.errors import UserError
from billfish.integrations import transformers as integration
from billfish.models.linear import QuantLinear
from billfish.models.load import load
from billfish.offline import sentinel
from billfish.offline.driver import Job, quantize
from billfish.offline.plan import plan
from billfish.offline.task import Task
from billfish.offline.verdict import Answers, Expert, failing, verdict
from billfish.schemes.w4a16 import W4A16

PREFIX = "model.layers.0.mlp.experts"
NONE_COPIED = {"copied_names": []}
FIRST = {  # an expert's tensors of layer 0 in files, but for the leaf
    "MixtralForCausalLM": "model.layers.0.block_sparse_moe.experts.1.w2",
    "Qwen2MoeForCausalLM": "model.layers.0.mlp.experts.1.down_proj",
    "Qwen3MoeForCausalLM": "model.layers.0.mlp.experts.1.down_proj",
    "GptOssForCausalLM": "model.layers.0.mlp.experts.1.down_proj",
}
ROUTERS = {
    "MixtralForCausalLM": "block_sparse_moe.gate",
    "Qwen2MoeForCausalLM": "mlp.gate",
    "Qwen3MoeForCausalLM": "mlp.gate",
    "GptOssForCausalLM": "mlp.router",
}


@pytest.fixture(scope="module", params=MIXTURES)
def made(request, tmp_path_factory):
    """(architecture, source, quantized by GPTQ, report)"""
    folder = tmp_path_factory.mktemp("made")
    source = write_checkpoint(folder / "source", request.param)
    text = folder / "text.txt"
    text.write_text("all experts of a mixture see some of these tokens, 0123456789. " * 40)
    changes = {"dtype": torch.float32, "check": True}
    report = quantize(asked(source, folder / "out", str(text), **changes))
    return request.param, source, folder / "out", report


@pytest.fixture(scope="module")
def packed(made):
    """The written model and its tokenizer."""
    return load(made[2], dtype=torch.float32)


def test_what_is_written(made):
    """One packed linear per expert under its public name; routers and gates as they were."""
    architecture, _, out, report = made
    found = Checkpoint(out)
    name = FIRST[architecture]
    assert {f"{name}.weight_packed", f"{name}.weight_scale", f"{name}.weight_shape"} <= {*found}
    assert f"{name}.weight" not in found
    router = f"model.layers.0.{ROUTERS[architecture]}"
    assert found.entries[f"{router}.weight"].dtype == torch.bfloat16
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert router in ignored and "lm_head" in ignored
    if architecture == "Qwen2MoeForCausalLM":
        assert "model.layers.0.mlp.shared_expert_gate" in ignored
        assert "model.layers.0.mlp.shared_expert.up_proj.weight_packed" in found
    assert verify(out)["problems"] == []
    count = sum(".experts." in layer["name"] for layer in report["layers"])
    assert count == 2 * 3 * 4
    assert all(layer["error"] < 0.05 for layer in report["layers"])
    assert inspect(out)["packed_linears"] == len(report["layers"])


def dense_twin(source, packed):
    """The original model with the decoded weights of the packed one."""
    twin = type(packed).from_pretrained(source, dtype=torch.float32).eval()
    state = packed.state_dict()
    for name, parameter in twin.named_parameters():
        if name in state:
            parameter.data.copy_(state[name].float())
    for name, module in packed.named_modules():
        if isinstance(module, QuantLinear) and ".experts." not in name:
            twin.get_submodule(name).weight.data.copy_(module.weight)
    for name, module in twin.named_modules():
        if hasattr(module, "gate_up_proj") and module.gate_up_proj.ndim == 3:
            single = packed.get_submodule(name)
            for expert in range(single.count):
                gate, up, down = single.get_submodule(str(expert)).children()
                transposed = module.is_transposed
                both = (
                    torch.stack((gate.weight, up.weight), 1)
                    if transposed
                    else (gate.weight, up.weight)
                )
                both = both.flatten(0, 1).T if transposed else torch.cat(both)
                module.gate_up_proj.data[expert] = both
                module.down_proj.data[expert] = down.weight.T if transposed else down.weight
    return twin


def test_packed_experts_compute_what_their_decoded_weights_compute(made, packed):
    model, _ = packed
    twin = dense_twin(made[1], model)
    ids = torch.randint(3, 100, (2, 40))
    with torch.no_grad():
        found, expected = model(ids).logits, twin(ids).logits
    assert (found - expected).norm() < 1e-3 * expected.norm()


def test_they_are_saved_as_they_were_loaded(made, tmp_path):
    _, _, out, _ = made
    model, tokenizer = load(out)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    before, after = Checkpoint(out), Checkpoint(tmp_path / "saved")
    assert {*before} == {*after}
    for name in before:
        if "packed" in name or "scale" in name:
            assert torch.equal(before.tensor(name), after.tensor(name)), name
    assert verify(tmp_path / "saved")["problems"] == []


def test_engine_and_transformers_write_the_same(made, packed):
    out, (model, tokenizer) = made[2], packed
    prompts = ["a mixture", "0123456789" * 3, "of"]
    with LLM(out, dtype=torch.float32) as llm:
        how = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, how)]
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert list(tokens) == expected[0, ids.shape[1] :].tolist()


def test_transformers_that_fuses_renamed_experts_is_refused(made, monkeypatch):
    """Up to 5.7 it leaves only those alone whose names in the files are the model's."""
    architecture, _, out, _ = made
    monkeypatch.setattr(integration, "LOADS_EXPERTS", False)
    if architecture == "MixtralForCausalLM":
        with pytest.raises(UserError, match=r"experts\.0\.w1: .* fuses .*transformers>=5\.8"):
            load(out)
    else:
        load(out)


def test_other_formats_hold_them(made, packed, tmp_path):
    _, source, out, _ = made
    convert(out, tmp_path / "gptq", "gptq")
    told = verify(tmp_path / "gptq")
    assert told["problems"] == []
    assert told["checked"]["source_tensors"] == len(Checkpoint(source).entries)
    other, _ = load(tmp_path / "gptq", dtype=torch.float32)
    ids = torch.randint(3, 100, (1, 20))
    with torch.no_grad():
        one, two = (model(ids).logits for model in (packed[0], other))
    assert (one - two).norm() < 1e-4 * one.norm()


def test_plan_counts_what_the_job_writes(made, text):
    architecture, source, out, report = made
    told = plan(asked(source, None, text))
    assert told["totals"]["quantized"] == len(report["layers"])
    written = sum(entry.nbytes for entry in Checkpoint(out).entries.values())
    assert told["totals"]["bytes_after"] == written
    gates = [row for row in told["layers"] if "decides which experts" in (row["skip"] or "")]
    assert len(gates) == (4 if architecture == "Qwen2MoeForCausalLM" else 2)
    # An expert's down is cut along its inputs: a shard must hold whole groups of 32.
    wide = 128 if architecture in ("MixtralForCausalLM", "GptOssForCausalLM") else 64
    leaf = "w2" if architecture == "MixtralForCausalLM" else "down_proj"
    (down,) = [row for row in told["layers"] if row["module"].endswith(f"0.mlp.experts.1.{leaf}")]
    assert down["tp"] == [degree for degree in (1, 2, 4, 8) if wide // degree % 32 == 0]


# -- the tensor manifest


def test_every_tensor_of_the_source_is_placed(made):
    architecture, source, out, report = made
    placed, held = read_tensors(out), Checkpoint(out).entries
    assert placed.keys() == Checkpoint(source).entries.keys()
    assert differences(placed, held) == []
    assert sorted(name for each in placed.values() for name in each.names) == sorted(held)
    assert inspect(out)["source"] == {**report["tensors"], "tensors": len(placed), **NONE_COPIED}
    linear = FIRST[architecture]
    if architecture != "GptOssForCausalLM":
        parts = ("weight_packed", "weight_scale", "weight_shape")
        assert placed[f"{linear}.weight"].how == "quantized"
        assert sorted(placed[f"{linear}.weight"].names) == [f"{linear}.{part}" for part in parts]
        return
    fused = placed["model.layers.0.mlp.experts.gate_up_proj"]
    assert fused.how == "quantized" and fused.shape == (4, 64, 256)
    assert len(fused.names) == 4 * 2 * 3  # experts; gate and up; tensors of a packed linear
    bias = placed["model.layers.0.mlp.experts.down_proj_bias"]
    assert bias.how == "kept" and bias.shape == (4, 64)
    assert bias.names == tuple(f"{PREFIX}.{expert}.down_proj.bias" for expert in range(4))


DRAFT = "mtp.layers.0.mlp.experts.gate_up_proj"
FEW = {"method": "rtn", "scheme": W4A16(4, 128), "allow_skipped": True, "check": False}


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """(source, result, report): groups of 128 take down_proj alone, and a draft is beside."""
    folder = tmp_path_factory.mktemp("fused")
    source = write_checkpoint(folder / "source", "GptOssForCausalLM")
    held = load_file(source / "model.safetensors")
    save_file({**held, DRAFT: torch.randn(4, 8, 6)}, source / "model.safetensors", {"format": "pt"})
    return source, folder / "out", quantize(asked(source, folder / "out", "", **FEW))


def test_fused_experts_that_stay_dense_and_strangers_are_placed(fused):
    source, out, report = fused
    placed, found = read_tensors(out), Checkpoint(out)
    held = load_file(source / "model.safetensors")
    counts = {"quantized": 2, "kept": len(placed) - 3, "decoded": 0, "copied": 1}
    assert report["tensors"] == counts
    assert plan(asked(source, None, "", **FEW))["copied"][0]["name"] == DRAFT
    assert torch.equal(found.tensor(DRAFT), held[DRAFT])
    both = f"{PREFIX}.gate_up_proj"
    assert placed[both].how == "kept" and len(placed[both].names) == 4 * 2
    up = found.tensor(f"{PREFIX}.3.up_proj.weight")
    assert torch.equal(up, held[both][3, :, 1::2].T.to(up.dtype))
    assert verify(out)["problems"] == []


def test_an_expert_that_is_lost_or_cut_is_told_once(fused, tmp_path):
    out = shutil.copytree(fused[1], tmp_path / "out")
    shard = sorted(out.glob("model-*.safetensors"))[1]
    tensors = load_file(shard)
    cut, lost = f"{PREFIX}.1.down_proj.bias", f"{PREFIX}.2.down_proj.weight_scale"
    tensors[cut] = tensors[cut][:32].clone()
    del tensors[lost]
    files.write_shard(shard, tensors)
    (out / files.MANIFEST).unlink()
    files.write_index(out, sorted(path.name for path in out.glob("model-*.safetensors")))
    wrong = dict(differences(read_tensors(out), Checkpoint(out).entries))
    assert wrong.keys() == {cut, lost}
    assert "has shape (32,)" in wrong[cut] and "says (4, 64) for 4 tensors of a size" in wrong[cut]
    told = [problem["tensor"] for problem in verify(out)["problems"]]
    assert sorted(told) == [cut, lost]


# -- the sentinel


def test_the_sentinel_measures_what_the_models_compute(made, packed):
    """KL and greedy tokens again, from the source by transformers' own experts and from the packed
    model."""
    _, source, _, report = made
    check = report["check"]
    assert check["problem"] is None and check["text"] == "sample"
    assert all(0 < block["own_error"] < 0.1 for block in check["blocks"])
    ids = sentinel.prompts(Task(asked(source, None, ""), Checkpoint(source))).ids
    both = []
    for model in (load(source, torch.float32)[0], packed[0]):
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, ids.shape[1] // 2 :]
        both.append(logits.float().log_softmax(-1).flatten(0, 1))
    again = Answers.of(*both)
    assert check["kl"] == pytest.approx(again.kl, rel=0.02)
    assert abs(check["greedy_same"] - again.same) <= 1


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_broken_experts_are_named_by_their_block(tmp_path, text, monkeypatch, architecture):
    """Decoded from the shard, where their scales are wrong."""
    source = write_checkpoint(tmp_path / "source", architecture)
    real = Job._block_tensors

    def wrong(self, index, *given):
        made = real(self, index, *given)
        broken = [name for name in made if ".experts." in name and name.endswith("weight_scale")]
        return made | ({name: 9 * made[name] for name in broken} if index == 1 else {})

    monkeypatch.setattr(Job, "_block_tensors", wrong)
    check = quantize(asked(source, tmp_path / "out", text, method="rtn", check=True))["check"]
    assert check["faults"] == [1] and "model.layers.1 begins to fail" in check["problem"]
    assert check["blocks"][1]["own_error"] > 10 > 1 > check["blocks"][0]["own_error"]


@pytest.mark.parametrize(("expert", "reached"), [(0, True), (11, True), (11, False)])
def test_one_broken_expert_of_many_is_named(tmp_path, text, monkeypatch, expert, reached):
    """Few tokens reach it, or none: its block does not stand out."""
    source = write_checkpoint(tmp_path / "source", "Qwen3MoeForCausalLM", num_experts=16)
    real, lost = Job._block_tensors, f"model.layers.1.mlp.experts.{expert}"
    if not reached:
        held = load_file(source / "model.safetensors")
        router = held["model.layers.1.mlp.gate.weight"]
        router[2:4], router[4:] = -router[:2], 0  # two of the first four are always above 0
        save_file(held, source / "model.safetensors", {"format": "pt"})

    def wrong(self, index, *given):
        made = real(self, index, *given)
        broken = [n for n in made if n.startswith(f"{lost}.") and n.endswith("weight_scale")]
        return made | {name: 50 * made[name] for name in broken}

    monkeypatch.setattr(Job, "_block_tensors", wrong)
    check = quantize(asked(source, tmp_path / "out", text, method="rtn", check=True))["check"]
    (found,) = check["experts"]["faults"]
    assert found["name"] == lost and found["error"] > 100
    assert reached or found["tokens"] == 16
    assert check["faults"] == [] and "No block stands out" not in check["problem"]
    assert f"1 of 32 experts fail, first {lost}: on {found['tokens']} of" in check["problem"]
    assert check["experts"]["count"] == 32 and check["experts"]["median_error"] < 0.1


def test_which_experts_fail():
    """Errors far above the median alone are GPTQ's on few tokens; NaN is none."""

    def names(*errors):
        return [e.name for e in failing([Expert(str(i), own, 3) for i, own in enumerate(errors)])]

    assert names(0.02, 0.03, 1.1, 0.02) == []
    assert names(0.02, 2.1, 0.02, math.nan) == ["1", "3"]
    assert names(0.9, 0.8, 2.6, 5.5) == []  # two bits: all are bad
    assert verdict([], None, "layers", []) is None
    many = [Expert(f"e{i}", 9.0 if i < 6 else 0.1, 3) for i in range(20)]
    told = verdict([], None, "layers", many)
    assert "6 of 20 experts fail, first e0, then e1, e2, e3, ...: on 3 of" in told
