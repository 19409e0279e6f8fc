"""w4ax: 4-bit weights and activations of 8 bits (a8) or of 4 and 8 bits (fmpq), multiplied as whole
numbers.

The scale of a group of weights is a whole number q from 1 to 16 times the row's base, so that
(code - zero) * q is an int8 number and a product of a token with a row is one sum of int8 products.
That sum is exact; scales come after it:

    weight = (code - zero) * q * base
    y      = fp32(sum of x8 * (code - zero) * q) * (s * base) + bias

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
from billfish.schemes.w4ax.activations import rotated, round_inputs

MIDDLE = 8  # the code of a weight of 0 in symmetric weights
LOW, HIGH = 128, 127  # zero * q and (15 - zero) * q at most: every code's value is a byte
MOST_Q = 16
NIBBLES = compressed_tensors(4)  # codes along k; q - 1 and zeros along groups
SIZES = (128, 64, 32)  # candidates for a model; larger groups have fewer scales
LEAST_GROUP = 32
LONGEST = 2**17  # inputs: sums of 127 * 128 stay below 2^31
ACTIVATIONS = ("a8", "fmpq")
BLOCK = 128  # inputs that are rounded to the same bits, at most
A4_SHARE = 0.84  # COMET's
SHARED = ("input_order", "input_bits")  # tensors of a linear's inputs, the same for all its rows


@dataclass(frozen=True)
class W4AX:
    name: ClassVar[str] = "w4ax"
    methods: ClassVar[tuple[str, ...]] = ("gptq", "rtn", "finetune")

    group_size: int = 128
    symmetric: bool = True
    activations: str = "a8"
    a4_share: float = 0.0  # fmpq: of the blocks of inputs, rounded to 4 bits
    rotation: bool = False  # fmpq: 4-bit blocks are multiplied by a Hadamard matrix

    def __post_init__(self) -> None:
        size = self.group_size
        if type(size) is not int or size < LEAST_GROUP or size & (size - 1):
            raise UserError(f"group size {size}: is {LEAST_GROUP}, 64, 128 or a larger power of 2.")
        if self.activations not in ACTIVATIONS:
            raise UserError(
                f"activations {self.activations!r}: known are {', '.join(ACTIVATIONS)}."
            )
        share = self.a4_share
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise UserError(f"a4_share {share!r}: is a number from 0 to 1.")
        if not self.mixed and (share or self.rotation):
            raise UserError("a4_share and rotation: belong to activations fmpq, these are a8.")

    @property
    def mixed(self) -> bool:
        """Whether inputs have an order, and bits block by block."""
        return self.activations == "fmpq"

    @property
    def block(self) -> int:
        """Inputs that are rounded to the same bits."""
        return min(self.group_size, BLOCK)

    @classmethod
    def from_options(cls, options: Options) -> "W4AX | Fitted":
        known = ("group_size", "symmetric", "activations", "a4_share", "rotation")
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise UserError(
                f"scheme {cls.name} has no {', '.join(unknown)}. It has {', '.join(known)}."
            )
        activations = str(options.get("activations", ACTIVATIONS[0]))
        mixed = activations == "fmpq"
        try:
            share = float(options.get("a4_share", A4_SHARE if mixed else 0.0))
        except ValueError:
            raise UserError(f"a4_share {options['a4_share']!r}: is a number from 0 to 1.") from None
        fitted = Fitted(
            _truth("symmetric", options.get("symmetric", True)),
            activations,
            share,
            _truth("rotation", options.get("rotation", mixed)),
        )
        if options.get("group_size") is None:
            return fitted
        return fitted.of(_whole("group_size", options["group_size"]))

    @classmethod
    def examples(cls) -> list["W4AX"]:
        return [
            *(cls(32), cls(64), cls(256), cls(32, False)),
            *(cls(32, True, "fmpq", 0.84, True), cls(64, False, "fmpq", 0.5, True)),
            *(cls(256, True, "fmpq", 0.5, True), cls(32, True, "fmpq", 0.84, False)),
        ]

    def describe(self) -> str:
        weights = f"4 bit g{self.group_size} {'sym' if self.symmetric else 'asym'}"
        if not self.mixed:
            return f"{weights}, activations 8 bit"
        rotation = ", rotated" if self.rotation else ""
        return f"{weights}, activations {100 * self.a4_share:.3g} % 4 bit{rotation}, else 8 bit"

    # -- what is stored

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        groups = TensorSpec(NIBBLES.shape(n, k // self.group_size), torch.int32)
        specs = {
            "weight_packed": TensorSpec(NIBBLES.shape(n, k), torch.int32),
            "group_scale": groups,
            "weight_scale": TensorSpec((n, 1), dtype),
        }
        if not self.symmetric:
            specs["group_zero"] = groups
        if self.mixed:
            specs["input_order"] = TensorSpec((k,), torch.int32)
            specs["input_bits"] = TensorSpec((k // self.block,), torch.uint8)
        return specs

    def pack(
        self,
        codes: Tensor,  # (n, k): 0 to 15
        q: Tensor,  # (n, g): 1 to 16
        base: Tensor,  # (n, 1) in the stored dtype
        zero: Tensor | None = None,  # (n, g): 0 to 15, of asymmetric weights
        order: Tensor | None = None,  # (k,) and
        bits: Tensor | None = None,  # (k / block,) of fmpq
    ) -> dict[str, Tensor]:
        """Canonical tensors."""
        tensors = {
            "weight_packed": NIBBLES.pack(codes),
            "group_scale": NIBBLES.pack(q - 1),
            "weight_scale": base.contiguous(),
        }
        if not self.symmetric:
            assert zero is not None
            tensors["group_zero"] = NIBBLES.pack(zero)
        if self.mixed:
            assert order is not None and bits is not None
            # A linear of a stack has its own copy: a file holds no tensor twice.
            tensors["input_order"] = order.to(torch.int32, copy=True)
            tensors["input_bits"] = bits.to(torch.uint8, copy=True)
        return tensors

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
        q = self.scales(tensors)
        for name, numbers in (("group_scale", q - 1), ("group_zero", self.zeros(tensors))):
            if name in tensors and not torch.equal(NIBBLES.pack(numbers), tensors[name]):
                raise UserError(
                    f"{name} has bits set beyond the {q.shape[1]} groups of a row.", part=name
                )
        if not self.symmetric:
            zero, q = self.zeros(tensors).int(), q.int()
            if bool(((zero * q > LOW) | ((15 - zero) * q > HIGH)).any()):
                raise UserError(
                    f"group_zero has a zero z with z * q beyond {LOW} or (15 - z) * q beyond "
                    f"{HIGH} for the group's scale q: its weights are no bytes.",
                    part="group_zero",
                )
        if self.mixed:
            order = tensors["input_order"].long()
            if not torch.equal(order.sort().values, torch.arange(k, device=order.device)):
                raise UserError(
                    f"input_order is no permutation of the inputs 0 to {k - 1}.", part="input_order"
                )
            if not bool(((tensors["input_bits"] == 4) | (tensors["input_bits"] == 8)).all()):
                raise UserError("input_bits has a number other than 4 and 8.", part="input_bits")

    def random_tensors(
        self, n: int, k: int, dtype: torch.dtype, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Codes and whole scales are uniform: a standard deviation of 44.8 bases, with zeros from 7
        to 9 as without. Random signs of bases cancel the codes' mean of -1/2, as in w4a16."""
        here: Any = {"generator": generator, "device": generator.device}
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, **here)
        q = torch.randint(1, MOST_Q + 1, (n, k // self.group_size), **here)
        base, step = torch.empty(n, 1, dtype=dtype, device=generator.device), STD / 44.8
        base.uniform_(0.5 * step, 1.5 * step, generator=generator)
        base.mul_(torch.randint(0, 2, base.shape, **here) * 2 - 1)
        zero = order = bits = None
        if not self.symmetric:
            zero = torch.randint(7, 10, q.shape, **here)
            q = torch.where(zero == MIDDLE, q, q.clamp(max=14))
        if self.mixed:
            # The same for every layer of k inputs: q, k and v of a model must agree to be joined.
            here["generator"] = torch.Generator(generator.device).manual_seed(k)
            order = torch.randperm(k, **here)
            bits = self.block_bits(torch.rand(k // self.block, **here))
        return self.pack(codes, q, base, zero, order, bits)

    def block_bits(self, loss: Tensor) -> Tensor:
        """(k / block,) uint8: 4 for a4_share of the blocks, those that lose least by it."""
        bits = torch.full(loss.shape, 8, dtype=torch.uint8, device=loss.device)
        bits[loss.argsort(stable=True)[: round(self.a4_share * len(loss))]] = 4
        return bits

    def refuses_cut(self, dim: int, at: int, size: int) -> str | None:
        if dim == 1 and at % self.group_size:
            return f"{at} inputs are not whole groups of {self.group_size}"
        return None

    def shard(self, tensors: Tensors, dim: int, begin: int, end: int) -> dict[str, Tensor]:
        check_cut(self, tensors, dim, begin, end)
        if dim == 0:
            return {
                name: (tensor if name in SHARED else tensor[begin:end]).clone()
                for name, tensor in tensors.items()
            }
        groups = slice(begin // self.group_size, end // self.group_size)
        part = {
            "weight_packed": tensors["weight_packed"][:, begin // 8 : end // 8].contiguous(),
            "group_scale": NIBBLES.pack(self.scales(tensors)[:, groups] - 1),
            "weight_scale": tensors["weight_scale"].clone(),
        }
        if not self.symmetric:
            part["group_zero"] = NIBBLES.pack(self.zeros(tensors)[:, groups])
        if self.mixed:
            order = tensors["input_order"][begin:end]
            if int(order.min()) < begin or int(order.max()) >= end:
                raise UserError(
                    f"a layer cannot be cut into inputs {begin} to {end - 1}: its stored columns "
                    "there read others, too. Inputs can be split where their order was folded "
                    "into the layer before, as down's is.",
                    part="input_order",
                )
            part["input_order"] = order - begin
            part["input_bits"] = tensors["input_bits"][begin // self.block : end // self.block]
            part["input_bits"] = part["input_bits"].clone()
        return part

    # -- what it means; columns are in stored order unless said otherwise

    def codes(self, tensors: Tensors) -> Tensor:  # (n, k) uint8
        return NIBBLES.unpack(tensors["weight_packed"], *self.size(tensors))

    def scales(self, tensors: Tensors) -> Tensor:  # (n, g) uint8: q
        n, k = self.size(tensors)
        return NIBBLES.unpack(tensors["group_scale"], n, k // self.group_size) + 1

    def zeros(self, tensors: Tensors) -> Tensor:  # (n, g) uint8
        n, k = self.size(tensors)
        if self.symmetric:
            shape, device = (n, k // self.group_size), tensors["weight_packed"].device
            return torch.full(shape, MIDDLE, dtype=torch.uint8, device=device)
        return NIBBLES.unpack(tensors["group_zero"], n, k // self.group_size)

    def whole_weight(self, tensors: Tensors) -> Tensor:  # (n, k) int8: (code - zero) * q
        q = self.scales(tensors).to(torch.int8)[..., None]
        codes = self.codes(tensors).to(torch.int8).view(*q.shape[:2], -1)
        # A byte: with a zero of 8 and q up to 16 it lies within -128 to 112.
        return ((codes - self.zeros(tensors).to(torch.int8)[..., None]) * q).view(len(q), -1)

    def dequantize(self, tensors: Tensors) -> Tensor:
        weight = self.whole_weight(tensors).float() * tensors["weight_scale"].float()
        if not self.mixed:
            return weight
        return self.given_order(weight, tensors["input_order"], tensors["input_bits"])

    def given_order(self, weight: Tensor, order: Tensor, bits: Tensor) -> Tensor:
        """Columns in stored order, rotated -> as Hugging Face has them. fmpq."""
        weight = rotated(weight, bits) if self.rotation else weight
        return weight[:, order.long().argsort()]

    def stored_order(self, weight: Tensor, order: Tensor, bits: Tensor) -> Tensor:
        """The inverse."""
        weight = weight[:, order.long()]
        return rotated(weight, bits) if self.rotation else weight

    def round_inputs(self, tensors: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
        """(..., k) as the model has it -> int8 (..., k) in stored order, fp32 (..., 1)."""
        order, bits = map(tensors.get, SHARED)
        return round_inputs(x, order, bits, self.rotation)

    def whole_sums(self, tensors: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
        """The exact sums of the product, int64 (..., n), and the tokens' scales, fp32 (..., 1)."""
        x8, scale = self.round_inputs(tensors, x)
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

    symmetric: bool
    activations: str
    a4_share: float
    rotation: bool

    def __post_init__(self) -> None:
        self.of(SIZES[0])

    def of(self, size: int) -> W4AX:
        return W4AX(size, self.symmetric, self.activations, self.a4_share, self.rotation)

    def fit(self, shapes: Sequence[Shape]) -> W4AX:
        def left(size: int) -> int:
            return sum(n * k for n, k in shapes if k % size)

        return self.of(min(SIZES, key=lambda size: (left(size), -size)))


def _truth(name: str, given: Any) -> bool:
    said = str(given).lower()
    if said not in ("true", "false"):
        raise UserError(f"{name} {given!r}: is true or false.")
    return said == "true"


def _whole(name: str, given: Any) -> int:
    try:
        return int(str(given))
    except ValueError:
        raise UserError(f"{name} {given!r}: is a whole number.") from None
