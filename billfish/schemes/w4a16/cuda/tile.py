"""Tile configuration of w4a16_decode: a pure function of sizes, tested without a GPU."""

from billfish.formats.layout import BRICK_K
from billfish.kernels.clusters import STAGE_RECORDS, Tile, pick
from billfish.kernels.device import Gpu

BUFFERS = 2  # of partial sums: a CTA may be one pass ahead of the other


def sums_apart(group: int, tokens: int, bands: int) -> bool:
    """Whether a warp of its own sums x (decode.cuh)."""
    return tokens == 16 and bands == 4 and group == 128


def threads(group: int, tokens: int, bands: int) -> int:
    """Two producer warps, eight that multiply, and one for sums of x."""
    return 352 if sums_apart(group, tokens, bands) else 320


def pick_tile(m: int, n: int, record_bytes: int, group: int, gpu: Gpu) -> Tile:
    """`group`: inputs of a record that share a scale."""

    def stage(tokens: int, bands: int) -> int:
        inputs = STAGE_RECORDS // bands * tokens * BRICK_K * 2
        sums = BRICK_K // group * tokens * 8 if sums_apart(group, tokens, bands) else 0
        return STAGE_RECORDS * record_bytes + inputs + sums

    return pick(m, n, gpu, stage, BUFFERS)
