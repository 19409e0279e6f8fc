"""Tile configuration of w2416_decode: a pure function of sizes, tested without a GPU."""

from billfish.kernels.clusters import MOST_TOKENS, STAGE_RECORDS, Tile, pick
from billfish.kernels.device import Gpu
from billfish.schemes.w2416.cuda import outliers
from billfish.schemes.w2416.cuda.arrange import MARK_WORDS, SET_WORDS, TWO_K

THREADS = 320  # two producer warps, eight that multiply
MOST_SETS = 8  # of scales in a 4-bit record
BUFFERS = 1  # of partial sums
FEWEST_STAGES = 2  # of a ring
SPREAD_BYTES = 8 * 1024  # of outliers (outliers.cuh), eight warps
MOST_RECORD = 4096 + 4 * (MOST_SETS * SET_WORDS + MARK_WORDS)


def list_bytes(longest: int) -> int:
    """Room for a record's outliers."""
    return longest * outliers.SET_WORDS * 4


def stage_bytes(m: int, bands: int, longest: int) -> int:
    """Up to 8 tokens only those that there are have room: for one, a ring is twice as deep."""
    records, rows = -(-STAGE_RECORDS * MOST_RECORD // 128) * 128, m if m <= 8 else MOST_TOKENS
    records += STAGE_RECORDS * list_bytes(longest)
    return records + STAGE_RECORDS // bands * rows * TWO_K * 2


def pick_tile(m: int, n: int, k: int, longest: int, gpu: Gpu) -> Tile:
    def stage(tokens: int, bands: int) -> int:
        return stage_bytes(m, bands, longest)

    return pick(m, n, k, gpu, stage, BUFFERS, SPREAD_BYTES)


def fits(n: int, k: int, longest: int, gpu: Gpu) -> bool:
    """Whether lists of outliers leave room for a ring; for all m or none, so that a row's sums do
    not depend on m."""
    return pick_tile(MOST_TOKENS, n, k, longest, gpu).stages >= FEWEST_STAGES
