"""w2416: what a budget allows, what its words mean, what the quantizer makes of a weight, and its
parameters in training."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.errors import UserError
from billfish.schemes.base import bits_per_weight
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.quantize import quantize as uniform
from billfish.schemes.w2416 import codes
from billfish.schemes.w2416.quantize import quantize, trainable_scales
from billfish.schemes.w2416.scheme import (
    W2416,
    ZERO,
    ZERO_STEP,
    pack_bands,
    pack_base,
    round_base,
    unpack_bands,
    unpack_base,
)
from billfish.schemes.w2416.search import FRACTIONS, Groups, second_order
from billfish.schemes.w2416.shares import part_size, shares
from billfish.solvers.statistics import Statistics

N, K = 64, 1024


def statistics(k, tokens=512):
    """Inputs of which a few channels are large, and neighbours alike."""
    source = torch.Generator().manual_seed(k)
    x = torch.randn(tokens, k, generator=source)
    x += 0.7 * x.roll(1, 1)
    x[:, torch.randperm(k, generator=source)[: k // 10]] *= 8
    found = Statistics(k)
    found.add(x)
    return found


def weight(n=N, k=K):
    source = torch.Generator().manual_seed(n + k)
    made = 0.02 * torch.randn(n, k, generator=source)
    made[torch.rand(n, k, generator=source) < 0.001] *= 12
    return made


@pytest.fixture(scope="module")
def solved():
    return quantize(W2416(2.91, 0.002), weight(), statistics(K), "gptq", torch.bfloat16)


# --- budgets -------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4096), st.floats(2.45, 3.9), st.floats(0, 0.05))
def test_true_bits_keep_the_budget_and_use_it(groups, budget, outliers):
    """For 128 outputs and more; less than an outlier of each band and part is left over."""
    scheme, k = W2416(budget, outliers), 16 * groups
    if scheme.refuses(128, k):
        return
    bits = bits_per_weight(scheme, 128, k, torch.float16)
    share = scheme.shares(k)
    assert bits <= budget and share.parts * share.part == k
    assert (share.two > 0 and 32 * 128 * k * (budget - bits) < 128 * k * 33) or share.two == 1
    if share.four:
        assert share.outliers >= outliers * 16 * share.part


def test_parts_of_real_models_are_those_of_their_shards():
    for k, size in ((576, 576), (1536, 768), (4096, 512), (14336, 896), (28672, 896), (11008, 688)):
        assert part_size(k) == size
        for shards in (2, 4, 8):
            if k // shards >= size and k % shards == 0 and (k // shards) % size == 0:
                assert part_size(k // shards) == size
                assert shares(k // shards, 2.91, 0.001) == shares_with(k, k // shards // size)
    assert W2416().refuses(64, 16 * 1031) is not None  # a prime: no parts


def shares_with(k, parts):
    found = shares(k, 2.91, 0.001)
    return type(found)(parts, found.two, found.four, found.outliers)


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({"budget": 2.0}, "2.45 to 3.9 bits"),
        ({"budget": "4.5"}, "2.45 to 3.9 bits"),
        ({"budget": "much"}, "is a number"),
        ({"outliers": 0.2}, "0 to 0.05"),
        ({"bits": 2}, "has no bits"),
    ],
)
def test_options_are_checked(given_, says):
    with pytest.raises(UserError, match=says):
        W2416.from_options(given_)


# --- words ---------------------------------------------------------------------------------------


def test_a_word_is_a_band():
    values = torch.arange(48)[:, None] * torch.tensor([1, 3])
    for bits, dtype in ((2, torch.int32), (4, torch.int64)):
        fields = values % 2**bits
        words = pack_bands(fields, bits, dtype)
        assert words.shape == (3, 2) and words.dtype == dtype
        assert torch.equal(unpack_bands(words, bits), fields)
        for i in range(16):
            field = (int(words[1, 1]) >> bits * i) & (2**bits - 1)
            assert field == fields[16 + i, 1]


def test_second_order_scales_have_eight_bits():
    base = torch.cat([torch.logspace(-6, 2.3, 500), torch.tensor([0.0, 1e-30, 1e9])])
    rounded = round_base(base)
    offset = torch.arange(len(base)) % 16
    back, offsets = unpack_base(pack_base(rounded, offset))
    assert torch.equal(back, rounded) and torch.equal(offsets, offset)
    assert ((rounded[:500] / base[:500] - 1).abs() <= 2**-8 + 2**-11).all()
    assert (rounded > 0).all() and torch.equal(round_base(rounded), rounded)


def test_a_weight_by_hand():
    scheme = W2416(3.3, 0.0)
    share = scheme.shares(96)
    assert (share.parts, share.two, share.four) == (1, 4, 2)
    tensors = {
        name: torch.zeros(spec.shape, dtype=spec.dtype)
        for name, spec in scheme.tensors(16, 96, torch.float16).items()
    }
    tensors["input_bits"][:] = torch.tensor([2, 4, 2, 2, 4, 2])
    tensors["weight_packed"][5, 1] = 3 << 14  # code 3 of input 7 in the second 2-bit group
    tensors["weight_zero"][0, 1] = 2 << 10
    tensors["scale_code"][0, 1] = 9 << 20
    tensors["scale_base"][0, 1] = int(pack_base(torch.tensor([0.5]), torch.tensor([4])))
    tensors["weight_packed_4"][6, 3] = 13 << 8  # of the second 4-bit group: inputs 8 to 15
    tensors["weight_scale_4"][6] = 0.25
    tensors["outlier_place"][0, 0, 0] = 6 * 96 + 74
    tensors["outlier_value"][0, 0, 0] = 1.5
    got = scheme.dequantize(tensors)
    assert got[5, 32 + 7] == (3 - (ZERO + 2 * ZERO_STEP)) * 13 * 0.5
    assert got[6, 64 + 8 + 2] == (13 - 8) * 0.25 + 1.5


def test_impossible_values_are_refused_by_name():
    scheme = W2416(3.3)
    good = scheme.random_tensors(32, 96, torch.float16, torch.Generator().manual_seed(0))
    scheme.check(good)
    for name, value, says in (
        ("input_bits", 3, "neither 2 nor 4"),
        ("input_bits", 4, "groups of 4 bits in each"),
        ("scale_base", -16, "Inf or NaN"),
        ("outlier_place", -1, "beyond the 1536"),
    ):
        bad = {key: tensor.clone() for key, tensor in good.items()}
        bad[name].view(-1)[:2] = value
        with pytest.raises(UserError, match=says) as caught:
            scheme.check(bad)
        assert caught.value.part == name


# --- the quantizer -------------------------------------------------------------------------------


def test_a_search_finds_the_best_of_all_scales_and_zeros():
    """Of those that it tries; against every one, an element at a time."""
    groups = Groups(torch.randn(3, 4, 16), None)
    groups.search()
    for g in range(3):
        for row in range(4):
            w = groups.weights[g, row]
            best = min(
                float(((((w / s + z).round().clamp(0, 3) - z) * s - w) ** 2).sum())
                for s in (groups.range[g, row] * f for f in FRACTIONS)
                for z in (ZERO + ZERO_STEP * i for i in range(4))
            )
            assert groups.best[g, row] == pytest.approx(best, rel=1e-5)


def test_second_order_scales_are_near():
    scales = 0.01 * (1 + torch.rand(32, 5))
    base, offset = second_order(scales)
    code = (scales / base.repeat_interleave(16, 0)).round() - offset.repeat_interleave(16, 0)
    assert code.min() >= 0 and code.max() <= 15
    found = (code + offset.repeat_interleave(16, 0)) * base.repeat_interleave(16, 0)
    assert (found / scales - 1).abs().max() < 0.04


def test_better_than_two_bits_everywhere_and_error_feedback_helps(solved):
    """At 2.91 true bits against uniform 2 bits in groups of 16, which take 3.125."""
    known = statistics(K)
    two = uniform(W4A16(2, 16, False), weight(), known, "gptq", torch.bfloat16)
    nearest = quantize(solved.scheme, weight(), known, "rtn", torch.bfloat16)
    assert solved.error < 0.6 * two.error and solved.error < 0.6 * nearest.error
    assert nearest.error > 0


def test_sensitive_groups_get_four_bits():
    """Those of large inputs."""
    k = 512
    known = Statistics(k)
    x = torch.randn(400, k)
    x[:, 64:96] *= 10
    x[:, 480:496] *= 10
    known.add(x)
    found = quantize(W2416(), weight(32, k), known, "gptq", torch.bfloat16).tensors()
    assert (found["input_bits"][[4, 5, 30]] == 4).all()


def test_outliers_are_exact(solved):
    """Large weights of 2-bit groups; as exact as their dtype."""
    scheme, tensors = solved.scheme, solved.tensors()
    index = scheme.outlier_index(tensors).flatten()
    assert len(index.unique()) == len(index) > 100
    two = tensors["input_bits"][index % K // 16] == 2
    assert two.all()
    exact = quantize(scheme, weight(), None, "rtn", torch.bfloat16)
    index = scheme.outlier_index(exact.tensors()).flatten()
    assert torch.allclose(exact.decoded.view(-1)[index], weight().view(-1)[index], rtol=2**-7)
    large = (weight().abs() > 0.15) & (exact.tensors()["input_bits"] == 2).repeat_interleave(16)
    assert large.any() and (exact.decoded - weight())[large].abs().max() < 0.002


def test_stacked_linears_share_their_order(solved):
    parts = [solved.rows(0, 32), solved.rows(32, 48), solved.rows(48, 64)]
    for part in parts:
        assert torch.equal(part.tensors()["input_bits"], solved.tensors()["input_bits"])
    assert torch.equal(torch.cat([part.decoded for part in parts]), solved.decoded)
    assert torch.equal(torch.cat([part.energy for part in parts]), solved.energy)


def test_portions_of_rows_are_the_whole(solved, monkeypatch):
    """Rows are walked and decoded some at a time; here one band at a time."""
    monkeypatch.setitem(importlib.import_module(quantize.__module__).WALKED, "cpu", 1)
    monkeypatch.setattr(codes, "DECODED", 1)
    found = quantize(solved.scheme, weight(), statistics(K), "gptq", torch.bfloat16)
    assert torch.equal(found.decoded, found.scheme.dequantize(found.tensors()))
    assert torch.equal(found.tensors()["input_bits"], solved.tensors()["input_bits"])
    # products of other shapes may round otherwise, and a tie of rounding fall elsewhere
    assert (found.decoded == solved.decoded).float().mean() > 0.99
    assert found.energy.shape == solved.energy.shape
    assert found.error == pytest.approx(solved.error, rel=1e-2)


def test_a_weight_of_zeros_stays_zero():
    found = quantize(W2416(), torch.zeros(32, 512), statistics(512), "gptq", torch.bfloat16)
    assert found.decoded.abs().max() < 1e-6
    found.scheme.check(found.tensors())


# --- training ------------------------------------------------------------------------------------


def test_training_starts_where_the_solver_ended(solved):
    part = solved.trainable()
    same = part.settle().tensors()
    for name, tensor in solved.tensors().items():
        assert torch.equal(same[name], tensor), name
    torch.testing.assert_close(part.weight(torch.float32), solved.decoded, rtol=1e-6, atol=1e-8)
    alone = trainable_scales(solved.scheme, solved.tensors())
    assert alone.codes == [] and alone.changed().keys() == {"scale_base", "weight_scale_4"}
    torch.testing.assert_close(alone.weight(torch.float32), solved.decoded, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("alone", [False, True])
def test_gradients_are_those_of_the_weight_without_rounding(solved, alone):
    """A scale's: what its weights change by; a code's: a step of its group; an outlier's too."""
    scheme, tensors = solved.scheme, solved.tensors()
    part = trainable_scales(scheme, tensors) if alone else solved.trainable()
    leaves = [*part.codes, *part.scales]
    for leaf in leaves:
        leaf.requires_grad_()
    slope = torch.randn(N, K)
    (part.weight(torch.float32) * slope).sum().backward()
    added = torch.zeros(N * K)
    added[part.index] = part.value
    of_scales = slope * (solved.decoded - added.view(N, K))  # d weight / d relative scale
    two, four = of_scales[:, part.order].split(
        [part.start_2[0].numel(), part.start_4[0].numel()], 1
    )
    by_group = two.view(part.start_2.shape).sum(-1)
    if alone:
        by_group = by_group.view(N // 16, 16, -1).sum(1)
    torch.testing.assert_close(
        part.change.grad.view(by_group.shape), by_group, rtol=1e-3, atol=1e-4
    )
    by_part = four.view(part.start_4.shape).sum(-1, keepdim=True)
    torch.testing.assert_close(part.change_4.grad, by_part, rtol=1e-3, atol=1e-4)
    if alone:
        return
    scale = scheme.scales_2(tensors)[..., None]
    steps = slope[:, part.order[: two.shape[1]]].view(part.start_2.shape) * scale
    torch.testing.assert_close(part.position_2.grad, steps, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(part.move.grad, slope.view(-1)[part.index] * part.step)


def test_any_training_ends_in_a_layer(solved):
    """However far parameters went: what is settled decodes to the weight in training."""
    torch.manual_seed(3)
    part = solved.trainable()
    for tensor, size in ((part.position_2, 4.0), (part.position_4, 9.0), (part.move, 2.0)):
        tensor += size * torch.randn_like(tensor)
    for tensor in (part.change, part.change_4):
        tensor += 0.4 * (torch.rand_like(tensor) - 0.5)
    after = part.settle()
    after.scheme.check(after.tensors())
    assert not torch.equal(after.tensors()["scale_code"], solved.tensors()["scale_code"])
    torch.testing.assert_close(after.decoded, part.weight(torch.float32), rtol=1e-5, atol=1e-7)
    alone = trainable_scales(after.scheme, after.tensors())
    alone.change += 0.2 * torch.rand_like(alone.change)
    later = {**after.tensors(), **alone.changed()}
    expected = alone.weight(torch.float32)
    torch.testing.assert_close(after.scheme.dequantize(later), expected, rtol=1e-5, atol=1e-7)


def test_a_step_of_the_scale_flips_no_code(solved):
    part = solved.trainable()
    part.change += 0.3 * (torch.rand_like(part.change) - 0.5)
    after = part.settle().tensors()
    for name in ("weight_packed", "weight_packed_4", "weight_zero", "input_bits"):
        assert torch.equal(after[name], solved.tensors()[name])
