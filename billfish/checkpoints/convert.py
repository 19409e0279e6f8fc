"""`billfish convert`: rewrites a packed checkpoint in another dialect, without changing a number.

Headers, configs and small tensors are checked before a byte is written. Then layers are converted
one shard at a time. After a failure the target is removed.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from billfish.checkpoints.dialects import dialects, read_dialect
from billfish.checkpoints.packed import (
    PackedLinear,
    by_module,
    packed_linears,
    read_quantization_config,
)
from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.tensors import QUANTIZED, read_tensors, write_tensors
from billfish.checkpoints.write import (
    copy_companions,
    finish,
    refuse_existing,
    shard_name,
    write_json,
    write_shard,
)
from billfish.errors import UserError
from billfish.formats.spec import first_nonfinite
from billfish.schemes.dialect import Dialect, is_lm_head

SHARD_BYTES = 5 * 10**9


def convert(source: Path, target: Path, to: str) -> dict[str, Any]:
    """Write `target` in dialect `to` and return a report."""
    writers = {name: dialect for name, dialect in dialects().items() if dialect.writable}
    if to not in writers:
        raise UserError(f"--to {to}: known are {', '.join(writers)}.")
    writer = writers[to]
    refuse_existing(target)
    checkpoint = Checkpoint(source)
    dialect = read_dialect(read_quantization_config(checkpoint))
    if dialect.name == to:
        raise UserError(f"{source}: is {to} already.")
    layers = {layer.module: layer for layer in packed_linears(checkpoint, dialect)}
    if not layers:
        raise UserError(f"{source}: its config says {dialect.name}, but no layer of it is packed.")
    for layer in layers.values():
        reason = writer.refuses(layer.module, layer.scheme, layer.n, layer.k)
        if reason:
            raise UserError(f"{layer.module}: {reason}")
    schemes = {module: layer.scheme for module, layer in layers.items()}
    config = writer.config(schemes, dense_linears(checkpoint, layers))
    existed = target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        shards = write_shards(checkpoint, target, layers, dialect, read_dialect(config))
        write_origin(checkpoint, target, shards)
        copy_companions(source, target)
        if writer.legacy_config is not None:
            write_json(target / writer.legacy_config, config)
        write_json(target / "config.json", {**checkpoint.config, "quantization_config": config})
        finish(target, shards)
    except BaseException:
        shutil.rmtree(target)  # it was empty before
        if existed:
            target.mkdir()
        raise
    return {
        "from": dialect.name,
        "to": config.get("checkpoint_format", to),
        "layers": len(layers),
        "bytes_read": checkpoint.nbytes,
        "bytes_written": sum((target / shard).stat().st_size for shard in shards),
        "shards": shards,
        "notes": writer.notes(schemes.values()),
    }


def dense_linears(checkpoint: Checkpoint, layers: dict[str, PackedLinear]) -> list[str]:
    """Modules with dense weight matrices, without embeddings, and the lm_head even if it is
    tied."""
    dense = [
        name.removesuffix(".weight")
        for name, entry in checkpoint.entries.items()
        if name.endswith(".weight") and len(entry.shape) == 2 and "embed" not in name
    ]
    known = [*dense, *layers]
    return dense if any(is_lm_head(module) for module in known) else [*dense, "lm_head"]


def write_shards(
    checkpoint: Checkpoint,
    target: Path,
    layers: dict[str, PackedLinear],
    source: Dialect,
    writer: Dialect,
) -> list[str]:
    plan = plan_shards(checkpoint, layers, writer)
    shards = [shard_name(i + 1, len(plan)) for i in range(len(plan))]
    for shard, units in zip(shards, plan, strict=True):
        tensors: dict[str, Tensor] = {}
        for unit in units:
            if isinstance(unit, str):
                tensors[unit] = dense(checkpoint, unit)
            else:
                tensors.update(translate(checkpoint, unit, source, writer))
        write_shard(target / shard, tensors)
    return shards


def write_origin(checkpoint: Checkpoint, target: Path, shards: list[str]) -> None:
    """The tensor manifest of the source, if it has one, with the names that linears have now."""
    placed = read_tensors(checkpoint.path)
    if placed is None:
        return
    now = by_module(Checkpoint.of_files([str(target / shard) for shard in shards]))
    for name, each in placed.items():
        if each.how == QUANTIZED:
            modules = dict.fromkeys(full.rpartition(".")[0] for full in each.names)
            parts = [item for module in modules for item in now[module].items()]
            names = tuple(full for part, full in parts if part != "bias")
            placed[name] = replace(each, names=names)
    write_tensors(target, placed, [target / shard for shard in shards])


def dense(checkpoint: Checkpoint, name: str) -> Tensor:
    tensor = checkpoint.tensor(name)
    problem = first_nonfinite(name, tensor)
    if problem:
        file = checkpoint.path / checkpoint.entries[name].file
        raise UserError(f"{file}: {problem}; such a checkpoint is not written.")
    return tensor


def plan_shards(
    checkpoint: Checkpoint, layers: dict[str, PackedLinear], writer: Dialect
) -> list[list[str | PackedLinear]]:
    """For each shard: the packed layers to convert and the names of tensors to copy."""
    owner = {name: layer for layer in layers.values() for name in layer.names.values()}
    units: dict[str, str | PackedLinear] = {}
    for name in checkpoint:
        layer = owner.get(name)
        units[layer.module if layer else name] = layer or name
    shards: list[list[str | PackedLinear]] = [[]]
    size = 0
    for unit in units.values():
        if isinstance(unit, str):
            nbytes = checkpoint.entries[unit].nbytes
        else:
            held = (checkpoint.entries[name].dtype for name in unit.names.values())
            scales = next(dtype for dtype in held if dtype.is_floating_point)
            specs = writer.stored(unit.scheme, unit.n, unit.k, scales)
            nbytes = sum(spec.nbytes for spec in specs.values())
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += nbytes
    return shards


def translate(
    checkpoint: Checkpoint, layer: PackedLinear, source: Dialect, writer: Dialect
) -> dict[str, Tensor]:
    stored = {part: checkpoint.tensor(name) for part, name in layer.names.items()}
    try:
        canonical = source.to_canonical(layer.scheme, stored, layer.n, layer.k)
        written = writer.from_canonical(layer.scheme, canonical)
    except UserError as error:
        raise UserError(f"{layer.module}: {error}") from None
    return {f"{layer.module}.{part}": tensor for part, tensor in written.items()}
