"""Inputs of a w4ax layer: how fmpq stores and rounds them, and tokens that are rounded."""

import hashlib
from typing import NamedTuple, Self

import torch
from torch import Tensor

from billfish.schemes.base import Tensors
from billfish.schemes.w4ax.scheme import SHARED

MOST_ORDERED = 2**16  # inputs of fmpq: two bytes name one
TAKES = "w4ax"  # what a8 layers multiply


class Inputs(NamedTuple):
    """Of fmpq alone."""

    order: Tensor | None  # (k,) int16, without sign: canonical input_order; None: 0, 1, 2 ...
    bits: Tensor  # (k / block,) uint8, 4 or 8
    rotated: bool  # 4-bit blocks are multiplied by a Hadamard matrix

    @classmethod
    def of(cls, tensors: Tensors, rotated: bool) -> Self | None:
        """None for a8."""
        if SHARED[0] not in tensors:
            return None
        order, bits = (tensors[name] for name in SHARED)
        plain = torch.equal(order, torch.arange(len(order), dtype=order.dtype, device=order.device))
        return cls(None if plain else order.to(torch.int16), bits.clone(), rotated)

    def canonical(self, k: int) -> dict[str, Tensor]:
        if self.order is None:
            order = torch.arange(k, dtype=torch.int32, device=self.bits.device)
        else:
            order = self.order.int() & MOST_ORDERED - 1
        return dict(zip(SHARED, (order, self.bits.clone()), strict=True))

    def takes(self) -> str:
        """A name: layers with the same one round an input alike."""
        digest = hashlib.sha256(str(self.rotated).encode())
        for tensor in (self.order, self.bits):
            digest.update(b"" if tensor is None else tensor.cpu().numpy().tobytes())
            digest.update(b"|")
        return f"{TAKES} {digest.hexdigest()}"

    def nbytes(self) -> int:
        return self.bits.nbytes + (0 if self.order is None else self.order.nbytes)


class Rounded(NamedTuple):
    """Tokens as w4ax_quant writes them: what the products read of x."""

    bytes: Tensor  # (m, row bytes) int8, in the order of the records
    tokens: Tensor  # (m or m + 1, 2) int32: {scale, 128 * sum}; an even number: read in pairs
    dtype: torch.dtype  # of x
    lead: tuple[int, ...]  # x's shape without its inputs


def row_bytes(k: int) -> int:
    """Of a token's rounded inputs: TMA copies rows of whole 16 bytes."""
    return -(-k // 16) * 16
