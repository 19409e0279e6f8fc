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

# A few dozen timings; one CTA keeps an SM busy.
COSTS = Costs(
    {
        (32, 1): 0.33,
        (32, 2): 0.55,
        (64, 1): 0.45,
        (64, 2): 0.75,
        (96, 1): 0.65,
        (96, 2): 1.15,
        (128, 1): 0.82,
        (128, 2): 1.4,
        (192, 1): 1.1,
        (256, 1): 1.4,
    },
    together=2.0,
    cluster_us=1.5,
    clusters=(2, 3, 4),
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
