"""Results as JSON or as tables and lines; errors.

Results go to stdout, progress and errors to stderr. rich respects NO_COLOR.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Without emoji: rich would replace a :-1: in a generated text or a message.
out = Console(soft_wrap=True, highlight=False, emoji=False)
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)

Result = dict[str, Any]


def _warn(messages: list[str]) -> None:
    for message in messages:
        out.print(f"[bold yellow]warning:[/] [yellow]{escape(message)}[/]")


def present(result: Result, as_json: bool, render: Callable[[Result], None]) -> None:
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False, default=str))
    else:
        render(result)


def note(message: str) -> None:
    """One line on stderr, which is no part of the result."""
    err.print(message, markup=False)


def error(message: str) -> None:
    err.print(f"[bold red]error:[/] {escape(message)}")


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


@contextmanager
def status(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """On a terminal one line that is overwritten, elsewhere a line for each message."""
    if quiet:
        yield lambda message: None
    elif err.is_terminal:
        with err.status("") as spinner:
            yield lambda message: spinner.update(escape(message))
    else:
        yield lambda message: err.print(escape(message))


def table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    made = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for i, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        made.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        made.add_row(*[escape(str(cell)) for cell in row])
    out.print(made)


def lines(pairs: list[tuple[str, Any]]) -> None:
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        out.print(f"[bold]{name:<{width}}[/]  {escape(str(value))}")


def quantized(result: Result) -> None:
    layers, noted = result["layers"], [layer for layer in result["layers"] if layer["note"]]
    before, after = result["bytes_before"], result["bytes_after"]
    weights = sum(layer["n"] * layer["k"] for layer in layers)
    bits = sum(layer["n"] * layer["k"] * layer["bits_per_weight"] for layer in layers) / weights
    lines(
        [
            ("written", result["output"]),
            ("scheme", f"{_scheme(result['scheme'])}, {result['method']}, {len(layers)} linears"),
            ("size", f"{size(before)} -> {size(after)} ({before / after:.2f}x smaller)"),
            ("true bits", f"{bits:.3f} per quantized weight, scales and zeros included"),
            *[("head", _head(told)) for told in [result.get("head")] if told],
            *[("training", told) for told in [_training(result)] if told],
            ("check", checked(result.get("check"))),
            ("time", duration(result["seconds"])),
        ]
    )
    _copied(result.get("tensors"))
    _warn(result["warnings"])
    for place, why in _training_notes(result["training"]) if result["training"] else ():
        out.print(f"[yellow]{place}: {escape(why)}[/]")
    for layer in noted:
        out.print(f"[yellow]{escape(layer['name'])}: {escape(layer['note'])}[/]")
    problem = (result.get("check") or {}).get("problem")
    if problem:
        out.print(f"[bold red]BROKEN: {escape(problem)}[/]")
        return
    out.print(f"next: billfish generate {escape(result['output'])} --prompt 'Hello' --chat")


def _head(told: Result) -> str:
    """What a packed head costs and saves."""
    added = told["bytes_added"]
    where = (
        f"{size(added)} more, stored beside the 16-bit embedding that it was tied to"
        if told["tied"]
        else f"{size(-added)} less"
    )
    saved = f"a decode step reads {size(told['bytes_saved_per_step'])} less"
    return f"{_scheme(told['scheme'])}, {told['bits_per_weight']:.3f} true bits: {where}; {saved}"


def checked(check: Result | None) -> str:
    """What the sentinel found, in a line."""
    if check is None:
        return "not run"
    worst = max((block["own_error"] or float("inf") for block in check["blocks"]), default=0.0)
    errors = f"largest error of a block {worst:.3g}"
    if check["greedy_tokens"] is None:
        return f"{errors}; no head, no logits"
    kl = "not finite" if check["kl"] is None else f"{check['kl']:.3g}"
    same = f"{check['greedy_same']} of {check['greedy_tokens']} greedy tokens as the original"
    return f"KL {kl} nats (equally likely tokens: {check['kl_uniform']:.3g}), {same}, {errors}"


def _copied(tensors: Result | None) -> None:
    if tensors and tensors["copied"]:
        out.print(
            f"[dim]{tensors['copied']} tensors are no part of the model: copied as they are[/]"
        )


def _training(result: Result) -> str:
    """What training gained, in a line; nothing, if there was none."""
    from billfish.evaluate.training import block_gains, kept, median_change, whole_gain

    gains, whole, said = block_gains(result), whole_gain(result), []
    if gains:
        change = median_change(gains)
        median = "" if change is None else f", held-out error {100 * change:+.1f} % (median)"
        said.append(f"{kept(gains)} of {len(gains)} blocks improved{median}")
    if whole:
        told = gained(whole["before"], whole["after"], whole["kept"])
        said.append(f"whole model KL {told}")
    return "; ".join(said)


def _training_notes(training: Result) -> Iterator[tuple[str, str]]:
    """Where training was dropped for a reason of its own, and the reason."""
    blocks = training["blocks"]
    parts = [(f"block {i}/{len(blocks)}", gain) for i, gain in enumerate(blocks, 1)]
    for place, gain in [*parts, ("end to end", training["whole_model"])]:
        if gain and gain["note"]:
            yield place, gain["note"]


def gained(before: float | None, after: float | None, kept: bool) -> str:
    """Errors before and after training; None: not finite."""
    start = "not finite" if before is None else f"{before:.3g}"
    if after is None:
        return f"{start}, training not kept"
    change = f" ({100 * (after / before - 1):+.1f} %)" if before else ""
    return f"{start} -> {after:.3g}{change}{'' if kept else ', not kept'}"


def stream(piece: str) -> None:
    out.print(piece, end="", markup=False)
    out.file.flush()


def generated(result: Result) -> None:
    speed = result["tokens_per_second"]
    rate = f"{speed:.1f} tokens/s" if speed else "one token"
    out.print()
    err.print(
        f"[dim]{result['tokens']} tokens, {rate}; prompt of {result['prompt_tokens']} tokens in "
        f"{result['prompt_seconds']:.2f} s[/]"
    )


def conversion(result: Result) -> None:
    lines(
        [
            ("converted", f"{result['layers']} linears, {result['from']} -> {result['to']}"),
            ("size", f"{size(result['bytes_read'])} -> {size(result['bytes_written'])}"),
        ]
    )
    for note in result["notes"]:
        out.print(f"[yellow]{escape(note)}[/]")


def findings(result: Result) -> None:
    colours = {"ok": "green", "note": "yellow", "problem": "bold red"}
    for found in result["findings"]:
        colour = colours[found["status"]]
        out.print(
            f"[{colour}]{found['status']:<8}[/] [bold]{escape(found['name'])}[/]  "
            + escape(found["detail"])
        )
        if found["fix"] and found["status"] != "ok":
            out.print(f"         -> {escape(found['fix'])}")


def evaluation(result: Result) -> None:
    rows = []
    for task in result["tasks"]:
        row = [task["title"], task["metric"], _estimate(task["model"]), _estimate(task["baseline"])]
        row += [_estimate(task["recovery"], 100, " %"), _estimate(task["kl"])]
        rows.append(row)
    table("scores", ["task", "metric", "model", "original", "recovery", "KL (nats)"], rows)
    before = result["baseline"]["bytes"] if result["baseline"] else None
    sizes = size(result["model"]["bytes"]) + (f" (original {size(before)})" if before else "")
    lines([("size", sizes), ("time", duration(result["seconds"]))])


def _estimate(part: Result | None, factor: float = 1, unit: str = "") -> str:
    if part is None or part["value"] is None:
        return "-"
    value = part["value"] * factor
    digits = 4 if abs(value) < 1 else 2
    spread = part.get("stderr")
    tail = "" if spread is None else f" ± {spread * factor:.{digits}f}"
    return f"{value:.{digits}f}{tail}{unit}"


def plan(result: Result) -> None:
    rows = []
    for group in _alike(result["layers"]):
        layer, bits = group[0], group[0]["bits_per_weight"]
        rows.append(
            [
                layer["module"].rpartition(".")[2],
                len(group),
                f"{layer['n']} x {layer['k']}",
                "16 bits" if layer["skip"] else layer["scheme"],
                "" if layer["skip"] else f"{bits:.3f}",
                size(sum(each["bytes_before"] for each in group)),
                size(sum(each["bytes_after"] for each in group)),
                " ".join(map(str, layer["tp"])),
            ]
        )
    columns = ["linear", "count", "n x k", "becomes", "bits", "before", "after", "shards at"]
    table(f"plan for {result['model']}", columns, rows)
    totals, guess, tp = result["totals"], result["estimates"], result["tp"]
    before, after = totals["bytes_before"], totals["bytes_after"]
    steps = result["training"]
    trained = f"{steps['steps']} steps a block, {steps['end_to_end']} end to end" if steps else ""
    lines(
        [
            ("scheme", f"{_scheme(result['scheme'])}, {result['method']}"),
            *([("training", trained)] if trained else []),
            ("size", f"{size(before)} -> {size(after)} ({before / after:.2f}x smaller)"),
            (
                "true bits",
                f"{totals['bits_per_weight']:.3f} per quantized weight, "
                f"{totals['model_bits_per_weight']:.3f} over the whole model",
            ),
            *[("head", _head(told)) for told in [result["head"]] if told],
            ("types", f"calibrates in {result['dtype']}, stores {result['stored_dtype']}"),
            ("tensor parallel", ", ".join(map(str, tp["possible"]))),
            ("peak memory", f"about {size(guess['memory_bytes'])} (estimate)"),
            ("disk", f"about {size(guess['disk_bytes'])} (estimate)"),
            ("time", f"about {duration(guess['seconds'])} on this machine as it is now (estimate)"),
        ]
    )
    for reason, kinds in _reasons(result["layers"]).items():
        out.print(f"[dim]in 16 bits: {escape(', '.join(kinds))}: {escape(reason)}[/]")
    copied = result["copied"]
    if copied:
        total, names = (
            size(sum(each["bytes"] for each in copied)),
            [each["name"] for each in copied],
        )
        out.print(f"[dim]copied as they are, no part of the model ({total}):[/]")
        out.print(f"[dim]  {escape(chr(10).join(names).replace(chr(10), chr(10) + '  '))}[/]")
    for count, reason in tp["impossible"].items():
        out.print(f"[dim]not at tensor parallel {count}: {escape(reason)}[/]")
    _warn(result["warnings"])


def _reasons(layers: list[Result]) -> dict[str, list[str]]:
    """Reason for staying in 16 bits -> the kinds of linears it holds for."""
    found: dict[str, dict[str, None]] = {}
    for layer in layers:
        if layer["skip"]:
            found.setdefault(layer["skip"], {})[layer["module"].rpartition(".")[2]] = None
    return {reason: list(kinds) for reason, kinds in found.items()}


def _alike(layers: list[Result]) -> list[list[Result]]:
    """Layers grouped by kind, shape and treatment: a model has hundreds of a few kinds."""
    found: dict[Any, list[Result]] = {}
    for layer in layers:
        kind = layer["module"].rpartition(".")[2]
        key = (kind, layer["n"], layer["k"], layer["skip"], str(layer["tp"]))
        found.setdefault(key, []).append(layer)
    return list(found.values())


def _scheme(written: Result | None) -> str:
    """A scheme's name and parameters, as results hold them, in words: "w4a16 4 bit g64 sym"."""
    if written is None:
        return ""
    from billfish.schemes.registry import from_fields

    scheme = from_fields({key: value for key, value in written.items() if key != "count"})
    return f"{scheme.name} {scheme.describe()}"


def inspection(result: Result) -> None:
    bits, kinds = result["bits_per_weight"], result["kinds"]
    facts = [
        ("path", result["path"]),
        ("architecture", result["architecture"]),
        ("format", result["dialect"]),
        ("linears", f"{result['packed_linears']} packed, {result['dense_tensors']} dense tensors"),
    ]
    if bits["packed"]:
        whole = f", {bits['model']:.3f} over the whole model" if bits["model"] else ""
        facts.append(("true bits", f"{bits['packed']:.4f} per packed weight{whole}"))
    facts.append(("size", f"{size(result['bytes']['total'])} in {len(result['files'])} files"))
    if result["source"]:
        source, hows = result["source"], ("quantized", "kept", "decoded", "copied")
        told = ", ".join(f"{source[how]} {how}" for how in hows if source[how])
        facts.append(("source", f"{source['tensors']} tensors: {told}"))
    if result["unsupported"]:
        facts.append(("cannot run", result["unsupported"]))
    lines(facts)
    rows = [
        [
            kind["kind"],
            kind["count"],
            " x ".join(map(str, kind["shape"])),
            _scheme(kind["scheme"]) or str(kind["dtype"]),
            f"{kind['bits_per_weight']:.3f}" if kind["bits_per_weight"] else "",
            size(kind["bytes"]),
        ]
        for kind in kinds
    ]
    table("", ["tensors", "count", "shape", "stored as", "bits", "size"], rows)
    for problem in result["problems"]:
        out.print(f"[bold red]{escape(problem)}[/]")


def verification(result: Result) -> None:
    checked = result["checked"]
    for found in result["problems"]:
        where = ": ".join(part for part in (found["file"], found["tensor"]) if part)
        out.print(f"[bold red]bad[/]  {escape(where)}: {escape(found['problem'])}")
    traced = checked["source_tensors"]
    verdict = "[green]ok[/]" if result["ok"] else f"[bold red]{len(result['problems'])} problems[/]"
    out.print(
        f"{verdict}  {checked['files']} files, {checked['hashes']} hashes, "
        f"{checked['tensors']} tensors, {checked['packed_linears']} packed linears checked"
        + (f"; {traced} entries of the source's tensors" if traced else "")
    )
