"""Billfish's own dialect, for schemes that no public format can store; each layer may have its own.

    "quant_method": "billfish", "format_version": 1,
    "schemes": {"0": {"name": ..., parameters}, ...},     all schemes of the model
    "linear": "0",                                        default of all linears, or null
    "layers": {"model.layers.0.mlp.down_proj": "1", ...}  exceptions; null: not quantized

Canonical tensors are stored under their own names. Every packed linear has a tensor weight_packed
(docs/FORMAT.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.formats.spec import TensorSpec
from billfish.schemes.base import Scheme, Tensors
from billfish.schemes.dialect import (
    Config,
    Plain,
    check_stored,
    common_scheme,
    integer,
    method_of,
    section,
)
from billfish.schemes.registry import fields, from_fields

METHOD = "billfish"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Own(Plain):
    name: ClassVar[str] = METHOD
    zero_scales: ClassVar[bool] = False
    known_as: ClassVar[str] = METHOD
    words: ClassVar[str] = "weight_packed"
    kinds: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("weight_packed", "weight_packed_4", "weight_meta"), "packed"),
        **dict.fromkeys(("weight_scale", "weight_scale_4", "scale_code", "scale_base"), "scales"),
        "group_scale": "scales",
        **dict.fromkeys(("weight_zero", "group_zero"), "zeros"),
    }
    writable: ClassVar[bool] = False  # `convert` writes formats that other engines read

    of_all: Scheme | None
    layers: Mapping[str, Scheme | None]

    @staticmethod
    def claims(config: Config) -> bool:
        return method_of(config) == METHOD

    @classmethod
    def read(cls, config: Config) -> "Own":
        version = integer(config, "format_version")
        if version != FORMAT_VERSION:
            raise UserError(
                f"quantization_config: format_version {version}; this Billfish reads "
                f"{FORMAT_VERSION}. Update it: pip install -U billfish."
            )
        known: dict[str, Scheme] = {}
        for name, written in section(config, "schemes").items():
            if not isinstance(written, Mapping):
                raise UserError(f"quantization_config: scheme {name!r} is {written!r}, no object.")
            try:
                known[name] = from_fields(dict(written))
            except UserError as error:
                raise UserError(f"quantization_config: {error}") from None

        def named(where: str, name: Any) -> Scheme | None:
            if name is None or (isinstance(name, str) and name in known):
                return None if name is None else known[name]
            raise UserError(
                f"quantization_config: {where} has the scheme {name!r}; known are "
                f"{', '.join(known) or 'none'}."
            )

        layers = {name: named(name, value) for name, value in section(config, "layers").items()}
        return cls(named("linear", config.get("linear")), layers)

    def scheme(self, module: str) -> Scheme | None:
        return self.layers.get(module, self.of_all)

    def stored(self, scheme: Scheme, n: int, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return scheme.tensors(n, k, dtype)

    def size(self, scheme: Scheme, stored: Tensors) -> tuple[int, int]:
        try:
            return scheme.size(stored)
        except KeyError as missing:
            part = str(missing.args[0])
            raise UserError(f"{part} is missing, which says how large it is.", part) from None

    def to_canonical(self, scheme: Scheme, stored: Tensors, n: int, k: int) -> dict[str, Tensor]:
        check_stored(self, scheme, stored, n, k)
        if (found := self.size(scheme, stored)) != (n, k):
            raise UserError(
                f"its tensors are of a {found[0]} x {found[1]} layer, the model's is {n} x {k}. "
                "The file does not belong to this config.json."
            )
        tensors = {name: stored[name] for name in scheme.tensors(n, k, torch.float16)}
        if not any(tensor.is_meta for tensor in tensors.values()):
            scheme.check(tensors)
        return tensors

    def from_canonical(self, scheme: Scheme, tensors: Tensors) -> dict[str, Tensor]:
        return dict(tensors)

    @staticmethod
    def config(schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        usual = common_scheme(schemes)
        kinds = {usual: "0"}
        for scheme in schemes.values():
            kinds.setdefault(scheme, str(len(kinds)))
        others = {module: kinds[scheme] for module, scheme in schemes.items() if scheme != usual}
        return {
            "quant_method": METHOD,
            "format_version": FORMAT_VERSION,
            "schemes": {name: fields(scheme) for scheme, name in kinds.items()},
            "linear": "0",
            "layers": {**others, **dict.fromkeys(ignore)},
        }

    @staticmethod
    def config_of_all(scheme: Scheme, ignore: Sequence[str]) -> dict[str, Any]:
        return Own.config({"": scheme}, ignore)
