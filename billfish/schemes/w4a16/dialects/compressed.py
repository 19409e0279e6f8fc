"""compressed-tensors `pack-quantized`, the format that Billfish writes for w4a16: its tensors are
the canonical tensors.

This module reads and writes the quantization_config: which modules the targets and the ignore list
select, and which settings are w4a16; others are refused by name. It does not use the
compressed-tensors package, of which every engine pins another version.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.formats.spec import TensorSpec
from billfish.schemes.base import Tensors
from billfish.schemes.dialect import (
    Config,
    Plain,
    check_stored,
    common_scheme,
    flag,
    integer,
    is_lm_head,
    method_of,
    names,
    pattern,
    section,
)
from billfish.schemes.w4a16.columns import check_groups
from billfish.schemes.w4a16.scheme import G_IDX, W4A16

METHOD = "compressed-tensors"
FORMAT = "pack-quantized"
# The release whose format is written; tests compare with the package itself.
VERSION = "0.20.0"
LINEAR = "Linear"


@dataclass(frozen=True)
class CompressedTensors(Plain):
    name: ClassVar[str] = METHOD
    zero_scales: ClassVar[bool] = False
    known_as: ClassVar[str] = f"{METHOD} ({FORMAT})"
    words: ClassVar[str] = "weight_packed"
    kinds: ClassVar[Mapping[str, str]] = {
        "weight_packed": "packed",
        "weight_scale": "scales",
        "weight_zero_point": "zeros",
    }

    targets: Mapping[str, W4A16]  # exact name, "re:..." or "Linear" -> scheme
    ignore: tuple[str, ...]

    @staticmethod
    def claims(config: Config) -> bool:
        return method_of(config) == METHOD

    @classmethod
    def read(cls, config: Config) -> "CompressedTensors":
        config = section(config, "quantization_config") or config  # transformers 4 nested it
        _refuse_foreign_parts(config)
        groups = section(config, "config_groups")
        if not groups:
            raise UserError("quantization_config: compressed-tensors without config_groups.")
        targets: dict[str, W4A16] = {}
        for name, group in groups.items():
            if not isinstance(group, Mapping):
                raise UserError(
                    f"quantization_config: config group {name!r} is a preset name, not weights."
                )
            scheme = _read_group(name, group, config.get("format"))
            for target in names(group, "targets"):
                targets[target] = scheme
        ignore = tuple(names(config, "ignore"))
        for expression in (*targets, *ignore):
            _matches(expression, "")  # raises now if it is invalid
        return CompressedTensors(targets, ignore)

    def scheme(self, module: str) -> W4A16 | None:
        if any(_matches(entry, module) for entry in self.ignore):
            return None
        # The package's precedence: exact name, then sorted regular expressions, then class.
        if module in self.targets:
            return self.targets[module]
        for target in sorted(self.targets):
            if target.startswith("re:") and _matches(target, module):
                return self.targets[target]
        return self.targets.get(LINEAR)

    def stored(self, scheme: W4A16, n: int, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return scheme.tensors(n, k, dtype)

    def size(self, scheme: W4A16, stored: Tensors) -> tuple[int, int]:
        if "weight_shape" not in stored:
            raise UserError(
                "weight_shape is missing, which says how large the layer is.", part="weight_shape"
            )
        return scheme.size(stored)

    def to_canonical(self, scheme: W4A16, stored: Tensors, n: int, k: int) -> dict[str, Tensor]:
        check_stored(self, scheme, stored, n, k)
        if scheme.size(stored) != (n, k):
            raise UserError(
                f"weight_shape says {scheme.size(stored)}, the layer is {n} x {k}. "
                "The file does not belong to this config.json.",
                part="weight_shape",
            )
        if scheme.has_g_idx:
            check_groups(scheme, stored, G_IDX, k)
        return {name: stored[name] for name in scheme.tensors(n, k, torch.float16)}

    def from_canonical(self, scheme: W4A16, tensors: Tensors) -> dict[str, Tensor]:
        return dict(tensors)

    @staticmethod
    def config(schemes: Mapping[str, W4A16], ignore: Sequence[str]) -> dict[str, Any]:
        distinct = dict.fromkeys(schemes.values())
        if len(distinct) == 1:  # vLLM's head is of another class than Linear
            heads = [module for module in schemes if is_lm_head(module)]
            return _write_groups({common_scheme(schemes): [LINEAR, *heads]}, ignore)
        # Names only: engines differ in which wins if a name and "Linear" both match.
        groups: dict[W4A16, list[str]] = {scheme: [] for scheme in distinct}
        for module, scheme in schemes.items():
            groups[scheme].append(module)
        return _write_groups(groups, ignore)

    @staticmethod
    def config_of_all(scheme: W4A16, ignore: Sequence[str]) -> dict[str, Any]:
        return _write_groups({scheme: [LINEAR]}, ignore)

    @staticmethod
    def notes(schemes: Iterable[W4A16]) -> list[str]:
        if not any(scheme.has_g_idx for scheme in schemes):
            return []
        return [
            "Columns are reordered (desc_act): Billfish runs this; vLLM 0.32 and the package "
            "compressed-tensors 0.20 no longer do."
        ]


def _write_groups(groups: Mapping[W4A16, list[str]], ignore: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": METHOD,
        "version": VERSION,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": targets,
                "weights": _write_weights(scheme),
                "input_activations": None,
                "output_activations": None,
                "format": FORMAT,
            }
            for i, (scheme, targets) in enumerate(groups.items())
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
    }


def _write_weights(scheme: W4A16) -> dict[str, Any]:
    channel = scheme.group_size == -1
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if channel else "group",
        "group_size": None if channel else scheme.group_size,
        "dynamic": False,
    }
    if scheme.has_g_idx:
        # From others' GPTQ models. vLLM 0.32 and the package 0.20 no longer load it; Billfish does.
        weights["actorder"] = "group"
    return weights


def _refuse_foreign_parts(config: Config) -> None:
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise UserError(
            f"quantization_config: quantization_status is {status!r}: weights are not packed. "
            "Save the model with compression (llm-compressor: save_compressed=True)."
        )
    if config.get("kv_cache_scheme"):
        raise UserError(
            "quantization_config: kv_cache_scheme (stored scales of a quantized KV cache) is not "
            "supported. Set it to null to run the weights with an ordinary KV cache."
        )
    sparsity = section(config, "sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise UserError(
            f"quantization_config: sparsity format {sparsity['format']!r} is not supported."
        )
    if config.get("moe_sparsity_config"):
        raise UserError("quantization_config: moe_sparsity_config is not supported.")
    if section(config, "transform_config").get("config_groups"):
        raise UserError(
            "quantization_config: transform_config (rotations while running) is not supported."
        )


def _read_group(name: str, group: Config, model_format: object) -> W4A16:
    where = f"quantization_config: config group {name!r}"
    stored_as = group.get("format") or model_format
    if stored_as != FORMAT:
        raise UserError(f"{where} is stored as {stored_as!r}; only {FORMAT!r} is supported.")
    for part in ("input_activations", "output_activations"):
        if group.get(part):
            raise UserError(f"{where} quantizes activations ({part}); only weights are supported.")
    weights = section(group, "weights")
    if not weights:
        raise UserError(f"{where} has no weights entry.")
    if weights.get("type", "int") != "int":
        raise UserError(
            f"{where} has {weights['type']!r} weights (fp8, fp4); only 'int' is supported."
        )
    if weights.get("dynamic"):
        raise UserError(f"{where} has dynamic weight scales, which is not supported.")
    order = weights.get("actorder")
    if not isinstance(order, str | bool | None):
        raise UserError(f"{where} has actorder {order!r}; expected a name or null.")
    return W4A16(
        bits=integer(weights, "num_bits"),
        group_size=_read_group_size(where, weights),
        symmetric=flag(weights, "symmetric", True),
        has_g_idx=order in ("group", "dynamic", True),
    )


def _read_group_size(where: str, weights: Config) -> int:
    size = integer(weights, "group_size") if weights.get("group_size") is not None else None
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.get("strategy") or inferred
    if strategy == "channel":
        return -1
    if strategy != "group":
        raise UserError(f"{where} has strategy {strategy!r}; supported are 'group' and 'channel'.")
    if size is None or size < 1:
        raise UserError(f"{where} has strategy 'group' and group_size {size}; it must be positive.")
    return size


def _matches(entry: str, module: str) -> bool:
    """An entry of targets or ignore against a linear's name: exact, "re:" or its class."""
    if entry.startswith("re:"):
        return pattern(entry.removeprefix("re:"))(module)
    return entry in (module, LINEAR)
