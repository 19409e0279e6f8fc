"""How a CPU's kernel finds a layer in memory: the order of its words, and its scratch memory.

cpu.py arranges by it, cpu_kernels.py writes code for it.
"""

import torch
from torch import Tensor

ALONE = 4  # fewer rows of x each thread splits for itself: that takes less than to meet
# Of outputs in a strip: with one, loads of x are the limit; 4 leave registers for two rows only.
VECTORS = 2
BAND = 2  # strips that are decoded at the same time, for AMX: they stay in L2
MATRIX_ROOM = 64 + 4 * 1024  # bytes: what registers of AMX are, and four of them


def room_bytes(rows: int, chunks: int, blocks: int, threads: int) -> int:
    """What the kernel writes to: of each thread, decoded strips for AMX; of all, x as bytes with
    two numbers a chunk, and so of each where rows are few."""
    copies = threads if rows < ALONE else 1
    of_thread = BAND * chunks * blocks * 512 + MATRIX_ROOM
    return threads * of_thread + copies * rows * chunks * (blocks * 16 + 8)


def strip_words(codes: Tensor, chunk: int, bits: int, width: int) -> Tensor:
    """(n, k) uint8 -> words as cpu_kernels has them."""
    n, k = codes.shape
    planes = [codes] if bits <= 4 else [codes >> 4, codes & 15]
    # (strips, width, chunks, blocks, 2, 4) of each plane
    parts = [plane.view(n // width, width, k // chunk, chunk // 8, 2, 4) for plane in planes]
    pairs = torch.stack([part[..., 0, :] | part[..., 1, :] << 4 for part in parts], 3)
    return pairs.permute(0, 2, 3, 4, 1, 5).contiguous()


def codes_of(words: Tensor, bits: int) -> Tensor:
    """The inverse of strip_words."""
    pairs = words.permute(0, 4, 1, 2, 3, 5)  # (strips, width, chunks, planes, blocks, 4)
    codes = torch.stack([pairs & 15, pairs >> 4], -2).flatten(-2)
    codes = codes[:, :, :, 0] if bits <= 4 else codes[:, :, :, 0] << 4 | codes[:, :, :, 1]
    return codes.reshape(words.shape[0] * words.shape[4], -1)
