"""A minute on a card of the test's own, and the queue of the real one on a stream of the test's."""

import json
from itertools import pairwise
from threading import Event

import pytest
import torch
from fake_card import RULES, FakeCard
from typer.testing import CliRunner

from billfish.bench import kernels, timing
from billfish.bench.kernels import KernelRequest
from billfish.bench.shapes import parse_shapes
from billfish.bench.sustain import Sustain, summarize_seconds
from billfish.cli import bench as cli_bench
from billfish.errors import UserError
from billfish.version import __version__


@pytest.fixture(autouse=True)
def no_git(monkeypatch):
    monkeypatch.setattr(kernels, "commit", lambda: "c0ffee")


def run(card=None, seconds=20, shapes="128x64,256x64", rows=(1, 4)):
    kept = []
    request = KernelRequest(parse_shapes(shapes), rows, op="reference", modes=("pdl",))
    card = card or FakeCard()
    keep = lambda result: kept.append(json.dumps(result))  # noqa: E731
    return Sustain(request, card, RULES, seconds, keep=keep).measure(), card, kept


# -- what the numbers say


def test_kept_is_the_first_tenth_over_the_last():
    times = [9.0, 10.0, 99.0, *[50.0] * 24, 1.0, 20.0, 30.0]  # 30 s: tenths of three
    found = summarize_seconds([(us, None) for us in times])
    assert (found["first"], found["last"], found["kept"]) == (10.0, 20.0, 0.5)


def test_a_short_run_compares_its_first_and_last_second():
    found = summarize_seconds([(8.0, None), (100.0, None), (10.0, None)])
    assert (found["first"], found["last"], found["kept"]) == (8.0, 10.0, 0.8)


def test_samples_say_what_was_read_and_what_was_not():
    read = {"sm_mhz": 1500.0, "watts": None, "celsius": 71.0, "memory_mhz": 3201.0}
    assert summarize_seconds([(8.0, read), (9.0, None)])["samples"] == [
        {"second": 1, "us": 8.0, "sm_mhz": 1500.0, "watts": None, "celsius": 71.0},
        {"second": 2, "us": 9.0, "sm_mhz": None, "watts": None, "celsius": None},
    ]


def test_the_result_has_every_shape_and_m_with_cublas_right_after():
    result, card, kept = run()
    assert json.loads(json.dumps(result)) == result and result["complete"]
    assert [(p["k"], p["n"], p["m"]) for p in result["points"]] == [
        (128, 64, 1),
        (128, 64, 4),
        (256, 64, 1),
        (256, 64, 4),
    ]
    asked = [(a["shapes"][0], a["m"], a["dense"], a["seconds"]) for a in card.asked]
    assert asked[:4] == [
        ((128, 64), 1, False, 20),
        ((128, 64), 1, True, 5),
        ((128, 64), 4, False, 20),
        ((128, 64), 4, True, 5),
    ]
    assert len(asked) == 8 and len(kept) == 5
    assert [len(json.loads(each)["points"]) for each in kept] == [1, 2, 3, 4, 4]
    assert not json.loads(kept[3])["complete"]
    assert (result["commit"], result["billfish"]) == ("c0ffee", __version__)
    assert result["card"]["name"] == "NVIDIA H200" and result["date"].endswith("+00:00")
    assert (result["seconds"], result["cublas_seconds"]) == (20, 5)
    assert (result["dtype"], result["group_size"], result["symmetric"]) == ("float16", 128, True)


def test_a_point_by_hand():
    result, card, _ = run()
    point, cublas = result["points"][1], result["points"][1]["cublas"]
    # 10 us, a tenth of it more each second: the tenths of 20 are 10, 11 and 28, 29.
    assert point["op"] == "reference" and point["error"] is None
    assert (point["first"], point["last"]) == (pytest.approx(10.5), pytest.approx(28.5))
    assert point["kept"] == pytest.approx(10.5 / 28.5)
    assert [sample["second"] for sample in point["samples"]] == list(range(1, 21))
    assert point["samples"][19] == {
        "second": 20,
        "us": pytest.approx(29.0),
        "sm_mhz": 1790.0,
        "watts": 619.0,
        "celsius": 40.0,
    }
    assert (cublas["first"], cublas["last"]) == (40.0, pytest.approx(56.0))
    assert cublas["kept"] == pytest.approx(40 / 56) and len(cublas["samples"]) == 5
    ours, dense = card.asked[2:4]
    assert (point["copies"], cublas["copies"]) == (len(ours["outputs"]), 2) == (4, 2)
    assert (point["launches"], cublas["launches"]) == (ours["launches"], dense["launches"])
    assert not torch.equal(ours["outputs"][0], ours["outputs"][1])


def test_cublas_has_two_seconds_at_least():
    result, card, _ = run(seconds=4)
    assert {a["seconds"] for a in card.asked if a["dense"]} == {2} == {result["cublas_seconds"]}


def test_out_of_memory_is_told_and_others_go_on():
    result, _, _ = run(FakeCard(fails=lambda k, n: k == 128))
    assert [point["error"] for point in result["points"]] == [
        "out of memory at m = 1",
        "out of memory at m = 4",
        None,
        None,
    ]
    assert "samples" not in result["points"][0] and result["points"][0]["cublas"] is None


def test_an_op_that_cannot_be_made_is_told(monkeypatch):
    def fail(self, linear, variant):
        raise UserError("does not compile")

    monkeypatch.setattr(Sustain, "_ops", fail)
    result, card, _ = run(shapes="128x64")
    assert [p["error"] for p in result["points"]] == ["does not compile"] * 2 and not card.asked


# -- the queue of the real card


class Stream:
    """In place of the GPU: replays take `us` each, and are over as soon as they are waited for."""

    def __init__(self, us):
        self.us, self.queued, self.spare, self.marks = us, 0, [], []
        self.drained = Event()

    def replay(self):
        self.queued += 1

    def reset(self):
        self.spare.append("reset")

    def make_marks(self, count):
        self.marks = [Mark(self) for _ in range(count)]
        return self.marks


class Mark:
    def __init__(self, stream):
        self.stream, self.at = stream, None

    def record(self):
        self.at = self.stream.queued

    def synchronize(self):
        self.stream.spare.append(self.stream.queued - self.at)
        if self is self.stream.marks[-1]:
            self.stream.drained.set()

    def elapsed_time(self, other):
        return sum(self.stream.us(index) for index in range(self.at, other.at)) / 1000


def card_on(stream, monkeypatch, readings):
    card = timing.GraphCard.__new__(timing.GraphCard)
    card.rules, card.device, card.readings = timing.Rules(), torch.device("cuda", 0), readings
    card._capture = lambda calls, launches: stream
    card._replay = lambda graph, replays: [stream.us(0) / 1e6] * replays
    monkeypatch.setattr(timing, "_marks", stream.make_marks)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return card


def test_the_next_second_is_queued_before_this_one_is_waited_for(monkeypatch):
    # One replay uploads. 250 us each, after 9000 more 500: seconds of 4000, of 2000 once seen.
    stream = Stream(lambda index: 250.0 if index <= 9000 else 500.0)
    card = card_on(stream, monkeypatch, lambda: {"watts": 700.0})
    found = card.sustain([lambda: None], 10, 6)
    counts = [after.at - before.at for before, after in pairwise(stream.marks)]
    assert counts == [4000, 4000, 4000, 4000, 2286, 2000]
    assert stream.spare == [*counts[1:], 0, "reset"]
    # Of the third second, a quarter was still fast: 437.5 us a replay, 10 launches each.
    assert [us for us, _ in found] == pytest.approx([25.0, 25.0, 43.75, 50.0, 50.0, 50.0])
    assert [told for _, told in found] == [{"watts": 700.0}] * 6


def test_a_slow_reading_does_not_hold_up_the_queue(monkeypatch):
    stream = Stream(lambda index: 1000.0)
    asked = []

    def readings():  # answers when all seconds are over; gives up if they wait for it
        asked.append(stream.drained.wait(5))
        return {"watts": 700.0}

    found = card_on(stream, monkeypatch, readings).sustain([lambda: None], 1, 3)
    assert asked == [True]
    assert found == [(pytest.approx(1000.0), {"watts": 700.0})] * 3


# -- the command


@pytest.fixture
def card(monkeypatch):
    made = FakeCard()
    monkeypatch.setattr(timing, "GraphCard", lambda rules: made)
    monkeypatch.setattr(timing, "Rules", lambda: RULES)
    return made


def invoke(*args):
    shown = {"COLUMNS": "200"}
    return CliRunner().invoke(cli_bench.app, ["sustain", *map(str, args)], env=shown)


def test_help_has_an_example():
    assert "Example: billfish bench sustain" in invoke("--help").output


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--m", "0"], "a batch has 1 row or more"),
        (["--shapes", "gpt5"], "llama3-70b"),
        (["--shapes", "100x64"], "group size 128 does not divide k = 100"),
        (["--seconds", "1"], "--seconds 1: give 2 or more"),
        (["--seconds", "-60"], "give 2 or more"),
        (["--save", "no/such/place.json"], "there is no directory"),
        (["--save", "s.json"], "needs an NVIDIA GPU"),
    ],
)
def test_refusals_say_what_is_wrong(monkeypatch, tmp_path, args, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)
    done = invoke(*args)
    assert isinstance(done.exception, UserError), done.output
    assert told in str(done.exception) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("args", [["--seconds", "1"], ["--save", "no/such/place.json"]])
def test_nothing_is_measured_before_a_refusal(card, monkeypatch, tmp_path, args):
    monkeypatch.chdir(tmp_path)
    assert isinstance(invoke("--shapes", "128x64", *args).exception, UserError)
    assert card.asked == []


def test_a_run_is_shown_and_written(card, tmp_path):
    written = tmp_path / "s.json"
    done = invoke("--shapes", "128x64", "--m", "4", "--seconds", "20", "--save", written)
    assert done.exit_code == 0, done.output
    kept = json.loads(written.read_text())
    assert kept["complete"] and len(kept["points"]) == 1 and not list(tmp_path.glob("*.tmp"))
    rows = [" ".join(line.split()) for line in done.output.splitlines()]
    assert "shape m op first us last us kept MHz watts" in rows
    op = kept["points"][0]["op"]
    assert f"128 x 64 4 {op} 10.50 28.50 36.8% ? -> 1790.0 619.0" in rows
    assert "128 x 64 4 cuBLAS 40.00 56.00 71.4% ? -> 1940.0 604.0" in rows


def test_bench_kernels_refuses_the_file(card, tmp_path):
    written = tmp_path / "s.json"
    assert invoke("--shapes", "128x64", "--seconds", "2", "--save", written).exit_code == 0
    done = CliRunner().invoke(cli_bench.app, ["kernels", "--from", str(written)])
    assert isinstance(done.exception, UserError) and "sustain 1, not 1" in str(done.exception)


def test_a_run_in_which_nothing_worked_fails_and_says_why(card):
    card.fails = lambda k, n: True
    done = invoke("--shapes", "128x64", "--m", "1")
    assert done.exit_code == 1 and "128 x 64, m = 1: out of memory at m = 1" in done.output
