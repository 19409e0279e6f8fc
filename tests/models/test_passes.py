"""BlockRunner, which caches outputs of parts, against plain passes over the whole block."""

import copy

import pytest
import torch
from tiny import ARCHITECTURES, write_checkpoint

from billfish.checkpoints.read import Checkpoint
from billfish.models.blocks import StreamedModel
from billfish.models.passes import BlockRunner, probe_structure

CPU = torch.device("cpu")


@torch.inference_mode()
def inputs_from_the_start(model, block, states, arguments, path):
    """What one linear is given, by a whole pass over each batch."""
    caught = []
    linear = block.get_submodule(path)
    handle = linear.register_forward_pre_hook(lambda m, args: caught.append(args[0].clone()))
    for state in states:
        model.run(0, state, arguments, block)
    handle.remove()
    return caught


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_each_group_sees_what_a_pass_from_the_start_shows(tmp_path, architecture):
    """Weights change after each group, as quantizing changes them; the original's do not."""
    model = StreamedModel(
        Checkpoint(write_checkpoint(tmp_path / "model", architecture)), torch.float32, CPU
    )
    batches = [torch.randint(1, 100, shape) for shape in ((3, 24), (1, 24), (2, 17))]
    states, arguments = model.first_inputs(batches)
    model.model.eval()
    model.fill(model.block_prefix(0))
    block = model.blocks[0]
    original = copy.deepcopy(block)
    found = probe_structure(model, 0, states[0][:1], arguments)
    every = {linear.path for linear in model.linears(0)}
    assert {path for group in found.groups for path in group} == every
    before = [state.clone() for state in states]
    quantized, original = (
        BlockRunner(model, 0, module, list(states), arguments, found, set())
        for module in (block, original)
    )
    for group in found.groups:
        last = group is found.groups[-1]
        original.final.update(group)
        for now, mine in ((quantized, True), (original, False)):
            expected = inputs_from_the_start(model, now.block, before, arguments, group[0])
            for batch, x in enumerate(expected):
                got = (
                    now.input(batch, group[0])
                    if mine
                    else now.input_and_continue(batch, group[0], whole_block=last)
                )
                torch.testing.assert_close(got, x, rtol=1e-4, atol=1e-5)
        for path in group:
            block.get_submodule(path).weight.data *= 1.25
        quantized.mark_final(group)
    quantized.finish()
    for now in (quantized, original):
        for batch, state in enumerate(before):
            expected = model.run(0, state, arguments, now.block)
            torch.testing.assert_close(now.states[batch], expected, rtol=1e-4, atol=1e-5)
        assert not now.cached and not now.pending
    assert all("forward" not in vars(module) for module in block.modules())


@torch.inference_mode()
def test_a_llama_block_runs_once_but_for_gate_and_up(tmp_path):
    path = write_checkpoint(tmp_path / "model", "LlamaForCausalLM")
    model = StreamedModel(Checkpoint(path), torch.float32, CPU)
    states, arguments = model.first_inputs([torch.randint(1, 100, (2, 24))])
    model.model.eval()
    model.fill(model.block_prefix(0))
    found = probe_structure(model, 0, states[0][:1], arguments)
    assert [(part.name, part.last) for part in found.parts] == [
        ("self_attn", "self_attn.o_proj"),
        ("mlp", "mlp.down_proj"),
    ]
    runs = dict.fromkeys((path for group in found.groups for path in group), 0)

    def count(module, args, output, path):
        runs[path] += 1

    block = model.blocks[0]
    for path in runs:
        block.get_submodule(path).register_forward_hook(
            lambda module, args, output, path=path: count(module, args, output, path)
        )
    quantized = BlockRunner(model, 0, block, states, arguments, found, set())
    for group in found.groups:
        quantized.input(0, group[0])
        quantized.mark_final(group)
    quantized.finish()
    twice = {path for path, times in runs.items() if times == 2}
    assert twice == {"mlp.gate_proj", "mlp.up_proj"}
    assert {times for path, times in runs.items() if path not in twice} == {1}
