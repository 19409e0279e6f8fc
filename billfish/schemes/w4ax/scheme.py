"""w4ax: 4-bit weights and 8-bit activations, multiplied as whole numbers (W4A8).

The scale of a group of weights is a whole number q from 1 to 16 times the row's base, so that
(code - 8) * q is an int8 number and a product of a token with a row is one sum of int8 products.
That sum is exact; scales come after it:

    weight = (code - 8) * q * base
    y      = fp32(sum of x8 * (code - 8) * q) * (s * base) + bias

x8 and s are the token's (activations.py). Since sums are exact, a row's bits depend neither on the
device nor on the batch. docs/FORMAT.md has the tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.formats.layout import compressed_tensors
from billfish.formats.spec import TensorSpec
from billfish.schemes.base import STD, Options, Shape, Tensors, check_cut
from billfish.schemes.w4ax.activations import round_tokens

MIDDLE = 8  # the code of a weight of 0
MOST_Q = 16
NIBBLES = compressed_tensors(4)  # codes along k, and q - 1 along groups
SIZES = (128, 64, 32)  # candidates for a model; larger groups have fewer scales
LEAST_GROUP = 32
LONGEST = 2**17  # inputs: sums of 127 * 128 stay below 2^31
ACTIVATIONS = ("a8",)


@dataclass(frozen=True)
class W4AX:
    name: ClassVar[str] = "w4ax"
    methods: ClassVar[tuple[str, ...]] = ("gptq", "rtn", "finetune")

    group_size: int = 128
    activations: str = "a8"

    def __post_init__(self) -> None:
        size = self.group_size
        if not isinstance(size, int) or size < LEAST_GROUP or size & (size - 1):
            raise UserError(f"group size {size}: is {LEAST_GROUP}, 64, 128 or a larger power of 2.")
        if self.activations not in ACTIVATIONS:
            raise UserError(
                f"activations {self.activations!r}: known are {', '.join(ACTIVATIONS)}."
            )

    @classmethod
    def from_options(cls, options: Options) -> "W4AX | Fitted":
        known = ("group_size", "activations")
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise UserError(
                f"scheme {cls.name} has no {', '.join(unknown)}. It has {', '.join(known)}."
            )
        activations = str(options.get("activations", ACTIVATIONS[0]))
        if options.get("group_size") is None:
            return Fitted(activations)
        return cls(_whole("group_size", options["group_size"]), activations)

    @classmethod
    def examples(cls) -> list["W4AX"]:
        return [cls(32), cls(64), cls(256)]

    def describe(self) -> str:
        return f"4 bit g{self.group_size}, activations 8 bit"

    # -- what is stored

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {
            "weight_packed": TensorSpec(NIBBLES.shape(n, k), torch.int32),
            "group_scale": TensorSpec(NIBBLES.shape(n, k // self.group_size), torch.int32),
            "weight_scale": TensorSpec((n, 1), dtype),
        }

    def pack(self, codes: Tensor, q: Tensor, base: Tensor) -> dict[str, Tensor]:
        """(n, k) codes 0 to 15, (n, g) whole scales 1 to 16, (n, 1) bases in their stored dtype ->
        canonical tensors."""
        return {
            "weight_packed": NIBBLES.pack(codes),
            "group_scale": NIBBLES.pack(q - 1),
            "weight_scale": base.contiguous(),
        }

    def size(self, tensors: Tensors) -> Shape:
        n, words = tensors["weight_packed"].shape
        return n, 8 * words

    def refuses(self, n: int, k: int) -> str | None:
        if k % self.group_size:
            return f"group size {self.group_size} does not divide k = {k}"
        if k > LONGEST:
            return f"k = {k} is more than {LONGEST}: sums would exceed 32 bits"
        return None

    def misfit(self, shapes: Sequence[Shape]) -> tuple[str, str]:
        reason = next(r for n, k in shapes if (r := self.refuses(n, k)))
        fits = [size for size in SIZES if not any(W4AX(size).refuses(*shape) for shape in shapes)]
        if not fits:
            return reason, f"It takes linears with k a multiple of {LEAST_GROUP}, up to {LONGEST}"
        return (
            reason,
            f"Sizes that divide every k: {', '.join(map(str, fits))}; choose one, or auto",
        )

    def check(self, tensors: Tensors) -> None:
        n, k = self.size(tensors)
        if reason := self.refuses(n, k):
            raise UserError(f"weight_packed is of a {n} x {k} layer: {reason}.", "weight_packed")
        words = tensors["group_scale"]
        if not torch.equal(NIBBLES.pack(self.scales(tensors) - 1), words):
            raise UserError(
                f"group_scale has bits set beyond the {k // self.group_size} scales of a row.",
                part="group_scale",
            )

    def random_tensors(
        self, n: int, k: int, dtype: torch.dtype, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Codes and whole scales are uniform: a standard deviation of 44.8 bases. Random signs of
        bases cancel the codes' mean of -1/2, as in w4a16."""
        device, specs = generator.device, self.tensors(n, k, dtype)
        packed = specs["weight_packed"].empty(device)
        packed.random_(-(2**31), 2**31, generator=generator)
        shape = (n, k // self.group_size)
        q = torch.randint(1, MOST_Q + 1, shape, generator=generator, device=device)
        base, step = specs["weight_scale"].empty(device), STD / 44.8
        sign = torch.randint(0, 2, base.shape, generator=generator, device=device) * 2 - 1
        base.uniform_(0.5 * step, 1.5 * step, generator=generator).mul_(sign)
        group_scale = NIBBLES.pack(q - 1)
        return {"weight_packed": packed, "group_scale": group_scale, "weight_scale": base}

    def refuses_cut(self, dim: int, at: int, size: int) -> str | None:
        if dim == 1 and at % self.group_size:
            return f"{at} inputs are not whole groups of {self.group_size}"
        return None

    def shard(self, tensors: Tensors, dim: int, begin: int, end: int) -> dict[str, Tensor]:
        check_cut(self, tensors, dim, begin, end)
        if dim == 0:
            return {name: tensor[begin:end].clone() for name, tensor in tensors.items()}
        groups = slice(begin // self.group_size, end // self.group_size)
        return {
            "weight_packed": tensors["weight_packed"][:, begin // 8 : end // 8].contiguous(),
            "group_scale": NIBBLES.pack(self.scales(tensors)[:, groups] - 1),
            "weight_scale": tensors["weight_scale"].clone(),
        }

    # -- what it means

    def codes(self, tensors: Tensors) -> Tensor:  # (n, k) uint8
        return NIBBLES.unpack(tensors["weight_packed"], *self.size(tensors))

    def scales(self, tensors: Tensors) -> Tensor:  # (n, g) uint8: q
        n, k = self.size(tensors)
        return NIBBLES.unpack(tensors["group_scale"], n, k // self.group_size) + 1

    def whole_weight(self, tensors: Tensors) -> Tensor:  # (n, k) int8: (code - 8) * q
        q = self.scales(tensors).to(torch.int8)[..., None]
        steps = self.codes(tensors).to(torch.int8) - MIDDLE
        # 16 is the largest q, so the product lies within -128 to 112.
        return (steps.view(*q.shape[:2], -1) * q).view(steps.shape)

    def dequantize(self, tensors: Tensors) -> Tensor:
        return self.whole_weight(tensors).float() * tensors["weight_scale"].float()

    def whole_sums(self, tensors: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
        """The exact sums of the product, int64 (..., n), and the tokens' scales, fp32 (..., 1)."""
        x8, scale = round_tokens(x)
        # fp64 holds sums of whole numbers up to 2^53.
        sums = x8.double() @ self.whole_weight(tensors).double().T
        return sums.long(), scale

    def reference(self, tensors: Tensors, x: Tensor) -> Tensor:
        """In fp32, as all ops compute it from exact sums; returned as fp64."""
        sums, scale = self.whole_sums(tensors, x)
        return scaled(sums, scale, tensors["weight_scale"]).double()


def scaled(sums: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    """Whole sums (..., n), tokens' scales (..., 1) and bases (n, 1) -> fp32 (..., n). The product
    of scales comes first: ops do the same, so that their bits are equal."""
    return sums.float().mul_(scale * base.float()[:, 0])


@dataclass(frozen=True)
class Fitted:
    """A scheme whose group size is fitted to the model: the largest that leaves the fewest weights
    (usually none) in 16 bits."""

    activations: str = "a8"

    def __post_init__(self) -> None:
        W4AX(activations=self.activations)

    def fit(self, shapes: Sequence[Shape]) -> W4AX:
        def left(size: int) -> int:
            return sum(n * k for n, k in shapes if k % size)

        return W4AX(min(SIZES, key=lambda size: (left(size), -size)), self.activations)


def _whole(name: str, given: Any) -> int:
    try:
        return int(str(given))
    except ValueError:
        raise UserError(f"{name} {given!r}: is a whole number.") from None
