"""Converts canonical tensors of w2416 to the words that its CUDA kernels read and back, on any
device.

Inputs are ordered by their bits: first all groups of 16 with 2 bits, then those with 4, padded to
whole records (kernels/include/billfish/mixed.cuh). A band is 64 outputs: its records of 2 bits,
those of 4 bits, the logarithm of its unit, and its outliers by record (decode.cuh).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from billfish.errors import UserError
from billfish.formats import layout
from billfish.schemes.base import Tensors, together
from billfish.schemes.w2416.cuda import outliers
from billfish.schemes.w2416.scheme import W2416, pack_bands, unpack_bands, unpack_base
from billfish.schemes.w2416.shares import BAND, GROUP

N, TWO_K, FOUR_K = layout.BRICK_N, 256, layout.BRICK_K
TWO_GROUPS, FOUR_GROUPS = TWO_K // GROUP, FOUR_K // GROUP
TWO_WORDS = (4096 + 512 + 256 + 128) // 4  # codes, scale codes, zeros, bases
SET_WORDS, MARK_WORDS = N // 2, 4  # of a record of 4 bits, behind its codes
HEAD = 8  # words before a band's outliers; the first is the logarithm of its unit
DTYPES = (torch.float16, torch.bfloat16)
WEIGHTS_AT_ONCE = 2**25

# A band's weights are multiplied by a power of two, its unit: the largest for which all scales,
# times what mixed.cuh needs for codes that are subnormal numbers, fit the type. (for a scale of 2
# bits, for a scale of 4 bits, the smallest and the largest power)
ROOM = {torch.float16: (-5, -9, -25, 2), torch.bfloat16: (-6, -6, -100, 2)}


@dataclass(frozen=True)
class Shape:
    """What decides a layer's layout and launches."""

    n: int
    k: int
    parts: int
    two: int  # groups of 2 bits of a part
    four: int
    dtype: torch.dtype  # of scales and outliers
    longest: int = 1  # sets of outliers that a record may have

    @property
    def bands(self) -> int:
        return math.ceil(self.n / N)

    @property
    def tiles_2(self) -> int:
        return math.ceil(self.parts * self.two / TWO_GROUPS)

    @property
    def tiles_4(self) -> int:
        return math.ceil(self.parts * self.four / FOUR_GROUPS)

    @property
    def tiles(self) -> int:
        return self.tiles_2 + self.tiles_4

    @property
    def sets(self) -> int:
        """Scales of a 4-bit record: the most parts that one has groups of."""
        firsts = range(0, self.parts * self.four, FOUR_GROUPS)
        last = self.parts * self.four - 1
        return max(
            (min(i + FOUR_GROUPS - 1, last) // self.four - i // self.four + 1 for i in firsts),
            default=1,
        )

    @property
    def four_words(self) -> int:
        return N * FOUR_K // 8 + self.sets * SET_WORDS + MARK_WORDS

    @property
    def lists_at(self) -> int:  # the word of a band where what is behind its records begins
        return self.tiles_2 * TWO_WORDS + self.tiles_4 * self.four_words


@dataclass(frozen=True)
class Packed:
    shape: Shape
    records: Tensor  # (bands, words) int32
    columns: Tensor  # int32: where each group of 16 inputs of the records begins in x; -1: nowhere
    ranks: Tensor | None  # (n / 16, parts, outliers) int16: the order of lists that were not sorted
    unused: Tensor | None  # weight_scale_4 of a layer that has no 4-bit weights


def pack(scheme: W2416, tensors: Tensors) -> Packed:
    n, k = scheme.size(tensors)
    share, dtype = scheme.shares(k), tensors["weight_scale_4"].dtype
    if dtype not in DTYPES:
        raise UserError(
            f"scales are {dtype}; CUDA kernels take float16 and bfloat16. Load the model with one "
            "of these dtypes."
        )
    shape = Shape(n, k, share.parts, share.two, share.four, dtype)
    columns = _columns(shape, tensors["input_bits"])
    lists, ranks = outliers.pack(shape, columns, tensors)
    shape = replace(shape, longest=outliers.longest(lists, shape.tiles))
    device = tensors["weight_packed"].device
    records = torch.zeros(
        shape.bands, shape.lists_at + HEAD + lists.shape[1], dtype=torch.int32, device=device
    )
    records[:, shape.lists_at] = _units(shape, tensors)
    records[:, shape.lists_at + HEAD :] = lists
    step = max(1, WEIGHTS_AT_ONCE // (N * max(k, 1)))
    for first in range(0, shape.bands, step):
        some = {
            name: tensor[first * N * len(tensor) // n : (first + step) * N * len(tensor) // n]
            for name, tensor in tensors.items()
            if name != "input_bits"
        }
        rows = records[first : first + step]
        rows[:, : shape.tiles_2 * TWO_WORDS] = _two(shape, some)
        rows[:, shape.tiles_2 * TWO_WORDS : shape.lists_at] = _four(scheme, shape, some)
    unused = None if shape.four else tensors["weight_scale_4"].clone()
    return Packed(shape, records, columns, ranks, unused)


def unpack(scheme: W2416, packed: Packed) -> dict[str, Tensor]:
    """The canonical tensors, bit for bit."""
    shape, records = packed.shape, packed.records
    middle = shape.tiles_2 * TWO_WORDS
    made = {
        "input_bits": _input_bits(shape, packed.columns),
        **_two_back(shape, records[:, :middle]),
        **_four_back(shape, records[:, middle : shape.lists_at], packed.unused),
        **outliers.unpack(shape, packed.columns, records[:, shape.lists_at + HEAD :], packed.ranks),
    }
    return {name: made[name] for name in scheme.tensors(shape.n, shape.k, shape.dtype)}


def joined(layers: Sequence[Packed]) -> tuple[Packed, list[Packed]]:
    """Layers of one order of inputs as one, and each as a view of it."""
    words = max(layer.records.shape[1] for layer in layers)  # lists of outliers differ in length
    records, each = together([pad(p.records, (0, words - p.records.shape[1])) for p in layers])
    ranks, unused = ([getattr(layer, name) for layer in layers] for name in ("ranks", "unused"))
    if any(rank is not None for rank in ranks):
        known = next(rank for rank in ranks if rank is not None)
        index = torch.arange(known.shape[-1], dtype=known.dtype, device=known.device)
        ranks = [
            index.expand(p.shape.n // BAND, p.shape.parts, -1) if p.ranks is None else p.ranks
            for p in layers
        ]
    rank, rank_of = together(ranks) if ranks[0] is not None else (None, ranks)
    scale, scale_of = together(unused) if unused[0] is not None else (None, unused)
    shape = replace(
        layers[0].shape,
        n=sum(layer.shape.n for layer in layers),
        longest=max(layer.shape.longest for layer in layers),
    )
    columns = layers[0].columns
    parts = [
        Packed(layer.shape, each[i], columns, rank_of[i], scale_of[i])
        for i, layer in enumerate(layers)
    ]
    return Packed(shape, records, columns, rank, scale), parts


# -- the order of inputs


def _columns(shape: Shape, input_bits: Tensor) -> Tensor:
    first = torch.argsort(input_bits, stable=True).to(torch.int32) * GROUP
    two, four = torch.split(first, [shape.parts * shape.two, shape.parts * shape.four])
    return torch.cat(
        [
            pad(two, (0, -len(two) % TWO_GROUPS), value=-1),
            pad(four, (0, -len(four) % FOUR_GROUPS), value=-1),
        ]
    )


def _input_bits(shape: Shape, columns: Tensor) -> Tensor:
    bits = torch.full((shape.k // GROUP,), 2, dtype=torch.uint8, device=columns.device)
    first = shape.tiles_2 * TWO_GROUPS
    four = columns[first : first + shape.parts * shape.four].long()
    bits[four // GROUP] = 4
    return bits


# -- 2 bits. Of a row 64 b + 32 half + 16 brick + 8 lower + r of a band b.


def _two(shape: Shape, tensors: Tensors) -> Tensor:  # (bands, words)
    def rows(values: Tensor) -> Tensor:  # (n, g) -> [band, half, brick, lower, r, tile, k64, c]
        wide = pad(values, (0, shape.tiles_2 * TWO_GROUPS - values.shape[1], 0, -len(values) % N))
        return wide.view(-1, 2, 2, 2, 8, shape.tiles_2, 4, 4)

    words = rows(_apart(tensors["weight_packed"])).permute(0, 5, 6, 1, 4, 7, 2, 3)
    codes = rows(unpack_bands(tensors["scale_code"], 4)).permute(0, 5, 1, 4, 7, 6, 2, 3)
    # two words of a lane, each [lower][k64 % 2][brick]
    codes = codes.reshape(*codes.shape[:5], 2, 2, 2, 2).permute(0, 1, 2, 3, 4, 5, 8, 6, 7)
    zeros = rows(unpack_bands(tensors["weight_zero"], 2)).permute(0, 5, 1, 4, 7, 3, 6, 2)
    base = tensors["scale_base"]
    base = pad(base, (0, shape.tiles_2 * TWO_GROUPS - base.shape[1], 0, -len(base) % (N // BAND)))
    base = base.view(-1, 2, 2, shape.tiles_2, 4, 4).permute(0, 3, 1, 5, 4, 2)
    pieces = [
        words.flatten(2),
        layout.pack_stream(codes.flatten(2), 4),
        layout.pack_stream(zeros.flatten(2), 2),
        base.flatten(2).contiguous().view(torch.int32),
    ]
    return torch.cat(pieces, -1).flatten(1)


def _two_back(shape: Shape, records: Tensor) -> dict[str, Tensor]:
    records = records.reshape(shape.bands, shape.tiles_2, TWO_WORDS)
    words, codes, zeros, base = torch.split(records, [1024, 128, 64, 32], -1)
    groups = shape.parts * shape.two

    def canonical(lanes: Tensor) -> Tensor:  # [band, half, brick, lower, r, tile, k64, c] -> (n, g)
        return lanes.reshape(-1, shape.tiles_2 * TWO_GROUPS)[: shape.n, :groups].contiguous()

    words = words.view(shape.bands, shape.tiles_2, 4, 2, 8, 4, 2, 2).permute(0, 3, 6, 7, 4, 1, 2, 5)
    lanes = layout.unpack_stream(codes, 4).view(shape.bands, shape.tiles_2, 2, 8, 4, 2, 2, 2, 2)
    lanes = lanes.permute(0, 1, 2, 3, 4, 5, 7, 8, 6).flatten(5, 6)  # half, r, c, k64, brick, lower
    code = canonical(lanes.permute(0, 2, 6, 7, 3, 1, 5, 4))
    lanes = layout.unpack_stream(zeros, 2).view(shape.bands, shape.tiles_2, 2, 8, 4, 2, 4, 2)
    zero = canonical(lanes.permute(0, 2, 7, 5, 3, 1, 6, 4))
    base = base.contiguous().view(torch.int16).view(shape.bands, shape.tiles_2, 2, 4, 4, 2)
    base = base.permute(0, 2, 5, 1, 4, 3).reshape(-1, shape.tiles_2 * TWO_GROUPS)
    return {
        "weight_packed": _together(canonical(words)),
        "weight_zero": pack_bands(zero, 2, torch.int32),
        "scale_code": pack_bands(code, 4, torch.int64),
        "scale_base": base[: shape.n // BAND, :groups].contiguous(),
    }


# Steps of a perfect shuffle of 2-bit fields: the even ones below, the odd ones above.
STEPS = ((2, 0x0C0C0C0C), (4, 0x00F000F0), (8, 0x0000FF00))


def _apart(words: Tensor) -> Tensor:
    for shift, mask in STEPS:
        words = _swapped(words, shift, mask)
    return words


def _together(words: Tensor) -> Tensor:
    for shift, mask in reversed(STEPS):
        words = _swapped(words, shift, mask)
    return words


def _swapped(words: Tensor, shift: int, mask: int) -> Tensor:
    """Fields `mask` and those `shift` bits above change places. `mask` has no sign bit, so that
    shifting the sign in does no harm."""
    moved = (words ^ (words >> shift)) & mask
    return words ^ moved ^ (moved << shift)


# -- 4 bits


def _four(scheme: W2416, shape: Shape, tensors: Tensors) -> Tensor:  # (bands, words)
    if not shape.tiles_4:
        return tensors["weight_packed"].new_empty(-(-len(tensors["weight_packed"]) // N), 0)
    codes = scheme.codes_4(tensors).flatten(1)
    words = layout.brick().pack(codes).view(-1, shape.tiles_4, N * FOUR_K // 8)
    marks, part = _parts(shape)
    scales = pad(tensors["weight_scale_4"], (0, 1))  # part -1: none
    scales = pad(scales[:, part.to(scales.device)], (0, 0, 0, 0, 0, -len(scales) % N))
    lanes = scales.view(-1, 2, 4, 8, shape.tiles_4, shape.sets).permute(0, 4, 5, 1, 3, 2)
    pieces = [
        words,
        lanes.flatten(2).contiguous().view(torch.int32),
        pad(marks[:, None], (0, MARK_WORDS - 1)).to(words.device).expand(len(words), -1, -1),
    ]
    return torch.cat(pieces, -1).flatten(1)


def _four_back(shape: Shape, records: Tensor, unused: Tensor | None) -> dict[str, Tensor]:
    if unused is not None:
        empty = torch.empty(shape.n, 0, dtype=torch.int32, device=records.device)
        return {"weight_packed_4": empty, "weight_scale_4": unused}
    scale = torch.zeros(shape.n, shape.parts, dtype=shape.dtype, device=records.device)
    records = records.reshape(shape.bands, shape.tiles_4, shape.four_words)
    sizes = [N * FOUR_K // 8, shape.sets * SET_WORDS, MARK_WORDS]
    codes, lanes, _ = torch.split(records, sizes, -1)
    inputs = shape.parts * shape.four * GROUP
    unpacked = layout.brick().unpack(codes.reshape(shape.bands, -1), shape.n, inputs)
    lanes = lanes.contiguous().view(shape.dtype)
    lanes = lanes.view(shape.bands, shape.tiles_4, shape.sets, 2, 8, 4)
    rows = lanes.permute(0, 3, 5, 4, 1, 2).reshape(shape.bands * N, -1)[: shape.n]
    part = _parts(shape)[1].flatten().to(records.device)
    scale[:, part[part >= 0]] = rows[:, part >= 0]  # a part of several records: the same in each
    return {"weight_packed_4": layout.pack_stream(unpacked, 4), "weight_scale_4": scale}


def _parts(shape: Shape) -> tuple[Tensor, Tensor]:
    """Of each record: where parts begin within it, as bits; whose scales it has, (tiles, sets)."""
    marks, parts = [], []
    for tile in range(shape.tiles_4):
        steps = range(tile * FOUR_GROUPS, min((tile + 1) * FOUR_GROUPS, shape.parts * shape.four))
        of = [step // shape.four for step in steps]
        marks.append(sum(1 << i for i in range(1, len(of)) if of[i] != of[i - 1]))
        known = sorted(set(of))
        parts.append(known + [-1] * (shape.sets - len(known)))
    return torch.tensor(marks, dtype=torch.int32), torch.tensor(parts)


# -- units


def _units(shape: Shape, tensors: Tensors) -> Tensor:  # (bands,) int32
    two, four, least, most = ROOM[shape.dtype]
    base, offset = unpack_base(tensors["scale_base"])
    largest = (base * (offset + 15)).amax(1, keepdim=True)
    of_two = two - _exponents(largest, N // BAND)
    of_four = four - _exponents(tensors["weight_scale_4"].float().abs(), N)
    if not shape.four:
        of_four = of_two
    return torch.minimum(of_two, of_four).clamp(least, most)


def _exponents(values: Tensor, rows: int) -> Tensor:
    """e of each `rows` rows: the largest of their values is less than 2^e."""
    values = values.nan_to_num(0, 0, 0)
    values = pad(values, (0, 0, 0, -len(values) % rows)).view(-1, rows * values.shape[1])
    return torch.frexp(values.amax(1)).exponent
