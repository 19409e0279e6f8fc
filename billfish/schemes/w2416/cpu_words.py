"""Memory layout of the CPU kernel: words by bands, the order of their nibbles, scratch memory.

cpu.py arranges layers in it, cpu_kernels.py generates code for it.
"""

import torch
from torch import Tensor

from billfish.kernels.cpu import BYTES
from billfish.schemes.w2416.scheme import ZERO, ZERO_STEP
from billfish.schemes.w2416.shares import BAND, GROUP, PLACES

SIXTEENTHS = 16  # of a step: zeros are whole numbers of them
ZEROS = tuple(round((ZERO + ZERO_STEP * i) * SIXTEENTHS) for i in range(4))
assert all(z == (ZERO + ZERO_STEP * i) * SIXTEENTHS for i, z in enumerate(ZEROS))
# Of a group's inputs in whole steps: the sum over code - zero, in sixteenths, is below 2^24 and
# so exact in fp32.
TOP = min(BYTES, 2**24 // (GROUP * max(*ZEROS, 3 * SIXTEENTHS - ZEROS[0])))
COLUMNS = PLACES // BAND  # an outlier's place in memory is row * COLUMNS + column: no division

ALONE = 4  # rows of x; with fewer, each thread splits all of x itself: cheaper than a barrier
ROWS = 8  # of x in a tile, at most
STEPS = 8  # second-order scales that are decoded at once

# Nibble j of 64 bits in memory is number ORDER[j] of the canonical 64 bits.
# Scales: even rows in the lower 32 bits, odd rows in the upper, as 32-bit lanes of a broadcast.
SCALE_ORDER = tuple(2 * (j % 8) + j // 8 for j in range(BAND))
# 4-bit codes: the bytes of word v hold, with either nibble q, inputs 2v + q, 4 + 2v + q, 8 + ...:
# every fourth input, as the bytes of shifted 2-bit words do.
CODE_ORDER = tuple(4 * (j % 8 // 2) + 2 * (j // 8) + j % 2 for j in range(GROUP))


def own_bytes(groups: int) -> int:
    """Scratch bytes of a thread: sums of a tile, its factors, a decoded band."""
    return ROWS * (BAND + groups + STEPS) * 4 + groups * (GROUP * BAND * 2)


def row_bytes(groups: int) -> int:
    """Scratch bytes of a row of x: steps, zeros' parts of the sums, and numbers in whole steps."""
    return (groups + STEPS) * 4 + groups * (16 + 2 * GROUP)


def room_bytes(rows: int, groups: int, threads: int) -> int:
    copies = threads if rows < ALONE else 1
    return threads * own_bytes(groups) + copies * rows * row_bytes(groups)


def by_band(of_rows: Tensor) -> Tensor:  # (n, g, ...) -> (bands, g, ..., 16)
    n, *rest = of_rows.shape
    return of_rows.reshape(n // BAND, BAND, *rest).movedim(1, -1).contiguous()


def by_row(of_bands: Tensor) -> Tensor:  # the inverse
    return of_bands.movedim(-1, 1).flatten(0, 1).contiguous()


def reordered(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """Nibble j of every 64 bits is nibble order[j] of the given ones. `words` are contiguous."""
    if not words.numel():
        return words.clone()
    pairs = words.view(torch.uint8).view(-1, 8)
    nibbles = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)[:, list(order)].view(-1, 8, 2)
    made = nibbles[..., 0] | nibbles[..., 1] << 4
    return made.view(*words.shape[:-1], -1).view(words.dtype)


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(j) for j in range(len(order)))
