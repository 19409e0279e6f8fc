"""Tile configuration of w4a16_decode: a pure function of sizes, tested without a GPU.

A cluster of two CTAs computes a share of the outputs, `bands` bands of 64 at a time; its CTAs split
the inputs. Shares, bands and the split depend on the layer and the GPU, not on the number of
tokens, so a token's sums are added in the same order in every batch.
"""

from dataclasses import dataclass

from billfish.formats.layout import BRICK_K, BRICK_N
from billfish.kernels.device import Gpu

MOST_TOKENS = 16  # of one launch: two tensor-core tiles of 8 tokens
THREADS = 320  # two producer warps, eight that multiply
CLUSTER = 2
STAGE_RECORDS = 4
MOST_STAGES = 8  # decode.cuh reserves barriers for this many
BARRIER_BYTES = 256
RESERVED = 1024  # bytes of shared memory that CUDA reserves for each CTA


@dataclass(frozen=True)
class Tile:
    """One launch of w4a16_decode."""

    tokens: int  # 8 or 16: template parameter of the kernel
    bands: int  # 1, 2 or 4
    blocks: int
    stages: int
    smem: int


def tokens_of(m: int) -> int:
    return 8 if m <= 8 else MOST_TOKENS


def pick_tile(m: int, n: int, record_bytes: int, gpu: Gpu) -> Tile:
    """A rule measured on an H200 (docs/LOG.md) and used for all GPUs.

    Two CTAs fit on an SM. If one cluster for every two SMs has at most two bands to compute, only
    those are launched: the other slot is left to CTAs of the next kernel, which already fetch their
    weights (PDL). Larger layers use both slots: 57344 x 8192 takes 57 us instead of 63.
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
    if room < BARRIER_BYTES + sums + 2 * stage:  # little shared memory: one CTA for each SM
        room = gpu.smem_per_block
    stages = min(MOST_STAGES, (room - BARRIER_BYTES - sums) // stage)
    smem = BARRIER_BYTES + stages * stage + sums
    return Tile(tokens, bands, clusters * CLUSTER, stages, smem)
