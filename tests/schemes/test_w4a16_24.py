"""w4a16_24: what its words mean and which are refused, which pairs are kept, what the quantizer
makes of a weight, training with the pattern fixed."""

from itertools import combinations

import pytest
import torch

from billfish.errors import UserError
from billfish.schemes.registry import from_options
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cpu import CpuOp as DenseOp
from billfish.schemes.w4a16_24 import W4A16Sparse, descent
from billfish.schemes.w4a16_24.cpu import CpuOp
from billfish.schemes.w4a16_24.pairs import FREE, GRID, Pairs
from billfish.schemes.w4a16_24.quantize import quantize, trainable_scales
from billfish.schemes.w4a16_24.scheme import MASKS, PAIRS, Fitted, kept_at, spread
from billfish.schemes.w4a16_24.walk import walk_order
from billfish.solvers.statistics import Statistics
from billfish.solvers.training import Adam, rate

N, K = 48, 256
BF16 = torch.bfloat16


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def layer(n=N, k=K, size=64, dtype=BF16):
    return W4A16Sparse(size), W4A16Sparse(size).random_tensors(n, k, dtype, seeded(n + k))


def inputs(k=K, tokens=1024, seed=0):
    """Some channels are large, and neighbours alike."""
    x = torch.randn(tokens, k, generator=seeded(k + seed))
    x += 0.7 * x.roll(1, 1)
    x[:, torch.randperm(k, generator=seeded(k))[: k // 10]] *= 8
    return x


def statistics(x, original=None):
    found = Statistics(x.shape[1])
    found.add(x, original)
    return found


def weight(n=N, k=K):
    return 0.02 * torch.randn(n, k, generator=seeded(n + k))


def most_in_a_four(decoded):
    padded = torch.nn.functional.pad(decoded, (0, -decoded.shape[1] % 4))
    return int((padded.view(len(decoded), -1, 4) != 0).sum(-1).max())


def output_error(decoded, exact, x):
    return float((x @ (decoded - exact).T).square().sum() / (x @ exact.T).square().sum())


# --- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group_size": 48}, "group size 48: is 128, 64, 32"),
        ({"group_size": 256}, "group size 256"),
        ({"group_size": 0}, "group size 0"),
        ({"group_size": "many"}, "whole number"),
        ({"mask": "random"}, "known are sparsegpt, wanda, magnitude"),
        ({"bits": 4}, "has no bits. It has group_size, mask"),
    ],
)
def test_parameters_that_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        from_options("w4a16_24", options)


def test_the_group_size_is_fitted_to_the_model():
    fitted = from_options("w4a16_24", {"mask": "wanda"})
    assert fitted == Fitted("wanda")
    assert fitted.fit([(64, 576), (64, 1536)]) == W4A16Sparse(64, "wanda")
    assert fitted.fit([(64, 4096)]) == W4A16Sparse(128, "wanda")
    assert W4A16Sparse(128).refuses(64, 576) and not W4A16Sparse(-1).refuses(64, 577)
    assert W4A16Sparse(128).misfit([(64, 576)])[1].startswith("Sizes that divide every k: 64, 32,")


# --- words ---------------------------------------------------------------------------------------


def test_words_by_hand():
    """Two fours and one input: code and place of each kept weight, lowest bits first."""
    scheme = W4A16Sparse(-1)
    codes = torch.tensor([[1, 15, 7, 9, 3, 8]])
    places = torch.tensor([[0, 3, 1, 2, 0, 1]])
    tensors = scheme.pack(codes, places, torch.tensor([[2.0]]), 1, 9)
    # behind the six codes 8 and 8; behind the six places 0 and 1, five times
    assert tensors["weight_packed"].tolist() == [[0x888397F1 - 2**32]]
    assert tensors["weight_meta"].tolist() == [[0b01000100010001000100_0100_1001_1100]]
    assert tensors["weight_shape"].tolist() == [1, 9]
    scheme.check(tensors)
    decoded = [-14, 0, 0, 14, 0, -2, 2, 0, -10]
    assert scheme.dequantize(tensors).tolist() == [decoded]
    x = torch.arange(9.0)[None]
    assert scheme.reference(tensors, x).tolist() == [[float(x[0] @ torch.tensor(decoded).float())]]
    found, where = scheme.kept(tensors)
    assert torch.equal(found, codes) and torch.equal(where, places)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 47, 128, 130])
def test_spread_and_kept_are_inverse(k):
    scheme, tensors = layer(8, k, -1)
    codes, places = scheme.kept(tensors)
    assert torch.equal(kept_at(spread(codes, places, k, 8), places, 8), codes)
    assert most_in_a_four(scheme.dequantize(tensors)) <= 2
    scheme.check(tensors)


def damaged(k, change):
    scheme, tensors = layer(8, k, -1)
    codes, places = scheme.kept(tensors)
    change(codes, places)
    return scheme, scheme.pack(codes, places, tensors["weight_scale"], 8, k)


def put(tensor, row, four, first, second):
    tensor[row, 2 * four], tensor[row, 2 * four + 1] = first, second


@pytest.mark.parametrize(("first", "second"), [(2, 2), (3, 1), (0, 0), (1, 0), (3, 3)])
def test_places_that_do_not_ascend_are_refused_by_name(first, second):
    scheme, tensors = damaged(64, lambda _, places: put(places, 5, 11, first, second))
    says = f"weight_meta has the places {first} and {second} in four 11 of row 5: .* ascend"
    with pytest.raises(UserError, match=says) as error:
        scheme.check(tensors)
    assert error.value.part == "weight_meta"


def test_weights_behind_the_last_input_are_refused_by_name():
    def behind(codes, places):  # of 50 inputs: the last four has two
        put(places, 3, 12, 1, 2)
        put(codes, 3, 12, 5, 9)

    scheme, tensors = damaged(50, behind)
    says = "weight_packed has the code 9 in four 12 of row 3, at place 2, .*behind.* 50 inputs"
    with pytest.raises(UserError, match=says) as error:
        scheme.check(tensors)
    assert error.value.part == "weight_packed"

    def zero(codes, places):
        behind(codes, places)
        put(codes, 3, 12, 5, 8)

    scheme, tensors = damaged(50, zero)
    scheme.check(tensors)


@pytest.mark.parametrize(
    ("name", "bits", "says"),
    [
        ("weight_packed", 0x1 << 24, "code 9 in four 3 of row 2"),
        ("weight_meta", 0b1100 << 28, "places other than 0 and 1 in four 7 of row 2"),
        ("weight_meta", 0b0100 << 28, "places 0 and 0 in four 7 of row 2"),
    ],
)
def test_bits_behind_the_last_four_are_refused(name, bits, says):
    """A last word is filled with empty fours: one layer has one form."""
    scheme, tensors = layer(8, 12, -1)
    scheme.check(tensors)
    flipped = bits - 2**32 if bits >= 2**31 else bits
    tensors[name][2, -1] ^= flipped
    with pytest.raises(UserError, match=says):
        scheme.check(tensors)


def test_where_a_layer_can_be_cut():
    scheme = W4A16Sparse(-1)
    assert scheme.refuses_cut(0, 7, 64) is None and scheme.refuses_cut(1, 32, 47) is None
    assert "32-bit words" in scheme.refuses_cut(1, 16, 64)
    assert "groups of 128" in W4A16Sparse(128).refuses_cut(1, 64, 256)
    tensors = scheme.random_tensors(6, 110, BF16, seeded())
    part = scheme.shard(tensors, 1, 64, 110)  # the last four is cut
    scheme.check(part)
    assert torch.equal(scheme.dequantize(part), scheme.dequantize(tensors)[:, 64:])


# --- the op --------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [47, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_op_gives_the_bits_of_w4a16s(k, dtype):
    scheme, tensors = layer(70, k, -1, dtype)
    codes, places = scheme.kept(tensors)
    dense = W4A16(4, -1)
    same = dense.pack(spread(codes, places, k, 8), tensors["weight_scale"], codes)
    op, bias = CpuOp(scheme, tensors), torch.randn(70, generator=seeded()).to(dtype)
    for m in (1, 5, 33):
        x = inputs(k, m).to(dtype)
        assert torch.equal(op(x, bias), DenseOp(dense, same)(x, bias))
    assert op.nbytes() == DenseOp(dense, same).nbytes() + tensors["weight_meta"].nbytes
    for name, tensor in op.canonical().items():
        assert torch.equal(tensor, tensors[name]), name


# --- which pair ----------------------------------------------------------------------------------


def correlated(seed=0):
    x = torch.randn(64, 4, generator=seeded(seed))
    x = x @ torch.randn(4, 4, generator=seeded(seed + 1)) + 0.3 * x
    return x.T @ x / 64


def test_the_pair_without_rounding_is_the_best_of_all():
    """Against all pairs, each with the least-squares solution of its two weights."""
    h, w = correlated(), torch.randn(4, 100, generator=seeded(2))
    pairs = Pairs(torch.linalg.inv(h)[None])
    free = torch.full((1, 100), FREE)
    found = pairs.pruned_only(slice(0, 1), w[None], free)[0]
    costs = []
    for kept in combinations(range(4), 2):
        k = list(kept)
        best = torch.zeros_like(w)
        best[k] = torch.linalg.solve(h[k][:, k], h[k] @ w)
        costs.append(((w - best) * (h @ (w - best))).sum(0))
    error = w - found
    cost = (error * (h @ error)).sum(0)
    torch.testing.assert_close(cost, torch.stack(costs).amin(0), rtol=1e-4, atol=1e-6)


def test_the_rounded_pair_is_near_the_best_of_all_codes():
    """Against all pairs and all 256 pairs of codes: never better, seldom much worse."""
    h, w = correlated(5), torch.randn(4, 60, generator=seeded(3))
    scale = torch.full((60,), 0.3)
    pairs = Pairs(torch.linalg.inv(h)[None])
    made, exact, pair = pairs.rounded(0, w, scale, torch.full((60,), FREE))
    where = torch.tensor(PAIRS)[pair].T
    kept = made.gather(0, where)
    assert torch.equal(kept, GRID.nearest(exact, scale, scale)) and most_in_a_four(made.T) <= 2
    grid = 0.3 * torch.cartesian_prod(torch.arange(-8.0, 8), torch.arange(-8.0, 8)).T  # (2, 256)
    best = torch.full((60,), torch.inf)
    for k in map(list, combinations(range(4), 2)):
        error = w[:, :, None].repeat(1, 1, 256)
        error[k] -= grid[:, None]
        best = torch.minimum(best, (error * torch.einsum("ij,jnc->inc", h, error)).sum(0).amin(1))
    error = w - made
    cost = (error * (h @ error)).sum(0)
    assert (cost >= best * (1 - 1e-4)).all()
    assert (cost <= best * (1 + 1e-4)).float().mean() > 0.7 and cost.sum() < 1.1 * best.sum()


def test_a_pair_that_is_given_is_kept():
    h, w = correlated(), torch.randn(4, 60, generator=seeded(3))
    given = torch.arange(60) % 6
    _, _, pair = Pairs(torch.linalg.inv(h)[None]).rounded(0, w, torch.full((60,), 0.3), given)
    assert torch.equal(pair, given)


def test_the_order_of_the_walk():
    """Groups, then fours in them, by decreasing diagonal; inputs of a four in their own order."""
    diagonal = torch.tensor([1, 1, 1, 1, 2, 2, 2, 2, 9, 0, 0, 0, 0, 0, 0, 10.0])
    order = walk_order(diagonal, 8).tolist()
    assert order == [12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3]


# --- the quantizer -------------------------------------------------------------------------------


def test_error_feedback_beats_masks_and_masks_beat_nearest():
    """On inputs that it has not seen."""
    x, unseen, w = inputs(), inputs(seed=1), weight()
    found = {
        mask: output_error(
            quantize(W4A16Sparse(64, mask), w, statistics(x), "gptq", BF16).decoded, w, unseen
        )
        for mask in MASKS
    }
    nearest = quantize(W4A16Sparse(64), w, None, "rtn", BF16)
    found["rtn"] = output_error(nearest.decoded, w, unseen)
    assert found["sparsegpt"] < 0.9 * found["wanda"] < 0.9 * found["magnitude"]
    assert found["magnitude"] < 0.9 * found["rtn"]


def test_descent_goes_on_from_the_walk(monkeypatch):
    x, w = inputs(), weight()

    def error(passes):
        monkeypatch.setattr(descent, "PASSES", passes)
        solved = quantize(W4A16Sparse(64), w, statistics(x), "gptq", BF16)
        W4A16Sparse(64).check(solved.tensors())
        assert solved.error == pytest.approx(output_error(solved.decoded, w, x), rel=1e-3)
        return solved.error

    walked, once, more = map(error, (0, 1, 4))
    assert more < 0.99 * once < 0.98 * 0.99 * walked


@pytest.mark.parametrize("method", ["gptq", "rtn"])
@pytest.mark.parametrize("k", [1, 2, 3, 47, 133])
def test_inputs_that_are_no_fours(k, method):
    x, w, scheme = inputs(k), weight(24, k), W4A16Sparse(-1)
    solved = quantize(scheme, w, statistics(x), method, BF16)
    tensors = solved.tensors()
    scheme.check(tensors)
    assert scheme.size(tensors) == (24, k) and solved.target.shape == (24, k)
    assert torch.equal(solved.decoded, scheme.dequantize(tensors))
    limit = 0.01 if k < 3 else 0.35
    assert output_error(solved.decoded, w, x) < limit and most_in_a_four(solved.decoded) <= 2


@pytest.mark.parametrize("mask", MASKS)
def test_a_pattern_that_is_there_is_kept(mask):
    w, x = weight(), inputs()
    keep = torch.tensor(PAIRS)[torch.randint(0, 6, (N, K // 4), generator=seeded())].flatten(1)
    w = spread(kept_at(w, keep, 0.0), keep, K)
    w[3, 4:8] = 0  # fewer than two
    solved = quantize(W4A16Sparse(64, mask), w, statistics(x), "gptq", BF16)
    assert "its pattern is kept" in solved.note and "rows" not in solved.note
    same = solved.places == keep
    same[3, 2:4] = True
    assert same.all()
    # with error feedback the kept weights still make up for each other's rounding
    nearest = quantize(W4A16Sparse(64, mask), w, statistics(x), "rtn", BF16)
    assert torch.equal(nearest.places[:3], keep[:3])
    assert solved.error < 0.9 * output_error(nearest.decoded, w, x) < 0.01

    stacked = torch.cat([w[:16], weight()[16:]])  # linears of one input, one of them 2:4
    solved = quantize(W4A16Sparse(64, mask), stacked, statistics(x), "gptq", BF16)
    assert f"in 16 of {N} rows" in solved.note and (solved.places[:3] == keep[:3]).all()


def test_drift_is_made_up_for():
    """Inputs that layers before changed: the output comes nearer to the original's."""
    original, w = inputs(), weight()
    x = original + 0.2 * torch.randn(original.shape, generator=seeded(9)) * original.std(0)
    x[:, 1:] += 0.1 * original[:, :-1]
    wanted = original @ w.T

    def far(found):
        decoded = quantize(W4A16Sparse(64), w, found, "gptq", BF16).decoded
        return float((x @ decoded.T - wanted).square().sum())

    assert far(statistics(x, original)) < 0.95 * far(statistics(x))


def test_without_a_usable_hessian_it_rounds_to_nearest():
    x, w = inputs(), weight()
    x[3, 5] = torch.inf
    solved = quantize(W4A16Sparse(64), w, statistics(x), "gptq", BF16)
    assert "rounded to nearest" in solved.note and solved.error is None
    kept = kept_at(w.abs(), solved.places, 0.0).view(N, -1, 2).sum(-1)
    assert torch.equal(kept, w.abs().view(N, -1, 4).topk(2).values.sum(-1))


# --- training ------------------------------------------------------------------------------------


def test_training_improves_and_keeps_the_pattern():
    """From round-to-nearest: of one layer's own error GPTQ leaves nothing to gain."""
    x, w = torch.randn(1024, K, generator=seeded()), weight()
    x += 0.7 * x.roll(1, 1)
    solved = quantize(W4A16Sparse(64), w, None, "rtn", BF16)
    part = solved.trainable()
    assert torch.equal(part.weight(torch.float32), solved.decoded)  # it starts where that ended
    adam = Adam([(part.codes, 1e-2), (part.scales, 1e-3)])
    for step in range(100):
        adam.set_rate(rate(step, 100))
        (x @ (part.weight(torch.float32) - w).T).square().sum().backward()
        adam.step()
    adam.end()
    settled = part.settle()
    assert torch.equal(settled.places, solved.places) and (settled.codes != solved.codes).any()
    assert output_error(settled.decoded, w, x) < 0.85 * output_error(solved.decoded, w, x)
    tensors = settled.tensors()
    assert {**tensors}.keys() == part.changed().keys()
    W4A16Sparse(64).check(tensors)
    assert torch.equal(W4A16Sparse(64).dequantize(tensors), part.weight(torch.float32))


@pytest.mark.parametrize(("k", "size"), [(256, 64), (47, -1)])
def test_scales_alone_are_trained(k, size):
    scheme, tensors = layer(N, k, size)
    tensors["weight_scale"].abs_()  # as quantizers leave them
    part = trainable_scales(scheme, tensors)
    assert part.codes == [] and torch.equal(part.weight(torch.float32), scheme.dequantize(tensors))
    (change,) = part.scales
    change.requires_grad_()
    part.weight(torch.float32).square().sum().backward()
    assert change.grad.shape == (*tensors["weight_scale"].shape, 1) and (change.grad > 0).all()
    with torch.no_grad():
        change.fill_(0.5)
    made = part.changed()
    assert made.keys() == {"weight_scale"}
    torch.testing.assert_close(
        made["weight_scale"], 1.5 * tensors["weight_scale"], rtol=2**-8, atol=0
    )
