"""The ring and the exchange of sums of w4a16_decode (team_loops.cuh), as actors that run in any
order.

Copies land when and in what order they like, and so do stores into the neighbour. Whatever the
order: nobody waits for ever, a warp multiplies what belongs together, nothing is overwritten that
is still to be read. Mbarriers are as PTX says: a parity is all that a waiter can ask for.
"""

import random
from collections import Counter

import pytest

KINDS = [(1, 4), (1, 2), (2, 2), (4, 1)]  # bands at most, slices of a stage
TEAMS, TEAM_WARPS = 2, 4  # and of more than one band a warp that sums x for each team
WARPS = TEAMS * TEAM_WARPS


class Barrier:
    def __init__(self, arrivals):
        self.arrivals = self.missing = arrivals
        self.bytes = self.phase = 0

    def arrive(self, expect=0):
        assert self.missing > 0, "more arrivals than the barrier was made for"
        self.missing -= 1
        self.complete(-expect)

    def complete(self, count):
        self.bytes += count
        if self.missing == 0 and self.bytes == 0:
            self.missing, self.phase = self.arrivals, self.phase + 1

    def done(self, parity):
        return self.phase % 2 != parity


class Slot:
    """TeamSlot: the two teams have the stages by turns."""

    def __init__(self, stages, team):
        self.stages, self.index, self.rounds = stages, team, 0

    @property
    def parity(self):
        return self.rounds // (1 + self.stages % 2) % 2

    def advance(self):
        self.index += TEAMS
        if self.index >= self.stages:
            self.index -= self.stages
            self.rounds += 1


class Block:
    def __init__(self, rank, span, stages, summed):
        self.rank, self.span = rank, span

        def of_teams(arrivals):
            return [[Barrier(arrivals) for _ in range(stages)] for _ in range(TEAMS)]

        self.full = of_teams(2)  # weights, and the warp that copies x
        self.summed = of_teams(1)
        self.empty = [Barrier(TEAM_WARPS + summed) for _ in range(stages)]
        self.reduced, self.freed = Barrier(1), Barrier(WARPS)
        self.ring = {}  # (slot, "weights", "x" or "sums") -> (pass, stage)
        self.readers = Counter()  # of a slot
        self.sums = {}  # (row, part) -> pass
        self.waiting = []  # passes of warps that are to read them
        self.read = Counter()  # warps that have, by pass
        self.multiplied = Counter()
        self.ended = False


class Model:
    def __init__(self, seed, kind, stages, haves, spans, shared=False, freed=True, meet=True):
        self.random = random.Random(seed)
        self.bands, self.slices = kind
        self.summed = self.bands > 1
        self.stages, self.haves = stages, haves
        # Mistakes: teams that share barriers; warps that send sums before the other block's have
        # read those of the pass before, or before their own block's have.
        self.shared, self.freed, self.meet = shared, freed, meet
        self.blocks = [Block(rank, span, stages, self.summed) for rank, span in enumerate(spans)]
        self.flying = []  # what memory has yet to do

    def turns(self, block):
        """(pass, stage) in the order of copies; the teams have them by turns."""
        each = range(-(-block.span // self.slices))
        return [(number, stage) for number in range(len(self.haves)) for stage in each]

    def team(self, count):
        return 0 if self.shared else count % TEAMS

    def place(self, block, slot, what, tag):
        assert block.readers[slot] == 0, f"{what} of {tag} lands on what is being read"
        block.ring[slot, what] = tag

    def copier(self, block, what):
        index, parity = 0, 1
        for count, tag in enumerate(self.turns(block)):
            while not block.empty[index].done(parity):
                yield
            full = block.full[self.team(count)][index]
            if what == "weights":
                full.arrive(expect=1)

            def land(full=full, index=index, tag=tag):
                self.place(block, index, what, tag)
                full.complete(1) if what == "weights" else full.arrive()

            self.flying.append(land)
            index += 1
            if index == self.stages:
                index, parity = 0, parity ^ 1
            yield

    def sum(self, block, team):
        slot = Slot(self.stages, team)
        for count, tag in list(enumerate(self.turns(block)))[team::TEAMS]:
            own, index = self.team(count), slot.index
            while not block.full[own][index].done(slot.parity):
                yield
            assert block.ring[index, "x"] == tag
            yield
            assert block.ring[index, "x"] == tag
            block.ring[index, "sums"] = tag
            block.summed[own][index].arrive()
            block.empty[index].arrive()
            slot.advance()
            yield

    def math(self, block, team, mate):
        slot = Slot(self.stages, team)
        turns = list(enumerate(self.turns(block)))
        for number, have in enumerate(self.haves):
            for count, tag in turns:
                if tag[0] != number or count % TEAMS != team:
                    continue
                own, index = self.team(count), slot.index
                while not block.full[own][index].done(slot.parity):
                    yield
                block.readers[index] += 1
                yield
                for what in ("weights", "x"):
                    assert block.ring[index, what] == tag, what
                while self.summed and not block.summed[own][index].done(slot.parity):
                    yield
                assert not self.summed or block.ring[index, "sums"] == tag
                for sub in range(self.slices):
                    slice_ = tag[1] * self.slices + sub
                    if slice_ >= block.span:
                        continue
                    if self.summed:  # a brick of every band
                        for band in range(have):
                            block.multiplied[number, band, mate, slice_] += 1
                    elif sub % 2 == mate // 2:  # half of a band
                        for brick in range(2):
                            block.multiplied[number, 0, mate % 2 * 2 + brick, slice_] += 1
                yield
                block.readers[index] -= 1
                block.empty[index].arrive()
                slot.advance()
                yield
            yield from self.reduce(block, team, mate, number, have)

    def owned(self, have):
        """Rows of 16 of a block, or fewer of the last."""
        return -(-have * TEAM_WARPS // len(self.blocks))

    def parts(self, rank, team, mate, have):
        """(owner, row of 16, part) of a warp's sums."""
        if self.summed:
            for band in range(have):
                owner, row = divmod(band * TEAM_WARPS + mate, self.owned(have))
                away = (rank - owner) % len(self.blocks)
                yield owner, row, away * TEAMS + (team ^ band % TEAMS)
        else:
            for brick in range(2):  # of a half, of which each block has one
                yield mate % 2, brick, rank * 4 + team * 2 + mate // 2

    def reduce(self, block, team, mate, number, have):
        while self.freed and number > 0 and not block.freed.done((number - 1) % 2):
            yield
        owned, parts = self.owned(have), len(self.blocks) * TEAMS - 1 if self.summed else 8
        rows = min(owned, max(0, have * TEAM_WARPS - block.rank * owned))
        if (team, mate) == (0, 0):
            block.reduced.arrive(expect=rows * parts)
        for owner, row, part in self.parts(block.rank, team, mate, have):
            if self.summed and part == 0:
                continue  # kept

            def land(owner=self.blocks[owner], key=(row, part)):
                assert not owner.ended, "a store into a block that has ended"
                assert not any(number_ < number for number_ in owner.waiting), "unread sums"
                owner.sums[key] = number
                owner.reduced.complete(1)

            self.flying.append(land)
            yield
        block.waiting.append(number)
        while not block.reduced.done(number % 2):
            yield
        yield
        first = 1 if self.summed else 0  # part 0 is what a warp kept
        keys = [(row, part + first) for row in range(rows) for part in range(parts)]
        assert all(block.sums.get(key) == number for key in keys), "sums of another pass"
        block.waiting.remove(number)
        block.read[number] += 1
        if number + 1 == len(self.haves):
            return
        self.blocks[block.rank ^ 1].freed.arrive()
        while self.meet and block.read[number] < WARPS:
            yield

    def run(self):
        actors = []
        for block in self.blocks:
            mine = [self.copier(block, "weights"), self.copier(block, "x")]
            mine += [self.sum(block, team) for team in range(TEAMS if self.summed else 0)]
            mine += [
                self.math(block, team, mate) for team in range(TEAMS) for mate in range(TEAM_WARPS)
            ]
            actors += [(block, actor) for actor in mine]
        left = Counter(block.rank for block, _ in actors)
        for _ in range(200_000):
            if not actors:
                break
            if self.flying and self.random.random() < 0.3:
                self.flying.pop(self.random.randrange(len(self.flying)))()
                continue
            # Mostly a few actors at a time, so that some get far ahead of others.
            chosen = self.random.randrange(min(len(actors), self.random.choice((1, 3, 99))))
            block, actor = actors[chosen]
            try:
                next(actor)
            except StopIteration:
                actors.pop(chosen)
                left[block.rank] -= 1
                block.ended = left[block.rank] == 0
            if self.random.random() < 0.05:
                self.random.shuffle(actors)
        assert not actors, "somebody waits for ever"
        for block in self.blocks:
            wanted = {
                (number, band, brick, slice_): 1
                for number, have in enumerate(self.haves)
                for band in range(have)
                for brick in range(4)
                for slice_ in range(block.span)
            }
            assert block.multiplied == wanted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_any_order_ends_and_is_right(kind, stages):
    choose = random.Random(f"{kind} {stages}")
    for seed in range(8):
        passes = choose.randint(1, 4) if kind[0] == 4 else 1
        haves = [choose.randint(min(2, passes), kind[0]) for _ in range(passes)]
        spans = [choose.choice((0, 1, 3, 8)), choose.choice((1, 1, 2, 5, 9))]
        Model(seed, kind, stages, haves, spans).run()
        if kind[0] > 1:  # clusters of four have one pass
            spans += [choose.choice((0, 2, 5)), choose.choice((1, 4))]
            Model(seed, kind, stages, haves[:1], spans).run()


@pytest.mark.parametrize(
    ("mistake", "spans"),
    [
        # With an odd number of stages a team has each in every second round: it takes the round
        # before for its own.
        ({"shared": True}, [9, 9]),
        ({"freed": False}, [0, 1]),
        ({"meet": False}, [0, 1]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_model_sees_mistakes(mistake, spans):
    with pytest.raises(AssertionError):
        for seed in range(200):
            Model(seed, (4, 1), 3, [3, 2, 4, 2], spans, **mistake).run()


def test_the_model_sees_passes_of_one_band():
    """They do not occur: shares of more than two bands have passes of two at least. Of one band, a
    warp that keeps all its sums and is late would find `freed` two phases ahead."""
    with pytest.raises(AssertionError):
        for seed in range(200):
            Model(seed, (4, 1), 3, [2, 1, 1], [0, 1]).run()
