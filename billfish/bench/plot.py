"""Two plots of a result of `bench kernels`, after figures 11 and 1 of the MARLIN paper.

roofline.png: FLOP/s of each linear by arithmetic intensity, under the card's roofline.
speedup.png: speed-up over cuBLAS by batch size, with the ideal one; with peers, also that of other
public kernels.
One panel per dtype and group size, one line per shape; with peers, which double the lines, also one
panel per model. matplotlib is imported only when something is drawn.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from billfish.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = dict[str, Any]
_Lines = Iterator[tuple[int, str, list[Result]]]
# After Okabe and Ito's palette for colour-blind readers; black is the roofline.
COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#8B6D00",
    "#7A5CC2",
)
MARKERS = "os^DvP*X"
INK, PALE = "#222222", "#8A8A8A"
PEERS_OF = ("float16", 128, True)  # the only variant in which peers were timed
PEERS_LABEL = "best public kernel, same shape (dashed; plain launches)"


def need_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UserError(
            "plots need matplotlib, which is not installed. pip install 'billfish[bench]' brings "
            "it; or leave out --plot, write --save FILE, and draw from that file elsewhere."
        ) from None


def draw_kernels(result: Result, folder: Path, peers: Result | None = None) -> list[Path]:
    """Writes both plots and returns their paths. `peers`: the content of docs/bench/peers.json."""
    need_matplotlib()
    if not any(_good(point) for point in result["points"]):
        raise UserError("there is nothing to draw: no point of this result was measured.")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in (
        ("roofline", roofline_figure(result)),
        ("speedup", speedup_figure(result, peers)),
    ):
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=160, facecolor="white")
    return written


def save(figure: "Figure", path: Path) -> None:
    try:
        figure.savefig(path, dpi=160, facecolor="white")
    except ValueError as error:  # matplotlib does not know the file's suffix
        raise UserError(f"--plot {path}: {error}. Take an ending such as .png.") from None


def roofline_figure(result: Result) -> "Figure":
    figure, panels = _figure(result, "Achieved against the roofline")
    peaks, ceiling = result["peaks"], result["ceilings"]["read_bytes_per_s"]
    memory, compute = peaks["bytes_per_s"], peaks["flop_per_s"]
    known = peaks["source"] == "datasheet"
    points = [point for point in result["points"] if _good(point)]
    low = min(point["intensity"] for point in points) / 2
    high = max(compute / memory * 2, max(point["intensity"] for point in points) * 1.6)
    ridge = compute / memory
    bottom = min(point["tflops"] for point in points) / 1.6
    for axes, (variant, _) in panels:
        roof_x = [low, ridge, high]
        roof_y = [min(x * memory, compute) / 1e12 for x in roof_x]
        source = "datasheet" if known else "measured in this run"
        told = f"roof, {source}: {memory / 1e12:.2f} TB/s, {compute / 1e12:.0f} TFLOP/s"
        axes.plot(roof_x, roof_y, color=INK, linewidth=1.8, label=told, zorder=2)
        if known:
            reach = [low, min(compute / ceiling, high)]
            told = f"read speed reached by torch.sum: {ceiling / 1e12:.2f} TB/s"
            axes.plot(
                reach,
                [x * ceiling / 1e12 for x in reach],
                color=PALE,
                linestyle=(0, (4, 2)),
                linewidth=1.2,
                label=told,
                zorder=1,
            )
        for index, label, line in _lines(result, variant):
            x, y = [p["intensity"] for p in line], [p["tflops"] for p in line]
            axes.plot(x, y, label=label, **_style(index))
        _batches(axes, result, variant)
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, compute / 1e12 * 2.3))
        axes.set_xlabel("arithmetic intensity (FLOP per byte of weights, scales, x and y)")
        axes.xaxis.set_major_formatter(_plain)
        axes.yaxis.set_major_formatter(_plain)
        axes.set_ylabel("achieved TFLOP/s")
    _legend(figure)
    return figure


def speedup_figure(result: Result, peers: Result | None = None) -> "Figure":
    from matplotlib.ticker import LogLocator, NullLocator

    what = " and ".join(dict.fromkeys(_dense(point["dtype"]) for point in result["points"]))
    points = [point for point in result["points"] if _good(point)]
    rows = sorted({point["m"] for point in points})
    times = peer_times(result, peers) if peers else []
    figure, panels = _figure(result, f"Speed-up over cuBLAS ({what})", bool(times))
    for axes, (variant, model) in panels:
        mine = [p for p in points if _variant(p) == variant and model in (None, _model(p))]
        largest = max((point["k"] * point["n"] for point in mine), default=0)
        ideal = {p["m"]: p["ideal_speedup"] for p in mine if p["k"] * p["n"] == largest}
        axes.plot(
            sorted(ideal),
            [ideal[m] for m in sorted(ideal)],
            color=INK,
            linewidth=1.8,
            label="ideal: both on the roof (largest shape)",
            zorder=2,
        )
        axes.axhline(1, color=PALE, linewidth=1.2, label="as fast as cuBLAS", zorder=1)
        if variant == PEERS_OF:
            _peers(axes, _lines(result, variant, model), times)
        for index, label, line in _lines(result, variant, model):
            line = [point for point in line if point["speedup"] is not None]
            x, y = [p["m"] for p in line], [p["speedup"] for p in line]
            axes.plot(x, y, label=label, **_style(index))
        axes.set_xscale("log", base=2)
        axes.set_xticks(_ticks(rows), minor=False)
        axes.xaxis.set_major_formatter(_plain)
        axes.set_xlim(rows[0] / 1.15, rows[-1] * 1.15)
        axes.set_yscale("log")  # a gap between two lines is a ratio, the same one everywhere
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(_plain)
        axes.set_xlabel("batch size m (rows of x)")
        axes.set_ylabel("times faster than cuBLAS (log scale)")
    _legend(figure, bool(times))
    return figure


def peer_times(result: Result, peers: Result) -> list[Result]:
    """The peers' times on the result's card, at its shapes and rows, by rising m."""
    if peers["card"] != result["card"]["name"]:
        return []
    points = [point for point in result["points"] if _good(point)]
    shapes = {(point["k"], point["n"]) for point in points if _variant(point) == PEERS_OF}
    rows = [point["m"] for point in points]
    times = [t for t in peers["times"] if (t["k"], t["n"]) in shapes]
    times = [t for t in times if min(rows) <= t["m"] <= max(rows)]
    return sorted(times, key=lambda each: int(each["m"]))


# -- parts of a plot


def _figure(
    result: Result, title: str, peers: bool = False
) -> tuple["Figure", list[tuple["Axes", Any]]]:
    """With peers a panel shows one model; without, its model is None and it shows all."""
    from matplotlib.figure import Figure

    good = [point for point in result["points"] if _good(point)]
    there = dict.fromkeys((_variant(p), _model(p) if peers else None) for p in good)
    variants = dict.fromkeys(variant for variant, _ in there)
    asked = [panel for variant in variants for panel in there if panel[0] == variant]
    columns = min(len(asked), 2)
    lines = math.ceil(len(asked) / columns)
    entries = len({(point["k"], point["n"]) for point in result["points"]}) + 2 + peers
    below = 0.75 + 0.24 * math.ceil(entries / _columns(columns, peers))  # inches of the legend
    width, height = (8.6, 5.4) if columns == 1 else (6.2 * columns, 5.0)
    figure = Figure(figsize=(width, height * lines + below))
    figure.set_layout_engine("constrained", w_pad=0.14, h_pad=0.09)
    mode = result["protocol"]["headline_mode"]
    how = "programmatic launches" if mode == "pdl" else "plain launches"
    figure.suptitle(
        f"{title}\n{result['card']['name']}, {result['scheme']}, {how}, {result['date'][:10]}",
        fontsize=13,
        color=INK,
    )
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten().tolist()
    for unused in grid[len(asked) :]:
        unused.set_visible(False)
    for axes, (variant, model) in zip(grid, asked, strict=False):
        whose = f"{model}: " if model else ""
        axes.set_title(whose + _title(variant), fontsize=10.5, color=INK)
        axes.grid(True, which="major", color="#DDDDDD", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9.5)
    return figure, list(zip(grid, asked, strict=False))


def _columns(panels: int, peers: bool) -> int:
    """Of the legend. Beside the peers' long entry four columns would not fit."""
    return 2 if panels == 1 else 3 if peers else 4


def _legend(figure: "Figure", peers: bool = False) -> None:
    found: dict[str, Any] = {}  # from every panel: a shape may have failed in some
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    names = list(found)
    if peers:  # shapes first, which have markers: a model's four linears fill a column
        names.sort(key=lambda label: found[label].get_marker() == "None")
    figure.legend(
        [found[label] for label in names],
        names,
        loc="outside lower center",
        frameon=False,
        fontsize=9.5,
        ncols=_columns(len(figure.axes), peers),
    )


def _peers(axes: "Axes", lines: _Lines, times: list[Result]) -> None:
    """Speed-ups over cuBLAS in the peers' own run, since the clocks of two runs differ."""
    style: dict[str, Any] = {"linestyle": (0, (4, 2.5)), "linewidth": 1.0, "zorder": 2}
    for index, _, line in lines:
        shape = line[0]["k"], line[0]["n"]
        y = {t["m"]: t["cublas_us"] / t["us"] for t in times if (t["k"], t["n"]) == shape}
        if y:
            axes.plot(list(y), list(y.values()), color=_style(index)["color"], **style)
    if times:  # one legend entry for all; the colour identifies the shape
        axes.plot([], [], color=PALE, label=PEERS_LABEL, **style)


def _batches(axes: "Axes", result: Result, variant: Any) -> None:
    """Labels m of the largest shape above the roofline; other shapes are close to it."""
    lines = [line for _, _, line in _lines(result, variant)]
    line = max(lines, key=lambda each: int(each[0]["k"] * each[0]["n"]))
    memory, compute = result["peaks"]["bytes_per_s"], result["peaks"]["flop_per_s"]
    last = 0.0
    for point in line:
        x = point["intensity"]
        if x < last * 1.3:  # would overlap the label before
            continue
        last, slanted = x, x * memory < compute
        axes.annotate(
            f"m={point['m']}",
            (x, min(x * memory, compute) / 1e12),
            fontsize=8.5,
            color=INK,
            xytext=(-5, 2) if slanted else (0, 4),
            textcoords="offset points",
            va="bottom",
            ha="right" if slanted else "left",
            rotation=0 if slanted else 40,
            rotation_mode="anchor",
        )


def _style(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": ("-", (0, (2, 1)))[index // len(COLOURS) % 2],
        "markersize": 5.5,
        "linewidth": 1.5,
        "zorder": 3,
    }


def _lines(result: Result, variant: Any, model: str | None = None) -> _Lines:
    """(index of the shape, which is its colour in every panel; label; points by rising m)"""
    shapes = dict.fromkeys((point["k"], point["n"]) for point in result["points"])
    for index, (k, n) in enumerate(shapes):
        mine = [p for p in result["points"] if (p["k"], p["n"]) == (k, n)]
        line = [p for p in mine if _good(p) and _variant(p) == variant]
        names = [name for name in mine[0]["linears"] if name != f"{k}x{n}"]
        label = ", ".join([*names[:2], *(["..."] if names[2:] else [])])
        if line and model in (None, _model(line[0])):
            line.sort(key=lambda point: int(point["m"]))
            yield index, f"{label}  {k} x {n}".strip(), line


def _good(point: Result) -> bool:
    return not point["error"] and "tflops" in point


def _variant(point: Result) -> tuple[str, int, bool]:
    return point["dtype"], point["group_size"], point["symmetric"]


def _model(point: Result) -> str:
    """The first model with this linear; "" for shapes given as K x N, which share a panel."""
    model, _, linear = str(point["linears"][0]).partition(" ")
    return model if linear else ""


def _title(variant: tuple[str, int, bool]) -> str:
    dtype, group_size, symmetric = variant
    group = "one scale a channel" if group_size == -1 else f"groups of {group_size}"
    return f"{_dense(dtype)}, {group}, {'symmetric' if symmetric else 'asymmetric'}"


def _dense(dtype: str) -> str:
    return {"float16": "fp16", "bfloat16": "bf16"}.get(dtype, dtype)


def _ticks(rows: list[int]) -> list[int]:
    """Powers of two within the rows, and the ends."""
    powers = [2**e for e in range(rows[-1].bit_length()) if rows[0] <= 2**e <= rows[-1]]
    return sorted({*powers, rows[0]} | ({rows[-1]} if not powers else set()))


def _plain(value: float, position: float) -> str:
    return f"{value:g}"
