"""`billfish kernels`: compiling CUDA kernels ahead of time."""

from enum import StrEnum
from typing import Annotated, Any

import typer

from billfish.cli import show
from billfish.cli.options import Json

app = typer.Typer(name="kernels", help="Compile CUDA kernels.", no_args_is_help=True)


class Activations(StrEnum):
    auto = "auto"
    float16 = "float16"
    bfloat16 = "bfloat16"


@app.callback()
def kernels() -> None:
    """Compile CUDA kernels ahead of time; otherwise the first load compiles them."""


@app.command(epilog="Example: billfish kernels warmup ./smol-w4 --arch sm_90a")
def warmup(
    model: Annotated[str, typer.Argument(help="Quantized checkpoint directory or hub id.")],
    arch: Annotated[
        str | None,
        typer.Option(help="GPU to compile for: sm_90a, sm_89, sm_80; default: the one here."),
    ] = None,
    dtype: Annotated[
        Activations, typer.Option(help="Of activations; auto: the model's.")
    ] = Activations.auto,
    json_: Json = False,
) -> None:
    """Compile the kernels of a quantized model into the cache. Needs no GPU if --arch is given."""
    from billfish.checkpoints.read import resolve
    from billfish.cli.warmup import warmup as run

    with show.status(quiet=json_) as say:
        result = run(resolve(model), arch, dtype.value, say)
    show.present(result, json_, show_result)


def show_result(result: dict[str, Any]) -> None:
    show.lines(
        [
            ("kernels", f"{result['compiled']} compiled, {result['cached']} were cached"),
            ("for", f"{result['arch']}, {result['dtype']}, {result['linears']} linears"),
            ("time", f"{result['seconds']:.1f} s"),
            ("cache", result["cache"]),
        ]
    )
    facts = ("name", "registers", "spill_bytes", "smem_bytes")
    rows = [[kernel[fact] for fact in facts] for kernel in result["kernels"]]
    show.table("", ["kernel", "registers", "spilled bytes", "static smem"], rows)
