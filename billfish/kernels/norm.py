"""Threads of an RMS norm (`norm.cuh`), which decide the order of its sums: every kernel that has a
norm in it is launched with these, so that all give the same bits. And what such kernels take."""

from torch import Tensor

CHUNK = 8  # numbers in 16 bytes
# As in norm.cuh; tests/kernels/test_layouts.py compares.
THREADS, CHUNKS = 1024, 2
MOST_WIDTH = THREADS * CHUNKS * CHUNK
# Where a product's own blocks norm its input (norm_rows): tokens, inputs, bytes for sums.
MOST_NORMED, NORMED_WIDTH, NORMED_SUMS = 2, THREADS * CHUNK, 256


def refuses(width: int) -> bool:
    return width % CHUNK > 0 or width > MOST_WIDTH


def threads(width: int) -> int:
    """Of a block, which has one token."""
    chunks = width // CHUNK
    each = -(-chunks // THREADS)  # of a thread
    return -(-chunks // each // 32) * 32


def takes(hidden: Tensor, delta: Tensor | None, weight: Tensor) -> bool:
    """Rows of one type on one device, contiguous and aligned."""
    given = [each for each in (hidden, delta, weight) if each is not None]
    alike = all(each.dtype == hidden.dtype and each.device == hidden.device for each in given)
    aligned = all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in given)
    if not alike or not aligned or hidden.dim() != 2 or refuses(hidden.shape[1]):
        return False
    return len(hidden) > 0 and (delta is None or delta.shape == hidden.shape)
