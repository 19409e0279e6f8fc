"""What a running job reports: linears, steps of training, blocks, and the time left.

Time left is what blocks and steps have taken so far, times how many are left. Until distillation
has run for some steps, its time is guessed from that of training a block.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

from billfish.offline import distill
from billfish.offline.task import Task
from billfish.schemes.base import Solved
from billfish.solvers import finetune
from billfish.solvers.refining import Gain


@dataclass(frozen=True)
class Progress:
    """Reported after every linear, after some steps of training and, with `linear` and `step` None,
    after every block. Distillation reports as a block after the last, and so does the sentinel,
    with `checked`."""

    block: int
    blocks: int
    linear: str | None = None
    error: float | None = None
    note: str | None = None
    step: int | None = None  # of training
    steps: int = 0
    gain: Gain | None = None  # of a block, if it was trained
    checked: int | None = None  # blocks that the sentinel has compared
    seconds_left: float | None = None


OnProgress = Callable[[Progress], None]


class Reporter:
    """Tells the progress of a job whose first block is about to begin."""

    def __init__(self, task: Task, tokens: int, tell: OnProgress) -> None:
        self.tell, self.blocks = tell, len(task.model.blocks)
        self.steps = task.request.training_steps
        self.distillation = task.request.distillation_steps
        self.relative_step = _relative_step(task, tokens) if self.distillation else 0.0
        self.past: list[float] = []  # seconds of each block
        self.began = time.monotonic()  # this block
        self.first: tuple[int, float] | None = None  # step of this block that was told first, when
        self.pace: float | None = None  # seconds a step

    def linear(self, block: int, name: str, solved: Solved) -> None:
        self.tell(Progress(block, self.blocks, name, solved.error, solved.note))

    def step(self, block: int, done: int) -> None:
        """After `done` steps of training a block, or of distillation."""
        now, distilling = time.monotonic(), block == self.blocks
        steps = self.distillation if distilling else self.steps
        if self.first is not None:
            self.pace = (now - self.first[1]) / (done - self.first[0])
        elif done:  # the first steps are not timed: they load and compile
            self.first = (done, now)
        left: float | None = None
        if self.pace is not None:
            left = self.pace * (steps - done)
            left += self._after(block, [*self.past, now - self.began + left]) or 0.0
        self.tell(Progress(block, self.blocks, step=done, steps=steps, seconds_left=left))

    def block(self, block: int, gain: Gain | None) -> None:
        """After a block, or after distillation."""
        now = time.monotonic()
        self.past.append(now - self.began)
        self.began, self.first = now, None
        if self.pace is None and self.steps:  # too few to be timed: the solver's time counts, too
            self.pace = self.past[-1] / self.steps
        left = self._after(block, self.past)
        if block + 1 == self.blocks and self.pace is not None:
            self.pace *= self.relative_step
        self.tell(Progress(block, self.blocks, gain=gain, seconds_left=left))

    def checked(self, blocks: int) -> None:
        """After the sentinel has compared some blocks."""
        self.tell(Progress(self.blocks, self.blocks, checked=blocks))

    def _after(self, block: int, seconds: list[float]) -> float | None:
        """Seconds from the end of `block` to that of the job, if blocks take `seconds`; None if
        nothing is known of distillation."""
        if block == self.blocks:
            return 0.0
        blocks = mean(seconds) * (self.blocks - block - 1)
        if self.distillation and self.pace is None:
            return None
        return blocks + self.distillation * self.relative_step * (self.pace or 0.0)


def _relative_step(task: Task, tokens: int) -> float:
    """Time of a step of distillation over that of training a block, guessed: weights that are
    multiplied, tokens, and passes (forward 1, backward 2, a block's second forward 1)."""
    counts = {name: weight.numel() for name, weight in task.model.model.named_parameters()}
    inside = sum(n for name, n in counts.items() if name.startswith(task.model.prefix + "."))
    whole = 4 * min(distill.TOKENS, tokens) * sum(counts.values())
    block = 3 * min(finetune.TOKENS, tokens) * inside / len(task.model.blocks)
    return float(whole / block)
