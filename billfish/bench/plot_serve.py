"""A plot of a result of `bench serve`: time per output token by request rate, as in figure 14 of
the MARLIN paper, and time to first token.
"""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from billfish.bench.plot import COLOURS, INK, need_matplotlib, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Result = dict[str, Any]
PANELS = {"tpot_ms": "time per output token, ms", "ttft_ms": "time to the first token, ms"}
LINES = {"p50": ("median", "-", "o"), "p90": ("p90", "--", "s"), "p99": ("p99", ":", "^")}


def draw_serve(result: Result, path: Path) -> None:
    need_matplotlib()
    save(serve_figure(result), path)


def serve_figure(result: Result) -> "Figure":
    """Percentiles of one server, or the medians of several."""
    from matplotlib.figure import Figure

    servers = result.get("servers", [result])
    told = servers[0]["settings"]
    made = Figure(figsize=(11, 4.8), layout="constrained")
    name = told["model"] if len(servers) == 1 else f"{result['model']}, medians"
    made.suptitle(
        f"{name}, {_range(told['input'])} tokens in, {_range(told['output'])} out, "
        f"{told['requests']} requests a point, {servers[0]['date'][:10]}",
        fontsize=13,
        color=INK,
    )
    rates = [point["rate"] for point in servers[0]["points"]]
    places = list(range(len(rates))) if "inf" in rates else rates
    lines: list[tuple[Result, str, str, str, str]]
    if len(servers) > 1:
        kinds = zip(servers, itertools.cycle("os^vD"), strict=False)
        lines = [(server, "p50", server["variant"], "-", marker) for server, marker in kinds]
    else:
        lines = [(servers[0], part, *style) for part, style in LINES.items()]
    for axes, (key, title) in zip(made.subplots(1, 2), PANELS.items(), strict=True):
        for colour, line in zip(itertools.cycle(COLOURS), lines, strict=False):
            server, part, label, style, marker = line
            there = [
                (at, point[key][part])
                for at, point in zip(places, server["points"], strict=False)
                if point[key]
            ]
            axes.plot(
                [at for at, _ in there],
                [value for _, value in there],
                label=label,
                color=colour,
                linestyle=style,
                marker=marker,
                linewidth=1.8,
            )
        axes.set_xticks(places, list(map(str, rates)))
        axes.set_xlabel("requests a second")
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        axes.grid(True, color="#DDDDDD", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    return made


def _range(told: list[int]) -> str:
    low, high = told
    return str(low) if low == high else f"{low} to {high}"
