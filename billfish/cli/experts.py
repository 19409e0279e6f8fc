"""`billfish bench experts`."""

from typing import Annotated

import typer

from billfish.cli import bench as cli_bench
from billfish.cli import show, show_bench
from billfish.cli.options import Json, Save
from billfish.errors import UserError

EXAMPLE = "Example: billfish bench experts --models qwen3-30b-a3b --m 1,16 --save e.json"


def bench_experts(
    models: Annotated[
        str, typer.Option(help="Mixtures by name, or a config.json of one; a list.")
    ] = "qwen3-30b-a3b,mixtral-8x7b",
    m: Annotated[str, typer.Option(help="Batch sizes: 1,2,4 or 1-16,32.")] = "1,16,64,256",
    group_size: Annotated[int, typer.Option(help="Weights along k that share a scale.")] = 128,
    sym: Annotated[bool, typer.Option("--sym/--asym", help="Without zero points, or with.")] = True,
    dtype: Annotated[str, typer.Option(help="Of activations: float16 or bfloat16.")] = "bfloat16",
    modes: Annotated[
        str, typer.Option(help="Launches: pdl (programmatic dependent launch), plain, or both.")
    ] = "pdl,plain",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer replays: sooner, less exact.")
    ] = False,
    json_: Json = False,
    save: Save = None,
) -> None:
    """Time all experts of a layer, batch by batch, against torch's grouped products.

    Routings are random; the roofline counts the bytes of the experts that they touch.
    """
    from billfish.bench.experts import ExpertsBench, ExpertsRequest, Mixture
    from billfish.bench.kernels import DTYPES
    from billfish.bench.shapes import parse_rows, words
    from billfish.bench.timing import MODES, QUICK, GraphCard, Rules

    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: known are {', '.join(DTYPES)}.")
    asked = tuple(dict.fromkeys(words(modes)))
    if not asked or not set(asked) <= set(MODES):
        raise UserError(f"--modes {modes}: known are {', '.join(MODES)}.")
    request = ExpertsRequest(
        tuple(Mixture.of(name) for name in words(models)),
        parse_rows(m),
        group_size=group_size,
        symmetric=sym,
        dtype=dtype,
        modes=asked,
    )
    cli_bench.need_directory(save)
    rules = QUICK if quick else Rules()
    card = GraphCard(rules)
    with show.status(json_) as say:
        result = ExpertsBench(request, card, rules, say, cli_bench.keeper(save)).measure()
    cli_bench.present(result, json_, show_bench.experts, save)
