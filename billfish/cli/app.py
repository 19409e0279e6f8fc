"""The command line: arguments in, one call, and its result printed for people or as JSON.

Nothing is computed here. Exit codes: 0 done, 1 an error told in one message, 2 wrong usage, and
what signals.py says of one that was interrupted. Rooms are imported by the command that needs them,
so that --help is quick.
"""

import errno
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from billfish.cli import bench as bench_commands
from billfish.cli import kernels as kernel_commands
from billfish.cli import serve as serve_command
from billfish.cli import show, signals
from billfish.cli.bench import Dtype, DtypeOption, Json
from billfish.errors import Interrupted, UserError

app = typer.Typer(
    name="billfish",
    help="Few-bit LLMs at the speed of memory: quantize any causal LM and run it anywhere.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench_commands.app)
app.add_typer(kernel_commands.app)
app.command(epilog="Example: billfish serve ./smol-w4 --kv kv8 --api-key SECRET")(
    serve_command.serve
)


Model = Annotated[str, typer.Argument(help="Checkpoint directory or hub id.")]
Dir = Annotated[Path, typer.Argument(help="Checkpoint directory.")]
Scheme = Annotated[str, typer.Option(help="What one weight becomes: w4a16.")]
MethodOption = Annotated[str, typer.Option(help="How codes are chosen: gptq, awq or rtn.")]
Bits = Annotated[
    int | None, typer.Option(min=2, max=8, help="Bits of a weight; 4, if none are given.")
]


def _group_size(given: str) -> int | str:
    try:
        return given if given == "auto" else int(given)
    except ValueError:
        raise typer.BadParameter(f"{given!r} is neither auto nor a whole number.") from None


GroupSize = Annotated[
    Any,
    typer.Option(
        parser=_group_size,
        metavar="auto|INTEGER",
        help="Weights along k that share a scale; -1: a whole row; auto: the largest of 128, 64 "
        "and 32 that divides every k.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other parameter of the scheme."),
]
AllowSkipped = Annotated[
    bool,
    typer.Option(
        "--allow-skipped",
        help="Take a --group-size that leaves more than 5 % of the weights in 16 bits.",
    ),
]
Symmetric = Annotated[
    bool | None, typer.Option("--sym/--asym", help="Zero point in the middle (usual), or stored.")
]
Data = Annotated[
    str, typer.Option(help="Calibration text: .txt, .jsonl, .parquet, a hub data set, or 'sample'.")
]
Samples = Annotated[int, typer.Option(min=1, help="Calibration sequences.")]
Seqlen = Annotated[int, typer.Option(min=16, help="Their longest length in tokens.")]
Seed = Annotated[int, typer.Option(help="Decides which sequences are taken.")]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, auto.")]
StoredDtype = Annotated[
    Dtype,
    typer.Option(help="Of scales and unquantized tensors; auto: the model's, fp32 becomes bf16."),
]


@app.command(epilog="Example: billfish plan ./SmolLM2-135M --group-size 64")
def plan(
    model: Model,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where quantize would write.")
    ] = None,
    scheme: Scheme = "w4a16",
    method: MethodOption = "gptq",
    bits: Bits = None,
    group_size: GroupSize = "auto",
    allow_skipped: AllowSkipped = False,
    sym: Symmetric = None,
    parameters: Set = None,
    data: Data = "sample",
    nsamples: Samples = 128,
    seqlen: Seqlen = 1024,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.auto,
    stored_dtype: StoredDtype = Dtype.auto,
    json_: Json = False,
) -> None:
    """Say what quantizing would do, before any work: sizes, true bits, what is skipped, memory,
    time."""
    from billfish.offline.plan import plan as make_plan

    request = _request(
        model,
        output,
        scheme,
        method,
        _options(bits, group_size, sym, parameters),
        allow_skipped,
        data,
        nsamples,
        seqlen,
        seed,
        device,
        dtype,
        stored_dtype,
    )
    _print(make_plan(request), json_, show.plan)


@app.command(epilog="Example: billfish quantize ./SmolLM2-135M --output ./smol-w4 --group-size 64")
def quantize(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write.")],
    scheme: Scheme = "w4a16",
    method: MethodOption = "gptq",
    bits: Bits = None,
    group_size: GroupSize = "auto",
    allow_skipped: AllowSkipped = False,
    sym: Symmetric = None,
    parameters: Set = None,
    data: Data = "sample",
    nsamples: Samples = 128,
    seqlen: Seqlen = 1024,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: DtypeOption = Dtype.auto,
    stored_dtype: StoredDtype = Dtype.auto,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--fresh", help="Go on with what is in --output, or delete it first."
        ),
    ] = True,
    report: Annotated[Path | None, typer.Option(help="Also write an HTML report here.")] = None,
    kv: Annotated[
        str | None,
        typer.Option(help="kv4: also calibrate the 4-bit KV cache with --data, and store it."),
    ] = None,
    json_: Json = False,
) -> None:
    """Quantize a checkpoint. Stopped at any moment, the same command goes on where it was."""
    from billfish.evaluate.report import write_report
    from billfish.offline.driver import quantize as run

    request = _request(
        model,
        output,
        scheme,
        method,
        _options(bits, group_size, sym, parameters),
        allow_skipped,
        data,
        nsamples,
        seqlen,
        seed,
        device,
        dtype,
        stored_dtype,
        kv,
    )
    with show.progress(quiet=json_) as tell:
        result = run(request, resume, tell)
    if report is not None:
        write_report({"model": {"path": str(output)}, "quantization": result}, report)
    _print(result, json_, show.quantized)


@app.command(epilog="Example: billfish inspect ./smol-w4")
def inspect(path: Dir, json_: Json = False) -> None:
    """Show what is in a checkpoint: any Hugging Face, compressed-tensors, GPTQ, AWQ or Marlin
    directory."""
    from billfish.checkpoints.inspect import inspect as look

    _print(look(path), json_, show.inspection)


@app.command(epilog="Example: billfish verify ./smol-w4")
def verify(path: Dir, json_: Json = False) -> None:
    """Check hashes, shapes, dtypes and numbers of a checkpoint; exit 1 and name what is bad."""
    from billfish.checkpoints.verify import verify as check

    result = check(path)
    _print(result, json_, show.verification)
    if not result["ok"]:
        raise typer.Exit(1)


@app.command(epilog="Example: billfish convert ./smol-w4 ./smol-gptq --to gptq")
def convert(
    source: Annotated[Path, typer.Argument(help="Packed checkpoint.")],
    target: Annotated[Path, typer.Argument(help="Directory to write.")],
    to: Annotated[
        str, typer.Option("--to", help="Format to write: compressed-tensors, gptq or awq.")
    ],
    json_: Json = False,
) -> None:
    """Write a packed checkpoint in another format; integers, scales and zeros stay what they
    are."""
    from billfish.checkpoints.convert import convert as run

    _print(run(source, target, to), json_, show.conversion)


@app.command(
    "eval", epilog="Example: billfish eval ./smol-w4 --baseline ./SmolLM2-135M --report r.html"
)
def evaluate(
    model: Dir,
    baseline: Annotated[Path | None, typer.Option(help="The original, to compare with.")] = None,
    tasks: Annotated[str, typer.Option(help="Comma-separated; see below.")] = "sample",
    data_dir: Annotated[Path | None, typer.Option(help="Where the tasks' files are.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Windows or questions per task.")] = None,
    kl: Annotated[bool, typer.Option("--kl/--no-kl", help="KL divergence to --baseline.")] = True,
    seqlen: Annotated[int | None, typer.Option(help="Window length; 2048 or the model's.")] = None,
    dtype: DtypeOption = Dtype.auto,
    device: Device = "cpu",
    batch_size: Annotated[int, typer.Option(min=1, help="Questions at once.")] = 4,
    report: Annotated[
        Path | None, typer.Option(help="Write an HTML report here, JSON next to it.")
    ] = None,
    json_: Json = False,
) -> None:
    """Measure quality against the original: perplexity, KL divergence, zero-shot tasks.

    Tasks: sample (shipped text), wikitext2, piqa, arc_easy, arc_challenge, hellaswag, winogrande,
    lambada, or the path of a .txt (perplexity).
    """
    from billfish.evaluate.report import write_report
    from billfish.evaluate.run import EvalRequest
    from billfish.evaluate.run import evaluate as run

    names = tuple(name.strip() for name in tasks.split(",") if name.strip())
    request = EvalRequest(
        model,
        names,
        baseline,
        kl and baseline is not None,
        data_dir,
        limit,
        seqlen,
        dtype.value,
        device,
        batch_size,
        " ".join(["billfish", *sys.argv[1:]]),
    )
    with show.status(quiet=json_) as say:
        result = run(request, say)
    if report is not None:
        write_report(result, report, report.with_suffix(".json"))
    _print(result, json_, show.evaluation)


@app.command(epilog="Example: billfish generate ./smol-w4 --prompt 'What is a billfish?' --chat")
def generate(
    model: Dir,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus of the distribution to draw from.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the drawing.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    dtype: DtypeOption = Dtype.auto,
    device: Device = "cpu",
    json_: Json = False,
) -> None:
    """Generate text, streamed, and say how fast."""
    from billfish.models.compute import name_of
    from billfish.models.generate import Sampling
    from billfish.models.generate import generate as run
    from billfish.models.load import load

    sampling = Sampling(max_tokens, temperature, top_p, seed)
    with show.status(quiet=json_) as say:
        say(f"loading {model}")
        loaded, tokenizer = load(model, dtype.value, device)
    pieces, timing = run(loaded, tokenizer, prompt, sampling, chat)
    text = ""
    for piece in pieces:
        text += piece
        if not json_:
            show.stream(piece)
    result = {
        "text": text,
        "dtype": name_of(loaded.dtype),
        "prompt_tokens": timing.prompt_tokens,
        "tokens": timing.tokens,
        "prompt_seconds": timing.prompt_seconds,
        "tokens_per_second": timing.tokens_per_second,
    }
    _print(result, json_, show.generated)


@app.command(epilog="Example: billfish doctor --json")
def doctor(json_: Json = False) -> None:
    """Say what this machine can do, and what to do about each problem; exit 1 if there is one."""
    from dataclasses import asdict

    from billfish.cli.doctor import diagnose

    findings = [asdict(finding) for finding in diagnose()]
    _print({"findings": findings}, json_, show.findings)
    if any(finding["status"] == "problem" for finding in findings):
        raise typer.Exit(1)


def _options(
    bits: int | None, group_size: Any, sym: bool | None, parameters: list[str] | None
) -> dict[str, Any]:
    """What was said of the scheme; the scheme says what it means."""
    given = {"bits": bits, "group_size": group_size, "symmetric": sym}
    options = {name: value for name, value in given.items() if value not in (None, "auto")}
    for text in parameters or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UserError(f"--set {text}: is NAME=VALUE.")
        options[name] = value
    return options


def _request(
    model: str,
    output: Path | None,
    scheme: str,
    method: str,
    options: dict[str, Any],
    allow_skipped: bool,
    data: str,
    nsamples: int,
    seqlen: int,
    seed: int,
    device: str,
    dtype: Dtype,
    stored: Dtype,
    kv: str | None = None,
) -> Any:
    import torch

    from billfish.checkpoints.read import resolve
    from billfish.offline.request import QuantizeRequest
    from billfish.schemes.registry import from_options

    return QuantizeRequest(
        model=resolve(model),
        output=output,
        scheme=from_options(scheme, options),
        method=method,
        data=data,
        nsamples=nsamples,
        seqlen=seqlen,
        seed=seed,
        device=device,
        dtype=dtype.value,
        stored_dtype=None if stored == Dtype.auto else getattr(torch, stored.value),
        kv=kv,
        allow_skipped=allow_skipped,
    )


def _print(result: Any, as_json: bool, render: Any) -> None:
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False, default=str))
    else:
        render(result)


def main() -> None:
    """Turns expected failures into one message and an exit code."""
    signals.catch()
    try:
        app(standalone_mode=True)
    except UserError as error:
        show.error(str(error))
        sys.exit(1)
    except Interrupted as stopped:
        sys.exit(signals.ended(stopped))
    except OSError as error:
        if error.errno is None or not error.filename:
            raise  # not about a place a user chose
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "Make room and run the same command again; finished blocks are kept."
        hint = hint if full else "Choose a place that can be read and written."
        show.error(f"{error.filename}: {error.strerror}. {hint}")
        sys.exit(1)


if __name__ == "__main__":
    main()
