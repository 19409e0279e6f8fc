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
from billfish.kernels.clusters import MOST_TOKENS
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

# Fitted to the searches of 15 of tuned.json's layers on an H200, so that the choice loses little to
# the best (docs/LOG.md, 2026-11-19). With up to 1024 tokens of the other five it loses 0 % in the
# median, 1.8 % on average and 10 % at most, but for 1024 tokens of 27648 x 5120: 21 %, where x does
# not fit in L2.
COSTS = Costs(
    {
        (32, 1): 0.42,
        (32, 2): 0.624,
        (64, 1): 0.456,
        (64, 2): 0.777,
        (96, 1): 0.508,
        (96, 2): 0.911,
        (128, 1): 0.555,
        (128, 2): 1.287,
        (192, 1): 0.752,
        (256, 1): 0.985,
    },
    together=2.703,
    busy=0.15,
    tile_us=1.624,
    meeting_us=(2.222, 1.133),
    cluster_us=0.236,
    clusters=(2,),
    twin_us={
        (32, 1): 0.36,
        (32, 2): 0.785,
        (64, 1): 0.543,
        (64, 2): 0.951,
        (96, 1): 0.594,
        (96, 2): 1.113,
        (128, 1): 0.51,
        (128, 2): 1.268,
        (192, 1): 0.944,
        (256, 1): 1.265,
    },
    spread=0.082,
)
INSTANCES = tuple(COSTS.stage_us)  # (tokens, bands)
MOST_INVARIANT = 1024  # tokens of a launch: bounds the split-K workspace
# the model overrules a measurement for another m if it expects less than this share
OVERRULES = 0.83
FEWEST = 9  # tokens: with 8 w4a16_decode was faster on all 20 layers of tuned.json
LARGE = 1024  # tokens; the most that was measured counts for more
STEP = 32  # tokens: all tiles are multiples, so that these alone decide how many there are
TABLE = Path(__file__).parent / "tuned.json"


def takes_few(m: int, n: int, k_tiles: int, gpu: Gpu) -> bool:
    """Whether as few tokens as w4a16_decode takes run here: the table has them where they were
    measured to be faster: 27648 x 5120 takes w4a16_decode 36.7 us with 16 tokens, as 14 of its 66
    clusters have two bands of outputs and the others one, and w4a16_batch 29.8 us with 24."""
    known = table().get((gpu.name, n, k_tiles), {})
    return m >= FEWEST and any(m <= each <= MOST_TOKENS for each in known)


def pick(m: int, n: int, k_tiles: int, record_bytes: int, gpu: Gpu) -> Launch:
    """The measured configuration, or the best by the cost model."""
    measured = table().get((gpu.name, n, k_tiles), {})
    nearest = min((known for known in measured if m <= known < 2 * m), default=0)
    if m > max(measured, default=0) >= LARGE:
        nearest = max(measured)  # as many tokens as that take its tiles, more take more of them
    cut = measured.get(nearest)
    return _pick(-(-m // STEP), cut, nearest > m, n, k_tiles, record_bytes, gpu)


@functools.cache
def _pick(
    steps: int, cut: Cut | None, between: bool, n: int, k_tiles: int, record_bytes: int, gpu: Gpu
) -> Launch:
    """Of steps of STEP tokens, with the measured configuration if there is one, of more tokens if
    `between`. Remembered: the model takes 0.5 ms, and a prompt may have any number of tokens."""
    sizes = (steps * STEP, n, k_tiles, record_bytes, gpu)
    found = None if cut is None else launch(cut, *sizes)
    if found is not None and not between:
        return found
    best = cheapest(*sizes, COSTS)
    assert best is not None, "one always fits in a Hopper SM"
    # The best configuration for 512 tokens may leave tiles half empty with 272.
    if found is None or (
        model_us(best, k_tiles, gpu, COSTS) < OVERRULES * model_us(found, k_tiles, gpu, COSTS)
    ):
        return best
    return found


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
