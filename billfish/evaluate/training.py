"""The section of the report about training: errors on held-out sequences before and after it, of
every block and of the whole model.

A gain is a dict with before, after, kept, note and, of a block, block; any may be missing. Errors
that are not finite are None.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from billfish.evaluate import page, plot
from billfish.evaluate.page import MISSING, Markup, number

Gain = Mapping[str, Any]
VALUES = (("Before", "num"), ("After", "num"), ("Change", "num"))


def block_gains(quantization: Mapping[str, Any]) -> list[Gain]:
    """Of the blocks that were trained."""
    training = quantization.get("training")
    if not isinstance(training, Mapping) or not training.get("steps"):
        return []
    blocks = training.get("blocks")
    gains = blocks if isinstance(blocks, list) else []
    return [
        gain
        for gain in gains
        if isinstance(gain, Mapping) and number(gain.get("block")) is not None
    ]


def whole_gain(quantization: Mapping[str, Any]) -> Gain | None:
    """Of distillation, if there was any."""
    training = quantization.get("training")
    whole = training.get("whole_model") if isinstance(training, Mapping) else None
    return whole if isinstance(whole, Mapping) and whole else None


def kept(gains: Sequence[Gain]) -> int:
    return sum(gain.get("kept") is True for gain in gains)


def median_change(gains: Sequence[Gain]) -> float | None:
    """Of the error, relative; blocks whose training was not kept did not change."""
    return _median(_change(gain, _written(gain)) for gain in gains)


def training_section(quantization: Mapping[str, Any]) -> list[Markup]:
    """Nothing, if nothing was trained."""
    gains, whole = block_gains(quantization), whole_gain(quantization)
    rows: list[list[object]] = []
    if gains:
        medians = [_median(map(which, gains)) for which in (_before, _written)]
        change, share = _percent(median_change(gains)), f"{kept(gains)} of {len(gains)}"
        rows.append(["Error of a block, median", *map(_error, medians), change, share])
    if whole is not None:
        rows.append(["KL of the whole model, nats a token", *_cells(whole)])
    if not rows:
        return []
    said = (
        "Measured on calibration sequences that training did not see. A block's error is that of "
        "its output, squared and relative; KL is the distance of the logits from the original's. "
        "Training is kept only where it improves them."
    )
    head = [("Held out", "name"), *VALUES, ("Kept", "")]
    summary = page.table(head, rows, narrow=True)
    body = _blocks(gains) if gains else []
    return [page.section("What training gained", page.note(said), summary, *body)]


def _blocks(gains: Sequence[Gain]) -> list[Markup]:
    """A plot of all blocks, as the solver left them and as they were written; and a table."""
    lines: dict[str, list[plot.Point]] = {"before training": [], "after training": []}
    for gain in gains:
        block, before, after = int(gain["block"]), _before(gain), _written(gain)
        says = f"{_error(after)} after" if gain.get("kept") is True else "training not kept"
        title = f"block {block}: error {_error(before)} before, {says}"
        for line, error in zip(lines.values(), (before, after), strict=True):
            line += [] if error is None else [plot.Point(block, error, title)]
    series = [plot.Series(name, tuple(line)) for name, line in lines.items() if line]
    drawn = []
    if series:
        drawn = [plot.legend(series), plot.line_plot(series, "block", "held-out error", None)]
    head = [("Block", "num"), *VALUES, ("Kept", "")]
    every = page.table(head, [[int(gain["block"]), *_cells(gain)] for gain in gains], narrow=True)
    details = page.details(f"All {len(gains)} blocks", every)
    return [*map(Markup, drawn), details]


def _cells(gain: Gain) -> list[object]:
    """Before, after, change, and whether it was kept or why not. The values are those measured,
    kept or not."""
    after = number(gain.get("after"))
    verdict = "yes" if gain.get("kept") is True else gain.get("note") or "no: not better"
    return [_error(_before(gain)), _error(after), _percent(_change(gain, after)), verdict]


def _before(gain: Gain) -> float | None:
    return number(gain.get("before"))


def _written(gain: Gain) -> float | None:
    """The error of what the checkpoint holds."""
    return number(gain.get("after")) if gain.get("kept") is True else _before(gain)


def _change(gain: Gain, after: float | None) -> float | None:
    before = _before(gain)
    return after / before - 1 if before and after is not None else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _error(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.4g}"


def _percent(change: float | None) -> str:
    return MISSING if change is None else f"{100 * change:+.1f} %"
