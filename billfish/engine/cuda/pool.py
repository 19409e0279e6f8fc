"""The KV cache as the CUDA kernels read it: records of 64 tokens of one KV head.

    record   [K][V][grids]   K token by token, V in groups of 8 tokens, both in fragment order of
                             mma.m16n8k16: attention multiplies what it loads
    grids    k_step, k_low, v_step, v_low of each token (kv8 and kv4), in the model's dtype

`places` is the layout: where each number of a record lies, in units of the format's bits. heads.cuh
writes the same places; read and write here are its oracle, with torch's operators on any device.
No two tokens share a byte, and the numbers are those of kv/cache.py: Kv16, Kv8, Kv4Plain.
"""

from typing import ClassVar

import torch
from torch import Tensor

from billfish.engine.kv.cache import Room
from billfish.engine.kv.codes import encode_tokens, largest
from billfish.errors import UserError

PAGE_TOKENS = 64
HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16)


class Pool:
    """One tensor of bytes, (layers, pages, kv_heads, record_bytes); see POOLS for its kinds."""

    name: ClassVar[str]
    bits: ClassVar[int]

    def __init__(self, room: Room) -> None:
        page_tokens, head_dim, dtype = room.page_tokens, room.head_dim, room.dtype
        if page_tokens != PAGE_TOKENS or head_dim not in HEAD_DIMS or dtype not in DTYPES:
            raise UserError(
                f"Records of K and V are {PAGE_TOKENS} tokens a page, head_dim 64 or 128, fp16 or "
                f"bf16; not {page_tokens}, {head_dim}, {dtype}."
            )
        self.page_tokens, self.head_dim, self.dtype = page_tokens, head_dim, dtype
        self.limit = largest(dtype)
        shape = (room.layers, room.pages, room.kv_heads, self.record_bytes(head_dim))
        self.records = torch.zeros(shape, dtype=torch.uint8, device=room.device)
        self._places = places(self.bits, head_dim).to(room.device)
        self._grids = grid_places(self.bits, head_dim).to(room.device)

    def write(
        self, layer: int, slots: Tensor, k: Tensor, v: Tensor, feedback: Tensor | None = None
    ) -> None:
        """`feedback`: as codes.encode takes it, for K that was rotated."""
        numbers = torch.stack((k, v), 1)  # (tokens, 2, kv_heads, head_dim)
        page, token = slots[:, None, None] // PAGE_TOKENS, slots % PAGE_TOKENS
        head = torch.arange(k.shape[1], device=k.device)[:, None]
        if self.bits == 16:
            codes = numbers.to(self.dtype).view(torch.int16)
        else:
            codes, step, low = encode_tokens(numbers, self.bits, self.dtype, feedback)
            grids = torch.cat((step, low), -1).transpose(1, 2).flatten(2)  # k, k, v, v
            stored = self.records[layer].view(self.dtype)
            stored[page, head, self._grids[token][:, None]] = grids
        # Sorted by place, so that two neighbouring 4-bit codes make a byte.
        stored = self.records[layer].view(codes.dtype)
        for i in range(2):
            at, order = self._places[i, token][:, None].sort()
            mine = codes[:, i].gather(-1, order.expand_as(codes[:, i]))
            if self.bits == 4:
                at, mine = at[..., ::2] // 2, mine[..., ::2] | mine[..., 1::2] << 4
            stored[page, head, at] = mine

    def read(self, layer: int, pages: Tensor, count: int) -> tuple[Tensor, Tensor]:
        records = self.records[layer].index_select(0, pages[: -(-count // PAGE_TOKENS)])
        units = _units(records, self.bits)[:, :, self._places]  # (pages, kv_heads, 2, 64, head_dim)
        if self.bits == 16:
            numbers = units.view(self.dtype)
        else:
            grids = records.view(self.dtype)[:, :, self._grids].float()  # (pages, kv_heads, 64, 4)
            step, low = grids.view(*grids.shape[:3], 2, 2).movedim(-2, 2).chunk(2, -1)
            numbers = units.float().mul_(step).add_(low).to(self.dtype)
        k, v = (each.transpose(1, 2).flatten(0, 1)[:count] for each in numbers.unbind(2))
        return k.contiguous(), v.contiguous()

    def queries(self, layer: int, q: Tensor) -> Tensor:
        return q  # whoever stores K has rotated both

    def nbytes(self) -> int:
        return self.records.nbytes

    @classmethod
    def record_bytes(cls, head_dim: int) -> int:
        grids = 0 if cls.bits == 16 else PAGE_TOKENS * 8
        return PAGE_TOKENS * 2 * head_dim * cls.bits // 8 + grids

    @classmethod
    def bytes_a_token(cls, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        assert dtype in DTYPES
        return layers * kv_heads * cls.record_bytes(head_dim) // PAGE_TOKENS


class Pool16(Pool):
    name: ClassVar[str] = "kv16"
    bits: ClassVar[int] = 16


class Pool8(Pool):
    name: ClassVar[str] = "kv8"
    bits: ClassVar[int] = 8


class Pool4(Pool):
    """Codes the numbers it is given: K comes rotated."""

    name: ClassVar[str] = "kv4"
    bits: ClassVar[int] = 4


POOLS: dict[str, type[Pool]] = {kind.name: kind for kind in (Pool16, Pool8, Pool4)}


def places(bits: int, head_dim: int) -> Tensor:  # (2, 64, head_dim) int64, of K and of V
    """Index of the unit of `bits` bits that holds each number of a record."""
    t, channel = torch.arange(PAGE_TOKENS)[:, None], torch.arange(head_dim)
    # K: four chunks a token, one for each lane of a quad, of 8 channels out of every 32. A mask
    # selects neighbours, x0 and x1, from the two halves of a word; x2 and x3 are in the next units.
    j, c, i = channel // 32, channel // 8 % 4, channel % 8
    chunk = t * head_dim + c * (head_dim // 4) + j * 8
    # V: lane (r, c) of a group of 8 tokens has tokens 2c and 2c + 1 of channels r, r + 8, ...
    lane, group, odd = channel % 8 * 4 + t % 8 // 2, t // 8, t % 2
    n = channel // 8
    if bits == 4:
        k = chunk + i // 2 + i % 2 * 4
        v = lane * (head_dim // 4) + n // 4 * 8 + odd * 4 + n % 4
    elif bits == 8:
        k = chunk + i // 4 * 4 + i % 4 // 2 + i % 2 * 2
        v = n // 8 * 512 + lane * 16 + n // 2 % 4 * 4 + odd * 2 + n % 2
    else:  # in order, but odd tokens in the other banks
        k = t * head_dim + (n ^ odd * 4) * 8 + i
        v = n // 4 * 256 + lane * 8 + n % 4 * 2 + odd
    return torch.stack((k, PAGE_TOKENS * head_dim + group * (8 * head_dim) + v))


def grid_places(bits: int, head_dim: int) -> Tensor:  # (64, 4) int64
    """Index of a token's k_step, k_low, v_step, v_low among a record's 16-bit numbers."""
    first = PAGE_TOKENS * 2 * head_dim * bits // 16
    return first + torch.arange(PAGE_TOKENS * 4).view(PAGE_TOKENS, 4)


def _units(records: Tensor, bits: int) -> Tensor:  # (..., bytes) uint8 -> (..., units)
    if bits == 16:
        return records.view(torch.int16)
    if bits == 8:
        return records
    return torch.stack((records & 15, records >> 4), -1).flatten(-2)
