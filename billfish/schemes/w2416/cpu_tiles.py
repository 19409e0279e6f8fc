"""Tiles of w2416's CPU kernels: a few rows of x times one or more bands of a layer.

Narrow tiles multiply rows as two signed bytes a number by the codes as they are; wide tiles rows of
16-bit integers by a decoded band. Both compute the same sums.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

from llvmlite import ir

from billfish.kernels.cpu import Isa
from billfish.kernels.llvm import (
    F16,
    F32,
    I16,
    I32,
    Value,
    Variable,
    Writer,
    dot,
    dot_pairs,
    load_floats,
    spread_words,
    vector,
)
from billfish.schemes.w2416.cpu_layer import PAIRS, Group, Inputs, Kind, Layer, Own
from billfish.schemes.w2416.cpu_words import SIXTEENTHS, STEPS, ZEROS
from billfish.schemes.w2416.scheme import BASE
from billfish.schemes.w2416.shares import BAND, GROUP

AHEAD = 1024  # bytes: prefetch distance of the words
Cell = tuple[int, int, int]  # row, band and vector of the band
Sums = dict[Cell, Variable]
Codes = dict[tuple[int, int], list[Value]]  # by band and vector


class Tile:
    """What narrow and wide tiles share: tile(layer, band, inputs, every, row, own) leaves sums in
    `own`. Every cell (row, band, vector of the band) has a total in registers."""

    def __init__(self, module: ir.Module, kind: Kind, rows: int, bands: int, name: str) -> None:
        self.w = w = Writer(module, f"{name}{rows}x{bands}", 6, inline=False)
        address, band, place, every, row, own = w.arguments
        self.kind, self.rows, self.bands = kind, rows, [band + i for i in range(bands)]
        self.layer = Layer(w, address)
        self.inputs = Inputs(self.layer, place, every, row, rows)
        self.floats = vector(F32, kind.isa.lanes)
        self.cells = [
            (row, i, part) for row in range(rows) for i in range(bands) for part in kind.vectors
        ]
        self.totals = {cell: w.variable(w.constant(self.floats, 0.0)) for cell in self.cells}
        self.own = Own(self.layer, own)
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
        return self.own.factors + of_band * i + group * (4 * self.rows) + 4 * row

    def add(self, total: Variable, value: Value, factor: Value) -> None:
        name = f"llvm.fma.v{self.kind.isa.lanes}f32"
        total.set(self.w.intrinsic(name, self.floats, value, factor, total.get()))

    def add_2(self, cell: Cell, group: Value, value: Value) -> None:
        factor = self.w.load(self._factor(cell[1], group, cell[0]), F32)
        self.add(self.totals[cell], value, self.w.spread(factor, self.kind.isa.lanes))

    def parts_4(self, add_groups: Callable[[Value, Value, Sums], None]) -> None:
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
        for row, i, part in self.cells:
            at = (row * len(self.bands) + i) * BAND + part * self.kind.isa.lanes
            self.w.store(self.totals[row, i, part].get(), self.own.sums + at * 4)
        return self.w.end()


def _look_up(w: Writer, isa: Isa, table: Value, index: Value) -> Value:
    """One of four int32 at an address, by the lower two bits of the index."""
    ints = vector(I32, isa.lanes)
    if isa.dot in ("vnni", "pairs"):
        name = {8: "avx.vpermilvar.ps.256", 16: "avx512.vpermilvar.ps.512"}[isa.lanes]
        four = w.shuffle(w.load(table, vector(F32, 4)), list(range(4)) * (isa.lanes // 4))
        return w.intrinsic(f"llvm.x86.{name}", four.type, four, index).as_bits(ints)
    first, second = (w.load(table + 4 * i, I32) for i in (0, 1))  # zeros have equal distances
    return (index & 3) * w.spread(second - first, isa.lanes) + w.spread(first, isa.lanes)


def write_narrow(module: ir.Module, kind: Kind, rows: int, bands: int) -> Any:
    """Rows of x in bytes times bands of codes."""
    tile = Tile(module, kind, rows, bands, "narrow")
    w, layer, isa = tile.w, tile.layer, kind.isa
    ints = vector(I32, isa.lanes)
    places = list(product(range(bands), kind.vectors))

    def products(group: Value, codes: Codes, lower: dict[Cell, Value]) -> dict[Cell, Value]:
        """A sum is a chain of dot products, each of which waits for the one before it: those of all
        cells go side by side."""
        upper = dict.fromkeys(lower, w.constant(ints, 0))
        x = [spread_words(isa, w, tile.inputs.plane(group, row), 8) for row in range(rows)]
        for q in range(4):
            for row, i, part in lower:
                cell, code = (row, i, part), codes[i, part][q]
                upper[cell] = dot(isa, w, upper[cell], code, x[row][q])
                lower[cell] = dot(isa, w, lower[cell], code, x[row][q + 4])
        return {cell: ((upper[cell] << 8) + lower[cell]).to(F32) for cell in lower}

    with w.loop(w.number(0), layer.two) as group:
        codes, scales, lower = {}, {}, {}
        for i, part in places:
            here = Group(w, kind, layer, tile.bands[i], group)
            if part == 0:
                w.prefetch(here.words + AHEAD)
            word = w.load(here.words + part * (4 * isa.lanes), ints)
            shifted = (word << 4, word << 2, word, word >> 2)
            codes[i, part] = [each & 0x30303030 for each in shifted]
            zeros, scales[i, part] = here.zeros(part), here.scales(part)
            for row in range(rows):
                table = tile.inputs.zero(group, row)
                lower[row, i, part] = _look_up(w, isa, table, zeros)
        for cell, value in products(group, codes, lower).items():
            tile.add_2(cell, group, value * scales[cell[1:]])

    def add_4(first: Value, last: Value, sums: Sums) -> None:
        with w.loop(first, last) as group:
            codes, lower, among = {}, {}, layer.two + group
            for i, part in places:
                words = (tile.bands[i] * layer.parts * layer.four + group) * (8 * BAND)
                words = layer.words_4 + words + part * (4 * isa.lanes)
                halves = [w.load(words + half * (BAND * 4), ints) for half in (0, 1)]
                for half in (0, 1) if part == 0 else ():
                    w.prefetch(words + (AHEAD + half * (BAND * 4)))
                shifted = [each for half in halves for each in (half, half >> 4)]
                codes[i, part] = [each & 0x0F0F0F0F for each in shifted]
                for row in range(rows):
                    start = w.load(tile.inputs.zero(among, row), I32)
                    lower[row, i, part] = w.spread(start, isa.lanes)
            for cell, value in products(among, codes, lower).items():
                tile.add_4(sums[cell], cell[0], among, value)

    tile.parts_4(add_4)
    return tile.end()


def write_panel(module: ir.Module, kind: Kind) -> Any:
    """A band in whole numbers of 16 bits, inputs i and i + 8 of a group in a lane: panel(layer,
    band, out)."""
    w = Writer(module, "panel", 3, inline=False)
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


def write_wide(module: ir.Module, kind: Kind, rows: int) -> Any:
    """Rows of x in 16-bit integers times a decoded band."""
    tile = Tile(module, kind, rows, 1, "wide")
    w, isa = tile.w, kind.isa
    ints = vector(I32, isa.lanes)

    def products(group: Value) -> dict[Cell, Value]:
        totals = dict.fromkeys(tile.cells, w.constant(ints, 0))
        panel, plane = tile.own.panel + group * PAIRS, tile.inputs.plane(group, 0)
        for i in range(GROUP // 2):
            for part in kind.vectors:
                pairs = w.load(panel + (i * BAND + part * isa.lanes) * 4, ints)
                for row in range(rows):
                    x = w.load(plane + (row * (2 * GROUP) + 4 * i), I32)
                    total = totals[row, 0, part]
                    totals[row, 0, part] = dot_pairs(isa, w, total, pairs, w.spread(x, isa.lanes))
        return {cell: total.to(F32) for cell, total in totals.items()}

    def add_4(first: Value, last: Value, sums: Sums) -> None:
        with w.loop(tile.layer.two + first, tile.layer.two + last) as group:
            for cell, value in products(group).items():
                tile.add_4(sums[cell], cell[0], group, value)

    with w.loop(w.number(0), tile.layer.two) as group:
        for cell, value in products(group).items():
            tile.add_2(cell, group, value)
    tile.parts_4(add_4)
    return tile.end()
