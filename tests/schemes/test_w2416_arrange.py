"""w2416's records: unpacking inverts packing bit for bit, and an independent reader agrees.

The reader below follows the opening comments of mixed.cuh and outliers.cuh and uses nothing of
arrange.py: plain loops from (row, position) to a bit of a band.
"""

import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from billfish.errors import UserError
from billfish.schemes.w2416 import W2416
from billfish.schemes.w2416.cuda import arrange, outliers
from billfish.schemes.w2416.scheme import ZERO, ZERO_STEP

FP16, BF16 = torch.float16, torch.bfloat16
SCHEMES = [*W2416.examples(), W2416(2.91)]


def draw(scheme, n, k, dtype, seed, lists="as they come"):
    """Canonical tensors of any bits that can be stored: scales that are NaN, bases that are 0."""
    source = torch.Generator().manual_seed(seed)
    tensors = scheme.random_tensors(n, k, dtype, source)
    for name in ("weight_scale_4", "outlier_value"):
        words = torch.randint(-(2**15), 2**15, tensors[name].shape, generator=source)
        tensors[name] = words.to(torch.int16).view(dtype)
    base = torch.randint(0, 0x7C00 >> 3 << 4, tensors["scale_base"].shape, generator=source)
    tensors["scale_base"] = ((base ^ 0x8000) - 0x8000).to(torch.int16)
    places, part = tensors["outlier_place"], scheme.shares(k).part
    if lists == "sorted":
        places = (places.int() & 0xFFFF).sort(-1)[0]
    if lists == "one place":  # all outliers of a list at once
        places = torch.full_like(places, 3 * part + part - 1).int()
    if lists == "one row":
        places = 5 * part + torch.randint(0, part, places.shape, generator=source)
    tensors["outlier_place"] = places.to(torch.int16)
    return tensors


def same(left, right):
    assert list(left) == list(right)
    for name, tensor in left.items():
        other = right[name]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, name
        if tensor.is_floating_point():
            tensor, other = tensor.view(torch.int16), other.view(torch.int16)
        assert torch.equal(tensor, other), name


LISTS = ("as they come", "sorted", "one place", "one row")


@settings(max_examples=60, deadline=None)
@given(
    bands=st.integers(1, 9),
    groups=st.integers(4, 140),
    scheme=st.sampled_from(SCHEMES),
    dtype=st.sampled_from([FP16, BF16]),
    lists=st.sampled_from(LISTS),
    seed=st.integers(0, 2**31),
)
@example(bands=1, groups=6, scheme=W2416(2.91), dtype=FP16, lists=LISTS[0], seed=0)  # no 4 bits
@example(bands=5, groups=128, scheme=W2416(2.6), dtype=BF16, lists=LISTS[3], seed=0)
def test_unpack_inverts_pack(bands, groups, scheme, dtype, lists, seed):
    n, k = 16 * bands, 16 * groups
    if scheme.refuses(n, k):
        return
    tensors = draw(scheme, n, k, dtype, seed, lists)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    packed = arrange.pack(scheme, tensors)
    same(tensors, before)  # its sources are the caller's
    assert packed.records.dtype == torch.int32 and packed.records.is_contiguous()
    assert packed.records.shape[1] % 4 == 0  # bulk copies move multiples of 16 bytes
    if lists in ("sorted", "one place") or not tensors["outlier_place"].shape[-1]:
        assert packed.ranks is None  # nothing beside the records
    same(arrange.unpack(scheme, packed), before)


# -- the reader


def half(bits):
    return torch.tensor([bits], dtype=torch.int32).to(torch.int16).view(FP16).item()


def number(bits, dtype):
    signed = bits if bits < 2**15 else bits - 2**16
    return torch.tensor([signed], dtype=torch.int16).view(dtype).item()


class Band:
    """The bytes of 64 outputs."""

    def __init__(self, content, two, four, sets, dtype):
        self.content, self.two, self.four, self.dtype = content, two, four, dtype
        self.sets, self.four_bytes = sets, 4096 + 128 * sets + 16
        self.lists = two * 4992 + four * self.four_bytes

    def word(self, at):
        return struct.unpack_from("<I", self.content, at)[0]

    def short(self, at):
        return struct.unpack_from("<H", self.content, at)[0]

    def weight_2(self, row, position):
        record, column = position // 256 * 4992, position % 256
        h, brick, lower, r = row // 32, row // 16 % 2, row // 8 % 2, row % 8
        k64, c, i = column // 64, column // 16 % 4, column % 16
        lane, block = 4 * r + c, k64 * 2 + brick
        word = self.word(record + 4 * ((((k64 * 2 + h) * 32 + lane) * 2 + brick) * 2 + lower))
        code = word >> (i // 2 * 2 + i % 2 * 16) & 3
        scales = self.word(record + 4096 + (h * 32 + lane) * 8 + block // 4 * 4)
        scale = scales >> (block % 4 * 4 + lower * 16) & 15
        zeros = self.word(record + 4608 + (h * 32 + lane) * 4)
        zero = zeros >> (block * 2 + lower * 16) & 3
        base = self.short(record + 4864 + (h * 4 + c) * 16 + block * 2)
        step = (scale + (base & 15)) * half(base >> 4 << 3) / 256
        return (code - (ZERO + ZERO_STEP * zero)) * step

    def weight_4(self, row, position):
        record = self.two * 4992 + position // 128 * self.four_bytes
        column, r = position % 128, row % 8
        k64, step, n16 = column // 64, column // 16, row // 16
        lane = 4 * r + column % 8 // 2
        word = self.word(record + 4 * (((k64 * 4 + n16) * 32 + lane) * 4 + step % 4))
        register = 2 * (column % 16 // 8) + row % 16 // 8
        code = word >> (16 * (column % 2) + 4 * register) & 15
        marks = self.word(record + 4096 + 128 * self.sets)
        part = sum(marks >> i & 1 for i in range(1, step + 1))
        place = ((part * 2 + row // 32) * 8 + r) * 4 + row % 32 // 8
        return (code - 8) * number(self.short(record + 4096 + 2 * place), self.dtype)

    def outliers(self):
        """(record, row, column in it, value), in order; the last set of each record is marked."""
        edges = self.lists + 32
        first = edges + 4 * ((self.two + self.four + 8) // 8 * 8)
        for record in range(self.two + self.four):
            begin, end = (self.word(edges + 4 * (record + i)) for i in range(2))
            assert begin < end
            for at in range(begin * 32, end * 32):
                entry = self.word(first + at * 4)
                assert (entry & 0x8000 != 0) == (at // 32 == end - 1)
                if entry & 0x4000:
                    assert entry & 0xFFFF3FFF == 0
                    continue
                row = entry >> 8 & 63
                assert row // 32 == at // 16 % 2
                yield record, row, entry & 255, number(entry >> 16, self.dtype)


def read(packed):
    """(rows of whole bands, k) fp32 as dequantize computes it."""
    shape, columns = packed.shape, packed.columns.tolist()
    weight = torch.zeros(shape.bands * 64, shape.k)
    for index, words in enumerate(packed.records):
        band = Band(words.numpy().tobytes(), shape.tiles_2, shape.tiles_4, shape.sets, shape.dtype)
        where = {}
        for group, column in enumerate(columns):
            two = group < shape.tiles_2 * 16
            record = group // 16 if two else shape.tiles_2 + (group - shape.tiles_2 * 16) // 8
            inside = group % 16 if two else (group - shape.tiles_2 * 16) % 8
            where[record, inside] = column
            position = 16 * (group if two else group - shape.tiles_2 * 16)
            for row in range(64 if column >= 0 else 0):
                for i in range(16):
                    get = band.weight_2 if two else band.weight_4
                    weight[index * 64 + row, column + i] = get(row, position + i)
        for record, row, column, value in band.outliers():
            weight[index * 64 + row, where[record, column // 16] + column % 16] += value
    return weight


@pytest.mark.parametrize(
    ("scheme", "n", "k", "dtype"),
    [
        (W2416(2.91), 80, 96, FP16),
        (W2416(3.3, 0.005), 16, 1056, BF16),  # parts of 33 groups
        (W2416(2.6), 16, 1024, FP16),  # a record with scales of two parts
        (W2416(3.9, 0.02), 48, 304, BF16),
        (W2416(3.0, 0.0), 32, 272, FP16),
    ],
    ids=str,
)
def test_a_plain_reader_finds_the_weights(scheme, n, k, dtype):
    tensors = scheme.random_tensors(n, k, dtype, torch.Generator().manual_seed(k))
    found = read(arrange.pack(scheme, tensors))
    assert torch.equal(found[:n], scheme.dequantize(tensors))
    assert not found[n:].any()  # rows that do not exist


# -- units, and what is refused


def test_units_leave_room_for_every_scale():
    """Scales times the unit and what the codes need: finite in the type, and not too small."""
    for dtype, two, four, most in ((FP16, 20, 24, 2.0**16), (BF16, 133, 133, 2.0**128)):
        for size in (1e-4, 0.02, 1.0, 50.0):
            scheme = W2416(2.91)
            tensors = scheme.random_tensors(144, 512, dtype, torch.Generator().manual_seed(1))
            bits = tensors["scale_base"].int() & 0xFFFF
            scale = (bits >> 4 << 3).to(torch.int16).view(FP16).float() * (size / 0.02)
            bits = scale.half().view(torch.int16).int() >> 3 << 4 | bits & 15
            tensors["scale_base"] = ((bits ^ 0x8000) - 0x8000).to(torch.int16)
            tensors["weight_scale_4"] = (tensors["weight_scale_4"].float() * size / 0.02).to(dtype)
            packed = arrange.pack(scheme, tensors)
            unit = 2.0 ** packed.records[:, packed.shape.lists_at].double()
            rows = unit.repeat_interleave(64)[:144, None]
            of_two, of_four = scheme.scales_2(tensors), tensors["weight_scale_4"]
            for scales, plus in ((of_two, two), (of_four, four)):
                lifted = scales.double() * rows * 2.0**plus
                assert lifted.max() < most, (dtype, size)
            # the largest weights have at least ten bits above the smallest subnormal of fp16
            largest = (of_two * rows).amax(1)
            assert largest.min() > 2.0**-14, (dtype, size, float(largest.min()))


def test_fp32_scales_are_refused():
    scheme = W2416(2.91)
    tensors = scheme.random_tensors(16, 512, torch.float32, torch.Generator().manual_seed(0))
    with pytest.raises(UserError, match=r"float32.*float16 and bfloat16.*Load the model"):
        arrange.pack(scheme, tensors)


@pytest.mark.parametrize("lists", [("sorted", "as they come"), ("sorted", "sorted")], ids=str)
def test_joined_layers_are_views_of_one(lists):
    scheme, k = W2416(3.3, 0.005), 576
    each = [draw(scheme, n, k, FP16, n, kind) for n, kind in zip((128, 48), lists, strict=True)]
    whole, parts = arrange.joined([arrange.pack(scheme, tensors) for tensors in each])
    for part, tensors in zip(parts, each, strict=True):
        assert part.records.untyped_storage().data_ptr() == whole.records.data_ptr()
        same(arrange.unpack(scheme, part), tensors)
    both = arrange.unpack(scheme, whole)
    assert torch.equal(both["outlier_place"][:8], each[0]["outlier_place"])
    assert torch.equal(both["outlier_place"][8:], each[1]["outlier_place"])
    assert (whole.ranks is None) == (lists[1] == "sorted")


def test_lists_are_dense():
    """At 0.1 % of outliers most records have one set: 2.7 % of a layer's bytes."""
    scheme, n, k = W2416(2.91), 512, 4096
    tensors = scheme.random_tensors(n, k, FP16, torch.Generator().manual_seed(0))
    packed = arrange.pack(scheme, tensors)
    shape, words = packed.shape, packed.records.shape[1]
    lists = words - shape.lists_at - arrange.HEAD - outliers.edge_words(shape.tiles)
    assert shape.tiles * 32 <= lists <= 1.3 * shape.tiles * 32 < 0.035 * words
