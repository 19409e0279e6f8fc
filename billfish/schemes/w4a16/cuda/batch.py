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
from billfish.kernels import tiles
from billfish.kernels.clusters import MOST_TOKENS
from billfish.kernels.device import Gpu
from billfish.kernels.tiles import LEAST_STRIPE, TEAMS, Costs, Cut, Instance, Launch, model_us
from billfish.schemes.w4a16.cuda import tile

launch = functools.partial(tiles.launch, held=tiles.LINES)
cheapest = functools.partial(tiles.cheapest, held=tiles.LINES)

# Beside all 38 that a search on an H200 timed, before results were stored as lines, these lost
# 0.1 % on average and 7 % at most, in 20 layers with 24 to 1024 tokens. Now (224, 1), (128, 2) and
# (144, 1, 3) beside them would gain 1.4 % at most. Each takes 0.4 s to compile. Those of 16 tokens
# are for 9 to 16, where w4a16_decode is slower.
INSTANCES: tuple[Instance, ...] = (
    *((16, 1), (16, 2), (16, 1, 3), (16, 2, 3)),
    *((32, 1), (48, 1), (64, 1), (80, 1), (96, 1), (112, 1), (128, 1)),
    *((160, 1), (192, 1), (208, 1), (256, 1)),
    *((32, 2), (48, 2), (64, 2)),
    *((32, 1, 3), (80, 1, 3), (96, 1, 3), (112, 1, 3), (128, 1, 3)),
)


def stage_us(tokens: int, bands: int, teams: int = TEAMS) -> float:
    """Tensor cores multiply while others decode: with 110 to 130 tokens or more they take longer;
    with fewer decoding does, which hides two fifths of the multiplication."""
    outputs = bands * teams  # in units of 64
    multiply = 0.00221 * tokens * outputs  # at 1.8 GHz; clocks fall under load
    decode = 0.0907 + 0.0782 * outputs + 0.00128 * tokens * outputs
    return max(multiply, decode)


# Fitted to the search (docs/bench/h200-tiles-w4a16.json), so that the choice loses little to the
# best: with 24 to 1024 tokens 0.2 % in the median, 1.4 % on average and 17 % at most; of five
# layers left out of the fit, four times, 0.2 %, 1.6 % and 17 %. Timings that are not repeated in
# turns scatter so much that a perfect model would seem to lose 0.8 % on average and 10 to 22 % at
# most; where clocks were steady (65 points) the worst of layers left out is 7 %. Twins are as fast
# as others in the median.
STAGES = {each: stage_us(*each) for each in INSTANCES}
COSTS = Costs(
    STAGES,
    together=1.97,
    busy=0.412,
    tile_us=0.472,
    cluster_us=0.106,
    cluster_tile_us=0.256,
    tile_constant_us=0.33,
    launch_us=1.6,  # no choice among tiles depends on it; with 16 tokens times are then right
    clusters=(2,),
    twin_us=STAGES,
    spread=0.12,
    far=0.067,
    sums_us=(0.163, 0.202),
)
MOST_INVARIANT = 1024  # tokens of a launch: bounds the split-K workspace
# the model overrules a measurement for another m if it expects less than this share
OVERRULES = 0.83
FEWEST = 9  # tokens: with 8 w4a16_decode was faster than tiles of 32 on all layers of tuned.json
# In other layers than the table's, at least as large as its smallest, and in its layers with groups
# of 64 and 32, which its searches had not, w4a16_batch is taken if its expected time is less than
# this share of w4a16_decode's. On the table's 20 layers, taken as unknown, the choice then costs
# 7 % at most, and with smaller groups (docs/bench/h200-few-w4a16.json) 7 % at most and 0.2 % on
# average.
SURELY, SMALLEST = 0.91, 3584 * 3584
LARGE = 1024  # tokens; the most that was measured counts for more
# Choices are made for multiples of so many tokens, as tiles are, and of more beyond MANY.
STEP, MANY, LARGE_STEP = 16, 512, 64
TABLE = Path(__file__).parent / "tuned.json"


def takes_few(m: int, n: int, k_tiles: int, record_bytes: int, gpu: Gpu) -> bool:
    """Whether as few tokens as w4a16_decode takes run here: where they were measured to be faster,
    or in other layers are expected to be. 27648 x 5120 takes w4a16_decode 28.1 us with 16 tokens,
    and w4a16_batch 26.2."""
    if not FEWEST <= m <= MOST_TOKENS:
        return False
    known, smaller = table().get((gpu.name, n, k_tiles)), tile.groups_of(record_bytes) > 1
    if known is not None and any(m <= each <= MOST_TOKENS for each in known):
        return True
    if known is not None and not smaller:
        return False
    return _expected_faster(n, k_tiles, record_bytes, gpu)


@functools.cache
def _expected_faster(n: int, k_tiles: int, record_bytes: int, gpu: Gpu) -> bool:
    if n * k_tiles * BRICK_K < SMALLEST:
        return False
    best = cheapest(MOST_TOKENS, n, k_tiles, record_bytes, gpu, COSTS)
    assert best is not None, "one always fits in a Hopper SM"
    few = tile.expected_us(n, k_tiles, record_bytes, gpu)
    return model_us(best, k_tiles, gpu, COSTS) < SURELY * few


def pick(m: int, n: int, k_tiles: int, record_bytes: int, gpu: Gpu) -> Launch:
    """The measured configuration, or the best by the cost model."""
    measured = table().get((gpu.name, n, k_tiles), {})
    nearest = min((known for known in measured if m <= known < 2 * m), default=0)
    if m > max(measured, default=0) >= LARGE:
        nearest = max(measured)  # as many tokens as that take its tiles, more take more of them
    step = STEP if m <= MANY else LARGE_STEP
    more = math.ceil(m / step) * step
    cut = _pick(more, measured.get(nearest), nearest > m, n, k_tiles, record_bytes, gpu)
    sizes = (m, n, k_tiles, record_bytes, gpu)
    how = launch(cut, *sizes) or launch(replace(cut, stripes=0), *sizes)  # stripes were whole tiles
    assert how is not None
    return how


@functools.cache
def _pick(
    m: int, cut: Cut | None, between: bool, n: int, k_tiles: int, record_bytes: int, gpu: Gpu
) -> Cut:
    """With the measured configuration if there is one, of more tokens if `between`. Remembered: the
    model takes 1 ms, and a prompt may have any number of tokens."""
    sizes = (m, n, k_tiles, record_bytes, gpu)
    found = None if cut is None else launch(cut, *sizes)
    if found is not None and not between:
        return found.cut
    best = cheapest(*sizes, COSTS)
    assert best is not None, "one always fits in a Hopper SM"
    # The best configuration for 512 tokens may leave tiles half empty with 272.
    if found is None or (
        model_us(best, k_tiles, gpu, COSTS) < OVERRULES * model_us(found, k_tiles, gpu, COSTS)
    ):
        return best.cut
    return found.cut


def pick_invariant(m: int, n: int, k_tiles: int, record_bytes: int, gpu: Gpu) -> Launch:
    """A split along k that depends on the layer alone: the same order of sums for every m."""
    widths = [each[0] for each in INSTANCES if each[1:] == (1,)]
    tokens = min((each for each in widths if each >= m), default=max(widths))
    how = launch(Cut(tokens, 1, 0), m, n, k_tiles, record_bytes, gpu)
    assert how is not None
    count = how.m_tiles * how.n_tiles
    fit = max(1, min(gpu.sms // how.n_tiles, k_tiles // LEAST_STRIPE))
    parts = max(each for each in range(1, fit + 1) if k_tiles % each == 0)
    if parts == 1:
        return how
    return replace(how, whole=0, blocks=count * parts)


@functools.cache
def table() -> dict[tuple[str, int, int], dict[int, Cut]]:
    """(device, n, k tiles) -> tokens -> configuration, from tuned.json."""
    found: dict[tuple[str, int, int], dict[int, Cut]] = {}
    for search in json.loads(TABLE.read_text())["searches"]:
        for layer in search["layers"]:
            key = (search["device"], layer["n"], math.ceil(layer["k"] / BRICK_K))
            found[key] = {int(m): Cut(*cut) for m, cut in layer["cuts"].items()}
    return found
