"""Mixtures of experts in a job: calibrated by their routing, trained, resumed; bad input."""

from dataclasses import replace

import pytest
import torch
from jobs import request as asked
from jobs import stop_before_the_end
from safetensors.torch import load_file, save_file
from tiny import MIXTURES, write_checkpoint

from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.verify import verify
from billfish.errors import UserError
from billfish.models.blocks import StreamedModel
from billfish.models.linear import QuantLinear
from billfish.models.load import load
from billfish.offline import distill, experts
from billfish.offline.activations import Activations
from billfish.offline.block import BlockJob
from billfish.offline.driver import quantize
from billfish.offline.plan import plan
from billfish.offline.text import read_documents
from billfish.schemes import registry
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16_24 import W4A16Sparse
from billfish.schemes.w4ax import W4AX
from billfish.schemes.w2416 import W2416
from billfish.solvers import finetune
from billfish.solvers.methods import METHODS

CPU = torch.device("cpu")
# -- calibration


def solved_block(path, method):
    """A block solved over two batches: its job, what it was given and gave, and its linears."""
    model = StreamedModel(Checkpoint(path), torch.float32, CPU)
    states, arguments = model.first_inputs([torch.randint(3, 100, s) for s in ((2, 60), (1, 40))])
    model.fill(model.block_prefix(0))
    given = Activations([state + 0.05 * torch.randn_like(state) for state in states], [*states])
    if not METHODS[method].follows_original:
        given.original = []
    inputs = given.copy()
    gates = ("mlp.shared_expert_gate",)
    paths = [linear.path for linear in model.linears(0) if linear.path not in gates]
    scheme = W4A16(3, 32)
    block = BlockJob(model, 0, paths, scheme, METHODS[method], torch.float32, arguments)
    found = {}
    with torch.no_grad():
        block.solve(given, found.__setitem__)
    return block, inputs, given, found


@pytest.mark.parametrize("architecture", MIXTURES)
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_outputs_are_those_of_the_quantized_and_of_the_original_block(
    tmp_path, architecture, method
):
    """Experts are solved one at a time; then the whole block runs with all decoded weights."""
    path = write_checkpoint(tmp_path / "source", architecture)
    block, inputs, outputs, found = solved_block(path, method)
    model = block.model
    assert {*found} == {*block.paths}
    for linear, solved in found.items():
        model.blocks[0].get_submodule(linear).weight = torch.nn.Parameter(solved.decoded)
    with torch.no_grad():
        for before, after in zip(inputs.quantized, outputs.quantized, strict=True):
            expected = model.run(0, before, block.arguments)
            torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4)
        model.drop(model.block_prefix(0))
        model.fill(model.block_prefix(0))
        for before, after in zip(inputs.original, outputs.original, strict=True):
            expected = model.run(0, before, block.arguments)
            torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4)


def test_an_expert_sees_its_own_tokens_and_the_original_ones_beside_them(tmp_path, monkeypatch):
    """Hessian and drift of each expert's gate and up, from what the router gave in both models."""
    path = write_checkpoint(tmp_path / "source", "Qwen3MoeForCausalLM")
    known = []

    class Watched:
        def __init__(self, scheme):
            self.own = registry.quantizer(scheme)

        def quantize(self, scheme, weight, statistics, *more):
            if weight.shape == (128, 64):  # gate and up of one expert
                known.append((statistics.hessian.clone(), statistics.drift.clone()))
            return self.own.quantize(scheme, weight, statistics, *more)

    monkeypatch.setattr(experts, "quantizer", Watched)
    block, inputs, _, found = solved_block(path, "gptq")
    block.model.fill(block.model.block_prefix(0))
    originals = calls_of(block, inputs.original)
    for linear, solved in found.items():
        if "self_attn" in linear:
            block.model.blocks[0].get_submodule(linear).weight = torch.nn.Parameter(solved.decoded)
    calls = calls_of(block, inputs.quantized)
    xs, ys = (torch.cat([call[0] for call in each]) for each in (calls, originals))
    index, other = (torch.cat([call[1] for call in each]) for each in (calls, originals))
    assert not torch.equal(index, other)  # the two models route some tokens differently
    assert len(known) == 4
    for expert, (hessian, drift) in enumerate(known):
        rows = (index == expert).any(-1)
        assert rows.sum() >= experts.fewest(64)
        x, y = xs[rows], ys[rows]
        torch.testing.assert_close(hessian, x.T @ x / len(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(drift, (y - x).T @ x / len(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def calls_of(block, states):
    """What the router gives the experts for each batch. The block must be filled."""
    seen = []
    handle = block.model.blocks[0].mlp.experts.register_forward_pre_hook(
        lambda module, args: seen.append(args)
    )
    for state in states:
        block.model.run(0, state, block.arguments)
    handle.remove()
    return seen


def starved(path, expert):
    """A router that never picks one of the experts."""
    held = load_file(path / "model.safetensors")
    for name, tensor in held.items():
        if name.endswith("mlp.gate.weight"):
            tensor[expert] = 0
            tensor[:, 0] = 0
            tensor[expert, 0] = -50.0
        elif name.endswith("post_attention_layernorm.weight"):
            tensor[0] = 10.0
        elif name == "model.embed_tokens.weight":
            tensor[:, 0] = 5.0
    save_file(held, path / "model.safetensors", {"format": "pt"})
    return path


def test_an_expert_without_tokens_is_calibrated_on_all_and_listed(tmp_path, text):
    source = starved(write_checkpoint(tmp_path / "source", "Qwen3MoeForCausalLM"), 2)
    report = quantize(asked(source, tmp_path / "out", text))
    noted = [layer for layer in report["layers"] if layer["note"]]
    rare = [layer for layer in noted if layer["name"].startswith("model.layers.0.mlp.experts.2.")]
    assert [layer["name"].rpartition(".")[2] for layer in rare] == [
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    assert all("0 were routed to this expert, fewer than 16" in layer["note"] for layer in rare)
    assert all(layer["error"] < 0.05 for layer in rare)
    assert "model.layers.0.mlp.experts.2" in report["warnings"][0]
    assert verify(tmp_path / "out")["problems"] == []


def test_a_stopped_job_ends_in_the_same_bytes(tmp_path, text, monkeypatch):
    source = write_checkpoint(tmp_path / "source", "MixtralForCausalLM")
    whole = asked(source, tmp_path / "whole", text)
    quantize(whole)
    parts = replace(whole, output=tmp_path / "parts")
    stop_before_the_end(monkeypatch, parts)
    (tmp_path / "parts" / ".billfish" / "block-00001.json").unlink()
    quantize(parts)
    for shard in (tmp_path / "whole").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "parts" / shard.name).read_bytes()


SCHEMES = {
    "w2416": W2416(3.3),
    "w4ax": W4AX(64),
    "fmpq": W4AX(64, True, "fmpq", 0.5, True),
    "w4a16_24": W4A16Sparse(32),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_takes_experts(tmp_path, text, scheme):
    source = write_checkpoint(
        tmp_path / "source", "Qwen2MoeForCausalLM", num_hidden_layers=1, num_experts=3
    )
    report = quantize(asked(source, tmp_path / "out", text, scheme=SCHEMES[scheme], check=True))
    assert report["check"]["problem"] is None
    assert verify(tmp_path / "out")["problems"] == []
    model, _ = load(tmp_path / "out", dtype=torch.float32)
    ids = torch.randint(3, 100, (1, 20))
    with torch.no_grad():
        found = model(ids).logits
        for module in model.modules():
            if isinstance(module, QuantLinear):
                module.arrange("reference")
        expected = model(ids).logits
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_training_follows_the_routing(tmp_path, monkeypatch):
    monkeypatch.setattr(finetune, "SCALES", 2e-3)
    monkeypatch.setattr(finetune, "TOKENS", 512)
    monkeypatch.setattr(distill, "TOKENS", 512)
    (tmp_path / "prose.txt").write_text(read_documents("sample")[0][:40_000])
    source = write_checkpoint(tmp_path / "source", "MixtralForCausalLM", num_hidden_layers=1)
    changes = {"scheme": W4A16(3, 32, False), "nsamples": 96, "steps": 30, "end_to_end": 15}
    changes |= {"method": "finetune", "data": str(tmp_path / "prose.txt"), "dtype": torch.float32}
    report = quantize(asked(source, tmp_path / "out", "", **changes))
    (gain,) = report["training"]["blocks"]
    assert gain["kept"] and gain["after"] < 0.95 * gain["before"]  # measured: 0.84
    whole = report["training"]["whole_model"]
    assert whole["kept"] and whole["after"] < whole["before"]
    assert verify(tmp_path / "out")["problems"] == []


def test_experts_are_trained_in_the_type_of_the_passes(tmp_path, text):
    """bf16 on a CPU that multiplies it fast, and the weights of experts were fp32."""
    source = write_checkpoint(tmp_path / "source", "MixtralForCausalLM", num_hidden_layers=1)
    changes = {"method": "finetune", "steps": 1, "end_to_end": 0, "dtype": torch.bfloat16}
    changes |= {"nsamples": 4}  # an Arm without bf16 takes 280 times as long as in fp32
    report = quantize(asked(source, tmp_path / "out", text, **changes))
    assert report["training"]["blocks"][0]["after"] > 0
    assert verify(tmp_path / "out")["problems"] == []


# -- plan and bad input


def test_plan_counts_one_expert_in_memory_and_the_tokens_it_gets(tmp_path, text):
    """Twice as many experts: as much memory for the block, and hardly more time for passes."""
    few, many = (
        plan(
            asked(
                write_checkpoint(tmp_path / str(n), "Qwen3MoeForCausalLM", num_experts=n),
                None,
                text,
            )
        )["estimates"]
        for n in (8, 16)
    )
    router = 2 * 2 * 8 * 64 * 4  # bytes of 8 more rows, in both models
    assert many["memory"]["block"] - few["memory"]["block"] <= router
    flops = [e["time"]["passes"] * e["rates"]["running"] for e in (few, many)]
    assert flops[0] <= flops[1] < 1.1 * flops[0]


def damaged(path, change):
    held = load_file(path / "model.safetensors")
    change(held)
    save_file(held, path / "model.safetensors", {"format": "pt"})
    return path


NAME = "model.layers.1.mlp.experts.3.up_proj.weight"
BAD = {
    "missing": (lambda held: held.pop(NAME), rf"{NAME}.*missing: the layer has 4 experts"),
    "unequal": (
        lambda held: held.update({NAME: held[NAME][:32].clone()}),
        rf"{NAME}.*has shape \(32, 64\), and other experts of the layer have \(64, 64\)",
    ),
    "too many": (
        lambda held: held.update({NAME.replace(".3.", ".4."): held[NAME].clone()}),
        "config.json says 4 experts",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_experts_are_one_clear_error(tmp_path, text, case):
    change, told = BAD[case]
    path = damaged(write_checkpoint(tmp_path / "source", "Qwen3MoeForCausalLM"), change)
    with pytest.raises(UserError, match=told):
        quantize(asked(path, tmp_path / "out", text))
    with pytest.raises(UserError, match=told):
        load(path)
    assert len(verify(path)["problems"]) == 1
