"""The search that makes tuned.json: times every tile configuration of w4a16_batch on this GPU.

Configurations that tiles.py's cost model expects to take more than twice the shortest time are
skipped. The caller times the calls: bench/timing.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from billfish.errors import UserError
from billfish.kernels import tiles
from billfish.kernels.clusters import MOST_TOKENS
from billfish.kernels.device import gpu
from billfish.schemes.w4a16.cuda import batch
from billfish.schemes.w4a16.cuda.instances import BATCH_ARCH
from billfish.schemes.w4a16.cuda.op import CudaOp
from billfish.schemes.w4a16.cuda.plan import plan
from billfish.schemes.w4a16.scheme import W4A16

HOPELESS = 2.0  # times the shortest time that the cost model expects
SCHEME, DTYPE = W4A16(4, 128), torch.float16
TABLE = batch.TABLE
MEASURED = (
    "4 bit, group 128, symmetric, fp16; cuts are [tokens, bands, stripes, splits, twins, teams if "
    "three], us of the fastest"
)


def check(rows: tuple[int, ...]) -> None:
    wrong = [m for m in rows if m < batch.FEWEST]
    if wrong:
        raise UserError(
            f"m {', '.join(map(str, wrong))}: w4a16_batch runs {batch.FEWEST} tokens and more; "
            "fewer go elsewhere."
        )


def worth_trying(m: int, n: int, k_tiles: int, record_bytes: int, card: Any) -> list[tiles.Launch]:
    """Configurations that fit and are not hopeless by the cost model, the most promising first."""
    fit = (
        batch.launch(cut, m, n, k_tiles, record_bytes, card)
        for cut in tiles.cuts(batch.INSTANCES, batch.COSTS.clusters, batch.COSTS.twin_us)
    )
    found = sorted(
        (tiles.model_us(how, k_tiles, card, batch.COSTS), i, how)
        for i, how in enumerate(fit)
        if how
    )
    return [how for us, _, how in found if us <= HOPELESS * found[0][0]]


def search_layer(
    n: int, k: int, rows: tuple[int, ...], card: Any, rules: Any, say: Callable[[str], None]
) -> dict[str, Any]:
    """The fastest configuration of one layer for each m; none where w4a16_decode, which takes few
    tokens, is faster. `card` and `rules` are bench/timing.py's."""
    found, generator = gpu(card.device), torch.Generator(card.device).manual_seed(0)
    ops: list[CudaOp] = []
    while not ops or len(ops) < rules.copies(ops[0].nbytes(), rules.least_copies):
        ops.append(CudaOp(SCHEME, SCHEME.random_tensors(n, k, DTYPE, generator)))
    how_it_runs = plan(found.index, n, k, ops[0].kind, DTYPE)
    if not how_it_runs.batches:
        raise UserError(f"{found.name} is {found.arch}; w4a16_batch needs {BATCH_ARCH}.")
    layer: dict[str, Any] = {"k": k, "n": n, "cuts": {}, "us": {}}
    for m in rows:
        x = torch.randn(m, k, dtype=DTYPE, device=card.device, generator=generator)
        launches = rules.launches(len(ops), max(n * k / 9e6, 1.0))
        timings: list[tuple[float, list[int]]] = []
        if m <= MOST_TOKENS:
            path, out = how_it_runs.few_path(m), x.new_empty(m, n)
            calls = [partial(path, x, op.records, None, out) for op in ops]
            timings.append((card.time(calls, launches, "pdl").median, []))
        for how in worth_trying(m, n, how_it_runs.k_tiles, how_it_runs.kind.record_bytes, found):
            cut = how.cut
            numbers = [cut.tokens, cut.bands, cut.stripes, cut.splits, cut.twins]
            numbers += [cut.teams] if cut.teams != tiles.TEAMS else []
            say(f"{k} x {n}, m = {m}: {numbers}")
            how_it_runs.cuts[m, False] = how
            how_it_runs.paths.clear()
            timing = card.time([partial(op, x) for op in ops], launches, "pdl")
            timings.append((timing.median, numbers))
        del how_it_runs.cuts[m, False]
        how_it_runs.paths.clear()
        us, best = min(timings)
        if best:
            layer["cuts"][str(m)], layer["us"][str(m)] = best, round(us, 1)
    return layer
