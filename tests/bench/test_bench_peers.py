"""Other people's kernels in the speed-up picture: dashed where they can be compared, or told."""

import json
from pathlib import Path

import pytest
from fake_card import RULES, FakeCard
from typer.testing import CliRunner

from billfish.bench import kernels, plot, timing
from billfish.bench.kernels import KernelBench, KernelRequest
from billfish.bench.shapes import LinearShape, ShapeSet, parse_shapes
from billfish.cli import bench as cli_bench
from billfish.errors import UserError

DOCS = Path(__file__).parents[2] / "docs" / "bench"
SHAPES = "128x64,256x64,128x32"


def time(k, n, m, us, cublas_us):
    return {"k": k, "n": n, "m": m, "us": us, "kernel": "Machete", "cublas_us": cublas_us}


# Not by rising m; with rows beyond both ends of the plot, and a shape that was not measured.
PEERS = {
    "card": "NVIDIA H200",
    "times": [
        time(128, 64, 16, 10.0, 15.0),
        time(128, 64, 2, 10.0, 30.0),
        time(128, 64, 8, 10.0, 20.0),
        time(128, 64, 1, 10.0, 90.0),
        time(128, 64, 32, 10.0, 90.0),
        time(256, 64, 4, 20.0, 10.0),
        time(512, 64, 4, 10.0, 70.0),
    ],
}


@pytest.fixture(autouse=True)
def no_git(monkeypatch):
    monkeypatch.setattr(kernels, "commit", lambda: None)


def measured(sets=None, **changes):
    request = KernelRequest(sets or parse_shapes(SHAPES), (2, 4, 16), op="reference", **changes)
    return KernelBench(request, FakeCard(), RULES).measure()


@pytest.fixture
def files(tmp_path):
    """A result, peers, and a place for pictures."""
    cli_bench.write_result(measured(), tmp_path / "r.json")
    (tmp_path / "p.json").write_text(json.dumps(PEERS))
    return tmp_path / "r.json", tmp_path / "p.json", tmp_path / "pictures"


@pytest.fixture
def drawn(monkeypatch):
    """The figures the command draws, kept."""
    figures, speedup = [], plot.speedup_figure

    def keep(*args):
        figures.append(speedup(*args))
        return figures[-1]

    monkeypatch.setattr(plot, "speedup_figure", keep)
    return figures


def invoke(*args):
    return CliRunner().invoke(cli_bench.app, ["kernels", *map(str, args)])


def refusal(*args):
    done = invoke(*args)
    assert isinstance(done.exception, UserError), done.output
    return str(done.exception)


def dashed(axes):
    """colour -> (x, y) of the peers' lines."""
    lines = [line for line in axes.get_lines() if line.is_dashed() and len(line.get_xdata())]
    assert all(line.get_marker() == "None" and line.get_linewidth() <= 1 for line in lines)
    return {line.get_color(): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}


def colours(axes):
    return {line.get_label(): line.get_color() for line in axes.get_lines()}


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_peers_are_dashed_in_their_shapes_colour_within_the_rows():
    figure = plot.speedup_figure(measured(), PEERS)
    (axes,) = figure.axes
    named = colours(axes)
    assert dashed(axes) == {
        named["128 x 64"]: ([2, 8, 16], [3.0, 2.0, 1.5]),
        named["256 x 64"]: ([4], [0.5]),
    }
    assert axes.get_xlim()[1] < 32
    shapes = ["128 x 64", "256 x 64", "128 x 32"]
    limits = ["ideal: both on the roof (largest shape)", "as fast as cuBLAS"]
    assert labels(figure) == [*shapes, *limits, plot.PEERS_LABEL]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtypes": ("bfloat16",)},
        {"group_sizes": (64,)},
        {"group_sizes": (-1,)},
        {"symmetric": False},
    ],
)
def test_other_variants_have_no_peers(changes):
    figure = plot.speedup_figure(measured(**changes), PEERS)
    assert not dashed(figure.axes[0]) and plot.PEERS_LABEL not in labels(figure)


def test_only_the_panel_of_the_peers_variant_has_them():
    result = measured(dtypes=("bfloat16", "float16"), group_sizes=(64, 128))
    figure = plot.speedup_figure(result, PEERS)
    found = {axes.get_title(): len(dashed(axes)) for axes in figure.axes}
    assert found == {
        "bf16, groups of 64, symmetric": 0,
        "bf16, groups of 128, symmetric": 0,
        "fp16, groups of 64, symmetric": 0,
        "fp16, groups of 128, symmetric": 2,
    }
    assert labels(figure).count(plot.PEERS_LABEL) == 1


def test_without_peers_nothing_is_dashed_and_models_share_a_panel():
    sets = (
        ShapeSet("small", (LinearShape("o", 128, 64),)),
        ShapeSet("big", (LinearShape("o", 256, 64),)),
    )
    (axes,) = plot.speedup_figure(measured(sets)).axes
    assert not dashed(axes) and {"small o  128 x 64", "big o  256 x 64"} <= set(colours(axes))


def test_with_peers_each_model_has_panels_of_its_own():
    sets = (
        ShapeSet("small", (LinearShape("o", 128, 64),)),
        ShapeSet("big", (LinearShape("o", 256, 64),)),
        *parse_shapes("128x32,512x64"),
    )
    figure = plot.speedup_figure(measured(sets, dtypes=("float16", "bfloat16")), PEERS)
    kinds = [f"{kind}, groups of 128, symmetric" for kind in ("fp16", "bf16")]
    panels = {axes.get_title(): axes for axes in figure.axes}
    whose = ("small: ", "big: ", "")
    assert list(panels) == [f"{model}{kind}" for kind in kinds for model in whose]
    assert [len(dashed(axes)) for axes in figure.axes] == [1, 1, 1, 0, 0, 0]
    drawn = [{name for name in colours(axes) if " x " in name} for axes in figure.axes]
    shapes = [{"small o  128 x 64"}, {"big o  256 x 64"}, {"128 x 32", "512 x 64"}]
    assert drawn == shapes * 2
    big = panels[f"big: {kinds[0]}"]
    assert dashed(big) == {colours(big)["big o  256 x 64"]: ([4], [0.5])}
    assert labels(figure).count(plot.PEERS_LABEL) == 1


def test_a_shape_that_failed_has_no_peers_either():
    result = measured()
    for point in result["points"]:
        if point["k"] == 256:
            point["error"] = "out of memory"
    (axes,) = plot.speedup_figure(result, PEERS).axes
    assert list(dashed(axes)) == [colours(axes)["128 x 64"]]


def test_an_earlier_result_is_drawn_with_peers(files, drawn):
    result, peers, pictures = files
    done = invoke("--from", result, "--peers", peers, "--plot", pictures)
    assert done.exit_code == 0, done.output
    assert "not drawn" not in done.output and (pictures / "speedup.png").is_file()
    (figure,) = drawn
    assert len(dashed(figure.axes[0])) == 2


def test_a_run_is_drawn_with_peers(files, drawn, monkeypatch):
    _, peers, pictures = files
    monkeypatch.setattr(timing, "GraphCard", lambda rules: FakeCard())
    monkeypatch.setattr(timing, "Rules", lambda: RULES)
    rest = ["--op", "reference", "--peers", peers, "--plot", pictures]
    done = invoke("--shapes", SHAPES, "--m", "2,4,16", *rest)
    assert done.exit_code == 0, done.output
    (figure,) = drawn
    assert len(dashed(figure.axes[0])) == 2


@pytest.mark.parametrize(
    "changes",
    [{"card": "NVIDIA L40S"}, {"times": PEERS["times"][-1:]}, {"times": PEERS["times"][4:5]}],
)
def test_peers_that_cannot_be_compared_are_told_and_left_out(files, drawn, changes):
    result, peers, pictures = files
    peers.write_text(json.dumps(PEERS | changes))
    done = invoke("--from", result, "--peers", peers, "--plot", pictures)
    assert done.exit_code == 0 and "not drawn: " in done.output, done.output
    assert (pictures / "speedup.png").is_file() and not dashed(drawn[0].axes[0])


def test_peers_need_a_picture(files):
    result, peers, _ = files
    for args in (["--from", result], []):
        told = refusal(*args, "--peers", peers)
        assert str(peers) in told and "--plot DIR" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("not json", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        ("[]", "is no file of times"),
        ('{"card": "NVIDIA H200"}', "is no file of times"),
        ('{"card": "NVIDIA H200", "times": []}', "is no file of times"),
        ('{"card": "NVIDIA H200", "times": {"k": 1}}', "is no file of times"),
        ('{"times": [{"k": 1, "n": 1, "m": 1, "us": 1, "cublas_us": 1}]}', "a card's name"),
        ('{"card": "NVIDIA H200", "times": [7]}', "times[0] is 7"),
    ],
)
def test_peers_that_cannot_be_read_are_refused(files, text, told):
    result, peers, pictures = files
    peers.write_bytes(text if isinstance(text, bytes) else text.encode())
    said = refusal("--from", result, "--peers", peers, "--plot", pictures)
    assert said.startswith(f"--peers {peers}: ") and told in said
    assert not pictures.exists()


@pytest.mark.parametrize("name", cli_bench.PEER_NUMBERS)
@pytest.mark.parametrize("value", [None, "8", 0, -1, True, float("nan"), float("inf"), [1]])
def test_numbers_of_peers_are_above_0(files, name, value):
    _, peers, _ = files
    bad = PEERS["times"][0] | {name: value}
    peers.write_text(json.dumps(PEERS | {"times": [*PEERS["times"], bad]}))
    with pytest.raises(UserError, match=r"times\[7\] is .* numbers above 0"):
        cli_bench.read_peers(peers)


def test_a_missing_file_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(cli_bench, "_measure", lambda *args: asked.append(args))
    told = refusal("--peers", tmp_path / "p.json", "--plot", tmp_path)
    assert "there is no such file" in told and asked == []


def test_the_peers_that_come_along_are_drawn_over_the_result_that_does():
    peers = cli_bench.read_peers(DOCS / "peers.json")
    result = cli_bench.read_result(DOCS / "h200-w4a16.json")
    places = [(told["k"], told["n"], told["m"]) for told in peers["times"]]
    assert len(set(places)) == len(places) == 88
    # Every point of the result has its peer; the peers have rows beyond.
    assert {(p["k"], p["n"], p["m"]) for p in result["points"]} < set(places)
    figure = plot.speedup_figure(result, peers)
    assert [len(dashed(axes)) for axes in figure.axes] == [4, 4]
