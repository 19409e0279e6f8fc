"""Progress of a job as a user sees it: a bar on a terminal, few lines elsewhere."""

import io
import re

import pytest
from rich.console import Console

from billfish.cli import show
from billfish.cli.progress import progress
from billfish.offline.progress import Progress
from billfish.solvers.refining import Gain

DIVERGED = Gain(0.5, None, False, "training diverged before step 50: kept GPTQ's codes")


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system=None, width=160)
    monkeypatch.setattr(show, "err", console)
    return lambda: re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())


def lines(capsys, *told):
    with progress() as tell:
        for each in told:
            tell(each)
    return capsys.readouterr().err.splitlines()


def test_a_line_for_each_block(capsys):
    assert lines(
        capsys,
        Progress(0, 3, "a.0.q_proj", 1e-3),
        Progress(0, 3, "a.0.k_proj", 2e-3, "more damping"),
        Progress(0, 3, seconds_left=125.0),
        Progress(1, 3, "a.1.q_proj"),  # rtn, or trained: no error
        Progress(1, 3, seconds_left=60.0),
        Progress(2, 3, "a.2.q_proj", 5e-4),
        Progress(2, 3, seconds_left=0.0),
    ) == [
        "a.0.k_proj: more damping",
        "block 1/3, worst layer error 2.00e-03, 2m05s left",
        "block 2/3, 1m00s left",
        "block 3/3, worst layer error 5.00e-04, 0m00s left",
    ]


def test_a_line_says_what_training_gained(capsys):
    assert lines(
        capsys,
        *(Progress(0, 3, step=step, steps=400) for step in range(25, 401, 25)),
        Progress(0, 3, gain=Gain(0.02, 0.015, True), seconds_left=60.0),
        Progress(1, 3, gain=Gain(0.02, 0.021, False), seconds_left=30.0),
        Progress(2, 3, gain=DIVERGED),
    ) == [
        "block 1/3, held-out error 0.02 -> 0.015 (-25.0 %), 1m00s left",
        "block 2/3, held-out error 0.02 -> 0.021 (+5.0 %), not kept, 0m30s left",
        f"block 3/3: {DIVERGED.note}",
        "block 3/3, held-out error 0.5, training not kept",
    ]


@pytest.mark.parametrize("count", [10, 200, 2000])
def test_a_few_lines_for_distillation(capsys, count):
    steps = [Progress(3, 3, step=n, steps=count, seconds_left=9) for n in range(0, count + 1, 10)]
    shown = lines(capsys, *steps, Progress(3, 3, gain=Gain(0.0525, 0.0468, True)))
    assert shown[0] == f"end to end: step 0/{count}, 0m09s left"
    assert shown[-2] == f"end to end: step {count}/{count}, 0m09s left"
    assert shown[-1] == "end to end: KL 0.0525 -> 0.0468 (-10.9 %)"
    assert len(shown) == (3 if count == 10 else 6)


def test_errors_that_are_not_finite(capsys):
    gains = (Gain(None, None, False), Gain(None, 0.5, True), Gain(None, 0.5, False))
    assert lines(capsys, *(Progress(0, 1, gain=gain) for gain in gains)) == [
        "block 1/1, held-out error not finite, training not kept",
        "block 1/1, held-out error not finite -> 0.5",
        "block 1/1, held-out error not finite -> 0.5, not kept",
    ]


def test_errors_of_zero_have_no_percentage(capsys):
    assert lines(capsys, Progress(0, 1, gain=Gain(0.0, 0.0, False))) == [
        "block 1/1, held-out error 0 -> 0, not kept"
    ]


def test_a_bar_on_a_terminal(terminal):
    with progress() as tell:
        assert "calibrating" in terminal()
        tell(Progress(2, 30, step=100, steps=400, seconds_left=125.0))
        shown = terminal()
        assert "training block 3: step 100/400" in shown
        assert "2/30 blocks" in shown and "2m05s left" in shown
        tell(Progress(2, 30, "model.layers.2.mlp.down_proj", 1.5e-3))
        assert "model.layers.2.mlp.down_proj  error 1.50e-03" in terminal()
        tell(Progress(2, 30, gain=DIVERGED))
        assert f"block 3/30: {DIVERGED.note}" in terminal() and "3/30 blocks" in terminal()
        tell(Progress(30, 30, step=40, steps=200))
        assert "end to end: step 40/200" in terminal() and "30/30 blocks" in terminal()


def test_the_bar_moves_with_steps(terminal):
    """By the width of its filled part; without colours the rest is blank."""
    drawn = []
    with progress() as tell:
        for told in (
            Progress(0, 2, step=50, steps=100),
            Progress(0, 2, step=100, steps=100),
            Progress(1, 2, step=50, steps=100),
            Progress(1, 2),
            Progress(2, 2, step=20, steps=200),
            Progress(2, 2, step=100, steps=200),
        ):
            tell(told)
            drawn.append(terminal().split("\r")[-1])
    filled = [line.count("━") for line in drawn]
    assert filled[:4] == sorted(filled[:4]) and filled[0] * 4 == pytest.approx(filled[3], abs=4)
    assert filled[1] * 2 == pytest.approx(filled[3], abs=2)
    assert filled[4] < filled[0] and filled[5] * 2 == pytest.approx(filled[3], abs=2)


def test_quiet_says_nothing(capsys):
    with progress(quiet=True) as tell:
        tell(Progress(0, 1, gain=DIVERGED))
    assert capsys.readouterr() == ("", "")
