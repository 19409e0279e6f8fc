"""The CPU kernel of w4a16, for every instruction set of kernels/cpu.py.

x is quantized to 16-bit integers, two signed bytes each, and byte dot-product instructions (VNNI,
NEON's sdot) take codes as they are: two instructions where fp32 needs eight, and no weight is
decoded. The step of x is a power of two per chunk of inputs: the error is at most 2^-15 of the
chunk's largest x (bf16's: 2^-9 of each x). Sums over a chunk are integers, exact; chunks are added
in fp32 in order. So a row's bits depend on no other row, thread count or instruction set.

The exception is AMX, which multiplies bf16 eight times as fast: 32 rows of bf16 and more are
multiplied by decoded weights, rounded to bf16 once. (AMX on bytes was tried: moving the sums out of
its registers for each chunk costs twice what the products do.)
"""

from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir

from billfish.kernels.cpu import BYTES, Isa
from billfish.kernels.fixed_point import (
    in_bytes,
    in_steps,
    nearest_bf16,
    step_of,
    store_floats,
)
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
    dot,
    load_floats,
    spread_words,
    vector,
    write_start,
)
from billfish.schemes.w4a16.cpu_words import ALONE, BAND, MATRIX_ROOM, VECTORS

AHEAD = 1024  # bytes: prefetch distance of the words
MATRIX = 16  # rows of an AMX tile register
LAYER = ("words", "scales", "zeros", "stride", "strips", "chunks", "blocks", "upper")
_NIBBLES = 0x0F0F0F0F


@dataclass(frozen=True)
class Kind:
    isa: Isa
    x: torch.dtype  # and of y
    scale: torch.dtype
    zeros: bool  # stored zero points; else one for all


class Layer:
    """A layer's arrays as a kernel sees them, and those of x.

    strip   outputs: the lanes of two vectors
    chunk   inputs with one scale of weights and one step of x: 8, 16, 32, 64 or 128
    block   8 inputs of a strip: byte j of lane i is code[i, j] | code[i, j + 4] << 4
    words   (strips, chunks, planes, blocks, outputs, 4) bytes, read sequentially; codes of more
            than 4 bits have two planes, the upper first, whose sums are multiplied by 16 before the
            lower one's are added
    planes  (rows, chunks, 2, chunk) bytes of x, upper bytes first
    notes   (rows, chunks, 2): the step of a chunk of x, and the sum of its integers
    scales  (chunks, outputs) in rows of `stride`; zeros the same in bytes, or the number itself
    """

    words: Value
    scales: Value
    zeros: Value
    stride: Value
    strips: Value
    chunks: Value
    blocks: Value  # of a chunk
    upper: Value  # planes, 0 or 1

    def __init__(self, w: Writer, address: Value, kind: Kind) -> None:
        self.w, self.kind = w, kind
        for i, name in enumerate(LAYER):
            setattr(self, name, w.load(address + 8 * i, I64))
        self.width = VECTORS * kind.isa.lanes  # of a strip
        self.chunk_bytes = self.blocks * (self.upper + 1) * (4 * self.width)
        self.strip_bytes = self.chunks * self.chunk_bytes
        self.row_bytes = self.chunks * self.blocks * 16  # of the planes of x

    def grid(self, chunk: Value, strip: Value, part: int) -> tuple[Value, Value]:
        """Scales and zeros of the outputs of one vector of a strip."""
        w, lanes = self.w, self.kind.isa.lanes
        at = chunk * self.stride + strip * self.width + part * lanes
        scales = load_floats(w, self.scales + at * self.kind.scale.itemsize, self.kind.scale, lanes)
        if not self.kind.zeros:
            return scales, w.spread(self.zeros.to(I32), lanes)
        return scales, w.load(self.zeros + at, vector(I8, lanes)).to(I32, signed=False)


def _write_split(module: ir.Module, dtype: torch.dtype) -> Any:
    """Quantizes chunks of x to planes and notes. A chunk with Inf or NaN has NaN as its step."""
    w = Writer(module, "split", 6)
    x, planes, notes, blocks, first, last = w.arguments
    lanes = 8
    ints = vector(I32, lanes)
    with w.loop(first, last) as chunk:
        start = x + chunk * blocks * (lanes * dtype.itemsize)
        largest = w.variable(w.constant(ints, 0))
        with w.loop(w.number(0), blocks) as block:
            value = load_floats(w, start + block * (lanes * dtype.itemsize), dtype, lanes)
            magnitude, known = value.as_bits(ints) & 0x7FFFFFFF, largest.get()
            largest.set(w.pick(w.less(known, magnitude), magnitude, known))
        top = w.intrinsic(f"llvm.vector.reduce.umax.v{lanes}i32", I32, largest.get())
        step, inverse = step_of(w, top, BYTES)
        total = w.variable(w.constant(ints, 0))
        with w.loop(w.number(0), blocks) as block:
            value = load_floats(w, start + block * (lanes * dtype.itemsize), dtype, lanes)
            steps = in_steps(w, value, inverse, BYTES)
            upper, lower = in_bytes(steps)
            place = planes + (chunk * blocks * 2 + block) * lanes
            w.store(upper.to(I8), place)
            w.store(lower.to(I8), place + blocks * lanes)
            total.set(total.get() + steps)
        summed = w.intrinsic(f"llvm.vector.reduce.add.v{lanes}i32", I32, total.get())
        w.store(step, notes + chunk * 8)
        w.store(summed, notes + chunk * 8 + 4)
    return w.end()


def _add(
    w: Writer, total: Value, upper: Value, lower: Value, note: Value, scales: Value, zeros: Value
) -> Value:
    """Adds a chunk's sums of both bytes of x to a row's total."""
    lanes = scales.lanes
    step, summed = (
        w.spread(w.load(note + 4 * i, kind), lanes) for i, kind in enumerate((F32, I32))
    )
    exact = ((upper << 8) + lower - zeros * summed).to(F32)
    return w.intrinsic(f"llvm.fma.v{lanes}f32", scales.type, exact, scales * step, total)


def _write_tile(module: ir.Module, kind: Kind, rows: int) -> Any:
    """Rows of x times a strip of weights: tile(layer, strip, planes, notes, y)."""
    w = Writer(module, f"tile{rows}", 5)
    address, strip, planes, notes, y = w.arguments
    layer, lanes = Layer(w, address, kind), kind.isa.lanes
    ints, floats = vector(I32, lanes), vector(F32, lanes)
    tile = [(row, part) for row in range(rows) for part in range(VECTORS)]
    totals = {at: w.variable(w.constant(floats, 0.0)) for at in tile}
    sums = {(*at, half): w.variable(w.constant(ints, 0)) for at in tile for half in (0, 1)}
    word, x = w.variable(layer.words + strip * layer.strip_bytes), w.variable(planes)

    def add_plane() -> None:
        """Products of one plane of codes of a chunk."""
        with w.loop(w.number(0), layer.blocks):
            here, inputs = word.get(), x.get()
            for line in range(0, 4 * layer.width, 64):
                w.prefetch(here + (AHEAD + line))
            pairs = [w.load(here + 4 * lanes * part, ints) for part in range(VECTORS)]
            codes = [(pair & _NIBBLES, (pair >> 4) & _NIBBLES) for pair in pairs]
            for row in range(rows):
                for half in (0, 1):
                    place = inputs + layer.row_bytes * row + layer.blocks * (8 * half)
                    for i, four in enumerate(spread_words(kind.isa, w, place, 2)):
                        for part in range(VECTORS):
                            total = sums[row, part, half]
                            total.set(dot(kind.isa, w, total.get(), codes[part][i], four))
            word.set(here + 4 * layer.width)
            x.set(inputs + 8)

    with w.loop(w.number(0), layer.chunks) as chunk:
        for total in sums.values():
            total.set(w.constant(ints, 0))
        with w.when(w.less(w.number(0), layer.upper)):
            add_plane()
            x.set(x.get() - layer.blocks * 8)
            for total in sums.values():
                total.set(total.get() << 4)
        add_plane()
        x.set(x.get() + layer.blocks * 8)
        for part in range(VECTORS):
            scales, zeros = layer.grid(chunk, strip, part)
            for row in range(rows):
                note = notes + (layer.chunks * row + chunk) * 8
                upper, lower = (sums[row, part, half].get() for half in (0, 1))
                total = totals[row, part]
                total.set(_add(w, total.get(), upper, lower, note, scales, zeros))
    for row, part in tile:
        at = (layer.strips * row + strip) * layer.width + part * lanes
        store_floats(w, totals[row, part].get(), y + at * kind.x.itemsize, kind.x)
    return w.end()


def _write_decode(module: ir.Module, kind: Kind) -> Any:
    """Strips [first, last) as bf16, rounded once, in AMX's order: two inputs in every lane.
    decode(layer, first, last, out)"""
    w = Writer(module, "decode", 4)
    address, first, last, out = w.arguments
    layer, lanes = Layer(w, address, kind), kind.isa.lanes
    ints = vector(I32, lanes)
    with w.loop(first, last) as strip, w.loop(w.number(0), layer.chunks) as chunk:
        source = layer.words + strip * layer.strip_bytes + chunk * layer.chunk_bytes
        for part in range(VECTORS):
            scales, zeros = layer.grid(chunk, strip, part)
            target = ((strip - first) * VECTORS + part) * layer.chunks + chunk
            target = out + target * layer.blocks * (16 * lanes)
            with w.loop(w.number(0), layer.blocks) as block:
                place = source + (block * layer.width + part * lanes) * 4
                above = w.load(place, ints) & w.spread((w.number(0) - layer.upper).to(I32), lanes)
                below = w.load(place + layer.upper * layer.blocks * (4 * layer.width), ints)

                numbers = []
                for shift in (0, 8, 16, 24, 4, 12, 20, 28):
                    code = ((above >> shift) & 15) * 16 + ((below >> shift) & 15)
                    numbers.append(nearest_bf16((code - zeros).to(F32) * scales))
                for pair, (even, odd) in enumerate(zip(numbers[::2], numbers[1::2], strict=True)):
                    both = (odd & 0xFFFF0000) + (even >> 16)
                    w.store(both, target + block * (16 * lanes) + pair * (4 * lanes))
    return w.end()


def _write_matrices(module: ir.Module, kind: Kind) -> Any:
    """bf16 products by AMX, 32 rows of x at a time: matrices(layer, first, last, x, y, rows, room).

    A tile register has 16 rows of 64 bytes. Four hold the sums of 32 rows and a strip of 32
    outputs; two of x and two of decoded weights are loaded for four products, each of which takes
    as long as two loads. Strips are decoded once for all rows.
    """
    decode = _write_decode(module, kind)
    w = Writer(module, "matrices", 7)
    address, first, last, x, y, rows, room = w.arguments
    layer, lanes = Layer(w, address, kind), kind.isa.lanes

    def tile(name: str, *given: int | Value) -> None:
        values = [w.constant(I8, each) if isinstance(each, int) else each for each in given]
        w.intrinsic(f"llvm.x86.{name}", ir.VoidType(), *values)

    shapes, sums, weights = room, room + 64, room + MATRIX_ROOM
    w.store(w.constant(vector(I8, 64), 0), shapes)
    w.store(w.constant(I8, 1), shapes)  # the palette; then the widths in bytes, and the rows
    w.store(w.constant(vector(I16, 8), 64), shapes + 16)
    w.store(w.constant(vector(I8, 8), MATRIX), shapes + 48)
    tile("ldtilecfg", w.pointer(shapes))
    w.call(decode, address, first, last, weights)
    inputs = layer.chunks * layer.blocks * 8
    row_bytes, part_bytes = inputs * 2, inputs * (2 * lanes)
    with w.loop(w.number(0), rows, 2 * MATRIX) as row, w.loop(first, last) as strip:
        for i in range(4):
            tile("tilezero", i)
        here, there = x + row * row_bytes, weights + (strip - first) * part_bytes * VECTORS
        with w.loop(w.number(0), inputs // 32) as part:
            for i in (0, 1):
                some = here + row_bytes * (MATRIX * i) + part * 64
                tile("tileloadd64", 4 + i, w.pointer(some), row_bytes)
                some = there + part_bytes * i + part * 1024
                tile("tileloadd64", 6 + i, w.pointer(some), w.number(64))
            for i in range(4):
                tile("tdpbf16ps", i, 4 + i // 2, 6 + i % 2)
        for i in range(4):
            tile("tilestored64", i, w.pointer(sums + 1024 * i), w.number(64))
        with w.loop(w.number(0), w.number(MATRIX)) as line:
            for i in range(4):
                at = (row + line + MATRIX * (i // 2)) * layer.strips + strip
                total = w.load(sums + line * 64 + 1024 * i, vector(F32, lanes))
                store_floats(w, total, y + (at * VECTORS + i % 2) * (2 * lanes), kind.x)
    tile("tilerelease")
    return w.end()


def product(kind: Kind) -> Compiled:
    """start(layer, x, y, room, rows, threads): y (rows, outputs) = x (rows, inputs) by the layer.
    `room` is scratch memory of cpu_words.py's `room_bytes`."""
    module = ir.Module()
    split = _write_split(module, kind.x)
    tiles = {rows: _write_tile(module, kind, rows) for rows in kind.isa.rows}
    w = Writer(module, "work", 1)
    address, x, y, room, rows = (w.load(w.arguments[0] + 8 * i, I64) for i in range(5))
    layer, team = Layer(w, address, kind), Team(w)
    first, last = team.share(layer.strips)
    inputs, outputs = layer.chunks * layer.blocks * 8, layer.strips * layer.width
    own = inputs * (2 * layer.width * BAND) + MATRIX_ROOM
    if kind.isa.matrices and kind.x == torch.bfloat16:
        many = rows // (2 * MATRIX) * (2 * MATRIX)
        many = w.pick(w.less(inputs & 31, 1), many, w.number(0))
        matrices = _write_matrices(module, kind)
        with w.when(w.less(w.number(0), many)), w.loop(first, last + (BAND - 1), BAND) as band:
            end = w.pick(w.less(band + BAND, last), band + BAND, last)
            w.call(matrices, address, band, end, x, y, many, room + own * team.index)
        x, y, rows = x + many * inputs * 2, y + many * outputs * 2, rows - many

    alone = w.less(rows, ALONE)
    begin, end = team.share(rows * layer.chunks)
    begin = w.pick(alone, w.number(0), begin)
    end = w.pick(alone, rows * layer.chunks, end)
    copy = w.pick(alone, team.index * rows * (layer.chunks * 8 + layer.row_bytes), w.number(0))
    notes = room + own * team.count + copy
    planes = notes + rows * layer.chunks * 8
    w.call(split, x, planes, notes, layer.blocks, begin, end)
    with w.when(w.less(w.number(ALONE - 1), rows)):
        team.meet()
    with w.loop(first, last) as strip:
        begin = w.number(0)
        for count in kind.isa.rows:
            end = begin + (rows - begin) // count * count
            with w.loop(begin, end, count) as row:
                at = (planes + row * layer.row_bytes, notes + row * layer.chunks * 8)
                w.call(tiles[count], address, strip, *at, y + row * outputs * kind.x.itemsize)
            begin = end
    write_start(module, w.end(), 5)
    return compiled(module, kind.isa)
