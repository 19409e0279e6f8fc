"""The run with a card of the test's own: real ops on the CPU, times that are told."""

import json
import subprocess

import pytest
import torch
from fake_card import RULES, FakeCard

from billfish.bench import kernels
from billfish.bench.kernels import KernelBench, KernelRequest
from billfish.bench.peaks import DATASHEET, Peaks, peaks_of
from billfish.bench.shapes import LinearShape, ShapeSet, parse_shapes
from billfish.errors import UserError

LAYER = ShapeSet(
    "tiny",
    (
        LinearShape("qkv", 64, 96),
        LinearShape("o", 64, 64),
        LinearShape("gate_up", 64, 256),
        LinearShape("down", 128, 64),
    ),
)
TWIN = ShapeSet("twin", LAYER.linears)


@pytest.fixture(autouse=True)
def no_git(monkeypatch):
    monkeypatch.setattr(kernels, "commit", lambda: "c0ffee-dirty")


def run(card=None, **changes):
    wanted = {"sets": (LAYER,), "rows": (1, 3), "group_sizes": (32,), "op": "reference"} | changes
    card = card or FakeCard()
    kept = []
    made = KernelBench(
        KernelRequest(**wanted), card, RULES, keep=lambda result: kept.append(json.dumps(result))
    )
    return made.measure(), card, kept


def find(result, **wanted):
    (found,) = [p for p in result["points"] if all(p[key] == wanted[key] for key in wanted)]
    return found


def test_the_floor_is_the_slower_of_memory_and_compute():
    h200 = DATASHEET["NVIDIA H200"]
    # 4096 x 4096 at 4 bit, g128: 8388608 + 262144 bytes of weights and scales, 16384 of x and y
    assert h200.floor_us(8_667_136, 2 * 4096 * 4096) == pytest.approx(1.8057, abs=1e-4)
    assert h200.floor_us(8_667_136, 2 * 1024 * 4096 * 4096) == pytest.approx(34.7, abs=0.01)
    # int8 and 2:4 sparse tensor cores
    floor = h200.doubled().floor_us(8_667_136, 2 * 1024 * 4096 * 4096)
    assert floor == pytest.approx(17.35, abs=0.01)


def test_unknown_cards_are_measured_and_say_so():
    ceilings = FakeCard().ceilings()
    assert peaks_of("NVIDIA H200", ceilings) == Peaks(4.8e12, 990e12, "datasheet")
    laptop = peaks_of("NVIDIA GeForce RTX 4090 Laptop GPU", ceilings)
    assert (laptop.bytes_per_s, laptop.flop_per_s) == (4.0e12, 600e12)
    assert "measured" in laptop.source


def test_a_point_by_hand():
    result, _, _ = run(dtypes=("float16",))
    point = find(result, k=64, n=96, m=3)
    weights = 96 * 64 // 2 + 96 * 2 * 2 + 16  # codes, two groups of scales, the stored shape
    assert point["bytes"] == weights + 2 * (3 * 64 + 3 * 96)
    assert point["flop"] == 2 * 3 * 96 * 64
    assert point["bits_per_weight"] == pytest.approx(weights * 8 / (96 * 64))
    assert point["floor_us"] == pytest.approx(point["bytes"] / 4.8e12 * 1e6)
    assert point["us"]["pdl"] == {"median": 10.0, "p10": 9.0, "p90": 12.0, "replays": 9}
    assert point["us"]["plain"]["median"] == 12.5
    assert point["tbps"] == pytest.approx(point["bytes"] / 10e-6 / 1e12)
    assert point["tflops"] == pytest.approx(point["flop"] / 10e-6 / 1e12)
    assert point["roofline"] == pytest.approx(point["floor_us"] / 10.0)
    assert point["speedup"] == pytest.approx(4.0)  # 40 us of cuBLAS over the pdl median
    dense = (96 * 64 + 3 * 64 + 3 * 96) * 2
    assert point["ideal_speedup"] == pytest.approx(dense / point["bytes"])
    assert point["linears"] == ["tiny qkv"] and point["op"] == "reference"


def test_every_point_is_there_and_the_copies_differ():
    result, card, _ = run(dtypes=("float16", "bfloat16"), group_sizes=(32, -1))
    assert len(result["points"]) == 4 * 2 * 2 * 2
    asked = next(a for a in card.asked if not a["dense"] and len(set(a["shapes"])) == 1)
    point = find(result, k=64, n=96, m=1, dtype="float16", group_size=32)
    assert len(asked["outputs"]) == point["copies"] == 4  # 1000 // 3472 + 1 is less than four
    assert asked["launches"] == point["launches"] == 24
    first, *others = asked["outputs"]
    assert all(not torch.equal(first, other) for other in others)
    dense = [a for a in card.asked if a["dense"]]
    assert len(dense) == 4 * 2 * 2  # once for both group sizes
    assert all(len(a["outputs"]) == 2 for a in dense)


def test_a_layer_in_one_graph_against_its_parts():
    result, card, _ = run()
    told = result["chains"][0]
    assert (told["sets"], told["m"]) == (["tiny"], 1)
    assert told["us"]["pdl"]["median"] == 40.0 and told["us"]["plain"]["p90"] == 60.0
    assert told["parts_us"] == {"pdl": 40.0, "plain": 50.0}
    assert told["cublas_parts_us"] == 160.0
    floors = [find(result, k=linear.k, n=linear.n, m=1)["floor_us"] for linear in LAYER.linears]
    assert told["floor_us"] == pytest.approx(sum(floors))
    asked = [a for a in card.asked if len(set(a["shapes"])) == 4]
    assert len(asked) == 4 and {a["mode"] for a in asked} == {"pdl", "plain"}
    assert asked[0]["shapes"][:4] == [(64, 96), (64, 64), (64, 256), (128, 64)]
    assert asked[0]["launches"] % 4 == 0


def test_shapes_two_models_share_are_measured_once():
    alone = run()[1]
    result, card, _ = run(sets=(LAYER, TWIN))
    assert len(card.asked) == len(alone.asked) and len(result["points"]) == 8
    assert find(result, k=64, n=96, m=1)["linears"] == ["tiny qkv", "twin qkv"]
    assert [told["sets"] for told in result["chains"]] == [["tiny", "twin"]] * 2


def test_plain_alone_is_the_headline():
    result, _, _ = run(modes=("plain",))
    point = result["points"][0]
    assert set(point["us"]) == {"plain"} and point["speedup"] == pytest.approx(40 / 12.5)
    assert result["protocol"]["headline_mode"] == "plain"


def test_out_of_memory_is_told_and_others_go_on():
    result, _, _ = run(FakeCard(fails=lambda k, n: n == 256))
    bad = [point for point in result["points"] if point["n"] == 256]
    assert len(bad) == 2
    for point in bad:
        assert "out of memory" in point["error"] and "out of memory" in point["cublas_error"]
        assert "speedup" not in point and point["us"] == {}
    good = [point for point in result["points"] if point["n"] != 256]
    assert len(good) == 6 and not any(point["error"] for point in good)
    assert all("out of memory" in told["error"] for told in result["chains"])


def test_the_result_is_json_that_says_where_it_comes_from():
    result, _, kept = run()
    assert json.loads(json.dumps(result)) == result
    assert result["complete"] and not json.loads(kept[0])["complete"]
    assert len(json.loads(kept[0])["points"]) == 2  # after the first linear
    assert result["commit"] == "c0ffee-dirty"
    assert result["torch"] == torch.__version__ and result["card"]["name"] == "NVIDIA H200"
    assert result["before"]["sm_mhz"] == result["after"]["sm_mhz"] == 1980.0
    assert result["protocol"]["rotating_bytes"] == RULES.rotating_bytes
    assert result["peaks"]["source"] == "datasheet" and result["date"].endswith("+00:00")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"group_sizes": (48,)}, "group size 48 does not divide k = 64"),
        ({"group_sizes": (0,)}, "group size 0"),
        ({"scheme": "w3a3"}, "known are w4a16"),
        ({"dtypes": ("float8",)}, "known are float16, bfloat16"),
        ({"modes": ("fast",)}, "known are pdl, plain"),
        ({"modes": ()}, "none given"),
        ({"op": "nonsense"}, "op 'nonsense'"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_measured(changes, told):
    card = FakeCard()
    with pytest.raises(UserError, match=told):
        run(card, **changes)
    assert card.asked == []


def test_the_oracle_is_not_measured_on_a_gpu():
    request = KernelRequest(parse_shapes("128x64"), (1,), op="reference")
    with pytest.raises(UserError, match="oracle"):
        request.refuse(torch.device("cuda", 0))


def test_the_commit_is_asked_without_taking_a_lock(monkeypatch, tmp_path):
    monkeypatch.undo()  # the fixture's commit()
    asked = {}

    def answer(command, **options):
        asked.update(command=command, env=options["env"])
        return subprocess.CompletedProcess(command, 0, "0123abcd-dirty\n", "")

    monkeypatch.setattr(kernels.subprocess, "run", answer)
    package = tmp_path / "billfish" / "bench"
    package.mkdir(parents=True)
    monkeypatch.setattr(kernels, "__file__", str(package / "kernels.py"))
    assert kernels.commit() is None and not asked  # installed, no checkout
    (tmp_path / ".git").mkdir()
    assert kernels.commit() == "0123abcd-dirty"
    assert "--dirty" in asked["command"] and asked["env"]["GIT_OPTIONAL_LOCKS"] == "0"
