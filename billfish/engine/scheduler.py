"""Scheduler: which tokens of which sequences run in the next step. Continuous batching.

It knows lengths and pages, no tensors, no clock and no sampling. One step of the engine:

    pieces = scheduler.step()      allocates their pages
    ... the model runs ...
    scheduler.ran(pieces)          their K and V are in the pages now
    ... new tokens are appended to `output`; scheduler.finish for those that are done ...

First come, first served: only the first of the waiting is admitted, and only the last of the
running is preempted, so that running and then waiting sequences are always in order of arrival. No
sequence overtakes another, the oldest always advances, and so every sequence ends.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from billfish.engine.kv.pages import Pages


@dataclass(eq=False)
class Sequence:
    """One sequence. The engine appends to `output`; the rest is the scheduler's."""

    name: str  # unique among running and waiting ones
    prompt: list[int]
    most: int  # tokens it may have, prompt and output together
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)  # its page table
    computed: int = 0  # tokens whose K and V are in pages
    cached: int = 0  # tokens found in the prefix cache when first admitted
    preempted: int = 0  # how often
    salt: int = 0  # only sequences of equal salt share pages

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def tokens(self) -> list[int]:
        """A copy of all; `part` copies only what is needed."""
        return self.prompt + self.output

    def token(self, at: int) -> int:
        edge = len(self.prompt)
        return self.output[at - edge] if at >= edge else self.prompt[at]

    def part(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop)."""
        edge = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(start - edge, 0) : max(stop - edge, 0)]


@dataclass(slots=True)  # frozen, each would take three times as long to make
class Piece:
    """Tokens [start, start + count) of one sequence in a step: a decode, or a prefill chunk."""

    sequence: Sequence
    start: int
    count: int
    samples: bool  # the logits of its last token yield the next one


class Scheduler:
    """At most `budget` tokens a step, of at most `most_sequences` sequences."""

    def __init__(self, pages: Pages, budget: int, most_sequences: int) -> None:
        if not 1 <= most_sequences <= budget:
            raise ValueError(
                f"{most_sequences} sequences with a budget of {budget} tokens a step: at least one "
                "sequence, and a token for each, or a running one might have to wait"
            )
        self.pages, self.budget, self.most_sequences = pages, budget, most_sequences
        # Pages that are already held (say, one to pad batches with) stay so.
        self._most_pages = pages.free()
        self._present: dict[str, Sequence] = {}  # running and waiting
        self._running: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        # The first of the waiting did not fit, and nothing has changed since. Its prefix is not
        # looked up again until then: that takes 10 ms for 32k tokens in cached pages of 16.
        self._stuck = False

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that hold pages, by arrival."""
        return tuple(self._running.values())

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences that hold none, by arrival."""
        return tuple(self._waiting)

    def can_grow(self) -> bool:
        """Whether the next step needs no preemption, also if every running sequence gets one more
        token before it."""
        size = self.pages.tokens
        missing = (
            -(-min(len(one) + 1, one.most) // size) - len(one.pages)
            for one in self._running.values()
        )
        return sum(missing) <= self.pages.free()

    def add(self, sequence: Sequence) -> None:
        """Appends it to the queue. ValueError if it can never run to its end."""
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
        """Removes it and frees its pages at once, also while it runs: the step in flight writes to
        them before any later step does. False if there is none."""
        sequence = self._present.get(name)
        if sequence is None:
            return False
        self.finish(sequence)
        return True

    def finish(self, sequence: Sequence) -> None:
        """Removes it; its pages are released and stay cached. No-op if it was removed before."""
        if self._present.get(sequence.name) is not sequence:
            return
        del self._present[sequence.name]
        if self._running.pop(sequence.name, None) is None:
            self._waiting.remove(sequence)
        self._strip(sequence)

    def step(self) -> list[Piece]:
        """What to run now, its pages allocated; [] if there is nothing to do."""
        plan: dict[Sequence, Piece] = {}
        budget, size = self.budget, self.pages.tokens
        left = [(len(one) - one.computed, one) for one in self._running.values()]
        # Decodes first (one token to compute), and all of them: there are at most most_sequences <=
        # budget. sorted() is stable: within decodes and within prefills by arrival.
        for count, sequence in sorted(left, key=lambda each: each[0] > 1):
            count = min(count, budget)
            # It may just have been preempted for another.
            if count <= 0 or sequence.name not in self._running:
                continue
            end = sequence.computed + count
            if end <= len(sequence.pages) * size or self._make_room(sequence, end, plan):
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
        """The pieces of the last step are computed. Call it before tokens are appended.

        Sequences that were removed in the meantime are skipped.
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
            # The first of the waiting may share this prompt as its prefix. It may share an output,
            # too, but rarely, and with many sequences one of them fills a page in every step.
            if piece.start < len(sequence.prompt):
                self._stuck = False

    def _make_room(self, sequence: Sequence, tokens: int, plan: dict[Sequence, Piece]) -> bool:
        """Allocates pages for so many tokens of a running sequence. While there are too few, the
        last to arrive is preempted; False if that was this one."""
        while (missing := self._pages_for(tokens) - len(sequence.pages)) > 0:
            taken = self.pages.take(missing)
            if taken is not None:
                sequence.pages += taken
                break
            _, last = self._running.popitem()
            last.preempted += 1
            self._strip(last)
            self._waiting.appendleft(last)
            # It is in the plan only if it decodes and this one is a prefill.
            plan.pop(last, None)
            if last is sequence:
                return False
        return True

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Admits the first of the waiting if pages are free for all its tokens: admitted for its
        first chunk alone, it would be preempted in the next step.

        Running sequences have pages for all their tokens here: while a prefill is incomplete, it
        takes all that is left of the budget, and none is admitted.
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
        """Releases its pages; another sequence may fit now."""
        self.pages.release(sequence.pages)
        # A new list: the old one may be the page table of the step in flight.
        sequence.pages = []
        sequence.computed = 0
        self._stuck = False

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pages.tokens)


def _piece(sequence: Sequence, count: int) -> Piece:
    """The next `count` tokens. A sequence at its maximum length does not sample."""
    length, start = len(sequence), sequence.computed
    assert length <= sequence.most, f"{sequence.name} has {length} tokens"
    return Piece(sequence, start, count, start + count == length < sequence.most)
