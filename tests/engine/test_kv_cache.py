"""KV formats: error bounds, exact constants, extremes, tokens that do not touch each other."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from billfish.engine.kv.cache import (
    FORMATS,
    ChannelRange,
    Kv4,
    Kv4Channels,
    Kv4Plain,
    Kv8,
    Kv16,
    Room,
)
from billfish.errors import UserError

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
UNIT = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-24}  # of rounding
CODED = {Kv8: 255, Kv4Plain: 15}
LAYERS, PAGES, PAGE_TOKENS, KV_HEADS, HEAD_DIM = 2, 5, 4, 3, 8
every_format = pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
every_coded = pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def build(kind, dtype=torch.float32, head_dim=HEAD_DIM):
    return kind(Room(LAYERS, PAGES, PAGE_TOKENS, KV_HEADS, head_dim, dtype, CPU))


def draw(tokens, dtype=torch.float32, spread=1.0):
    """K with a bias per channel, V without."""
    k = torch.randn(tokens, KV_HEADS, HEAD_DIM) * spread + torch.randn(KV_HEADS, HEAD_DIM) * 3
    return k.to(dtype), (torch.randn(tokens, KV_HEADS, HEAD_DIM) * spread).to(dtype)


def through(cache, k, v, layer=1):
    """Written to pages in a mixed order, and read back."""
    pages = torch.tensor([3, 0, 4, 1, 2])
    slots = (pages[:, None] * cache.page_tokens + torch.arange(cache.page_tokens)).flatten()
    cache.write(layer, slots[: len(k)], k, v)
    return cache.read(layer, pages, len(k))


def half_step(numbers, levels, dtype):
    """What a number may be off by: (max - min) / levels / 2, that step rounded up in `dtype`, and
    the result rounded to `dtype`."""
    exact = numbers.double()
    step = (exact.amax(-1, keepdim=True) - exact.amin(-1, keepdim=True)) / levels
    subnormal = torch.finfo(dtype).smallest_normal * 2 * UNIT[dtype]
    step = step * (1 + 2 * UNIT[dtype]) + subnormal
    return (step / 2) * (1 + 2**-20) + exact.abs().amax(-1, keepdim=True) * UNIT[dtype]


def test_the_registry_knows_its_peers():
    assert list(FORMATS.items()) == [("kv16", Kv16), ("kv8", Kv8), ("kv4", Kv4)]


@every_format
@every_dtype
def test_read_gives_count_tokens_in_dtype(kind, dtype):
    k, v = through(build(kind, dtype), *draw(10, dtype))
    assert k.shape == v.shape == (10, KV_HEADS, HEAD_DIM)
    assert k.dtype == v.dtype == dtype


@every_dtype
def test_extremes_in_four_bits(dtype):
    """Zeros exactly; extremes stay finite; a NaN stays in its token and head."""
    k, v = draw(20, dtype)
    k[2], v[3], k[5, 1, 2], v[7] = 0, 0, float("inf"), 1e30
    k[9, 1, 0] = float("nan")
    read_k, read_v = through(build(Kv4, dtype), k, v)
    assert not read_k[2].any() and not read_v[3].any()
    assert read_k[9, 1].isnan().all() and read_k.isnan().sum() == HEAD_DIM
    assert not read_k.isinf().any() and read_v.isfinite().all()
    plain = [i for i in range(20) if i not in (5, 7, 9)]
    off = (read_k[plain].float() - k[plain].float()).norm() / k[plain].float().norm()
    assert off < 0.1


@every_dtype
def test_kv16_gives_back_the_same_bits(dtype):
    k, v = draw(18, dtype)
    read_k, read_v = through(build(Kv16, dtype), k, v)
    assert torch.equal(read_k, k) and torch.equal(read_v, v)


@every_coded
@every_dtype
@pytest.mark.parametrize("spread", [1e-6, 1.0, 300.0])
def test_no_number_is_off_by_more_than_half_a_step(kind, dtype, spread):
    given_numbers = draw(20, dtype, spread)
    for given_, read in zip(
        given_numbers, through(build(kind, dtype), *given_numbers), strict=True
    ):
        off = (read.double() - given_.double()).abs()
        assert (off <= half_step(given_, CODED[kind], dtype)).all()


@every_coded
def test_the_formula_in_fp32(kind):
    """Where nothing but codes is rounded: nearest of (max - min) / levels, from the minimum."""
    k, v = draw(20)
    read, _ = through(build(kind), k, v)
    low = k.double().amin(-1, keepdim=True)
    step = (k.double().amax(-1, keepdim=True) - low) / CODED[kind]
    assert ((read.double() - k.double()).abs() <= step / 2 + 1e-6).all()
    assert torch.allclose(read.double(), ((k - low) / step).round() * step + low, atol=1e-5)
    # All of the grid is used: the smallest and the largest number come back.
    assert torch.equal(read.amin(-1), k.amin(-1))
    assert torch.allclose(read.amax(-1), k.amax(-1), rtol=1e-6)


few = settings(max_examples=150, deadline=None)


@few
@given(
    st.sampled_from(list(CODED)),
    st.sampled_from(DTYPES),
    st.lists(st.floats(-(2**15), 2**15, width=16), min_size=HEAD_DIM, max_size=HEAD_DIM),
)
def test_the_bound_holds_for_any_numbers(kind, dtype, row):
    """Subnormal steps too, where rounding a step down would leave the maximum out of reach."""
    numbers = torch.tensor(row).expand(1, KV_HEADS, HEAD_DIM).to(dtype)
    read, _ = through(build(kind, dtype), numbers, numbers)
    off = (read.double() - numbers.double()).abs()
    assert (off <= half_step(numbers, CODED[kind], dtype)).all()


@pytest.mark.parametrize("kind", [Kv16, *CODED], ids=lambda kind: kind.name)
@every_dtype
@pytest.mark.parametrize("number", [0.0, 1.0, -0.37, 3.1e-5, 6e-8, 1234.5, -60000.0])
def test_equal_numbers_come_back_exactly(kind, dtype, number):
    k = torch.full((3, KV_HEADS, HEAD_DIM), number, dtype=dtype)
    read_k, read_v = through(build(kind, dtype), k, torch.zeros_like(k))
    assert torch.equal(read_k, k)
    assert torch.equal(read_v, torch.zeros_like(k))


@every_coded
@every_dtype
def test_huge_numbers_stay_finite(kind, dtype):
    largest = torch.finfo(dtype).max
    k, v = draw(4, dtype)
    k[1, 0, :2] = torch.tensor([largest, -largest])
    v[2] = largest
    read_k, read_v = through(build(kind, dtype), k, v)
    assert read_k.isfinite().all() and read_v.isfinite().all()
    assert read_k[1, 0, 0] > largest / 5 and read_k[1, 0, 1] < -largest / 5
    if dtype == torch.float16:  # 31/32 of the largest number is kept
        assert torch.allclose(read_v[2].float(), torch.tensor(largest), rtol=0.04)


@every_coded
@every_dtype
def test_what_is_not_finite_stays_in_its_token_and_head(kind, dtype):
    k, v = draw(6, dtype)
    clean_k, clean_v = through(build(kind, dtype), k, v)
    k[2, 1, 3], k[4, 0, 0], v[3, 2, 5] = torch.nan, torch.inf, -torch.inf
    cache = build(kind, dtype)
    read_k, read_v = through(cache, k, v)
    assert read_k[2, 1].isnan().all()  # told, and not made 0
    assert (cache.codes[1, 3, 2, 0, 1] == 0).all()  # the same bytes on every machine
    assert read_k[4, 0].isfinite().all() and read_v[3, 2].isfinite().all()
    read_k[2, 1], read_k[4, 0], read_v[3, 2] = clean_k[2, 1], clean_k[4, 0], clean_v[3, 2]
    assert torch.equal(read_k, clean_k) and torch.equal(read_v, clean_v)


@every_format
def test_a_write_changes_its_slots_and_its_layer_only(kind):
    cache = build(kind)
    pages = torch.arange(PAGES)
    for layer in range(LAYERS):
        cache.write(layer, torch.arange(PAGES * PAGE_TOKENS), *draw(PAGES * PAGE_TOKENS))
    before = [torch.stack(cache.read(layer, pages, 20)) for layer in range(LAYERS)]
    k, v = draw(3)
    cache.write(1, torch.tensor([17, 2, 9]), k, v)
    after = [torch.stack(cache.read(layer, pages, 20)) for layer in range(LAYERS)]
    assert torch.equal(after[0], before[0])
    others = [slot for slot in range(20) if slot not in (17, 2, 9)]
    assert torch.equal(after[1][:, others], before[1][:, others])
    assert not torch.equal(after[1], before[1])


@every_format
def test_how_tokens_are_cut_into_writes_does_not_matter(kind):
    k, v = draw(20, torch.bfloat16)
    whole, single = build(kind, torch.bfloat16), build(kind, torch.bfloat16)
    whole.write(0, torch.arange(20), k, v)
    for i in range(20):
        single.write(0, torch.tensor([i]), k[i : i + 1], v[i : i + 1])
    for one, other in zip(*(c.read(0, torch.arange(5), 20) for c in (whole, single)), strict=True):
        assert torch.equal(one, other)


@every_format
def test_a_page_is_filled_again_without_being_cleared(kind):
    cache, fresh = build(kind), build(kind)
    cache.write(0, torch.arange(4), *(torch.full((4, KV_HEADS, HEAD_DIM), torch.nan),) * 2)
    k, v = draw(4)
    for one in (cache, fresh):
        one.write(0, torch.arange(4), k, v)
    assert torch.equal(
        cache.read(0, torch.tensor([0]), 4)[0], fresh.read(0, torch.tensor([0]), 4)[0]
    )


@every_format
@every_dtype
def test_bytes_a_token_tells_nbytes(kind, dtype):
    cache = build(kind, dtype)
    told = kind.bytes_a_token(LAYERS, KV_HEADS, HEAD_DIM, dtype)
    assert cache.nbytes() == told * PAGES * PAGE_TOKENS


def test_sizes_at_head_dim_128():
    sizes = {name: kind.bytes_a_token(1, 1, 128, torch.bfloat16) for name, kind in FORMATS.items()}
    assert sizes == {"kv16": 512, "kv8": 2 * 132, "kv4": 2 * 68}
    assert Kv4Channels.bytes_a_token(1, 1, 128, torch.bfloat16) == 2 * 64


def test_an_odd_head_dim_is_refused_by_four_bits_only():
    for refused in (
        partial(build, Kv4, head_dim=7),
        partial(Kv4.bytes_a_token, 1, 1, 7, torch.float16),
        partial(Kv4Channels.bytes_a_token, 1, 1, 7, torch.float16),
    ):
        with pytest.raises(UserError, match=r"head_dim=7.*kv8 or kv16"):
            refused()
    for kind in (Kv8, Kv16):
        k = torch.randn(2, KV_HEADS, 7)
        assert torch.allclose(through(build(kind, head_dim=7), k, k)[0], k, atol=0.02)


@every_coded
def test_other_dtypes_are_refused(kind):
    with pytest.raises(UserError, match="fp16, bf16 or fp32"):
        build(kind, torch.float64)


def test_two_codes_lie_in_a_byte_by_halves():
    cache = build(Kv4Plain)
    k = torch.tensor([0.0, 1, 2, 3, 15, 14, 13, 12]).expand(1, KV_HEADS, HEAD_DIM)
    cache.write(0, torch.tensor([6]), k, k)
    assert cache.codes[0, 1, 2, 0, 0].tolist() == [0xF0, 0xE1, 0xD2, 0xC3]
    assert cache.grids[0, 1, 2, 0, 0].tolist() == [1.0, 0.0]


def channels(ranges, dtype=torch.float32, head_dim=HEAD_DIM):
    made = Kv4Channels(Room(LAYERS, PAGES, PAGE_TOKENS, KV_HEADS, head_dim, dtype, CPU))
    made.set_ranges(ranges)
    return made


def calibrated(k, v, dtype=torch.float32):
    ranges = ChannelRange.empty(LAYERS, KV_HEADS, HEAD_DIM)
    for layer in range(LAYERS):
        for piece in range(0, len(k), 3):
            ranges.update(layer, k[piece : piece + 3], v[piece : piece + 3])
    return ranges, channels(ranges, dtype)


@every_dtype
def test_channels_are_off_by_half_their_own_step(dtype):
    numbers = draw(20, dtype)
    _, cache = calibrated(*numbers, dtype)
    for given_, read in zip(numbers, through(cache, *numbers), strict=True):
        exact = given_.double()
        step = (exact.amax(0) - exact.amin(0)) / 15
        assert read.dtype == dtype
        assert ((read.double() - exact).abs() <= step / 2 + exact.abs() * UNIT[dtype] + 1e-6).all()


def test_channels_clamp_what_calibration_did_not_see():
    k, v = draw(20)
    ranges, cache = calibrated(k, v)
    strange = torch.full((3, KV_HEADS, HEAD_DIM), torch.inf)
    strange[1], strange[2] = -1e9, torch.nan
    read, _ = through(cache, strange, strange)
    assert torch.allclose(read[0], ranges.high[1, 0], rtol=1e-5)
    assert torch.equal(read[1], ranges.low[1, 0])
    assert torch.equal(read[2], ranges.low[1, 0])


def test_a_channel_of_one_number_gives_it_back():
    k, v = torch.full((3, KV_HEADS, HEAD_DIM), -2.5), torch.zeros(3, KV_HEADS, HEAD_DIM)
    _, cache = calibrated(k, v)
    read_k, read_v = through(cache, k, v)
    assert torch.equal(read_k, k) and torch.equal(read_v, v)


def test_channels_count_pages_and_what_these_share():
    _, cache = calibrated(*draw(20))
    pages = Kv4Channels.bytes_a_token(LAYERS, KV_HEADS, HEAD_DIM, torch.float32) * 20
    assert cache.nbytes() == pages + 2 * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4


def test_a_range_skips_what_is_not_finite():
    k, v = draw(6)
    k[2, 0, 0], v[3, 1, 1] = torch.nan, -torch.inf
    ranges = ChannelRange.empty(1, KV_HEADS, HEAD_DIM)
    ranges.update(0, k, v)
    ranges.update(0, k[:0], v[:0])
    keep = [0, 1, 3, 4, 5]
    assert ranges.low[0, 0, 0, 0] == k[keep, 0, 0].min()
    assert ranges.low[0, 1, 1, 1] == v[[0, 1, 2, 4, 5], 1, 1].min()
    assert ranges.high[0, 1, 2, 3] == v[:, 2, 3].max()


def test_ranges_travel_through_safetensors(tmp_path):
    ranges, _ = calibrated(*draw(20, torch.bfloat16))
    save_file(ranges.tensors(), tmp_path / "ranges.safetensors")
    again = ChannelRange.from_tensors(load_file(tmp_path / "ranges.safetensors"))
    assert torch.equal(again.low, ranges.low) and torch.equal(again.high, ranges.high)
    with pytest.raises(UserError, match="kv_high"):
        ChannelRange.from_tensors({"kv_low": ranges.low})
    with pytest.raises(UserError, match="layers, 2, kv_heads"):
        ChannelRange(ranges.low[0], ranges.high[0])


def test_ranges_that_do_not_fit_are_refused():
    ranges = ChannelRange.empty(LAYERS, KV_HEADS, HEAD_DIM)
    ranges.update(0, *draw(3))
    with pytest.raises(UserError, match=r"layers \[1\]"):
        channels(ranges, torch.float16)
    with pytest.raises(UserError, match="another model"):
        channels(ranges, torch.float16, 64)
