"""`billfish convert`: a packed checkpoint in one dialect becomes one in another, numbers unchanged.

Everything that can be refused is refused before a byte is written: headers, configs and the small
tensors are read first. Then layers stream through one shard at a time. A failure leaves no target
behind. Knows no dialect by its details; those are in models/.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.formats.spec import first_nonfinite
from billfish.models.checkpoint import (
    copy_companions,
    finish,
    refuse_existing,
    shard_name,
    write_json,
    write_shard,
)
from billfish.models.compressed import CompressedTensors
from billfish.models.dialect import Dialect, check_stored, is_lm_head, refuse_unknown
from billfish.models.foreign import Awq, read_dialect
from billfish.models.gptq import Gptq
from billfish.models.hf import Checkpoint
from billfish.models.packed import (
    LEGACY_CONFIGS,
    by_module,
    check_bias,
    measure,
    read_quantization_config,
)
from billfish.schemes.w4a16 import W4A16

WRITERS: dict[str, type[Dialect]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": Gptq,
    "awq": Awq,
}
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Layer:
    """A packed linear of the source: what it is, and the names of its tensors in the file."""

    module: str
    scheme: W4A16
    n: int
    k: int
    dtype: torch.dtype  # of the scales
    names: dict[str, str]  # tensor -> name in the file


def convert(source: Path, target: Path, to: str) -> dict[str, Any]:
    """Write `target` in dialect `to`; returns what was done. No integer, scale or zero changes."""
    if to not in WRITERS:
        raise UserError(f"--to {to}: known are {', '.join(WRITERS)}.")
    refuse_existing(target)
    checkpoint = Checkpoint(source)
    dialect = read_dialect(read_quantization_config(checkpoint))
    if dialect.name == to:
        raise UserError(f"{source}: is {to} already.")
    layers = {layer.module: layer for layer in find_layers(checkpoint, dialect)}
    if not layers:
        raise UserError(f"{source}: its config says {dialect.name}, but no layer of it is packed.")
    for layer in layers.values():
        reason = WRITERS[to].refuses(layer.module, layer.scheme, layer.n, layer.k)
        if reason:
            raise UserError(f"{layer.module}: {reason}")
    schemes = {module: layer.scheme for module, layer in layers.items()}
    config = WRITERS[to].config(schemes, dense_linears(checkpoint, layers))
    existed = target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        shards = write_shards(checkpoint, target, layers, dialect, read_dialect(config))
        copy_companions(source, target)
        if to == "gptq":
            write_json(target / LEGACY_CONFIGS[0], config)
        write_json(target / "config.json", {**checkpoint.config, "quantization_config": config})
        finish(target, shards)
    except BaseException:
        shutil.rmtree(target)  # it was empty: all of it is ours
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
        "notes": notes(to, schemes),
    }


def find_layers(checkpoint: Checkpoint, dialect: Dialect) -> Iterator[Layer]:
    """Every packed linear, checked against its config but for the words themselves."""
    for module, names in by_module(checkpoint).items():
        if dialect.words not in names:
            continue
        scheme = dialect.scheme(module)
        if scheme is None:
            raise UserError(
                f"{module}: the file holds it packed, the quantization_config says it is not "
                "quantized. One of them belongs to another checkpoint."
            )
        try:
            layer = read_layer(checkpoint, dialect, module, scheme, names)
        except UserError as error:
            raise UserError(f"{module}: {error}") from None
        yield layer


def read_layer(
    checkpoint: Checkpoint, dialect: Dialect, module: str, scheme: W4A16, names: dict[str, str]
) -> Layer:
    refuse_unknown(dialect, scheme, names)
    scheme, n, k = measure(checkpoint, dialect, module, names)
    check_bias(checkpoint, names, n)
    names = {part: name for part, name in names.items() if part != "bias"}
    words = checkpoint.entries[names[dialect.words]]
    stored: dict[str, Tensor] = {
        part: torch.empty(words.shape, dtype=words.dtype, device="meta")
        if part == dialect.words
        else checkpoint.tensor(name)
        for part, name in names.items()
    }
    check_stored(dialect, scheme, stored, n, k)
    dtype = next(tensor.dtype for tensor in stored.values() if tensor.is_floating_point())
    return Layer(module, scheme, n, k, dtype, names)


def dense_linears(checkpoint: Checkpoint, layers: dict[str, Layer]) -> list[str]:
    """Matrices that are neither packed nor embeddings, and the lm_head, which may be tied."""
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
    layers: dict[str, Layer],
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


def dense(checkpoint: Checkpoint, name: str) -> Tensor:
    tensor = checkpoint.tensor(name)
    problem = first_nonfinite(name, tensor)
    if problem:
        file = checkpoint.path / checkpoint.entries[name].file
        raise UserError(f"{file}: {problem}; such a checkpoint is not written.")
    return tensor


def plan_shards(
    checkpoint: Checkpoint, layers: dict[str, Layer], writer: Dialect
) -> list[list[str | Layer]]:
    """Which layers, and which tensors that are copied, go into which shard."""
    owner = {name: layer for layer in layers.values() for name in layer.names.values()}
    units: dict[str, str | Layer] = {}
    for name in checkpoint:
        layer = owner.get(name)
        units[layer.module if layer else name] = layer or name
    shards: list[list[str | Layer]] = [[]]
    size = 0
    for unit in units.values():
        if isinstance(unit, str):
            nbytes = checkpoint.entries[unit].nbytes
        else:
            specs = writer.stored(unit.scheme, unit.n, unit.k, unit.dtype)
            nbytes = sum(spec.nbytes for spec in specs.values())
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += nbytes
    return shards


def translate(
    checkpoint: Checkpoint, layer: Layer, source: Dialect, writer: Dialect
) -> dict[str, Tensor]:
    stored = {part: checkpoint.tensor(name) for part, name in layer.names.items()}
    try:
        canonical = source.to_canonical(layer.scheme, stored, layer.n, layer.k)
        written = writer.from_canonical(layer.scheme, canonical)
    except UserError as error:
        raise UserError(f"{layer.module}: {error}") from None
    return {f"{layer.module}.{part}": tensor for part, tensor in written.items()}


def notes(to: str, schemes: dict[str, W4A16]) -> list[str]:
    """What a user should know about the result, in sentences."""
    said = []
    if any(scheme.has_g_idx for scheme in schemes.values()):
        said.append(
            "Columns are reordered (desc_act): Billfish runs this; vLLM 0.32 and the package "
            "compressed-tensors 0.20 no longer do."
        )
    if to == "gptq" and not all(scheme.symmetric for scheme in schemes.values()):
        said.append("Asymmetric, so written as gptq_v2: GPTQ v1 cannot store every zero point.")
    if to == "awq" and any(scheme.symmetric for scheme in schemes.values()):
        said.append("AWQ always stores zero points; this symmetric model's are all 8.")
    return said
