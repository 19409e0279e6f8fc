"""Layers of fmpq with 4-bit blocks of inputs first, as w4ax_stripe wants them: then costs and bits
follow from their number, without a table.

Sums are integers, so that the order of blocks changes no bit. A block then has a group of its own:
groups of several blocks repeat their scales.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from billfish.schemes.base import Tensors
from billfish.schemes.w4ax.scheme import NIBBLES, SHARED

PER_GROUP = ("group_scale", "group_zero")


@dataclass(frozen=True)
class Blocks:
    """The order of one layer's blocks."""

    size: int  # inputs of a block
    per_group: int  # blocks of a group
    places: Tensor  # (blocks,) int64: the stored place of each
    order: Tensor  # (k,) int32: the input that each column reads
    fours: int  # blocks of 4 bits, the first
    stored: dict[str, Tensor]  # the canonical input_order and input_bits

    @classmethod
    def of(cls, group_size: int, size: int, tensors: Tensors) -> "Blocks":
        stored = {name: tensors[name].clone() for name in SHARED}
        bits = stored["input_bits"]
        places = torch.argsort(bits, stable=True)
        order = stored["input_order"].view(-1, size)[places].flatten()
        fours = int((bits == 4).sum())
        return cls(size, group_size // size, places, order, fours, stored)

    def sorted(self, tensors: Tensors) -> dict[str, Tensor]:
        """Canonical tensors of a8 with groups of one block, in this order."""
        made = {"weight_scale": tensors["weight_scale"]}
        made["weight_packed"] = self._columns(tensors["weight_packed"], self.places)
        for name in PER_GROUP:
            if name in tensors:
                groups = len(self.places) // self.per_group
                each = NIBBLES.unpack(tensors[name], len(tensors[name]), groups)
                each = each.repeat_interleave(self.per_group, 1)
                made[name] = NIBBLES.pack(each[:, self.places])
        return made

    def canonical(self, tensors: Tensors) -> dict[str, Tensor]:
        """The inverse."""
        back = torch.argsort(self.places)
        made = {"weight_packed": self._columns(tensors["weight_packed"], back)}
        for name in PER_GROUP:
            if name in tensors:
                each = NIBBLES.unpack(tensors[name], len(tensors[name]), len(back))
                made[name] = NIBBLES.pack(each[:, back][:, :: self.per_group])
        made["weight_scale"] = tensors["weight_scale"]
        return made | {name: tensor.clone() for name, tensor in self.stored.items()}

    def _columns(self, words: Tensor, places: Tensor) -> Tensor:
        n, size = len(words), self.size // 8  # words of a block
        return words.view(n, -1, size)[:, places].reshape(n, -1)

    def digest(self) -> str:
        """Layers with the same one order their inputs alike."""
        found = hashlib.sha256()
        for tensor in self.stored.values():
            found.update(tensor.cpu().numpy().tobytes() + b"|")
        return found.hexdigest()

    @property
    def nbytes(self) -> int:
        kept = (self.places, self.order, *self.stored.values())
        return sum(tensor.nbytes for tensor in kept)
