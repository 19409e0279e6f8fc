"""Scheduler: all of its rules under a fake engine that plays at random."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import names, scheduler

from billfish.engine.kv.pages import Pages
from billfish.engine.scheduler import Scheduler, Sequence


class Engine:
    """Plays the model: a page holds, for each of its tokens, the whole text up to it, which is what
    K and V depend on. Checks after each step all that must hold."""

    def __init__(self, random, plan, shared_outputs):
        self.random, self.plan, self.shared_outputs = random, plan, shared_outputs
        self.memory = {}  # (page, place in it) -> salt and text
        self.arrivals = []
        self.ends = {}  # name -> length at which it stops by itself
        self.finished = set()
        self.preempted = {}

    def add(self):
        random, plan = self.random, self.plan
        room = plan.pages.count * plan.pages.tokens
        most = random.randint(1, min(room, 6 * plan.pages.tokens))
        # Few different beginnings, so that prefixes are often shared.
        family = random.randrange(3)
        prompt = [family] * random.randint(1, random.randint(1, most))
        if random.random() < 0.5:
            prompt[-1] = 9
        one = Sequence(str(len(self.arrivals)), prompt, most, salt=random.randrange(4) // 3)
        plan.add(one)
        self.arrivals.append(one)
        self.ends[one.name] = random.randint(len(prompt), most)

    def cancel(self):
        if self.arrivals:
            name = self.random.choice(self.arrivals).name
            present = name in names(self.plan.running + self.plan.waiting)
            assert self.plan.cancel(name) == present

    def turn(self, cancels):
        plan, size = self.plan, self.plan.pages.tokens
        pieces = plan.step()
        self.check(pieces)
        tables = [(piece, [*piece.sequence.pages]) for piece in pieces]
        if cancels and self.random.random() < 0.3:
            self.cancel()  # before the model has written: it writes nevertheless
        for piece, table in tables:
            one = piece.sequence
            for at in range(piece.start + piece.count):
                key = (table[at // size], at % size)
                content = (one.salt, one.part(0, at + 1))
                if at < piece.start:
                    assert self.memory[key] == content, f"{one.name} reads another's token {at}"
                else:
                    self.memory[key] = content
        plan.ran(pieces)
        for piece in pieces:
            one = piece.sequence
            if one not in plan.running:
                continue
            assert one.computed == piece.start + piece.count
            if piece.samples and len(one) < self.ends[one.name]:
                fresh = 100 + len(self.arrivals) * int(one.name) + len(one)
                one.output.append(5 if self.shared_outputs else fresh)
            if one.computed == len(one) or len(one) == one.most:
                plan.finish(one)
                self.finished.add(one.name)
        self.check_memory()

    def check(self, pieces):
        plan, size = self.plan, self.plan.pages.tokens
        pages, running, waiting = plan.pages, plan.running, plan.waiting
        assert sum(piece.count for piece in pieces) <= plan.budget
        assert all(piece.count >= 1 for piece in pieces)
        assert len({piece.sequence for piece in pieces}) == len(pieces)
        assert len(running) <= plan.most_sequences
        numbers = [int(name) for name in names(running + waiting)]
        assert numbers == sorted(numbers), "first come, first served"
        assert bool(pieces) == bool(numbers), "there is work, and nothing runs"
        assert not pieces or pieces[0].sequence is running[0] or pieces[0].count == 1
        if running:
            assert running[0] in [piece.sequence for piece in pieces], "the oldest advances"
        planned = {piece.sequence: piece for piece in pieces}
        assert set(planned) <= set(running)
        for one in running:
            piece = planned.get(one)
            if len(one) - one.computed == 1:
                assert piece and piece.count == 1, "every decode gets its token"
            if piece:
                assert piece.start == one.computed
                stop = piece.start + piece.count
                assert piece.samples == (stop == len(one) < one.most)
                assert len(one.pages) == -(-stop // size), "as many pages as needed"
                if stop < len(one):
                    spent = sum(piece.count for piece in pieces)
                    assert one is running[-1] and spent == plan.budget, "only the last is cut"
        # A page of several is a full page of a text that they share.
        owners = {}
        for one in running:
            assert len(set(one.pages)) == len(one.pages)
            for number, page in enumerate(one.pages):
                owners.setdefault(page, []).append((one, number))
        for held in owners.values():
            if len(held) > 1:
                stops = {(number + 1) * size for _, number in held}
                assert len(stops) == 1, "the same place in each text"
                (stop,) = stops
                assert all(one.computed >= stop for one, _ in held), "nobody writes to it"
                assert len({(one.salt, *one.part(0, stop)) for one, _ in held}) == 1
        assert pages.used() == len(owners)
        assert pages.used() + pages.free() == pages.count
        for one in waiting:
            assert not one.pages and not one.computed
        for one in self.arrivals:
            if one.preempted > self.preempted.get(one.name, 0):
                # It cannot come back at once, unless it shares now what it had a copy of.
                assert one in waiting or any(len(owners[page]) > 1 for page in one.pages)
            self.preempted[one.name] = one.preempted
        left = plan.budget - sum(piece.count for piece in pieces)
        if waiting and left and len(running) < plan.most_sequences and not self.shared_outputs:
            found = pages.find(waiting[0].tokens, waiting[0].salt)
            needed = -(-len(waiting[0]) // size) - len(found)
            assert needed > pages.free(), "the first of the waiting would have fitted"
            pages.release(found)

    def check_memory(self):
        size = self.plan.pages.tokens
        for one in self.plan.running:
            for at in range(one.computed):
                page = one.pages[at // size]
                assert self.memory[page, at % size] == (one.salt, one.part(0, at + 1))


@given(
    random=st.randoms(use_true_random=False),
    count=st.integers(1, 12),
    size=st.integers(1, 4),
    most=st.integers(1, 5),
    spare=st.integers(0, 12),
    caching=st.booleans(),
    cancels=st.booleans(),
    shared_outputs=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_a_fake_engine_runs_everything_to_its_end(
    random, count, size, most, spare, caching, cancels, shared_outputs
):
    plan = Scheduler(Pages(count, size, caching), most + spare, most)
    engine = Engine(random, plan, shared_outputs)
    for _ in range(30):
        for _ in range(random.choice((0, 0, 1, 3))):
            engine.add()
        if cancels and random.random() < 0.1:
            engine.cancel()
        engine.turn(cancels)
    # The oldest alone gains a token a step, or comes nearer to one: nothing goes round in circles.
    for _ in range(sum(one.most + 1 for one in engine.arrivals)):
        if not plan.running and not plan.waiting:
            break
        engine.turn(cancels=False)
    assert not plan.running and not plan.waiting and plan.step() == []
    assert plan.pages.used() == 0 and plan.pages.free() == count
    if not cancels:
        assert len(engine.finished) == len(engine.arrivals)
        assert all(len(one) == engine.ends[one.name] for one in engine.arrivals)


def test_the_fake_engine_reaches_what_it_is_there_for():
    """Preemption, sharing and chunks do happen under such play; else the above proves little."""
    engines = []
    for seed in range(60):
        engine = Engine(Random(seed), scheduler(count=8, tokens=2, budget=6), True)
        for _ in range(40):
            if engine.random.random() < 0.5:
                engine.add()
            engine.turn(cancels=False)
        engines.append(engine)
        assert engine.finished
    every = [one for engine in engines for one in engine.arrivals]
    assert sum(one.preempted > 0 for one in every) > 20
    assert sum(one.cached > 0 for one in every) > 20
