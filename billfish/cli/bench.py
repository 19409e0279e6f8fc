"""`billfish bench`: arguments in, one measurement, and its result as a table, JSON and pictures.

Nothing is computed here. Arguments, output paths, matplotlib and the GPU are checked before
anything is measured.
"""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from billfish.cli import show, show_bench
from billfish.cli.options import (
    Batches,
    Device,
    Dtype,
    DtypeOption,
    Json,
    Modes,
    Quick,
    Save,
    Symmetric,
)
from billfish.errors import UserError

PEER_NUMBERS = ("k", "n", "m", "us", "cublas_us")
Shapes = Annotated[str, typer.Option(help="Models, or K x N of linears: llama3-8b,4096x4096.")]

app = typer.Typer(name="bench", help="Measure speed.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure speed, against what people use today and against what the card could do."""


@app.command(
    epilog="Example: billfish bench kernels --shapes llama3-8b --m 1,16,64 --save k.json --plot ."
)
def kernels(
    scheme: Annotated[str, typer.Option(help="Format of the weights.")] = "w4a16",
    shapes: Shapes = "llama3-8b",
    m: Batches = "1,2,4,8,16,32,64,128,256,512,1024",
    group_size: Annotated[
        str, typer.Option(help="Weights along k that share a scale, a list; -1: a whole row.")
    ] = "128",
    sym: Symmetric = True,
    dtype: Annotated[
        str, typer.Option(help="Of activations: float16, bfloat16 or both.")
    ] = "float16",
    op: Annotated[str, typer.Option(help="Which op of the scheme; auto: the fastest.")] = "auto",
    modes: Modes = "pdl,plain",
    quick: Quick = False,
    json_: Json = False,
    save: Save = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw roofline.png and speedup.png into this directory.")
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(
            help="Also draw times of other kernels from a file like docs/bench/peers.json."
        ),
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="Show and draw an earlier --save; needs no GPU.")
    ] = None,
) -> None:
    """Time the linears of a model, batch by batch, against cuBLAS and the roofline.

    Launches are replayed in a CUDA graph over copies of the weights that the L2 cannot hold.
    """
    from billfish.bench import plot as pictures

    if peers is not None and plot is None:
        raise UserError(f"--peers {peers}: is only drawn. Say where with --plot DIR, or drop it.")
    others = None if peers is None else read_peers(peers)
    if from_ is not None:
        if save is not None:
            raise UserError("--save writes what was measured; --from measures nothing. Drop one.")
        result = read_result(from_)
        if plot is not None:
            pictures.need_matplotlib()
    else:
        request = _request(scheme, shapes, m, group_size, sym, dtype, op, modes)
        if plot is not None:
            pictures.need_matplotlib()
            plot.mkdir(parents=True, exist_ok=True)
        need_directory(save)
        result = _measure(request, quick, save, json_)
    present(result, json_, show_bench.kernels, save)
    failed = all(point["error"] for point in result["points"])
    if plot is not None and not failed:
        if others is not None and not pictures.peer_times(result, others):
            # Known only after measuring: the plots are drawn without them.
            told = "no time of this card, shapes and batch sizes in float16, group 128, symmetric"
            show.note(f"not drawn: {peers}, which has {told}")
        for path in pictures.draw_kernels(result, plot, others):
            show.note(f"drawn: {path}")
    if failed:
        raise typer.Exit(1)  # the table has each point's error


@app.command(epilog="Example: billfish bench tune --shapes llama3-8b --m 32,64,128 --save t.json")
def tune(
    save: Annotated[Path, typer.Option(help="Write the table, with what was found, to this file.")],
    shapes: Shapes = "llama3-8b,llama3-70b",
    m: Annotated[str, typer.Option(help="Batch sizes, 9 and more.")] = "32,64,128,256,512,1024",
    json_: Json = False,
) -> None:
    """Search the fastest tile configuration of w4a16's batch kernel, by linear and batch size.

    The table that comes with Billfish was made by it; to use another, replace that file
    (schemes/w4a16/cuda/tuned.json).
    """
    from billfish.bench import tune as search
    from billfish.bench.shapes import parse_rows, parse_shapes
    from billfish.bench.timing import QUICK, GraphCard

    sets, rows = parse_shapes(shapes), parse_rows(m)
    need_directory(save)
    with show.status(json_) as say:
        found = search.search(sets, rows, GraphCard(QUICK), QUICK, say)
    save.write_text(
        search.text(search.merged(json.loads(search.tuner_of().TABLE.read_text()), found))
    )
    present(found, json_, show_bench.tuned, save)


@app.command(epilog="Example: billfish bench sustain --shapes 4096x28672 --m 16,1024 --save s.json")
def sustain(
    shapes: Annotated[
        str, typer.Option(help="K x N of linears, or models: 4096x28672,llama3-8b.")
    ] = "4096x28672",
    m: Annotated[str, typer.Option(help="Batch sizes: 16,1024 or 1-16,32.")] = "16,1024",
    seconds: Annotated[
        int, typer.Option(help="For each linear and batch size; cuBLAS gets a quarter of it.")
    ] = 60,
    json_: Json = False,
    save: Save = None,
) -> None:
    """Measure whether w4a16 stays as fast while the GPU heats up and lowers its clocks.

    Once a second: us per launch, clocks, power and temperature; afterwards the same of cuBLAS.
    """
    from billfish.bench.sustain import LEAST_SECONDS, Sustain
    from billfish.bench.timing import GraphCard, Rules

    request = _request("w4a16", shapes, m, "128", True, "float16", "auto", "pdl")
    if seconds < LEAST_SECONDS:
        raise UserError(f"--seconds {seconds}: give {LEAST_SECONDS} or more, to compare.")
    need_directory(save)
    rules = Rules()
    card = GraphCard(rules)

    with show.status(json_) as say:
        result = Sustain(request, card, rules, seconds, say, keeper(save)).measure()
    present(result, json_, show_bench.sustained, save)
    if all(point["error"] for point in result["points"]):
        raise typer.Exit(1)  # the table has each point's error


@app.command(
    epilog="Example: billfish bench generate --config llama3-8b --batch 1,16,64 --save g.json"
)
def generate(
    model: Annotated[
        str | None, typer.Argument(help="A checkpoint directory; or give --config.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="Random weights in the shape of a model: llama3-8b, or a config.json."),
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Random weights in MODEL's shape.")
    ] = False,
    variants: Annotated[
        str | None,
        typer.Option(
            help="Weights+KV cache, a list: fp16+kv16,w4a16+kv4; of a checkpoint stored+kv4."
        ),
    ] = None,
    batch: Annotated[
        str, typer.Option(help="Sequences in a batch, a list; auto: as many as fit.")
    ] = "1,16,64",
    input_: Annotated[int, typer.Option("--input", help="Tokens of a prompt.")] = 64,
    output: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 64,
    rounds: Annotated[int, typer.Option(help="The median counts; one more warms up.")] = 3,
    memory: Annotated[
        str | None, typer.Option(help="For weights and KV cache: 80GB. Default: 0.9 of the GPU's.")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Of the memory in TB/s, for the roofline. Known: H200.")
    ] = None,
    dtype: DtypeOption = Dtype.auto,
    group_size: Annotated[
        int, typer.Option(help="Of random w4a16 weights; -1: a whole row.")
    ] = 128,
    head_bits: Annotated[
        int | None, typer.Option(metavar="8|4", help="Of lm_head where random weights are packed.")
    ] = None,
    max_batched_tokens: Annotated[
        int | None, typer.Option(help="Token budget of a step; default: the engine's.")
    ] = None,
    energy: Annotated[
        bool, typer.Option("--energy", help="Also measure joules, by the GPU's own counter.")
    ] = False,
    price: Annotated[
        float | None,
        typer.Option(help="Of a kilowatt hour, with --energy: the cost of a million tokens."),
    ] = None,
    device: Device = "auto",
    json_: Json = False,
    save: Save = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw tokens a second into this file: g.png.")
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="Show and draw an earlier --save.")
    ] = None,
) -> None:
    """Measure the engine's prefill and decode, by weights, KV cache and batch size.

    Prompts are random tokens; decoding is greedy and goes on past the end token.
    """
    from billfish.bench import generate as bench
    from billfish.bench import plot_generate
    from billfish.bench import variants as asked
    from billfish.bench.plot import need_matplotlib
    from billfish.models.compute import device_of

    if plot is not None:
        need_matplotlib()
    need_directory(save)
    need_directory(plot, "--plot")
    if from_ is not None:
        if save is not None or model or config:
            raise UserError("--from measures nothing: drop it, or --save, --config and MODEL.")
        result = read_result(from_, "generate")
    else:
        if (model is None) == (config is None):
            raise UserError(
                "say what is measured: a checkpoint directory, or --config with a model's name."
            )
        chosen = device_of(device)
        is_random = random or config is not None
        request = asked.GenerateRequest(
            model=config or model or "",
            random=is_random,
            variants=asked.parse_variants(variants or asked.usual(is_random, chosen, dtype.value)),
            batches=asked.parse_batches(batch),
            input=input_,
            output=output,
            rounds=rounds,
            memory=None if memory is None else asked.parse_bytes(memory),
            bandwidth=None if bandwidth is None else bandwidth * 1e12,
            dtype=dtype.value,
            group_size=group_size,
            head_bits=head_bits,
            max_batched_tokens=max_batched_tokens,
            energy=energy,
            price=price,
        )
        with show.status(json_) as say:
            result = bench.GenerateBench(request, chosen, say, keeper(save)).measure()
    present(result, json_, show_bench.generated, save)
    if plot is not None:
        plot_generate.draw_generate(result, plot)
        show.note(f"drawn: {plot}")


def present(
    result: dict[str, Any],
    as_json: bool,
    render: Callable[[dict[str, Any]], None],
    saved: Path | None,
) -> None:
    """The result on stdout, the path of the saved file on stderr."""
    show.present(result, as_json, render)
    if saved is not None:
        show.note(f"written: {saved}")


def need_directory(target: Path | None, option: str = "--save") -> None:
    if target is not None and not target.absolute().parent.is_dir():
        raise UserError(f"{option} {target}: there is no directory {target.absolute().parent}.")


def keeper(target: Path | None) -> Callable[[dict[str, Any]], None]:
    """A function that writes the result so far to `target`, if there is one."""

    def keep(result: dict[str, Any]) -> None:
        if target is not None:
            write_result(result, target)

    return keep


def _request(
    scheme: str, shapes: str, m: str, group_size: str, sym: bool, dtype: str, op: str, modes: str
) -> Any:
    from billfish.bench.kernels import KernelRequest
    from billfish.bench.shapes import parse_rows, parse_shapes, words

    try:
        groups = tuple(dict.fromkeys(int(word) for word in words(group_size)))
    except ValueError:
        groups = ()
    if not groups:
        raise UserError(f"group size {group_size!r}: give whole numbers, such as 128 or 64,128,-1.")
    return KernelRequest(
        parse_shapes(shapes),
        parse_rows(m),
        scheme,
        groups,
        sym,
        tuple(dict.fromkeys(words(dtype))),
        op,
        tuple(dict.fromkeys(words(modes))),
    )


def _measure(request: Any, quick: bool, target: Path | None, quiet: bool) -> dict[str, Any]:
    from billfish.bench.kernels import KernelBench
    from billfish.bench.timing import QUICK, GraphCard, Rules

    rules = QUICK if quick else Rules()
    card = GraphCard(rules)

    with show.status(quiet) as say:
        return KernelBench(request, card, rules, say, keeper(target)).measure()


def write_result(result: dict[str, Any], path: Path) -> None:
    """Atomically: the file is replaced after every point."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(temporary, path)


def read_result(path: Path, bench: str = "kernels") -> dict[str, Any]:
    from billfish.bench import generate, kernels

    known = {"kernels": kernels.RESULT_VERSION, "generate": generate.RESULT_VERSION}[bench]
    result = _read_json("--from", path)
    told = result if isinstance(result, dict) else {}
    version, whose = told.get("result_version"), told.get("bench", "kernels")
    if version != known or whose != bench:
        raise UserError(
            f"--from {path}: is no result of bench {bench} that this version reads "
            f"(result_version {version}, not {known}; of bench {whose}). Measure again with --save."
        )
    return told


def read_peers(path: Path) -> dict[str, Any]:
    """The fastest times of other kernels, with cuBLAS of the same run; docs/bench/peers.json."""
    peers = _read_json("--peers", path)
    times = peers.get("times") if isinstance(peers, dict) else None
    if not times or not isinstance(times, list) or not isinstance(peers.get("card"), str):
        raise UserError(
            f"--peers {path}: is no file of times. It needs a card's name under card, and under "
            "times a list of k, n, m, us and cublas_us; docs/bench/peers.json is one."
        )
    for place, told in enumerate(times):
        if not _is_time(told):
            raise UserError(
                f"--peers {path}: times[{place}] is {json.dumps(told)}; "
                f"{', '.join(PEER_NUMBERS)} are numbers above 0. Correct it or leave it out."
            )
    assert isinstance(peers, dict)
    return peers


def _is_time(told: Any) -> bool:
    """Python's JSON may hold NaN and Infinity, and True is an int."""
    found: list[Any] = [told.get(name) for name in PEER_NUMBERS] if isinstance(told, dict) else [0]
    return all(type(each) in (int, float) and 0 < each < math.inf for each in found)


def _read_json(option: str, path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"{option} {path}: there is no such file.")
    try:
        return json.loads(path.read_text())
    except ValueError:
        raise UserError(f"{option} {path}: is not JSON.") from None
