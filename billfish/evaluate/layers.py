"""Sections of the report about the quantized linears: errors, bits per weight, every layer.

A layer is a dict with name, n, k, bits_per_weight, error, seconds, note; any may be missing.
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from billfish.evaluate import page, plot
from billfish.evaluate.page import MISSING, Markup, number

Layer = Mapping[str, Any]
WORST = 5
MAX_BARS = 16


def layers_of(quantization: Mapping[str, Any]) -> list[Layer]:
    layers = quantization.get("layers")
    if not isinstance(layers, list):
        return []
    return [layer for layer in layers if isinstance(layer, Mapping)]


def mean_bits_per_weight(layers: Sequence[Layer]) -> float | None:
    """Over all weights, from the stored bytes of each layer."""
    sized = [(weights(layer), number(layer.get("bits_per_weight"))) for layer in layers]
    known = [(count, bits) for count, bits in sized if count and bits is not None]
    if not known:
        return None
    return math.fsum(count * bits for count, bits in known) / sum(count for count, _ in known)


def median_error(layers: Sequence[Layer]) -> float | None:
    errors = [error for layer in layers if (error := number(layer.get("error"))) is not None]
    return statistics.median(errors) if errors else None


def weights(layer: Layer) -> int:
    n, k = number(layer.get("n")), number(layer.get("k"))
    return int(n * k) if n and k else 0


def layer_sections(layers: Sequence[Layer]) -> list[Markup]:
    sections = []
    if any(number(layer.get("error")) is not None for layer in layers):
        sections.append(_error_section(layers))
    if mean_bits_per_weight(layers) is not None:
        sections.append(_bits_section(layers))
    if layers:
        every = page.details(f"All {len(layers)} layers", _layer_table(layers))
        sections.append(page.section("Every layer", every))
    return sections


def error_series(layers: Sequence[Layer]) -> tuple[list[plot.Series], str | None]:
    """(one series per kind of linear, in the model's order; label of the column after the last
    block, for layers outside of blocks such as lm_head). Experts of a block share one point."""
    found: dict[str, dict[int | None, list[tuple[float, Layer]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for layer in layers:
        error = number(layer.get("error"))
        if error is not None:
            kind, block = kind_and_block(str(layer.get("name", "")))
            found[kind][block].append((error, layer))
    # If there are more kinds than colours, those with the largest errors have one of their own.
    kinds = sorted(found, key=lambda kind: -max(e for one in found[kind].values() for e, _ in one))
    for kind in kinds[plot.COLOURS - 1 :] if len(kinds) > plot.COLOURS else []:
        for block, members in found.pop(kind).items():
            found["other"][block] += members
    blocks = [block for one in found.values() for block in one if block is not None]
    beyond = max(blocks, default=-1) + 1
    series = [
        plot.Series(
            kind,
            tuple(
                _point(beyond if block is None else block, members)
                for block, members in sorted(
                    one.items(), key=lambda item: beyond if item[0] is None else item[0]
                )
            ),
        )
        for kind, one in found.items()
    ]
    outside = any(None in one for one in found.values())
    return series, "outside" if outside else None


def kind_and_block(name: str) -> tuple[str, int | None]:
    """model.layers.3.mlp.experts.7.down_proj -> (down_proj, 3)."""
    block = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return name.rpartition(".")[2] or "unnamed", int(block[1]) if block else None


def _point(x: int, members: list[tuple[float, Layer]]) -> plot.Point:
    errors = [error for error, _ in members]
    if len(members) == 1:
        layer = members[0][1]
        bits = number(layer.get("bits_per_weight"))
        says = f"{layer.get('name', MISSING)}: error {errors[0]:.4g}"
        return plot.Point(x, errors[0], says + (f", {bits:.3g} bits" if bits is not None else ""))
    average = math.fsum(errors) / len(errors)
    says = f"{len(errors)} layers, mean error {average:.4g}, largest {max(errors):.4g}"
    return plot.Point(x, average, f"{members[0][1].get('name', MISSING)} and others: {says}")


def _error_section(layers: Sequence[Layer]) -> Markup:
    series, outside = error_series(layers)
    drawing = plot.line_plot(series, "block", "relative output error", outside)
    worst = sorted(
        ((error, layer) for layer in layers if (error := number(layer.get("error"))) is not None),
        key=lambda pair: -pair[0],
    )[:WORST]
    rows = [[_name(layer), _bits(layer), f"{error:.4g}"] for error, layer in worst]
    head = [("Largest errors", ""), ("Bits", "num"), ("Error", "num")]
    said = (
        "Error of a layer's output on the calibration text, relative to the output itself "
        "(Hessian-weighted). Point at a dot for its layer."
    )
    if any(number(layer.get("error")) is None for layer in layers):
        said += " Layers whose error is not known are left out; training makes it unknown."
    return page.section(
        "Where the error is",
        page.note(said),
        Markup(plot.legend(series)),
        Markup(drawing),
        page.table(head, rows, narrow=True),
    )


def _bits_section(layers: Sequence[Layer]) -> Markup:
    """Histogram of bits per weight; rare values share the last line."""
    counts: dict[float, list[int]] = defaultdict(list)
    for layer in layers:
        bits = number(layer.get("bits_per_weight"))
        if bits is not None:
            counts[round(bits, 2)].append(weights(layer))
    total = sum(sum(sizes) for sizes in counts.values()) or 1
    common = sorted(counts, key=lambda bits: -sum(counts[bits]))
    shown, rest = sorted(common[:MAX_BARS]), common[MAX_BARS:]
    lines = [(f"{bits:.2f}", counts[bits]) for bits in shown]
    if rest:
        lines.append(
            (f"{len(rest)} other values", [size for bits in rest for size in counts[bits]])
        )
    rows = [
        [
            label,
            Markup(f"{plot.share_bar(sum(sizes) / total)}{sum(sizes) / total:.1%}"),
            page.count(sum(sizes)),
            page.count(len(sizes)),
        ]
        for label, sizes in lines
    ]
    head = [("Bits per weight", ""), ("Share", "bar"), ("Weights", "num"), ("Layers", "num")]
    return page.section("Bits", page.table(head, rows, narrow=True))


def _layer_table(layers: Sequence[Layer]) -> Markup:
    noted = any(layer.get("note") for layer in layers)
    head = [("Layer", ""), ("n", "num"), ("k", "num"), ("Bits", "num"), ("Error", "num")]
    head += [("Time", "num")] + ([("Note", "")] if noted else [])
    rows = []
    for layer in layers:
        error, seconds = number(layer.get("error")), number(layer.get("seconds"))
        row: list[object] = [_name(layer), page.count(layer.get("n")), page.count(layer.get("k"))]
        row += [_bits(layer), MISSING if error is None else f"{error:.4g}"]
        row += [MISSING if seconds is None else page.duration(seconds)]
        rows.append(row + ([layer.get("note") or ""] if noted else []))
    return page.table(head, rows)


def _name(layer: Layer) -> Markup:
    return page.code(layer.get("name", MISSING))


def _bits(layer: Layer) -> str:
    bits = number(layer.get("bits_per_weight"))
    return MISSING if bits is None else f"{bits:.3g}"
