"""How w4a16_batch is cut up on a GPU: a pure function of sizes, so that it is tested without one.

A tile is 128 or 256 outputs by 32, 64 or 128 tokens; a cluster of 1, 2, 4 or 8 blocks shares its
inputs. Layers that a search has measured on this GPU (`billfish bench tune`, tuned.json) get what
was fastest; all others, and GPUs never seen, get the cut for which the model below is shortest.
"""

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from billfish.formats.layout import BRICK_K, BRICK_N
from billfish.kernels.device import Gpu
from billfish.schemes.w4a16.tile import RESERVED

THREADS = 384  # a warpgroup that copies, two that multiply
MOST_STAGES = 8  # barriers that batch.cuh has room for
BARRIER_BYTES = 1024
TEAMS = 2
CLUSTERS = (1, 2, 4, 8)

# Of (tokens, bands): us that a block needs for 128 inputs when it is alone on its SM; two need
# twice as long, since all of them wait for L2, which brings x to every block (5.6 TB/s). And what
# sums cost that meet in a cluster. Fitted to 336 timings on an H200: 8 % off as a rule.
STAGE_US = {(32, 1): 0.41, (32, 2): 0.74, (64, 1): 0.58, (64, 2): 1.11, (128, 1): 0.945,
            (128, 2): 1.54}  # fmt: skip
MEETING_US = {1: 0.0, 2: 1.9, 4: 5.9, 8: 7.0}
TABLE = Path(__file__).parent / "tuned.json"


@dataclass(frozen=True)
class Cut:
    """What an instance of w4a16_batch is named by, and the blocks of its clusters."""

    tokens: int  # 32, 64 or 128
    bands: int  # of 64 outputs, for each of two warpgroups
    cluster: int

    @property
    def outputs(self) -> int:
        return TEAMS * self.bands * BRICK_N

    @property
    def per_sm(self) -> int:  # batch.cuh: two_fit
        return 2 if self.tokens * self.bands <= 64 else 1


@dataclass(frozen=True)
class Launch:
    cut: Cut
    blocks: int
    stages: int
    smem: int
    early: bool  # the next kernel may start at once: no SM has a place free


def launch(cut: Cut, m: int, n: int, k_tiles: int, record_bytes: int, gpu: Gpu) -> Launch | None:
    """None where it does not fit, or where a block would have nothing to do."""
    stage = cut.tokens * BRICK_K * 2 + TEAMS * cut.bands * record_bytes
    stage = math.ceil(stage / 1024) * 1024
    sums = cut.tokens * (cut.outputs + 4) * 4 * (1 if cut.cluster == 1 else 2)
    room = gpu.smem_per_block if cut.per_sm == 1 else gpu.smem_per_sm // 2 - RESERVED
    stages = min(MOST_STAGES, (room - BARRIER_BYTES) // stage)
    smem = BARRIER_BYTES + max(stages * stage, sums)
    if stages < 2 or smem > room or cut.cluster > k_tiles:
        return None
    blocks = math.ceil(n / cut.outputs) * math.ceil(m / cut.tokens) * cut.cluster
    return Launch(cut, blocks, stages, smem, blocks >= gpu.sms * cut.per_sm)


def cuts() -> Iterator[Cut]:
    for tokens, bands in STAGE_US:
        for cluster in CLUSTERS:
            yield Cut(tokens, bands, cluster)


def model_us(how: Launch, k_tiles: int, gpu: Gpu) -> float:
    """Blocks run in waves; in each, an SM has as many as fit, or as there are."""
    cut = how.cut
    waves, rest = divmod(how.blocks, gpu.sms * cut.per_sm)
    on_an_sm = waves * cut.per_sm + math.ceil(rest / gpu.sms)
    stages = math.ceil(k_tiles / cut.cluster)
    meetings = MEETING_US[cut.cluster] * (waves + bool(rest))
    return stages * STAGE_US[cut.tokens, cut.bands] * on_an_sm + meetings


def pick(m: int, n: int, k_tiles: int, record_bytes: int, gpu: Gpu) -> Launch:
    """Measured, or by the model. Some cut always fits: a Hopper SM has room for the largest."""
    measured = table().get((gpu.name, n, k_tiles), {})
    nearest = min((known for known in measured if known >= m), default=None)
    if nearest is not None and nearest < 2 * m:
        found = launch(measured[nearest], m, n, k_tiles, record_bytes, gpu)
        if found is not None:
            return found
    fit = (launch(cut, m, n, k_tiles, record_bytes, gpu) for cut in cuts())
    return min((how for how in fit if how), key=lambda how: model_us(how, k_tiles, gpu))


@functools.cache
def table() -> dict[tuple[str, int, int], dict[int, Cut]]:
    """(device, n, k tiles) -> tokens -> cut; from every device's search."""
    found: dict[tuple[str, int, int], dict[int, Cut]] = {}
    for search in json.loads(TABLE.read_text())["searches"]:
        for layer in search["layers"]:
            key = (search["device"], layer["n"], math.ceil(layer["k"] / BRICK_K))
            found[key] = {int(m): Cut(*cut) for m, cut in layer["cuts"].items()}
    return found
