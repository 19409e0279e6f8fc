"""Numbers of K and V <-> codes of 8 or 4 bits: the arithmetic that every coded cache shares.

    number = code * step + low      step = (max - min) / (2^bits - 1), rounded up

The grid is not formats/grid.py's: that one includes 0 and stores an integer zero point, which
suits weights. Here the zero point is a token's own minimum, so that heads with a bias (Qwen2's K)
lose no levels.
"""

from functools import cache

import torch
from torch import Tensor

from billfish.errors import UserError

BLOCKS = 4  # of channels, coded one after the other with error feedback; store.cuh: kBlocks
# The integer of each dtype's width: adding 1 to its bits gives the next larger positive number.
INTEGERS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def encode_tokens(
    numbers: Tensor,  # (tokens, K and V, kv_heads, head_dim)
    bits: int,
    dtype: torch.dtype,  # of step and low
    feedback: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, step and low, the latter two per token and head."""
    limit = largest(dtype)
    numbers = numbers.float().clamp(-limit, limit)  # NaN stays
    low, high = torch.aminmax(numbers, dim=-1, keepdim=True)
    low = low.to(dtype)
    step = round_up((high - low.float()) / ((1 << bits) - 1), dtype)
    return encode(numbers, step.float(), low.float(), bits, feedback), step, low


def encode(
    numbers: Tensor,  # (tokens, K and V, kv_heads, head_dim) fp32; overwritten
    step: Tensor,
    low: Tensor,
    bits: int,
    feedback: Tensor | None = None,  # (kv_heads, head_dim, head_dim): Rotation's, for K
) -> Tensor:
    """Nearest codes, uint8. With `feedback` the channels of K are coded block by block: the
    rounding error of a block, times its rows of `feedback`, is added to the later channels."""
    steps = numbers.sub_(low).div_(step)
    if feedback is not None:
        keys = steps[:, 0]
        for now, later in channel_blocks(keys.shape[-1]):
            error = keys[..., now] - _nearest(keys[..., now].clone(), bits)
            keys[..., later] += torch.einsum("thi,hij->thj", error, feedback[:, now, later])
    return _nearest(steps, bits).to(torch.uint8)


def channel_blocks(size: int) -> list[tuple[slice, slice]]:
    """(channels that are coded together, all later ones); without the last block, which has none
    after it."""
    step = max(1, size // BLOCKS)
    return [(slice(i, i + step), slice(i + step, size)) for i in range(0, size - step, step)]


@cache
def largest(dtype: torch.dtype) -> float:
    """Numbers are clamped here: max - min stays finite in fp32, and max rounded up in dtype."""
    most = min(torch.finfo(dtype).max * 31 / 32, torch.finfo(torch.float32).max / 4)
    return float(torch.tensor(most).to(dtype))


def round_up(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32, not negative -> the smallest number of `dtype` that is not less."""
    rounded = numbers.to(dtype)
    short = rounded.float() < numbers
    integer = INTEGERS[dtype]
    return (rounded.view(integer) + short.to(integer)).view(dtype)


def code_bytes(bits: int, head_dim: int) -> int:
    """Of one head of one token."""
    if head_dim * bits % 8:
        raise UserError(
            f"head_dim={head_dim}: {bits}-bit codes lie two to a byte, so it must be even. "
            "Take kv8 or kv16 for this model."
        )
    return head_dim * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """(..., head_dim) uint8 -> (..., bytes). A byte holds codes j and j + head_dim / 2: unlike
    neighbours, both halves are contiguous slices."""
    if bits == 8:
        return codes
    low, high = codes.chunk(2, -1)
    return low | (high << 4)


def unpack(words: Tensor, bits: int) -> Tensor:
    """(..., bytes) uint8 -> (..., head_dim) fp32, a new tensor."""
    if bits == 8:
        return words.float()
    half = words.shape[-1]
    codes = torch.empty((*words.shape[:-1], 2 * half), device=words.device)
    codes[..., :half] = words & 15
    codes[..., half:] = words >> 4
    return codes


def _nearest(steps: Tensor, bits: int) -> Tensor:
    """In place. NaN, and 0 / 0 where the step is 0, become code 0: NaN converted to uint8 would be
    another byte on another machine."""
    return steps.round_().nan_to_num_(0.0).clamp_(0, (1 << bits) - 1)
