"""Arguments and options that several commands have."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Dtype(StrEnum):
    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


Model = Annotated[str, typer.Argument(help="Checkpoint directory or hub id.")]
Dir = Annotated[Path, typer.Argument(help="Checkpoint directory.")]
DtypeOption = Annotated[
    Dtype,
    typer.Option(help="To compute in; auto: the model's, on a CPU fp32 where that is faster."),
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1 or auto.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Save = Annotated[
    Path | None,
    typer.Option(help="Write the result to this file, r.json; kept up to date while measuring."),
]

# Of `bench kernels` and `bench experts`.
Batches = Annotated[str, typer.Option(help="Batch sizes: 1,2,4 or 1-16,32.")]
Symmetric = Annotated[bool, typer.Option("--sym/--asym", help="Without zero points, or with.")]
Modes = Annotated[
    str, typer.Option(help="Launches: pdl (programmatic dependent launch), plain, or both.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer replays: sooner, less exact.")]
