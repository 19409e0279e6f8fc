"""Small SVG plots as strings: lines by block index, bars with an error bar, histogram bars.

Every colour is a CSS variable of the page, so that one plot serves light and dark.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 960, 340
LEFT, RIGHT, TOP, BOTTOM = 74, 14, 14, 42
COLOURS = 8  # --s0 ... --s7 in the page
LOG_FROM = 15.0  # max / min above which the y axis is logarithmic


@dataclass(frozen=True)
class Point:
    x: int
    y: float
    title: str


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Axis:
    """y -> pixels, and the ticks to draw."""

    low: float
    high: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float]) -> "Axis":
        positive = [value for value in values if value > 0]
        high = max(values, default=0.0)
        if not positive:
            return cls(0.0, 1.0, log=False)
        if min(values) > 0 and high / min(positive) > LOG_FROM:
            return cls(min(positive) / 1.25, high * 1.25, log=True)
        step = _nice_step(high / 4)
        return cls(0.0, step * math.ceil(high * 1.02 / step), log=False)

    def place(self, y: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        share = ((math.log(y) if self.log else y) - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def ticks(self) -> list[float]:
        if not self.log:
            step = _nice_step(self.high / 4)
            return [step * i for i in range(round(self.high / step) + 1)]
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        digits = (1, 2, 5) if len(exponents) <= 4 else (1,)
        every = [d * 10.0**e for e in exponents for d in digits]
        return [tick for tick in every if self.low <= tick <= self.high]


def line_plot(series: Sequence[Series], x_label: str, y_label: str, last_x: str | None) -> str:
    """One coloured line per series. `last_x`: label of the last column, if it is not a block."""
    xs = sorted({point.x for one in series for point in one.points})
    axis = Axis.over([point.y for one in series for point in one.points])
    low, high = xs[0], max(xs[-1], xs[0] + 1)

    def place(x: int) -> float:
        return LEFT + 12 + (x - low) / (high - low) * (WIDTH - LEFT - RIGHT - 24)

    parts = []
    for tick in axis.ticks():
        y = axis.place(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:.3g}</text>'
        )
    step = max(1, math.ceil((high - low + 1) / 16))
    numbered = [x for x in xs if last_x is None or x != xs[-1]]
    marks = [(x, str(x)) for x in numbered if (x - low) % step == 0]
    if last_x is not None:
        marks = [(x, text) for x, text in marks if xs[-1] - x >= 2] + [(xs[-1], last_x)]
    for x, text in marks:
        parts.append(
            f'<text class="tick" x="{place(x):.1f}" y="{HEIGHT - BOTTOM + 18}" '
            f'text-anchor="middle">{escape(text)}</text>'
        )
    parts.append(
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 4}" '
        f'text-anchor="middle">{escape(x_label)}</text>'
        f'<text class="label" transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) '
        f'rotate(-90)" text-anchor="middle">{escape(y_label)}'
        f"{' (log scale)' if axis.log else ''}</text>"
    )
    for index, one in enumerate(series):
        at = [(place(point.x), axis.place(point.y), point.title) for point in one.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in at)
        dots = "".join(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4"><title>{escape(title)}</title></circle>'
            for x, y, title in at
        )
        parts.append(
            f'<g class="series" style="--c:var(--s{index % COLOURS})">'
            f'<polyline points="{path}"/>{dots}</g>'
        )
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(y_label)} by {escape(x_label)}">{"".join(parts)}</svg>'
    )


def legend(series: Sequence[Series]) -> str:
    keys = "".join(
        f'<span class="key"><i style="background:var(--s{index % COLOURS})"></i>'
        f"{escape(one.name)}</span>"
        for index, one in enumerate(series)
    )
    return f'<div class="legend">{keys}</div>'


def recovery_bar(value: float, stderr: float | None, top: float) -> str:
    """A bar from 0 with an error bar of one standard error each way, and a mark at 1."""
    width, height, middle = 180, 18, 9

    def place(share: float) -> float:
        return max(0.0, min(share, top)) / top * (width - 2)

    whisker = ""
    if stderr:
        low, high = place(value - stderr), place(value + stderr)
        whisker = (
            f'<path class="whisker" d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 3}v6'
            f'M{high:.1f} {middle - 3}v6"/>'
        )
    return (
        f'<svg class="bar" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{value:.1%}"><rect class="track" x="0" y="5" '
        f'width="{place(1):.1f}" height="8" rx="2"/><rect class="fill" x="0" y="5" '
        f'width="{place(value):.1f}" height="8" rx="2"/><line class="one" x1="{place(1):.1f}" '
        f'x2="{place(1):.1f}" y1="1" y2="17"/>{whisker}</svg>'
    )


def share_bar(share: float) -> str:
    width = 220
    return (
        f'<svg class="bar" viewBox="0 0 {width} 18" width="{width}" height="18" role="img" '
        f'aria-label="{share:.1%}"><rect class="track" x="0" y="5" width="{width}" height="8" '
        f'rx="2"/><rect class="fill" x="0" y="5" width="{share * width:.1f}" height="8" rx="2"/>'
        f"</svg>"
    )


def _nice_step(about: float) -> float:
    """The next of 1, 2, 2.5, 5 times a power of ten at or above `about`."""
    power = 10.0 ** math.floor(math.log10(about))
    return next(d * power for d in (1, 2, 2.5, 5, 10) if d * power >= about * 0.999999)
