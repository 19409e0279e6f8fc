"""`billfish eval` and `billfish generate`: what runs a model."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from billfish.cli import show
from billfish.cli.options import Device, Dir, Dtype, DtypeOption, Json


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
    show.present(result, json_, show.evaluation)


def generate(
    model: Dir,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling: the mass to draw from.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    dtype: DtypeOption = Dtype.auto,
    device: Device = "cpu",
    json_: Json = False,
) -> None:
    """Generate text, streamed, and say how fast."""
    from billfish.engine.build import apart
    from billfish.engine.single import generate as run
    from billfish.models.compute import device_of, name_of
    from billfish.models.generate import Sampling
    from billfish.models.load import load

    sampling = Sampling(max_tokens, temperature, top_p, seed)
    with show.status(quiet=json_) as say:
        say(f"loading {model}")
        where = str(device_of(device))
        loaded, tokenizer = apart(where, partial(load, model, dtype.value, where))
        pieces, timing = run(loaded, tokenizer, prompt, sampling, chat, show.note)
    text = ""
    for piece in pieces:
        text += piece
        if not json_:
            show.stream(piece)
    told = {
        "text": text,
        "dtype": name_of(loaded.dtype),
        "prompt_tokens": timing.prompt_tokens,
        "tokens": timing.tokens,
        "prompt_seconds": timing.prompt_seconds,
        "tokens_per_second": timing.tokens_per_second,
    }
    show.present(told, json_, show.generated)
