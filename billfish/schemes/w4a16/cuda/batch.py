"""Tile configuration of w4a16_batch: a pure function of sizes, tested without a GPU.

Layers that were tuned on this GPU (`billfish bench tune`, tuned.json) get the fastest
configuration; for others the cost model of kernels/tiles.py chooses.
"""

import functools
import json
import math
from dataclasses import replace
from pathlib import Path

from billfish.formats.layout import BRICK_K
from billfish.kernels.device import Gpu
from billfish.kernels.tiles import (
    LEAST_STRIPE,
    Costs,
    Cut,
    Launch,
    cheapest,
    launch,
    model_us,
)

# Fitted to 771 timings of nine layers with 24 to 1024 tokens on an H200 (docs/LOG.md, 2026-11-18).
# On five other layers its choice loses 0.8 % to the best on average, 12 % at most; where x does not
# fit in L2 and stripes are long, it is too hopeful.
COSTS = Costs(
    {
        (32, 1): 0.424,
        (32, 2): 0.755,
        (64, 1): 0.527,
        (64, 2): 0.95,
        (96, 1): 0.63,
        (96, 2): 1.17,
        (128, 1): 0.738,
        (128, 2): 1.41,
        (192, 1): 1.07,
        (256, 1): 1.386,
    },
    together=2.04,
    busy=0.066,
    tile_us=0.54,
    meeting_us=(4.06, 0.67),
    cluster_us=1.49,
    clusters=(2,),
)
INSTANCES = tuple(COSTS.stage_us)  # (tokens, bands)
MOST_INVARIANT = 1024  # tokens of a launch: bounds the split-K workspace
# the model overrules a measurement for another m if it expects less than this share
OVERRULES = 0.83
TABLE = Path(__file__).parent / "tuned.json"


def pick(m: int, n: int, k_tiles: int, record_bytes: int, gpu: Gpu) -> Launch:
    """The measured configuration, or the best by the cost model."""
    best = cheapest(m, n, k_tiles, record_bytes, gpu, COSTS)
    assert best is not None, "one always fits in a Hopper SM"
    measured = table().get((gpu.name, n, k_tiles), {})
    nearest = min((known for known in measured if known >= m), default=None)
    if nearest is None or nearest >= 2 * m:
        return best
    found = launch(measured[nearest], m, n, k_tiles, record_bytes, gpu)
    # The best configuration for 512 tokens may leave tiles half empty with 272.
    wasteful = (
        nearest > m
        and found is not None
        and (model_us(best, k_tiles, gpu, COSTS) < OVERRULES * model_us(found, k_tiles, gpu, COSTS))
    )
    return best if found is None or wasteful else found


def pick_invariant(m: int, n: int, k_tiles: int, record_bytes: int, gpu: Gpu) -> Launch:
    """A split along k that depends on the layer alone: the same order of sums for every m."""
    widths = [each for each, bands in INSTANCES if bands == 1]
    tokens = min((each for each in widths if each >= m), default=max(widths))
    how = launch(Cut(tokens, 1, 0), m, n, k_tiles, record_bytes, gpu)
    assert how is not None
    tiles = how.m_tiles * how.n_tiles
    fit = max(1, min(gpu.sms // how.n_tiles, k_tiles // LEAST_STRIPE))
    parts = max(each for each in range(1, fit + 1) if k_tiles % each == 0)
    if parts == 1:
        return how
    return replace(how, whole=0, blocks=tiles * parts)


@functools.cache
def table() -> dict[tuple[str, int, int], dict[int, Cut]]:
    """(device, n, k tiles) -> tokens -> configuration, from tuned.json."""
    found: dict[tuple[str, int, int], dict[int, Cut]] = {}
    for search in json.loads(TABLE.read_text())["searches"]:
        for layer in search["layers"]:
            key = (search["device"], layer["n"], math.ceil(layer["k"] / BRICK_K))
            found[key] = {int(m): Cut(*cut) for m, cut in layer["cuts"].items()}
    return found
