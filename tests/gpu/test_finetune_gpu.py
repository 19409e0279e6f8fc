"""Finetuning on a GPU: equal bytes from equal requests, with and without CUDA graphs; gradients and
gains as on a CPU."""

import pytest
import torch
from jobs import request
from tiny import write_checkpoint
from torch.nn.functional import scaled_dot_product_attention

from billfish.offline import distill
from billfish.offline.driver import quantize
from billfish.schemes.w4a16 import W4A16
from billfish.solvers import finetune, straight
from billfish.solvers.training import Captured, reproducible

pytestmark = pytest.mark.gpu
W3 = W4A16(bits=3, group_size=32, symmetric=False)


def trained(source, out, device):
    asked = request(
        source,
        out,
        "sample",
        method="finetune",
        scheme=W3,
        nsamples=96,
        steps=40,
        end_to_end=20,
        device=device,
        check=True,
    )
    report = quantize(asked)["training"]
    return report, {path.name: path.read_bytes() for path in out.glob("*.safetensors")}


def test_equal_requests_give_equal_bytes_and_graphs_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(finetune, "TOKENS", 512)
    monkeypatch.setattr(distill, "TOKENS", 512)
    source = write_checkpoint(tmp_path / "source", num_hidden_layers=2)
    report, first = trained(source, tmp_path / "first", "cuda")
    assert all(gain["kept"] for gain in (*report["blocks"], report["whole_model"]))
    assert trained(source, tmp_path / "second", "cuda")[1] == first
    monkeypatch.setattr(finetune, "SMALL", 0)
    assert trained(source, tmp_path / "eager", "cuda")[1] == first
    cpu, _ = trained(source, tmp_path / "cpu", "cpu")
    for ours, theirs in zip(report["blocks"], cpu["blocks"], strict=True):
        assert theirs["kept"]  # in fp32, where a GPU multiplies in bf16
        assert ours["after"] == pytest.approx(theirs["after"], rel=0.25)


def test_a_captured_step_sees_new_inputs_and_rates():
    total = torch.zeros(4, device="cuda")
    rate = torch.ones((), device="cuda")

    def add(x):
        total.add_(x * rate)
        return total.sum()

    step, expected = Captured(add), torch.zeros(4)
    for i in range(8):
        rate.fill_(1 / (i + 1))
        x = torch.full((4,), float(i))
        expected += x / (i + 1)
        assert float(step(x.cuda())) == pytest.approx(float(expected.sum()))
    assert step.graph is not None
    assert torch.allclose(total.cpu(), expected)


def test_gradients_of_rounding_are_those_of_a_cpu():
    position = (torch.rand(64, 8, 32) - 0.5) * 12
    scale, zero = torch.rand(64, 8, 1) + 0.5, torch.randint(0, 8, (64, 8, 1)).float()
    slope, found = torch.randn_like(position), []
    for device in ("cpu", "cuda"):
        leaves = [tensor.clone().to(device).requires_grad_() for tensor in (position, scale, zero)]
        made = straight.rounded(*leaves, 8, torch.float32)
        made.backward(slope.to(device))
        found.append([made.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_attention_are_summed_in_a_fixed_order():
    """1024 tokens: several blocks of keys add to a query's gradient."""
    source = torch.Generator("cuda").manual_seed(0)
    shape = (8, 9, 1024, 64)
    q, k, v, grad = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=source) for _ in range(4)
    )
    found = []
    for _ in range(6):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with reproducible(torch.device("cuda")):
            scaled_dot_product_attention(*leaves, is_causal=True).backward(grad)
        found.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, found[0], strict=True))
