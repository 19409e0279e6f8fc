"""Kernels of w4a16 on a CPU, for any of its instruction sets (kernels/cpu.py).

**product**: every 16 bits of x are two signed bytes, and an instruction that multiplies bytes and
adds four products (VNNI, NEON's sdot) takes codes as they are: two instructions where fp32 needs
eight, and no weight is decoded. x is rounded to 16 bits in steps of 2^e, which each chunk of inputs
has for itself: the error is at most 2^-15 of the largest x of its chunk (bf16's: 2^-9 of each x).
Sums over a chunk are integers, exact; chunks are added in fp32 in order. So a row's bits depend on
no other row, no number of threads and no instruction set.

**panel**: decoded weights, rounded once, for processors whose matrix units multiply bf16.

    strip   as many outputs as a vector has lanes
    chunk   inputs of one scale of weights and one step of x, a multiple of 8
    block   8 inputs of a strip: byte j of lane i is code[i, j] | code[i, j + 4] << 4
    words   (strips, chunks, planes, blocks, lanes, 4) bytes; of codes of more than 4 bits the upper
            plane comes first, and its sums are multiplied by 16 before the lower one is added
"""

from functools import cache
from typing import Any

import torch
from llvmlite import ir

from billfish.kernels.cpu import Isa
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
    Writer,
    compiled,
    dot,
    vector,
    write_start,
)

STRIPS = 2  # of a tile: with one, loads of x are the limit; 4 hold no more than 2 rows in registers
TOP = 127 * 256 + 127  # the largest number of two signed bytes
CARRY = ((2**15 - TOP) * 2 + 1) * 2**8  # half a step below TOP
TYPES = {torch.float32: F32, torch.float16: F16, torch.bfloat16: I16}


def _load(w: Writer, address: Value, dtype: torch.dtype, lanes: int) -> Value:
    raw = w.load(address, vector(TYPES[dtype], lanes))
    if dtype == torch.bfloat16:
        return (raw.to(I32, signed=False) << 16).as_bits(vector(F32, lanes))
    return raw if dtype == torch.float32 else raw.to(F32)


def _store(w: Writer, value: Value, address: Value, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16:
        bits = value.as_bits(vector(I32, value.lanes))
        nearest = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16  # ties to even
        number = w.less(bits & 0x7FFFFFFF, 0x7F800001)
        value = w.pick(number, nearest, w.constant(bits.type, 0x7FC0)).to(I16)
    elif dtype == torch.float16:
        value = value.to(F16)
    w.store(value, address)


def _write_split(module: ir.Module, dtype: torch.dtype) -> Any:
    """Chunks of x -> planes (chunks, blocks, 2, 8) int8, upper bytes first, and notes (chunks, 2):
    the step and the sum of a chunk, in steps. A chunk with Inf or NaN has NaN as its step."""
    w = Writer(module, "split", 6)
    x, planes, notes, blocks, first, last = w.arguments
    size, lanes = dtype.itemsize, 8
    ints, floats = vector(I32, lanes), vector(F32, lanes)
    with w.loop(first, last) as chunk:
        start = chunk * blocks
        largest = w.variable(w.constant(ints, 0))
        with w.loop(start, start + blocks) as block:
            value = _load(w, x + block * (lanes * size), dtype, lanes)
            magnitude, known = value.as_bits(ints) & 0x7FFFFFFF, largest.get()
            largest.set(w.pick(w.less(known, magnitude), magnitude, known))
        top = w.intrinsic(f"llvm.vector.reduce.umax.v{lanes}i32", I32, largest.get())
        # The exponent of a float is the step's, or one less: from TOP / 2^14 = 1.9921 on, of a
        # mantissa of 23 bits, adding this carries over.
        exponent = (top + CARRY) >> 23
        exponent = w.pick(w.less(exponent, 30), w.constant(I32, 30), exponent)
        step = ((exponent - 14) << 23).as_bits(F32)
        inverse = ((w.constant(I32, 2 * 127 + 14) - exponent) << 23).as_bits(F32)
        step = w.pick(w.less(top, 0x7F800000), step, w.constant(F32, float("nan")))
        total = w.variable(w.constant(ints, 0))
        with w.loop(start, start + blocks) as block:
            value = _load(w, x + block * (lanes * size), dtype, lanes) * w.spread(inverse, lanes)
            value = w.intrinsic(f"llvm.rint.v{lanes}f32", floats, value)
            for name, bound in (("minnum", TOP), ("maxnum", -TOP)):  # of NaN, too, a number
                limit = w.constant(floats, float(bound))
                value = w.intrinsic(f"llvm.{name}.v{lanes}f32", floats, value, limit)
            steps = value.to(I32)
            upper = (steps + 128).halved(8)
            place = planes + block * (2 * lanes)
            w.store(upper.to(I8), place)
            w.store((steps - (upper << 8)).to(I8), place + lanes)
            total.set(total.get() + steps)
        summed = w.intrinsic(f"llvm.vector.reduce.add.v{lanes}i32", I32, total.get())
        w.store(step, notes + chunk * 8)
        w.store(summed, notes + chunk * 8 + 4)
    return w.end()


def _write_tile(
    module: ir.Module, isa: Isa, rows: int, dtype: torch.dtype, scale: torch.dtype, zeros: bool
) -> Any:
    """Some rows of x with STRIPS strips of weights."""
    w = Writer(module, f"tile{rows}", 14)
    words, strip_bytes, scales, zero, stride, planes, row_bytes, notes, y = w.arguments[:9]
    width, chunks, span, blocks, upper = w.arguments[9:]
    lanes = isa.lanes
    ints, floats = vector(I32, lanes), vector(F32, lanes)
    tile = [(row, strip) for row in range(rows) for strip in range(STRIPS)]
    totals = {at: w.variable(w.constant(floats, 0.0)) for at in tile}
    word, x = w.variable(words), w.variable(planes)
    with w.loop(w.number(0), chunks) as chunk:
        sums = {(*at, half): w.variable(w.constant(ints, 0)) for at in tile for half in (0, 1)}

        def add(sums: dict[Any, Any] = sums) -> None:
            """The products of one plane of a chunk."""
            with w.loop(w.number(0), blocks):
                here, inputs = word.get(), x.get()
                pairs = [w.load(here + strip_bytes * s, ints) for s in range(STRIPS)]
                codes = [(pair & 0x0F0F0F0F, (pair >> 4) & 0x0F0F0F0F) for pair in pairs]
                for row in range(rows):
                    place = inputs + row_bytes * row
                    each = [w.spread(w.load(place + 4 * i, I32), lanes) for i in range(4)]
                    for strip in range(STRIPS):
                        for half in (0, 1):
                            total = sums[row, strip, half]
                            for i in (0, 1):
                                more = codes[strip][i], each[2 * half + i]
                                total.set(dot(isa, w, total.get(), *more))
                word.set(here + 4 * lanes)
                x.set(inputs + 16)

        with w.when(w.less(w.number(0), upper)):
            add()
            x.set(x.get() - blocks * 16)
            for total in sums.values():
                total.set(total.get() << 4)
        add()
        for strip in range(STRIPS):
            column = chunk // span * stride + strip * lanes
            factor = _load(w, scales + column * scale.itemsize, scale, lanes)
            if zeros:
                middle = w.load(zero + column, vector(I8, lanes)).to(I32, signed=False)
            else:
                middle = w.spread(zero.to(I32), lanes)
            for row in range(rows):
                note = notes + (chunks * row + chunk) * 8
                step = w.spread(w.load(note, F32), lanes)
                summed = w.spread(w.load(note + 4, I32), lanes)
                steps = (sums[row, strip, 0].get() << 8) + sums[row, strip, 1].get()
                exact = (steps - middle * summed).to(F32)
                total = totals[row, strip]
                name = f"llvm.fma.v{lanes}f32"
                total.set(w.intrinsic(name, floats, exact, factor * step, total.get()))
    for row, strip in tile:
        place = y + (width * row + strip * lanes) * dtype.itemsize
        _store(w, totals[row, strip].get(), place, dtype)
    return w.end()


@cache
def product(isa: Isa, dtype: torch.dtype, scale: torch.dtype, zeros: bool) -> Compiled:
    """start(arguments, threads) with words, scales (one row for `span` chunks), zeros (the same, in
    bytes; or the number itself), the stride of their rows, x (rows, inputs), y (rows, outputs),
    planes, notes, strips, chunks, span, blocks of a chunk, upper planes (0 or 1), rows of x."""
    module = ir.Module()
    split = _write_split(module, dtype)
    tiles = {rows: _write_tile(module, isa, rows, dtype, scale, zeros) for rows in isa.rows}
    w = Writer(module, "work", 1)
    given = [w.load(w.arguments[0] + 8 * i, I64) for i in range(14)]
    words, scales, zero, stride, x, y, planes, notes = given[:8]
    strips, chunks, span, blocks, upper, rows = given[8:]
    team = Team(w)
    w.call(split, x, planes, notes, blocks, *team.share(rows * chunks))
    team.meet()
    strip_bytes = chunks * blocks * (upper + 1) * (4 * isa.lanes)
    row_bytes, width = chunks * blocks * 16, strips * isa.lanes
    first, last = team.share(strips // STRIPS)
    with w.loop(first * STRIPS, last * STRIPS, STRIPS) as strip:
        column, begin = strip * isa.lanes, w.number(0)
        for count in isa.rows:
            end = begin + (rows - begin) // count * count
            with w.loop(begin, end, count) as row:
                w.call(
                    tiles[count], words + strip * strip_bytes, strip_bytes,
                    scales + column * scale.itemsize, zero + column if zeros else zero, stride,
                    planes + row * row_bytes, row_bytes, notes + row * chunks * 8,
                    y + (row * width + column) * dtype.itemsize, width, chunks, span, blocks, upper,
                )  # fmt: skip
            begin = end
    write_start(module, w.end())
    return compiled(module, isa)


@cache
def panel(isa: Isa, dtype: torch.dtype, scale: torch.dtype, zeros: bool) -> Compiled:
    """start(arguments, threads) with words, scales, zeros and their stride as above, out, the first
    strip and how many, chunks, span, blocks, upper planes: the weights of these strips, transposed,
    as out (inputs, outputs)."""
    module = ir.Module()
    w = Writer(module, "work", 1)
    given = [w.load(w.arguments[0] + 8 * i, I64) for i in range(11)]
    words, scales, zero, stride, out, first, strips, chunks, span, blocks, upper = given
    lanes, lower_bytes = isa.lanes, blocks * (4 * isa.lanes)
    ints = vector(I32, lanes)
    strip_bytes = chunks * lower_bytes * (upper + 1)
    begin, end = Team(w).share(strips)
    with w.loop(begin, end) as strip, w.loop(w.number(0), chunks) as chunk:
        source = words + (first + strip) * strip_bytes + chunk * lower_bytes * (upper + 1)
        column = chunk // span * stride + (first + strip) * lanes
        factor = _load(w, scales + column * scale.itemsize, scale, lanes)
        if zeros:
            middle = w.load(zero + column, vector(I8, lanes)).to(I32, signed=False)
        else:
            middle = w.spread(zero.to(I32), lanes)
        with w.loop(w.number(0), blocks) as block:
            place = source + block * (4 * lanes)
            high = w.load(place, ints)
            low = w.load(place + upper * lower_bytes, ints)
            high = high & w.spread((w.number(0) - upper).to(I32), lanes)  # none: zeros
            for j in range(8):
                shift = 8 * (j % 4) + 4 * (j // 4)
                code = ((low >> shift) & 15) + (((high >> shift) & 15) << 4)
                value = (code - middle).to(F32) * factor
                row = (chunk * blocks + block) * 8 + j
                _store(w, value, out + (row * strips + strip) * (lanes * dtype.itemsize), dtype)
    write_start(module, w.end())
    return compiled(module, isa)
