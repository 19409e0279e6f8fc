"""Tile configuration of w2416_decode: a pure function of sizes, tested without a GPU."""

from billfish.kernels.clusters import STAGE_RECORDS, Tile, pick
from billfish.kernels.device import Gpu
from billfish.schemes.w2416.cuda.arrange import MARK_WORDS, SET_WORDS, TWO_K

THREADS = 384  # two producer warps, two for outliers, eight that multiply
MOST_SETS = 8  # of scales in a 4-bit record
BUFFERS = 1  # of partial sums
MOST_RECORD = 4096 + 4 * (MOST_SETS * SET_WORDS + MARK_WORDS)


def stage_bytes(tokens: int, bands: int) -> int:
    records = -(-STAGE_RECORDS * MOST_RECORD // 128) * 128
    return records + STAGE_RECORDS // bands * tokens * TWO_K * 2


def pick_tile(m: int, n: int, gpu: Gpu) -> Tile:
    return pick(m, n, gpu, stage_bytes, BUFFERS)
