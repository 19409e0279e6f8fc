"""`billfish inspect`, `verify` and `convert`: what reads checkpoints and runs no model."""

from pathlib import Path
from typing import Annotated

import typer

from billfish.cli import show
from billfish.cli.options import Dir, Json


def inspect(path: Dir, json_: Json = False) -> None:
    """Show what is in a checkpoint: any Hugging Face, compressed-tensors, GPTQ, AWQ or Marlin
    directory."""
    from billfish.checkpoints.inspect import inspect as look

    show.present(look(path), json_, show.inspection)


def verify(path: Dir, json_: Json = False) -> None:
    """Check hashes, shapes, dtypes and numbers of a checkpoint; exit 1 and name what is bad."""
    from billfish.checkpoints.verify import verify as check

    result = check(path)
    show.present(result, json_, show.verification)
    if not result["ok"]:
        raise typer.Exit(1)


def convert(
    source: Annotated[Path, typer.Argument(help="Packed checkpoint.")],
    target: Annotated[Path, typer.Argument(help="Directory to write.")],
    to: Annotated[
        str, typer.Option("--to", help="Format to write: compressed-tensors, gptq or awq.")
    ],
    json_: Json = False,
) -> None:
    """Write a packed checkpoint in another format; codes, scales and zero points stay the
    same."""
    from billfish.checkpoints.convert import convert as run

    show.present(run(source, target, to), json_, show.conversion)
