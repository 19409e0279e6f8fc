"""Experts as single linears against transformers' fused ones, and what is known of a layout."""

import copy

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import MIXTURES, write_checkpoint

from billfish.checkpoints.experts import unfused
from billfish.checkpoints.read import Checkpoint
from billfish.errors import UserError
from billfish.models.blocks import StreamedModel
from billfish.models.experts import (
    Choice,
    Experts,
    Gating,
    gates_of,
    idle_experts,
    is_fused,
    leaves_of,
    routed,
)

CPU = torch.device("cpu")


def stream(path):
    return StreamedModel(Checkpoint(path), torch.float32, CPU)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_single_experts_compute_what_fused_ones_compute(tmp_path, architecture):
    """Whole blocks, experts read as they run; and an expert set in memory is taken from there."""
    path = write_checkpoint(tmp_path / "model", architecture)
    whole = getattr(transformers, architecture).from_pretrained(path, dtype=torch.float32).eval()
    model = stream(path)
    ids = torch.randint(1, 100, (2, 30))
    states, arguments = model.first_inputs([ids])
    seen = []
    for block in whole.model.layers:
        block.register_forward_hook(lambda m, args, output: seen.append(output))
    with torch.no_grad():
        whole(ids)
        for index, expected in enumerate(seen):
            model.fill(model.block_prefix(index))
            experts = model.blocks[index].mlp.experts
            assert all(p.is_meta for n, p in experts.named_parameters() if n.endswith("weight"))
            states = [model.run(index, states[0], arguments)]
            torch.testing.assert_close(states[0], expected, rtol=1e-4, atol=1e-5)
        linear = experts.get_submodule("0").get_submodule(experts.leaves[0])
        linear.weight = torch.nn.Parameter(torch.zeros(linear.weight.shape))
        changed = model.run(1, seen[0], arguments)
        assert not torch.allclose(changed, seen[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "concatenated"), [("MixtralForCausalLM", True), ("GptOssForCausalLM", False)]
)
def test_experts_of_older_transformers_are_taken_over(tmp_path, architecture, concatenated):
    path = write_checkpoint(tmp_path / "model", architecture)
    model = getattr(transformers, architecture).from_pretrained(path)
    experts = model.model.layers[0].mlp.experts
    vars(experts).pop("has_post_expert_norm", None)  # up to transformers 5.19
    vars(experts).pop("is_concatenated", None)  # up to transformers 5.6
    assert is_fused(experts)
    experts.has_post_expert_norm = True
    assert not is_fused(experts)
    assert Gating(experts).concatenated is concatenated


def test_names_come_from_the_table_of_transformers():
    names = {"MixtralConfig": ("w1", "w3", "w2"), "Qwen3MoeConfig": None, "GptOssConfig": None}
    for config, expected in names.items():
        found = leaves_of(getattr(transformers, config)())
        assert found == (expected or ("gate_proj", "up_proj", "down_proj"))


def test_routers_and_the_gates_of_shared_experts_are_found(tmp_path):
    model = stream(write_checkpoint(tmp_path / "model", "Qwen2MoeForCausalLM"))
    beside = {"gate", "shared_expert_gate"}
    assert gates_of(model.model) == {f"model.layers.{i}.mlp.{n}" for i in (0, 1) for n in beside}


@pytest.mark.parametrize(
    ("architecture", "linear"), [("MixtralForCausalLM", True), ("GptOssForCausalLM", False)]
)
def test_whether_a_factor_passes_from_up_to_down_is_found_by_trial(tmp_path, architecture, linear):
    model = stream(write_checkpoint(tmp_path / "model", architecture))
    assert model.blocks[0].mlp.experts.gating.is_linear_in_up() is linear


def test_tokens_go_to_their_experts_once():
    index = torch.tensor([[3, 0], [0, 1], [3, 1], [1, 3]])
    found = {e: (rows.tolist(), places.tolist()) for e, rows, places in routed(index, 5)}
    assert found == {
        0: ([0, 1], [1, 0]),
        1: ([1, 2, 3], [1, 1, 0]),
        3: ([0, 2, 3], [0, 0, 1]),
    }


def test_idle_experts_depend_on_all_they_are_given(tmp_path):
    """A fold that changes their input or their routing must change the block's output."""
    experts = stream(write_checkpoint(tmp_path / "m", "MixtralForCausalLM")).blocks[0].mlp.experts
    x, index = torch.randn(3, 64), torch.tensor([[0, 1], [1, 2], [2, 3]])
    weights = torch.rand(3, 2)
    with idle_experts(experts):
        given = experts(x, index, weights)
        assert not torch.equal(experts(2 * x, index, weights), given)
        assert not torch.equal(experts(x, index.flip(0), weights), given)
        assert not torch.equal(experts(x, index, 2 * weights), given)
    assert not experts.idle


def test_copies_of_a_block_borrow_from_the_same_checkpoint(tmp_path):
    model = stream(write_checkpoint(tmp_path / "model", "MixtralForCausalLM"))
    block = model.blocks[0]
    assert copy.deepcopy(block).mlp.experts.lend is block.mlp.experts.lend


def test_fused_files_are_shown_as_single_linears(tmp_path):
    path = write_checkpoint(tmp_path / "model", "GptOssForCausalLM")
    held, view = load_file(path / "model.safetensors"), unfused(Checkpoint(path))
    prefix = "model.layers.1.mlp.experts"
    both, bias = held[f"{prefix}.gate_up_proj"], held[f"{prefix}.gate_up_proj_bias"]
    assert torch.equal(view.tensor(f"{prefix}.2.gate_proj.weight"), both[2, :, ::2].T)
    assert torch.equal(view.tensor(f"{prefix}.2.up_proj.weight"), both[2, :, 1::2].T)
    assert torch.equal(view.tensor(f"{prefix}.3.up_proj.bias"), bias[3, 1::2])
    assert torch.equal(
        view.tensor(f"{prefix}.0.down_proj.weight"), held[f"{prefix}.down_proj"][0].T
    )
    assert view.nbytes == Checkpoint(path).nbytes
    for name, entry in view.entries.items():
        assert view.tensor(name).shape == entry.shape and view.tensor(name).nbytes == entry.nbytes


@pytest.mark.parametrize("leaf", ["gate_up_proj", "gate_up_proj_bias"])
def test_fused_files_of_another_shape_are_refused(tmp_path, leaf):
    path = write_checkpoint(tmp_path / "model", "GptOssForCausalLM")
    held = load_file(path / "model.safetensors")
    held[f"model.layers.1.mlp.experts.{leaf}"] = torch.tensor(1.0)
    save_file(held, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=rf"experts\.{leaf}' has shape \(\)"):
        stream(path)


def test_experts_are_not_mistaken_for_the_blocks(tmp_path):
    path = write_checkpoint(tmp_path / "model", "MixtralForCausalLM", num_hidden_layers=1)
    model = stream(path)
    assert model.prefix == "model.layers"
    assert sum(isinstance(module, Experts) for module in model.model.modules()) == 1


def test_other_fused_files_are_refused(tmp_path):
    """transformers would load them; whose outputs come first is not known here."""
    path = write_checkpoint(tmp_path / "model", "Qwen3MoeForCausalLM")
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(path)
    save_file(dict(model.state_dict()), path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="all experts of a layer in one tensor"):
        stream(path)


@pytest.mark.parametrize("architecture", MIXTURES)
@pytest.mark.parametrize("normalized", [False, True])
def test_how_a_router_chooses_is_found_by_trial(tmp_path, architecture, normalized):
    changes = {"norm_topk_prob": normalized} if "Qwen" in architecture else {}
    path = write_checkpoint(tmp_path / "model", architecture, **changes)
    model = getattr(transformers, architecture).from_pretrained(path, dtype=torch.bfloat16)
    mlp = model.model.layers[0].mlp
    router = mlp.router if hasattr(mlp, "router") else mlp.gate
    found = Choice.of(router)
    if architecture == "GptOssForCausalLM":  # a bias, and softmax over the chosen ones
        assert found is None
        return
    assert found.several == 2 and found.normalized is (changes == {} or normalized)
    x = torch.randn(20, router.weight.shape[1]).bfloat16()
    _, weights, index = router(x)
    mine, order = found(torch.nn.functional.linear(x, router.weight))
    assert torch.equal(order, index) and torch.equal(mine, weights) and mine.dtype == weights.dtype
    assert Choice.of(mlp.experts) is None
