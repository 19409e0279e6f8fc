"""`billfish inspect`: what a checkpoint directory contains.

Reads headers and the few tensors that give a layer's size. Sizes include scales, zeros and shapes.
Results are plain dicts for JSON; nothing is printed or changed here.
"""

from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from billfish.checkpoints import mxfp4
from billfish.checkpoints.packed import PackedLinear, by_module, measure, recognize
from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.tensors import COPIED, Placed, counts, dtype_name, read_tensors
from billfish.checkpoints.write import MANIFEST
from billfish.errors import UserError
from billfish.schemes.dialect import Dialect
from billfish.schemes.registry import fields

Rows = dict[tuple[Any, ...], dict[str, Any]]


def inspect(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint; for an unsupported quantized one, its method and its tensors.

    "problems" lists packed layers that contradict their config. Their tensors count as dense, and
    values that are unknown then (parameters, bits of the model) are None.
    """
    checkpoint = Checkpoint(path)
    return describe(checkpoint, *recognize(checkpoint))


def describe(
    checkpoint: Checkpoint, dialect: Dialect | None, name: str, unsupported: str | None
) -> dict[str, Any]:
    path, modules = checkpoint.path, by_module(checkpoint)
    layers: dict[str, PackedLinear] = {}
    packs = mxfp4.is_mxfp4(checkpoint.config)
    wrong = mxfp4.problems(checkpoint.entries) if packs else []
    problems = [f"{tensor}: {told}" for tensor, told in wrong]
    for module, names in modules.items():
        if dialect is not None and dialect.words in names:
            try:
                layers[module] = measure(checkpoint, dialect, module, names)
            except UserError as error:
                problems.append(f"{module}: {error}")

    placed: dict[str, Placed] | None = None
    try:
        placed = read_tensors(path)
    except UserError as error:
        problems.append(str(error))
    kinds = {} if dialect is None else dialect.kinds
    rows: Rows = {}
    nbytes = Counter({"packed": 0, "scales": 0, "zeros": 0, "other": 0, "dense": 0})
    weights = parameters = dense_tensors = 0
    for module, names in modules.items():
        kind = module.rpartition(".")[2]
        packed = {p: tensor for p, tensor in names.items() if module in layers and p != "bias"}
        if packed:
            found = layers[module]
            weights += found.n * found.k
            for part, tensor in packed.items():
                nbytes[kinds.get(part, "other")] += checkpoint.entries[tensor].nbytes
            own = sum(checkpoint.entries[tensor].nbytes for tensor in packed.values())
            add_row(rows, kind, (found.n, found.k), own, scheme=fields(found.scheme))
        for part, tensor in names.items():
            if part not in packed:
                entry = checkpoint.entries[tensor]
                dense_tensors += 1
                parameters += mxfp4.numbers(tensor, entry) if packs else prod(entry.shape)
                nbytes["dense"] += entry.nbytes
                full = kind if part == "weight" else f"{kind}.{part}".removeprefix(".")
                add_row(rows, full, entry.shape, entry.nbytes, dtype=dtype_name(entry.dtype))
    parameters += weights
    known = unsupported is None and not problems
    schemes = Counter(found.scheme for found in layers.values())
    tensors_in = Counter(entry.file for entry in checkpoint.entries.values())
    total = nbytes.total()
    return {
        "path": str(path),
        "architecture": next(iter(checkpoint.config.get("architectures") or []), None),
        "model_type": checkpoint.config.get("model_type"),
        "dtype": checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype"),
        "dialect": name,
        "unsupported": unsupported,
        "made_by_billfish": (path / MANIFEST).is_file(),
        "schemes": [{**fields(s), "count": count} for s, count in schemes.most_common()],
        "packed_linears": len(layers),
        "dense_tensors": dense_tensors,
        "parameters": parameters if known else None,
        "packed_parameters": weights,
        "bits_per_weight": {
            "packed": (total - nbytes["dense"]) * 8 / weights if weights else None,
            "model": total * 8 / parameters if known and parameters else None,
        },
        "bytes": {**nbytes, "total": total},
        "files": [
            {"name": file, "bytes": (path / file).stat().st_size, "tensors": count}
            for file, count in sorted(tensors_in.items())
        ],
        "kinds": list(rows.values()),
        "source": origin(placed),
        "problems": problems,
        "tensors": [
            {
                "name": tensor,
                "dtype": dtype_name(entry.dtype),
                "shape": list(entry.shape),
                "bytes": entry.nbytes,
                "file": entry.file,
            }
            for tensor, entry in checkpoint.entries.items()
        ],
    }


def origin(placed: dict[str, Placed] | None) -> dict[str, Any] | None:
    """What became of the source's tensors, as the tensor manifest says; None without one."""
    if placed is None:
        return None
    copied = sorted(name for name, each in placed.items() if each.how == COPIED)
    return {"tensors": len(placed), **counts(placed), "copied_names": copied}


def add_row(
    rows: Rows,
    kind: str,
    shape: Iterable[int],
    nbytes: int,
    scheme: dict[str, Any] | None = None,  # for a packed linear
    dtype: str | None = None,  # for a dense tensor
) -> None:
    """Add a linear or tensor to the table row of its kind, shape and scheme or dtype."""
    shape = list(shape)
    key = (kind, *shape, str(scheme), dtype)
    empty = {"kind": kind, "shape": shape, "count": 0, "scheme": scheme, "dtype": dtype, "bytes": 0}
    row = rows.setdefault(key, empty)
    row["count"] += 1
    row["bytes"] += nbytes
    row["bits_per_weight"] = row["bytes"] * 8 / max(row["count"] * prod(shape), 1)
