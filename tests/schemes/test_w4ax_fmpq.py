"""w4ax with fmpq and with asymmetric weights: inputs of 4 and 8 bits by the format's rule, exact
sums, orders and zeros that are refused, what the quantizer makes of them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.errors import UserError
from billfish.schemes.base import together
from billfish.schemes.w4ax import W4AX
from billfish.schemes.w4ax.activations import REACH, hadamard, round_blocks, round_tokens
from billfish.schemes.w4ax.codes import TrainableWhole
from billfish.schemes.w4ax.cpu import CpuOp
from billfish.schemes.w4ax.quantize import channel_order, choose_inputs, quantize, trainable_scales
from billfish.schemes.w4ax.search import largest_q
from billfish.solvers.statistics import Statistics

N, K = 48, 512
FMPQ = W4AX(64, True, "fmpq", 0.84, True)
PLAIN = W4AX(64, True, "fmpq", 0.84, False)
ASYM = W4AX(64, False)
BOTH = W4AX(32, False, "fmpq", 0.5, True)
EVERY = [FMPQ, PLAIN, ASYM, BOTH, W4AX(256, True, "fmpq", 1.0, True), W4AX(32, True, "fmpq")]
every = pytest.mark.parametrize("scheme", EVERY, ids=str)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def layer(scheme, n=N, k=K, dtype=torch.bfloat16):
    return scheme.random_tensors(n, k, dtype, seeded(n + k))


def inputs(tokens=1024, seed=0):
    """A tenth of the channels is large, at random places; neighbours are alike."""
    x = torch.randn(tokens, K, generator=seeded(K + seed))
    x += 0.7 * x.roll(1, 1)
    x[:, outliers()] *= 8
    return x


def outliers():
    return torch.randperm(K, generator=seeded(1))[: K // 10]


def statistics(x, placed=False):
    found = Statistics(x.shape[1], placed=placed)
    found.add(x)
    return found


def weight():
    return 0.02 * torch.randn(N, K, generator=seeded(3)) + 0.01


def output_error(y, exact):
    return float((y - exact).square().sum() / exact.square().sum())


# --- parameters ----------------------------------------------------------------------------------


def test_options_have_the_papers_share_and_rotation():
    assert W4AX.from_options({"activations": "fmpq", "group_size": 64}) == FMPQ
    given_ = {"activations": "fmpq", "group_size": "64", "rotation": "false", "a4_share": "0.84"}
    assert W4AX.from_options(given_) == PLAIN
    assert W4AX.from_options({"symmetric": False, "group_size": 64}) == ASYM
    assert W4AX.from_options({"activations": "fmpq"}).fit([(8, 576)]) == FMPQ
    assert "84 % 4 bit, rotated" in FMPQ.describe() and "asym" in ASYM.describe()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"activations": "fmpq", "a4_share": "most"}, "a4_share 'most': is a number from 0 to 1"),
        ({"activations": "fmpq", "a4_share": 1.5}, "a4_share 1.5"),
        ({"activations": "fmpq", "a4_share": "nan"}, "a4_share nan"),
        ({"activations": "fmpq", "rotation": "often"}, "rotation 'often': is true or false"),
        ({"a4_share": 0.5}, "belong to activations fmpq, these are a8"),
        ({"rotation": True}, "belong to activations fmpq, these are a8"),
        ({"symmetric": 1}, "symmetric 1: is true or false"),
    ],
)
def test_options_are_checked(options, says):
    with pytest.raises(UserError, match=says):
        W4AX.from_options(options)


# --- words ---------------------------------------------------------------------------------------


@every
def test_canonical_tensors_are_what_ops_give_back(scheme):
    tensors = layer(scheme)
    scheme.check(tensors)
    again = CpuOp(scheme, tensors).canonical()
    assert again.keys() == tensors.keys() == scheme.tensors(N, K, torch.bfloat16).keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_a_weight_by_hand():
    """Rotated, in another order, with a zero."""
    scheme = W4AX(32, False, "fmpq", 0.5, True)
    codes, q, zero = torch.full((1, 64), 5), torch.tensor([[3, 2]]), torch.tensor([[5, 4]])
    codes[0, 1] = 7  # of the first block, in 4 bits
    order = torch.arange(64).flip(0)
    bits = torch.tensor([4, 8])
    tensors = scheme.pack(codes, q, torch.tensor([[0.25]]), zero, order, bits)
    scheme.check(tensors)
    whole = scheme.whole_weight(tensors)
    assert whole[0, :32].tolist() == [0, 6] + 30 * [0] and (whole[0, 32:] == 2).all()
    got = scheme.dequantize(tensors)[0].flip(0)
    sign = torch.tensor([1.0, -1.0]).repeat(16)  # the second row of Sylvester's matrix
    torch.testing.assert_close(got[:32], 6 * 0.25 * sign / math.sqrt(32))
    assert (got[32:] == 0.5).all()


def damaged(tensors, name, index, value):
    broken = {key: tensor.clone() for key, tensor in tensors.items()}
    broken[name].view(-1)[index] = value
    return broken


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("input_order", K, "no permutation of the inputs 0 to 511"),
        ("input_order", -1, "no permutation"),
        ("input_order", "twice", "no permutation"),
        ("input_bits", 0, "other than 4 and 8"),
        ("input_bits", 5, "other than 4 and 8"),
    ],
)
def test_impossible_inputs_are_refused(name, value, says):
    tensors = layer(FMPQ)
    if value == "twice":
        value = int(tensors["input_order"][7])
    with pytest.raises(UserError, match=says) as caught:
        FMPQ.check(damaged(tensors, name, 3, value))
    assert caught.value.part == name


def test_zeros_must_leave_bytes():
    """Of all pairs exactly those are refused of which a code is no byte."""
    scheme = W4AX(32, False)
    for zero in range(16):
        for q in range(1, 17):
            codes = torch.arange(16).repeat(2)[None]
            tensors = scheme.pack(
                codes, torch.tensor([[q]]), torch.ones(1, 1), torch.tensor([[zero]])
            )
            fits = -zero * q >= -128 and (15 - zero) * q <= 127
            assert (q <= largest_q(torch.tensor(float(zero)))) == fits
            if fits:
                scheme.check(tensors)
                whole = (codes - zero) * q
                assert torch.equal(scheme.whole_weight(tensors).long(), whole)
                again = CpuOp(scheme, tensors).canonical()
                assert torch.equal(again["weight_packed"], tensors["weight_packed"])
            else:
                with pytest.raises(UserError, match="its weights are no bytes") as caught:
                    scheme.check(tensors)
                assert caught.value.part == "group_zero"


def test_bits_beyond_the_last_zero_are_refused():
    scheme = W4AX(64, False)
    tensors = scheme.random_tensors(4, 320, torch.float16, seeded())  # 5 groups: 12 bits unused
    tensors["group_zero"][1, 0] ^= 1 << 20
    with pytest.raises(UserError, match="group_zero has bits set beyond the 5 groups"):
        scheme.check(tensors)


def test_a_layer_is_cut_where_its_order_is():
    tensors = layer(FMPQ)
    inside = torch.cat([torch.randperm(256, generator=seeded()) + at for at in (0, 256)])
    tensors["input_order"] = inside.to(torch.int32)
    whole = FMPQ.dequantize(tensors)
    for begin, end in ((0, 256), (256, 512)):
        part = FMPQ.shard(tensors, 1, begin, end)
        FMPQ.check(part)
        assert torch.equal(FMPQ.dequantize(part), whole[:, begin:end])
    with pytest.raises(UserError, match="cut into inputs 0 to 127: its stored columns there read"):
        FMPQ.shard(tensors, 1, 0, 128)
    rows = FMPQ.shard(tensors, 0, 8, 24)
    assert torch.equal(FMPQ.dequantize(rows), whole[8:24])


# --- activations ---------------------------------------------------------------------------------


def by_hand(row, bits, rotation):
    """One token in numpy's fp32, number by number."""
    f = np.float32
    size = len(row) // len(bits)
    blocks = [np.asarray(row[i * size :][:size], dtype=f) for i in range(len(bits))]
    if rotation:
        for i in (i for i, b in enumerate(bits) if b == 4):
            z, h = blocks[i].copy(), 1
            while h < size:
                for j in range(0, size, 2 * h):
                    for t in range(j, j + h):
                        z[t], z[t + h] = z[t] + z[t + h], z[t] - z[t + h]
                h *= 2
            blocks[i] = z * f(1 / math.sqrt(size))
    tops = [np.abs(block).max() for block in blocks]
    a = max(v if b == 8 else v * f(127 / 112) for v, b in zip(tops, bits, strict=True))
    if a == 0:
        return [0] * len(row), f(0)
    inverse, found = f(127) / a, []
    for block, v, b in zip(blocks, tops, bits, strict=True):
        if b == 8:
            found += [int(min(127, max(-127, np.rint(x * inverse)))) for x in block]
            continue
        q = f(min(16, max(1, np.ceil((v * inverse) * f(REACH)))))
        found += [int(min(7, max(-8, np.rint(x * (inverse / q)))) * q) for x in block]
    return found, a / f(127)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**31), st.booleans(), st.lists(st.sampled_from([4, 8]), min_size=1))
def test_blocks_are_rounded_as_the_format_says(seed, rotation, bits):
    g = seeded(seed)
    x = torch.randn(len(bits), 32, generator=g)
    x *= 2.0 ** torch.randint(-12, 12, (len(bits), 1), generator=g)  # blocks of all sizes
    x[torch.rand(x.shape, generator=g) < 0.1] = 0
    x8, scale = round_blocks(x.view(1, -1), torch.tensor(bits, dtype=torch.uint8), rotation)
    steps, s = by_hand(x.flatten().numpy(), bits, rotation)
    assert x8[0].tolist() == steps and scale.item() == s


def test_eight_bits_alone_are_a8():
    x, bits = inputs(5), torch.full((8,), 8, dtype=torch.uint8)
    for rotation in (False, True):
        for ours, a8 in zip(round_blocks(x, bits, rotation), round_tokens(x), strict=True):
            assert torch.equal(ours, a8)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_the_hadamard_matrix_is_sylvesters_and_its_own_inverse(size):
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    torch.testing.assert_close(hadamard(torch.eye(size)), matrix / math.sqrt(size))
    x = torch.randn(3, 5, size, generator=seeded())
    torch.testing.assert_close(hadamard(hadamard(x)), x)
    assert hadamard(x[:, :0]).shape == (3, 0, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every
def test_zeros_and_numbers_that_are_none(scheme, dtype):
    """A token of zeros gives zeros; one with Inf or NaN a row of NaN, and no other row changes."""
    tensors = layer(scheme)
    x = torch.randn(7, K, generator=seeded()).to(dtype)
    clean = x.clone()
    x[1], x[2, 5], x[3, 0], x[4, 7] = 0, torch.inf, torch.nan, -torch.inf
    x[5, 3], x[5, 70] = torch.inf, -torch.inf
    op = CpuOp(scheme, tensors)
    for run in (op, lambda x: scheme.reference(tensors, x)):
        y = run(x)
        assert y[2:6].isnan().all() and (y[1] == 0).all()
        assert torch.equal(y[[0, 6]], run(clean)[[0, 6]]) and y[[0, 6]].isfinite().all()


@every
def test_tiny_and_huge_numbers_stay_numbers(scheme):
    tensors = layer(scheme)
    x = torch.randn(3, K, generator=seeded())
    x[0] *= 1e-39
    x[1] *= 1e30
    x[2, 9] = 1e8
    y = CpuOp(scheme, tensors)(x)
    assert y.isfinite().all() and torch.equal(y.double(), scheme.reference(tensors, x))
    x8, scale = scheme.round_inputs(tensors, x)
    assert x8.abs().amax(1).min() >= 64 and (scale > 0).all()


# --- sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every
def test_the_op_is_the_sum_in_whole_numbers_scaled_once(scheme, dtype):
    tensors = layer(scheme)
    op = CpuOp(scheme, tensors)
    for m in (1, 5, 40):
        x = inputs(m).to(dtype)
        x8, scale = scheme.round_inputs(tensors, x)
        sums = x8.long() @ scheme.whole_weight(tensors).long().T
        assert torch.equal(scheme.whole_sums(tensors, x)[0], sums)
        y = sums.float() * (scale * tensors["weight_scale"].float().T)
        assert torch.equal(op(x), y.to(dtype)) and torch.equal(
            scheme.reference(tensors, x).float(), y
        )
        bias = torch.randn(N, generator=seeded()).to(dtype)
        assert torch.equal(op(x, bias), (y + bias.float()).to(dtype))


@every
def test_rows_do_not_depend_on_their_batch(scheme):
    op, x = CpuOp(scheme, layer(scheme)), inputs(33).bfloat16()
    assert torch.equal(torch.cat([op(row[None]) for row in x]), op(x))
    assert torch.equal(op(x.flip(0)).flip(0), op(x))


def test_layers_of_different_orders_are_not_joined():
    tensors = FMPQ.random_tensors(8, K, torch.float16, seeded(0))
    others = tensors | {"input_order": tensors["input_order"].flip(0)}
    ops = [CpuOp(FMPQ, each) for each in (tensors, others)]
    assert CpuOp.join(ops) is None
    before, _ = together([op.weight for op in ops])
    ops[1].rest |= {name: ops[0].rest[name].clone() for name in ("input_order", "input_bits")}
    whole = CpuOp.join(ops)
    assert torch.equal(whole.weight, before)
    assert ops[1].rest["input_order"] is whole.rest["input_order"]


# --- the quantizer -------------------------------------------------------------------------------


def test_outliers_share_the_blocks_of_8_bits():
    found = choose_inputs(FMPQ, weight(), statistics(inputs()))
    assert found.bits.tolist() == [8] + 7 * [4]  # 0.84 of 8 are 7
    assert set(outliers().tolist()) <= set(found.order[:64].tolist())
    placed = choose_inputs(FMPQ, weight(), statistics(inputs(), placed=True))
    assert placed.order.tolist() == list(range(K)) and (placed.bits == 8).sum() == 1
    squares = inputs().square().sum(0)
    assert torch.equal(channel_order(FMPQ, squares), found.order)
    assert channel_order(ASYM, squares) is None


def test_rotation_and_order_lower_the_error_of_inputs():
    """On tokens that were not seen, with exact weights. Numbers have long tails."""
    tails = 1 / torch.rand(1024, K, generator=seeded(5)).sqrt()
    x, unseen, w = inputs() * tails, inputs(seed=1) * tails.flip(0), weight()

    def error(scheme, placed=False):
        solved = quantize(scheme, w, statistics(x, placed), "gptq", torch.bfloat16)
        return output_error(solved.rounding(unseen) @ w.T, unseen @ w.T)

    rotated, plain, in_place = error(FMPQ), error(PLAIN), error(FMPQ, placed=True)
    assert error(W4AX(64)) < rotated < 0.8 * plain
    assert rotated < 0.8 * in_place


def test_asymmetric_weights_are_better_for_groups_that_lie_to_one_side():
    x, unseen = inputs(), inputs(seed=1)
    w = weight() + 0.03 * torch.randn(N, K // 64, generator=seeded(4)).repeat_interleave(64, 1)
    errors = {}
    for scheme in (W4AX(64), ASYM):
        solved = quantize(scheme, w, statistics(x), "gptq", torch.bfloat16)
        scheme.check(solved.tensors())
        errors[scheme.symmetric] = output_error(unseen @ solved.decoded.T, unseen @ w.T)
    assert errors[False] < 0.7 * errors[True]


@every
def test_the_error_that_is_told_is_the_error_of_the_weight(scheme):
    x, w = inputs(), weight()
    solved = quantize(scheme, w, statistics(x), "gptq", torch.bfloat16)
    told = output_error(x @ solved.decoded.T, x @ w.T)
    assert solved.error == pytest.approx(told, rel=1e-2) and told < 0.02
    rounded = solved.rounding(x[:9])
    torch.testing.assert_close(
        rounded @ solved.decoded.T, CpuOp(scheme, solved.tensors())(x[:9]), rtol=1e-3, atol=1e-3
    )


# --- training ------------------------------------------------------------------------------------


@pytest.fixture(params=[FMPQ, ASYM, BOTH], ids=str)
def solved(request):
    return quantize(request.param, weight(), statistics(inputs()), "gptq", torch.bfloat16)


def test_training_starts_where_the_solver_ended(solved):
    for part in (solved.trainable(), trainable_scales(solved.scheme, solved.tensors())):
        torch.testing.assert_close(part.weight(torch.float32), solved.decoded, rtol=0, atol=1e-6)
        assert torch.equal(part.settle().decoded, solved.decoded)
        for name, tensor in part.changed().items():
            assert torch.equal(tensor, solved.tensors()[name]), name
        x = inputs(3)
        assert torch.equal(part.rounding(x), solved.rounding(x))


def test_steps_reach_what_is_stored(solved):
    """Gradients of all parts; after large steps every code is still a byte's."""
    part: TrainableWhole = solved.trainable()
    leaves = [*part.codes, *part.scales]
    assert len(leaves) == (3 if solved.scheme.symmetric else 4)
    for leaf in leaves:
        leaf.requires_grad_()
    (part.weight(torch.float32) - weight().flip(0)).square().sum().backward()
    for leaf, size in zip(leaves, (1, 3, 1, 1) if len(leaves) == 4 else (1, 1, 1), strict=True):
        assert leaf.grad.isfinite().all() and (leaf.grad.any() or leaf is leaves[1])
        leaf.requires_grad_(False)
        leaf -= size * (leaf.grad / leaf.grad.abs().max().clamp(min=1e-30))
    if not solved.scheme.symmetric:
        part.move += torch.randn(part.move.shape, generator=seeded()) * 4
    stored = part.settle()
    solved.scheme.check(stored.tensors())
    torch.testing.assert_close(part.weight(torch.float32), stored.decoded, rtol=1e-4, atol=1e-6)
    assert not torch.equal(stored.codes, solved.codes)
    assert torch.equal(stored.zero, solved.zero) == solved.scheme.symmetric


def test_rounding_has_the_gradient_of_x(solved):
    x = torch.randn(3, K, generator=seeded(), requires_grad=True)
    y = solved.rounding(x)
    assert not torch.equal(y, x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
