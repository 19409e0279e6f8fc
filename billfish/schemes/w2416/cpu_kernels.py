"""The CPU kernels of w2416, for every instruction set of kernels/cpu.py.

Lanes are the outputs of a band. x is rounded to 16-bit integers, in steps that are a power of two
for each group of 16 inputs; sums over a group are integers, exact, and groups are added in fp32 in
order. Few rows of x are multiplied as two signed bytes each with the codes as they are (narrow);
for more rows a band is decoded to 16-bit integers, once for all of them (wide). Both give the same
bits, so a row's bits depend on no other row, thread count or instruction set.

    2 bits    sum of (16 code - 16 zero) x, times (scale_code + offset), times base * step / 16
    4 bits    sum of (code - 8) x, times step; the sum over a part's groups, times scale_4
    outliers  value times x itself, one after the other
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product as product_of
from typing import Any

import torch
from llvmlite import ir

from billfish.kernels.cpu import Isa
from billfish.kernels.fixed_point import in_bytes, in_steps, step_of, store_floats
from billfish.kernels.llvm import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    Compiled,
    Team,
    Value,
    Variable,
    Writer,
    compiled,
    dot,
    dot_pairs,
    load_floats,
    spread_words,
    vector,
    write_start,
)
from billfish.schemes.w2416.cpu_words import (
    ALONE,
    COLUMNS,
    ROWS,
    SIXTEENTHS,
    STEPS,
    TOP,
    ZEROS,
)
from billfish.schemes.w2416.scheme import BASE
from billfish.schemes.w2416.shares import BAND, GROUP

WIDE = 8  # rows of x from which on decoding a band first is faster
AHEAD = 1024  # bytes: prefetch distance of the words
# Rows of x in a narrow tile, bands and groups of a tile: eight chains of dot products side by side.
NARROW = {
    16: ((4, 1, 1), (2, 2, 1), (1, 4, 1)),
    8: ((2, 1, 1), (1, 1, 1)),
    4: ((2, 1, 1), (1, 1, 1)),
}
BANDS = 4  # of all narrow tiles of a row
WIDE_ROWS = {16: (8, 4, 2, 1), 8: (2, 1)}
PAIRS = GROUP // 2 * BAND * 4  # bytes of a decoded group: inputs i and i + 8 in a lane
LAYER = (
    *("order", "words", "zeros", "scales", "bases", "words_4", "scales_4", "places", "values"),
    *("bands", "two", "parts", "four", "outliers", "part"),
)
Cells = dict[tuple[int, int, int], Variable]  # by row, band and vector
Chain = tuple[int, int, int, int]  # group, row, band, vector
Chains = dict[Chain, Value]
Codes = dict[tuple[int, int, int], list[Value]]  # by group, band and vector


@dataclass(frozen=True)
class Kind:
    isa: Isa
    x: torch.dtype  # and of y
    scale: torch.dtype  # of 4-bit weights, and of outliers

    @property
    def wide(self) -> bool:
        return self.isa.dot in ("vnni", "pairs")  # NEON multiplies bytes four times as fast

    @property
    def vectors(self) -> range:  # of a band
        return range(BAND // self.isa.lanes)


class Layer:
    """A layer's arrays as a kernel sees them.

    order     (groups) int32: the group of x that each stored group is multiplied by
    words     (bands, two, 16) int32, zeros (bands, two) int32, scales (bands, two) int64 with the
              nibbles in SCALE_ORDER, bases (bands, two padded to STEPS) int16
    words_4   (bands, parts, four, 2, 16) int32 with the nibbles in CODE_ORDER
    scales_4  (bands, parts, 16)
    places    (bands, parts, outliers) uint16: row * COLUMNS + column in the part; values the same
    """

    order: Value
    words: Value
    zeros: Value
    scales: Value
    bases: Value
    words_4: Value
    scales_4: Value
    places: Value
    values: Value
    bands: Value
    two: Value  # groups of 2 bits
    parts: Value
    four: Value  # groups of 4 bits, of a part
    outliers: Value  # of a band's part
    part: Value  # inputs

    def __init__(self, w: Writer, address: Value) -> None:
        for i, name in enumerate(LAYER):
            setattr(self, name, w.load(address + 8 * i, I64))
        self.padded = (self.two + (STEPS - 1)) // STEPS * STEPS
        self.groups = self.two + self.parts * self.four


class Inputs:
    """The rows of a tile of x in scratch memory; `every` is the number of all rows.

    steps   (groups + STEPS, rows) fp32
    zeros   (groups, rows, 4) int32: what a sum over a group starts with, for each of the four zeros
    planes  (groups, rows, 32) bytes: all upper and then all lower bytes of the group, every fourth
            input side by side; for wide products 16-bit integers, inputs i and i + 8 side by side
    """

    def __init__(
        self, layer: Layer, place: Value, every: Value, row: Value, rows: "Value | int"
    ) -> None:
        self.rows = rows
        self.steps = place + row * (layer.groups + STEPS) * 4
        place = place + every * (layer.groups + STEPS) * 4
        self.zeros = place + row * layer.groups * 16
        self.planes = place + every * layer.groups * 16 + row * layer.groups * (2 * GROUP)

    def step(self, group: Value, row: "Value | int") -> Value:
        return self.steps + (group * self.rows + row) * 4

    def zero(self, group: Value, row: "Value | int") -> Value:
        return self.zeros + (group * self.rows + row) * 16

    def plane(self, group: Value, row: "Value | int") -> Value:
        return self.planes + (group * self.rows + row) * (2 * GROUP)


def _write_split(module: ir.Module, kind: Kind, wide: bool) -> Any:
    """Groups [first, last) of a tile of x in whole steps: split(layer, x, inputs, every, row, rows,
    first, last)."""
    w = Writer(module, f"split_{'wide' if wide else 'narrow'}", 8)
    address, x, place, every, above, rows, first, last = w.arguments
    layer = Layer(w, address)
    inputs, ints = Inputs(layer, place, every, above, rows), vector(I32, GROUP)
    with w.loop(w.number(0), rows) as row, w.loop(first, last) as group:
        source = w.load(layer.order + group * 4, I32).to(I64)
        source = x + ((above + row) * layer.groups + source) * (GROUP * kind.x.itemsize)
        value = load_floats(w, source, kind.x, GROUP)
        magnitude = value.as_bits(ints) & 0x7FFFFFFF
        largest = w.intrinsic(f"llvm.vector.reduce.umax.v{GROUP}i32", I32, magnitude)
        step, inverse = step_of(w, largest, TOP)
        w.store(step, inputs.step(group, row))
        steps = in_steps(w, value, inverse, TOP)
        target = inputs.plane(group, row)
        if wide:
            order = [i // 2 + i % 2 * 8 for i in range(GROUP)]
            w.store(w.shuffle(steps.to(I16), order), target)
        else:
            order = [i % 4 * 4 + i // 4 for i in range(GROUP)]
            for i, half in enumerate(in_bytes(steps)):
                w.store(w.shuffle(half.to(I8), order), target + GROUP * i)
            summed = w.intrinsic(f"llvm.vector.reduce.add.v{GROUP}i32", I32, steps)
            kinds = w.lanes(I32, [-zero for zero in ZEROS]), w.lanes(I32, [-8] * 4)
            zeros = w.pick(w.less(group, layer.two), *kinds)
            w.store(w.spread(summed, 4) * zeros, inputs.zero(group, row))
    return w.end()


# -- a group of 2-bit weights


class Group:
    """Zeros and scales of a band's group of 2-bit weights."""

    def __init__(self, w: Writer, kind: Kind, layer: Layer, band: Value, group: Value) -> None:
        self.w, self.isa = w, kind.isa
        at = band * layer.two + group
        self.words = layer.words + at * (4 * BAND)
        self._zeros = w.load(layer.zeros + at * 4, I32)
        self._scales = w.load(layer.scales + at * 8, I64)
        base = w.load(layer.bases + (band * layer.padded + group) * 2, I16)
        self._offset = (base & 15).to(I64, signed=False)

    def zeros(self, part: int) -> Value:
        """In the lower two bits; above them there are others."""
        lanes = range(self.isa.lanes * part, self.isa.lanes * (part + 1))
        shifts = self.w.lanes(I32, [2 * row for row in lanes])
        return self.w.spread(self._zeros, self.isa.lanes) >> shifts

    def _codes(self, part: int) -> Value:  # in the lower four bits
        lanes = range(self.isa.lanes * part, self.isa.lanes * (part + 1))
        both = self.w.spread(self._scales, self.isa.lanes // 2)
        both = both.as_bits(vector(I32, self.isa.lanes))
        return both >> self.w.lanes(I32, [4 * (row // 2) for row in lanes])

    def scales(self, part: int) -> Value:
        """fp32, without their base."""
        w, lanes = self.w, self.isa.lanes
        ramp = w.array("ramp", F32, [float(i) for i in range(2 * 16)]) + self._offset * 4
        if lanes == 16:  # a table look-up takes the lower four bits by itself
            table = w.load(ramp, vector(F32, 16))
            name = "llvm.x86.avx512.permvar.sf.512"
            return w.intrinsic(name, table.type, table, self._codes(part))
        return (self._codes(part) & 15).to(F32) + w.spread(w.load(ramp, F32), lanes)

    def whole_scales(self, part: int) -> Value:
        offset = self.w.spread(self._offset.to(I32), self.isa.lanes)
        return (self._codes(part) & 15) + offset


def _look_up(w: Writer, isa: Isa, table: Value, index: Value) -> Value:
    """One of four int32 at an address, by the lower two bits of the index."""
    ints = vector(I32, isa.lanes)
    if isa.dot in ("vnni", "pairs"):
        name = {8: "avx.vpermilvar.ps.256", 16: "avx512.vpermilvar.ps.512"}[isa.lanes]
        four = w.shuffle(w.load(table, vector(F32, 4)), list(range(4)) * (isa.lanes // 4))
        return w.intrinsic(f"llvm.x86.{name}", four.type, four, index).as_bits(ints)
    first, second = (w.load(table + 4 * i, I32) for i in (0, 1))  # zeros have equal distances
    return (index & 3) * w.spread(second - first, isa.lanes) + w.spread(first, isa.lanes)


# -- tiles: rows of x times bands


class Tile:
    """What narrow and wide tiles share: tile(layer, band, inputs, every, row, own, x, y).

    A cell is (row, band, vector of the band). Every cell has a total in registers.
    """

    def __init__(self, module: ir.Module, kind: Kind, rows: int, bands: int, name: str) -> None:
        self.w = w = Writer(module, f"{name}{rows}x{bands}", 8)
        address, band, place, every, self.row, own, self.x, self.y = w.arguments
        self.kind, self.rows, self.bands = kind, rows, [band + i for i in range(bands)]
        self.layer = Layer(w, address)
        self.inputs = Inputs(self.layer, place, every, self.row, rows)
        self.floats = vector(F32, kind.isa.lanes)
        self.cells = [
            (row, i, part) for row in range(rows) for i in range(bands) for part in kind.vectors
        ]
        self.totals = {cell: w.variable(w.constant(self.floats, 0.0)) for cell in self.cells}
        self.sums, self.factors = own, own + ROWS * BAND * 4
        self.panel = self.factors + (self.layer.groups + STEPS) * (ROWS * 4)
        self._write_factors()

    def _write_factors(self) -> None:
        """Second-order scales times the steps of x: (bands, groups + STEPS, rows)."""
        w, layer, rows = self.w, self.layer, self.rows
        with w.loop(w.number(0), layer.padded, STEPS) as group:
            for i, band in enumerate(self.bands):
                place = layer.bases + (band * layer.padded + group) * 2
                bits = (w.load(place, vector(I16, STEPS)) >> 4) << 3
                bases = bits.as_bits(vector(F16, STEPS)).to(F32) * (BASE / SIXTEENTHS)
                for part in range(rows):
                    place = self.inputs.step(group, part * STEPS)
                    each = w.shuffle(bases, [(part * STEPS + j) // rows for j in range(STEPS)])
                    steps = w.load(place, vector(F32, STEPS))
                    w.store(each * steps, self._factor(i, group, part * STEPS))

    def _factor(self, i: int, group: Value, row: int) -> Value:
        of_band = (self.layer.groups + STEPS) * (4 * self.rows)
        return self.factors + of_band * i + group * (4 * self.rows) + 4 * row

    def add(self, total: Variable, value: Value, factor: Value) -> None:
        name = f"llvm.fma.v{self.kind.isa.lanes}f32"
        total.set(self.w.intrinsic(name, self.floats, value, factor, total.get()))

    def add_2(self, cell: tuple[int, int, int], group: Value, value: Value) -> None:
        factor = self.w.load(self._factor(cell[1], group, cell[0]), F32)
        self.add(self.totals[cell], value, self.w.spread(factor, self.kind.isa.lanes))

    def parts_4(self, add_groups: Callable[[Value, Value, Cells], None]) -> None:
        """All 4-bit groups; add_groups(first, last, sums) adds those of one part."""
        w, layer, lanes = self.w, self.layer, self.kind.isa.lanes
        sums = {cell: w.variable(w.constant(self.floats, 0.0)) for cell in self.cells}
        with w.when(w.less(w.number(0), layer.four)), w.loop(w.number(0), layer.parts) as part:
            for each in sums.values():
                each.set(w.constant(self.floats, 0.0))
            add_groups(part * layer.four, (part + 1) * layer.four, sums)
            for cell in self.cells:
                place = (self.bands[cell[1]] * layer.parts + part) * BAND + cell[2] * lanes
                place = layer.scales_4 + place * self.kind.scale.itemsize
                scale = load_floats(w, place, self.kind.scale, lanes)
                self.add(self.totals[cell], sums[cell].get(), scale)

    def add_4(self, total: Variable, row: int, group: Value, value: Value) -> None:
        step = self.w.load(self.inputs.step(group, row), F32)
        self.add(total, value, self.w.spread(step, self.kind.isa.lanes))

    def end(self) -> Any:
        """Outliers, and y."""
        w, layer, kind, lanes = self.w, self.layer, self.kind, self.kind.isa.lanes
        of_row, of_part = layer.groups * (GROUP * kind.x.itemsize), layer.part * kind.x.itemsize
        for row, i, part in self.cells:
            place = self.sums + ((row * len(self.bands) + i) * BAND + part * lanes) * 4
            w.store(self.totals[row, i, part].get(), place)
        for i, band in enumerate(self.bands):
            sums, apart = self.sums + i * (BAND * 4), len(self.bands) * (BAND * 4)
            with w.loop(w.number(0), layer.parts) as part, w.loop(w.number(0), layer.outliers) as j:
                at = (band * layer.parts + part) * layer.outliers + j
                place = w.load(layer.places + at * 2, I16).to(I64, signed=False)
                value = load_floats(w, layer.values + at * kind.scale.itemsize, kind.scale, 1)
                column = self.x + part * of_part + (place & (COLUMNS - 1)) * kind.x.itemsize
                for row in range(self.rows):
                    x = load_floats(w, column + of_row * (self.row + row), kind.x, 1)
                    target = sums + place // COLUMNS * 4 + row * apart
                    total = w.load(target, value.type)
                    w.store(w.intrinsic("llvm.fma.v1f32", value.type, value, x, total), target)
        for row, i, part in self.cells:
            place = self.sums + ((row * len(self.bands) + i) * BAND + part * lanes) * 4
            total = w.load(place, self.floats)
            place = ((self.row + row) * layer.bands + self.bands[i]) * BAND + part * lanes
            store_floats(w, total, self.y + place * kind.x.itemsize, kind.x)
        return w.end()


def _write_narrow(module: ir.Module, kind: Kind, rows: int, bands: int, groups: int) -> Any:
    """Rows of x in bytes times bands of codes. A sum is a chain of dot products, each of which
    waits for the one before it: `groups` at a time are side by side."""
    tile = Tile(module, kind, rows, bands, "narrow")
    w, layer, isa = tile.w, tile.layer, kind.isa
    ints, lanes = vector(I32, isa.lanes), isa.lanes

    def products(group: Value, codes: Codes, lower: Chains) -> dict[Chain, Value]:
        upper = dict.fromkeys(lower, w.constant(ints, 0))
        sides = {(g, row) for g, row, _, _ in lower}
        x = {
            side: spread_words(isa, w, tile.inputs.plane(group + side[0], side[1]), 8)
            for side in sorted(sides)
        }
        for q in range(4):
            for chain in lower:
                g, row, *which = chain
                code = codes[g, *which][q]
                upper[chain] = dot(isa, w, upper[chain], code, x[g, row][q])
                lower[chain] = dot(isa, w, lower[chain], code, x[g, row][q + 4])
        return {chain: ((upper[chain] << 8) + lower[chain]).to(F32) for chain in lower}

    def add_2(group: Value, count: int) -> None:
        codes, scales, lower = Codes(), {}, Chains()
        for g, i, part in product_of(range(count), range(bands), kind.vectors):
            here = Group(w, kind, layer, tile.bands[i], group + g)
            if part == 0:
                w.prefetch(here.words + AHEAD)
            word = w.load(here.words + part * (4 * lanes), ints)
            shifted = (word << 4, word << 2, word, word >> 2)
            codes[g, i, part] = [each & 0x30303030 for each in shifted]
            zeros, scales[g, i, part] = here.zeros(part), here.scales(part)
            for row in range(rows):
                table = tile.inputs.zero(group + g, row)
                lower[g, row, i, part] = _look_up(w, isa, table, zeros)
        for (g, *cell), value in products(group, codes, lower).items():
            row, i, part = cell
            tile.add_2((row, i, part), group + g, value * scales[g, i, part])

    def add_4(group: Value, count: int, sums: Cells) -> None:
        codes, lower = Codes(), Chains()
        for g, i, part in product_of(range(count), range(bands), kind.vectors):
            words = tile.bands[i] * layer.parts * layer.four + group + g
            words = layer.words_4 + words * (8 * BAND) + part * (4 * lanes)
            halves = [w.load(words + half * (BAND * 4), ints) for half in (0, 1)]
            for half in (0, 1) if part == 0 else ():
                w.prefetch(words + (AHEAD + half * (BAND * 4)))
            codes[g, i, part] = [each & 0x0F0F0F0F for half in halves for each in (half, half >> 4)]
            for row in range(rows):
                start = w.load(tile.inputs.zero(layer.two + group + g, row), I32)
                lower[g, row, i, part] = w.spread(start, lanes)
        for (g, *cell), value in products(layer.two + group, codes, lower).items():
            row, i, part = cell
            tile.add_4(sums[row, i, part], row, layer.two + group + g, value)

    def each_4(first: Value, last: Value, sums: Cells) -> None:
        _stepwise(w, first, last, groups, lambda group, count: add_4(group, count, sums))

    _stepwise(w, w.number(0), layer.two, groups, add_2)
    tile.parts_4(each_4)
    return tile.end()


def _stepwise(
    w: Writer, first: Value, last: Value, most: int, add: Callable[[Value, int], None]
) -> None:
    """add(group, count) for all groups: `most` at a time, the rest one by one."""
    begin = first
    for count in dict.fromkeys((most, 1)):
        end = begin + (last - begin) // count * count
        with w.loop(begin, end, count) as group:
            add(group, count)
        begin = end


def _write_panel(module: ir.Module, kind: Kind) -> Any:
    """A band in whole numbers of 16 bits, inputs i and i + 8 of a group in a lane: panel(layer,
    band, out)."""
    w = Writer(module, "panel", 3)
    address, band, out = w.arguments
    layer, lanes = Layer(w, address), kind.isa.lanes
    ints, shorts = vector(I32, lanes), vector(I16, 2 * lanes)

    def twice(value: Value) -> Value:
        return ((value << 16) + (value & 0xFFFF)).as_bits(shorts)

    with w.loop(w.number(0), layer.two) as group:
        here, target = Group(w, kind, layer, band, group), out + group * PAIRS
        for part in kind.vectors:
            scales = here.whole_scales(part)
            zeros = (here.zeros(part) & 3) * (ZEROS[1] - ZEROS[0]) + ZEROS[0]
            factor, less = twice(scales * SIXTEENTHS), twice(scales * zeros)
            word = w.load(here.words + part * (4 * lanes), ints)
            for i in range(8):
                codes = ((word >> (2 * i)) & 0x00030003).as_bits(shorts)
                w.store(codes * factor - less, target + (i * BAND + part * lanes) * 4)
    with w.loop(w.number(0), layer.parts * layer.four) as group:
        words = layer.words_4 + (band * layer.parts * layer.four + group) * (8 * BAND)
        target = out + (layer.two + group) * PAIRS
        for part in kind.vectors:
            for half in (0, 1):
                word = w.load(words + (half * BAND + part * lanes) * 4, ints)
                for i in range(4):
                    pair = i // 2 * 4 + half * 2 + i % 2  # see CODE_ORDER
                    codes = ((word >> (4 * i)) & 0x000F000F).as_bits(shorts) - 8
                    w.store(codes, target + (pair * BAND + part * lanes) * 4)
    return w.end()


def _write_wide(module: ir.Module, kind: Kind, rows: int) -> Any:
    """Rows of x in 16-bit integers times a decoded band."""
    tile = Tile(module, kind, rows, 1, "wide")
    w, isa = tile.w, kind.isa
    ints = vector(I32, isa.lanes)

    def products(group: Value) -> dict[tuple[int, int, int], Value]:
        totals = dict.fromkeys(tile.cells, w.constant(ints, 0))
        for i in range(GROUP // 2):
            for part in kind.vectors:
                place = tile.panel + group * PAIRS + (i * BAND + part * isa.lanes) * 4
                pairs = w.load(place, ints)
                for row in range(rows):
                    x = w.load(tile.inputs.plane(group, row) + 4 * i, I32)
                    total = totals[row, 0, part]
                    totals[row, 0, part] = dot_pairs(isa, w, total, pairs, w.spread(x, isa.lanes))
        return {cell: total.to(F32) for cell, total in totals.items()}

    def add_4(first: Value, last: Value, sums: Cells) -> None:
        with w.loop(tile.layer.two + first, tile.layer.two + last) as group:
            for cell, value in products(group).items():
                tile.add_4(sums[cell], cell[0], group, value)

    with w.loop(w.number(0), tile.layer.two) as group:
        for cell, value in products(group).items():
            tile.add_2(cell, group, value)
    tile.parts_4(add_4)
    return tile.end()


# -- all rows


def product(kind: Kind) -> Compiled:
    """start(layer, x, y, room, rows, threads): y (rows, outputs) = x (rows, inputs) by the layer.
    `room` is scratch memory of cpu_words.py's `room_bytes`."""
    module = ir.Module()
    narrow = {
        (rows, bands): _write_narrow(module, kind, rows, bands, groups if bands > 1 else 1)
        for rows, most, groups in NARROW[kind.isa.lanes]
        for bands in {1, most}
    }
    split = _write_split(module, kind, False)
    w = Writer(module, "work", 1)
    address, x, y, room, rows = (w.load(w.arguments[0] + 8 * i, I64) for i in range(5))
    layer, team = Layer(w, address), Team(w)
    first, last = team.share(layer.bands)
    own_bytes = (layer.groups + STEPS) * (ROWS * 4) + layer.groups * PAIRS + ROWS * BAND * 4
    own = room + own_bytes * team.index
    shared = room + own_bytes * team.count

    def tiles(counts: Sequence[int], call: Callable[[int, Value], None]) -> None:
        """call(count, row) for tiles of rows that cover all."""
        begin = w.number(0)
        for count in counts:
            end = begin + (rows - begin) // count * count
            with w.loop(begin, end, count) as row:
                call(count, row)
            begin = end

    def multiply_narrow(inputs: Value, band: Value, bands: int) -> None:
        def call(count: int, row: Value) -> None:
            some = min(bands, most[count])
            for i in range(0, bands, some):
                where = (address, band + i, inputs, rows, row, own, x, y)
                w.call(narrow[count, some], *where)

        tiles(narrow_rows, call)

    most = {rows: bands for rows, bands, _ in NARROW[kind.isa.lanes]}
    narrow_rows = list(most)
    with w.when(w.less(rows, WIDE if kind.wide else 2**62)):
        alone = w.less(rows, ALONE)
        begin, end = team.share(layer.groups)
        begin, end = w.pick(alone, w.number(0), begin), w.pick(alone, layer.groups, end)
        row_bytes = (layer.groups + STEPS) * 4 + layer.groups * (16 + 2 * GROUP)
        inputs = shared + w.pick(alone, team.index * rows * row_bytes, w.number(0))
        tiles(
            narrow_rows,
            lambda count, row: w.call(
                split, address, x, inputs, rows, row, w.number(count), begin, end
            ),
        )
        with w.when(w.less(w.number(ALONE - 1), rows)):
            team.meet()
        whole = first + (last - first) // BANDS * BANDS
        with w.loop(first, whole, BANDS) as band:
            multiply_narrow(inputs, band, BANDS)
        with w.loop(whole, last) as band:
            multiply_narrow(inputs, band, 1)
    if kind.wide:
        wide_rows = WIDE_ROWS[kind.isa.lanes]
        wide = {rows: _write_wide(module, kind, rows) for rows in wide_rows}
        split_wide = _write_split(module, kind, True)
        panel = _write_panel(module, kind)
        with w.when(w.less(w.number(WIDE - 1), rows)):
            begin, end = team.share(layer.groups)
            tiles(
                wide_rows,
                lambda count, row: w.call(
                    split_wide, address, x, shared, rows, row, w.number(count), begin, end
                ),
            )
            team.meet()
            with w.loop(first, last) as band:
                decoded = own + (layer.groups + STEPS) * (ROWS * 4) + ROWS * BAND * 4
                w.call(panel, address, band, decoded)
                tiles(
                    wide_rows,
                    lambda count, row: w.call(
                        wide[count], address, band, shared, rows, row, own, x, y
                    ),
                )
    write_start(module, w.end(), 5)
    return compiled(module, kind.isa)
