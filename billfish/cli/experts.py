"""`billfish bench experts`."""

from typing import Annotated

import typer

from billfish.cli import bench as cli_bench
from billfish.cli import show, show_bench
from billfish.cli.options import Batches, Json, Modes, Quick, Save, Symmetric

EXAMPLE = "Example: billfish bench experts --models qwen3-30b-a3b --m 1,16 --save e.json"


def bench_experts(
    models: Annotated[
        str, typer.Option(help="Mixtures by name, or a config.json of one; a list.")
    ] = "qwen3-30b-a3b,mixtral-8x7b",
    m: Batches = "1,16,64,256",
    group_size: Annotated[int, typer.Option(help="Weights along k that share a scale.")] = 128,
    sym: Symmetric = True,
    dtype: Annotated[str, typer.Option(help="Of activations: float16 or bfloat16.")] = "bfloat16",
    modes: Modes = "pdl,plain",
    quick: Quick = False,
    json_: Json = False,
    save: Save = None,
) -> None:
    """Time all experts of a layer, batch by batch, against torch's grouped products.

    Routings are random; the roofline counts the bytes of the experts that they touch.
    """
    from billfish.bench.experts import ExpertsBench, ExpertsRequest, Mixture
    from billfish.bench.shapes import parse_rows, words
    from billfish.bench.timing import QUICK, GraphCard, Rules

    request = ExpertsRequest(
        tuple(Mixture.of(name) for name in words(models)),
        parse_rows(m),
        group_size=group_size,
        symmetric=sym,
        dtype=dtype,
        modes=tuple(dict.fromkeys(words(modes))),
    )
    cli_bench.need_directory(save)
    rules = QUICK if quick else Rules()
    card = GraphCard(rules)
    with show.status(json_) as say:
        result = ExpertsBench(request, card, rules, say, cli_bench.keeper(save)).measure()
    cli_bench.present(result, json_, show_bench.experts, save)
