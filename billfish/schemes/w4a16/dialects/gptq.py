"""GPTQ v1 and v2: codes packed along k, zeros along n, all transposed against canonical tensors.

v1 stores zero - 1, which cannot represent zero = 0. So v1 is written only for symmetric models, and
v2, which stores the zero itself, for the others. If a config contradicts its tensors an error is
raised, because a wrong guess would give a model that writes nonsense.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.formats import layout
from billfish.formats.grid import group_count
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

GPTQ_BITS = (2, 3, 4, 8)


@dataclass(frozen=True)
class Gptq(Plain):
    name: ClassVar[str] = "gptq"
    known_as: ClassVar[str] = "gptq"
    words: ClassVar[str] = "qweight"
    kinds: ClassVar[Mapping[str, str]] = {
        "qweight": "packed",
        "scales": "scales",
        "qzeros": "zeros",
    }
    legacy_config: ClassVar[str | None] = "quantize_config.json"
    optional: ClassVar[frozenset[str]] = frozenset({"g_idx"})

    base: W4A16
    stored_as: str = "gptq"  # or gptq_v2
    # regular expression -> scheme; the first match counts
    dynamic: Mapping[str, W4A16 | None] | None = None
    only: tuple[str, ...] = ()  # modules_in_block_to_quantize: substrings of names; empty: all
    lm_head: bool = False

    @staticmethod
    def claims(config: Config) -> bool:
        return method_of(config) == "gptq"  # Marlin, which the registry asks first, is excluded

    @property
    def label(self) -> str:
        return self.stored_as

    @classmethod
    def read(cls, config: Config) -> "Gptq":
        stored_as = str(config.get("checkpoint_format") or config.get("format") or "gptq")
        if stored_as not in ("gptq", "gptq_v2"):
            raise UserError(
                f"quantization_config: checkpoint_format {stored_as!r} cannot be read; "
                "supported are gptq, gptq_v2 and marlin."
            )
        if config.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
            raise UserError(
                f"quantization_config: pack_dtype {config['pack_dtype']!r}; only int32 can be read."
            )
        base = _gptq_scheme(config, None)
        dynamic: dict[str, W4A16 | None] = {}
        for rule, overrides in section(config, "dynamic").items():
            expression = re.sub(r"^[+-]:", "", rule)
            pattern(expression)("")  # raises now if it is invalid
            dynamic[expression] = None if rule.startswith("-:") else _gptq_scheme(overrides, base)
        return Gptq(
            base,
            stored_as,
            dynamic,
            tuple(names(config, "modules_in_block_to_quantize")),
            flag(config, "lm_head", False),
        )

    def scheme(self, module: str) -> W4A16 | None:
        if is_lm_head(module) and not self.lm_head:
            return None
        if self.only and not any(part in module for part in self.only) and not is_lm_head(module):
            return None
        for expression, scheme in (self.dynamic or {}).items():
            if pattern(expression)(module):
                return scheme
        return self.base

    def stored(self, scheme: W4A16, n: int, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        groups = group_count(k, scheme.group_size)
        return {
            "qweight": TensorSpec(layout.gptq(scheme.bits).shape(n, k), torch.int32),
            "qzeros": TensorSpec(layout.gptq_zeros(scheme.bits).shape(n, groups), torch.int32),
            "scales": TensorSpec((groups, n), dtype),
            "g_idx": TensorSpec((k,), torch.int32),
        }

    def size(self, scheme: W4A16, stored: Tensors) -> tuple[int, int]:
        words, n = stored["qweight"].shape
        return n, words * layout.WORD_BITS // scheme.bits

    def resolve_scheme(self, scheme: W4A16, stored: Tensors) -> W4A16:
        """g_idx itself, not desc_act, tells whether columns are out of order."""
        g_idx = stored.get("g_idx")
        if g_idx is None:
            if scheme.has_g_idx:
                raise UserError(
                    "g_idx is missing although desc_act is true, so a column's group is unknown. "
                    "Set desc_act to false in the quantization_config if columns are in order.",
                    part="g_idx",
                )
            return scheme
        plain = _plain_g_idx(scheme, len(g_idx), g_idx.device)
        return replace(scheme, has_g_idx=not torch.equal(g_idx.to(torch.int32), plain))

    def to_canonical(self, scheme: W4A16, stored: Tensors, n: int, k: int) -> dict[str, Tensor]:
        check_stored(self, scheme, stored, n, k)
        if self.resolve_scheme(scheme, stored) != scheme:
            raise UserError(f"g_idx does not fit {scheme}; call resolve_scheme() first.", "g_idx")
        codes = layout.gptq(scheme.bits).unpack(stored["qweight"], n, k)
        tensors = scheme.pack(codes, stored["scales"].T, self._zeros(scheme, stored, n))
        if scheme.has_g_idx:
            check_groups(scheme, stored, "g_idx", k)
            tensors[G_IDX] = stored["g_idx"]
        return tensors

    def _zeros(self, scheme: W4A16, stored: Tensors, n: int) -> Tensor:  # (n, g) uint8
        grid = scheme.grid
        groups = stored["scales"].shape[0]
        zeros = layout.gptq_zeros(scheme.bits).unpack(stored["qzeros"], n, groups)
        offset = 0 if self.stored_as == "gptq_v2" else 1
        if scheme.symmetric:
            if bool((zeros != grid.middle - offset).any()):
                found = sorted(set((zeros.int() + offset).flatten().tolist()))
                raise UserError(
                    f"the config says sym, so every zero must be {grid.middle}, and qzeros holds "
                    f"{', '.join(map(str, found[:4]))}. If the zeros are meant, set sym to false "
                    "in the quantization_config; if they are stored without the offset of 1, set "
                    'checkpoint_format to "gptq_v2".',
                    part="qzeros",
                )
        elif offset and bool((zeros == grid.levels - 1).any()):
            raise UserError(
                f"qzeros holds {grid.levels - 1}, which in GPTQ v1 is what an overflow leaves of "
                "zero = 0; the zeros next to it may be damaged too. Quantize again, as gptq_v2.",
                part="qzeros",
            )
        return zeros + offset

    def from_canonical(self, scheme: W4A16, tensors: Tensors) -> dict[str, Tensor]:
        n, k = scheme.size(tensors)
        reason = self.refuses("", scheme, n, k)
        if reason:
            raise UserError(reason)
        zeros = scheme.zeros(tensors)
        if self.stored_as == "gptq":
            if bool((zeros == 0).any()):
                raise UserError("GPTQ v1 cannot store a zero point of 0. Write gptq_v2 instead.")
            zeros = zeros - 1
        g_idx = tensors.get(G_IDX)
        if g_idx is None:
            g_idx = _plain_g_idx(scheme, k, zeros.device)
        return {
            "qweight": layout.gptq(scheme.bits).pack(scheme.codes(tensors)),
            "qzeros": layout.gptq_zeros(scheme.bits).pack(zeros),
            "scales": tensors["weight_scale"].T.contiguous(),
            "g_idx": g_idx,
        }

    @staticmethod
    def refuses(module: str, scheme: W4A16, n: int, k: int) -> str | None:
        if scheme.bits not in GPTQ_BITS:
            return f"GPTQ has 2, 3, 4 or 8 bits, not {scheme.bits}. compressed-tensors has 2 to 8."
        if n * scheme.bits % layout.WORD_BITS or k * scheme.bits % layout.WORD_BITS:
            return (
                f"GPTQ packs whole 32-bit words along n and k; {n} x {k} at {scheme.bits} bits "
                "does not fill them. compressed-tensors has no such rule."
            )
        return None

    @staticmethod
    def config(schemes: Mapping[str, W4A16], ignore: Sequence[str]) -> dict[str, Any]:
        base = common_scheme(schemes)
        stored_as = "gptq" if all(scheme.symmetric for scheme in schemes.values()) else "gptq_v2"
        dynamic: dict[str, Any] = {
            f"-:^{re.escape(module)}$": {} for module in ignore if not is_lm_head(module)
        }
        for module, scheme in schemes.items():
            if scheme != base:
                dynamic[f"+:^{re.escape(module)}$"] = _gptq_fields(scheme)
        config: dict[str, Any] = {
            "quant_method": "gptq",
            "method": "gptq",
            "checkpoint_format": stored_as,
            "format": stored_as,
            **_gptq_fields(base),
            "lm_head": any(is_lm_head(module) for module in schemes),
            "pack_dtype": "int32",
        }
        return config | ({"dynamic": dynamic} if dynamic else {})

    @staticmethod
    def config_of_all(scheme: W4A16, ignore: Sequence[str]) -> dict[str, Any]:
        return Gptq.config({"": scheme}, ignore)

    @staticmethod
    def notes(schemes: Iterable[W4A16]) -> list[str]:
        if all(scheme.symmetric for scheme in schemes):
            return []
        return ["Asymmetric, so written as gptq_v2: GPTQ v1 cannot store every zero point."]


def _gptq_scheme(config: Config, base: W4A16 | None) -> W4A16:
    if not isinstance(config, Mapping):
        raise UserError(f"quantization_config: a dynamic rule is {config!r}, expected an object.")
    defaults = {} if base is None else _gptq_fields(base)
    values = {**defaults, **config}
    scheme = W4A16(
        bits=integer(values, "bits"),
        group_size=integer(values, "group_size"),
        symmetric=flag(values, "sym", True),
        has_g_idx=flag(values, "desc_act", False),
    )
    if scheme.bits not in GPTQ_BITS:
        raise UserError(f"quantization_config: GPTQ with {scheme.bits} bits; it has 2, 3, 4 or 8.")
    # With one group for all of k the order of columns does not matter.
    return replace(scheme, has_g_idx=False) if scheme.group_size == -1 else scheme


def _gptq_fields(scheme: W4A16) -> dict[str, Any]:
    return {
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "sym": scheme.symmetric,
        "desc_act": scheme.has_g_idx,
    }


def _plain_g_idx(scheme: W4A16, k: int, device: torch.device) -> Tensor:
    size = scheme.group_of(k)
    return torch.arange(k, dtype=torch.int32, device=device) // size
