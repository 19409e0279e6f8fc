"""AWQ's gemm format. Files always hold zeros, so it is read as asymmetric whatever its config
says."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    integer,
    is_lm_head,
    method_of,
    names,
)
from billfish.schemes.w4a16.scheme import W4A16


@dataclass(frozen=True)
class Awq(Plain):
    name: ClassVar[str] = "awq"
    known_as: ClassVar[str] = "awq (gemm)"
    words: ClassVar[str] = "qweight"
    kinds: ClassVar[Mapping[str, str]] = {
        "qweight": "packed",
        "scales": "scales",
        "qzeros": "zeros",
    }

    base: W4A16
    skip: tuple[str, ...] = ()  # modules_to_not_convert: substrings of names

    @staticmethod
    def claims(config: Config) -> bool:
        return method_of(config) == "awq"

    @classmethod
    def read(cls, config: Config) -> "Awq":
        said = (config.get(key) for key in ("version", "checkpoint_format", "format"))
        version = next((str(value).lower() for value in said if value), "gemm")
        if version != "gemm":
            raise UserError(
                f"quantization_config: AWQ version {version!r} cannot be read; only 'gemm' can. "
                "Other versions are one kernel's word order: convert from the original model."
            )
        bits = integer(config, "bits", "w_bit")
        if bits != 4:
            raise UserError(f"quantization_config: AWQ with {bits} bits; the gemm format has 4.")
        group_size = integer(config, "group_size", "q_group_size")
        base = W4A16(bits=4, group_size=group_size, symmetric=False)
        return Awq(base, tuple(names(config, "modules_to_not_convert")))

    def scheme(self, module: str) -> W4A16 | None:
        if is_lm_head(module) or any(part in module for part in self.skip):
            return None
        return self.base

    def stored(self, scheme: W4A16, n: int, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        groups = group_count(k, scheme.group_size)
        return {
            "qweight": TensorSpec(layout.awq().shape(n, k), torch.int32),
            "qzeros": TensorSpec(layout.awq().shape(n, groups), torch.int32),
            "scales": TensorSpec((groups, n), dtype),
        }

    def size(self, scheme: W4A16, stored: Tensors) -> tuple[int, int]:
        k, words = stored["qweight"].shape
        return words * layout.WORD_BITS // scheme.bits, k

    def to_canonical(self, scheme: W4A16, stored: Tensors, n: int, k: int) -> dict[str, Tensor]:
        check_stored(self, scheme, stored, n, k)
        codes = layout.awq().unpack(stored["qweight"], n, k)
        zeros = layout.awq().unpack(stored["qzeros"], n, stored["scales"].shape[0])
        return scheme.pack(codes, stored["scales"].T, zeros)

    def from_canonical(self, scheme: W4A16, tensors: Tensors) -> dict[str, Tensor]:
        n, k = scheme.size(tensors)
        reason = self.refuses("", scheme, n, k)
        if reason:
            raise UserError(reason)
        return {
            "qweight": layout.awq().pack(scheme.codes(tensors)),
            "qzeros": layout.awq().pack(scheme.zeros(tensors)),
            "scales": tensors["weight_scale"].T.contiguous(),
        }

    @staticmethod
    def refuses(module: str, scheme: W4A16, n: int, k: int) -> str | None:
        if scheme.bits != 4:
            return f"AWQ stores 4 bits, not {scheme.bits}. compressed-tensors stores 2 to 8."
        if scheme.has_g_idx:
            return "AWQ cannot store reordered columns (desc_act). GPTQ can."
        if n % 8:
            return (
                f"AWQ packs 8 outputs into a word, which n = {n} does not fill. "
                "compressed-tensors has no such rule."
            )
        if is_lm_head(module):
            return "AWQ loaders expect an unquantized lm_head. GPTQ can store it."
        return None

    @staticmethod
    def config(schemes: Mapping[str, W4A16], ignore: Sequence[str]) -> dict[str, Any]:
        sizes = {scheme.group_size for scheme in schemes.values()}
        if len(sizes) > 1:
            raise UserError(
                f"AWQ has one group size for the whole model; this one has {sorted(sizes)}. "
                "GPTQ and compressed-tensors can store it."
            )
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": common_scheme(schemes).group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": [name for name in ignore if not is_lm_head(name)] or None,
        }

    @staticmethod
    def config_of_all(scheme: W4A16, ignore: Sequence[str]) -> dict[str, Any]:
        return Awq.config({"": scheme}, ignore)

    @staticmethod
    def notes(schemes: Iterable[W4A16]) -> list[str]:
        if not any(scheme.symmetric for scheme in schemes):
            return []
        return ["AWQ always stores zero points; this symmetric model's are all 8."]
