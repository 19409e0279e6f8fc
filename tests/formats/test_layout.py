"""Every layout at every width: the inverse, the shape, and that no two codes share a bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from billfish.formats import layout
from billfish.formats.layout import Layout, pack_stream, unpack_stream

BITS = range(2, 9)
LAYOUTS = [
    *(make(bits) for bits in BITS for make in (layout.compressed_tensors, layout.gptq)),
    *(make(bits) for bits in BITS for make in (layout.compressed_tensors_zeros, layout.gptq_zeros)),
    layout.awq(),
    layout.marlin(),
]
IDS = [f"{each.name} {each.bits}" for each in LAYOUTS]


def draw(each, n, k, seed):
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**each.bits, (n, k), generator=source).to(torch.uint8)


@settings(max_examples=150, deadline=None)
@given(
    each=st.sampled_from(LAYOUTS),
    n=st.integers(1, 150),
    k=st.integers(1, 150),
    seed=st.integers(0, 2**31),
)
def test_unpack_inverts_pack(each, n, k, seed):
    codes = draw(each, n, k, seed)
    words = each.pack(codes)
    assert words.dtype == torch.int32
    assert tuple(words.shape) == each.shape(n, k)
    assert torch.equal(each.unpack(words, n, k), codes)


@settings(max_examples=50, deadline=None)
@given(
    bits=st.integers(2, 8), words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=4)
)
def test_any_words_are_some_codes(bits, words):
    """Packing loses no bit, the sign bit included."""
    stream = torch.tensor(words * bits, dtype=torch.int32)  # whole periods of straddling codes
    assert torch.equal(pack_stream(unpack_stream(stream, bits), bits), stream)


@pytest.mark.parametrize("each", LAYOUTS, ids=IDS)
def test_each_bit_is_owned_once(each):
    n, k = each.tile[0] + 1, each.tile[1] + 2  # more than one tile both ways, with a ragged edge
    if each.name == "marlin":
        n, k = each.tile
    owned = torch.zeros(each.shape(n, k), dtype=torch.int64)
    spread = torch.arange(n * k, dtype=torch.int64).reshape(n, k)
    for bit in range(each.bits):
        # Which code owns each bit: read the number of the code off the words, digit by digit.
        numbers = torch.zeros_like(owned)[..., None].expand(*owned.shape, 32).clone()
        for digit in range(int(spread.max()).bit_length()):
            words = each.pack((spread >> digit & 1) << bit).to(torch.int64) & 0xFFFFFFFF
            numbers |= (words[..., None] >> torch.arange(32) & 1) << digit
        ones = each.pack(torch.ones_like(spread) << bit).to(torch.int64) & 0xFFFFFFFF
        assert not bool((owned & ones).any()), f"bit {bit} shares a place with a lower one"
        owned |= ones
        places = (ones[..., None] >> torch.arange(32) & 1).bool()
        assert sorted(numbers[places].tolist()) == list(range(n * k))


def test_stream_is_little_endian_and_straddles():
    """Three-bit code 10 has two bits in word 0 and one in word 1."""
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 10] = 0b110
    words = layout.compressed_tensors(3).pack(codes)
    assert words.tolist() == [[-(2**31), 1, 0]]


def test_awq_word_holds_even_columns_first():
    codes = torch.arange(8, dtype=torch.uint8).reshape(8, 1)
    assert layout.awq().pack(codes).item() == 0x75316420


def test_marlin_first_words():
    """Lane 0 of the first tile: k 0, 1, 8, 9 of columns 0 and 8, then of 16 and 24, and so on."""
    codes = torch.zeros(64, 16, dtype=torch.uint8)
    for value, (n, k) in enumerate(
        [(0, 0), (0, 8), (8, 0), (8, 8), (0, 1), (0, 9), (8, 1), (8, 9)]
    ):
        codes[n, k] = value
        codes[n + 16, k] = 15 - value
    words = layout.marlin().pack(codes)
    assert tuple(words.shape) == (1, 128)
    first, second = (word & 0xFFFFFFFF for word in words[0, :2].tolist())
    assert (first, second) == (0x76543210, 0x89ABCDEF)


def test_marlin_scales_of_a_lane_lie_together():
    grouped, single = layout.marlin_scale_order(True), layout.marlin_scale_order(False)
    assert sorted(grouped) == list(range(64))
    assert sorted(single) == list(range(32))
    assert grouped[:9] == (0, 8, 16, 24, 32, 40, 48, 56, 1)
    assert single[:9] == (0, 1, 8, 9, 16, 17, 24, 25, 2)


def test_an_order_that_is_no_permutation_is_refused():
    with pytest.raises(AssertionError, match="no permutation"):
        Layout("broken", 4, (8, 1), "k nw", order=(0, 0, 1, 2, 3, 4, 5, 6))
