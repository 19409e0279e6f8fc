"""Threads of an RMS norm (`norm.cuh`), which decide the order of its sums: every kernel that has a
norm in it is launched with these, so that all give the same bits."""

CHUNK = 8  # numbers in 16 bytes
# As in norm.cuh; tests/kernels/test_layouts.py compares.
THREADS, CHUNKS = 1024, 2
MOST_WIDTH = THREADS * CHUNKS * CHUNK


def refuses(width: int) -> bool:
    return width % CHUNK > 0 or width > MOST_WIDTH


def threads(width: int) -> int:
    """Of a block, which has one token."""
    chunks = width // CHUNK
    each = -(-chunks // THREADS)  # of a thread
    return -(-chunks // each // 32) * 32
