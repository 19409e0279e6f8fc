"""The figures of README and docs/FIGURES.md are those of docs/bench: their tables, and the measured
numbers in their sentences, are made again from the JSON there and must be in the text."""

import json
import math
import re
import statistics
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


# --- kernels -------------------------------------------------------------------------------------


def test_w2416_products():
    told = load("h200-w2416.json")
    layers = {}
    for each in told["times"]:
        layers.setdefault((each["k"], each["n"]), {})[each["m"]] = each
    order = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (8192, 57344)]
    assert set(order) == set(layers)
    rows = []
    for k, n in order:
        points = [layers[k, n].get(m) for m in (1, 8, 16, 32, 64, 128, 256, 1024)]
        mine = [f"{point['w2416']:.1f}" if point else "-" for point in points]
        other = [best(point["w4a16"], point["w2416"]) if point else "-" for point in points]
        rows += [row(f"{k} x {n}", "w2416", *mine), row("", "w4a16", *other)]
    table(rows)
    one = told["chains"][0]
    assert one["m"] == 1
    says(f"take {one['w2416']:.1f} us at m = 1, with w4a16 {one['w4a16']:.1f}")


def test_w2416_decodes():
    rows = []
    for variant in load("h200-generate-8b-w2416.json")["variants"]:
        cells = []
        for point in variant["points"]:
            energy = point["energy"]
            cells += [f"{point['decode_tokens_per_s']:.0f}", f"{energy['joules_per_token']:.2f}"]
            cells.append(f"{energy['cost_per_million_tokens']:.3f}")
        rows.append(row(variant["weights"], f"{variant['weight_bytes'] / 1e9:.1f}", *cells))
    table(rows)
    large = load("h200-generate-70b-w2416.json")
    (variant,) = large["variants"]
    assert large["settings"]["memory"] == 32e9
    alone, many = (f"{point['decode_tokens_per_s']:.0f}" for point in variant["points"])
    says(
        f"{variant['weight_bytes'] / 1e9:.1f} GB of weights, {alone} tokens/s alone and {many} in a"
    )


def test_w4ax_products():
    told = load("h200-w4ax.json")
    found = {(each["k"], each["n"], each["m"]): each for each in told["times"]}
    rows = []
    for k, n in ((4096, 4096), (4096, 28672), (8192, 57344)):
        points = [found[k, n, m] for m in (1, 16, 64, 256, 1024)]
        rows.append(row(f"{k} x {n}", "w4ax", *(f"{each['us']:.1f}" for each in points)))
        rows.append(row("", "w4a16", *(best(each["w4a16_us"], each["us"]) for each in points)))
    table(rows)
    known = {
        (each["k"], each["n"], each["m"]): each["us"]["pdl"]["median"]
        for each in load("h200-w4a16.json")["points"]
    }
    beside = {place: each["w4a16_us"] for place, each in found.items() if "w4a16_us" in each}
    assert len(beside) >= 15 and all(us == round(known[at], 1) for at, us in beside.items())
    says(f"4096 tokens of 8192 x 57344 take {found[8192, 57344, 4096]['us']:.1f} us")
    kinds = {(each["k"], each["n"], each["m"], each["kind"]): each["us"] for each in told["kinds"]}
    more = [us - kinds[*place, "a8"] for (*place, kind), us in kinds.items() if kind == "fmpq"]
    zeros = [us - kinds[*place, "a8"] for (*place, kind), us in kinds.items() if kind == "asym"]
    says(f"zero (`--asym`) costs up to {max(zeros):.1f} us")
    says(f"up to {math.ceil(max(more))} us for ordering and rotating x")


def test_experts():
    told, names = load("h200-experts.json"), ("Qwen3-30B-A3B", "Mixtral 8x7B")
    assert told["complete"] and told["date"].startswith("2026-11-18")
    found = {(each["name"], each["m"]): each for each in told["points"]}
    rows = []
    for name, known in zip(names, ("qwen3-30b-a3b", "mixtral-8x7b"), strict=True):
        points = [found[known, m] for m in (1, 16, 64, 256)]
        times = {
            "w4a16": [each["us"]["pdl"]["median"] for each in points],
            "PyTorch, bf16": [each["grouped_us"] for each in points],
            "floor": [each["floor_us"] for each in points],
        }
        for place, (label, us) in enumerate(times.items()):
            rows.append(row("" if place else name, label, *(f"{each:.1f}" for each in us)))
    table(rows)
    says(
        f"One token of Qwen3's layer reaches {found['qwen3-30b-a3b', 1]['roofline']:.0%}".replace(
            "%", " %"
        ),
        f"256 tokens of Mixtral's are {found['mixtral-8x7b', 256]['speedup']:.2f} times as fast",
        "`billfish bench experts`",
    )
    (variant,) = load("h200-generate-30b-experts.json")["variants"]
    one, some, many = (f"{point['decode_tokens_per_s']:.0f}" for point in variant["points"])
    says(
        f"The engine decodes {one}, {some} and {many} tokens per second with 1, 16 and 64 sequences"
    )
    points, rows = load("h200-humming-experts.json")["points"], []
    for name, known in zip(names, ("qwen3-30b-a3b", "mixtral-8x7b"), strict=True):
        mine = [each for each in points if each["name"] == known]
        rows.append(row(name, "Billfish", *(f"{each['ours_us']:.1f}" for each in mine)))
        ways = [{**each["humming_us"], "gemms": math.inf} for each in mine]  # those are no layer
        theirs = [
            best(min(way.values()), at["ours_us"]) for way, at in zip(ways, mine, strict=True)
        ]
        rows.append(row("", "Humming", *theirs))
    table(rows)


def test_w4ax_decodes():
    rows = []
    prompts = load("h200-prefill-8b-w4ax.json")["variants"]
    for variant, prompt in zip(
        load("h200-generate-8b-w4ax.json")["variants"], prompts, strict=True
    ):
        assert variant["variant"] == prompt["variant"]
        speed = [f"{point['decode_tokens_per_s']:.0f}" for point in variant["points"]]
        (point,) = prompt["points"]
        rows.append(row(variant["weights"], *speed, f"{1000 * point['prefill_seconds']:.0f} ms"))
    table(rows)


def test_products():
    result, peers = load("h200-w4a16.json"), load("peers.json")
    fastest = {(each["k"], each["n"], each["m"]): each for each in peers["times"]}
    layers, wins, ahead, clocks = {}, 0, 0, []
    for point in result["points"]:
        place = (point["k"], point["n"], point["m"])
        us, cublas = point["us"]["pdl"]["median"], point["cublas_us"]["median"]
        layers.setdefault(place[:2], []).append((point, us, cublas, fastest[place]["us"]))
        wins, ahead = wins + (us < cublas), ahead + (us < fastest[place]["us"])
        clocks.append(cublas / fastest[place]["cublas_us"])
    rows = []
    for (k, n), points in layers.items():
        rows.append(row(f"{k} x {n}", "Billfish", *(f"{us:.1f}" for _, us, _, _ in points)))
        rows.append(row("", "cuBLAS fp16", *(best(c, us) for _, us, c, _ in points)))
        rows.append(row("", "public", *(best(other, us) for _, us, _, other in points)))
    table(rows)
    count = len(result["points"])
    single = [points[0] for points in layers.values()]  # m = 1
    faster = [cublas / us for _, us, cublas, _ in single]
    share = [100 * point["bytes"] / us * 1e6 / READS["NVIDIA H200"] for point, us, _, _ in single]
    slow = [(point["m"], us / cublas) for of in layers.values() for point, us, cublas, _ in of]
    slow = [(m, ratio) for m, ratio in slow if ratio >= 1]
    says(
        f"At the other {len(slow)}, all from {min(slow)[0]} tokens on",
        f"slower by up to {100 * max(ratio for _, ratio in slow) - 100:.0f} %",
        f"faster than cuBLAS with fp16 weights at {wins} of the {count} points",
        f"{min(faster):.1f} to {max(faster):.1f} times for one token",
        f"faster than the fastest public kernel at {ahead} of {count}",
        f"{min(clocks):.2f} to {max(clocks):.2f} times",
        f"{min(share):.0f} to {max(share):.0f} %",
    )


def times_as_fast(points, peer):
    return [point["us"][peer] / point["us"]["billfish"] for point in points]


def test_beside_humming():
    told = load("h200-humming-w4a16.json")
    assert told["complete"] and not told["errors"]
    points = {(each["k"], each["n"], each["m"]): each["us"] for each in told["points"]}
    rows = []
    for size in ((4096, 4096), (4096, 28672), (5120, 5120), (18944, 3584), (8192, 57344)):
        us = [points[*size, m] for m in (1, 16, 32, 64, 96, 128, 200, 256, 512, 1024)]
        ours = (f"{each['billfish']:.1f}" for each in us)
        rows.append(row("{} x {}".format(*size), "Billfish", *ours))
        for name, key in (("Humming", "humming"), ("cuBLAS fp16", "cublas")):
            rows.append(row("", name, *(best(each[key], each["billfish"]) for each in us)))
    table(rows)
    ratios = times_as_fast(told["points"], "humming")
    worst = points[27648, 5120, 1]
    assert worst["humming"] / worst["billfish"] == min(ratios)
    (behind,) = [each for each in ratios if each < 1]
    says(
        f"ahead of Humming at {sum(each > 1 for each in ratios)} of {len(ratios)} points, by up to "
        f"{100 * max(ratios) - 100:.0f} %, and behind at one, by {100 / behind - 100:.0f} %",
        f"clocks fell to {min(each['sm_mhz'] for each in told['points']):.0f} MHz",
    )


def test_narrow_layers_beside_humming():
    told, rows = load("h200-humming-narrow.json"), []
    points = {(each["k"], each["n"], each["m"]): each["us"] for each in told["points"]}
    for size in ((5120, 5120), (14336, 5120), (27648, 5120)):
        us = [points[*size, m] for m in (1, 8, 16)]
        ours = (f"{each['billfish']:.1f}" for each in us)
        rows.append(row("{} x {}".format(*size), "Billfish", *ours))
        rows.append(row("", "Humming", *(best(each["humming"], each["billfish"]) for each in us)))
    table(rows)


def test_kinds():
    table(
        row(
            f"{each['k']} x {each['n']}",
            str(each["m"]),
            f"{each['us']['fp16']:.1f}",
            *(
                f"{each['us'][kind] / each['us']['fp16']:.2f}x"
                for kind in ("bf16", "g64", "g32", "asym", "g32 asym")
            ),
        )
        for each in load("h200-kinds-w4a16.json")["points"]
    )


def test_never_behind():
    told = load("h200-cublas-w4a16.json")
    points, rows = told["points"], []
    assert told["complete"] and len({(each["k"], each["n"]) for each in points}) == 20
    for m in sorted({each["m"] for each in points}):
        found = sorted(times_as_fast([each for each in points if each["m"] == m], "cublas"))
        faster, slower = sum(each > 1 for each in found), sum(each < 1 / 1.03 for each in found)
        shares = (statistics.median(found), found[0], found[-1])
        rows.append(row(*map(str, (m, faster, slower)), *(f"{each:.2f}x" for each in shares)))
    table(rows)
    every = times_as_fast(points, "cublas")
    behind = [each["m"] for each in points if each["us"]["billfish"] > 1.03 * each["us"]["cublas"]]
    (used,) = [each["energy"] for each in points if "energy" in each]
    ours, theirs = ([f"{run['mj']:.0f}" for run in used[who]] for who in ("billfish", "cublas"))
    says(
        f"Ahead at {sum(each > 1 for each in every)} of {len(every)} points, slower by more than "
        f"3 % at {len(behind)}, all of them from {min(behind)} tokens on",
        f"take {' and '.join(ours)} mJ, with cuBLAS {' and '.join(theirs)} (5 seconds of each",
    )


def test_chains():
    names = {"llama3-8b": "8B", "llama3-70b": "70B"}
    rows = []
    found = {
        (*each["sets"], each["m"]): each
        for file in ("h200-w4a16.json", "h200-chains-w4a16.json")  # the later one last
        for each in load(file)["chains"]
    }
    for key, name in names.items():
        chains = [found[each] for each in sorted(found) if each[0] == key]
        whole = [each["us"]["pdl"]["median"] for each in chains]
        parts = [each["parts_us"]["pdl"] for each in chains]
        cublas = [each["cublas_parts_us"] for each in chains]
        rows.append(row(name, "one after the other", *(f"{us:.1f}" for us in whole)))
        rows.append(row("", "sum of the four", *map(best, parts, whole)))
        rows.append(row("", "sum of cuBLAS's four", *map(best, cublas, whole)))
    table(rows)


def test_a_minute_of_load():
    told = load("h200-w4a16-sustain.json")
    for point in told["points"]:
        first, last = point["samples"][0]["us"], point["samples"][-1]["us"]
        says(f"m = {point['m']} {first:.1f} us in the first second and {last:.1f} in the last")
    assert {len(point["samples"]) for point in told["points"]} == {50}


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
