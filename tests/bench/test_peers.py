"""scripts/peers.py with contestants and a clock of the test's own: turns, energy, words, files."""

import json

import peers
import pytest
import torch
from torch.nn.functional import linear
from turns import READ

from billfish.errors import UserError
from billfish.schemes.w4a16 import W4A16

SCHEME = W4A16(4, 32)
US = {"billfish": 10.0, "humming": 12.0, "cublas": 20.0}


class Layer:
    def __init__(self, name, weight):
        self.name, self.weight = name, weight

    def __call__(self, x):
        return linear(x, self.weight)


class Graph:
    def __init__(self, track, name, us, launches):
        self.track, self.name, self.us, self.launches = track, name, us, launches
        track.alive += 1

    def replay(self):
        self.track.order.append(self.name)
        self.track.clock += self.launches * self.us * self.track.slowdown(self.track.clock) / 1e6

    def reset(self):
        self.track.alive -= 1


class Track:
    """A GPU that computes at once and whose clock moves with what was queued."""

    device = torch.device("cpu")

    def __init__(
        self, us=None, slowdown=lambda clock: 1.0, counter=True, fails=lambda name, m: False
    ):
        self.us, self.slowdown, self.counter, self.fails = us or US, slowdown, counter, fails
        self.clock, self.order, self.alive = 0.0, [], 0

    def capture(self, calls, launches):
        name, x = calls[0].func.name, calls[0].args[0]
        if self.fails(name, len(x)):
            raise RuntimeError("an illegal instruction")
        return Graph(self, name, self.us[name], launches)

    def mark(self):
        return self.clock

    def done(self, mark):
        return True

    def seconds(self, before, after):
        return after - before

    def now(self):
        return self.clock

    def joules(self):
        return 500 * self.clock if self.counter else None

    def readings(self):
        return {"sm_mhz": 1755.0, "watts": 600.0, "celsius": None}


def maker(name, change=lambda weight: weight):
    def make(n, k, weights):
        assert all(tensors["weight_packed"].shape == (n, k // 8) for tensors in weights)
        return [Layer(name, change(SCHEME.dequantize(weights[0])).half()) for _ in range(2)]

    return make


MAKERS = {name: maker(name) for name in US}


@pytest.fixture(autouse=True)
def few_copies(monkeypatch):
    monkeypatch.setattr(peers, "RULES", peers.Rules(rotating_bytes=1000, least_launches=4))


def run(track, places, makers=MAKERS, **options):
    said, kept = [], []
    bench = peers.Peers(
        track,
        makers,
        SCHEME,
        torch.float16,
        places,
        say=said.append,
        keep=lambda result: kept.append(json.loads(json.dumps(result))),
        **options,
    )
    return bench.measure({}), said, kept


def turns(order):
    """The order without repeats."""
    return [name for name, last in zip(order, [None, *order], strict=False) if name != last]


def test_contestants_take_turns_and_the_first_round_does_not_count():
    track = Track(slowdown=lambda clock: 3.0 if clock < 0.03 else 1.0)  # into the first turn
    runners = {name: peers.Runner(Graph(track, name, US[name], 100), 100) for name in US}
    times, read = peers.take_turns(track, runners, turns=5, seconds=0.015)
    assert turns(track.order[6:]) == [*US] * 6
    assert times == {name: pytest.approx([us] * 5) for name, us in US.items()}
    assert read == {"sm_mhz": 1755.0, "watts": 600.0, "celsius": None}


def test_a_card_that_grows_hot_slows_all_alike():
    track = Track(slowdown=lambda clock: 1 + clock)  # doubled after a second
    (point,) = run(track, [(64, 32, 4)])[0]["points"]
    assert peers.ratio(point, "cublas") == pytest.approx(2.0, rel=0.05)
    assert peers.ratio(point, "humming") == pytest.approx(1.2, rel=0.05)
    assert track.alive == 0


def test_points_are_kept_after_each_shape():
    result, said, kept = run(Track(), [(64, 32, 1), (64, 32, 4), (96, 32, 1)])
    assert [len(each["points"]) for each in kept] == [2, 3, 3]
    assert [each["missing"] for each in kept] == [["96x32@1"], [], []]
    assert [each["complete"] for each in kept] == [False, False, True]
    point = result["points"][0]
    assert point["us"] == pytest.approx(US) and point["off"] == {"billfish": 0, "humming": 0}
    assert said[0].split() == [
        *("64x32@1", "billfish", "10.00", "humming", "12.00", "cublas", "20.00"),
        *("x", "cublas", "2.000", "x", "humming", "1.200", "1755", "MHz", "600", "W"),
    ]
    assert result["errors"] == {}


def test_a_peer_that_fails_is_told_once_a_shape_and_the_others_go_on():
    track = Track(fails=lambda name, m: name == "humming" and m > 1)
    result, said, _ = run(track, [(64, 32, m) for m in (1, 2, 4)])
    assert [[*point["us"]] for point in result["points"]] == [
        ["billfish", "humming", "cublas"],
        ["billfish", "cublas"],
        ["billfish", "cublas"],
    ]
    assert result["errors"] == {"64x32": {"humming": "RuntimeError: an illegal instruction"}}
    assert sum("failed" in told for told in said) == 1 and track.alive == 0

    def refuses(n, k, weights):
        raise ValueError("no such shape")

    result, said, _ = run(Track(), [(64, 32, 1)], {**MAKERS, "humming": refuses})
    assert [*result["points"][0]["us"]] == ["billfish", "cublas"] and result["complete"]
    assert "64x32: humming failed: ValueError: no such shape" in peers.summary(result)


def test_a_run_that_is_late_says_what_is_missing():
    track = Track()
    result, _, _ = run(
        track, [(64, 32, 1), (64, 32, 4), (96, 32, 1)], late=lambda: bool(track.order)
    )
    assert result["missing"] == ["64x32@4", "96x32@1"] and not result["complete"]
    assert peers.summary(result)[-1] == "not measured: 64x32@4 96x32@1"


def test_wrong_results_are_told():
    makers = {**MAKERS, "humming": maker("humming", lambda weight: -weight)}
    result, said, _ = run(Track(), [(64, 32, 4)], makers)
    assert result["points"][0]["off"]["humming"] == pytest.approx(2, rel=1e-3)
    assert "WRONG humming" in said[0] and "WRONG billfish" not in said[0]
    assert "WRONG results: humming 64x32@4" in peers.summary(result)


def test_energy_is_power_times_time():
    track = Track()
    place = (64, 32, 4)
    result, said, _ = run(track, [], energy_places=[place], energy_seconds=3, energy_rounds=2)
    (point,) = result["points"]
    assert [*point["energy"]] == [*US]
    for name, rounds in point["energy"].items():
        assert [each["mj"] for each in rounds] == pytest.approx([500 * US[name] / 1000] * 2)
        assert rounds[0]["us"] == pytest.approx(US[name]) and rounds[0]["sm_mhz"] == 1755.0
    # Turns, and then each for three seconds, twice.
    assert turns(track.order)[-6:] == [*US] * 2 and track.clock > 18
    assert "billfish 5.000 mJ 10.00 us 1755 MHz 500 W" in said[1]


def test_without_a_counter_energy_is_unknown():
    result, said, _ = run(Track(counter=False), [], energy_places=[(64, 32, 4)])
    assert result["points"][0]["energy"]["billfish"][0]["mj"] is None and "mJ unknown" in said[1]


def point(k, billfish, **others):
    us = {"billfish": billfish, **others}
    return {"k": k, "n": 32, "m": 1, "us": us, "off": {}}


def test_the_summary_counts_and_lists():
    points = [
        point(1, 10.0, humming=12.0, cublas=20.0),
        point(2, 10.25, humming=10.0, cublas=10.0),  # behind by 2.5 %: of humming that counts
        point(3, 12.5, humming=10.0, cublas=10.0),
        point(4, 10.0, cublas=10.0),
    ]
    assert peers.summary({"points": points, "errors": {}, "missing": []}, worst=2) == [
        "cublas: ahead at 1 of 4 points, 1.118 times as fast",
        "  worst: 0.800 at 3x32@1, 0.976 at 2x32@1",
        "  behind by more than 3%: 1: 3x32@1",
        "humming: ahead at 1 of 3 points, 0.978 times as fast",
        "  worst: 0.800 at 3x32@1, 0.976 at 2x32@1",
        "  behind by more than 2%: 2: 2x32@1 3x32@1",
    ]
    marked = peers.line(points[1] | dict.fromkeys(READ))
    assert marked.endswith("BEHIND humming")
    nothing = peers.summary({"points": [], "errors": {}, "missing": []})
    assert nothing == ["cublas: no point compared", "humming: no point compared"]


def test_files_have_a_point_a_line(tmp_path):
    result, _, _ = run(Track(), [(64, 32, 1), (64, 32, 4)])
    peers.write(result, tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(result)) and text.count("\n") == 3
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_places():
    assert peers.parse_places("4096x14336@1-2, 64x32@8") == [
        (4096, 14336, 1),
        (4096, 14336, 2),
        (64, 32, 8),
    ]
    with pytest.raises(UserError, match="m"):
        peers.parse_places("64x32")
