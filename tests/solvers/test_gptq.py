"""GPTQ against a textbook loop in fp64; damping, `undrift`, and Hessians that cannot be
factored."""

import pytest
import torch

from billfish.formats.grid import Grid
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16 import quantize as methods
from billfish.schemes.w4a16.quantize import quantize
from billfish.solvers import gptq
from billfish.solvers.gptq import Factor, GridRounder, GroupRounder, inverse_factor, solve, undrift
from billfish.solvers.statistics import Statistics

N, K, SIZE = 10, 48, 16
GRIDS = [Grid(2), Grid(3, symmetric=False), Grid(4), Grid(4, symmetric=False), Grid(8)]
every_grid = pytest.mark.parametrize("grid", GRIDS, ids=str)


def correlated(tokens=400, k=K, seed=0, size=1.0):
    """Inputs with channels of different sizes that depend on each other."""
    source = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=source) / k**0.5 + 0.5 * torch.eye(k)
    x = torch.randn(tokens, k, generator=source) @ mix
    return x * torch.linspace(0.3, 3, k)[torch.randperm(k, generator=source)] * size


def problem(grid, seed=0, size=SIZE):
    x = correlated(seed=seed)
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed + 1))
    groups = weight.view(N, -1, size)
    scale, zero = grid.fit(groups.amin(-1), groups.amax(-1), torch.bfloat16)
    return weight, x.T @ x / len(x), scale, zero


def on_grid(weight, factor, grid, scale, zero):
    return solve(weight, factor, GridRounder(grid, scale, zero, weight.shape[1]))


def rounded(weight, grid, scale, zero):
    groups = weight.view(N, scale.shape[1], -1)
    return grid.encode(groups, scale[..., None], zero[..., None]).view_as(weight)


def loss(weight, codes, hessian, grid, scale, zero):
    """tr(E H E^T) in fp64."""
    groups = codes.view(N, scale.shape[1], -1)
    decoded = grid.decode(groups, scale[..., None], zero[..., None]).view_as(weight)
    error = (weight - decoded).double()
    return float(((error @ hessian.double()) * error).sum())


# --- the solver ----------------------------------------------------------------------------------


def textbook(weight, hessian, grid, scale, zero):
    """Optimal brain quantization, one weight at a time: round it, then move the weights not yet
    rounded by -error / [H^-1]_qq * [H^-1]_q, H being that of the rest. fp64, no factorization."""
    n, k = weight.shape
    size = k // scale.shape[1]
    hessian = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(k).double()
    order = sorted(range(k), key=lambda q: -hessian[q, q].item())
    weight, codes = weight.double(), torch.empty(n, k)
    for step, q in enumerate(order):
        rest = torch.tensor(order[step:])
        inverse = torch.linalg.inv(hessian[rest][:, rest])
        for row in range(n):
            s, z = scale[row, q // size].item(), zero[row, q // size].item()
            code = min(max(round(weight[row, q].item() / s) + z, 0), grid.levels - 1)
            codes[row, q] = code
            error = (weight[row, q] - (code - z) * s) / inverse[0, 0]
            weight[row, rest] -= error * inverse[0]
    return codes


@every_grid
def test_equals_the_textbook(grid, monkeypatch):
    """Static order: columns by decreasing diagonal, each with the scale of its own group."""
    monkeypatch.setattr(gptq, "BLOCK", 16)  # three blocks: the lazy update is in it
    weight, hessian, scale, zero = problem(grid)
    factor = Factor.of(hessian)
    assert factor.note is None
    assert not torch.equal(factor.order, torch.arange(K))
    diagonal = hessian.diagonal()[factor.order]
    assert bool((diagonal[:-1] >= diagonal[1:]).all())
    codes = on_grid(weight, factor, grid, scale, zero)
    assert torch.equal(codes, textbook(weight, hessian, grid, scale, zero))


@every_grid
@pytest.mark.parametrize("seed", range(3))
def test_beats_rounding_on_correlated_inputs(grid, seed):
    weight, hessian, scale, zero = problem(grid, seed)
    codes = on_grid(weight, Factor.of(hessian), grid, scale, zero)
    assert torch.equal(codes, codes.round())
    assert codes.min() >= 0 and codes.max() <= grid.levels - 1
    plain = loss(weight, rounded(weight, grid, scale, zero), hessian, grid, scale, zero)
    assert loss(weight, codes, hessian, grid, scale, zero) < 0.8 * plain


@every_grid
def test_independent_inputs_leave_nothing_to_compensate(grid):
    weight, hessian, scale, zero = problem(grid)
    diagonal = torch.diag(hessian.diagonal())
    codes = on_grid(weight, Factor.of(diagonal), grid, scale, zero)
    assert torch.equal(codes, rounded(weight, grid, scale, zero))


@every_grid
def test_rows_are_independent(grid):
    weight, hessian, scale, zero = problem(grid)
    factor = Factor.of(hessian)
    codes = on_grid(weight, factor, grid, scale, zero)
    for rows in (slice(0, 1), slice(3, 7), slice(5, None)):
        assert torch.equal(
            on_grid(weight[rows], factor, grid, scale[rows], zero[rows]), codes[rows]
        )


@pytest.mark.parametrize("block", [1, 7, 48, 1000])
def test_blocks_change_only_the_order_of_sums(block, monkeypatch):
    weight, hessian, scale, zero = problem(Grid(4))
    codes = on_grid(weight, Factor.of(hessian), Grid(4), scale, zero)
    monkeypatch.setattr(gptq, "BLOCK", block)
    assert torch.equal(on_grid(weight, Factor.of(hessian), Grid(4), scale, zero), codes)


def test_arguments_are_left_alone():
    weight, hessian, scale, zero = problem(Grid(4))
    hessian[3] = hessian[:, 3] = 0
    before = [tensor.clone() for tensor in (weight, hessian, scale, zero)]
    on_grid(weight, Factor.of(hessian), Grid(4), scale, zero)
    undrift(weight, Factor.of(hessian), hessian)
    for tensor, copy in zip((weight, hessian, scale, zero), before, strict=True):
        assert torch.equal(tensor, copy)


# --- Hessians that are hard to factor ------------------------------------------------------------


def test_factor_of_the_inverse():
    hessian = problem(Grid(4))[1]
    upper, note = inverse_factor(hessian)
    damped = hessian.double() + 0.01 * hessian.double().diagonal().mean() * torch.eye(K)
    assert note is None
    assert torch.equal(upper, upper.triu())
    assert torch.allclose((upper.T @ upper).double() @ damped, torch.eye(K).double(), atol=1e-3)


def test_a_singular_hessian_needs_no_more_than_the_first_damping():
    """Fewer tokens than channels, as in every expert of a mixture."""
    x = correlated(tokens=5)
    upper, note = inverse_factor(x.T @ x / 5)
    assert note is None and bool(torch.isfinite(upper).all())


def indefinite(lowest):
    """As rounding leaves it: one eigenvalue is `lowest`, the mean of the diagonal is 1."""
    source = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(K, K, generator=source, dtype=torch.float64)).Q
    values = torch.full((K,), (K - lowest) / (K - 1), dtype=torch.float64)
    values[0] = lowest
    return (basis @ torch.diag(values) @ basis.T).float()


@pytest.mark.parametrize(
    ("lowest", "note"),
    [
        (-0.02, "damping 0.03, float32"),
        (-0.2, "damping 0.3, float32"),
        (-0.9, "damping 1.0, float32"),
    ],
)
def test_the_ladder_is_climbed_and_told(lowest, note):
    assert Factor.of(indefinite(lowest)).note == note
    scheme, weight = W4A16(4, SIZE), problem(Grid(4))[0]
    solved = quantize(scheme, weight, known(indefinite(lowest)), "gptq", torch.bfloat16)
    assert solved.note == note


def test_fp64_is_the_last_step():
    """A trace beyond fp32: activations near 1e19."""
    factor = Factor.of(torch.eye(8) * 1e38)
    assert factor.note == "damping 0.01, float64"
    assert bool(torch.isfinite(factor.upper).all())


def broken(value):
    hessian = problem(Grid(4))[1].clone()
    hessian[5] = hessian[:, 5] = value
    return hessian


def known(hessian, drift=None):
    """Statistics as if one token had left exactly these."""
    statistics = Statistics(K)
    statistics._outer, statistics._drift, statistics.tokens = hessian, drift, 1
    return statistics


HOPELESS = [broken(torch.nan), broken(torch.inf), -torch.eye(K), indefinite(-2.0)]


@pytest.mark.parametrize("hessian", HOPELESS, ids=["nan", "inf", "negative", "indefinite"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_what_cannot_be_factored_is_rounded_to_nearest_and_said(hessian, symmetric):
    assert inverse_factor(hessian) is None
    assert Factor.of(hessian) is None
    scheme, weight = W4A16(4, SIZE, symmetric), problem(Grid(4))[0]
    fallen = quantize(scheme, weight, known(hessian, torch.ones(K, K)), "gptq", torch.bfloat16)
    plain = quantize(scheme, weight, None, "rtn", torch.bfloat16)
    assert "Hessian not positive definite at any damping: rounded to nearest" in fallen.note
    for name in ("codes", "scales", "zeros", "decoded"):
        assert torch.equal(getattr(fallen, name), getattr(plain, name)), name
    assert fallen.energy is None and fallen.error is None and plain.note is None


@pytest.mark.parametrize("statistics", [None, Statistics(K)], ids=["none", "no tokens"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_no_token_is_rounded_to_nearest_and_said(method, statistics):
    weight = problem(Grid(4))[0]
    solved = quantize(W4A16(4, SIZE), weight, statistics, method, torch.bfloat16)
    plain = quantize(W4A16(4, SIZE), weight, None, "rtn", torch.bfloat16)
    assert "saw no calibration token: rounded to nearest" in solved.note
    assert torch.equal(solved.codes, plain.codes) and torch.equal(solved.scales, plain.scales)


# --- inputs that are never on --------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 1e-2])
def test_dead_columns_do_not_disturb_the_others(size):
    """Live columns get the codes they would get alone, also where activations are small."""
    x = correlated(size=size)
    live = torch.arange(K) % 4 != 1
    x[:, ~live] = 0
    hessian = x.T @ x / len(x)
    grid, weight = Grid(4), problem(Grid(4))[0]
    scale, zero = grid.fit(weight.amin(-1, True), weight.amax(-1, True), torch.bfloat16)
    codes = on_grid(weight, Factor.of(hessian), grid, scale, zero)
    alone = on_grid(weight[:, live], Factor.of(hessian[live][:, live]), grid, scale, zero)
    assert torch.equal(codes[:, live], alone)
    assert torch.equal(codes[:, ~live], rounded(weight, grid, scale, zero)[:, ~live])
    plain = loss(weight, rounded(weight, grid, scale, zero), hessian, grid, scale, zero)
    assert loss(weight, codes, hessian, grid, scale, zero) < 0.8 * plain


def test_all_columns_dead():
    weight, _, scale, zero = problem(Grid(4))
    factor = Factor.of(torch.zeros(K, K))
    assert factor.note is None
    codes = on_grid(weight, factor, Grid(4), scale, zero)
    assert torch.equal(codes, rounded(weight, Grid(4), scale, zero))
    solved = quantize(W4A16(4, SIZE), weight, known(torch.zeros(K, K)), "gptq", torch.bfloat16)
    plain = quantize(W4A16(4, SIZE), weight, None, "rtn", torch.bfloat16)
    assert torch.equal(solved.codes, plain.codes) and solved.error == 0.0


# --- drift ---------------------------------------------------------------------------------------


def drifted(x):
    """x behind quantized layers -> y in the original model, and the statistics of both."""
    mix = torch.randn(K, K, generator=torch.Generator().manual_seed(7)) / K**0.5
    y = x + 0.2 * x @ mix + 0.05 * correlated(seed=8)  # most of it can be told from x
    statistics = Statistics(K)
    statistics.add(x, y)
    return y, statistics


@pytest.mark.parametrize("n", [N, 2 * K])  # fewer rows than columns, and more
def test_undrift_is_the_least_squares_solution(monkeypatch, n):
    monkeypatch.setattr(gptq, "UNDRIFT", 1.0)
    monkeypatch.setattr(gptq, "DAMPING", (1e-9,))
    # The condition number is 31. With correlated()'s 19271, sums in fp32 leave three digits or
    # four, as the library adds.
    source = torch.Generator().manual_seed(6)
    x = torch.randn(400, K, generator=source) + 0.5 * torch.randn(400, 1, generator=source)
    y, statistics = drifted(x)
    weight = torch.randn(n, K, generator=torch.Generator().manual_seed(1))
    factor = Factor.of(statistics.hessian)
    target = undrift(weight, factor, statistics.drift)
    exact = torch.linalg.lstsq(x.double(), y.double() @ weight.double().T).solution.T
    assert torch.allclose(target.double(), exact, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(target, weight, atol=0.05)
    monkeypatch.setattr(gptq, "UNDRIFT", 0.25)
    part = undrift(weight, factor, statistics.drift) - weight
    assert torch.allclose(part, 0.25 * (target - weight), atol=1e-5)


def test_undrift_brings_the_output_nearer_to_the_original():
    x = correlated()
    y, statistics = drifted(x)
    weight = problem(Grid(4))[0]
    target = undrift(weight, Factor.of(statistics.hessian), statistics.drift)
    before, after = ((v @ x.T - weight @ y.T).square().sum() for v in (weight, target))
    assert after < 0.7 * before
    plain = quantize(W4A16(8, SIZE), weight, known(statistics.hessian), "gptq", torch.float32)
    moved = quantize(W4A16(8, SIZE), weight, statistics, "gptq", torch.float32)
    apart = [((s.decoded @ x.T) - weight @ y.T).square().sum() for s in (plain, moved)]
    assert apart[1] < 0.7 * apart[0]


def test_undrift_gives_up_where_it_is_not_finite():
    weight, hessian, _, _ = problem(Grid(4))
    factor = Factor.of(hessian)
    assert undrift(weight, factor, hessian * torch.nan) is weight
    assert torch.equal(undrift(weight, factor, torch.zeros(K, K)), weight)
    plain = quantize(W4A16(4, SIZE), weight, known(hessian), "gptq", torch.bfloat16)
    given_up = known(hessian, hessian * torch.nan)
    solved = quantize(W4A16(4, SIZE), weight, given_up, "gptq", torch.bfloat16)
    assert torch.equal(solved.codes, plain.codes)


# --- quantize ------------------------------------------------------------------------------------


def test_error_is_that_of_the_output():
    x = correlated()
    statistics = Statistics(K)
    statistics.add(x)
    weight = problem(Grid(4))[0]
    errors = {}
    for method in ("rtn", "awq", "gptq"):
        solved = quantize(W4A16(4, SIZE), weight, statistics, method, torch.bfloat16)
        lost = ((weight - solved.decoded) @ x.T).double().square().sum()
        total = (weight @ x.T).double().square().sum()
        assert solved.error == pytest.approx(float(lost / total), rel=1e-3)
        errors[method] = solved.error
        share = solved.rows(2, 5)
        assert torch.equal(share.codes, solved.codes[2:5]) and share.note == solved.note
        expected = ((weight - solved.decoded)[2:5] @ x.T).square().sum()
        assert share.error == pytest.approx(
            float(expected / (weight[2:5] @ x.T).square().sum()), rel=1e-3
        )
    assert errors["gptq"] < 0.8 * errors["rtn"]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_rows_at_a_time_change_nothing(method, monkeypatch):
    _, statistics = drifted(correlated())
    weight = torch.randn(150, K, generator=torch.Generator().manual_seed(3))
    whole = quantize(W4A16(4, SIZE, False), weight, statistics, method, torch.bfloat16)
    monkeypatch.setitem(methods.ROW_CODES, "cpu", 0)  # 64 rows at a time
    parts = quantize(W4A16(4, SIZE, False), weight, statistics, method, torch.bfloat16)
    for name in ("codes", "scales", "zeros", "decoded"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name


# --- rounders ------------------------------------------------------------------------------------


@every_grid
def test_any_rule_column_by_column_is_the_grids_own_loop(grid, monkeypatch):
    """A rule in torch's operators against the compiled loop; ties may fall to either side."""
    monkeypatch.setattr(gptq, "BLOCK", 16)
    weight, hessian, scale, zero = problem(grid)
    factor = Factor.of(hessian)

    def nearest(columns, places):
        group = places // SIZE
        return grid.nearest(columns.clone(), scale.T[group], zero.T[group])

    decoded = solve(weight, factor, GroupRounder(1, nearest))
    codes = on_grid(weight, factor, grid, scale, zero).view(N, -1, SIZE)
    wanted = grid.decode(codes, scale[..., None], zero[..., None]).view_as(weight)
    assert (decoded - wanted).abs().max() < 1e-4


def two_of_four(columns, places):
    """The two largest of each four neighbours stay, without rounding."""
    assert (places == places[0] + torch.arange(4)).all()
    kept = columns.abs().topk(2, dim=0).indices
    return torch.zeros_like(columns).scatter(0, kept, columns.gather(0, kept))


def test_four_columns_together_are_chosen_with_error_feedback(monkeypatch):
    monkeypatch.setattr(gptq, "BLOCK", 16)
    weight, hessian, _, _ = problem(Grid(4))
    factor = Factor.of(hessian, together=4)
    assert sorted(factor.order.tolist()) == list(range(K))
    sparse = solve(weight, factor, GroupRounder(4, two_of_four))
    assert ((sparse.view(N, -1, 4) != 0).sum(-1) == 2).all()
    plain = torch.stack([two_of_four(four, torch.arange(4)) for four in weight.T.split(4)])
    plain = plain.reshape(K, N).T

    def lost(found):
        error = (weight - found).double()
        return float(((error @ hessian.double()) * error).sum())

    assert lost(sparse) < 0.7 * lost(plain)


def test_errors_of_four_together_spread_as_one_by_one():
    """With a rule that leaves every column as it is but the first of four, the three others of the
    group are not touched, and all columns behind take up the error exactly as in width 1."""
    weight, hessian, _, _ = problem(Grid(4))
    factor = Factor.of(hessian, together=4)

    def first_to_zero(columns, places):
        made = columns.clone()
        made[places % 4 == 0] = 0
        return made

    upper = factor.upper
    block = weight.T[factor.order]
    kept, errors = GroupRounder(4, first_to_zero)(block.clone(), factor.order, upper)
    first = errors[:4]
    assert torch.allclose(upper[:4, :4].T @ first, block[:4] - kept[:4], atol=1e-5)
