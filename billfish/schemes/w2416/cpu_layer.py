"""A layer, and rows of x, as the CPU kernels of w2416 see them in memory."""

from dataclasses import dataclass

import torch

from billfish.kernels.cpu import Isa
from billfish.kernels.llvm import F32, I16, I32, I64, Value, Writer, vector
from billfish.schemes.w2416.cpu_words import ROWS, STEPS
from billfish.schemes.w2416.shares import BAND, GROUP

PAIRS = GROUP // 2 * BAND * 4  # bytes of a decoded group: inputs i and i + 8 in a lane
LAYER = (
    *("order", "words", "zeros", "scales", "bases", "words_4", "scales_4", "places", "values"),
    *("bands", "two", "parts", "four", "outliers", "part"),
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


class Own:
    """Scratch memory of a thread: sums (rows, bands, 16) of a tile, its factors (bands, groups +
    STEPS, rows), and a decoded band (groups, 8, 16) of pairs."""

    def __init__(self, layer: Layer, place: Value) -> None:
        self.sums = place
        self.factors = self.sums + ROWS * BAND * 4
        self.panel = self.factors + (layer.groups + STEPS) * (ROWS * 4)

    @staticmethod
    def nbytes(layer: Layer) -> Value:
        return (layer.groups + STEPS) * (ROWS * 4) + layer.groups * PAIRS + ROWS * BAND * 4


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
