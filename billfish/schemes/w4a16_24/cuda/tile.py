"""Tile configuration of w4a16_24_decode: a pure function of sizes, tested without a GPU."""

from billfish.kernels import clusters
from billfish.kernels.clusters import STAGE_RECORDS, Tile, pick
from billfish.kernels.device import Gpu
from billfish.schemes.w4a16_24.cuda.arrange import K

THREADS = 320  # two producer warps, eight that multiply
BUFFERS = 2  # of partial sums: a CTA may be one pass ahead of the other
BARRIER_BYTES = 1024  # stages begin on a multiple of it, as the swizzle asks


def pick_tile(m: int, n: int, k: int, record_bytes: int, gpu: Gpu) -> Tile:
    def stage(tokens: int, bands: int) -> int:
        room = STAGE_RECORDS * record_bytes + STAGE_RECORDS // bands * tokens * K * 2
        return -(-room // 1024) * 1024

    return pick(m, n, k, gpu, stage, BUFFERS, BARRIER_BYTES - clusters.BARRIER_BYTES)
