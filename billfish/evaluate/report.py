"""The report of `eval` or `quantize`: an HTML page and a JSON file, written atomically.

Any part of the result may be missing (baseline, tasks, quantization); the page leaves it out. The
page's elements are in page.py, its plots in plot.py, the sections about layers in layers.py, that
about training in training.py.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from billfish.evaluate import page, plot
from billfish.evaluate.estimate import finite
from billfish.evaluate.layers import layer_sections, layers_of, mean_bits_per_weight, median_error
from billfish.evaluate.page import MISSING, Markup, number
from billfish.evaluate.training import block_gains, median_change, training_section

Result = Mapping[str, Any]


def write_report(
    result: Result, html_path: str | Path | None, json_path: str | Path | None = None
) -> None:
    """Writes the files whose path is given."""
    if html_path is not None:
        _write(Path(html_path), report_html(result))
    if json_path is not None:
        _write(Path(json_path), json.dumps(finite(result), indent=2) + "\n")


def report_html(result: Result) -> str:
    quantization = _part(result, "quantization")
    path = _part(result, "model").get("path")
    title = Path(str(path)).name if path else "Quantization"
    baseline = _part(result, "baseline").get("path")
    subtitles = [
        describe_scheme(quantization),
        f"Compared with {baseline}" if baseline else None,
    ]
    cards = [*_size_card(result), *_bits_card(quantization), *_score_cards(result)]
    cards += _check_card(quantization)
    if not _tasks(result):
        cards += _effort_cards(quantization)
    body = [Markup(f'<div class="cards">{"".join(cards)}</div>\n')] if cards else []
    if _tasks(result):
        body.append(_scores_section(result))
    body += training_section(quantization)
    body += layer_sections(layers_of(quantization))
    body.append(_provenance_section(result))
    kicker = "Billfish evaluation" if _tasks(result) else "Billfish quantization"
    return page.page(title, kicker, subtitles, *body)


def describe_scheme(quantization: Result) -> str | None:
    """`w4a16, bits 4, group_size 64 · gptq`, with the scheme's fields as given."""
    scheme = quantization.get("scheme")
    if isinstance(scheme, Mapping):
        name = scheme.get("name")
        rest = [f"{key} {value}" for key, value in scheme.items() if key != "name"]
        scheme = ", ".join(([str(name)] if name else []) + rest)
    parts = [str(part) for part in (scheme, quantization.get("method")) if part]
    return " \N{MIDDLE DOT} ".join(parts) or None


# Cards


def _size_card(result: Result) -> list[Markup]:
    quantization = _part(result, "quantization")
    after = number(_part(result, "model").get("bytes")) or number(quantization.get("bytes_after"))
    before = number(_part(result, "baseline").get("bytes")) or number(
        quantization.get("bytes_before")
    )
    if not after:
        return []
    if not before:
        return [page.card("Size on disk", page.size(after), "", "weights (safetensors)")]
    says = f"from {page.size(before)}"
    if before > after:
        says += f", {before / after:.2f}\N{MULTIPLICATION SIGN} smaller"
    return [page.card("Size on disk", page.size(after), "", says)]


def _bits_card(quantization: Result) -> list[Markup]:
    layers = layers_of(quantization)
    bits = mean_bits_per_weight(layers)
    if bits is None:
        return []
    linears = f"{len(layers)} linear layer{'s' if len(layers) != 1 else ''}"
    return [page.card("Bits per weight", f"{bits:.3f}", "", f"scales included, {linears}")]


def _score_cards(result: Result) -> list[Markup]:
    cards = []
    text = next((task for task in _tasks(result) if task.get("kind") == "text"), None)
    if text is not None:
        model, baseline = _part(text, "model"), _part(text, "baseline")
        says = f"from {page.quantity(baseline.get('value'))}, " if baseline else ""
        says += _title(text)
        if number(model.get("samples")):
            says += f", {page.count(model['samples'])} windows"
        cards.append(page.card("Perplexity", page.quantity(model.get("value")), "", says))
    mean, of = _part(result, "mean_recovery"), "of the baseline's zero-shot average"
    if not mean and text is not None:
        mean, of = _part(text, "recovery"), "baseline perplexity / perplexity"
    value = number(mean.get("value"))
    if value is not None:
        error = number(mean.get("stderr"))
        unit = "%" if error is None else f"\N{PLUS-MINUS SIGN} {100 * error:.1f} %"
        cards.append(page.card("Recovery", f"{100 * value:.1f}", unit, of))
    kl = number(_part(text or {}, "kl").get("value"))
    if kl is not None:
        same = number(_part(text or {}, "agreement").get("value"))
        says = "a token, baseline to model"
        if same is not None:
            says = f"a token; {same:.1%} same first choice"
        cards.append(page.card("KL divergence", f"{kl:.3g}", "nats", says))
    return cards


def _check_card(quantization: Result) -> list[Markup]:
    """What `quantize` saw when it compared its result with the original; null: it did not."""
    check = _part(quantization, "check")
    problem, same = check.get("problem"), number(check.get("greedy_same"))
    if problem:
        return [page.card("Check", "broken", "", str(problem))]
    tokens, kl = number(check.get("greedy_tokens")), number(check.get("kl"))
    if same is None or kl is None or not tokens:
        return []
    says = f"of greedy tokens as the original, after quantizing; KL {kl:.3g} nats"
    return [page.card("Check", f"{100 * same / tokens:.0f}", "%", says)]


def _effort_cards(quantization: Result) -> list[Markup]:
    cards = []
    error = median_error(layers_of(quantization))
    if error is not None:
        cards.append(page.card("Layer error", f"{error:.3g}", "", "median over layers, relative"))
    gains = block_gains(quantization)
    change = median_change(gains)
    if change is not None:
        says = f"held-out error, median of {len(gains)} blocks"
        cards.append(page.card("Training", f"{100 * change:+.1f}", "%", says))
    seconds = number(quantization.get("seconds"))
    if seconds is not None:
        cards.append(page.card("Time", page.duration(seconds), "", "to quantize"))
    return cards


# Scores


def _scores_section(result: Result) -> Markup:
    tasks = _tasks(result)
    compared = any(_part(task, "baseline") for task in tasks)
    head = [("Task", "name"), ("Metric", "name")]
    head += [("Baseline", "num"), ("Model", "num"), ("Recovery", "bar")] if compared else []
    head += [] if compared else [("Score", "num")]
    head += [("Samples", "num"), ("Time", "num")]
    reached = [number(_part(task, "recovery").get("value")) or 0.0 for task in tasks]
    spread = [number(_part(task, "recovery").get("stderr")) or 0.0 for task in tasks]
    # One scale for all bars; a wild outlier is cut rather than pressing the others together.
    top = min(2.0, max(1.05, *(a + b for a, b in zip(reached, spread, strict=True))))
    rows = []
    for task in tasks:
        percent = task.get("metric") != "perplexity"
        row: list[object] = [_title(task), task.get("metric", MISSING)]
        if compared:
            row.append(_with_error(_part(task, "baseline"), percent))
        row.append(_with_error(_part(task, "model"), percent))
        if compared:
            row.append(_recovery(_part(task, "recovery"), top))
        model, baseline = _part(task, "model"), _part(task, "baseline")
        spent = [number(part.get("seconds")) for part in (model, baseline)]
        seconds = sum(second for second in spent if second is not None)
        row += [page.count(model.get("samples")), page.duration(seconds)]
        rows.append(row)
    said = (
        "\N{PLUS-MINUS SIGN} is one standard error. Accuracies are in percent. "
        "Samples are questions, or windows of text."
    )
    if compared:
        said += (
            " Recovery is score / baseline score (for perplexity baseline / model); its error is "
            "paired, as both models answer the same questions. Time is of both models."
        )
    return page.section(
        "Scores", page.table(head, rows), *_divergence_table(tasks), page.note(said)
    )


def _divergence_table(tasks: list[Result]) -> list[Markup]:
    rows = [
        [
            _title(task),
            _with_error(_part(task, "kl"), percent=False),
            _with_error(_part(task, "agreement"), percent=True),
        ]
        for task in tasks
        if _part(task, "kl")
    ]
    head = [("Distance", "name"), ("KL, nats a token", "num"), ("Same first choice, %", "num")]
    return [page.table(head, rows, narrow=True)] if rows else []


def _title(task: Result) -> str:
    return str(task.get("title", task.get("name", MISSING)))


def _with_error(part: Result, percent: bool) -> Markup:
    if not part:
        return Markup(MISSING)
    value, error = number(part.get("value")), number(part.get("stderr"))
    if value is None:
        return Markup("not finite")
    text = f"{100 * value:.1f}" if percent else page.quantity(value)
    if error is None:
        return Markup(text)
    spread = f"{100 * error:.1f}" if percent else f"{error:.2g}"
    return Markup(f"{text} <small>\N{PLUS-MINUS SIGN} {spread}</small>")


def _recovery(part: Result, top: float) -> Markup:
    value, error = number(part.get("value")), number(part.get("stderr"))
    if value is None:
        return Markup(MISSING)
    spread = "" if error is None else f" <small>\N{PLUS-MINUS SIGN} {100 * error:.1f}</small>"
    return Markup(f"{plot.recovery_bar(value, error, top)}{100 * value:.1f} %{spread}")


# Provenance


def _provenance_section(result: Result) -> Markup:
    quantization = _part(result, "quantization")
    settings, calibration = _part(result, "settings"), _part(quantization, "calibration")
    machine, dtype = _part(result, "machine"), settings.get("dtype")
    if isinstance(dtype, Mapping):
        dtype = ", ".join(f"{role} {name}" for role, name in dtype.items())
    hashes = [
        Markup(f"{page.html(entry.get('file', ''))} {page.code(entry.get('sha256', ''))}")
        for entry in result.get("data") or []
    ]
    seconds = number(result.get("seconds"))
    quantized_in = number(quantization.get("seconds"))
    command = result.get("command") or quantization.get("command")
    pairs: list[tuple[str, object]] = [
        ("Model", _part(result, "model").get("path")),
        ("Baseline", _part(result, "baseline").get("path")),
        ("Date", result.get("created")),
        ("Command", page.code(command) if command else None),
        ("Evaluated in", None if seconds is None else page.duration(seconds)),
        ("dtype", dtype),
        ("Window", f"{settings['seqlen']} tokens" if settings.get("seqlen") else None),
        ("Limit", settings.get("limit") or ("none: whole data sets" if settings else None)),
        ("Device", settings.get("device")),
        ("Machine", _joined(machine)),
        ("Evaluation data", Markup("<br>".join(hashes))),
        ("Versions", _joined(_part(result, "versions"))),
        ("Scheme", describe_scheme(quantization)),
        ("Seed", quantization.get("seed")),
        ("Calibration", _joined({k: v for k, v in calibration.items() if k != "sha256"})),
        (
            "Calibration sha256",
            page.code(calibration["sha256"]) if calibration.get("sha256") else None,
        ),
        ("Quantized in", None if quantized_in is None else page.duration(quantized_in)),
        ("Quantized with", _joined(_part(quantization, "versions"))),
    ]
    return page.section("Provenance", page.facts(pairs))


def _joined(part: Result) -> str:
    return ", ".join(f"{key} {value}" for key, value in part.items() if value is not None)


def _part(whole: Result, key: str) -> Result:
    """A dict inside a dict; empty where it is missing, None or something else."""
    part = whole.get(key)
    return part if isinstance(part, Mapping) else {}


def _tasks(result: Result) -> list[Result]:
    tasks = result.get("tasks")
    return [task for task in tasks if isinstance(task, Mapping)] if isinstance(tasks, list) else []


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        half.write_text(text, encoding="utf8")
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)
