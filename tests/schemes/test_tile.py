"""pick_tile: launches fit the GPU, and the number of tokens does not change the order of sums."""

import dataclasses
import itertools
import math

import pytest

from billfish.kernels.clusters import CLUSTER, LARGE_CLUSTER, MORE, TEAM_BARRIER_BYTES
from billfish.kernels.device import Gpu
from billfish.schemes.w4a16.cuda import op as cuda
from billfish.schemes.w4a16.cuda.tile import LEAST_STAGES, pick_normed, pick_tile

H200 = Gpu(0, "NVIDIA H200", "sm_90a", 132, 232448, 233472, 60 * 2**20)
SMALL = Gpu(0, "a GPU with 100 KB an SM", "sm_120a", 84, 101376, 102400, 48 * 2**20)
TINY = dataclasses.replace(H200, sms=2)
RECORDS = sorted({kind.record_bytes for kind in cuda.KINDS})
INPUTS = 8192
OUTPUTS = (1, 64, 65, 576, 1024, 4096, 5120, 6144, 8192, 10240, 28672, 57344, 151936)


@pytest.mark.parametrize(
    ("n", "k", "bands", "blocks"),
    [
        (576, 1536, 1, 132),
        (4096, 4096, 1, 132),
        (5120, 4096, 2, 132),
        (5120, 5120, 4, 120),
        (5120, 27648, 4, 120),
        (6144, 4096, 2, 132),
        (8192, 8192, 2, 132),
        (10240, 8192, 2, 264),
        (28672, 4096, 4, 264),
        (57344, 8192, 4, 264),
    ],
)
def test_what_was_measured_best(n, k, bands, blocks):
    tile = pick_tile(1, n, k, 4224, H200)
    assert (tile.bands, tile.blocks) == (bands, blocks)


@pytest.mark.parametrize("gpu", [H200, SMALL, TINY], ids=lambda gpu: f"{gpu.arch}-{gpu.sms}")
@pytest.mark.parametrize("n", OUTPUTS)
def test_every_launch_fits_and_tokens_do_not_decide(gpu, n):
    for record in RECORDS:
        tiles = [pick_tile(m, n, INPUTS, record, gpu) for m in range(1, 17)]
        assert len({(t.bands, t.blocks, t.cluster) for t in tiles}) == 1
        assert [t.tokens for t in tiles] == [2] * 2 + [8] * 6 + [16] * 8
        for tile in tiles:
            assert tile.blocks % tile.cluster == 0 and tile.blocks <= CLUSTER * gpu.sms
            assert 2 <= tile.stages <= 8 and tile.smem <= gpu.smem_per_block
            share = math.ceil(math.ceil(n / 64) / (tile.blocks // tile.cluster))
            passes = math.ceil(share / tile.bands)
            # team_loops.cuh: stages of four records, two of 16 tokens of one band, their slices of
            # x and, where two bands or more share these, their sums in each group; then sums of
            # results: of one band of four slices, else of all but one of two teams of each block
            groups = {4224: 1, 4256: 1, 4352: 2, 4416: 2, 4608: 4, 4736: 4}[record]
            one = tile.bands == 1
            slices = 2 if one and tile.tokens == 16 else 4 // tile.bands
            x = tile.tokens * 256 + (0 if one else 4 * groups * max(tile.tokens, 8))
            stage = sum(-(-slices * each // 128) * 128 for each in (tile.bands * record, x))
            bricks = math.ceil(4 * min(share, tile.bands) / tile.cluster)
            sums = (16 if one else (2 * tile.cluster - 1) * bricks) * 16 * tile.tokens * 4
            assert passes == 1 or (not one and tile.cluster == CLUSTER)
            assert tile.cluster == CLUSTER or (tile.cluster, share) == (LARGE_CLUSTER, 3)
            assert tile.smem == TEAM_BARRIER_BYTES + tile.stages * stage + sums


@pytest.mark.parametrize("n", OUTPUTS)
def test_two_blocks_fit_on_a_hopper_sm(n):
    for record in RECORDS:
        for m in (1, 16):
            tile = pick_tile(m, n, INPUTS, record, H200)
            more = MORE if tile.asked > H200.half else 0  # of which an SM gets one
            assert 2 * (tile.smem - more + 1024) <= H200.smem_per_sm


@pytest.mark.parametrize("n", OUTPUTS)
def test_an_sm_gets_one_block_of_a_launch_that_has_one_for_each(n):
    """And beside it one of a launch that has two for every SM, or that has more outputs than
    inputs."""
    large = pick_tile(16, 57344, INPUTS, max(RECORDS), H200)
    for record in RECORDS:
        for m, k in itertools.product((1, 16), (1024, INPUTS)):
            tile = pick_tile(m, n, k, record, H200)
            alone = tile.blocks <= H200.sms and (tile.bands == 1 or n <= k)
            assert (2 * (tile.asked + 1024) > H200.smem_per_sm) == alone
            assert tile.smem <= tile.asked <= H200.smem_per_block
            assert tile.asked + large.asked + 2 * 1024 <= H200.smem_per_sm


@pytest.mark.parametrize("gpu", [H200, SMALL, TINY], ids=lambda gpu: f"{gpu.arch}-{gpu.sms}")
@pytest.mark.parametrize("n", OUTPUTS)
def test_normed_launches_fit_and_split_as_others(gpu, n):
    for record in RECORDS:
        for k_tiles in (1, 5, 32, 64):
            plain = pick_tile(1, n, k_tiles * 128, record, gpu)
            fit = [pick_normed(m, n, k_tiles, record, gpu) for m in range(1, 4)]
            assert fit[2] is None
            for m, tile in enumerate(fit, 1):
                if tile is not None:
                    assert (tile.tokens, tile.bands) == (2, plain.bands)
                    assert (tile.blocks, tile.cluster) == (plain.blocks, plain.cluster)
                    assert LEAST_STAGES <= tile.stages <= plain.stages and tile.blocks >= m
                    assert plain.stages > tile.stages or tile.smem > plain.smem
                    more = MORE if tile.asked > gpu.half else 0
                    assert 2 * (tile.smem - more + 1024) <= gpu.smem_per_sm


def test_which_layers_norm_their_input():
    """Llama's q/k/v and gate and up, of 8 and of 70 billion parameters; not where little shared
    memory, or few stages of it, would be left."""
    for n, k_tiles in ((6144, 32), (28672, 32), (10240, 64), (57344, 64)):
        assert all(pick_normed(m, n, k_tiles, 4224, H200) for m in (1, 2))
    assert pick_normed(1, 6144, 32, 4224, SMALL) is None
    assert all(pick_normed(m, 65, 1, 4224, TINY) for m in (1, 2))
