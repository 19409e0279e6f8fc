"""`bench tune`: searches a scheme's fastest tile configurations and writes their table.

The scheme's `tuner` module has the candidates and measures them.
"""

import importlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from billfish.bench.kernels import commit
from billfish.bench.shapes import ShapeSet
from billfish.bench.timing import Card, Rules
from billfish.errors import UserError
from billfish.schemes import DEFAULT
from billfish.schemes.registry import family

Result = dict[str, Any]


def tuner_of(scheme: str = DEFAULT) -> Any:
    name = family(scheme).tuner
    if name is None:
        raise UserError(f"scheme {scheme}: has nothing to tune.")
    return importlib.import_module(name)


def search(
    sets: tuple[ShapeSet, ...],
    rows: tuple[int, ...],
    card: Card,
    rules: Rules,
    say: Callable[[str], None],
    scheme: str = DEFAULT,
) -> Result:
    tuner = tuner_of(scheme)
    tuner.check(rows)
    linears = {(each.k, each.n): each for made in sets for each in made.linears}
    return {
        "device": card.facts()["name"],
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "measured": tuner.MEASURED,
        "layers": [tuner.search_layer(n, k, rows, card, rules, say) for k, n in linears],
    }


def merged(table: Result, found: Result) -> Result:
    """The table, in which this search replaces results for the same device and layers."""
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
    """JSON with one line per layer."""
    parts = []
    for search in table["searches"]:
        facts = ",\n ".join(
            f"{json.dumps(k)}: {json.dumps(v)}" for k, v in search.items() if k != "layers"
        )
        layers = ",\n  ".join(map(json.dumps, search["layers"]))
        parts.append(f'{{{facts},\n "layers": [\n  {layers}]}}')
    return '{"searches": [' + ",\n".join(parts) + "]}\n"
