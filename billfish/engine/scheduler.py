"""Scheduler: which tokens of which sequences run in the next step. Continuous batching.

It knows lengths and pages, no tensors, no clock and no sampling. One turn of the engine is

    pieces = scheduler.step()      pages for them are taken
    ... the model runs ...
    scheduler.ran(pieces)          K and V of them lie in pages now
    ... new tokens are appended to `output`; scheduler.finish for those that are done ...

Running sequences in order, then waiting ones in order, are always all sequences by arrival: only
the first of the waiting is admitted and only the last of the running is sent back. So nobody
overtakes, the oldest always advances, and whatever happens behind it, it ends.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from billfish.engine.kv.pages import Pages


@dataclass(eq=False)
class Sequence:
    """One text being written. The engine appends to `output`; the rest is the scheduler's."""

    name: str  # unique among those present
    prompt: list[int]
    most: int  # tokens it may have in all, prompt and output; it never has more
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)  # in order of the text
    computed: int = 0  # tokens whose K and V lie in pages
    cached: int = 0  # tokens found in the prefix cache when first admitted
    preempted: int = 0  # times it lost its pages
    salt: int = 0  # only sequences of equal salt share pages

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def tokens(self) -> list[int]:
        """A copy of all of them; `part` copies only what is needed."""
        return self.prompt + self.output

    def part(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop)."""
        edge = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(start - edge, 0) : max(stop - edge, 0)]


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + count) of one sequence in a step."""

    sequence: Sequence
    start: int
    count: int
    samples: bool  # the last of them yields the next token


class Scheduler:
    """At most `budget` tokens a step, of at most `most_sequences` sequences."""

    def __init__(self, pages: Pages, budget: int, most_sequences: int) -> None:
        if not 1 <= most_sequences <= budget:
            raise ValueError(
                f"{most_sequences} sequences with a budget of {budget} tokens a step: at least one "
                "sequence, and a token for each, or a running one might have to wait"
            )
        self.pages, self.budget, self.most_sequences = pages, budget, most_sequences
        # Pages that are held already (say, one to pad batches with) are not coming back.
        self._most_pages = pages.free()
        self._present: dict[str, Sequence] = {}  # running and waiting
        self._running: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        # The first of the waiting did not fit, and nothing has happened since that could help. Its
        # prefix is not looked up again until then: 10 ms for 32k tokens in cached pages of 16.
        self._stuck = False

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Those that hold pages, by arrival."""
        return tuple(self._running.values())

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Those that hold none, by arrival."""
        return tuple(self._waiting)

    @property
    def admits(self) -> bool:
        """Whether the next step might let somebody in."""
        return bool(self._waiting) and not self._stuck and len(self._running) < self.most_sequences

    def add(self, sequence: Sequence) -> None:
        """Put it behind all others. ValueError if it can never run to its end."""
        name, most = sequence.name, sequence.most
        if name in self._present:
            raise ValueError(f"{name}: a sequence of that name is here already")
        if not sequence.prompt:
            raise ValueError(f"{name}: the prompt is empty; at least one token is needed")
        if len(sequence) > most:
            raise ValueError(f"{name}: has {len(sequence)} tokens and may have {most}")
        if self._pages_for(most) > self._most_pages:
            raise ValueError(
                f"{name}: up to {most} tokens need {self._pages_for(most)} pages of "
                f"{self.pages.tokens}, and there are {self._most_pages}; ask for fewer tokens, or "
                "give the cache more memory"
            )
        assert not sequence.pages and not sequence.computed, f"{name} comes with pages"
        self._present[name] = sequence
        self._waiting.append(sequence)

    def cancel(self, name: str) -> bool:
        """Forget it and free its pages at once, also while it runs: what the step under way still
        writes to them comes before what any later step does. False if there is none."""
        sequence = self._present.get(name)
        if sequence is None:
            return False
        self.finish(sequence)
        return True

    def finish(self, sequence: Sequence) -> None:
        """It is done. Its pages go back and stay cached. Nothing happens if it left before."""
        if self._present.get(sequence.name) is not sequence:
            return
        del self._present[sequence.name]
        if self._running.pop(sequence.name, None) is None:
            self._waiting.remove(sequence)
        self._strip(sequence)

    def step(self) -> list[Piece]:
        """What to run now, with pages for it; [] if there is nothing to do."""
        plan: dict[Sequence, Piece] = {}
        budget = self.budget
        # One token to go is a decode (or as cheap as one), and each of them gets it: there are at
        # most most_sequences <= budget. sorted() is stable: within each kind by arrival.
        for sequence in sorted(self._running.values(), key=lambda one: len(one) - one.computed > 1):
            assert len(sequence) <= sequence.most, f"{sequence.name} has {len(sequence)} tokens"
            count = min(len(sequence) - sequence.computed, budget)
            # Not there any more: it has just made room for another.
            if count <= 0 or sequence.name not in self._running:
                continue
            if self._make_room(sequence, sequence.computed + count, plan):
                plan[sequence] = _piece(sequence, count)
                budget -= count
        while self._waiting and budget and len(self._running) < self.most_sequences:
            sequence = self._waiting[0]
            if self._stuck or not self._admit(sequence, budget):
                self._stuck = True
                break
            plan[sequence] = _piece(sequence, min(len(sequence) - sequence.computed, budget))
            budget -= plan[sequence].count
        return list(plan.values())

    def ran(self, pieces: Iterable[Piece]) -> None:
        """The pieces of the last step are computed. To be called before tokens are appended.

        Sequences that have left in the meantime are passed over.
        """
        for piece in pieces:
            sequence = piece.sequence
            if self._running.get(sequence.name) is not sequence:
                continue
            assert sequence.computed == piece.start, (sequence.name, sequence.computed, piece.start)
            sequence.computed += piece.count
            tokens = self.pages.tokens
            start, stop = piece.start // tokens, sequence.computed // tokens
            if start < stop:
                self.pages.remember(
                    sequence.part(start * tokens, stop * tokens),
                    sequence.pages[start:stop],
                    sequence.salt,
                    after=sequence.pages[start - 1] if start else None,
                )
            # A prompt may be what the first of the waiting begins with. So may a text just written,
            # but hardly ever, and with many sequences one of them fills a page in every step.
            if piece.start < len(sequence.prompt):
                self._stuck = False

    def _make_room(self, sequence: Sequence, tokens: int, plan: dict[Sequence, Piece]) -> bool:
        """Pages for so many tokens of a running sequence. While there are too few the last to
        arrive is preempted, at worst this one itself: False."""
        while (missing := self._pages_for(tokens) - len(sequence.pages)) > 0:
            taken = self.pages.take(missing)
            if taken is not None:
                sequence.pages += taken
                break
            _, last = self._running.popitem()
            last.preempted += 1
            self._strip(last)
            self._waiting.appendleft(last)
            # Planned already only if it decodes and this one has more to go than a token.
            plan.pop(last, None)
            if last is sequence:
                return False
        return True

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Let the first of the waiting run, if pages are free for all its tokens. To admit it for
        its first chunk alone would be to preempt it in the next.

        Those that run have pages for all of theirs: while one of them has not, it is given all that
        is left of the budget, and nobody is admitted.
        """
        found = self.pages.find(sequence.tokens, sequence.salt)
        if self._pages_for(len(sequence)) - len(found) > self.pages.free():
            self.pages.release(found)
            return False
        sequence.computed = len(found) * self.pages.tokens
        if not sequence.preempted:
            sequence.cached = sequence.computed
        stop = min(sequence.computed + budget, len(sequence))
        taken = self.pages.take(self._pages_for(stop) - len(found))
        assert taken is not None, (sequence.name, stop, len(found), self.pages.free())
        sequence.pages = found + taken
        self._running[sequence.name] = self._waiting.popleft()
        return True

    def _strip(self, sequence: Sequence) -> None:
        """Take its pages away; others may fit now."""
        self.pages.release(sequence.pages)
        # A new list: the old one may be the page table of the step under way.
        sequence.pages = []
        sequence.computed = 0
        self._stuck = False

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pages.tokens)


def _piece(sequence: Sequence, count: int) -> Piece:
    """The next `count` tokens. A text that has all it may have is computed, but not continued."""
    length, start = len(sequence), sequence.computed
    return Piece(sequence, start, count, start + count == length < sequence.most)
