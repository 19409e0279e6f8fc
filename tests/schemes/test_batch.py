"""batch.pick: a launch that fits, the shortest by the model, and what a search has measured."""

import json
import math

import pytest

from billfish.kernels.device import Gpu
from billfish.schemes.w4a16 import batch, cuda
from billfish.schemes.w4a16.batch import Cut

H200 = Gpu(0, "NVIDIA H200", "sm_90a", 132, 232448, 233472, 60 * 2**20)
OTHER = Gpu(0, "a Hopper GPU never seen", "sm_90a", 114, 232448, 233472, 50 * 2**20)
RECORDS = sorted({kind.record_bytes for kind in cuda.KINDS})
SIZES = [(1, 1), (64, 4), (576, 5), (4096, 32), (28672, 32), (8192, 224), (151936, 64)]
TOKENS = (17, 32, 33, 64, 100, 128, 129, 257, 1000, 1024)


@pytest.mark.parametrize("gpu", [H200, OTHER], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(("n", "k_tiles"), SIZES)
def test_every_launch_fits(gpu, n, k_tiles):
    for record in RECORDS:
        for m in TOKENS:
            how = batch.pick(m, n, k_tiles, record, gpu)
            cut = how.cut
            assert cut.cluster <= k_tiles  # a block without inputs would never set its sums
            assert how.blocks == cut.cluster * math.ceil(n / cut.outputs) * math.ceil(
                m / cut.tokens
            )
            # batch.cuh: barriers, stages of x and records on multiples of 1 KB; in the end sums
            stage = math.ceil((cut.tokens * 256 + 2 * cut.bands * record) / 1024) * 1024
            sums = cut.tokens * (cut.outputs + 4) * 4 * (2 if cut.cluster > 1 else 1)
            assert 2 <= how.stages <= 8 and how.smem == 1024 + max(how.stages * stage, sums)
            assert cut.per_sm * (how.smem + 1024) <= gpu.smem_per_sm
            assert how.smem <= gpu.smem_per_block


def test_the_largest_tile_has_no_room_for_a_neighbours_sums():
    assert batch.launch(Cut(128, 2, 1), 128, 4096, 32, 4224, H200)
    assert batch.launch(Cut(128, 2, 2), 128, 4096, 32, 4224, H200) is None
    assert batch.launch(Cut(32, 1, 4), 32, 4096, 3, 4224, H200) is None  # more blocks than inputs


def test_the_model_counts_waves():
    one = batch.launch(Cut(128, 1, 1), 128, 128 * 132, 32, 4224, OTHER)
    more = batch.launch(Cut(128, 1, 1), 128, 128 * 114, 32, 4224, OTHER)
    assert batch.model_us(one, 32, OTHER) == 2 * batch.model_us(more, 32, OTHER)


def test_small_layers_share_their_inputs_and_large_ones_do_not():
    assert batch.pick(32, 4000, 32, 4224, OTHER).cut.cluster > 1
    assert batch.pick(1024, 30000, 32, 4224, OTHER).cut.cluster == 1
    assert batch.pick(1024, 30000, 32, 4224, OTHER).cut.tokens == 128


def test_measured_layers_get_what_was_measured():
    searches = json.loads(batch.TABLE.read_text())["searches"]
    assert searches and all(search["device"] and search["date"] for search in searches)
    for search in searches:
        gpu = Gpu(0, search["device"], "sm_90a", 132, 232448, 233472, 0)
        for layer in search["layers"]:
            for m, cut in layer["cuts"].items():
                how = batch.pick(int(m), layer["n"], math.ceil(layer["k"] / 128), 4224, gpu)
                assert how.cut == Cut(*cut)
                assert (how.cut.tokens, how.cut.bands) in batch.STAGE_US  # an instance there is


def test_between_measured_tokens_the_next_more_counts():
    known = batch.table()["NVIDIA H200", 8192, 64]
    assert batch.pick(40, 8192, 64, 4224, H200).cut == known[64]
    assert batch.pick(2000, 8192, 64, 4224, H200).cut in set(batch.cuts())
