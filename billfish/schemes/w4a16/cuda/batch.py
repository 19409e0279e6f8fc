"""How w4a16_batch is cut up on a GPU: a pure function of sizes, so that it is tested without one.

A tile is 128 or 256 outputs by 32 to 256 tokens. Blocks take whole tiles, or split tiles into
stripes of the same length for all. Layers that a search has measured on this GPU (`billfish bench
tune`, tuned.json) get what was fastest; all others, and GPUs never seen, get the cut for which the
model below is shortest.
"""

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from billfish.formats.layout import BRICK_K, BRICK_N
from billfish.kernels.device import Gpu
from billfish.schemes.w4a16.cuda.tile import RESERVED

THREADS = 384  # a warpgroup that copies, two that multiply
MOST_STAGES = 8  # barriers that batch.cuh has room for
BARRIER_BYTES = 1024
TEAMS = 2
TURN_BYTES = 8 * 16 * 48
FLAGS = 8  # of a block: a warp that multiplies has one
MOST_INVARIANT = 1024  # tokens at once, which bounds the memory that parts of tiles meet in
EVEN = 0.9  # of the blocks that fit: few enough more to keep tiles in equal parts
OVERRULES = 0.83  # of a measured neighbour's time: below it the model is trusted more
LEAST_STRIPE = 4  # tiles of 128 inputs, below which meeting costs more than it spares

# Of (tokens, bands): us that a block needs for 128 inputs when it is alone on its SM; two need
# twice as long. And what it costs to leave sums and to collect them, for tiles of no size and for
# each 32 tokens of 128 outputs. Read off a few dozen timings on an H200, not fitted.
STAGE_US = {(32, 1): 0.41, (64, 1): 0.5, (128, 1): 0.85, (128, 2): 1.45, (256, 1): 1.42}
MEETING_US, MEETING_MORE_US = 1.5, 1.0
TABLE = Path(__file__).parent / "tuned.json"


@dataclass(frozen=True)
class Cut:
    """What an instance of w4a16_batch is named by, and how its tiles are spread over blocks."""

    tokens: int  # 32, 64, 128 or 256
    bands: int  # of 64 outputs, for each of two warpgroups
    stripes: int  # blocks on an SM that split tiles among them; 0 if no tile is split

    @property
    def outputs(self) -> int:
        return TEAMS * self.bands * BRICK_N

    @property
    def per_sm(self) -> int:  # batch.cuh: two_fit
        return 2 if self.tokens <= 64 and self.bands == 1 else 1


@dataclass(frozen=True)
class Launch:
    cut: Cut
    m_tiles: int
    n_tiles: int
    whole: int  # tiles that one block multiplies; the others are split into stripes
    blocks: int
    stages: int
    smem: int
    early: bool  # the next kernel may start at once: no SM has a place free

    @property
    def sums(self) -> int:
        """Numbers that blocks leave for one another."""
        split = self.whole < self.m_tiles * self.n_tiles
        return self.blocks * self.cut.tokens * self.cut.outputs if split else 0


def launch(cut: Cut, m: int, n: int, k_tiles: int, record_bytes: int, gpu: Gpu) -> Launch | None:
    """None where it does not fit, or where stripes are nothing but whole tiles."""
    stage = cut.tokens * BRICK_K * 2 + TEAMS * cut.bands * record_bytes
    stage = math.ceil(stage / 1024) * 1024
    room = gpu.smem_per_block if cut.per_sm == 1 else gpu.smem_per_sm // 2 - RESERVED
    stages = min(MOST_STAGES, (room - BARRIER_BYTES - TURN_BYTES) // stage)
    smem = BARRIER_BYTES + stages * stage + TURN_BYTES
    if stages < 2:
        return None
    m_tiles, n_tiles = math.ceil(m / cut.tokens), math.ceil(n / cut.outputs)
    tiles = whole = m_tiles * n_tiles
    if cut.stripes == 0:
        blocks = min(tiles, gpu.sms * cut.per_sm)
    else:
        blocks = slots = gpu.sms * cut.stripes
        even = slots // tiles * tiles  # the same parts of every tile
        if even >= EVEN * slots:
            blocks = even
        blocks = min(blocks, tiles * max(1, k_tiles // LEAST_STRIPE))
        if tiles % blocks == 0:
            return None
        # Stripes of one to two tiles: shorter ones would be more for a block to add.
        whole = max(0, tiles // blocks - 1) * blocks
    # Blocks of the next kernel that start early must not crowd on SMs that are free.
    early = cut.per_sm == 1 or blocks >= gpu.sms
    return Launch(cut, m_tiles, n_tiles, whole, blocks, stages, smem, early)


def cuts() -> Iterator[Cut]:
    for tokens, bands in STAGE_US:
        for stripes in range(Cut(tokens, bands, 0).per_sm + 1):
            yield Cut(tokens, bands, stripes)


def model_us(how: Launch, k_tiles: int, gpu: Gpu) -> float:
    """An SM's blocks share its time; sums that meet cost some more."""
    cut, tiles = how.cut, how.m_tiles * how.n_tiles
    on_an_sm = min(cut.per_sm, math.ceil(how.blocks / gpu.sms))
    stages = (math.ceil(how.whole / how.blocks) + (tiles - how.whole) / how.blocks) * k_tiles
    meeting = MEETING_US + MEETING_MORE_US * cut.tokens * cut.bands / 32 if how.sums else 0.0
    return stages * STAGE_US[cut.tokens, cut.bands] * on_an_sm + meeting


def pick(m: int, n: int, k_tiles: int, record_bytes: int, gpu: Gpu) -> Launch:
    """Measured, or by the model. Some cut always fits: a Hopper SM has room for the largest."""
    fit = [how for cut in cuts() if (how := launch(cut, m, n, k_tiles, record_bytes, gpu))]
    best = min(fit, key=lambda how: model_us(how, k_tiles, gpu))
    measured = table().get((gpu.name, n, k_tiles), {})
    nearest = min((known for known in measured if known >= m), default=None)
    if nearest is None or nearest >= 2 * m:
        return best
    found = launch(measured[nearest], m, n, k_tiles, record_bytes, gpu)
    # What is best for 512 tokens may give 272 of them tiles that are half empty.
    wasteful = (
        nearest > m
        and found is not None
        and (model_us(best, k_tiles, gpu) < OVERRULES * model_us(found, k_tiles, gpu))
    )
    return best if found is None or wasteful else found


def pick_invariant(m: int, n: int, k_tiles: int, record_bytes: int, gpu: Gpu) -> Launch:
    """Parts that depend on the layer alone: for every m the same sums in the same order."""
    tokens = min((each for each, _ in STAGE_US if each >= m), default=max(STAGE_US)[0])
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
    """(device, n, k tiles) -> tokens -> cut; from every device's search."""
    found: dict[tuple[str, int, int], dict[int, Cut]] = {}
    for search in json.loads(TABLE.read_text())["searches"]:
        for layer in search["layers"]:
            key = (search["device"], layer["n"], math.ceil(layer["k"] / BRICK_K))
            found[key] = {int(m): Cut(*cut) for m, cut in layer["cuts"].items()}
    return found
