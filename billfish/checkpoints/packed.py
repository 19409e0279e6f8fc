"""Finds the packed linears of a checkpoint from names, headers and small tensors.

Gives the checkpoint's dialect, its packed modules with their sizes, and the tensors that the model
would have if it were dense.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from billfish.checkpoints.config import read_json
from billfish.checkpoints.dialects import read_dialect
from billfish.checkpoints.mxfp4 import METHOD, Decoded, is_mxfp4
from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.tensors import copied
from billfish.errors import UserError
from billfish.schemes.base import Scheme
from billfish.schemes.dialect import Dialect, check_stored, refuse_unknown

LEGACY_CONFIGS = ("quantize_config.json", "quant_config.json")
Shape = tuple[int, ...]


def read_quantization_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """quantization_config of config.json, or of the separate file of older GPTQ and AWQ models."""
    config = checkpoint.config.get("quantization_config")
    if isinstance(config, dict) and config:
        return config
    if config is not None:
        raise UserError(
            f"{checkpoint.path / 'config.json'}: quantization_config is {config!r}, expected an "
            "object that says how the model is quantized."
        )
    for name in LEGACY_CONFIGS:
        if (checkpoint.path / name).exists():
            return read_json(checkpoint.path / name)
    raise UserError(
        f"{checkpoint.path}: has no quantization_config, so it is not a quantized checkpoint. "
        "`billfish quantize` makes one of it."
    )


def recognize(checkpoint: Checkpoint) -> tuple[Dialect | None, str, str | None]:
    """(dialect, its name, None), or (None, method, why it is not supported); (None, "dense", None)
    if the checkpoint is not quantized; (None, "mxfp4", None) if it is gpt-oss as published."""
    if is_mxfp4(checkpoint.config):
        return None, METHOD, None
    legacy = any((checkpoint.path / name).exists() for name in LEGACY_CONFIGS)
    if not legacy and checkpoint.config.get("quantization_config") is None:
        return None, "dense", None
    config: dict[str, Any] = {}
    try:
        config = read_quantization_config(checkpoint)
        dialect = read_dialect(config)
    except UserError as error:
        method = config.get("quant_method") or config.get("method") or "unknown"
        return None, str(method), str(error)
    return dialect, dialect.label, None


def by_module(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Module -> {last part of a tensor's name -> full name}."""
    modules: dict[str, dict[str, str]] = {}
    for name in names:
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = name
    return modules


@dataclass(frozen=True)
class PackedLinear:
    """A packed linear, and the names of its tensors in the files."""

    module: str
    scheme: Scheme
    n: int
    k: int
    names: Mapping[str, str]  # last part of a tensor's name -> full name; without the bias


def packed_linears(checkpoint: Checkpoint, dialect: Dialect | None) -> Iterator[PackedLinear]:
    """All packed linears, checked against the config; values of large tensors are not read."""
    for module, names in by_module(checkpoint).items():
        if dialect is not None and dialect.words in names:
            try:
                found = measure(checkpoint, dialect, module, names)
                refuse_unknown(dialect, found.scheme, names)
                check_bias(checkpoint, names, found.n)
                small = small_tensors(checkpoint, dialect, found.scheme, names)
                check_stored(dialect, found.scheme, small, found.n, found.k)
            except UserError as error:
                raise UserError(f"{checkpoint.path}: {module}: {error}") from None
            yield found


def measure(
    checkpoint: Checkpoint, dialect: Dialect, module: str, names: Mapping[str, str]
) -> PackedLinear:
    """Scheme and size of a packed linear, from headers and one-dimensional tensors."""
    scheme = dialect.scheme(module)
    if scheme is None:
        raise UserError(
            f"{dialect.words} is there, and the quantization_config says this layer is not "
            "quantized. One of them belongs to another checkpoint."
        )
    stored = small_tensors(checkpoint, dialect, scheme, names)
    scheme = dialect.resolve_scheme(scheme, stored)
    n, k = dialect.size(scheme, stored)
    names = {part: name for part, name in names.items() if part != "bias"}
    return PackedLinear(module, scheme, n, k, names)


def small_tensors(
    checkpoint: Checkpoint, dialect: Dialect, scheme: Scheme, names: Mapping[str, str]
) -> dict[str, Tensor]:
    """Tensors of one layer: one-dimensional ones (weight_shape, g_idx) are read, the others are on
    the meta device."""
    stored: dict[str, Tensor] = {}
    for part, spec in dialect.stored(scheme, 0, 0, torch.float16).items():
        if part not in names:
            continue
        entry = checkpoint.entries[names[part]]
        fixed = 0 not in spec.shape  # like weight_shape, independent of the layer's size
        if len(entry.shape) != len(spec.shape) or (fixed and entry.shape != spec.shape):
            rule = f"{spec.shape}" if fixed else f"{len(spec.shape)} dimensions"
            raise UserError(f"{part} has shape {entry.shape}, expected {rule}.", part)
        small = len(entry.shape) == 1
        if small and entry.dtype != spec.dtype:
            raise UserError(f"{part} has dtype {entry.dtype}, expected {spec.dtype}.", part)
        meta = torch.empty(0 if small else entry.shape, dtype=entry.dtype, device="meta")
        stored[part] = checkpoint.tensor(names[part]) if small else meta
    return stored


def check_bias(checkpoint: Checkpoint, names: Mapping[str, str], n: int) -> None:
    shape = checkpoint.entries[names["bias"]].shape if "bias" in names else (n,)
    if shape != (n,):
        raise UserError(f"bias has shape {shape}, expected ({n},).", "bias")


def unpacked(
    checkpoint: Checkpoint, dialect: Dialect | None
) -> tuple[dict[str, Shape], frozenset[str]]:
    """Name -> shape as if every packed linear were dense, to compare with the model class. And what
    the model may lack: biases of packed linears (AutoGPTQ wrote zero biases) and tensors that the
    tensor manifest calls no part of it."""
    if is_mxfp4(checkpoint.config):
        checkpoint = Decoded(checkpoint)
    packed = {found.module: found for found in packed_linears(checkpoint, dialect)}
    shapes: dict[str, Shape] = {}
    for module, names in by_module(checkpoint).items():
        if module in packed:
            shapes[f"{module}.weight"] = (packed[module].n, packed[module].k)
            names = {part: name for part, name in names.items() if part == "bias"}
        shapes |= {name: checkpoint.entries[name].shape for name in names.values()}
    spare = frozenset(f"{module}.bias" for module in packed)
    return shapes, spare | copied(checkpoint.path)
