"""Gate and up as one op: interleaving rows and its inverse; which layers can be joined."""

import pytest
import torch
from torch.nn.functional import silu

from billfish.kernels.device import Gpu
from billfish.schemes.base import Reference
from billfish.schemes.gated import Part
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cpu import CpuOp
from billfish.schemes.w4a16.cuda import op as cuda
from billfish.schemes.w4a16.cuda.gated import RUN, apart, order
from billfish.schemes.w4a16.cuda.op import CudaOp, InvariantOp, StripeOp


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Ops of a GPU arrange here, and their products are the oracle's."""

    def product(op, x, bias=None, gated=False):
        y = Reference(op.scheme, op.canonical())(x, bias)
        gate, up = apart(y).chunk(2, -1)
        return silu(gate) * up if gated else y

    gpu = Gpu(0, "a Hopper", "sm_90a", 132, 232448, 233472, 0)
    monkeypatch.setattr(cuda, "gpu", lambda device: gpu)
    monkeypatch.setattr(CudaOp, "_prepare", lambda op: None)
    monkeypatch.setattr(CudaOp, "__call__", product)


def layer(scheme, n, k, dtype=torch.bfloat16):
    groups = 1 if scheme.group_size == -1 else k // scheme.group_size
    codes, zeros = (torch.randint(2**scheme.bits, (n, each)).byte() for each in (k, groups))
    tensors = scheme.pack(codes, (torch.rand(n, groups) * 0.02 + 0.001).to(dtype), zeros)
    if scheme.has_g_idx:
        tensors["weight_g_idx"] = torch.arange(k, dtype=torch.int32) // scheme.group_size
    return tensors


def same(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_order_is_eight_gates_then_their_ups():
    places = order(48).tolist()
    assert places[:24] == [*range(8), *range(24, 32), *range(8, 16)] and RUN == 8
    y = torch.randn(2, 3, 48)
    assert torch.equal(apart(y[..., places]), y)


@pytest.mark.parametrize("op", [CudaOp, InvariantOp])
@pytest.mark.parametrize("n", [64, 72, 1536])  # of gates: bands of 64 rows may end anywhere
@pytest.mark.parametrize(
    "scheme", [W4A16(4, 128), W4A16(4, 32, False), W4A16(3, 64, False)], ids=str
)
def test_parts_come_back_and_both_run(op, n, scheme):
    each, k = [layer(scheme, n, 256) for _ in range(2)], 256
    ops = [op(scheme, tensors) for tensors in each]
    gated = op.gate(ops)
    assert type(gated.whole) is op and gated.whole.nbytes() >= sum(p.nbytes() for p in gated.parts)
    for part, tensors in zip(gated.parts, each, strict=True):
        same(part.canonical(), tensors)
        assert part.nbytes() == gated.whole.nbytes() // 2
    x = torch.randn(3, k).bfloat16()
    gate, up = (Reference(scheme, tensors)(x) for tensors in each)
    assert torch.equal(gated(x), silu(gate) * up)
    assert torch.equal(gated.both(x), torch.cat([gate, up], -1))
    assert torch.equal(gated.parts[0](x), gate) and torch.equal(gated.parts[1](x), up)
    bias = torch.randn(n).bfloat16()
    assert torch.equal(gated.parts[1](x, bias), up + bias)


def test_one_layer_that_is_both():
    scheme = W4A16(4, 64)
    tensors = layer(scheme, 144, 128)
    gated = CudaOp.gate([CudaOp(scheme, tensors)])
    (part,), x = gated.parts, torch.randn(5, 128).bfloat16()
    same(part.canonical(), tensors)
    y = Reference(scheme, tensors)(x)
    assert torch.equal(part(x), y) and torch.equal(gated.both(x), y)
    assert torch.equal(gated(x), silu(y[:, :72]) * y[:, 72:])


def test_parts_know_what_they_belong_to():
    scheme = W4A16(4, 64)
    gated, other = (
        CudaOp.gate([CudaOp(scheme, layer(scheme, 64, 128)) for _ in range(2)]) for _ in range(2)
    )
    again = Part.gate(gated.parts)
    assert again.whole is gated.whole and Part.join(gated.parts) is None
    assert Part.gate([gated.parts[0], other.parts[1]]) is None
    assert Part.gate(gated.parts[::-1]) is None
    assert Part.refuses(scheme, 64, 128, torch.device("cpu")).endswith(".")


def test_what_has_no_kernel_for_it(monkeypatch):
    def none(op, first, second, rows=(64, 64)):
        tensors = [layer(each, n, 128) for each, n in zip((first, second), rows, strict=True)]
        return op.gate([op(first, tensors[0]), op(second, tensors[1])]) is None

    plain = W4A16(4, 64)
    assert not none(CudaOp, plain, plain) and not none(CudaOp, W4A16(8, 64), W4A16(8, 64))
    assert all(none(op, plain, plain) for op in (CpuOp, Reference, StripeOp))
    assert none(CudaOp, plain, W4A16(4, 32))
    assert none(CudaOp, plain, W4A16(4, 64, False))
    assert none(CudaOp, W4A16(4, 64, True, True), W4A16(4, 64, True, True))
    assert none(CudaOp, plain, plain, (64, 128)) and none(CudaOp, plain, plain, (60, 60))
    ampere = Gpu(0, "an Ampere", "sm_80", 108, 166912, 167936, 0)
    monkeypatch.setattr(cuda, "gpu", lambda device: ampere)
    assert none(CudaOp, plain, plain)
