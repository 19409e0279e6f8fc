"""The search behind schemes/w4a16/tuned.json: every cut of w4a16_batch, timed on this card.

Cuts that the model of batch.py expects to take more than twice the shortest are not tried.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from billfish.bench.kernels import commit, random_tensors
from billfish.bench.shapes import Linear, ShapeSet
from billfish.bench.timing import Card, Rules
from billfish.errors import UserError
from billfish.kernels.device import gpu
from billfish.schemes.w4a16 import W4A16, batch, cuda, tile

Result = dict[str, Any]
HOPELESS = 2.0  # times the model's shortest
SCHEME, DTYPE = W4A16(4, 128), torch.float16


def worth_trying(m: int, n: int, k_tiles: int, record_bytes: int, card: Any) -> list[batch.Launch]:
    """Of all cuts that fit, those the model does not give up; the most promising first."""
    fit = (batch.launch(cut, m, n, k_tiles, record_bytes, card) for cut in batch.cuts())
    found = sorted((batch.model_us(how, k_tiles, card), i, how) for i, how in enumerate(fit) if how)
    return [how for us, _, how in found if us <= HOPELESS * found[0][0]]


def search(
    sets: tuple[ShapeSet, ...],
    rows: tuple[int, ...],
    card: Card,
    rules: Rules,
    say: Callable[[str], None],
) -> Result:
    wrong = [m for m in rows if m <= tile.MOST_TOKENS]
    if wrong:
        raise UserError(
            f"m {', '.join(map(str, wrong))}: w4a16_batch runs {tile.MOST_TOKENS + 1} tokens and "
            "more; fewer go elsewhere."
        )
    linears = {(each.k, each.n): each for made in sets for each in made.linears}
    return {
        "device": card.facts()["name"],
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "measured": "4 bit, group 128, symmetric, fp16; cuts are [tokens, bands, stripes], "
        "us of the fastest",
        "layers": [_layer(linear, rows, card, rules, say) for linear in linears.values()],
    }


def _layer(
    linear: Linear, rows: tuple[int, ...], card: Card, rules: Rules, say: Callable[[str], None]
) -> Result:
    found, generator = gpu(card.device), torch.Generator(card.device).manual_seed(0)
    ops: list[cuda.CudaOp] = []
    while not ops or len(ops) < rules.copies(ops[0].nbytes(), rules.least_copies):
        ops.append(cuda.CudaOp(SCHEME, random_tensors(SCHEME, linear, DTYPE, generator)))
    plan = cuda.plan(found.index, linear.n, linear.k, ops[0].kind, DTYPE)
    if not plan.batches:
        raise UserError(f"{found.name} is {found.arch}; w4a16_batch needs {cuda.BATCH_ARCH}.")
    layer: Result = {"k": linear.k, "n": linear.n, "cuts": {}, "us": {}}
    for m in rows:
        x = torch.randn(m, linear.k, dtype=DTYPE, device=card.device, generator=generator)
        launches = rules.launches(len(ops), max(linear.n * linear.k / 9e6, 1.0))
        timings = []
        for how in worth_trying(m, linear.n, plan.k_tiles, plan.kind.record_bytes, found):
            cut = how.cut
            say(f"{linear.k} x {linear.n}, m = {m}: {cut.tokens} x {cut.bands} x {cut.stripes}")
            plan.cuts[m, False] = how
            timing = card.time([partial(op, x) for op in ops], launches, "pdl")
            timings.append((timing.median, [cut.tokens, cut.bands, cut.stripes]))
        del plan.cuts[m, False]
        us, best = min(timings)
        layer["cuts"][str(m)], layer["us"][str(m)] = best, round(us, 1)
    return layer


def merged(table: Result, found: Result) -> Result:
    """The table with this search in place of what it has of the same device and layers."""
    sizes = {(layer["k"], layer["n"]) for layer in found["layers"]}
    searches = []
    for search in table["searches"]:
        layers = search["layers"]
        if search["device"] == found["device"]:
            layers = [layer for layer in layers if (layer["k"], layer["n"]) not in sizes]
        if layers:
            searches.append({**search, "layers": layers})
    return {"searches": [*searches, found]}


def text(table: Result) -> str:
    """JSON with a line for each layer."""
    parts = []
    for search in table["searches"]:
        facts = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in search.items()
                            if k != "layers")  # fmt: skip
        layers = ",\n  ".join(map(json.dumps, search["layers"]))
        parts.append(f'{{{facts},\n "layers": [\n  {layers}]}}')
    return '{"searches": [' + ",\n".join(parts) + "]}\n"
