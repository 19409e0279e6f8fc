"""Striped partitions without a GPU: their arithmetic, a model of the reduction, what compiles."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import some

from billfish.kernels import jit
from billfish.kernels.jit import Program
from billfish.kernels.striped import BANDS, smem_bytes, stage_bytes, stages
from billfish.kernels.stripes import MOST_SMEM, CostStripes, Part, Stripes
from billfish.schemes.w4a16.cuda import instances

CUH = Path(instances.__file__).with_name("stripe.cuh")
CUTS = [*BANDS.items(), (8, 4), (16, 4)]  # tokens, bands
SHAPES = st.builds(
    Stripes,
    n=st.integers(1, 1500),
    k_tiles=st.integers(1, 40),
    bands=st.sampled_from([2, 4]),
    sms=st.integers(1, 40),
)
COSTS = st.integers(1, 40).flatmap(
    lambda k_tiles: st.builds(
        CostStripes,
        n=st.integers(1, 1500),
        k_tiles=st.just(k_tiles),
        bands=st.sampled_from([2, 4]),
        sms=st.integers(1, 40),
        m_tiles=st.integers(1, 4),
        light=st.integers(0, 2 * k_tiles),
        heavy=st.sampled_from([1, 2]),
    )
)


def record_bytes(group, zeros):
    return 4096 + 128 // group * (128 + 32 * zeros)


# -- the partition


def test_the_drawing_of_stripes_cuh():
    how = Stripes(n=3 * 128, k_tiles=6, bands=2, sms=4)
    assert (how.tiles, how.units, how.blocks) == (3, 18, 4)
    assert [how.begin(i) for i in range(5)] == [0, 4, 9, 13, 18]
    assert [how.owner(unit) for unit in range(18)] == [0] * 4 + [1] * 5 + [2] * 4 + [3] * 5
    assert [list(how.parts(i)) for i in range(4)] == [
        [Part(0, 0, 4, first=0, turn=1, writes=True)],
        [Part(0, 4, 6, 0, 0, False), Part(1, 0, 3, first=1, turn=1, writes=True)],
        [Part(1, 3, 6, 1, 0, False), Part(2, 0, 1, first=2, turn=1, writes=True)],
        [Part(2, 1, 6, 2, 0, False)],
    ]
    assert [how.stripe_of_block(i) for i in range(4)] == [3, 2, 1, 0]


def test_one_tile_of_many_stripes():
    how = Stripes(n=130, k_tiles=14, bands=4, sms=3)
    assert [list(how.parts(i)) for i in range(3)] == [
        [Part(0, 0, 4, first=0, turn=2, writes=True)],
        [Part(0, 4, 9, first=0, turn=1, writes=False)],
        [Part(0, 9, 14, first=0, turn=0, writes=False)],
    ]


def test_a_stripe_of_whole_tiles_meets_nobody():
    how = Stripes(n=1024, k_tiles=5, bands=2, sms=2)
    assert list(how.parts(1)) == [Part(t, 0, 5, 1, 0, True) for t in range(4, 8)]
    few = Stripes(n=64, k_tiles=2, bands=2, sms=108)
    assert few.blocks == 1
    assert list(few.parts(0)) == [Part(0, 0, 2, 0, 0, True)]


@pytest.mark.parametrize(
    ("n", "k_tiles", "blocks"), [(128, 108, 27), (1024, 32, 64), (9000, 1, 71)]
)
def test_no_stripe_is_shorter_than_the_pipeline(n, k_tiles, blocks):
    """Where tiles are fewer than SMs; each of their stripes waits for its turn."""
    how = Stripes(n, k_tiles, bands=2, sms=108)
    assert how.blocks == blocks
    if k_tiles >= 4:
        assert min(how.begin(i + 1) - how.begin(i) for i in range(blocks)) >= 4


def test_a100():
    how = Stripes(n=4096, k_tiles=32, bands=2, sms=108)
    sizes = {how.begin(i + 1) - how.begin(i) for i in range(108)}
    assert sizes == {9, 10}
    assert how.workspace_bytes(16) == 108 * 128 * 16 * 4 and how.lock_bytes == 432


@given(how=SHAPES)
def test_every_unit_has_one_stripe(how):
    ends = [how.begin(i) for i in range(how.blocks + 1)]
    assert ends[0] == 0 and ends[-1] == how.units
    sizes = {b - a for a, b in itertools.pairwise(ends)}
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    for i in range(how.blocks):
        assert {how.owner(unit) for unit in range(ends[i], ends[i + 1])} == {i}


# -- stripes of equal cost


def test_heavy_slices_count_twice():
    """COMET 4.4: 8 slices of 4 bits are as long as 4 of 8 bits."""
    how = CostStripes(n=128, k_tiles=12, bands=2, sms=3, m_tiles=1, light=16, heavy=2)
    assert (how.tiles, how.units, how.tile_cost, how.blocks) == (1, 12, 32, 3)
    assert [how.begin(i) for i in range(4)] == [0, 5, 9, 12]
    assert [how.owner(unit) for unit in range(12)] == [0] * 5 + [1] * 4 + [2] * 3
    assert list(how.parts(1)) == [Part(0, 5, 9, first=0, turn=1, writes=False)]
    tokens = CostStripes(n=129, k_tiles=2, bands=2, sms=9, m_tiles=3, light=3, heavy=2)
    assert (tokens.tiles, tokens.units, tokens.tile_cost, tokens.blocks) == (6, 12, 5, 6)
    assert [tokens.begin(i) for i in range(7)] == [0, 2, 4, 6, 8, 10, 12]


@given(how=SHAPES)
def test_equal_costs_are_equal_stripes(how):
    for heavy, light in ((1, 0), (1, how.k_tiles), (2, 0), (2, 2 * how.k_tiles)):
        same = CostStripes(how.n, how.k_tiles, how.bands, how.sms, 1, light, heavy)
        assert (same.tiles, same.units, same.blocks) == (how.tiles, how.units, how.blocks)
        assert all(same.begin(i) == how.begin(i) for i in range(how.blocks + 1))
        assert all(same.owner(i) == how.owner(i) for i in range(how.units))


@given(how=COSTS)
def test_every_unit_has_one_stripe_of_equal_cost(how):
    def before(unit):
        tile, piece = divmod(unit, how.k_tiles)
        halves = [1 if i < how.light else how.heavy for i in range(2 * how.k_tiles)]
        return tile * sum(halves) + sum(halves[: 2 * piece])

    ends = [how.begin(i) for i in range(how.blocks + 1)]
    assert ends[0] == 0 and ends[-1] == how.units
    fair = before(how.units) / how.blocks
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        assert begin < end
        assert {how.owner(unit) for unit in range(begin, end)} == {i}
        assert abs(before(end) - before(begin) - fair) < 2 * how.heavy + 1  # less than a slice


@given(how=SHAPES | COSTS)
def test_a_place_in_the_workspace_has_one_tile(how):
    tiles = {}
    for i in range(how.blocks):
        for part in how.parts(i):
            if part.turn or not part.writes:
                assert 0 <= part.first < how.blocks
                assert tiles.setdefault(part.first, part.tile) == part.tile


# -- the reduction: blocks as generators, a step a unit or a look at a lock


class Gpu:
    """Sums are lists of units in the order of addition."""

    def __init__(self, how):
        self.how = how
        self.locks = [0] * how.blocks
        self.workspace = [None] * how.blocks
        self.out = {}
        self.waits = 0

    def block(self, index):
        stripe = self.how.stripe_of_block(index)
        for part in self.how.parts(stripe):
            sums = []
            for piece in range(part.begin, part.end):
                sums.append((part.tile, piece))
                yield
            if part.turn:
                while self.locks[part.first] != part.turn:
                    self.waits += 1
                    yield
                sums = self.workspace[part.first] + sums
            if part.writes:
                assert part.tile not in self.out
                self.out[part.tile] = sums
                if part.turn:
                    self.locks[part.first] = 0
            else:
                assert self.locks[part.first] == part.turn
                self.workspace[part.first] = sums
                yield
                self.locks[part.first] = part.turn + 1

    def expected(self):
        how = self.how
        return {
            tile: [
                (tile, piece)
                for i in sorted({how.owner(tile * how.k_tiles + s) for s in range(how.k_tiles)})[
                    ::-1
                ]
                for piece in range(how.k_tiles)
                if how.owner(tile * how.k_tiles + piece) == i
            ]
            for tile in range(how.tiles)
        }


def run(gpu, pick, resident):
    """Blocks get onto SMs in the order of their index, at most `resident` at a time."""
    waiting = list(range(gpu.how.blocks))[::-1]
    running = []
    steps = 0
    limit = 20 * (gpu.how.units + 1) * (gpu.how.blocks + 1)
    while waiting or running:
        while waiting and len(running) < resident:
            running.append(gpu.block(waiting.pop()))
        block = pick(running)
        if next(block, StopIteration) is StopIteration:
            running.remove(block)
        steps += 1
        assert steps < limit, "deadlock"
    return steps


@settings(deadline=None)
@given(how=SHAPES | COSTS, random=st.randoms(use_true_random=False), fewer=st.integers(0, 40))
def test_any_schedule_gives_the_same_sums(how, random, fewer):
    gpu = Gpu(how)
    expected = gpu.expected()
    for _ in range(2):  # the second launch finds the first one's locks and workspace
        run(gpu, random.choice, max(1, how.blocks - fewer))
        assert gpu.out == expected
        assert not any(gpu.locks)
        gpu.out = {}


@given(how=SHAPES)
def test_all_in_step_hardly_wait(how):
    """Bottom up, whoever is waited for is done before: a wait is a neighbour's hand-over."""
    gpu = Gpu(how)
    blocks = [gpu.block(i) for i in range(how.blocks)]
    rounds = 0
    while blocks:
        blocks = [b for b in blocks if next(b, StopIteration) is not StopIteration]
        rounds += 1
    longest = max(how.begin(i + 1) - how.begin(i) for i in range(how.blocks))
    cuts = max(part.turn for i in range(how.blocks) for part in how.parts(i))
    assert rounds <= longest + 3 * cuts + 3


# -- what compiles


def test_shared_memory():
    small, large = record_bytes(128, False), record_bytes(32, True)
    assert stage_bytes(16, 2, small) == 4 * 4224 + 2 * 16 * 256
    assert (stages(16, 2, small), stages(16, 2, large), stages(16, 4, large)) == (4, 3, 4)
    assert smem_bytes(16, 2, small) == 100_352
    for (tokens, bands), group, zeros in itertools.product(CUTS, (32, 64, 128), (0, 1)):
        assert smem_bytes(tokens, bands, record_bytes(group, zeros)) <= MOST_SMEM


def test_the_kernel_counts_the_same(tmp_path):
    lines = [f'#include "{CUH}"', "template <int> __global__ void counts() {"]
    for (tokens, bands), group, zeros in itertools.product(CUTS, (32, 64, 128), (0, 1)):
        size = record_bytes(group, zeros)
        record = f"billfish::Record<{group}, {zeros}>::kBytes"
        stage = f"billfish::StripeStage<{record}, {tokens}, {bands}>"
        lines.append(
            f"static_assert({stage}::kBytes == {stage_bytes(tokens, bands, size)} && "
            f'{stage}::kStages == {stages(tokens, bands, size)}, "");'
        )
    program = tmp_path / "counts.cu"
    program.write_text("\n".join([*lines, "}"]))
    jit.compile(Program(program, "counts<0>"), "sm_80")


@pytest.mark.parametrize("arch", some(["sm_80", "sm_86", "sm_89", "sm_90a"], 0, 3))
def test_nothing_spills(arch):
    """The instances that need most registers: all 96 of an architecture take 17 s."""
    for dtype in ("Half", "Bfloat"):
        name = f"billfish::w4a16_stripe<billfish::{dtype}, billfish::{dtype}, 128, false, 64, 4>"
        cubin = jit.compile(Program(CUH, name), arch)
        assert (cubin.spill_bytes, cubin.stack_bytes, cubin.smem_bytes) == (0, 0, 0)
        assert cubin.registers <= 255
