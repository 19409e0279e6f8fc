"""Tile configuration of kernels on clusters of two CTAs, or of four (include/billfish/share.cuh): a
pure function of sizes, tested without a GPU.

A cluster computes a share of the outputs, `bands` bands of 64 at a time; its CTAs split the inputs.
Shares, bands and the split depend on the layer and the GPU, not on the number of tokens, so a
token's sums are added in the same order in every batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from billfish.kernels.device import Gpu

BAND = 64  # outputs
MOST_TOKENS = 16  # of one launch: two tensor-core tiles of 8 tokens
CLUSTER = 2
LARGE_CLUSTER = 4  # of two or three bands
# So many of them on so many SMs, one CTA each: a GPC has some 16 SMs, not all a multiple of four.
LARGE, LARGE_SMS = 30, 132
STAGE_RECORDS = 4
MOST_STAGES = 8  # kernels reserve barriers for this many
MORE = 1024  # than half an SM's shared memory, for CTAs that an SM holds one of
BARRIER_BYTES = 256
TEAM_BARRIER_BYTES = 384


@dataclass(frozen=True)
class Tile:
    """One launch."""

    tokens: int  # at most: template parameter of the kernel
    bands: int  # 1, 2 or 4
    blocks: int
    stages: int
    smem: int
    asked: int  # bytes of shared memory, more than it uses where an SM must not get two CTAs
    cluster: int = CLUSTER


def tokens_of(m: int, choices: Sequence[int] = (8, MOST_TOKENS)) -> int:
    return min(tokens for tokens in choices if tokens >= m)


def sums_bytes(tokens: int) -> int:
    """Partial sums of a pass (share.cuh, Sums)."""
    return STAGE_RECORDS * BAND * tokens * 4


def team_sums_bytes(tokens: int, bands: int, cluster: int = CLUSTER) -> int:
    """Partial sums of a pass of `bands` (teams.cuh, TeamSums)."""
    owned = -(-bands * BAND // 16 // cluster) * 16  # rows of a CTA
    return (2 * cluster - 1) * owned * tokens * 4


def pick(
    m: int,
    n: int,
    k: int,
    gpu: Gpu,
    stage: Callable[[int, int], int],
    buffers: int,
    besides: int = 0,
    teams: bool = False,
    choices: Sequence[int] = (8, MOST_TOKENS),
) -> Tile:
    """A rule measured on an H200 (docs/LOG.md) and used for all GPUs. `stage(tokens, bands)` is the
    bytes of a stage; a launch of several passes has `buffers` of partial sums; `besides`: bytes of
    anything else; `teams`: passes of several bands are computed by two teams (teams.cuh), with one
    buffer, and with more barriers.

    Two CTAs fit on an SM. If one cluster for every two SMs has at most two bands to compute, only
    those are launched: the other slot is left to CTAs of the next kernel, which already fetch their
    weights (PDL). Larger layers use both slots: 8192 x 57344 takes 55 us instead of 59.

    After such a launch the SMs that are free first would get two CTAs of a smaller layer, and the
    others none. So CTAs of layers that follow one, narrow as down-projections are, ask for more
    than half an SM: Qwen2.5-32B's four products in a chain take 70 us instead of 83. Those of q/k/v
    do not: beside a CTA that asks for as much they could not fetch weights.

    Where a few clusters would have two bands and the others one, and CTAs are alone on their SMs,
    fewer clusters of four have three (`teams` only), and a CTA a quarter of the inputs: 27648 x
    5120, 80 bands, takes 20.0 us instead of 22.3. An H200 runs 30 of these at once; 32 took 34.
    """
    tokens = tokens_of(m, choices)
    total = -(-n // BAND)
    clusters, cluster = gpu.sms // CLUSTER, CLUSTER
    large = gpu.sms * LARGE // LARGE_SMS
    if total > 2 * clusters:
        clusters *= 2
    elif teams and n <= k and clusters < total <= 3 * large:
        clusters, cluster = large, LARGE_CLUSTER
    share = -(-total // clusters)
    bands = share if share <= 2 else 4
    passes = -(-share // bands)
    sums = sums_bytes(tokens) * min(passes, buffers)
    if teams and bands > 1:
        sums = team_sums_bytes(tokens, min(share, bands), cluster)
    fixed = (TEAM_BARRIER_BYTES if teams else BARRIER_BYTES) + sums + besides
    each = stage(tokens, bands)
    alone = clusters * cluster <= gpu.sms and (share == 1 or n <= k)
    room = gpu.half + (MORE if teams and alone else 0)
    if room < fixed + 2 * each:  # little shared memory: one CTA for each SM
        room = gpu.smem_per_block
    stages = min(MOST_STAGES, (room - fixed) // each)
    smem = fixed + stages * each
    asked = max(smem, gpu.alone) if alone else smem
    return Tile(tokens, bands, clusters * cluster, stages, smem, asked, cluster)
