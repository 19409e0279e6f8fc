"""What a job reports while it runs: gains of blocks, and a time left that counts blocks and
distillation."""

import pytest
from jobs import request

from billfish.checkpoints.read import Checkpoint
from billfish.offline import distill, progress
from billfish.offline.driver import quantize
from billfish.offline.progress import Reporter
from billfish.offline.task import Task
from billfish.solvers import finetune

TOKENS = 500  # fewer than a step of either training takes


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when a test says so."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


@pytest.fixture
def reporter(llama, text):
    def make(tokens=TOKENS, **changes):
        task, seen = Task(request(llama, None, text, **changes), Checkpoint(llama)), []
        made = Reporter(task, tokens, lambda told: seen.append(told.seconds_left))
        return made, seen, task

    return make


def test_blocks_take_as_long_as_those_before(clock, reporter):
    report, seen, _ = reporter()
    for block, seconds in enumerate((4.0, 6.0, 5.0)):
        clock(seconds)
        report.block(block, None)
    assert seen == [8.0, 5.0, 0.0]


def test_steps_within_a_block_and_distillation_count(clock, reporter):
    report, seen, task = reporter(method="finetune", steps=100, end_to_end=40)
    weights = dict(task.model.model.named_parameters())
    inside = sum(w.numel() for name, w in weights.items() if name.startswith("model.layers."))
    # A step of distillation runs the whole model, forward once more than a block in training.
    relative = 4 / 3 * sum(w.numel() for w in weights.values()) / (inside / 3)
    assert report.relative_step == pytest.approx(relative)
    clock(20)  # GPTQ
    for done in (25, 50, 75, 100):
        clock(25)
        report.step(0, done)
    report.block(0, None)
    whole = 40 * relative
    assert seen == [
        None,
        *(pytest.approx(left + 2 * 120 + whole) for left in (50, 25, 0)),
        pytest.approx(2 * 120 + whole),
    ]
    for block in (1, 2):
        clock(100)
        report.block(block, None)
    report.step(3, 0)
    assert seen[-2:] == [pytest.approx(whole)] * 2  # known from training, until it is measured
    clock(60)
    report.step(3, 10)
    clock(30)
    report.step(3, 20)
    report.block(3, None)
    assert seen[-3:] == [pytest.approx(30 * relative), 3 * 20, 0.0]


def test_few_steps_are_timed_with_their_block(clock, reporter):
    report, seen, _ = reporter(method="finetune", steps=10, end_to_end=40)
    clock(30)
    report.step(0, 10)
    report.block(0, None)
    assert seen == [None, pytest.approx(2 * 30 + 40 * 3 * report.relative_step)]


def test_of_distillation_alone_nothing_is_known_before_it_runs(clock, reporter):
    report, seen, _ = reporter(method="finetune", steps=0, end_to_end=40)
    for block in range(3):
        clock(10)
        report.block(block, None)
    for done in (0, 10, 20):
        clock(20)
        report.step(3, done)
    assert seen == [None] * 5 + [2 * 20]


def test_a_step_has_the_tokens_that_there_are(reporter):
    few = reporter(method="finetune")[0].relative_step
    many = reporter(10**6, method="finetune")[0].relative_step
    assert many / few == pytest.approx(distill.TOKENS / finetune.TOKENS)


def test_a_job_tells_what_training_gained(llama, tmp_path, text):
    seen = []
    changes = {"method": "finetune", "steps": 30, "end_to_end": 10, "check": True}
    wanted = request(llama, tmp_path / "out", text, **changes)
    report = quantize(wanted, on_progress=seen.append)
    assert all((told.block, told.blocks) <= (3, 3) for told in seen)
    assert [told.checked for told in seen if told.checked is not None] == [1, 2, 3]
    ended = [
        told for told in seen if told.linear is None and told.step is None and told.checked is None
    ]
    assert [told.block for told in ended] == [0, 1, 2, 3]
    expected = [*report["training"]["blocks"], report["training"]["whole_model"]]
    for told, kept in zip(ended, expected, strict=True):
        assert (told.gain.before, told.gain.after) == (kept["before"], kept["after"])
    steps = [(told.block, told.step, told.steps) for told in seen if told.step is not None]
    for block, count, every in ((0, 30, finetune.TOLD), (3, 10, distill.TOLD)):
        some = sorted({*range(every, count, every), count, *([0] if block == 3 else [])})
        assert [step for step in steps if step[0] == block] == [(block, n, count) for n in some]
    assert all(told.seconds_left is not None for told in ended) and ended[-1].seconds_left == 0
    told = {told.linear: told.error for told in seen if told.linear}
    assert told == {layer["name"]: layer["error"] for layer in report["layers"]}
    trained = [gain["kept"] for gain in report["training"]["blocks"] for _ in range(7)]
    assert [error is None for error in told.values()] == trained
