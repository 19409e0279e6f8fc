"""AWQ's scales: never worse than none, equal for channels that share one, large for large
inputs."""

import pytest
import torch

from billfish.formats.grid import Grid
from billfish.solvers.awq import COARSE_CLIP, search_fold
from billfish.solvers.clip import search_scales

N, K, SIZE = 16, 64, 32
ALONE = torch.arange(K)
GRIDS = [Grid(3), Grid(4), Grid(4, symmetric=False)]


def problem(seed=0, salient=10.0):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(400, K, generator=source) @ (
        torch.eye(K) + 0.2 * torch.randn(K, K, generator=source) / 8
    )
    x[:, ::16] *= salient
    weight = torch.randn(N, K, generator=source) * 0.5
    weight[:, ::16] /= salient  # what large inputs ask for, and what rounding loses first
    return weight, x.T @ x / len(x), x.abs().mean(0)


def output_error(weight, factor, hessian, grid):
    """tr(E H E^T) of the layer, columns scaled by `factor`, rounded and scaled back, in fp64."""
    scaled, inner = weight * factor, hessian / (factor[:, None] * factor[None, :])
    scale, zero = search_scales(scaled, inner, grid, SIZE, torch.bfloat16, COARSE_CLIP, ())
    groups = scaled.view(N, -1, SIZE)
    codes = grid.encode(groups, scale[..., None], zero[..., None])
    decoded = grid.decode(codes, scale[..., None], zero[..., None]).view(N, K).double() / factor
    error = weight.double() - decoded
    return float(((error @ hessian.double()) * error).sum())


def fold(weight, hessian, magnitude, grid, share=ALONE):
    return search_fold(weight, hessian, magnitude, share, grid, SIZE, torch.bfloat16)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_never_worse_than_no_folding(grid, seed):
    weight, hessian, magnitude = problem(seed)
    factor = fold(weight, hessian, magnitude, grid)
    assert tuple(factor.shape) == (K,) and bool((factor > 0).all())
    folded = output_error(weight, factor, hessian, grid)
    plain = output_error(weight, torch.ones(K), hessian, grid)
    assert folded < 0.5 * plain
    assert float(factor.max() * factor.min()) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_never_worse_without_salient_channels(seed):
    weight, hessian, magnitude = problem(seed, salient=1.0)
    factor = fold(weight, hessian, magnitude, Grid(4))
    plain = output_error(weight, torch.ones(K), hessian, Grid(4))
    assert output_error(weight, factor, hessian, Grid(4)) <= plain * (1 + 1e-5)


def test_large_inputs_get_large_factors():
    factor = fold(*problem(), Grid(3))
    others = torch.ones(K, dtype=torch.bool)
    others[::16] = False
    assert float(factor[~others].min()) > float(factor[others].max())


@pytest.mark.parametrize("heads", [2, 4])
def test_shared_channels_are_equal(heads):
    """As v -> o of grouped-query attention: `heads` columns are made by one row."""
    share = torch.arange(K) // 16 // heads * 16 + torch.arange(K) % 16
    weight, hessian, magnitude = problem()
    factor = fold(weight, hessian, magnitude, Grid(3), share)
    for value in share.unique():
        members = factor[share == value]
        assert len(members) == heads and bool((members == members[0]).all())
    assert float(factor.std()) > 0
    plain = output_error(weight, torch.ones(K), hessian, Grid(3))
    assert output_error(weight, factor, hessian, Grid(3)) <= plain * (1 + 1e-5)


def test_one_factor_for_all_is_no_factor():
    weight, hessian, magnitude = problem()
    factor = fold(weight, hessian, magnitude, Grid(3), torch.zeros(K, dtype=torch.int64))
    assert torch.allclose(factor, torch.ones(K))


def test_inputs_that_are_never_on():
    """No zero, no Inf: the layer before is divided by the factor."""
    weight, hessian, magnitude = problem()
    weight[:, 5] = 0
    magnitude[7] = 0
    hessian[7] = hessian[:, 7] = 0
    factor = fold(weight, hessian, magnitude, Grid(4))
    assert bool(torch.isfinite(factor).all()) and bool((factor > 0).all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_broken_hessian_folds_nothing(value):
    weight, hessian, magnitude = problem()
    assert torch.equal(fold(weight, hessian * value, magnitude, Grid(4)), torch.ones(K))


def test_arguments_are_left_alone():
    weight, hessian, magnitude = problem()
    before = [tensor.clone() for tensor in (weight, hessian, magnitude)]
    fold(weight, hessian, magnitude, Grid(4))
    for tensor, copy in zip((weight, hessian, magnitude), before, strict=True):
        assert torch.equal(tensor, copy)
