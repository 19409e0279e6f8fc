"""Straight-through rounding: its gradients against finite differences, and codes that only their
own positions move."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.quantize import quantize, trainable_scales
from billfish.solvers import straight

SCHEMES = [scheme for scheme in W4A16.examples() if not scheme.has_g_idx]
N, K = 4, 768


def difference(function, at, step=1e-4):
    """Gradient of a function of one tensor by central differences, an element at a time."""
    found = torch.zeros_like(at)
    for i in range(at.numel()):
        move = torch.zeros_like(at).view(-1)
        move[i] = step
        move = move.view_as(at)
        found.view(-1)[i] = (function(at + move) - function(at - move)) / (2 * step)
    return found


def clamped(position, scale, zero, levels):
    """The decoded weight without rounding; the range includes what would be rounded into it."""
    low, high = -zero - 0.5, levels - 0.5 - zero
    return torch.minimum(torch.maximum(position, low), high) * scale


@pytest.mark.parametrize("levels", [4, 8, 16, 256])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gradients_are_those_of_finite_differences(levels, symmetric):
    """The scale's is that of the rounded weight; the position's and the zero's are those of the
    weight that is not rounded, only clamped."""
    shape = (2, 3)
    position = (torch.rand(*shape, 8, dtype=torch.double) - 0.5) * levels * 1.4
    scale = torch.rand(*shape, 1, dtype=torch.double) + 0.5
    zero = torch.full_like(scale, levels // 2)
    if not symmetric:
        zero = torch.randint(0, levels, zero.shape).double()
    slope = torch.randn_like(position)
    inputs = [tensor.clone().requires_grad_() for tensor in (position, scale, zero)]
    made = straight.rounded(*inputs, levels, torch.double)
    (made * slope).sum().backward()
    outside = (position.round() < -zero) | (position.round() > levels - 1 - zero)
    assert outside.any() and not outside.all()

    def at(function):
        return lambda tensor: (function(tensor) * slope).sum()

    by_scale = difference(
        at(lambda s: straight.rounded(position, s, zero, levels, torch.double)), scale
    )
    torch.testing.assert_close(inputs[1].grad, by_scale)
    by_position = difference(at(lambda p: clamped(p, scale, zero, levels)), position)
    torch.testing.assert_close(inputs[0].grad, by_position)
    by_zero = difference(at(lambda z: clamped(position, scale, z, levels)), zero)
    torch.testing.assert_close(inputs[2].grad, by_zero)


def solved(scheme, spread=1.0):
    weight = torch.randn(N, K) * 0.05
    made = quantize(scheme, weight, None, "rtn", torch.float32)
    return made, weight + spread * torch.randn_like(weight) * 0.02


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.describe())
def test_a_solution_in_training(scheme):
    """As given until a step; gradients of every parameter as finite differences of the stored
    weight (scales in fp32 here, so that small steps show)."""
    found, _ = solved(scheme)
    part = found.trainable()
    same = part.settle()
    for name, tensor in found.tensors().items():
        assert torch.equal(same.tensors()[name], tensor), name
    assert torch.equal(part.weight(torch.float32), found.decoded)
    assert torch.equal(scheme.dequantize(same.tensors()), same.decoded)
    leaves = [*part.codes, *part.scales]
    assert len(leaves) == (2 if scheme.symmetric else 3)
    for leaf in leaves:
        leaf.requires_grad_()
    slope = torch.randn(N, K)
    (part.weight(torch.float32) * slope).sum().backward()
    by_group = (slope * found.decoded).view(*found.scales.shape, -1).sum(-1, keepdim=True)
    torch.testing.assert_close(part.scales[0].grad, by_group, rtol=1e-4, atol=1e-4)
    assert part.codes[0].grad.abs().sum() > 0
    alone = trainable_scales(scheme, found.tensors())
    assert alone.codes == [] and torch.equal(alone.weight(torch.float32), found.decoded)
    alone.scales[0].requires_grad_()
    (alone.weight(torch.float32) * slope).sum().backward()
    torch.testing.assert_close(alone.scales[0].grad, by_group, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.describe())
def test_a_step_of_the_scale_flips_no_code(scheme):
    found, _ = solved(scheme)
    part = found.trainable()
    part.change += 0.3 * (torch.rand_like(part.change) - 0.5)
    after = part.settle()
    assert torch.equal(after.codes, found.codes) and torch.equal(after.zeros, found.zeros)
    assert not torch.equal(after.scales, found.scales)
    assert torch.equal(scheme.dequantize(after.tensors()), after.decoded)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(SCHEMES), st.floats(0, 100))
def test_training_starts_from_the_solvers_codes(seed, scheme, spread):
    """However far error feedback moved a code from the target."""
    torch.manual_seed(seed)
    found, target = solved(scheme, spread)
    part = type(found)(**{**vars(found), "target": target}).trainable()
    assert torch.equal(part.settle().codes, found.codes)


def test_a_position_beyond_the_range_stays_a_code():
    found, _ = solved(W4A16(3, 32, symmetric=False))
    part = found.trainable()
    part.position += 50 * torch.randn_like(part.position)
    part.move += 20 * torch.randn_like(part.move)
    after = part.settle()
    assert after.codes.max() <= 7 and after.zeros.max() <= 7
    assert torch.equal(part.scheme.dequantize(after.tensors()), after.decoded)


def test_reordering_passes_gradients_back():
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    x, y = (torch.arange(120.0).view(3, 40).requires_grad_() for _ in range(2))
    made, wanted = straight.reordered(x, order, torch.argsort(order)), y[:, order]
    assert torch.equal(made, wanted)
    (made.square().sum() + wanted.square().sum()).backward()
    assert torch.equal(x.grad, y.grad)
