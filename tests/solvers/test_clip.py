"""The search for group scales against trying every candidate in plain fp64."""

import pytest
import torch

from billfish.formats.grid import Grid
from billfish.solvers import clip
from billfish.solvers.clip import COARSE, FINE, diagonal_blocks, search_scales

N, K, SIZE = 12, 96, 32
GRIDS = [Grid(bits, symmetric) for bits in (2, 3, 4, 8) for symmetric in (True, False)]
every_grid = pytest.mark.parametrize("grid", GRIDS, ids=str)


def problem(seed=0):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(300, K, generator=source) @ torch.randn(K, K, generator=source) / 8
    weight = torch.randn(N, K, generator=source)
    weight[:, ::17] *= 3  # something to clip
    return weight, x.T @ x / len(x)


def costs(weight, hessian, grid, scale, zero, size=SIZE):
    """e^T H_gg e of every group of every row: (n, g) fp64, by its definition."""
    result = torch.empty(scale.shape, dtype=torch.float64)
    for g in range(scale.shape[1]):
        columns = slice(g * size, (g + 1) * size)
        steps = (weight[:, columns] / scale[:, g, None]).round() + zero[:, g, None]
        decoded = (steps.clamp(0, grid.levels - 1) - zero[:, g, None]) * scale[:, g, None]
        error = (decoded - weight[:, columns]).double()
        result[:, g] = torch.einsum("ni,ij,nj->n", error, hessian[columns, columns].double(), error)
    return result


def tried(weight, grid, fraction, dtype, size=SIZE):
    groups = weight.view(N, -1, size)
    return grid.fit(groups.amin(-1) * fraction, groups.amax(-1) * fraction, dtype)


def brute_force(weight, hessian, grid, dtype):
    """(best cost, its fraction) of every group over COARSE, then over FINE around the best."""
    best = torch.full((N, K // SIZE), torch.inf, dtype=torch.float64)
    fraction = torch.ones(N, K // SIZE)
    for value in COARSE:
        candidate = torch.full_like(fraction, value)
        cost = costs(weight, hessian, grid, *tried(weight, grid, candidate, dtype))
        fraction = torch.where(cost < best, candidate, fraction)
        best = torch.minimum(cost, best)
    for step in FINE:
        cost = costs(weight, hessian, grid, *tried(weight, grid, fraction + step, dtype))
        best = torch.minimum(cost, best)
    return best


@every_grid
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_brute_force(grid, dtype):
    weight, hessian = problem()
    scale, zero = search_scales(weight, hessian, grid, SIZE, dtype)
    assert tuple(scale.shape) == tuple(zero.shape) == (N, K // SIZE)
    assert torch.equal(scale, scale.to(dtype).float()) and torch.equal(zero, zero.round())
    cost = costs(weight, hessian, grid, scale, zero)
    best = brute_force(weight, hessian, grid, dtype)
    # Ours is computed in fp32, so that of two equally good candidates it may take the other, and
    # then look around that one.
    off = (cost / best - 1).abs()
    assert float(off.median()) < 1e-5
    assert float((off < 1e-4).double().mean()) > 0.9
    assert float(cost.sum()) <= 1.001 * float(best.sum())


@every_grid
@pytest.mark.parametrize("seed", range(3))
def test_never_worse_than_no_clipping(grid, seed):
    weight, hessian = problem(seed)
    cost = costs(weight, hessian, grid, *search_scales(weight, hessian, grid, SIZE, torch.float16))
    plain = costs(weight, hessian, grid, *tried(weight, grid, 1.0, torch.float16))
    assert bool((cost <= plain * (1 + 1e-5)).all())
    assert float(cost.sum()) < 0.95 * float(plain.sum())


def test_candidates_start_without_clipping():
    assert COARSE[0] == 1.0 and 0.4 < min(COARSE) < max(COARSE) < 1.11


def test_one_group_per_channel():
    weight, hessian = problem()
    grid = Grid(4)
    scale, zero = search_scales(weight, hessian, grid, K, torch.float32)
    assert tuple(scale.shape) == (N, 1)
    plain = costs(weight, hessian, grid, *tried(weight, grid, 1.0, torch.float32, K), size=K)
    assert bool((costs(weight, hessian, grid, scale, zero, size=K) <= plain * (1 + 1e-5)).all())


def test_rows_are_independent(monkeypatch):
    weight, hessian = problem()
    together = search_scales(weight, hessian, Grid(4), SIZE, torch.float32)
    apart = [search_scales(row[None], hessian, Grid(4), SIZE, torch.float32) for row in weight]
    assert torch.equal(together[0], torch.cat([scale for scale, _ in apart]))
    monkeypatch.setitem(clip.SEARCHED, "cpu", 0)  # 16 rows at a time
    many = search_scales(weight.repeat(4, 1), hessian, Grid(4), SIZE, torch.float32)
    assert torch.equal(many[0], together[0].repeat(4, 1))


def test_an_outlier_that_no_input_reaches_is_clipped():
    weight = torch.linspace(-1, 1, SIZE).repeat(N, K // SIZE)
    weight[:, 0] = 10.0
    hessian = torch.eye(K)
    hessian[0, 0] = 0.0
    scale, _ = search_scales(weight, hessian, Grid(4), SIZE, torch.float32)
    full, _ = tried(weight, Grid(4), 1.0, torch.float32)
    assert bool((scale[:, 0] < 0.5 * full[:, 0]).all())
    hessian[0, 0] = 99.0
    scale, _ = search_scales(weight, hessian, Grid(4), SIZE, torch.float32)
    assert bool((scale[:, 0] > 0.9 * full[:, 0]).all())


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_a_hessian_that_says_nothing_leaves_the_range(value):
    weight, _ = problem()
    for grid in (Grid(4), Grid(3, symmetric=False)):
        found = search_scales(weight, torch.full((K, K), value), grid, SIZE, torch.bfloat16)
        expected = tried(weight, grid, 1.0, torch.bfloat16)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_groups_of_zeros():
    weight, hessian = problem()
    weight[3, :SIZE] = 0
    scale, zero = search_scales(weight, hessian, Grid(4), SIZE, torch.float16)
    assert scale[3, 0] == torch.finfo(torch.float16).tiny and zero[3, 0] == 8
    assert bool(torch.isfinite(scale).all())


def test_diagonal_blocks():
    hessian = torch.arange(36.0).view(6, 6)
    blocks = diagonal_blocks(hessian, 2)
    assert blocks.tolist() == [[[0, 1], [6, 7]], [[14, 15], [20, 21]], [[28, 29], [34, 35]]]
    assert torch.equal(diagonal_blocks(hessian, 6)[0], hessian)
