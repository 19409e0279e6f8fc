"""Launches of w4a16_experts and w4a16_experts_batch: pure functions of sizes, tested without a GPU.

The host knows how many pairs of a token and an expert there are, not how they are spread: sizes
hold for every spread, and choices suit a random one. Limits of few tokens are reasoned, not timed.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from billfish.kernels import routing, tiles
from billfish.kernels.clusters import (
    BAND,
    BARRIER_BYTES,
    CLUSTER,
    MOST_STAGES,
    STAGE_RECORDS,
    sums_bytes,
)
from billfish.kernels.device import Gpu
from billfish.kernels.tiles import SLICE, Cut

THREADS = 320  # two producer warps, eight that multiply
TOKENS = (8, 16)  # of an item of w4a16_experts
# Of w4a16_experts_batch, us: a stage by rows of an item and bands, a tile of 32 tokens and one
# band, and what a split one costs. They were fitted to w4a16_batch's times (LOG 2026-11-18); its
# own costs of now are fitted to what they choose. Where tiles are split no other instances are
# cheaper, but (256, 1) with thousands of rows an expert, by 1 %.
STAGE_US = {(32, 2): 0.805, (64, 2): 1.013, (96, 2): 1.247, (128, 2): 1.503}
TILE_US, MEETING_US = 0.54, (4.06, 0.67)
INSTANCES = tuple(STAGE_US)
ALIGN = 128  # of stages
MOST_PAIRS = 2048  # that a block sorts by itself: 7 for each thread, 4 KB
FEW_ROWS = 8  # of an expert: beyond, every second item of 16 would not be the expert's only one
# Bands of a cluster up to which only one CTA for each SM is launched: the next kernel's then fetch
# their weights beside it (PDL).
ONE_CTA_BANDS = 4


@dataclass(frozen=True)
class Few:
    """A launch of w4a16_experts."""

    tokens: int  # of an item at most: template parameter
    blocks: int
    stages: int
    smem: int
    own: int  # items of a cluster, at most
    table_bytes: int


def runs_few(pairs: int, experts: int) -> bool:
    """Whether w4a16_experts runs them: at the speed of memory, as long as most experts have one
    item."""
    return pairs <= MOST_PAIRS and pairs <= FEW_ROWS * experts


@lru_cache(4096)
def few(pairs: int, experts: int, n: int, record_bytes: int, gpu: Gpu) -> Few:
    tokens = 8 if 2 * pairs <= FEW_ROWS * experts else 16
    bands, clusters = -(-n // BAND), gpu.sms // CLUSTER
    if routing.likely_experts(pairs, experts) * bands > ONE_CTA_BANDS * clusters:
        clusters *= 2
    share = -(-routing.most_items(pairs, experts, tokens) * bands // clusters)
    own = share // bands + 2  # a share may begin and end within items
    table = -(-routing.table_bytes(pairs, experts, own, tokens) // ALIGN) * ALIGN
    fixed = BARRIER_BYTES + 2 * sums_bytes(tokens) + table
    stage = STAGE_RECORDS * record_bytes + tokens * SLICE * 2
    stages = min(MOST_STAGES, (gpu.half - fixed) // stage)
    return Few(tokens, clusters * CLUSTER, stages, fixed + stages * stage, own, table)


@lru_cache(4096)
def many(
    pairs: int, experts: int, layer: tuple[tuple[int, int], ...], record_bytes: int, gpu: Gpu
) -> tuple[tiles.Launch, ...]:
    """Launches of w4a16_experts_batch for a layer's linears, (n, k tiles) each, which share items:
    long ones decode weights once, and leave rows empty."""

    def us(instance: tuple[int, int]) -> float:
        items = routing.likely_items(pairs, experts, instance[0])
        return sum(many_us(instance, items, *linear, gpu) for linear in layer)

    best = min(INSTANCES, key=us)
    return tuple(launch(Cut(*best, 0), *linear, record_bytes, gpu) for linear in layer)


def many_us(instance: tuple[int, int], items: float, n: int, k_tiles: int, gpu: Gpu) -> float:
    """Expected time, as w4a16_batch's; tiles are split where that is quicker."""
    each = items * -(-n // Cut(*instance, 0).outputs) / gpu.sms  # tiles of an SM
    size, (constant, more) = instance[0] * instance[1] / 32, MEETING_US
    tile = k_tiles * STAGE_US[instance] + TILE_US * size
    return min(math.ceil(each) * tile, each * tile + constant + more * size)


def launch(cut: Cut, n: int, k_tiles: int, record_bytes: int, gpu: Gpu) -> tiles.Launch:
    """On all SMs: blocks find out how many tiles there are."""
    how = tiles.launch(cut, cut.tokens, n, k_tiles, record_bytes, gpu)
    assert how is not None, "each fits in a Hopper SM"
    return replace(how, blocks=gpu.sms * cut.per_sm)
