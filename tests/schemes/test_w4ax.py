"""w4ax: what its words mean, how activations are rounded, exact sums, what the quantizer makes of a
weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.errors import UserError
from billfish.formats.grid import Grid
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.quantize import quantize as uniform
from billfish.schemes.w4ax import W4AX, cpu
from billfish.schemes.w4ax.activations import round_tokens
from billfish.schemes.w4ax.codes import rounded_input
from billfish.schemes.w4ax.cpu import CpuOp, fp32_product, int8_product, int8_works
from billfish.schemes.w4ax.quantize import (
    STRENGTH,
    channel_factors,
    quantize,
    trainable_scales,
)
from billfish.schemes.w4ax.scheme import LONGEST
from billfish.schemes.w4ax.walk import Walk, walk_order
from billfish.solvers.gptq import Factor
from billfish.solvers.statistics import Statistics

N, K = 48, 512


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def layer(n=N, k=K, size=64, dtype=torch.bfloat16):
    return W4AX(size), W4AX(size).random_tensors(n, k, dtype, seeded(n + k))


def inputs(k, tokens=1024, seed=0):
    """Some channels are large, and neighbours alike."""
    x = torch.randn(tokens, k, generator=seeded(k + seed))
    x += 0.7 * x.roll(1, 1)
    x[:, torch.randperm(k, generator=seeded(k))[: k // 10]] *= 8
    return x


def statistics(x):
    found = Statistics(x.shape[1])
    found.add(x)
    return found


def weight(n=N, k=K):
    made = 0.02 * torch.randn(n, k, generator=seeded(n + k))
    return made * (0.3 + torch.rand(n, k // 32, generator=seeded(k)).repeat_interleave(32, 1))


# --- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group_size": 48}, "group size 48: is 32, 64, 128 or a larger power of 2"),
        ({"group_size": 16}, "group size 16"),
        ({"group_size": -1}, "group size -1"),
        ({"group_size": "some"}, "group_size 'some': is a whole number"),
        ({"activations": "a4"}, "activations 'a4': known are a8, fmpq"),
        ({"bits": 4}, "has no bits"),
    ],
)
def test_options_are_checked(options, says):
    with pytest.raises(UserError, match=says):
        W4AX.from_options(options)


def test_the_group_size_is_fitted_to_the_model():
    fitted = W4AX.from_options({})
    assert fitted.fit([(576, 576), (576, 1536)]) == W4AX(64)
    assert fitted.fit([(64, 4096), (64, 14336)]) == W4AX(128)
    assert fitted.fit([(8, 96), (8, 1024)]) == W4AX(32)
    assert W4AX.from_options({"group_size": "32"}) == W4AX(32)
    reason, advice = W4AX(128).misfit([(8, 128), (8, 576)])
    assert "128 does not divide k = 576" in reason and "64, 32" in advice
    assert "multiple of 32" in W4AX(128).misfit([(8, 100)])[1]


def test_sums_fit_32_bits():
    assert W4AX().refuses(1, LONGEST) is None and "32 bits" in W4AX().refuses(1, 2 * LONGEST)
    assert LONGEST * 127 * 128 < 2**31 and cpu.BLOCK * 127 * 128 < 2**24
    tensors = {
        name: spec.empty("cpu").zero_()
        for name, spec in W4AX().tensors(1, 2 * LONGEST, torch.float32).items()
    }
    with pytest.raises(UserError, match="32 bits"):
        W4AX().check(tensors)


# --- words ---------------------------------------------------------------------------------------


def test_a_weight_by_hand():
    scheme = W4AX(32)
    tensors = {
        name: torch.zeros(spec.shape, dtype=spec.dtype)
        for name, spec in scheme.tensors(2, 320, torch.float16).items()
    }
    assert tensors["weight_packed"].shape == (2, 40) and tensors["group_scale"].shape == (2, 2)
    tensors["weight_packed"][1, 36] = 13 << 8  # input 8 * 36 + 2 = 290, of group 9
    tensors["group_scale"][1, 1] = 4 << 4  # group 8 + 1
    tensors["weight_scale"][:, 0] = torch.tensor([0.5, 0.25])
    got = scheme.dequantize(tensors)
    assert got[1, 290] == (13 - 8) * 5 * 0.25 and got[1, 289] == -8 * 5 * 0.25
    assert got[1, 0] == -8 * 0.25 and (got[0] == -8 * 0.5).all()
    scheme.check(tensors)


def test_all_weights_are_int8():
    scheme = W4AX(32)
    codes = torch.arange(512)[None] % 16
    q = torch.arange(16)[None] + 1
    tensors = scheme.pack(codes, q, torch.ones(1, 1))
    whole = (codes - 8) * q.repeat_interleave(32, 1)
    assert whole.min() == -128 and whole.max() == 112
    assert torch.equal(scheme.whole_weight(tensors).long(), whole)
    assert torch.equal(scheme.codes(tensors).long(), codes)
    assert torch.equal(scheme.scales(tensors).long(), q)
    assert torch.equal(
        CpuOp(scheme, tensors).canonical()["weight_packed"], tensors["weight_packed"]
    )


def test_bits_beyond_the_last_group_are_refused_by_name():
    scheme, tensors = layer(4, 320, 32)  # 10 groups: 24 bits of the second word are unused
    scheme.check(tensors)
    for bit in (8, 31):
        broken = {name: tensor.clone() for name, tensor in tensors.items()}
        broken["group_scale"][2, 1] ^= -(2**31) if bit == 31 else 1 << bit
        with pytest.raises(UserError, match="group_scale has bits set beyond the 10") as caught:
            scheme.check(broken)
        assert caught.value.part == "group_scale"


def test_shards_along_k_need_whole_groups_not_whole_words():
    scheme, tensors = layer(8, 320, 32)
    whole = scheme.dequantize(tensors)
    for begin, end in ((0, 96), (96, 320), (32, 64)):
        part = scheme.shard(tensors, 1, begin, end)
        scheme.check(part)
        assert torch.equal(scheme.dequantize(part), whole[:, begin:end])
    with pytest.raises(UserError, match="16 inputs are not whole groups of 32"):
        scheme.shard(tensors, 1, 0, 16)


# --- activations ---------------------------------------------------------------------------------


def by_hand(row):
    """One token in numpy's fp32, element by element."""
    import numpy as np

    row = np.asarray(row, dtype=np.float32)
    largest = np.abs(row).max()
    if largest == 0:
        return [0] * len(row), np.float32(0)
    factor = np.float32(127) / largest
    steps = [int(min(127, max(-127, np.rint(value * factor)))) for value in row]
    return steps, largest / np.float32(127)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: x == 0 or abs(x) > 2**-100),
        min_size=1,
    )
)
def test_tokens_are_rounded_as_the_format_says(row):
    x8, scale = round_tokens(torch.tensor([row]))
    steps, s = by_hand(row)
    assert x8[0].tolist() == steps and scale.item() == s


def test_ties_go_to_even():
    x8, scale = round_tokens(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]]))
    assert x8.tolist() == [[127, 0, 2, 2, 0, -2, -126]] and scale.item() == 1.0


def test_a_token_below_the_factors_range_stays_finite():
    x8, scale = round_tokens(torch.tensor([[1e-38, 0.0, -1e-39]]))
    assert x8.tolist() == [[127, 0, -127]] and 0 < scale.item() < 1e-39


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_and_numbers_that_are_none(dtype):
    """A token of zeros gives zeros; one with Inf or NaN a row of NaN, and no other row changes."""
    scheme, tensors = layer()
    x = torch.randn(6, K, generator=seeded()).to(dtype)
    clean = x.clone()
    x[1], x[2, 5], x[3, 0], x[4, 7] = 0, torch.inf, torch.nan, -torch.inf
    bias = torch.randn(N, generator=seeded()).to(dtype)
    op = CpuOp(scheme, tensors)
    for run in (op, lambda x: scheme.reference(tensors, x)):
        y = run(x)
        assert y[2:5].isnan().all() and (y[1] == 0).all()
        assert torch.equal(y[[0, 5]], run(clean)[[0, 5]]) and y[[0, 5]].isfinite().all()
    assert torch.equal(op(x, bias)[1], bias) and op(x, bias)[2:5].isnan().all()


def test_one_huge_outlier_takes_all_steps_of_its_token():
    scheme, tensors = layer()
    x = torch.randn(2, K, generator=seeded())
    x[0, 9] = 1e6
    sums, scale = scheme.whole_sums(tensors, x)
    assert torch.equal(sums[0], 127 * scheme.whole_weight(tensors)[:, 9].long())
    assert scale[0] == torch.tensor(1e6) / 127
    assert torch.equal(CpuOp(scheme, tensors)(x).double(), scheme.reference(tensors, x))


# --- sums ----------------------------------------------------------------------------------------


def extreme(m, n, k):
    x = torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=seeded(m))
    weight = torch.randint(-128, 113, (n, k), dtype=torch.int8, generator=seeded(n))
    x[0], weight[0], weight[1] = 127, -128, 112
    return x, weight


@pytest.mark.parametrize("product", [int8_product, fp32_product])
@pytest.mark.parametrize("m", [1, 2, 3, 16, 17, 65])
@pytest.mark.parametrize(("n", "k"), [(7, 32), (33, 576), (64, 4128)])
def test_products_are_exact(product, m, n, k):
    if product is int8_product and not int8_works():
        pytest.skip("this processor has no exact int8 product")
    x, weight = extreme(m, n, k)
    assert torch.equal(product(x, weight).long(), x.long() @ weight.long().T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("exact", [True, False])
def test_the_op_is_the_reference_rounded_once(dtype, exact, monkeypatch):
    if not exact:
        monkeypatch.setattr(cpu, "int8_works", lambda: False)
    scheme, tensors = layer(70, 2048, 128)
    op = CpuOp(scheme, tensors)
    for m in (1, 5, 40):
        x = inputs(2048, m).to(dtype)
        assert torch.equal(op(x), scheme.reference(tensors, x).to(dtype))
        sums, scale = scheme.whole_sums(tensors, x)
        x8, same = round_tokens(x)
        assert torch.equal(sums, x8.long() @ scheme.whole_weight(tensors).long().T)
        assert torch.equal(scale, same)
        bias = torch.randn(70, generator=seeded()).to(dtype)
        with_bias = scheme.reference(tensors, x).float() + bias.float()
        assert torch.equal(op(x, bias), with_bias.to(dtype))


def test_a_wrong_or_missing_int8_product_is_noticed(monkeypatch):
    def saturating(x, weight):  # as vpmaddubsw: unsigned times signed, pairs in 16 bits
        pairs = (x.int() + 128)[:, None] * weight.int()[None]
        pairs = pairs.view(len(x), len(weight), -1, 2).sum(-1).clamp(-(2**15), 2**15 - 1)
        return (pairs.sum(-1) - 128 * weight.int().sum(1)).int()

    def missing(x, weight):
        raise RuntimeError("not implemented")

    for product in (saturating, missing):
        monkeypatch.setattr(cpu, "int8_product", product)
        assert not int8_works.__wrapped__()


def test_rows_do_not_depend_on_their_batch(monkeypatch):
    scheme, tensors = layer()
    op, x = CpuOp(scheme, tensors), inputs(K, 33).bfloat16()
    together = op(x)
    assert CpuOp.batch_invariant
    assert torch.equal(torch.cat([op(row[None]) for row in x]), together)
    assert torch.equal(op(x.flip(0)).flip(0), together)
    monkeypatch.setattr(cpu, "SLICE", 5 * N)  # rows in portions
    monkeypatch.setattr(cpu, "LEAST", 1)
    assert torch.equal(op(x), together)


@pytest.mark.parametrize("activations", ["a8", "fmpq"])
def test_the_operator_is_traced(activations):
    """torch.compile and dispatch modes see an operator with an honest shape."""
    rotation = activations == "fmpq"
    scheme = W4AX(32, True, activations, 0.5 if rotation else 0.0, rotation)
    op = CpuOp(scheme, scheme.random_tensors(24, 128, torch.bfloat16, torch.Generator()))
    x, bias, rest = torch.randn(3, 128), torch.randn(24), op.rest
    inputs = (rest["weight_scale"], bias, rest.get("input_order"), rest.get("input_bits"))
    torch.library.opcheck(torch.ops.billfish.w4ax_cpu, (x, op.weight, *inputs, rotation))
    compiled = torch.compile(op, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, bias), op(x, bias))


def test_wrong_inputs_are_refused():
    scheme, tensors = layer()
    op = CpuOp(scheme, tensors)
    with pytest.raises(ValueError, match="513 columns, the layer takes 512"):
        op(torch.zeros(2, 513))
    with pytest.raises(UserError, match="float64"):
        op(torch.zeros(2, K, dtype=torch.float64))


# --- the quantizer -------------------------------------------------------------------------------


def output_error(decoded, exact, x):
    wrong = x @ (decoded - exact).T
    return float(wrong.square().sum() / (x @ exact.T).square().sum())


def test_gptq_is_better_than_nearest_and_near_free_scales():
    """On inputs that it has not seen."""
    x, unseen, w = inputs(K), inputs(K, seed=1), weight()
    found = {
        method: output_error(
            quantize(W4AX(64), w, statistics(x), method, torch.bfloat16).decoded, w, unseen
        )
        for method in ("gptq", "rtn")
    }
    free = uniform(W4A16(4, 64), w, statistics(x), "gptq", torch.bfloat16).decoded
    assert found["gptq"] < 0.8 * found["rtn"]
    assert found["gptq"] < 1.05 * output_error(free, w, unseen)


def test_the_error_that_is_told_is_the_error():
    x, w = inputs(K), weight()
    solved = quantize(W4AX(64), w, statistics(x), "gptq", torch.bfloat16)
    assert solved.error == pytest.approx(output_error(solved.decoded, w, x), rel=1e-3)
    W4AX(64).check(solved.tensors())


def test_scales_use_their_range():
    """Every row has a scale near the top: else its base would be too coarse."""
    solved = quantize(W4AX(32), weight(), statistics(inputs(K)), "gptq", torch.bfloat16)
    assert solved.q.min() >= 1 and solved.q.max() <= 16
    assert (solved.q.amax(1) >= 10).all() and len(solved.q.unique()) > 8


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [32, 128, 256])
def test_the_walk_is_gptq_column_by_column(size, symmetric):
    """Groups of any size, against a plain loop over columns with the same scales."""
    x, w = inputs(K), weight()
    hessian = statistics(x).hessian
    order = walk_order(hessian.diagonal(), size)
    groups = (order // size).view(-1, size)
    assert (groups == groups[:, :1]).all() and sorted(order.tolist()) == list(range(K))
    factor = Factor.of(hessian, order=order)
    base, q = torch.full((N, 1), 2**-9), torch.full((N, K // size), 8.0)
    codes, q, zero = Walk(factor, size, Grid(4, symmetric)).run(w, base, q, torch.full_like(q, 8.0))
    assert bool((zero == 8).all()) == symmetric
    todo, upper = w[:, order].double(), factor.upper.double()
    for j, column in enumerate(order.tolist()):
        step = (q[:, column // size] * base[:, 0]).double()
        middle = zero[:, column // size].double()
        code = torch.minimum(torch.maximum((todo[:, j] / step).round(), -middle), 15 - middle)
        error = (todo[:, j] - code * step) / upper[j, j]
        todo[:, j + 1 :] -= error[:, None] * upper[j, j + 1 :]
        assert ((code + middle - codes[:, column]).abs() > 0).float().mean() < 0.05  # fp32, fp64


def test_rows_of_zeros_stay_zeros():
    w = weight()
    w[3], w[4, :64] = 0, 0
    for given_, method in ((statistics(inputs(K)), "gptq"), (None, "rtn")):
        solved = quantize(W4AX(64), w, given_, method, torch.bfloat16)
        assert (solved.decoded[3] == 0).all() and solved.decoded.isfinite().all()
        if method == "rtn":
            assert (solved.decoded[4, :64] == 0).all()


def test_without_usable_inputs_it_rounds_to_nearest():
    bad = inputs(K)
    bad[3, 3] = torch.nan
    solved = quantize(W4AX(64), weight(), statistics(bad), "gptq", torch.bfloat16)
    assert "rounded to nearest" in solved.note and solved.decoded.isfinite().all()
    nearest = quantize(W4AX(64), weight(), None, "rtn", torch.bfloat16)
    assert torch.equal(solved.codes, nearest.codes)


# --- channel factors -----------------------------------------------------------------------------


def test_channel_factors_follow_the_root_mean_square():
    squares, own = inputs(K).square().sum(0), torch.arange(K)
    factor = channel_factors(W4AX(64), squares, own)
    assert factor[3] / factor[8] == pytest.approx(
        float((squares[3] / squares[8]) ** (STRENGTH / 2))
    )
    assert factor.max() * factor.min() == pytest.approx(1)
    squares[7] = 0  # a channel that is always zero
    assert channel_factors(W4AX(64), squares, own).isfinite().all()


def test_channels_that_cannot_be_evened_out_stay():
    squares, own = inputs(K).square().sum(0), torch.arange(K)
    assert channel_factors(W4AX(64), squares, own // 2 * 2) is None
    assert channel_factors(W4AX(64), squares * torch.inf, own) is None
    assert channel_factors(W4AX(64), 0 * squares, own) is None


# --- training ------------------------------------------------------------------------------------


@pytest.fixture
def solved():
    return quantize(W4AX(64), weight(), statistics(inputs(K)), "gptq", torch.bfloat16)


def test_training_starts_where_the_solver_ended(solved):
    for part in (solved.trainable(), trainable_scales(W4AX(64), solved.tensors())):
        assert torch.equal(part.weight(torch.float32), solved.decoded)
        assert torch.equal(part.settle().decoded, solved.decoded)
        for name, tensor in part.changed().items():
            assert torch.equal(tensor, solved.tensors()[name]), name


@pytest.mark.parametrize("alone", [False, True])
def test_steps_reach_what_is_stored(solved, alone):
    """Gradients of codes, q and bases; after large steps the weight is what would be stored."""
    part = trainable_scales(W4AX(64), solved.tensors()) if alone else solved.trainable()
    leaves = [*part.codes, *part.scales]
    assert len(leaves) == (1 if alone else 3)
    for leaf in leaves:
        leaf.requires_grad_()
    (part.weight(torch.float32) - weight().flip(0)).square().sum().backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all() and leaf.grad.any()
        leaf.requires_grad_(False)
        leaf -= leaf.grad / leaf.grad.abs().max()
    stored = part.settle()
    W4AX(64).check(stored.tensors())
    torch.testing.assert_close(part.weight(torch.float32), stored.decoded, rtol=1e-5, atol=0)
    assert torch.equal(W4AX(64).dequantize(stored.tensors()), stored.decoded)
    assert not torch.equal(stored.base, solved.base)
    assert torch.equal(stored.q, solved.q) == torch.equal(stored.codes, solved.codes) == alone


def test_q_moves_when_its_change_passes_the_middle(solved):
    part = solved.trainable()
    part.change_q += 0.51 / part.q
    assert torch.equal(part.settle().q.int(), (solved.q.int() + 1).clamp(max=16))


def test_inputs_are_rounded_with_the_gradient_of_x():
    x = torch.randn(3, K, generator=seeded(), requires_grad=True)
    y = rounded_input(W4AX(64), None, x)
    x8, scale = round_tokens(x.detach())
    torch.testing.assert_close(y, x8 * scale)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
