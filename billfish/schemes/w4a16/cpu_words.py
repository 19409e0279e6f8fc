"""Memory layout of the CPU kernel: the order of packed words, and its scratch memory.

cpu.py packs layers in it, cpu_kernels.py generates code for it.
"""

import torch
from torch import Tensor

ALONE = 4  # rows of x; with fewer, each thread splits all of x itself: cheaper than a barrier
# Vectors of outputs in a strip: 1 is bound by loads of x, 4 leave registers for only two rows.
VECTORS = 2
BAND = 2  # strips that are decoded together for AMX: they stay in L2
MATRIX_ROOM = 64 + 4 * 1024  # bytes: AMX's tile configuration, and four tiles


def room_bytes(rows: int, chunks: int, blocks: int, threads: int) -> int:
    """Scratch bytes of the kernel: decoded strips for AMX for each thread, and x split into bytes
    with two numbers a chunk, once for all threads or, if rows are few, for each."""
    copies = threads if rows < ALONE else 1
    of_thread = BAND * chunks * blocks * 512 + MATRIX_ROOM
    return threads * of_thread + copies * rows * chunks * (blocks * 16 + 8)


def strip_words(codes: Tensor, chunk: int, bits: int, width: int) -> Tensor:
    """(n, k) uint8 codes -> packed words in the order that cpu_kernels.py reads."""
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
