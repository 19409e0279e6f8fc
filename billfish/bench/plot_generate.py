"""A plot of a result of `bench generate`: tokens a second, of decode alone and with prefill.

Lines by batch size, with each variant's roofline dashed; bars if there is only one batch size.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from billfish.bench.plot import COLOURS, INK, MARKERS, need_matplotlib, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = dict[str, Any]
PANELS = {
    "decode_tokens_per_s": "decode, tokens/s",
    "tokens_per_s": "prefill and decode, tokens/s",
}


def draw_generate(result: Result, path: Path) -> None:
    need_matplotlib()
    save(generate_figure(result), path)


def generate_figure(result: Result) -> "Figure":
    from matplotlib.figure import Figure

    told = result["settings"]
    made = Figure(figsize=(11, 4.8), layout="constrained")
    made.suptitle(
        f"{told['model']}, {told['input']} tokens in, {told['output']} out\n"
        f"{result['card']['name']}, {result['date'][:10]}",
        fontsize=13,
        color=INK,
    )
    for axes, (key, title) in zip(made.subplots(1, 2), PANELS.items(), strict=True):
        lines = {
            place: points
            for place, variant in enumerate(result["variants"])
            if (points := [p for p in variant["points"] if p.get(key)])
        }
        axes.set_ylabel(title)
        axes.grid(True, color="#DDDDDD", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if all(len(points) == 1 for points in lines.values()):
            _bars(axes, key, lines, result["variants"])
        else:
            _lines(axes, key, lines, result["variants"], told["bandwidth"])
    return made


def _bars(axes: "Axes", key: str, lines: dict[int, Any], variants: list[Result]) -> None:
    for place, (point,) in lines.items():
        value = point[key]
        ratio = f"\n{value / lines[0][0][key]:.2f} x" if 0 in lines else ""
        axes.bar(place, value, color=COLOURS[place % len(COLOURS)], width=0.65)
        axes.annotate(
            f"{value:.4g}{ratio}",
            (place, value),
            ha="center",
            va="bottom",
            color=INK,
            fontsize=9,
            xytext=(0, 2),
            textcoords="offset points",
        )
    names = [f"{variants[place]['variant']}\nbatch {lines[place][0]['batch']}" for place in lines]
    axes.set_xticks(list(lines), names)
    axes.margins(y=0.16)


def _lines(
    axes: "Axes",
    key: str,
    lines: dict[int, Any],
    variants: list[Result],
    bandwidth: float | None,
) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    for place, points in lines.items():
        colour, name = COLOURS[place % len(COLOURS)], variants[place]["variant"]
        batches = [point["batch"] for point in points]
        axes.plot(
            batches,
            [point[key] for point in points],
            color=colour,
            label=name,
            linewidth=1.8,
            marker=MARKERS[place % len(MARKERS)],
        )
        if bandwidth and key == "decode_tokens_per_s":
            roof = [batch * bandwidth / variants[place]["read_bytes"] for batch in batches]
            axes.plot(
                batches,
                roof,
                color=colour,
                linestyle=(0, (4, 2.5)),
                linewidth=1.0,
                label=f"{name}, weights at {bandwidth / 1e12:.3g} TB/s",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    every = sorted({point["batch"] for points in lines.values() for point in points})
    axes.set_xticks(every, [str(batch) for batch in every])
    axes.set_xlabel("sequences at the same time")
    axes.legend(frameon=False, fontsize=9)
