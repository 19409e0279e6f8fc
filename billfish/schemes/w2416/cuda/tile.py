"""Tile configuration of w2416_decode: a pure function of sizes, tested without a GPU."""

from billfish.kernels.clusters import MOST_TOKENS, STAGE_RECORDS, Tile, pick
from billfish.kernels.device import Gpu
from billfish.schemes.w2416.cuda.arrange import MARK_WORDS, SET_WORDS, TWO_K

THREADS = 384  # two producer warps, two for outliers, eight that multiply
MOST_SETS = 8  # of scales in a 4-bit record
BUFFERS = 1  # of partial sums
MOST_RECORD = 4096 + 4 * (MOST_SETS * SET_WORDS + MARK_WORDS)


def stage_bytes(m: int, bands: int) -> int:
    """Up to 8 tokens only those that there are have room: for one, a ring is twice as deep."""
    records, rows = -(-STAGE_RECORDS * MOST_RECORD // 128) * 128, m if m <= 8 else MOST_TOKENS
    return records + STAGE_RECORDS // bands * rows * TWO_K * 2


def pick_tile(m: int, n: int, gpu: Gpu) -> Tile:
    return pick(m, n, gpu, lambda tokens, bands: stage_bytes(m, bands), BUFFERS)
