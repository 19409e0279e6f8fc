"""Tile configuration of w4a16_decode: a pure function of sizes, tested without a GPU."""

from billfish.formats.layout import BRICK_K
from billfish.kernels.clusters import STAGE_RECORDS, Tile, pick
from billfish.kernels.device import Gpu

THREADS = 320  # two producer warps, eight that multiply
BUFFERS = 2  # of partial sums: a CTA may be one pass ahead of the other


def pick_tile(m: int, n: int, record_bytes: int, gpu: Gpu) -> Tile:
    def stage(tokens: int, bands: int) -> int:
        return STAGE_RECORDS * record_bytes + STAGE_RECORDS // bands * tokens * BRICK_K * 2

    return pick(m, n, gpu, stage, BUFFERS)
