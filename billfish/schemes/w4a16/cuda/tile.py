"""How w4a16_decode is cut up on a GPU: a pure function of sizes, so that it is tested without one.

A cluster of two blocks takes a share of the outputs in bands of 64, `bands` of them at a time, and
its blocks split the inputs. Shares, bands and the split depend on the layer and the GPU alone, not
on the number of tokens: a token's sums come in the same order whatever it is batched with.
"""

from dataclasses import dataclass

from billfish.formats.layout import BRICK_K, BRICK_N
from billfish.kernels.device import Gpu

MOST_TOKENS = 16  # of one launch: two columns of tensor-core tiles
THREADS = 320  # two warps that copy, eight that multiply
CLUSTER = 2
STAGE_RECORDS = 4
MOST_STAGES = 8  # barriers that decode.cuh has room for
BARRIER_BYTES = 256
RESERVED = 1024  # shared memory that each block costs beyond what it asks for


@dataclass(frozen=True)
class Tile:
    """One launch of w4a16_decode."""

    tokens: int  # 8 or 16: columns of the instance
    bands: int  # 1, 2 or 4
    blocks: int
    stages: int
    smem: int


def tokens_of(m: int) -> int:
    return 8 if m <= 8 else MOST_TOKENS


def pick_tile(m: int, n: int, record_bytes: int, gpu: Gpu) -> Tile:
    """Measured on an H200 (docs/LOG.md); other GPUs follow the same rule.

    Two blocks fit on an SM. Where a cluster for each pair of SMs has one or two bands, it gets just
    these: the other place is for the next kernel's blocks, which fetch their weights meanwhile
    (PDL). Longer work hides its own beginning, and both places work on it: 57344 x 8192 takes 57 us
    then, 63 with one.
    """
    tokens = tokens_of(m)
    total = -(-n // BRICK_N)
    clusters = gpu.sms // CLUSTER
    if total > 2 * clusters:
        clusters *= 2
    share = -(-total // clusters)
    bands = share if share <= 2 else 4
    passes = -(-share // bands)
    sums = STAGE_RECORDS * BRICK_N * tokens * 4 * min(passes, 2)
    stage = STAGE_RECORDS * record_bytes + STAGE_RECORDS // bands * tokens * BRICK_K * 2
    room = gpu.smem_per_sm // 2 - RESERVED
    if room < BARRIER_BYTES + sums + 2 * stage:  # a GPU with little: one block an SM
        room = gpu.smem_per_block
    stages = min(MOST_STAGES, (room - BARRIER_BYTES - sums) // stage)
    smem = BARRIER_BYTES + stages * stage + sums
    return Tile(tokens, bands, clusters * CLUSTER, stages, smem)
