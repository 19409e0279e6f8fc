"""w4a16: integer weights of 2 to 8 bits (usually 4) in groups along k, 16-bit activations.

The canonical tensors are those of compressed-tensors `pack-quantized` (docs/FORMAT.md), so vLLM and
transformers load a checkpoint without conversion. MARLIN's and QUICK's kernels are for this
scheme.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.formats import layout
from billfish.formats.grid import Grid, group_count
from billfish.formats.spec import TensorSpec
from billfish.schemes.base import STD, Options, Shape, Tensors, check_cut
from billfish.schemes.w4a16 import groups

G_IDX = "weight_g_idx"


@dataclass(frozen=True)
class W4A16:
    name: ClassVar[str] = "w4a16"
    methods: ClassVar[tuple[str, ...]] = ("gptq", "awq", "rtn", "finetune")

    bits: int = 4
    group_size: int = 128  # -1: one scale per output channel
    symmetric: bool = True
    # Column j belongs to group g_idx[j]. Only GPTQ checkpoints of others with desc_act have it:
    # it costs a gather of x and prevents tensor parallelism, so solvers/gptq.py does without.
    has_g_idx: bool = False

    def __post_init__(self) -> None:
        Grid(self.bits, self.symmetric)  # validates bits
        group_count(0, self.group_size)

    @classmethod
    def from_options(cls, options: Options) -> "W4A16 | Fitted":
        """Options are bits, symmetric and group_size; without group_size it is fitted to the
        model."""
        known = ("bits", "group_size", "symmetric")
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise UserError(
                f"scheme {cls.name} has no {', '.join(unknown)}. It has {', '.join(known)}."
            )
        bits, said = _whole(options, "bits", 4), str(options.get("symmetric", True)).lower()
        if said not in ("true", "false"):
            raise UserError(f"symmetric {said!r}: is true or false.")
        symmetric = said == "true"
        if options.get("group_size") is None:
            return Fitted(bits, symmetric)
        return cls(bits, _whole(options, "group_size", 0), symmetric)

    @classmethod
    def examples(cls) -> list["W4A16"]:
        both = (True, False)
        return [
            *(cls(bits, 32, symmetric) for bits in range(2, 9) for symmetric in both),
            *(cls(bits, -1, symmetric) for bits in (3, 4, 8) for symmetric in both),
            *(cls(4, size, symmetric) for size in (16, 64, 256) for symmetric in both),
            *(cls(bits, 32, symmetric, True) for bits in (4, 8) for symmetric in both),
            cls(4, 48),
        ]

    def describe(self) -> str:
        size = "channel" if self.group_size == -1 else f"g{self.group_size}"
        return f"{self.bits} bit {size} {'sym' if self.symmetric else 'asym'}"

    @property
    def grid(self) -> Grid:
        return Grid(self.bits, self.symmetric)

    def group_of(self, k: int) -> int:
        """Number of inputs that share a scale in a layer with k inputs."""
        return k if self.group_size == -1 else self.group_size

    # -- what is stored

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        groups = group_count(k, self.group_size)
        specs = {
            "weight_packed": TensorSpec(
                layout.compressed_tensors(self.bits).shape(n, k), torch.int32
            ),
            "weight_scale": TensorSpec((n, groups), dtype),
            "weight_shape": TensorSpec((2,), torch.int64),
        }
        if not self.symmetric:
            shape = layout.compressed_tensors_zeros(self.bits).shape(n, groups)
            specs["weight_zero_point"] = TensorSpec(shape, torch.int32)
        if self.has_g_idx:
            specs[G_IDX] = TensorSpec((k,), torch.int32)
        return specs

    def pack(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
        """(n, k) integer codes, (n, g) scales in their stored dtype, (n, g) zeros -> canonical
        tensors."""
        n, k = codes.shape
        tensors = {
            "weight_packed": layout.compressed_tensors(self.bits).pack(codes),
            "weight_scale": scales.contiguous(),
            "weight_shape": torch.tensor([n, k], dtype=torch.int64, device=codes.device),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = layout.compressed_tensors_zeros(self.bits).pack(zeros)
        return tensors

    def size(self, tensors: Tensors) -> Shape:
        n, k = tensors["weight_shape"].tolist()
        return n, k

    def refuses(self, n: int, k: int) -> str | None:
        if groups.divides(self.group_size, k):
            return None
        return f"group size {self.group_size} does not divide k = {k}"

    def misfit(self, shapes: Sequence[Shape]) -> tuple[str, str]:
        return groups.misfit(self.group_size, shapes)

    def random_tensors(
        self, n: int, k: int, dtype: torch.dtype, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Uniform codes have a standard deviation of levels / sqrt(12) steps. Random signs of
        scales cancel their mean of half a step, which would overflow fp16 within 32 layers."""
        device, step = generator.device, STD / (self.grid.levels / 12**0.5)
        tensors = {}
        for name, spec in self.tensors(n, k, dtype).items():
            made = spec.empty(device)
            if spec.dtype.is_floating_point:
                sign = torch.randint(0, 2, spec.shape, generator=generator, device=device) * 2 - 1
                made.uniform_(0.5 * step, 1.5 * step, generator=generator).mul_(sign)
            elif spec.dtype == torch.int32:
                made.random_(-(2**31), 2**31, generator=generator)
            tensors[name] = made
        tensors["weight_shape"] = torch.tensor([n, k], dtype=torch.int64, device=device)
        if self.has_g_idx:
            order = torch.randperm(k, generator=generator, device=device)
            tensors[G_IDX] = (order // self.group_of(k)).to(torch.int32)
        return tensors

    def check(self, tensors: Tensors) -> None:
        """All words are codes."""

    def refuses_cut(self, dim: int, at: int, size: int) -> str | None:
        if dim == 1 and self.has_g_idx:
            return "its columns are reordered (desc_act), so a group may lie in several shards"
        if dim == 1 and self.group_size != -1 and at % self.group_size:
            return f"{at} inputs are not whole groups of {self.group_size}"
        if dim == 1 and at * self.bits % layout.WORD_BITS:
            return f"{at} codes of {self.bits} bits do not fill 32-bit words"
        if dim == 0 and not self.symmetric and at * self.bits % layout.WORD_BITS:
            return f"{at} zero points of {self.bits} bits do not fill 32-bit words"
        return None

    def shard(self, tensors: Tensors, dim: int, begin: int, end: int) -> dict[str, Tensor]:
        check_cut(self, tensors, dim, begin, end)
        cut = slice(begin, end)
        codes, scales, zeros = self.codes(tensors), tensors["weight_scale"], self.zeros(tensors)
        if dim == 0:
            made = self.pack(codes[cut], scales[cut], zeros[cut])
            return {**{name: tensors[name] for name in tensors if name == G_IDX}, **made}
        if self.group_size != -1:
            columns = slice(begin // self.group_size, -(-end // self.group_size))
            scales, zeros = scales[:, columns], zeros[:, columns]
        return self.pack(codes[:, cut], scales, zeros)

    # -- what it means

    def codes(self, tensors: Tensors) -> Tensor:  # (n, k) uint8
        n, k = self.size(tensors)
        return layout.compressed_tensors(self.bits).unpack(tensors["weight_packed"], n, k)

    def zeros(self, tensors: Tensors) -> Tensor:  # (n, g) uint8
        n, groups = tensors["weight_scale"].shape
        if self.symmetric:
            device = tensors["weight_scale"].device
            return torch.full((n, groups), self.grid.middle, dtype=torch.uint8, device=device)
        packed = tensors["weight_zero_point"]
        return layout.compressed_tensors_zeros(self.bits).unpack(packed, n, groups)

    def group_of_column(self, tensors: Tensors) -> Tensor:  # (k,) int64
        _, k = self.size(tensors)
        if self.has_g_idx:
            return tensors[G_IDX].long()
        return torch.arange(k, device=tensors["weight_scale"].device) // self.group_of(k)

    def dequantize(self, tensors: Tensors) -> Tensor:
        group = self.group_of_column(tensors)
        codes, zeros = self.codes(tensors).float(), self.zeros(tensors).float()
        return (codes - zeros[:, group]) * tensors["weight_scale"].float()[:, group]

    def reference(self, tensors: Tensors, x: Tensor) -> Tensor:
        return x.double() @ self.dequantize(tensors).double().T


@dataclass(frozen=True)
class Fitted:
    """A scheme whose group size is fitted to the model: the largest that leaves the fewest weights
    (usually none) in 16 bits."""

    bits: int = 4
    symmetric: bool = True

    def __post_init__(self) -> None:
        Grid(self.bits, self.symmetric)

    def fit(self, shapes: Sequence[Shape]) -> W4A16:
        return W4A16(self.bits, groups.best(shapes), self.symmetric)


def _whole(options: Options, name: str, usual: int) -> int:
    given: Any = options.get(name, usual)
    try:
        return int(str(given))
    except ValueError:
        raise UserError(f"{name} {given!r}: is a whole number.") from None
