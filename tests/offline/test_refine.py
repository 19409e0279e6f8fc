"""A method may train a quantized block (Method.refine): gradients flow through the block into its
linears, and the checkpoint holds the trained result."""

from dataclasses import replace

import pytest
import torch
from jobs import contents, request
from tiny import write_checkpoint

from billfish.checkpoints.read import Checkpoint
from billfish.offline.driver import quantize
from billfish.solvers.methods import METHODS
from billfish.solvers.refining import Refined

LOSSES = []


def loss(refining, weights):
    pairs = zip(refining.inputs, refining.targets, strict=True)
    total = 0
    for x, y in pairs:
        made = refining.run(x, {path: weight.to(x.dtype) for path, weight in weights.items()})
        total += torch.nn.functional.mse_loss(made.float(), y.float())
    return total


@torch.enable_grad()
def train_scales(refining):
    """Some steps on the scales, codes as they are; kept in the stored type."""
    solved = refining.solved
    scales = {path: share.scales.float().requires_grad_() for path, share in solved.items()}

    def decoded(path):
        share, group = solved[path], solved[path].scheme.group_of(solved[path].codes.shape[1])
        steps = share.codes.float() - share.zeros.float().repeat_interleave(group, 1)
        return steps * scales[path].repeat_interleave(group, 1)

    optimizer = torch.optim.Adam(scales.values(), lr=1e-4)
    before = loss(refining, {path: decoded(path) for path in solved}).item()
    for _ in range(20):
        optimizer.zero_grad()
        loss(refining, {path: decoded(path) for path in solved}).backward()
        assert all(scale.grad.abs().sum() > 0 for scale in scales.values())
        optimizer.step()
    made = {}
    for path, share in solved.items():
        made[path] = replace(share, scales=scales[path].detach().to(share.scales.dtype))
    LOSSES.append((before, float(loss(refining, {p: s.decoded for p, s in made.items()}))))
    return Refined(made)


@pytest.fixture
def trained(monkeypatch):
    LOSSES.clear()
    method = replace(METHODS["gptq"], name="trained", refine=train_scales)
    monkeypatch.setitem(METHODS, "trained", method)
    scheme = request(None, None, "sample").scheme
    monkeypatch.setattr(type(scheme), "methods", (*scheme.methods, "trained"))


def test_a_block_is_trained_before_it_is_written(tmp_path, text, trained):
    source = write_checkpoint(tmp_path / "source", num_hidden_layers=2)
    quantize(request(source, tmp_path / "plain", text))
    quantize(request(source, tmp_path / "out", text, method="trained", end_to_end=0))
    assert len(LOSSES) == 2 and all(after < before for before, after in LOSSES)
    plain, out = Checkpoint(tmp_path / "plain"), Checkpoint(tmp_path / "out")
    first = "model.layers.0.self_attn.q_proj.weight_"
    assert torch.equal(out.tensor(first + "packed"), plain.tensor(first + "packed"))
    assert not torch.equal(out.tensor(first + "scale"), plain.tensor(first + "scale"))
    # The next block is calibrated on what the trained one gives.
    second = "model.layers.1.self_attn.q_proj.weight_packed"
    assert not torch.equal(out.tensor(second), plain.tensor(second))


def test_a_method_that_changes_nothing_gives_the_same_bytes(tmp_path, text, monkeypatch):
    source = write_checkpoint(tmp_path / "source", num_hidden_layers=2)
    quantize(request(source, tmp_path / "plain", text))
    idle = replace(METHODS["gptq"], refine=lambda refining: Refined({}))
    monkeypatch.setitem(METHODS, "gptq", idle)
    quantize(request(source, tmp_path / "out", text, end_to_end=0))
    out, plain = (contents(tmp_path / name) for name in ("out", "plain"))
    shards = [name for name in plain if name.endswith(".safetensors")]
    assert len(shards) == 3 and all(out[name] == plain[name] for name in shards)
