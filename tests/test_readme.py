"""The figures of README and docs/FIGURES.md are those of docs/bench: their tables, and the measured
numbers in their sentences, are made again from the JSON there and must be in the text."""

import json
import re
from pathlib import Path
from statistics import mean

import pytest
import torch
import typer

from billfish.bench.generate import READS
from billfish.cli.app import app
from billfish.schemes.base import bits_per_weight
from billfish.schemes.registry import with_options

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "docs" / "bench"
README = "\n".join((ROOT / name).read_text() for name in ("README.md", "docs/FIGURES.md"))
WORDS = " ".join(README.split())  # sentences without their line breaks


def load(name):
    return json.loads((BENCH / name).read_text())


def row(*cells):
    return "| " + " | ".join(cells) + " |"


def table(rows):
    """One table has these rows and no others."""
    told = "\n".join(rows)
    before, found, after = README.partition(told)
    whole = before.splitlines()[-1].startswith("|---") and after.startswith("\n\n")
    assert found and whole, f"a table should be:\n{told}"


def says(*parts):
    for part in parts:
        assert part in WORDS, f"README or FIGURES should say: {part}"


def best(value, mine):
    """In bold what is faster than ours."""
    return f"**{value:.1f}**" if value < mine else f"{value:.1f}"


# --- files ---------------------------------------------------------------------------------------


def test_every_file_that_is_named_exists_and_every_result_is_named():
    named = set(re.findall(r"docs/[\w./-]+\.\w+", README))
    assert named and all((ROOT / name).is_file() for name in named)
    results = {f"docs/bench/{path.name}" for path in BENCH.glob("*.json")}
    assert results <= named, f"no word of {results - named}"


def test_every_command_exists_with_its_options():
    top = typer.main.get_command(app)
    lines = README.replace("\\\n", " ").splitlines()
    commands = [line.partition("  #")[0].split() for line in lines if line.startswith("billfish ")]
    assert len(commands) > 10
    for _, *words in commands:
        command = top
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        known = {
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in words if word.startswith("--")} <= known, words


def test_one_roof():
    assert READS == {"NVIDIA H200": 4.54e12}
    for name in ("h200-generate-8b.json", "h200-generate-70b.json"):
        assert load(name)["settings"]["bandwidth"] == READS["NVIDIA H200"]
    says("the 4.54 TB/s that plain 16-byte reads reach")


# --- accuracy ------------------------------------------------------------------------------------

SMOLLM2 = {
    "w8 sym": ("GPTQ, 8 bit symmetric", 8, True),
    "w4 asym": ("GPTQ, 4 bit asymmetric", 4, False),
    "w4 sym": ("GPTQ, 4 bit symmetric", 4, True),
    "awq w4 asym": ("AWQ, 4 bit asymmetric", 4, False),
    "w3 asym": ("GPTQ, 3 bit asymmetric", 3, False),
}


def test_smollm2():
    told = load("smollm2-accuracy.json")
    found = {each["label"]: each for each in reversed(told["results"])}  # seed 0 of each
    assert all(each["seed"] == 0 for each in found.values()) and found.keys() == SMOLLM2.keys()
    rows = [row("original, fp32 (was Q4_1)", "32", f"{told['original']['test']:.2f}")]
    for label, (name, bits, symmetric) in SMOLLM2.items():
        scheme = with_options("w4a16", bits=bits, group_size=64, symmetric=symmetric)
        true = bits_per_weight(scheme, 1536, 576, torch.bfloat16)
        rows.append(row(name, f"{true:.2f}", f"{found[label]['eval_test']:.2f}"))
    table(rows)
    seeds = [f"{each['test']:.2f}" for each in told["results"] if each["label"] == "w4 sym"]
    says(f"gave {seeds[0]}, {seeds[1]} and {seeds[2]}", "Q4_1")


def test_finetuning():
    told, rows = load("smollm2-finetune.json"), []
    names = {"gptq": "GPTQ", "finetune": "finetune", "wiki": "WikiText-2", "c4": "C4"}
    for each in told["results"]:
        scheme = with_options(
            "w4a16", bits=each["bits"], group_size=64, symmetric=each["symmetric"]
        )
        kind = "symmetric" if each["symmetric"] else "asymmetric"
        method = f"{names[each['method']]}, {each['bits']} bit {kind}"
        true = bits_per_weight(scheme, 1536, 576, torch.bfloat16)
        scores = [f"{each[text]:.2f}" for text in ("valid", "test", "c4")]
        rows.append(row(method, names[each["data"]], f"{true:.2f}", *scores))
    table(rows)
    four, three = (told["eval"][f"finetune {name}"]["test"] for name in ("w4 sym", "w3 asym"))
    says(f"reached {four:.2f} on test with 4 bits and {three:.2f} with 3")
    means = [
        f"{mean(told['zero_shot'][f'{method} {name}']) * 100:.1f} %"
        for name in ("w4 sym", "w3 asym")
        for method in ("gptq", "finetune")
    ]
    says("with 4 bits GPTQ has {} and finetuning {}, with 3 bits {} and {}".format(*means))


def test_bits():
    told = load("smollm2-bits.json")
    methods, original = {"gptq": "GPTQ", "finetune": "finetune"}, told["original"]["test"]
    table(
        row(
            each["label"],
            f"{each['true_bits']:.2f}",
            methods[each["method"]],
            f"{each['test']:.2f}",
            f"{100 * (each['test'] / original - 1):+.0f} %",
        )
        for each in told["results"]
    )


def test_rounded_activations():
    told, names = load("smollm2-w4ax.json"), {"gptq": "GPTQ", "finetune": "finetune"}
    rows = []
    for each in told["results"]:
        kind = "symmetric" if each["symmetric"] else "asymmetric"
        tasks = each.get("zero_shot", {}).values()
        rows.append(
            row(
                f"{each['scheme']} {kind}",
                each["activations"],
                names[each["method"]],
                *(f"{each[name]:.2f}" for name in ("true_bits", "valid", "test")),
                f"{100 * mean(tasks):.1f} %" if tasks else "-",
            )
        )
    table(rows)
    found = {
        (each["symmetric"], each["kv"]): each["perplexity"]
        for each in told["kv_results"]
        if each["text"] == "test"
    }
    for symmetric, name in ((False, "asymmetric one goes"), (True, "symmetric one")):
        before, after = found[symmetric, "kv16"], found[symmetric, "kv4"]
        where = " on test" if not symmetric else ""
        more = f"({100 * (after / before - 1):+.1f} %)"
        says(f"{name} from {before:.2f} to {after:.2f}{where} {more}")
    says(f"with `kv8` to {found[False, 'kv8']:.2f} and {found[True, 'kv8']:.2f}")


def test_stories15m():
    told = load("stories15m.json")
    methods = {"gptq": "GPTQ", "awq": "AWQ", "rtn": "rounding to nearest", "finetune": "finetune"}
    rows = [row("original, fp32", "32", f"{told['original']['perplexity']:.3f}", "0")]
    for each in told["results"]:
        kind = "symmetric" if each["symmetric"] else "asymmetric"
        rows.append(
            row(
                f"{methods[each['method']]}, {each['bits']} bit {kind}",
                f"{each['true_bits']:.2f}",
                f"{each['perplexity']['value']:.3f}",
                f"{each['kl']['value']:.4f}",
            )
        )
    table(rows)


def test_cache():
    told = load("smollm2-kv.json")
    full = told["results"][0]["perplexity"]
    names = [
        "`kv16`",
        "`kv8`",
        "`kv4`, calibrated at load",
        "`kv4`, calibrated by `quantize --kv kv4`",
        "`kv4-channel`, calibrated by `quantize --kv kv4`",
    ]
    rows = [
        row(name, f"{each['perplexity']:.2f}", f"{each['perplexity'] / full - 1:+.1%}")
        for name, each in zip(names, told["results"], strict=True)
    ]
    table(line.replace("%", " %").replace("+0.0 %", "0") for line in rows)


def test_jobs():
    told = load("smollm2-accuracy.json")["blocks"]
    names = {
        "smollm2": "SmolLM2-135M, whole",
        "llama3-8b": "a block of Llama-3-8B's shapes",
        "llama3-70b": "a block of Llama-3-70B's shapes",
    }
    table(
        row(name, f"{told[key]['seconds']:.1f}", f"{told[key]['plan']:.1f}")
        for key, name in names.items()
    )
    minutes = [told[f"llama3-{size}b"]["seconds"] * n / 60 for size, n in ((8, 32), (70, 80))]
    says(f"{minutes[0]:.0f} and {minutes[1]:.0f} minutes")


# --- engine and server ---------------------------------------------------------------------------


def test_generation():
    rows = []
    for name in ("8b", "70b"):
        for variant in load(f"h200-generate-{name}.json")["variants"]:
            weights, kv = variant["variant"].split("+")
            cells = []
            for point in variant["points"]:
                faster = f", {point['decode_tokens_per_s_ratio']:.2f}x"
                share = f"{100 * point['roofline']:.0f} %"
                more = faster if name == "8b" and weights != "fp16" else ""
                cells.append(f"{point['decode_tokens_per_s']:.0f} ({share}){more}")
            rows.append(row(name.upper(), weights, kv, *cells))
    table(rows)
    (variant,) = load("h200-generate-8b-head8.json")["variants"]
    one, some, many = (f"{point['decode_tokens_per_s']:.0f}" for point in variant["points"])
    says(f"w4a16 + kv16 decodes {one}, {some} and {many} tokens per second")
    steps = load("h200-generate-8b-one-cta.json")["steps"]
    ms = {(each["scheme"], each["when"]): f"{each['ms']['64']:.2f}" for each in steps}
    others = ("w4a16_24", "w4ax", "w2416")
    both = [f"{ms[name, 'before']} and {ms[name, 'now']} in {name}" for name in others]
    says(f"{ms['w4a16', 'before']} ms without that and take {ms['w4a16', 'now']} in w4a16", *both)


def test_steps_with_prompts():
    told = load("h200-mixed-8b.json")["steps"]
    steps = [each for each in told if each["chunks_of_a_graph"] == 16]
    order = ("300", "200", "1000", "4 x 128", "2 x 400", "12 x 60")
    of = {each["prompts"]: each for each in steps}
    table(row(one, f"{of[one]['host_ms']:.2f}", f"{of[one]['gpu_ms']:.2f}") for one in order)
    says(f"takes the host up to {max(each['host_ms_one_of_ten'] for each in steps):.1f}.")
    *others, most = sorted(e["host_ms"] for e in told if e["chunks_of_a_graph"] == 8)
    says(f"took the host {others[0]:.2f} to {others[-1]:.2f}, and {most:.2f} with 12")
    dense, packed = (
        1000 * variant["points"][0]["prefill_seconds"]
        for variant in load("h200-prefill-8b-w4a16.json")["variants"]
    )
    says(f"takes {packed:.0f} ms, in fp16 {dense:.0f}")


def test_long_prompts():
    told = load("h200-generate-8b-long.json")
    results, later = told["results"], [e["tokens_per_s"] for e in told["later"]["results"]]
    rows, faster = [], {}
    for each in results:
        faster[each["variant"]] = each["tokens_per_s"] / results[0]["tokens_per_s"]
        times = f"{each['prefill_seconds']:.1f} s", f"{each['step_ms']:.1f} ms"
        ratio = f"{faster[each['variant']]:.2f}x"
        kind = each["variant"].split("+")
        rows.append(row(*kind, str(each["batch"]), *times, str(each["tokens_per_s"]), ratio))
    table(rows)
    assert f"{faster['w4ax+kv16']:.2f}" == f"{faster['fp16+kv4']:.2f}"
    says(
        f"bring {faster['w4ax+kv16']:.2f}x each, both together {faster['w4ax+kv4']:.2f}x; in a "
        f"later run {later[1]} tokens per second for fp16's {later[0]}, "
        f"{later[1] / later[0]:.2f}x, and {later[2]} with a batch of"
    )
    dense, packed = (each["tokens_per_s"] for each in told["earlier"]["results"])
    says(f"in an earlier run: {packed} for {dense}, **{packed / dense:.2f}x**")


def test_server():
    rows = []
    for server in load("h200-serve-8b.json")["servers"]:
        alone, points = server["alone"], server["points"]
        assert not any(point["failed"] for point in points)
        rows.append(
            row(
                *server["variant"].split("+"),
                f"{alone['engine_tokens_per_s']:.0f}",
                f"{alone['http_tokens_per_s']:.0f}",
                *(f"{point['tpot_ms']['p50']:.2f}" for point in points),
            )
        )
    table(rows)


# --- CPU -----------------------------------------------------------------------------------------


def listed(values, form="{:.1f}"):
    return ", ".join(form.format(value) for value in values) or "-"


def cpu_rows(told, name, runs, dense, packed):
    """`runs` of bench.generation; `dense` and `packed` name the engine's."""

    def engine(kind):
        found = [run for run in told["engine"]["runs"] if kind in run.values()]
        return [
            listed(run["tokens_per_second"] for run in found if run["batch"] == batch)
            for batch in (1, 8)
        ]

    def decoded(model):
        return listed(run["decode_tokens_per_second"][model] for run in runs)

    prefill = listed((run["prefill_ratio"] for run in runs), "{:.2f}x")
    yield row(name, "dense", "1", decoded("original"), *engine(dense))
    yield row("", "w4a16", prefill, decoded("packed"), *engine(packed))


def test_cpu():
    amx, vnni = load("cpu-amx.json"), load("cpu-avx512.json")
    now = [run for run in amx["generation"]["runs"] if run["code"] == "now"]
    one, fp32 = vnni["generation"], "dense, stored and computed in fp32"
    table(
        [
            *cpu_rows(amx, "AMX, bf16", now, "now, dense bf16", "now"),
            *cpu_rows(vnni, "AVX512 with VNNI, fp32", [one], fp32, "w4a16"),
        ]
    )
    points = amx["products"]["points"]
    lost = [point for point in points if point["us"] > point["us_dense_bf16"]]
    worst = max(point["us"] / point["us_dense_bf16"] for point in lost)
    says(
        f"at {len(lost)} of {len(points)} sizes",
        f"from {min(point['m'] for point in lost)} rows on",
        f"by up to {100 * worst - 100:.0f} %",
        f"{one['weights_over_bf16']:.2f} of the memory",
    )


@pytest.mark.parametrize("path", sorted(BENCH.glob("*.json")), ids=lambda path: path.name)
def test_every_result_says_when_and_how(path):
    text = path.read_text()
    assert '"date"' in text
    assert any(f'"{key}"' in text for key in ("command", "quantize", "measured"))
