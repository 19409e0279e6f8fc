"""Progress of a quantization job: on a terminal a bar with the time left, elsewhere a line for each
block and a few for distillation. `told` is a Progress of offline/progress.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from billfish.cli import show

PARTS = 4  # of distillation: a line is printed after each
CHECKING = "comparing with the original"

Tell = Callable[[Any], None]


@contextmanager
def progress(quiet: bool = False) -> Iterator[Tell]:
    """Shows what it is told."""
    if quiet:
        yield lambda told: None
    elif show.err.is_terminal:
        columns = ("{task.description}", "{task.fields[blocks]}", "{task.fields[left]}")
        what, blocks, left = map(TextColumn, columns)
        with Bar(what, BarColumn(), blocks, TimeElapsedColumn(), left, console=show.err) as bar:
            yield _Drawn(bar)
    else:
        yield _Lines()


class _Drawn:
    """One bar: of blocks, and then of the steps of distillation."""

    def __init__(self, bar: Bar) -> None:
        self.bar = bar
        self.task = bar.add_task("calibrating", total=None, blocks="", left="")

    def __call__(self, told: Any) -> None:
        _print_note(told)
        distilling = told.block == told.blocks
        if told.checked is not None:
            self._draw(told, CHECKING, told.checked, told.blocks)
        elif told.linear is not None:
            error = "" if told.error is None else f"  error {told.error:.2e}"
            self.bar.update(self.task, description=escape(told.linear + error), refresh=True)
        elif distilling and told.step is not None:
            self._draw(told, _distilling(told), told.step, told.steps)
        elif told.step is not None:
            text = f"training block {told.block + 1}: step {told.step}/{told.steps}"
            self._draw(told, text, told.block + told.step / told.steps, told.blocks)
        elif not distilling:
            more = told.block + 1 < told.blocks
            text = f"block {told.block + 2}" if more else "writing"
            self._draw(told, text, told.block + 1, told.blocks)

    def _draw(self, told: Any, text: str, done: float, total: int) -> None:
        blocks = told.blocks if told.block == told.blocks else int(done)
        self.bar.update(
            self.task,
            description=text,
            completed=done,
            total=total,
            blocks=f"{blocks}/{told.blocks} blocks",
            left=_left(told),
            refresh=True,
        )


class _Lines:
    def __init__(self) -> None:
        self.errors: list[float] = []  # of this block's linears
        self.shown = -1  # parts of distillation

    def __call__(self, told: Any) -> None:
        _print_note(told)
        distilling = told.block == told.blocks
        if told.checked is not None:
            if told.checked == 1:
                self._print(CHECKING)
        elif told.linear is not None:
            self.errors += [] if told.error is None else [told.error]
        elif told.step is None:
            self._print(*([_gained(told, "end to end: KL")] if distilling else self._block(told)))
        elif distilling and PARTS * told.step // told.steps > self.shown:
            self.shown = PARTS * told.step // told.steps
            self._print(_distilling(told), _left(told))

    def _block(self, told: Any) -> list[str]:
        worst = f"worst layer error {max(self.errors):.2e}" if self.errors else ""
        self.errors.clear()
        gained = _gained(told, "held-out error")
        return [_place(told), worst, gained, _left(told)]

    def _print(self, *parts: str) -> None:
        show.note(", ".join(part for part in parts if part))


def _distilling(told: Any) -> str:
    return f"end to end: step {told.step}/{told.steps}"


def _gained(told: Any, what: str) -> str:
    gain = told.gain
    return "" if gain is None else f"{what} {show.gained(gain.before, gain.after, gain.kept)}"


def _left(told: Any) -> str:
    return "" if told.seconds_left is None else f"{show.duration(told.seconds_left)} left"


def _place(told: Any) -> str:
    last = told.block == told.blocks
    return "end to end" if last else f"block {told.block + 1}/{told.blocks}"


def _print_note(told: Any) -> None:
    if told.note:
        show.err.print(f"[yellow]{escape(told.linear)}: {escape(told.note)}[/]")
    if told.gain is not None and told.gain.note:
        show.err.print(f"[yellow]{_place(told)}: {escape(told.gain.note)}[/]")
