"""Results of `billfish bench` as tables and lines."""

from typing import Any

from billfish.cli.show import Result, lines, out, size, table


def kernels(result: Result) -> None:
    card, peaks, ceilings = result["card"], result["peaks"], result["ceilings"]
    lines(
        [
            (
                "card",
                f"{card['name']}, {card['arch']}, {card['sm_count']} SMs, driver "
                f"{card['driver'] or 'unknown'}",
            ),
            (
                "roof",
                f"{peaks['bytes_per_s'] / 1e12:.2f} TB/s, {peaks['flop_per_s'] / 1e12:.0f} "
                f"TFLOP/s ({peaks['source']})",
            ),
            ("reached", f"{ceilings['read_bytes_per_s'] / 1e12:.2f} TB/s ({ceilings['read_how']})"),
            ("clocks", f"{_readings(result['before'])} -> {_readings(result['after'])}"),
            ("date", result["date"] + ("" if result["complete"] else ", not complete")),
        ]
    )
    tables: dict[str, list[Result]] = {}
    for point in result["points"]:
        tables.setdefault(_title(point), []).append(point)
    for title, points in tables.items():
        modes = list(dict.fromkeys(mode for point in points for mode in point["us"]))
        columns = ["m", *(f"{mode} us" for mode in modes), "spread", "cuBLAS us", "speed-up"]
        rows = [_row(point, modes) for point in points]
        table(f"\n{title}", [*columns, "TB/s", "floor us", "of roof"], rows)
    if result["chains"]:
        columns = ["m", "dtype", "group", "mode", "us", "sum of parts", "cuBLAS", "floor us"]
        for name in dict.fromkeys(", ".join(told["sets"]) for told in result["chains"]):
            chains = [told for told in result["chains"] if ", ".join(told["sets"]) == name]
            table(f"\n{name}, a layer's linears in one graph", columns, _chains(chains))
    for told in [*result["points"], *result["chains"]]:
        if told["error"]:
            where = ", ".join(told.get("sets") or told["linears"])
            out.print(f"{where}, m = {told['m']}: {told['error']}", markup=False)


def experts(result: Result) -> None:
    card, peaks = result["card"], result["peaks"]
    read = f"{peaks['bytes_per_s'] / 1e12:.2f} TB/s read, {peaks['flop_per_s'] / 1e12:.0f} TFLOP/s"
    lines([("card", f"{card['name']}, {card['arch']}"), ("roof", read), ("date", result["date"])])
    modes = result["request"]["modes"]
    columns = ["m", "active", "MB", *(f"{mode} us" for mode in modes), "floor us", "of roof"]
    for name in dict.fromkeys(point["name"] for point in result["points"]):
        points = [point for point in result["points"] if point["name"] == name]
        one = points[0]
        sizes = (
            f"{one['experts']} experts, {one['several']} a token, {one['hidden']}, {one['wide']}"
        )
        rows = [
            [
                point["m"],
                f"{point['active']:.0f}",
                f"{point['bytes'] / 1e6:.1f}",
                *(_fixed(point["us"][mode]["median"]) for mode in modes),
                _fixed(point["floor_us"]),
                f"{100 * point['roofline']:.0f} %",
                _fixed(point["grouped_us"]),
                "-" if point["speedup"] is None else f"{point['speedup']:.2f}",
            ]
            for point in points
        ]
        table(f"\n{name}: {sizes}", [*columns, "16-bit grouped us", "speed-up"], rows)


def sustained(result: Result) -> None:
    rows = []
    for point in result["points"]:
        for op, told in ((point["op"], point), ("cuBLAS", point["cublas"])):
            if told and "samples" in told:
                rows.append([f"{point['k']} x {point['n']}", point["m"], op, *_sustained(told)])
    columns = ["shape", "m", "op", "first us", "last us", "kept", "MHz", "watts"]
    times = f"{result['seconds']} s each, cuBLAS {result['cublas_seconds']} s"
    table(f"\n{result['card']['name']}, {times}", columns, rows)
    for point in result["points"]:
        if point["error"]:
            where = f"{point['k']} x {point['n']}, m = {point['m']}"
            out.print(f"{where}: {point['error']}", markup=False)


def generated(result: Result) -> None:
    told, card = result["settings"], result["card"]
    memory, bandwidth = told["memory"], told["bandwidth"]
    lines(
        [
            ("device", f"{card['name']}, {card['arch']}"),
            ("model", told["model"] + (", random weights" if told["random"] else "")),
            (
                "lengths",
                f"{told['input']} tokens in, {told['output']} out; {told['rounds']} rounds",
            ),
            ("memory", f"{size(memory)}, weights and KV cache" if memory else "not limited"),
            (
                "roof",
                f"weights read at {bandwidth / 1e12:.2f} TB/s"
                if bandwidth
                else "unknown for this device; --bandwidth tells",
            ),
            ("date", result["date"] + ("" if result["complete"] else ", not complete")),
        ]
    )
    points = [(v, p) for v in result["variants"] for p in v["points"] if not p["error"]]
    columns = ["variant", "batch", "prefill ms", "ms per token", "tokens/s", "x first", "of roof"]
    table("\ndecode", columns, [_decoded(*each) for each in points])
    columns = ["variant", "batch", "tokens/s", "x first", "x first, both at their best"]
    table("\nprefill and decode", columns, [_altogether(*each) for each in points])
    measured = [(v, p) for v, p in points if "energy" in p]
    if measured:
        columns = ["variant", "batch", "W", "J per token", "cost of a million tokens"]
        table("\nenergy, prefill and decode", columns, [_used(*each) for each in measured])
    for variant in result["variants"]:
        for told in (variant, *variant["points"]):
            if told["error"]:
                where = f", batch {told['batch']}" if "batch" in told else ""
                out.print(f"{variant['variant']}{where}: {told['error']}", markup=False)


def _used(variant: Result, point: Result) -> list[str]:
    used = point["energy"]
    price = used["cost_per_million_tokens"]
    return [
        variant["variant"],
        str(point["batch"]),
        f"{used['watts']:.0f}",
        f"{used['joules_per_token']:.3f}",
        "" if price is None else f"{price:.3f}",
    ]


def served(result: Result) -> None:
    for server in result.get("servers", ()):
        alone = server["alone"]
        lines(
            [
                ("\nvariant", f"{result['model']}, {server['variant']}, {server['card']['name']}"),
                (
                    "alone",
                    f"{alone['http_tokens_per_s']:.1f} tokens/s over HTTP, the engine's own "
                    f"stream {alone['engine_tokens_per_s']:.1f}: {alone['ratio']:.3f}",
                ),
            ]
        )
        _served(server)
    if "servers" not in result:
        _served(result)


def _served(result: Result) -> None:
    told = result["settings"]
    lengths = ["-".join(map(str, dict.fromkeys(told[name]))) for name in ("input", "output")]
    lines(
        [
            ("server", told["url"]),
            ("model", told["model"]),
            ("lengths", f"{lengths[0]} tokens in, {lengths[1]} out; {told['requests']} requests"),
            ("date", result["date"] + ("" if result["complete"] else ", not complete")),
        ]
    )
    columns = ["rate", "done", "failed", "requests/s", "out tokens/s", "tokens/s"]
    rates = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
    table(
        "\nthroughput",
        columns,
        [
            [point["rate"], point["completed"], point["failed"], *(_fixed(point[r]) for r in rates)]
            for point in result["points"]
        ],
    )
    kinds = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E"}
    parts = ("mean", "p50", "p90", "p99")
    table(
        "\ntimes, ms",
        ["rate", "", *parts],
        [
            [point["rate"], name, *(_fixed(point[key] and point[key][part]) for part in parts)]
            for point in result["points"]
            for key, name in kinds.items()
        ],
    )
    for point in result["points"]:
        for error, count in point["errors"].items():
            out.print(f"rate {point['rate']}, {count} failed: {error}", markup=False)


def _decoded(variant: Result, point: Result) -> list[Any]:
    step, share = point["step_seconds"], point["roofline"]
    return [
        variant["variant"],
        point["batch"],
        _fixed(point["prefill_seconds"] * 1e3),
        _fixed(step and step * 1e3),
        _fixed(point["decode_tokens_per_s"]),
        _fixed(point["decode_tokens_per_s_ratio"]),
        f"{share:.0%}" if share else "-",
    ]


def _altogether(variant: Result, point: Result) -> list[Any]:
    best = variant["best"]["ratio"] if point["batch"] == variant["best"]["batch"] else None
    rates = [point["tokens_per_s"], point["tokens_per_s_ratio"], best]
    return [variant["variant"], point["batch"], *map(_fixed, rates)]


def _sustained(told: Result) -> list[str]:
    first, last = told["samples"][0], told["samples"][-1]
    clocks = f"{first['sm_mhz'] or '?'} -> {last['sm_mhz'] or '?'}"
    times = [_fixed(told["first"]), _fixed(told["last"]), f"{told['kept']:.1%}"]
    return [*times, clocks, str(last["watts"] or "?")]


def _title(point: Result) -> str:
    group = (
        "one scale per channel" if point["group_size"] == -1 else f"groups of {point['group_size']}"
    )
    kind = "symmetric" if point["symmetric"] else "asymmetric"
    names = ", ".join(point["linears"])
    return f"{names}  {point['k']} x {point['n']}, {point['dtype']}, {group}, {kind}"


def _row(point: Result, modes: list[str]) -> list[Any]:
    us, cublas = point["us"], point["cublas_us"]
    first = us.get(modes[0]) if modes else None
    done = "roofline" in point
    return [
        point["m"],
        *(_fixed(us[mode]["median"] if mode in us else None) for mode in modes),
        f"{(first['p90'] - first['p10']) / first['median']:.1%}" if first else "-",
        _fixed(cublas["median"] if cublas else None),
        _fixed(point["speedup"] if done else None),
        _fixed(point["tbps"] if done else None),
        _fixed(point.get("floor_us")),
        f"{point['roofline']:.0%}" if done else "-",
    ]


def _chains(chains: list[Result]) -> list[list[Any]]:
    return [
        [
            told["m"],
            told["variant"]["dtype"],
            told["variant"]["group_size"],
            mode,
            _fixed(us["median"]),
            _fixed(told["parts_us"][mode]),
            _fixed(told["cublas_parts_us"]),
            _fixed(told["floor_us"]),
        ]
        for told in chains
        for mode, us in told["us"].items()
        if mode in told["parts_us"]
    ]


def _fixed(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _readings(told: Result | None) -> str:
    if not told:
        return "unknown"
    return f"{told['sm_mhz'] or '?'} MHz, {told['watts'] or '?'} W, {told['celsius'] or '?'} C"


def tuned(result: Result) -> None:
    columns = ["m", "tokens", "bands", "stripes", "us"]
    for layer in result["layers"]:
        rows = [[m, *cut, layer["us"][m]] for m, cut in layer["cuts"].items()]
        table(f"\n{layer['k']} x {layer['n']}", columns, rows)
