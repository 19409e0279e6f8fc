"""Figures of kernels of w4a16, w2416, w4ax and of experts, as test_readme.py."""

import math
import statistics

from test_readme import best, load, row, says, table

from billfish.bench.generate import READS


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
    told = load("h200-parts-8b.json")
    layer = ("4096x6144", "4096x4096", "4096x28672", "14336x4096")
    step, sums, computed = [], [], []
    for point in told["steps"][:2]:
        step.append(f"{point['products_us_a_layer']:.1f}")
        sums.append(f"{sum(point['alone_us'].values()):.1f}")
        m = str(point["sequences"])
        alone = sum(told["weights"][shape]["without"][m] for shape in layer)
        computed.append(f"{alone:.1f}")
    says(
        f"the four take {step[0]} and {step[1]} us a layer with 1 and 16 tokens, alone {sums[0]} "
        f"and {sums[1]}; without copies of weights {computed[0]} and {computed[1]} alone"
    )


def test_a_minute_of_load():
    told = load("h200-w4a16-sustain.json")
    for point in told["points"]:
        first, last = point["samples"][0]["us"], point["samples"][-1]["us"]
        says(f"m = {point['m']} {first:.1f} us in the first second and {last:.1f} in the last")
    assert {len(point["samples"]) for point in told["points"]} == {50}
