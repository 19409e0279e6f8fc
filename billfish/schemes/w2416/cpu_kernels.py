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

from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import ir

from billfish.kernels.fixed_point import in_bytes, in_steps, step_of, store_floats
from billfish.kernels.llvm import (
    F32,
    I8,
    I16,
    I32,
    I64,
    Compiled,
    Team,
    Value,
    Writer,
    compiled,
    load_floats,
    vector,
    write_start,
)
from billfish.schemes.w2416.cpu_layer import Inputs, Kind, Layer, Own
from billfish.schemes.w2416.cpu_tiles import write_narrow, write_panel, write_wide
from billfish.schemes.w2416.cpu_words import ALONE, COLUMNS, STEPS, TOP, ZEROS
from billfish.schemes.w2416.shares import BAND, GROUP

WIDE = 8  # rows of x from which on decoding a band first is faster
# Rows of x in a narrow tile, and bands: eight chains of dot products side by side.
NARROW = {16: ((4, 1), (2, 2), (1, 4)), 8: ((2, 1), (1, 1)), 4: ((2, 1), (1, 1))}
BANDS = 4  # that all rows are multiplied by before the next
WIDE_ROWS = {16: (8, 2, 1), 8: (2, 1)}  # few kinds: each takes 0.2 s to compile


def _write_split(module: ir.Module, kind: Kind, wide: bool) -> Any:
    """Groups [first, last) of a tile of x in whole steps: split(layer, x, inputs, every, row, rows,
    first, last)."""
    w = Writer(module, f"split_{'wide' if wide else 'narrow'}", 8, inline=False)
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


def _write_finish(module: ir.Module, kind: Kind, rows: int) -> Any:
    """Adds outliers to the sums of a tile of rows and stores y: finish(layer, band, bands, row,
    sums, x, y)."""
    w = Writer(module, f"finish{rows}", 7, inline=False)
    address, first, bands, above, sums, x, y = w.arguments
    layer, zero, size = Layer(w, address), w.number(0), kind.x.itemsize
    of_row = layer.groups * (GROUP * size)
    x = x + above * of_row
    with w.loop(zero, bands) as i, w.loop(zero, layer.parts) as part:
        at = ((first + i) * layer.parts + part) * layer.outliers
        with w.loop(at, at + layer.outliers) as outlier:
            place = w.load(layer.places + outlier * 2, I16).to(I64, signed=False)
            value = load_floats(w, layer.values + outlier * kind.scale.itemsize, kind.scale, 1)
            column = x + (part * layer.part + (place & (COLUMNS - 1))) * size
            for row in range(rows):
                target = sums + ((bands * row + i) * BAND + place // COLUMNS) * 4
                factor = load_floats(w, column + of_row * row, kind.x, 1)
                total = w.load(target, value.type)
                w.store(w.intrinsic("llvm.fma.v1f32", total.type, value, factor, total), target)
    with w.loop(zero, bands) as i:
        for row in range(rows):
            total = w.load(sums + (bands * row + i) * (BAND * 4), vector(F32, BAND))
            place = ((above + row) * layer.bands + first + i) * BAND
            store_floats(w, total, y + place * size, kind.x)
    return w.end()


class Work:
    """What every thread runs. Its share of bands is its own; x is split by all threads together,
    except where rows are few."""

    def __init__(self, module: ir.Module, kind: Kind) -> None:
        self.module, self.kind = module, kind
        self.narrow = {
            (rows, bands): write_narrow(module, kind, rows, bands)
            for rows, most in NARROW[kind.isa.lanes]
            for bands in sorted({1, most})
        }
        self.wide = dict[int, Any]()
        if kind.wide:
            rows_of_tiles = WIDE_ROWS[kind.isa.lanes]
            self.wide = {rows: write_wide(module, kind, rows) for rows in rows_of_tiles}
            self.panel = write_panel(module, kind)
        counts = {rows for rows, _ in self.narrow} | set(self.wide)
        self.finish = {rows: _write_finish(module, kind, rows) for rows in sorted(counts)}
        splits = [_write_split(module, kind, wide) for wide in (False, True)[: 1 + kind.wide]]
        self.w = w = Writer(module, "work", 1)
        self.address, self.x, self.y, room, self.rows = (
            w.load(w.arguments[0] + 8 * i, I64) for i in range(5)
        )
        self.layer, self.team = Layer(w, self.address), Team(w)
        nbytes = Own.nbytes(self.layer)
        self.own = room + nbytes * self.team.index
        self.shared = room + nbytes * self.team.count
        with w.when(w.less(self.rows, WIDE if kind.wide else 2**62)):
            self._few(splits[0])
        if kind.wide:
            with w.when(w.less(w.number(WIDE - 1), self.rows)):
                self._many(splits[1])

    def _tiles(self, counts: Iterable[int], call: Callable[[int, Value], None]) -> None:
        """call(count, row) for tiles that cover all rows."""
        begin = self.w.number(0)
        for count in counts:
            end = begin + (self.rows - begin) // count * count
            with self.w.loop(begin, end, count) as row:
                call(count, row)
            begin = end

    def _tile(self, tile: Any, inputs: Value, band: Value, bands: int, row: Value, n: int) -> None:
        w = self.w
        w.call(tile, self.address, band, inputs, self.rows, row, self.own)
        where = (band, w.number(bands), row, self.own, self.x, self.y)
        w.call(self.finish[n], self.address, *where)

    def _few(self, split: Any) -> None:
        w, layer, rows = self.w, self.layer, self.rows
        most = dict(NARROW[self.kind.isa.lanes])
        alone, share = w.less(rows, ALONE), self.team.share(layer.groups)
        begin = w.pick(alone, w.number(0), share[0])
        end = w.pick(alone, layer.groups, share[1])
        row_bytes = (layer.groups + STEPS) * 4 + layer.groups * (16 + 2 * GROUP)
        inputs = self.shared + w.pick(alone, self.team.index * rows * row_bytes, w.number(0))

        def split_tile(count: int, row: Value) -> None:
            w.call(split, self.address, self.x, inputs, rows, row, w.number(count), begin, end)

        self._tiles(most, split_tile)
        with w.when(w.less(w.number(ALONE - 1), rows)):
            self.team.meet()
        first, last = self.team.share(layer.bands)
        for bands in (BANDS, 1):
            until = first + (last - first) // bands * bands
            with w.loop(first, until, bands) as band:

                def multiply(
                    count: int, row: Value, band: Value = band, bands: int = bands
                ) -> None:
                    some = min(bands, most[count])
                    for i in range(0, bands, some):
                        tile = self.narrow[count, some]
                        self._tile(tile, inputs, band + i, some, row, count)

                self._tiles(most, multiply)
            first = until

    def _many(self, split: Any) -> None:
        w, share = self.w, self.team.share(self.layer.groups)

        def split_tile(count: int, row: Value) -> None:
            where = (self.shared, self.rows, row, w.number(count), *share)
            w.call(split, self.address, self.x, *where)

        self._tiles(self.wide, split_tile)
        self.team.meet()
        with w.loop(*self.team.share(self.layer.bands)) as band:
            w.call(self.panel, self.address, band, Own(self.layer, self.own).panel)

            def multiply(count: int, row: Value) -> None:
                self._tile(self.wide[count], self.shared, band, 1, row, count)

            self._tiles(self.wide, multiply)


def product(kind: Kind) -> Compiled:
    """start(layer, x, y, room, rows, threads): y (rows, outputs) = x (rows, inputs) by the layer.
    `room` is scratch memory of cpu_words.py's `room_bytes`."""
    module = ir.Module()
    work = Work(module, kind)
    write_start(module, work.w.end(), 5)
    return compiled(module, kind.isa)
