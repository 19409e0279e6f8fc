"""`billfish bench kernels` and its pictures, as a user without a GPU meets them."""

import json
import struct
import sys
from dataclasses import replace

import pytest
from fake_card import RULES, FakeCard
from typer.testing import CliRunner

from billfish.bench import kernels, plot, timing
from billfish.bench.kernels import KernelBench, KernelRequest
from billfish.bench.shapes import parse_shapes
from billfish.cli import bench as cli_bench
from billfish.errors import UserError

SHAPES = "128x64,256x64"


@pytest.fixture(autouse=True)
def no_git(monkeypatch):
    monkeypatch.setattr(kernels, "commit", lambda: None)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)


@pytest.fixture
def result():
    request = KernelRequest(
        parse_shapes(SHAPES), (1, 4, 16), dtypes=("float16", "bfloat16"), op="reference"
    )
    return KernelBench(request, FakeCard(), RULES).measure()


@pytest.fixture
def card(monkeypatch):
    """In place of the GPU, with fewer copies."""
    made = FakeCard()
    monkeypatch.setattr(timing, "GraphCard", lambda rules: made)
    monkeypatch.setattr(timing, "Rules", lambda: RULES)
    monkeypatch.setattr(timing, "QUICK", replace(RULES, most_replays=2))
    return made


def invoke(*args):
    return CliRunner().invoke(cli_bench.app, ["kernels", *map(str, args)])


def refusal(*args):
    done = invoke(*args)
    assert isinstance(done.exception, UserError), done.output
    return str(done.exception)


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
    return struct.unpack(">II", data[16:24])


def test_help_has_an_example():
    shown = CliRunner().invoke(cli_bench.app, ["kernels", "--help"], env={"COLUMNS": "200"})
    assert "Example: billfish bench kernels" in shown.output


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--m", "0"], "a batch has 1 row or more"),
        (["--m", "many"], "such as 1,2,4"),
        (["--shapes", "gpt5"], "llama3-70b"),
        (["--group-size", "wide"], "whole numbers"),
        (["--group-size", "100"], "group size 100 does not divide k = 4096"),
        (["--shapes", "smollm2-135m"], "group size 128 does not divide k = 576"),
        (["--scheme", "w1"], "known are w4a16"),
        (["--dtype", "float32"], "known are float16"),
        (["--modes", "both"], "known are pdl, plain"),
        (["--save", "no/such/place.json"], "there is no directory"),
        ([], "needs an NVIDIA GPU"),
    ],
)
def test_refusals_say_what_is_wrong(no_gpu, tmp_path, monkeypatch, args, told):
    monkeypatch.chdir(tmp_path)
    assert told in refusal(*args)


def test_missing_matplotlib_is_told_before_anything_is_measured(monkeypatch, tmp_path, result):
    measured = []
    monkeypatch.setattr(cli_bench, "_measure", lambda *args: measured.append(args))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'billfish[bench]'" in refusal("--plot", tmp_path)
    cli_bench.write_result(result, tmp_path / "r.json")
    assert "pip install" in refusal("--from", tmp_path / "r.json", "--plot", tmp_path)
    assert measured == [] and not list(tmp_path.glob("*.png"))


def test_a_run_is_shown_written_and_drawn(card, tmp_path):
    written, pictures = tmp_path / "r.json", tmp_path / "pictures"
    done = invoke(
        "--shapes",
        SHAPES,
        "--m",
        "1,4",
        "--op",
        "reference",
        "--quick",
        "--save",
        written,
        "--plot",
        pictures,
    )
    assert done.exit_code == 0, done.output
    kept = json.loads(written.read_text())
    assert kept["complete"] and len(kept["points"]) == 4 and not list(tmp_path.glob("*.tmp"))
    assert kept["protocol"]["most_replays"] == 2
    assert "NVIDIA H200" in done.output and "40.00" in done.output and "4.00" in done.output
    assert sorted(path.name for path in pictures.iterdir()) == ["roofline.png", "speedup.png"]


def test_an_earlier_result_is_drawn_without_a_gpu(no_gpu, tmp_path, result):
    cli_bench.write_result(result, tmp_path / "r.json")
    done = invoke("--from", tmp_path / "r.json", "--plot", tmp_path)
    assert done.exit_code == 0, done.output
    for name in ("roofline.png", "speedup.png"):
        width, height = png_size(tmp_path / name)
        assert width > 1200 and height > 700


def test_results_that_cannot_be_read_are_refused(tmp_path):
    path = tmp_path / "r.json"
    assert "no such file" in refusal("--from", path)
    path.write_text("not json")
    assert "is not JSON" in refusal("--from", path)
    path.write_text('{"result_version": 99}')
    assert "99, not 1" in refusal("--from", path)
    path.write_text("[]")
    assert "no result" in refusal("--from", path)
    assert "Drop one" in refusal("--from", path, "--save", path)


def test_a_run_in_which_nothing_worked_fails_and_says_why(card, tmp_path):
    card.fails = lambda k, n: True
    done = invoke("--shapes", "128x64", "--m", "1", "--op", "reference", "--plot", tmp_path)
    assert done.exit_code == 1 and "out of memory" in done.output
    assert not list(tmp_path.iterdir())


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_legend_names_shapes_and_limits(result):
    roofline, speedup = plot.roofline_figure(result), plot.speedup_figure(result)
    assert labels(roofline) == [
        "roof, datasheet: 4.80 TB/s, 990 TFLOP/s",
        "read speed reached by torch.sum: 4.00 TB/s",
        "128 x 64",
        "256 x 64",
    ]
    assert labels(speedup)[0].startswith("ideal") and labels(speedup)[2:] == labels(roofline)[2:]
    for figure in (roofline, speedup):
        assert "NVIDIA H200" in figure.get_suptitle()
        assert result["date"][:10] in figure.get_suptitle()
        titles = [axes.get_title() for axes in figure.axes]
        assert titles == [f"{kind}, groups of 128, symmetric" for kind in ("fp16", "bf16")]


def test_lines_hold_the_measured_numbers(result):
    axes = plot.speedup_figure(result).axes[0]
    line = next(line for line in axes.get_lines() if line.get_label() == "256 x 64")
    assert line.get_xdata().tolist() == [1, 4, 16] and line.get_ydata().tolist() == [4.0] * 3
    assert axes.get_xscale() == "log"
    roof = plot.roofline_figure(result).axes[0].get_lines()[0]
    assert max(roof.get_ydata()) == pytest.approx(990)
    assert roof.get_xdata()[1] == pytest.approx(990 / 4.8)


def test_a_failed_shape_is_left_out_and_others_keep_their_colour(result):
    before = {
        line.get_label(): line.get_color() for line in plot.speedup_figure(result).axes[0].lines
    }
    assert before["128 x 64"] != before["256 x 64"]
    for point in result["points"]:
        if point["k"] == 128:
            point["error"] = "out of memory"
    after = plot.speedup_figure(result)
    assert "128 x 64" not in labels(after)
    (line,) = [line for line in after.axes[0].lines if line.get_label() == "256 x 64"]
    assert line.get_color() == before["256 x 64"]
    for point in result["points"]:
        point["error"] = "out of memory"
    with pytest.raises(UserError, match="nothing to draw"):
        plot.draw_kernels(result, None)
