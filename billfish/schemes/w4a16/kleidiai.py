"""w4a16 by PyTorch's 4-bit operators, which use KleidiAI on ARM. Chosen only by name, because they
quantize x to 8 bits.

A step is 1/255 of a row's range, so one large value would cost the others precision; such outliers
are multiplied in a row of their own. Results are off by 0.1 to 0.8 %. Codes are stored once, scales
twice and, with zeros, three times: 0.25 and 0.8 more bits a weight for groups of 64.
"""

from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from billfish.errors import UserError
from billfish.formats import layout
from billfish.schemes.base import Op, Tensors
from billfish.schemes.w4a16.scheme import W4A16

STRIP = 8  # outputs: a multiple of the kernels' tiles of 4 or 8
OUTLIER = 16  # times the mean |x| of a row: the threshold with the smallest loss (docs/LOG.md)


def pack(codes: Tensor, scales: Tensor) -> Tensor:
    """(n, k) uint8 codes with zero 8, (n, groups) scales -> (n / STRIP, bytes); uint8 if KleidiAI
    packed them."""
    (n, k), groups = codes.shape, scales.shape[1]
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()
    # the only dtypes that are packed
    scales = scales.to(torch.float32 if groups == 1 else torch.bfloat16)
    operator = torch.ops.aten._dyn_quant_pack_4bit_weight
    packed: Tensor = operator(pairs, scales, None, k // groups, k, n)
    return packed.view(n // STRIP, -1)


def unpack(packed: Tensor, k: int, groups: int) -> Tensor:
    """The codes. KleidiAI has no unpacking, so the position of each code of a strip is found by
    packing the codes' indices, 4 bits at a time. Codes are stored xor a constant, between scales
    and row sums."""
    index = torch.arange(STRIP * k).view(STRIP, k)

    def packed_nibbles(codes: Tensor) -> Tensor:
        return nibbles(pack(codes.to(torch.uint8), torch.zeros(STRIP, groups)))[0]

    # the row sums of both patterns are equal
    zero, turns = packed_nibbles(index * 0), index % 2 * 15
    held = packed_nibbles(turns) != packed_nibbles(15 - turns)
    place = torch.zeros_like(zero, dtype=torch.int64)
    for bit in range(0, index.numel().bit_length(), 4):
        place |= (packed_nibbles(index >> bit & 15) ^ zero).long() << bit
    codes = packed.new_empty(len(packed), STRIP * k)
    codes[:, place[held]] = (nibbles(packed) ^ zero)[:, held]
    return codes.view(-1, k)


def nibbles(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)


def multiply(x: Tensor, packed: Tensor, groups: int) -> Tensor:
    """fp32 (m, k) -> fp32 (m, padded n). For rows of zeros the kernels return 3e-5, hence the
    mask."""
    k, n = x.shape[1], len(packed) * STRIP
    y: Tensor = torch.ops.aten._dyn_quant_matmul_4bit(x, packed.flatten(), k // groups, k, n)
    return y * x.any(1, keepdim=True)


@cache
def works() -> bool:
    """Whether KleidiAI runs here, found by trying: without it the operators pack nothing and are
    slow."""
    codes = (torch.arange(24 * 64).view(24, 64) * 37 // 5 % 16).to(torch.uint8)
    x = torch.arange(-128.0, 128).view(4, 64)
    x[:, 0], x[:, 1] = -128, 127  # then 8 bits represent x exactly
    for groups in (1, 2):
        packed = pack(codes, torch.ones(24, groups))
        if packed.dtype != torch.uint8 or not torch.equal(unpack(packed, 64, groups), codes):
            return False
        if not torch.equal(multiply(x, packed, groups), x @ (codes.float() - 8).T):
            return False
    return True


class KleidiaiOp(Op):
    name: ClassVar[str] = "kleidiai"
    by_name: ClassVar[bool] = True

    @classmethod
    def refuses(cls, scheme: W4A16, n: int, k: int, device: torch.device) -> str | None:
        group = scheme.group_of(k)
        if device.type != "cpu":
            return f"its weights are on {device}; move the model to the CPU with model.to('cpu')."
        if scheme.bits > 4 or scheme.has_g_idx:
            return "its kernels take codes of up to 4 bits, columns of a group side by side."
        if k % 2 or (group != k and group % 32):
            return f"groups of {group}; its kernels take multiples of 32, or one of an even k."
        if not works():
            return "PyTorch has no KleidiAI for this processor: it takes an ARM with dotprod."
        return None

    @classmethod
    def tolerance(cls, scheme: W4A16, tensors: Tensors, x: Tensor) -> float:
        """x is quantized to 8 bits, in steps of 1/255 of a row's range. Codes are multiplied
        relative to the middle of the grid; the share of the zeros is added in fp32."""
        span = x.double().amax(1) - x.double().amin(1)
        scales = tensors["weight_scale"].double()[:, scheme.group_of_column(tensors)]
        weight = (scheme.codes(tensors).double() - scheme.grid.middle) * scales
        return float(span.max() / 255 * weight.abs().sum(1).max())

    def __init__(self, scheme: W4A16, tensors: Tensors) -> None:
        self.scheme, scales = scheme, tensors["weight_scale"]
        self.n, self.groups = scales.shape
        if self.groups > 1 and not torch.equal(scales.bfloat16().to(scales.dtype), scales):
            raise UserError(
                "op 'kleidiai' takes scales of groups in bf16; those of this layer are "
                f'{scales.dtype} and would be rounded. op="cpu" takes them as they are.'
            )
        self.small = {name: part for name, part in tensors.items() if name != "weight_packed"}
        middle, padding = scheme.grid.middle, (0, 0, 0, -self.n % STRIP)
        codes = scheme.codes(tensors) + (8 - middle)
        self.packed = pack(pad(codes, padding), pad(scales, padding))
        self.k = codes.shape[1]
        self.shift: Tensor | None = None  # (groups, n): factor of a group's sum of x, for the zeros
        if not scheme.symmetric:
            self.shift = ((middle - scheme.zeros(tensors).float()) * scales.float()).T.contiguous()

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        *lead, k = x.shape
        if k != self.k:
            raise ValueError(f"activations have {k} columns, the layer takes {self.k}")
        rows = x.reshape(-1, k).float().contiguous()
        size = rows.abs()
        large = size > OUTLIER * size.mean(1, keepdim=True)
        some = large.any(1).nonzero()[:, 0]
        parts = torch.cat([rows.where(~large, 0), rows[some].where(large[some], 0)])
        y, more = multiply(parts, self.packed, self.groups)[:, : self.n].tensor_split([len(rows)])
        span = 2 * size  # makes rows with Inf or NaN NaN; the kernels would return finite values
        y = y.index_add(0, some, more) + (span - span).sum(1, keepdim=True)
        if self.shift is not None:
            y += rows.view(len(rows), self.groups, k // self.groups).sum(2) @ self.shift
        y = y if bias is None else y + bias
        return y.to(x.dtype).view(*lead, self.n)

    def canonical(self) -> dict[str, Tensor]:
        codes = unpack(self.packed, self.k, self.groups)[: self.n] - (8 - self.scheme.grid.middle)
        packed = layout.compressed_tensors(self.scheme.bits).pack(codes)
        return {"weight_packed": packed, **self.small}

    def nbytes(self) -> int:
        shift = 0 if self.shift is None else self.shift.nbytes
        return self.packed.nbytes + shift + sum(part.nbytes for part in self.small.values())
