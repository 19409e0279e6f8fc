"""`billfish plan` and `billfish quantize`: the same options, a request, and its result shown."""

from pathlib import Path
from typing import Annotated, Any

import typer

from billfish.cli import show
from billfish.cli.options import Device, Dtype, DtypeOption, Json, Model
from billfish.cli.progress import progress
from billfish.errors import UserError


def _group_size(given: str) -> int | str:
    try:
        return given if given == "auto" else int(given)
    except ValueError:
        raise typer.BadParameter(f"{given!r} is neither auto nor a whole number.") from None


Scheme = Annotated[
    str,
    typer.Option(
        help="Format of the quantized weights: w4a16; w2416: 2- and 4-bit groups and 16-bit "
        "outliers in one matrix; w4ax: 4-bit weights and 8-bit activations, or with --set "
        "activations=fmpq activations of 4 and 8 bits; or w4a16_24: two of every four 4-bit "
        "weights."
    ),
]
Method = Annotated[
    str,
    typer.Option(
        help="How codes are chosen: gptq, awq, rtn; or finetune: gptq, then training of codes and "
        "scales, which takes far longer."
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(min=0, help="finetune: steps of training each block; plan shows the default."),
]
EndToEnd = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="finetune: steps of distillation after the last block, which trains the scales of the "
        "whole model; 0: none; plan shows the default.",
    ),
]
Bits = Annotated[
    int | None, typer.Option(min=2, max=8, help="Bits per weight; 4, if none are given.")
]
BitsBudget = Annotated[
    float | None,
    typer.Option(
        help="w2416: true bits per weight, with everything that is stored; 2.91, if none are given."
    ),
]
GroupSize = Annotated[
    Any,
    typer.Option(
        parser=_group_size,
        metavar="auto|INTEGER",
        help="Weights along k that share a scale; -1: a whole row; auto: the largest of 128, 64 "
        "and 32 that divides every k.",
    ),
]
HeadBits = Annotated[
    int | None,
    typer.Option(
        metavar="8|4",
        help="Pack the head (lm_head), too, in so many bits, symmetric, in the largest groups that "
        "fit; without it the head stays in 16 bits. A head that is tied to the embedding is stored "
        "beside it.",
    ),
]
AllowSkipped = Annotated[
    bool,
    typer.Option(
        "--allow-skipped",
        help="Accept a --group-size that leaves more than 5 % of the weights in 16 bits.",
    ),
]
Symmetric = Annotated[
    bool | None,
    typer.Option("--sym/--asym", help="No zero points (the default), or one for each group."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other parameter of the scheme."),
]
Data = Annotated[
    str, typer.Option(help="Calibration text: .txt, .jsonl, .parquet, a hub data set, or 'sample'.")
]
Samples = Annotated[int, typer.Option(min=1, help="Calibration sequences.")]
Seqlen = Annotated[int, typer.Option(min=16, help="Their greatest length in tokens.")]
Seed = Annotated[int, typer.Option(help="Of the random choice of calibration sequences.")]
StoredDtype = Annotated[
    Dtype,
    typer.Option(help="Of scales and unquantized tensors; auto: the model's, fp32 becomes bf16."),
]


def plan(
    model: Model,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where quantize would write.")
    ] = None,
    scheme: Scheme = "w4a16",
    method: Method = "gptq",
    steps: Steps = None,
    end_to_end: EndToEnd = None,
    bits: Bits = None,
    bits_budget: BitsBudget = None,
    group_size: GroupSize = "auto",
    head_bits: HeadBits = None,
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
        scheme,
        _options(bits, bits_budget, group_size, sym, parameters),
        dtype,
        stored_dtype,
        output=output,
        method=method,
        steps=steps,
        end_to_end=end_to_end,
        data=data,
        nsamples=nsamples,
        seqlen=seqlen,
        seed=seed,
        device=device,
        allow_skipped=allow_skipped,
        head_bits=head_bits,
    )
    show.present(make_plan(request), json_, show.plan)


def quantize(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write.")],
    scheme: Scheme = "w4a16",
    method: Method = "gptq",
    steps: Steps = None,
    end_to_end: EndToEnd = None,
    bits: Bits = None,
    bits_budget: BitsBudget = None,
    group_size: GroupSize = "auto",
    head_bits: HeadBits = None,
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
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Run the result against the original on a few texts and say if it is broken.",
        ),
    ] = True,
    json_: Json = False,
) -> None:
    """Quantize a checkpoint. If it is interrupted, the same command resumes it."""
    from billfish.evaluate.report import write_report
    from billfish.offline.driver import quantize as run

    request = _request(
        model,
        scheme,
        _options(bits, bits_budget, group_size, sym, parameters),
        dtype,
        stored_dtype,
        output=output,
        method=method,
        steps=steps,
        end_to_end=end_to_end,
        data=data,
        nsamples=nsamples,
        seqlen=seqlen,
        seed=seed,
        device=device,
        allow_skipped=allow_skipped,
        head_bits=head_bits,
        kv=kv,
        check=check,
    )
    with progress(quiet=json_) as tell:
        result = run(request, resume, tell)
    if report is not None:
        write_report({"model": {"path": str(output)}, "quantization": result}, report)
    show.present(result, json_, show.quantized)


def _options(
    bits: int | None,
    budget: float | None,
    group_size: Any,
    sym: bool | None,
    parameters: list[str] | None,
) -> dict[str, Any]:
    """The scheme's parameters that were given; the scheme checks them."""
    given = {"bits": bits, "budget": budget, "group_size": group_size, "symmetric": sym}
    options = {name: value for name, value in given.items() if value not in (None, "auto")}
    for text in parameters or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UserError(f"--set {text}: is NAME=VALUE.")
        options[name] = value
    return options


def _request(
    model: str, scheme: str, options: dict[str, Any], dtype: Dtype, stored: Dtype, **given: Any
) -> Any:
    """`given`: fields of QuantizeRequest as they are."""
    import torch

    from billfish.checkpoints.read import resolve
    from billfish.offline.request import QuantizeRequest
    from billfish.schemes.registry import from_options

    return QuantizeRequest(
        model=resolve(model),
        scheme=from_options(scheme, options),
        dtype=dtype.value,
        stored_dtype=None if stored == Dtype.auto else getattr(torch, stored.value),
        **given,
    )
