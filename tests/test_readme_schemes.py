"""README's table of schemes; figures of w4a16_24, and of w4ax beside others, as test_readme.py."""

from test_readme import best, load, row, says, table


def test_which_scheme():
    bits, rounded, sparse = (load(f"smollm2-{name}.json") for name in ("bits", "w4ax", "w4a16_24"))
    chosen = {  # scheme -> its results, a row for each method
        "w4a16": [e for e in bits["results"] if e["label"].startswith("4 bit")],
        "w2416": [e for e in bits["results"] if e["label"] == "w2416, 2.91 bits"],
        "w4ax": [
            e
            for e in rounded["results"]
            if (e["scheme"], e["symmetric"], e["activations"]) == ("w4ax", False, "8 bit")
        ],
        "w4a16_24": [
            e for e in sparse["results"] if (e["weights"], e["mask"]) == ("w4a16_24", "sparsegpt")
        ],
    }
    prompts = [
        {each["weights"]: each["points"][0]["prefill_seconds"] for each in load(name)["variants"]}
        for name in (f"h200-prefill-8b-{each}.json" for each in ("w4ax", "w4a16_24", "w4a16"))
    ]
    rows = [row("16 bits", "16.1 GB", "16", f"{bits['original']['test']:.2f}", "-", *"1111")]
    for name, results in chosen.items():
        gptq, tuned = sorted(results, key=lambda each: each["method"] == "finetune")
        file = "h200-generate-8b.json" if name == "w4a16" else f"h200-generate-8b-{name}.json"
        told = {each["variant"]: each for each in load(file)["variants"]}
        assert f"{told['fp16+kv16']['weight_bytes'] / 1e9:.1f}" == "16.1"
        base, mine = (
            {point["batch"]: point["decode_tokens_per_s"] for point in told[key]["points"]}
            for key in ("fp16+kv16", f"{name}+kv16")
        )
        runs = [f"{each['fp16'] / each[name]:.2f}x" for each in prompts if name in each]
        rows.append(
            row(
                f"`{name}`",
                f"{told[f'{name}+kv16']['weight_bytes'] / 1e9:.1f} GB",
                *(f"{value:.2f}" for value in (gptq["true_bits"], gptq["test"], tuned["test"])),
                *(f"{mine[m] / base[m]:.2f}x" if m in mine else "-" for m in (1, 16, 64)),
                ", ".join(runs) or "-",
            )
        )
    table(rows)
    caches = {each["kv"]: each["perplexity"] for each in load("smollm2-kv.json")["results"][:3]}
    more = [
        f"{caches[name] / caches['kv16'] - 1:.1%}".replace("%", " %") for name in ("kv8", "kv4")
    ]
    says(f"with 16-bit weights that costs {more[0]} and {more[1]} of perplexity")


def test_sparse_accuracy():
    masks = {"sparsegpt": "chosen by GPTQ", "wanda": "Wanda", "magnitude": "magnitude"}
    methods = {"gptq": "GPTQ", "finetune": "finetune"}
    told = load("smollm2-w4a16_24.json")
    table(
        row(
            each["weights"],
            masks[each["mask"]],
            methods[each["method"]],
            "-" if each["true_bits"] is None else f"{each['true_bits']:.2f}",
            f"{each['valid']:.2f}",
            f"{each['test']:.2f}",
        )
        for each in told["results"]
    )
    found = [
        each["test"]
        for each in load("smollm2-bits.json")["results"]
        if each["method"] == "finetune" and each["label"] == "w2416, 3.3 bits"
    ]
    says(f"w2416 has {found[0]:.2f} finetuned", f"The original has {told['original']['test']:.2f}")


def test_sparse_products():
    told = load("h200-w4a16_24.json")
    dense = {(each["k"], each["n"], each["m"]): each["cublas_us"] for each in told["times"]}
    beside = {(each["k"], each["n"], each["m"]): each for each in told["beside"]}
    rows = []
    for size in ((4096, 4096), (4096, 28672), (8192, 57344)):
        points = {m: beside[*size, m] for m in (1, 16, 32, 64, 256, 1024)}
        ours = {m: each["us"] for m, each in points.items()}
        packed = (best(each["w4a16_us"], ours[m]) for m, each in points.items())
        rows.append(
            row("{} x {}".format(*size), "w4a16_24", *(f"{us:.1f}" for us in ours.values()))
        )
        rows.append(row("", "w4a16", *packed))
        rows.append(row("", "cuBLAS fp16", *(best(dense[*size, m], us) for m, us in ours.items())))
    table(rows)
    faster = [each["w4a16_us"] / each["us"] for each in told["beside"]]
    assert min(faster) > 1
    says(
        f"At none of {len(faster)} points was it slower than w4a16 ({min(faster):.2f} to "
        f"{max(faster):.2f} times as fast)"
    )


def test_sparse_decodes():
    rows, speeds, prompts = [], [], []
    for variant, prompt in zip(
        load("h200-generate-8b-w4a16_24.json")["variants"],
        load("h200-prefill-8b-w4a16_24.json")["variants"],
        strict=True,
    ):
        assert variant["variant"] == prompt["variant"]
        speeds.append([point["decode_tokens_per_s"] for point in variant["points"]])
        prompts.append(prompt["points"][0]["prefill_seconds"])
        told = (f"{speed:.0f}" for speed in speeds[-1])
        rows.append(row(variant["weights"], *told, f"{1000 * prompts[-1]:.0f} ms"))
    table(rows)
    *some, last = (f"{ours / fp16:.2f}" for ours, fp16 in zip(speeds[2], speeds[0], strict=True))
    says(f"{', '.join(some)} and {last} times fp16, and {prompts[0] / prompts[2]:.2f} times for")


def test_w4ax_beside_humming():
    points = {
        (each["k"], each["n"], each["m"]): each for each in load("h200-humming.json")["times"]
    }
    ours = {at: (each["w4ax"] + each["w4ax_again"]) / 2 for at, each in points.items()}
    rows = []
    for size in ((4096, 4096), (4096, 28672), (8192, 57344)):
        places = [(*size, m) for m in (1, 16, 64, 256, 1024)]
        rows.append(row("{} x {}".format(*size), "w4ax", *(f"{ours[at]:.1f}" for at in places)))
        for name, kind in (("fp8", "float8e4m3"), ("int8", "int8")):
            theirs = (best(points[at][f"humming_{kind}"], ours[at]) for at in places)
            rows.append(row("", f"Humming, {name}", *theirs))
    table(rows)
    faster = [
        min(each["humming_float8e4m3"], each["humming_int8"]) / ours[at]
        for at, each in points.items()
    ]
    says(f"{min(faster):.2f} to {max(faster):.2f} times as fast at all {len(faster)} points")


def test_w4ax_server_and_70b():
    rows = []
    for server in load("h200-serve-8b-w4ax.json")["servers"]:
        alone, points = server["alone"], server["points"]
        assert not any(point["failed"] for point in points)
        speeds = (alone[f"{where}_tokens_per_s"] for where in ("engine", "http"))
        times = (f"{point['tpot_ms']['p50']:.2f}" for point in points)
        rows.append(row(*server["variant"].split("+"), *(f"{v:.0f}" for v in speeds), *times))
    table(rows)
    (variant,) = load("h200-generate-70b-w4ax.json")["variants"]
    (point,) = variant["points"]
    says(f"{point['tokens_per_s']:.0f} tokens per second with a batch of {point['batch']}")
