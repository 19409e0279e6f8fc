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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
PAIRS = GROUP // 2 * BAND * 4  # bytes of a decoded group: inputs i and i + 8 in a lane
LAYER = (
    *("order", "words", "zeros", "scales", "bases", "words_4", "scales_4", "places", "values"),
    *("bands", "two", "parts", "four", "outliers"),
)


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

    def __init__(self, w: Writer, address: Value) -> None:
        for i, name in enumerate(LAYER):
            setattr(self, name, w.load(address + 8 * i, I64))
        self.padded = (self.two + (STEPS - 1)) // STEPS * STEPS
        self.groups = self.two + self.parts * self.four


class Inputs:
    """Rows of x in scratch memory.

    steps   (rows, groups + STEPS) fp32
    zeros   (rows, groups, 4) int32: what a sum over a group starts with, for each of the four zeros
    planes  (rows, groups, 32) bytes: all upper and then all lower bytes of the group, every fourth
            input side by side; for wide products 16-bit integers, inputs i and i + 8 side by side
    """

    def __init__(self, layer: Layer, place: Value, rows: Value) -> None:
        self.layer = layer
        self.steps = place
        self.zeros = self.steps + rows * (layer.groups + STEPS) * 4
        self.planes = self.zeros + rows * layer.groups * 16

    def step(self, row: Value, group: Value) -> Value:
        return self.steps + (row * (self.layer.groups + STEPS) + group) * 4

    def zero(self, row: Value, group: Value) -> Value:
        return self.zeros + (row * self.layer.groups + group) * 16

    def plane(self, row: Value, group: Value) -> Value:
        return self.planes + (row * self.layer.groups + group) * (2 * GROUP)


def _write_split(module: ir.Module, kind: Kind, wide: bool) -> Any:
    """Rows [first, last) of x in whole steps: split(layer, x, inputs, rows, first, last)."""
    w = Writer(module, f"split_{'wide' if wide else 'narrow'}", 6)
    address, x, place, rows, first, last = w.arguments
    layer = Layer(w, address)
    inputs, ints = Inputs(layer, place, rows), vector(I32, GROUP)
    with w.loop(first, last) as row, w.loop(w.number(0), layer.groups) as group:
        source = w.load(layer.order + group * 4, I32).to(I64)
        source = x + (row * layer.groups + source) * (GROUP * kind.x.itemsize)
        value = load_floats(w, source, kind.x, GROUP)
        magnitude = value.as_bits(ints) & 0x7FFFFFFF
        largest = w.intrinsic(f"llvm.vector.reduce.umax.v{GROUP}i32", I32, magnitude)
        step, inverse = step_of(w, largest, TOP)
        w.store(step, inputs.step(row, group))
        steps = in_steps(w, value, inverse, TOP)
        target = inputs.plane(row, group)
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
            w.store(w.spread(summed, 4) * zeros, inputs.zero(row, group))
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


# -- tiles: rows of x times a band


class Tile:
    """What narrow and wide tiles share. tile(layer, band, inputs, all rows, row, own, x, y)"""

    def __init__(self, module: ir.Module, kind: Kind, rows: int, name: str) -> None:
        self.w = w = Writer(module, f"{name}{rows}", 8)
        address, self.band, place, every, self.row, own, self.x, self.y = w.arguments
        self.kind, self.rows = kind, rows
        self.layer = Layer(w, address)
        self.inputs = Inputs(self.layer, place, every)
        self.floats = vector(F32, kind.isa.lanes)
        self.tile = [(row, part) for part in kind.vectors for row in range(rows)]
        self.totals = {at: w.variable(w.constant(self.floats, 0.0)) for at in self.tile}
        self.sums, self.factors = own, own + ROWS * BAND * 4
        self.panel = self.factors + (self.layer.groups + STEPS) * (ROWS * 4)
        self._write_factors()

    def _write_factors(self) -> None:
        """Second-order scales times the steps of x."""
        w, layer = self.w, self.layer
        with w.loop(w.number(0), layer.padded, STEPS) as group:
            place = layer.bases + (self.band * layer.padded + group) * 2
            bits = (w.load(place, vector(I16, STEPS)) >> 4) << 3
            bases = bits.as_bits(vector(F16, STEPS)).to(F32) * (BASE / SIXTEENTHS)
            for row in range(self.rows):
                steps = w.load(self.inputs.step(self.row + row, group), vector(F32, STEPS))
                w.store(bases * steps, self._factor(row, group))

    def _factor(self, row: int, group: Value) -> Value:
        return self.factors + (self.layer.groups * row + group) * 4 + row * (STEPS * 4)

    def add(self, total: Variable, value: Value, factor: Value) -> None:
        name = f"llvm.fma.v{self.kind.isa.lanes}f32"
        total.set(self.w.intrinsic(name, self.floats, value, factor, total.get()))

    def add_2(self, row: int, part: int, group: Value, value: Value) -> None:
        factor = self.w.load(self._factor(row, group), F32)
        self.add(self.totals[row, part], value, self.w.spread(factor, self.kind.isa.lanes))

    @contextmanager
    def groups_4(self) -> Iterator[tuple[Value, Value, dict[tuple[int, int], Variable]]]:
        """For every 4-bit group: its number among them and among all, and sums of its part."""
        w, layer, lanes = self.w, self.layer, self.kind.isa.lanes
        sums = {at: w.variable(w.constant(self.floats, 0.0)) for at in self.tile}
        with w.when(w.less(w.number(0), layer.four)), w.loop(w.number(0), layer.parts) as part:
            for each in sums.values():
                each.set(w.constant(self.floats, 0.0))
            with w.loop(part * layer.four, (part + 1) * layer.four) as group:
                yield group, layer.two + group, sums
            for at in self.tile:
                place = (self.band * layer.parts + part) * BAND + at[1] * lanes
                place = layer.scales_4 + place * self.kind.scale.itemsize
                scale = load_floats(w, place, self.kind.scale, lanes)
                self.add(self.totals[at], sums[at].get(), scale)

    def add_4(self, total: Variable, row: int, group: Value, value: Value) -> None:
        step = self.w.load(self.inputs.step(self.row + row, group), F32)
        self.add(total, value, self.w.spread(step, self.kind.isa.lanes))

    def end(self) -> Any:
        """Outliers, and y."""
        w, layer, kind, lanes = self.w, self.layer, self.kind, self.kind.isa.lanes
        for row, part in self.tile:
            place = self.sums + (row * BAND + part * lanes) * 4
            w.store(self.totals[row, part].get(), place)
        inputs = layer.groups * (GROUP * kind.x.itemsize)
        of_part = inputs // w.pick(w.less(layer.parts, 1), w.number(1), layer.parts)
        with w.loop(w.number(0), layer.parts) as part, w.loop(w.number(0), layer.outliers) as i:
            at = (self.band * layer.parts + part) * layer.outliers + i
            place = w.load(layer.places + at * 2, I16).to(I64, signed=False)
            value = load_floats(w, layer.values + at * kind.scale.itemsize, kind.scale, 1)
            column = self.x + part * of_part + (place & (COLUMNS - 1)) * kind.x.itemsize
            target = self.sums + place // COLUMNS * 4
            for row in range(self.rows):
                x = load_floats(w, column + inputs * (self.row + row), kind.x, 1)
                total = w.load(target + row * (BAND * 4), value.type)
                total = w.intrinsic("llvm.fma.v1f32", value.type, value, x, total)
                w.store(total, target + row * (BAND * 4))
        for row, part in self.tile:
            total = w.load(self.sums + (row * BAND + part * lanes) * 4, self.floats)
            place = ((self.row + row) * layer.bands + self.band) * BAND + part * lanes
            store_floats(w, total, self.y + place * kind.x.itemsize, kind.x)
        return w.end()


def _write_narrow(module: ir.Module, kind: Kind, rows: int) -> Any:
    """Rows of x in bytes times a band of codes."""
    tile = Tile(module, kind, rows, "narrow")
    w, layer, isa = tile.w, tile.layer, kind.isa
    ints = vector(I32, isa.lanes)

    def product(codes: list[Value], row: int, group: Value, total: Value) -> Value:
        plane = tile.inputs.plane(tile.row + row, group)
        upper = w.constant(ints, 0)
        for code, x in zip(codes, spread_words(isa, w, plane, 4), strict=True):
            upper = dot(isa, w, upper, code, x)
        for code, x in zip(codes, spread_words(isa, w, plane + GROUP, 4), strict=True):
            total = dot(isa, w, total, code, x)
        return ((upper << 8) + total).to(F32)

    with w.loop(w.number(0), layer.two) as group:
        here = Group(w, kind, layer, tile.band, group)
        w.prefetch(here.words + AHEAD)
        for part in kind.vectors:
            word = w.load(here.words + part * (4 * isa.lanes), ints)
            codes = [each & 0x30303030 for each in (word << 4, word << 2, word, word >> 2)]
            zeros, scales = here.zeros(part), here.scales(part)
            for row in range(rows):
                start = _look_up(w, isa, tile.inputs.zero(tile.row + row, group), zeros)
                tile.add_2(row, part, group, product(codes, row, group, start) * scales)
    with tile.groups_4() as (group, among, sums):
        words = layer.words_4 + (tile.band * layer.parts * layer.four + group) * (8 * BAND)
        for i in (0, 64):
            w.prefetch(words + (AHEAD + i))
        for part in kind.vectors:
            codes = []
            for half in (0, 1):
                word = w.load(words + (half * BAND + part * isa.lanes) * 4, ints)
                codes += [word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F]
            for row in range(rows):
                start = w.load(tile.inputs.zero(tile.row + row, among), I32)
                value = product(codes, row, among, w.spread(start, isa.lanes))
                tile.add_4(sums[row, part], row, among, value)
    return tile.end()


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
    tile = Tile(module, kind, rows, "wide")
    w, isa = tile.w, kind.isa
    ints = vector(I32, isa.lanes)

    def products(group: Value) -> dict[tuple[int, int], Value]:
        totals = dict.fromkeys(tile.tile, w.constant(ints, 0))
        planes = [tile.inputs.plane(tile.row + row, group) for row in range(rows)]
        for i in range(GROUP // 2):
            for part in kind.vectors:
                place = tile.panel + group * PAIRS + (i * BAND + part * isa.lanes) * 4
                pairs = w.load(place, ints)
                for row in range(rows):
                    x = w.spread(w.load(planes[row] + 4 * i, I32), isa.lanes)
                    totals[row, part] = dot_pairs(isa, w, totals[row, part], pairs, x)
        return {at: total.to(F32) for at, total in totals.items()}

    with w.loop(w.number(0), tile.layer.two) as group:
        for (row, part), value in products(group).items():
            tile.add_2(row, part, group, value)
    with tile.groups_4() as (_, group, sums):
        for at, value in products(group).items():
            tile.add_4(sums[at], at[0], group, value)
    return tile.end()


# -- all rows


def product(kind: Kind) -> Compiled:
    """start(layer, x, y, room, rows, threads): y (rows, outputs) = x (rows, inputs) by the layer.
    `room` is scratch memory of cpu_words.py's `room_bytes`."""
    module = ir.Module()
    wide_rows = {16: (8, 4, 2, 1), 8: (2, 1)}.get(kind.isa.lanes, ())
    narrow_rows = {16: (4, 2, 1)}.get(kind.isa.lanes, (2, 1))
    narrow = {rows: _write_narrow(module, kind, rows) for rows in narrow_rows}
    splits = [_write_split(module, kind, False)]
    if kind.wide:
        wide = {rows: _write_wide(module, kind, rows) for rows in wide_rows}
        splits.append(_write_split(module, kind, True))
        panel = _write_panel(module, kind)
    w = Writer(module, "work", 1)
    address, x, y, room, rows = (w.load(w.arguments[0] + 8 * i, I64) for i in range(5))
    layer, team = Layer(w, address), Team(w)
    first, last = team.share(layer.bands)
    own_bytes = (layer.groups + STEPS) * (ROWS * 4) + layer.groups * PAIRS + ROWS * BAND * 4
    own = room + own_bytes * team.index
    everyones = room + own_bytes * team.count

    def multiply(tiles: dict[int, Any], inputs: Value, band: Value) -> None:
        begin = w.number(0)
        for count in tiles:
            end = begin + (rows - begin) // count * count
            with w.loop(begin, end, count) as row:
                w.call(tiles[count], address, band, inputs, rows, row, own, x, y)
            begin = end

    with w.when(w.less(rows, WIDE if kind.wide else 2**62)):
        alone = w.less(rows, ALONE)
        begin, end = team.share(rows)
        begin, end = w.pick(alone, w.number(0), begin), w.pick(alone, rows, end)
        row_bytes = (layer.groups + STEPS) * 4 + layer.groups * (16 + 2 * GROUP)
        copy = w.pick(alone, team.index * rows * row_bytes, w.number(0))
        inputs = everyones + copy
        w.call(splits[0], address, x, inputs, rows, begin, end)
        with w.when(w.less(w.number(ALONE - 1), rows)):
            team.meet()
        with w.loop(first, last) as band:
            multiply(narrow, inputs, band)
    if kind.wide:
        with w.when(w.less(w.number(WIDE - 1), rows)):
            w.call(splits[1], address, x, everyones, rows, *team.share(rows))
            team.meet()
            with w.loop(first, last) as band:
                decoded = own + (layer.groups + STEPS) * (ROWS * 4) + ROWS * BAND * 4
                w.call(panel, address, band, decoded)
                multiply(wide, everyones, band)
    write_start(module, w.end(), 5)
    return compiled(module, kind.isa)
