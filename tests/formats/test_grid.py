"""The uniform grid: nearest codes, scales that cover a group and can be stored, group counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.errors import UserError
from billfish.formats.grid import MAX_BITS, MIN_BITS, Grid, group_count, round_scale

GRIDS = st.builds(Grid, st.integers(MIN_BITS, MAX_BITS), st.booleans())
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
UNIT = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-24}  # of rounding
NUMBERS = st.floats(-1e4, 1e4, width=32)
GROUPS = st.lists(st.lists(NUMBERS, min_size=8, max_size=8), min_size=1, max_size=6)
few = settings(max_examples=60, deadline=None)


def fitted(grid, values, dtype):
    """(weight, scale, zero) of groups of 8, scale and zero ready to broadcast."""
    weight = torch.tensor(values, dtype=torch.float32)
    scale, zero = grid.fit(weight.amin(-1), weight.amax(-1), dtype)
    return weight, scale[:, None], zero[:, None]


def every_level(grid, scale, zero):
    """All that a group can decode to: (groups, levels)."""
    return grid.decode(torch.arange(grid.levels, dtype=torch.float32), scale, zero)


@few
@given(GRIDS, GROUPS, DTYPES)
def test_encode_is_nearest(grid, values, dtype):
    weight, scale, zero = fitted(grid, values, dtype)
    codes = grid.encode(weight, scale, zero)
    assert torch.equal(codes, codes.round())
    assert codes.min() >= 0 and codes.max() <= grid.levels - 1
    off = (grid.decode(codes, scale, zero) - weight).double().abs()
    best = (every_level(grid, scale, zero)[:, None] - weight[..., None]).double().abs().amin(-1)
    # fp32 rounds weight / scale: a tie may go either way.
    assert bool((off <= best + 1e-6 * (weight.abs() + scale).double()).all())


@few
@given(GRIDS, GROUPS, DTYPES)
def test_nearest_is_decode_of_encode(grid, values, dtype):
    weight, scale, zero = fitted(grid, values, dtype)
    before = weight.clone()
    assert torch.equal(
        grid.nearest(weight, scale, zero),
        grid.decode(grid.encode(weight, scale, zero), scale, zero),
    )
    assert torch.equal(weight, before)  # its in-place steps are its own


@few
@given(GRIDS, st.data(), DTYPES)
def test_codes_survive_a_round_trip(grid, data, dtype):
    levels = st.integers(0, grid.levels - 1)
    codes = torch.tensor(data.draw(st.lists(levels, min_size=1, max_size=20)))
    scale = round_scale(torch.tensor(data.draw(st.floats(2**-13, 2**10, width=32))), dtype)
    zero = torch.tensor(float(data.draw(levels)))
    weight = grid.decode(codes.float(), scale, zero)
    assert torch.equal(grid.encode(weight, scale, zero), codes.float())


@few
@given(GRIDS, GROUPS, DTYPES)
def test_fit_covers_the_range(grid, values, dtype):
    """No weight is off by more than half a step, but for what storing the scale rounds away."""
    weight, scale, zero = fitted(grid, values, dtype)
    assert torch.equal(zero, zero.round())
    assert zero.min() >= 0 and zero.max() <= grid.levels - 1
    assert not grid.symmetric or bool((zero == grid.middle).all())
    off = (grid.nearest(weight, scale, zero) - weight).abs()
    steps = 0.5 + grid.levels * UNIT[dtype] + 1e-4
    assert bool((off <= steps * scale).all())


@few
@given(GRIDS, GROUPS, DTYPES)
def test_fit_is_tight(grid, values, dtype):
    """A step is never larger than the range asks for: nobody pays for a range that is not there."""
    weight, scale, _ = fitted(grid, values, dtype)
    low, high = weight.amin(-1).clamp(max=0), weight.amax(-1).clamp(min=0)
    if grid.symmetric:
        expected = torch.maximum(-low, high) / (grid.middle - 0.5)
    else:
        expected = (high - low) / (grid.levels - 1)
    expected = expected.clamp(min=torch.finfo(dtype).tiny).clamp(max=torch.finfo(dtype).max)
    assert bool(((scale[:, 0] - expected).abs() <= (UNIT[dtype] + 1e-6) * expected).all())


@few
@given(GRIDS, GROUPS, DTYPES)
def test_zero_is_on_the_grid(grid, values, dtype):
    """Pruned weights and padding stay what they are."""
    _, scale, zero = fitted(grid, values, dtype)
    assert bool((grid.nearest(torch.zeros_like(scale), scale, zero) == 0).all())


@few
@given(st.floats(0, width=32, allow_nan=False, allow_infinity=False), DTYPES)
def test_round_scale(value, dtype):
    """To the nearest stored value, positive, finite and normal whatever comes in."""
    info = torch.finfo(dtype)
    rounded = round_scale(torch.tensor([value]), dtype)
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, rounded.to(dtype).float())  # stored without another rounding
    assert torch.equal(rounded, round_scale(rounded, dtype))
    assert info.tiny <= rounded.item() <= info.max
    clamped = min(max(value, info.tiny), info.max)
    assert abs(rounded.item() - clamped) <= UNIT[dtype] * clamped


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(MIN_BITS, MAX_BITS + 1))
def test_groups_of_zeros(bits, symmetric, dtype):
    """They decode to zeros, and so does everything near: no division by zero, no NaN."""
    grid = Grid(bits, symmetric)
    weight, scale, zero = fitted(grid, [[0.0] * 8, [0.0, -0.0] * 4], dtype)
    assert bool((scale == torch.finfo(dtype).tiny).all())
    assert torch.equal(grid.nearest(weight, scale, zero), torch.zeros(2, 8))
    levels = every_level(grid, scale, zero)
    assert bool(torch.isfinite(levels).all())
    big = torch.tensor([[1e30, -1e30]])
    assert bool(torch.isfinite(grid.nearest(big, scale, zero)).all())


@pytest.mark.parametrize("low", [1.0, -1.0])
def test_a_group_on_one_side_of_zero_keeps_zero(low):
    weight = torch.linspace(2 * low, low, 8)[None]
    grid = Grid(4, symmetric=False)
    _, zero = grid.fit(weight.amin(-1), weight.amax(-1), torch.float32)
    assert zero.item() == (0 if low > 0 else 15)


def test_symmetric_extremes_are_off_by_half_a_step():
    """absmax / (2^(b-1) - 0.5): of either sign, where absmax / 2^(b-1) would lose a step above."""
    grid = Grid(4)
    weight, scale, zero = fitted(grid, [[1.0, -1.0, *[0.0] * 6]], torch.float32)
    off = (grid.nearest(weight, scale, zero) - weight).abs()
    assert torch.allclose(off[0, :2], scale[0] / 2, rtol=1e-5)
    codes = grid.encode(weight, scale, zero)[0, :3].tolist()
    assert codes in ([15.0, 0.0, 8.0], [15.0, 1.0, 8.0])  # -7.5 steps: a tie


@pytest.mark.parametrize("bits", [-1, 0, 1, 9, 16])
def test_bits_outside_the_grid(bits):
    with pytest.raises(UserError, match=f"bits={bits}: a uniform grid has 2 to 8 bits"):
        Grid(bits)


@few
@given(st.integers(1, 4096), st.integers(1, 512))
def test_group_count(k, group_size):
    """It counts, or names exactly the usual sizes that divide k."""
    if k % group_size == 0:
        assert group_count(k, group_size) == k // group_size
        return
    with pytest.raises(UserError) as error:
        group_count(k, group_size)
    text = str(error.value)
    assert f"group size {group_size} does not divide k = {k}" in text and "-1" in text
    listed = text.partition("Sizes that do: ")[2].partition(";")[0]
    usual = [size for size in (16, 32, 64, 96, 128, 192, 256, 512) if k % size == 0]
    assert listed == (", ".join(map(str, usual)) or "none of the usual ones")
    for size in usual:
        assert group_count(k, size) * size == k


@pytest.mark.parametrize("k", [1, 47, 4096])
def test_one_group_per_channel_fits_everything(k):
    assert group_count(k, -1) == 1


@pytest.mark.parametrize("group_size", [0, -2, -128])
def test_group_sizes_that_no_k_has(group_size):
    with pytest.raises(UserError, match=f"group size {group_size}: it is 1 or more, or -1"):
        group_count(4096, group_size)
