"""w2416: 2- and 4-bit weights and 16-bit outliers in one matrix (2/4/16-bit paper), 16-bit
activations.

Groups of 16 inputs have 2 or 4 bits in all rows of the matrix. A 2-bit group has a scale of 4 bits
and a zero of 2; bands of 16 rows share a second-order scale. The 4-bit weights of a row share one
16-bit scale in each part of k (shares.py). An outlier is added to the weight that its codes decode
to.

    2 bits    weight = (code - zero) * (scale_code + offset) * base
    4 bits    weight = (code - 8) * scale_4
    outlier   weight += value

Unlike the paper's, zeros are not whole numbers (ZERO): with a level at zero a 2-bit grid wastes the
fourth. docs/FORMAT.md has the tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.formats.layout import unpack_stream
from billfish.formats.spec import TensorSpec
from billfish.schemes.base import STD, Options, Shape, Tensors, check_cut
from billfish.schemes.w2416.shares import BAND, GROUP, PLACES, Shares, part_size, shares

LEAST, MOST = 2.45, 3.9
# Zeros of a 2-bit group, in steps. The mean squared error of Gaussian weights, groups of 16 with
# the best scale each: these 0.074, 1 to 2.5 in steps of a half 0.077, whole numbers (the paper's)
# 0.091.
ZERO, ZERO_STEP = 15 / 16, 6 / 16
BASE = 2.0**-8  # of second-order scales: fp16's range is then 2.4e-7 to 255


@dataclass(frozen=True)
class W2416:
    name: ClassVar[str] = "w2416"
    methods: ClassVar[tuple[str, ...]] = ("gptq", "rtn", "finetune")

    budget: float = 2.91  # true bits a weight: everything that is stored counts
    outliers: float = 0.001  # share of the weights, at least, as far as the budget goes

    def __post_init__(self) -> None:
        if not LEAST <= self.budget <= MOST:
            raise UserError(f"--bits-budget {self.budget}: is {LEAST} to {MOST} bits a weight.")
        if not 0 <= self.outliers <= 0.05:
            raise UserError(f"outliers {self.outliers}: is a share of the weights, 0 to 0.05.")

    @classmethod
    def from_options(cls, options: Options) -> "W2416":
        known = ("budget", "outliers")
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise UserError(
                f"scheme {cls.name} has no {', '.join(unknown)}. It has {', '.join(known)}."
            )
        return cls(**{name: _number(name, value) for name, value in options.items()})

    @classmethod
    def examples(cls) -> list["W2416"]:
        return [cls(2.7), cls(3.3, 0.005), cls(3.0, 0.0), cls(3.9, 0.02)]

    def describe(self) -> str:
        return f"2/4/16 at {self.budget:g} bit"

    def shares(self, k: int) -> Shares:
        found = shares(k, self.budget, self.outliers)
        if found is None:  # a config may say anything of a file
            raise UserError(f"{self.budget:g} bits a weight are too few for {k} inputs.")
        return found

    # -- what is stored

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        share, bands = self.shares(k), n // BAND
        two, four = share.parts * share.two, share.parts * share.four
        lists = (bands, share.parts, share.outliers)
        return {
            "input_bits": TensorSpec((k // GROUP,), torch.uint8),
            "weight_packed": TensorSpec((n, two), torch.int32),
            "weight_zero": TensorSpec((bands, two), torch.int32),
            "scale_code": TensorSpec((bands, two), torch.int64),
            "scale_base": TensorSpec((bands, two), torch.int16),
            "weight_packed_4": TensorSpec((n, 2 * four), torch.int32),
            "weight_scale_4": TensorSpec((n, share.parts), dtype),
            "outlier_place": TensorSpec(lists, torch.int16),
            "outlier_value": TensorSpec(lists, dtype),
        }

    def size(self, tensors: Tensors) -> Shape:
        return len(tensors["weight_packed"]), GROUP * len(tensors["input_bits"])

    def refuses(self, n: int, k: int) -> str | None:
        if n % BAND:
            return f"n = {n} is no multiple of {BAND}"
        if k % GROUP:
            return f"k = {k} is no multiple of {GROUP}"
        if part_size(k) * BAND > PLACES:
            return f"k = {k} does not split into parts of at most {PLACES // BAND} inputs"
        if shares(k, self.budget, self.outliers) is None:
            return f"{self.budget:g} bits a weight are too few for k = {k}"
        return None

    def misfit(self, shapes: Sequence[Shape]) -> tuple[str, str]:
        reason = next(r for n, k in shapes if (r := self.refuses(n, k)))
        return reason, f"It takes linears with n and k that are multiples of {GROUP}"

    def check(self, tensors: Tensors) -> None:
        share = self.shares(self.size(tensors)[1])
        bits = tensors["input_bits"].view(share.parts, -1)
        if not bool(((bits == 2) | (bits == 4)).all()):
            raise UserError("input_bits has values that are neither 2 nor 4.", part="input_bits")
        if not bool(((bits == 4).sum(1) == share.four).all()):
            raise UserError(
                f"input_bits does not have {share.four} groups of 4 bits in each of its "
                f"{share.parts} parts.",
                part="input_bits",
            )
        if not bool((_base_bits(tensors["scale_base"]) < 0x7C00).all()):
            raise UserError("scale_base holds Inf or NaN.", part="scale_base")
        if bool((_unsigned(tensors["outlier_place"]) >= BAND * share.part).any()):
            raise UserError(
                f"outlier_place has places beyond the {BAND * share.part} of a part.",
                part="outlier_place",
            )

    def random_tensors(
        self, n: int, k: int, dtype: torch.dtype, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Every 2-bit group has one of the two inner zeros, so that weights have about mean 0. As
        the quantizer does it, layers of one k have the same groups of 4 bits, so that they can be
        joined, and these groups no outliers."""
        share, device = self.shares(k), generator.device
        specs = self.tensors(n, k, dtype)
        made = {
            name: spec.empty(device).random_(
                torch.iinfo(spec.dtype).min, torch.iinfo(spec.dtype).max, generator=generator
            )
            for name, spec in specs.items()
            if not spec.dtype.is_floating_point
        }
        same = torch.Generator().manual_seed(k)
        order = torch.rand(share.parts, share.two + share.four, generator=same).to(device)
        four = order.argsort(1) < share.four
        made["input_bits"] = torch.where(four, 4, 2).flatten().to(torch.uint8)
        inner = torch.randint(
            1, 3, (n, share.parts * share.two), generator=generator, device=device
        )
        made["weight_zero"] = pack_bands(inner, 2, torch.int32)
        base = torch.full(specs["scale_base"].shape, STD / 1.2 / 15.5, device=device)
        made["scale_base"] = pack_base(base, torch.full_like(base, 8.0, dtype=torch.int32))
        place = torch.rand(
            n // BAND, share.parts, BAND, share.part, generator=generator, device=device
        )
        place += four.repeat_interleave(GROUP, 1)[:, None]
        made["outlier_place"] = (
            place.flatten(2).topk(share.outliers, largest=False).indices.to(torch.int16)
        )
        for name in ("weight_scale_4", "outlier_value"):
            made[name] = specs[name].empty(device)
        made["weight_scale_4"].uniform_(0.5 * STD / 4.6, 1.5 * STD / 4.6, generator=generator)
        made["outlier_value"].uniform_(-4 * STD, 4 * STD, generator=generator)
        return {name: made[name] for name in specs}

    def refuses_cut(self, dim: int, at: int, size: int) -> str | None:
        if dim == 0 and at % BAND:
            return f"{at} outputs are not whole bands of {BAND}"
        if dim == 1 and at % part_size(size):
            return f"{at} inputs are not whole parts of {part_size(size)}"
        if dim == 1 and any(part_size(rest) != part_size(size) for rest in (at, size - at) if rest):
            return f"the parts of {at} or {size - at} inputs are not of {part_size(size)}"
        return None

    def shard(self, tensors: Tensors, dim: int, begin: int, end: int) -> dict[str, Tensor]:
        size = check_cut(self, tensors, dim, begin, end)
        made = {}
        for name, tensor in tensors.items():
            if dim == 0 and name != "input_bits":
                unit = size[0] // len(tensor)
                tensor = tensor[begin // unit : end // unit]
            elif dim == 1:
                along = 0 if name == "input_bits" else 1
                count = tensor.shape[along]
                first, last = count * begin // size[1], count * end // size[1]
                tensor = tensor.narrow(along, first, last - first)
            made[name] = tensor.clone(memory_format=torch.contiguous_format)
        return made

    # -- what it means

    def order(self, tensors: Tensors) -> Tensor:  # (k,) int64
        """Columns as they are stored: those of all 2-bit groups, then those of all 4-bit groups."""
        groups = torch.argsort(tensors["input_bits"], stable=True)
        inside = torch.arange(GROUP, device=groups.device)
        return (groups[:, None] * GROUP + inside).flatten()

    def codes_2(self, tensors: Tensors) -> Tensor:  # (n, groups, 16) uint8
        return unpack_stream(tensors["weight_packed"][..., None], 2)

    def codes_4(self, tensors: Tensors) -> Tensor:  # (n, parts, inputs of 4 bits) uint8
        packed = tensors["weight_packed_4"]
        parts = tensors["weight_scale_4"].shape[1]
        return unpack_stream(packed.view(len(packed), parts, -1), 4)

    def scales_2(self, tensors: Tensors) -> Tensor:  # (n, groups) fp32
        base, offset = unpack_base(tensors["scale_base"])
        code = unpack_bands(tensors["scale_code"], 4)
        return (code + spread(offset)) * spread(base)

    def zeros_2(self, tensors: Tensors) -> Tensor:  # (n, groups) fp32
        return unpack_bands(tensors["weight_zero"], 2) * ZERO_STEP + ZERO

    def outlier_index(self, tensors: Tensors) -> Tensor:  # int64, of the flat (n, k) weight
        place = _unsigned(tensors["outlier_place"]).long()
        bands, parts, _ = place.shape
        k = GROUP * len(tensors["input_bits"])
        part = k // parts
        band = torch.arange(bands, device=place.device)[:, None, None]
        first = torch.arange(parts, device=place.device)[:, None] * part
        return (band * BAND + place // part) * k + first + place % part

    def dequantize(self, tensors: Tensors) -> Tensor:
        n, k = self.size(tensors)
        two = self.codes_2(tensors).float() - self.zeros_2(tensors)[..., None]
        two *= self.scales_2(tensors)[..., None]
        four = (self.codes_4(tensors).float() - 8) * tensors["weight_scale_4"].float()[..., None]
        weight = torch.empty(n, k, device=two.device)
        weight[:, self.order(tensors)] = torch.cat([two.view(n, -1), four.view(n, -1)], 1)
        # One after the other: a sum of equal places must not depend on the device.
        index, value = self.outlier_index(tensors), tensors["outlier_value"].float()
        for place, more in zip(index.unbind(-1), value.unbind(-1), strict=True):
            weight.view(-1)[place.flatten()] += more.flatten()
        return weight

    def reference(self, tensors: Tensors, x: Tensor) -> Tensor:
        return x.double() @ self.dequantize(tensors).double().T


# -- a band's rows in one word, second-order scales


def pack_bands(values: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """(n, g) whole numbers -> (n / 16, g): row i of a band in bits [bits i, bits (i + 1))."""
    n, groups = values.shape
    rows = values.long().view(n // BAND, BAND, groups)
    shift = (torch.arange(BAND, device=values.device) * bits)[:, None]
    word = (rows << shift).sum(1)  # fields do not overlap: a sum is an or
    if dtype == torch.int32:
        word = (word ^ 0x80000000) - 0x80000000  # wrap to signed
    return word.to(dtype)


def unpack_bands(words: Tensor, bits: int) -> Tensor:  # -> (n, g) int64
    shift = (torch.arange(BAND, device=words.device) * bits)[:, None]
    fields: Tensor = (words.long()[:, None] >> shift) & (2**bits - 1)
    return fields.flatten(0, 1)


def spread(of_bands: Tensor) -> Tensor:
    """(n / 16, g) -> (n, g): a band's value for each of its rows."""
    return of_bands.repeat_interleave(BAND, 0)


def pack_base(base: Tensor, offset: Tensor) -> Tensor:
    """Positive scales, rounded by round_base, and offsets 0 to 15 -> int16: the offset in the lower
    four bits; above it exponent and seven bits of the mantissa of base / BASE in fp16."""
    half = (base / BASE).half().view(torch.int16).to(torch.int32)
    word = (half >> 3 << 4) | offset.to(torch.int32)
    return ((word ^ 0x8000) - 0x8000).to(torch.int16)


def unpack_base(words: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 scales and int64 offsets."""
    half = _base_bits(words).to(torch.int16).view(torch.float16)
    return half.float() * BASE, (words & 15).long()


def round_base(base: Tensor) -> Tensor:
    """To the nearest scale that can be stored and is positive."""
    bits = (base / BASE).clamp(2.0**-14, 65000.0).half().view(torch.int16).to(torch.int32)
    half = ((bits + 4) >> 3 << 3).clamp(max=0x7BF8).to(torch.int16).view(torch.float16)
    rounded: Tensor = half.float() * BASE
    return rounded


def _base_bits(words: Tensor) -> Tensor:
    return _unsigned(words) >> 4 << 3


def _unsigned(words: Tensor) -> Tensor:  # int16 -> int32
    return words.to(torch.int32) & 0xFFFF


def _number(name: str, given: Any) -> float:
    try:
        return float(str(given))
    except ValueError:
        raise UserError(f"{name} {given!r}: is a number.") from None
