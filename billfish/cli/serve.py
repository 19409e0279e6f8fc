"""`billfish serve` and `billfish bench serve`."""

from collections.abc import Callable
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from billfish.cli import bench as cli_bench
from billfish.cli import show, show_bench
from billfish.cli.options import Device, Dir, Dtype, DtypeOption, Json, Save
from billfish.errors import UserError

INSTALL = "pip install 'billfish[serve]'"


def need_server() -> None:
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(f"serving needs {' and '.join(missing)}: {INSTALL}")


class ToolCallParser(StrEnum):
    auto = "auto"
    hermes = "hermes"
    llama3_json = "llama3_json"
    mistral = "mistral"


class Kv(StrEnum):
    kv16 = "kv16"
    kv8 = "kv8"
    kv4 = "kv4"


def serve(
    model: Dir,
    host: Annotated[str, typer.Option(help="Address to bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.")] = 8000,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and output; default: the model's.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences decoded at the same time.")] = 32,
    max_queue: Annotated[
        int, typer.Option(help="Sequences that may wait for that; more get 503.")
    ] = 256,
    kv: Annotated[Kv, typer.Option(help="Format of the KV cache.")] = Kv.kv16,
    gpu_memory: Annotated[
        float, typer.Option(help="Share of the GPU's memory for weights and KV cache.")
    ] = 0.9,
    device: Device = "auto",
    dtype: DtypeOption = Dtype.auto,
    api_key: Annotated[
        str | None, typer.Option(envvar="BILLFISH_API_KEY", help="Required of every client.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name for clients; default: its directory's.")
    ] = None,
    tool_call_parser: Annotated[
        ToolCallParser,
        typer.Option(help="Syntax of the model's tool calls; auto: by its chat template."),
    ] = ToolCallParser.auto,
) -> None:
    """Serve OpenAI's API, and a page to chat at /. SIGTERM finishes the requests that run."""
    need_server()
    from billfish.engine.llm import LLM
    from billfish.server.run import ServerSettings, bind, run_server

    name = served_model_name if served_model_name is not None else model.resolve().name
    settings = ServerSettings(
        name, host, port, api_key, max_queue, tool_call_parser=tool_call_parser.value
    )
    bound = bind(settings)
    with show.status() as say:
        say(f"loading {model}")
        llm = LLM(
            model,
            kv=kv.value,
            dtype=dtype.value,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            gpu_memory=gpu_memory,
        )
    run_server(llm, settings, bound, show.note)


@cli_bench.app.command(
    "serve", epilog="Example: billfish bench serve http://127.0.0.1:8000 --rate 1,2,4 --plot s.png"
)
def bench_serve(
    target: Annotated[
        str | None,
        typer.Argument(help="A server's URL; or a checkpoint, to start servers of it."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(help="Start servers of random weights in the shape of a model: llama3-8b."),
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(help="Of started servers, a list: fp16+kv16,w4a16+kv4; or stored+kv4."),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Of started servers.")] = 64,
    device: Annotated[
        str, typer.Option(help="Of started servers: cpu, cuda, cuda:1 or auto.")
    ] = "auto",
    dtype: DtypeOption = Dtype.auto,
    rate: Annotated[
        str, typer.Option(help="Requests a second, a list; inf: all at once.")
    ] = "1,2,4",
    requests: Annotated[int, typer.Option(help="Requests at each rate.")] = 100,
    input_: Annotated[
        str, typer.Option("--input", help="Tokens of a prompt: 64, or a range, 16-128.")
    ] = "64",
    output: Annotated[str, typer.Option(help="Tokens to generate for each, or a range.")] = "64",
    model: Annotated[
        str | None, typer.Option(help="The model's name; default: the server's.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="BILLFISH_API_KEY", help="If the server asks for one.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of prompts and arrivals; another one meets no cached prompts.")
    ] = 0,
    json_: Json = False,
    save: Save = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw times against the rate into this file: s.png.")
    ] = None,
) -> None:
    """Send requests at random (Poisson) times, and measure TTFT, TPOT, ITL, E2E and throughput."""
    from billfish.bench import plot_serve
    from billfish.bench.plot import need_matplotlib
    from billfish.bench.serve import Load, measure_server, parse_range, parse_rates

    if (target is None) == (config is None):
        raise UserError(
            "say what is measured: a server's address, a checkpoint directory, or --config with a "
            "model's name."
        )
    url = target if target is not None and "://" in target else None
    for name, given in (("--variants", variants), ("--dtype", dtype != Dtype.auto)):
        if url is not None and given:
            raise UserError(
                f"{name} is for own servers: drop it, or give a checkpoint or --config."
            )
    load = Load(
        url or "http://127.0.0.1",
        parse_rates(rate),
        requests,
        parse_range("--input", input_),
        parse_range("--output", output),
        model,
        api_key,
        seed,
    )
    if plot is not None:
        need_matplotlib()
    cli_bench.need_directory(save)
    cli_bench.need_directory(plot, "--plot")
    keep = cli_bench.keeper(save)
    with show.status(json_) as say:
        if url is not None:
            result = measure_server(load, say, keep)
        else:
            result = _own(
                load,
                config or target or "",
                config is not None,
                variants,
                max_num_seqs,
                device,
                dtype.value,
                say,
                keep,
            )
    cli_bench.present(result, json_, show_bench.served, save)
    if plot is not None:
        plot_serve.draw_serve(result, plot)
        show.note(f"drawn: {plot}")
    servers = result.get("servers", [result])
    if not any(point["completed"] for server in servers for point in server["points"]):
        raise typer.Exit(1)  # the table has each point's errors


def _own(
    load: Any,
    model: str,
    random: bool,
    variants: str | None,
    sequences: int,
    device: str,
    dtype: str,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    need_server()
    from billfish.bench import local_server
    from billfish.bench import variants as asked
    from billfish.models.compute import device_of

    usual = asked.usual(random, device_of(device), dtype)
    wanted = asked.parse_variants(variants or usual)
    request = asked.GenerateRequest(model=model, random=random, variants=wanted, dtype=dtype)
    if sequences < 1:
        raise UserError(f"--max-num-seqs {sequences}: at least 1.")
    tokens = load.input[1] + load.output[1]
    return local_server.measure_variants(
        local_server.LocalServer(request, device, tokens, sequences), load, say, keep
    )
