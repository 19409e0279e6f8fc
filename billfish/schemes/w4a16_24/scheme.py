"""w4a16_24: of every four inputs of a row two hold a 4-bit weight, the others are 0 (2:4 sparsity);
16-bit activations. Sparse-MARLIN's format in meaning, not in its words.

    weight = (code - 8) * scale      at the two places of a four that are kept, else 0

Symmetric; a scale belongs to a group of inputs, kept or not. Sparse tensor cores multiply the kept
weights alone. docs/FORMAT.md has the tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from billfish.errors import UserError
from billfish.formats.layout import WORD_BITS, pack_stream, unpack_stream
from billfish.formats.spec import TensorSpec
from billfish.schemes.base import STD, Options, Shape, Tensors, check_cut

FOUR, KEPT = 4, 2  # of FOUR inputs KEPT hold a weight
MIDDLE = 8  # the code of a weight of 0
CODE_BITS, PLACE_BITS = 4, 2
CODES, PLACES = WORD_BITS // CODE_BITS, WORD_BITS // PLACE_BITS  # in one word
CUT = FOUR * PLACES // KEPT  # inputs of a word of places: k is cut between such words
PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))  # places that a four may keep
SIZES = (128, 64, 32)  # larger groups have fewer scales
MASKS = ("sparsegpt", "wanda", "magnitude")


@dataclass(frozen=True)
class W4A16Sparse:
    name: ClassVar[str] = "w4a16_24"
    methods: ClassVar[tuple[str, ...]] = ("gptq", "rtn", "finetune")

    group_size: int = 128  # inputs, kept or not; -1: one scale per output channel
    # How the kept places were chosen (quantize.py). No op asks; a checkpoint says how it was made.
    mask: str = MASKS[0]

    def __post_init__(self) -> None:
        if self.group_size not in (*SIZES, -1):
            raise UserError(
                f"group size {self.group_size}: is {', '.join(map(str, SIZES))}, "
                "or -1 for one scale per channel."
            )
        if self.mask not in MASKS:
            raise UserError(f"mask {self.mask!r}: known are {', '.join(MASKS)}.")

    @classmethod
    def from_options(cls, options: Options) -> "W4A16Sparse | Fitted":
        """Options are group_size and mask; without group_size it is fitted to the model."""
        known = ("group_size", "mask")
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise UserError(
                f"scheme {cls.name} has no {', '.join(unknown)}. It has {', '.join(known)}."
            )
        mask, size = str(options.get("mask", MASKS[0])), options.get("group_size")
        return Fitted(mask) if size is None else cls(_whole("group_size", size), mask)

    @classmethod
    def examples(cls) -> list["W4A16Sparse"]:
        return [cls(64), cls(32), cls(-1), cls(32, "wanda"), cls(32, "magnitude")]

    def describe(self) -> str:
        size = "channel" if self.group_size == -1 else f"g{self.group_size}"
        how = "" if self.mask == MASKS[0] else f", {self.mask}"
        return f"2:4 of 4 bit {size}{how}"

    def group_of(self, k: int) -> int:
        """Number of inputs that share a scale in a layer with k inputs."""
        return k if self.group_size == -1 else self.group_size

    # -- what is stored

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        kept, groups = kept_of(k), 1 if self.group_size == -1 else k // self.group_size
        return {
            "weight_packed": TensorSpec((n, math.ceil(kept / CODES)), torch.int32),
            "weight_meta": TensorSpec((n, math.ceil(kept / PLACES)), torch.int32),
            "weight_scale": TensorSpec((n, groups), dtype),
            "weight_shape": TensorSpec((2,), torch.int64),
        }

    def pack(
        self,
        codes: Tensor,  # (n, 2 f), any integer dtype; f = ceil(k / 4)
        places: Tensor,  # (n, 2 f): 0 to 3, ascending in each four
        scales: Tensor,  # (n, g) in their stored dtype
        n: int,
        k: int,
    ) -> dict[str, Tensor]:
        """Canonical tensors. The last word of a row ends with empty fours: zeros at 0 and 1."""
        kept = kept_of(k)
        assert codes.shape == places.shape == (n, kept), (codes.shape, places.shape, n, k)
        padded = pad(codes.to(torch.uint8), (0, -kept % CODES), value=MIDDLE)
        places = pad(places.to(torch.uint8), (0, -kept % PLACES))
        places[:, kept + 1 :: KEPT] = 1
        return {
            "weight_packed": pack_stream(padded, CODE_BITS),
            "weight_meta": pack_stream(places, PLACE_BITS),
            "weight_scale": scales.contiguous(),
            "weight_shape": torch.tensor([n, k], dtype=torch.int64, device=codes.device),
        }

    def size(self, tensors: Tensors) -> Shape:
        n, k = tensors["weight_shape"].tolist()
        return n, k

    def refuses(self, n: int, k: int) -> str | None:
        if k % self.group_of(k):
            return f"group size {self.group_size} does not divide k = {k}"
        return None

    def misfit(self, shapes: Sequence[Shape]) -> tuple[str, str]:
        odd = sorted({k for n, k in shapes if self.refuses(n, k)})
        fits = [size for size in SIZES if all(k % size == 0 for _, k in shapes)]
        return (
            f"group size {self.group_size} does not divide k = {', '.join(map(str, odd))}",
            f"Sizes that divide every k: {', '.join(map(str, [*fits, -1]))} "
            "(-1: one scale a row); choose one, or auto",
        )

    def check(self, tensors: Tensors) -> None:
        """Two places of a four ascend; behind input k there are zeros, in whole fours behind it at
        places 0 and 1."""
        _, k = self.size(tensors)
        codes = unpack_stream(tensors["weight_packed"], CODE_BITS)
        places = unpack_stream(tensors["weight_meta"], PLACE_BITS)
        low, high = places[:, ::KEPT], places[:, 1::KEPT]
        _refuse(
            high <= low,
            "weight_meta",
            lambda row, four: (
                f"has the places {int(low[row, four])} and {int(high[row, four])} in four {four} "
                f"of row {row}: the two of a four ascend, so that they are neither equal nor out "
                "of order."
            ),
        )
        behind = math.ceil(k / FOUR)  # fours
        _refuse(
            high[:, behind:] != 1,  # ascending: the other is 0
            "weight_meta",
            lambda row, four: (
                f"has places other than 0 and 1 in four {behind + four} of row {row}, which is "
                f"behind the last of its {k} inputs."
            ),
        )
        four = torch.arange(codes.shape[1], device=codes.device) // KEPT
        _refuse(
            (FOUR * four + places[:, : len(four)] >= k) & (codes != MIDDLE),
            "weight_packed",
            lambda row, at: (
                f"has the code {int(codes[row, at])} in four {at // KEPT} of row {row}, at place "
                f"{int(places[row, at])}, which is behind the last of its {k} inputs: there it is "
                f"{MIDDLE}, a zero."
            ),
        )

    def refuses_cut(self, dim: int, at: int, size: int) -> str | None:
        if dim == 1 and self.group_size != -1 and at % self.group_size:
            return f"{at} inputs are not whole groups of {self.group_size}"
        if dim == 1 and at % CUT:
            return f"the places of {at} inputs do not fill 32-bit words"
        return None

    def shard(self, tensors: Tensors, dim: int, begin: int, end: int) -> dict[str, Tensor]:
        n, k = check_cut(self, tensors, dim, begin, end)
        (codes, places), scales = self.kept(tensors), tensors["weight_scale"]
        if dim == 0:
            cut = slice(begin, end)
            return self.pack(codes[cut], places[cut], scales[cut], end - begin, k)
        fours = slice(kept_of(begin), kept_of(end))
        if self.group_size != -1:
            scales = scales[:, begin // self.group_size : end // self.group_size]
        return self.pack(codes[:, fours], places[:, fours], scales, n, end - begin)

    def random_tensors(
        self, n: int, k: int, dtype: torch.dtype, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Half of the weights are uniform codes, so their standard deviation is 16 / sqrt(24)
        steps. Random signs of scales cancel the codes' mean of half a step."""
        device, step, fours = generator.device, STD / (16 / 24**0.5), kept_of(k) // KEPT
        pair = torch.randint(0, len(PAIRS), (n, fours), generator=generator, device=device)
        places = torch.tensor(PAIRS, device=device)[pair].flatten(1)
        codes = torch.randint(0, 16, places.shape, generator=generator, device=device)
        four = torch.arange(kept_of(k), device=device) // KEPT
        codes[FOUR * four + places >= k] = MIDDLE
        scales = self.tensors(n, k, dtype)["weight_scale"].empty(device)
        sign = torch.randint(0, 2, scales.shape, generator=generator, device=device) * 2 - 1
        scales.uniform_(0.5 * step, 1.5 * step, generator=generator).mul_(sign)
        return self.pack(codes, places, scales, n, k)

    # -- what it means

    def kept(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Codes and places of kept weights, (n, 2 f) uint8 each."""
        count = kept_of(self.size(tensors)[1])
        codes = unpack_stream(tensors["weight_packed"], CODE_BITS)[:, :count]
        places = unpack_stream(tensors["weight_meta"], PLACE_BITS)[:, :count]
        return codes.contiguous(), places.contiguous()

    def dequantize(self, tensors: Tensors) -> Tensor:
        codes, places = self.kept(tensors)
        return self.decode(codes, places, tensors["weight_scale"], self.size(tensors)[1])

    def decode(self, codes: Tensor, places: Tensor, scales: Tensor, k: int) -> Tensor:
        """(n, k) fp32; codes and places (n, 2 f), scales (n, g)."""
        group = FOUR * torch.arange(places.shape[1] // KEPT, device=places.device)
        group = (group // self.group_of(k)).repeat_interleave(KEPT)
        values = (codes.float() - MIDDLE) * scales.float()[:, group]
        return spread(values, places, k)

    def reference(self, tensors: Tensors, x: Tensor) -> Tensor:
        return x.double() @ self.dequantize(tensors).double().T


@dataclass(frozen=True)
class Fitted:
    """A scheme whose group size is fitted to the model: the largest that leaves the fewest weights
    (usually none) in 16 bits."""

    mask: str = MASKS[0]

    def __post_init__(self) -> None:
        W4A16Sparse(mask=self.mask)  # validates it

    def fit(self, shapes: Sequence[Shape]) -> W4A16Sparse:
        def left(size: int) -> int:
            return sum(n * k for n, k in shapes if k % size)

        return W4A16Sparse(min(SIZES, key=lambda size: (left(size), -size)), self.mask)


def kept_of(k: int) -> int:
    """Kept weights of a row of k inputs; the last four may lie partly behind them."""
    return KEPT * math.ceil(k / FOUR)


def spread(kept: Tensor, places: Tensor, k: int, rest: float = 0) -> Tensor:
    """Numbers at kept places (n, 2 f) -> (n, k), with `rest` elsewhere."""
    fours = places.view(len(places), -1, KEPT).long()
    made = torch.full_like(kept[:, :1, None], rest).expand(*fours.shape[:2], FOUR)
    return made.scatter(2, fours, kept.view(fours.shape)).flatten(1)[:, :k].contiguous()


def kept_at(dense: Tensor, places: Tensor, behind: float) -> Tensor:
    """The inverse: (n, k) -> (n, 2 f), with `behind` behind input k."""
    n, k = dense.shape
    fours = pad(dense, (0, -k % FOUR), value=behind).view(n, -1, FOUR)
    return fours.gather(2, places[:, : kept_of(k)].reshape(n, -1, KEPT).long()).flatten(1)


def _refuse(wrong: Tensor, part: str, told: Any) -> None:
    """Raise for the first (row, column) where `wrong` is true; `told` is a sentence about it."""
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise UserError(f"{part} {told(row, column)} Copy the file again.", part=part)


def _whole(name: str, given: Any) -> int:
    try:
        return int(str(given))
    except ValueError:
        raise UserError(f"{name} {given!r}: is a whole number.") from None
