"""Tile configurations of products on Hopper's wgmma (tiles.cuh): pure functions of sizes.

A tile is 128 to 384 outputs by 16 to 256 tokens. CTAs compute whole tiles, or tiles are split along
k into stripes of equal length (stream-K). A cost model chooses.
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from billfish.kernels.clusters import BAND
from billfish.kernels.device import Gpu

THREADS = 384  # a producer warpgroup, two that multiply (TEAMS)
SLICE = 128  # inputs of a stage
MOST_STAGES = 8  # tiles.cuh reserves barriers for this many
BARRIER_BYTES = 1024
TEAMS = 2
TEAM_WARPS = 4
TURN_BYTES = TEAM_WARPS * 16 * 48  # of a team, to turn its results
EVEN = 0.9  # use fewer CTAs, at least this share of those that fit, if all tiles split equally then
LEAST_STRIPE = 4  # slices of 128 inputs: for shorter stripes the reduction costs more than it saves


# Of a kernel: (tokens, bands), or (tokens, bands, teams) with other than two teams.
Instance = tuple[int, int] | tuple[int, int, int]


@dataclass(frozen=True)
class Costs:
    """Of a kernel, estimated from timings on an H200, in us."""

    stage_us: Mapping[Instance, float]  # 128 inputs, alone on an SM
    together: float  # how much longer it takes where two CTAs share an SM
    busy: float = 0.0  # and how much longer, as a share, where every SM has one
    # What 32 tokens x 128 outputs of a tile add: to the epilogue of every tile, and to a reduction
    # of split tiles, through the workspace or within a cluster. Each also has a constant.
    tile_us: float = 0.0
    meeting_us: tuple[float, float] = (1.5, 1.0)
    cluster_us: float = 0.0
    cluster_tile_us: float = 0.0
    tile_constant_us: float = 0.0
    launch_us: float = 0.0  # of every launch
    clusters: tuple[int, ...] = ()  # sizes of clusters that may share a tile
    twin_us: Mapping[Instance, float] = field(default_factory=dict)  # stage_us of twins
    # How much longer stages take, as a share, where x fills the L2 cache: stages of stripes, which
    # begin at different inputs, and all of them, twins half as much, as they share x.
    spread: float = 0.0
    far: float = 0.0
    # If given, of each time that a CTA leaves or collects sums of a split tile, instead of
    # `meeting_us`: a constant, and for 32 tokens x 128 outputs. The CTA with most work counts.
    sums_us: tuple[float, float] | None = None


@dataclass(frozen=True)
class Held:
    """Bytes in shared memory that differ between kernels."""

    input: int = 2  # of one number of x in a stage
    token: int = 0  # for the epilogue, of each token of a tile
    output: int = 0  # and of each output
    turn: Callable[[int], int] = lambda tokens: TURN_BYTES  # of a team, with tiles of so many


HALVES = Held()
# With results.cuh: 16 tokens x 64 outputs a team, padded, twice unless 256 tokens leave no room.
LINES = Held(turn=lambda tokens: 16 * 144 * (2 if tokens < 256 else 1))
INSTANCES: tuple[Instance, ...] = ((32, 1), (64, 1), (128, 1), (128, 2), (256, 1))  # of most


@dataclass(frozen=True)
class Cut:
    """A tile configuration: the kernel instance, and how its tiles are spread over CTAs."""

    tokens: int  # a multiple of 16 up to 256
    bands: int  # bands of 64 outputs for each warpgroup that multiplies
    stripes: int  # CTAs for each SM if tiles are split; 0 if no tile is split
    splits: int = 1  # CTAs of a cluster that shares a tile, each with a part of its inputs
    twins: bool = False  # clusters of two CTAs with neighbouring outputs, which share x
    teams: int = TEAMS  # warpgroups that multiply: two or three

    @property
    def instance(self) -> Instance:
        size = self.tokens, self.bands
        return size if self.teams == TEAMS else (*size, self.teams)

    @property
    def outputs(self) -> int:
        return self.teams * self.bands * BAND

    @property
    def threads(self) -> int:
        return 32 * TEAM_WARPS * (1 + self.teams)

    @property
    def per_sm(self) -> int:  # tiles.cuh: two_fit
        return 2 if self.teams == TEAMS and self.bands == 1 and self.tokens <= 64 else 1


@dataclass(frozen=True)
class Launch:
    cut: Cut
    m_tiles: int
    n_tiles: int
    whole: int  # tiles that are not split; the others are split into stripes
    blocks: int
    stages: int
    stage_bytes: int
    smem: int
    asked: int  # more than it uses where no SM must get two CTAs while another one has none
    early: bool  # the next kernel may start early (PDL), as this one occupies every SM

    @property
    def cluster(self) -> int:
        return 2 if self.cut.twins else self.cut.splits

    @property
    def sums(self) -> int:
        """Elements of the split-K workspace, 32 bits each."""
        split = self.whole < self.m_tiles * self.n_tiles
        return self.blocks * self.cut.tokens * self.cut.outputs if split else 0

    @property
    def flags(self) -> int:
        """Beside the workspace: one for each warp that multiplies."""
        return self.blocks * self.cut.teams * TEAM_WARPS


def launch(
    cut: Cut, m: int, n: int, k_tiles: int, record_bytes: int, gpu: Gpu, held: Held = HALVES
) -> Launch | None:
    """The launch of a configuration; None if it does not fit in shared memory, or if its stripes
    would be whole tiles."""
    stage = cut.tokens * SLICE * held.input + cut.teams * cut.bands * record_bytes
    stage = math.ceil(stage / 1024) * 1024
    room = gpu.smem_per_block if cut.per_sm == 1 else gpu.half
    turns = cut.teams * held.turn(cut.tokens)
    rest = BARRIER_BYTES + turns + cut.tokens * held.token + cut.outputs * held.output
    stages = min(MOST_STAGES, (room - rest) // stage)
    smem = stages * stage + rest
    if stages < 2:
        return None
    # Twins count as one CTA with one tile, on a GPU with half as many SMs.
    each = 2 if cut.twins else 1
    sms = gpu.sms // each
    m_tiles, n_tiles = math.ceil(m / cut.tokens), math.ceil(n / (cut.outputs * each))
    tiles = whole = m_tiles * n_tiles
    if cut.splits > 1:
        blocks = tiles * cut.splits
        if blocks > gpu.sms * cut.per_sm or k_tiles < cut.splits * LEAST_STRIPE:
            return None
    elif cut.stripes == 0:
        blocks = min(tiles, sms * cut.per_sm)
    else:
        blocks = slots = sms * cut.stripes
        even = slots // tiles * tiles  # every tile is split into equally many parts
        if even >= EVEN * slots:
            blocks = even
        blocks = min(blocks, tiles * max(1, k_tiles // LEAST_STRIPE))
        if tiles % blocks == 0:
            return None
        # Stripes are one to two tiles long: shorter ones would leave more sums to reduce.
        whole = max(0, tiles // blocks - 1) * blocks
    blocks *= each
    # CTAs of the next kernel that start early would all go to the few idle SMs.
    early = cut.per_sm == 1 or blocks >= gpu.sms
    asked = max(smem, gpu.alone) if blocks <= gpu.sms else smem
    return Launch(cut, m_tiles, n_tiles, whole, blocks, stages, stage, smem, asked, early)


def cuts(
    instances: Iterable[Instance] = INSTANCES,
    clusters: Iterable[int] = (),
    twins: Container[Instance] = (),
) -> Iterator[Cut]:
    for instance in instances:
        tokens, bands, *teams = instance
        cut = Cut(tokens, bands, 0, teams=teams[0] if teams else TEAMS)
        for stripes in range(cut.per_sm + 1):
            yield replace(cut, stripes=stripes)
        for splits in clusters:
            if splits <= tokens // 16:  # a CTA of the cluster stores 16 tokens or more
                yield replace(cut, splits=splits)
        if instance in twins:
            for stripes in range(cut.per_sm + 1):
                yield replace(cut, stripes=stripes, twins=True)


def longest(how: Launch, k_tiles: int) -> tuple[int, int, int]:
    """Of the CTA with most work: its slices of 128 inputs, the tiles whose results it stores, and
    how often it leaves or collects sums. Stripes of 1.7 tiles store two tiles, leave the end of a
    third and collect that of another; stripes of 1.5, which begin with or in the middle of a tile,
    leave or collect; of 0.7 they may collect two."""
    workers = how.blocks // 2 if how.cut.twins else how.blocks
    tiles = how.m_tiles * how.n_tiles
    rounds = math.ceil(how.whole / workers)
    if not how.sums:
        return rounds * k_tiles, rounds, 0
    each, longer = divmod((tiles - how.whole) * k_tiles, workers)
    # Stripes begin at multiples of so many slices of a tile, or, if some are longer, anywhere.
    step = 1 if longer else math.gcd(each, k_tiles)
    most = each + (longer > 0)
    if most > k_tiles:
        own, sums = 2, 2 if most >= k_tiles + 2 * step else 1
    elif each == step:  # equal parts of a tile: the others leave theirs when the first is done
        own, sums = 1, k_tiles // each
    else:  # the end of a tile, and the beginning of the next, of one step
        others = math.ceil((k_tiles - step) / each)
        own, sums = 1, others + (2 if others > 1 else 1)  # of two, it waits for the nearest
    return rounds * k_tiles + most, rounds + own, sums


def model_us(how: Launch, k_tiles: int, gpu: Gpu, costs: Costs) -> float:
    """Expected time: the CTAs of an SM share it; epilogues and reductions come on top."""
    cut, tiles = how.cut, how.m_tiles * how.n_tiles
    stage = (costs.twin_us if cut.twins else costs.stage_us)[cut.instance]
    stage *= 1 + costs.busy * min(1.0, how.blocks / gpu.sms)
    if min(cut.per_sm, math.ceil(how.blocks / gpu.sms)) == 2:
        stage *= costs.together
    size = cut.tokens * cut.outputs / (32 * 128)
    if cut.splits > 1:
        parts, stages = 1.0, float(math.ceil(k_tiles / cut.splits))
        meeting = costs.cluster_us + costs.cluster_tile_us * size
    else:
        workers = how.blocks // 2 if cut.twins else how.blocks
        parts = math.ceil(how.whole / workers) + (tiles - how.whole) / workers
        stages, (constant, more) = parts * k_tiles, costs.meeting_us
        meeting = constant + more * size if how.sums else 0.0
    own = max(1.0, parts)  # tiles whose results a CTA stores
    if costs.sums_us is not None and cut.splits == 1:
        (stages, own, sums), (constant, more) = longest(how, k_tiles), costs.sums_us
        meeting = sums * (constant + more * size)
    x_bytes = how.m_tiles * cut.tokens * k_tiles * SLICE * 2
    filled = min(1.0, x_bytes / max(1, gpu.l2_bytes))  # of L2
    stage *= 1 + costs.far * filled / (2 if cut.twins else 1)
    if how.sums:
        stage *= 1 + costs.spread * filled
    epilogues = own * costs.tile_us * size + own * costs.tile_constant_us
    return costs.launch_us + stages * stage + epilogues + meeting


def cheapest(
    m: int,
    n: int,
    k_tiles: int,
    record_bytes: int,
    gpu: Gpu,
    costs: Costs,
    held: Held = HALVES,
) -> Launch | None:
    """The best launch by the cost model; None if no configuration fits in shared memory."""
    sizes = (m, n, k_tiles, record_bytes, gpu, held)
    every = cuts(costs.stage_us, costs.clusters, costs.twin_us)
    fit = (how for cut in every if (how := launch(cut, *sizes)))
    return min(fit, key=lambda how: model_us(how, k_tiles, gpu, costs), default=None)
