"""Tile configuration of w4a16_decode: a pure function of sizes, tested without a GPU."""

import math

from billfish.formats.layout import BRICK_K
from billfish.kernels import norm
from billfish.kernels.clusters import (
    BAND,
    CLUSTER,
    LARGE_CLUSTER,
    MORE,
    MOST_TOKENS,
    STAGE_RECORDS,
    Tile,
    pick,
)
from billfish.kernels.device import Gpu

TOKENS = (2, 8, MOST_TOKENS)  # of the kernel: x of two leaves room for more stages
# Bands of a block, and blocks of a cluster
SHARES = ((1, CLUSTER), (2, CLUSTER), (4, CLUSTER), (4, LARGE_CLUSTER))
GROUP_BYTES = 160  # of a record, at most: scales and zeros of a group
WORD_BYTES = 4096
# Times as long as with groups of 128, 9 to 16 tokens: by the groups of a record (of 64, of 32), and
# for one, two or more bands of a cluster; within 0.05 of the medians of
# docs/bench/h200-few-w4a16.json.
SMALLER = {2: (1.05, 1.2, 1.12), 4: (1.17, 1.38, 1.42)}
LEAST_STAGES = 3  # beside normed rows: with fewer, weights would not arrive in time


def sums_apart(bands: int) -> bool:
    """As in decode.cuh."""
    return bands > 1


def threads(bands: int) -> int:
    """Two producer warps, eight that multiply, and two that sum x."""
    return 32 * (10 + 2 * sums_apart(bands))


def groups_of(record_bytes: int) -> int:
    """Groups of a record's 128 inputs."""
    return -(-(record_bytes - WORD_BYTES) // GROUP_BYTES)


def pick_tile(m: int, n: int, k: int, record_bytes: int, gpu: Gpu, besides: int = 0) -> Tile:
    groups = groups_of(record_bytes)

    def stage(tokens: int, bands: int) -> int:
        sums = groups * 4 if sums_apart(bands) else 0
        slices = 2 if bands == 1 and tokens == MOST_TOKENS else STAGE_RECORDS // bands
        x = slices * (tokens * BRICK_K * 2 + max(tokens, 8) * sums)
        return sum(-(-part // 128) * 128 for part in (slices * bands * record_bytes, x))

    return pick(m, n, k, gpu, stage, 1, besides, True, TOKENS)


def expected_us(n: int, k_tiles: int, record_bytes: int, gpu: Gpu) -> float:
    """Of 9 to 16 tokens: a constant, and the slices of a CTA with its bands. On 20 layers of an
    H200 with groups of 128 it is 16 % off at most."""
    how = pick_tile(MOST_TOKENS, n, k_tiles * BRICK_K, record_bytes, gpu)
    share = math.ceil(math.ceil(n / BAND) * how.cluster / how.blocks)
    slices, groups = math.ceil(k_tiles / how.cluster), groups_of(record_bytes)
    longer = SMALLER[groups][min(share, 3) - 1] if groups > 1 else 1
    if how.blocks > gpu.sms:  # two CTAs an SM
        return longer * (1.5 + 0.3 * slices * share)
    if how.cluster > CLUSTER:
        return longer * (3.7 + 0.45 * slices)
    return longer * (2.65 + 0.19 * slices if share == 1 else 3.0 + 0.3 * slices)


def pick_normed(m: int, n: int, k_tiles: int, record_bytes: int, gpu: Gpu) -> Tile | None:
    """Of w4a16_normed, with the bands of pick_tile and so its order of sums. None where the norm
    does not fit: two CTAs an SM, and each row of the sum stored by a CTA of its own."""
    cluster = pick_tile(m, n, k_tiles * BRICK_K, record_bytes, gpu).cluster
    rows = norm.NORMED_SUMS + m * -(-k_tiles // cluster) * BRICK_K * 2
    how = pick_tile(m, n, k_tiles * BRICK_K, record_bytes, gpu, rows)
    fits = how.smem <= gpu.half + MORE and how.stages >= LEAST_STAGES and how.blocks >= m
    return how if m <= norm.MOST_NORMED and fits else None
