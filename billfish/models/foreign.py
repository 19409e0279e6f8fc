"""The dialects of others: AWQ gemm, and Marlin, which is read only (GPTQ: gptq.py); `read_dialect`.

An AWQ file always holds its zeros, so AWQ is asymmetric whatever its config says. A Marlin file is
one kernel's own word order; formats/layout.py derives it, and nothing writes it. Knows no files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.formats import layout
from billfish.formats.grid import group_count
from billfish.formats.spec import TensorSpec
from billfish.models.compressed import METHOD, CompressedTensors
from billfish.models.dialect import (
    Config,
    Dialect,
    check_stored,
    common_scheme,
    flag,
    integer,
    is_lm_head,
    names,
)
from billfish.models.gptq import Gptq
from billfish.schemes.base import Tensors
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.scheme import shape_of


def read_dialect(quantization_config: Config) -> Dialect:
    """The dialect of a checkpoint; raises a UserError that names what cannot be read."""
    config = quantization_config
    method = config.get("quant_method") or config.get("method") or _guess_method(config)
    if method == METHOD:
        return CompressedTensors.read(config)
    if method == "gptq":
        stored_as = config.get("checkpoint_format") or config.get("format") or "gptq"
        if stored_as == "marlin" or config.get("is_marlin_format"):
            return Marlin.read(config)
        return Gptq.read(config, str(stored_as))
    if method == "awq":
        return Awq.read(config)
    raise UserError(
        f"quantization_config: quant_method {method!r} cannot be read. "
        "Supported are compressed-tensors (pack-quantized), gptq, awq (gemm) and marlin."
    )


def _guess_method(config: Config) -> str | None:
    """Of a legacy quantize_config.json, which does not name it."""
    if "w_bit" in config or "zero_point" in config:
        return "awq"
    return "gptq" if "bits" in config and "group_size" in config else None


@dataclass(frozen=True)
class Awq:
    name: ClassVar[str] = "awq"
    words: ClassVar[str] = "qweight"
    optional: ClassVar[frozenset[str]] = frozenset()

    base: W4A16
    skip: tuple[str, ...] = ()  # modules_to_not_convert: parts of names

    @staticmethod
    def read(config: Config) -> "Awq":
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

    def settle(self, scheme: W4A16, stored: Tensors) -> W4A16:
        return scheme

    def to_canonical(self, scheme: W4A16, stored: Tensors, n: int, k: int) -> dict[str, Tensor]:
        check_stored(self, scheme, stored, n, k)
        codes = layout.awq().unpack(stored["qweight"], n, k)
        zeros = layout.awq().unpack(stored["qzeros"], n, stored["scales"].shape[0])
        return scheme.pack(codes, stored["scales"].T, zeros)

    def from_canonical(self, scheme: W4A16, tensors: Tensors) -> dict[str, Tensor]:
        n, k = shape_of(tensors)
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


@dataclass(frozen=True)
class Marlin:
    name: ClassVar[str] = "marlin"
    words: ClassVar[str] = "B"
    optional: ClassVar[frozenset[str]] = frozenset()

    base: W4A16

    @staticmethod
    def read(config: Config) -> "Marlin":
        base = W4A16(bits=integer(config, "bits"), group_size=integer(config, "group_size"))
        if base.bits != 4 or base.group_size not in (-1, 128):
            raise UserError(
                f"quantization_config: Marlin with {base.bits} bits, group size {base.group_size}; "
                "the format has 4 bits and groups of 128 or -1."
            )
        if not flag(config, "sym", True) or flag(config, "desc_act", False):
            raise UserError("quantization_config: Marlin files are symmetric and without desc_act.")
        return Marlin(base)

    def scheme(self, module: str) -> W4A16 | None:
        return None if is_lm_head(module) else self.base

    def stored(self, scheme: W4A16, n: int, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        return {
            "B": TensorSpec(layout.marlin().shape(n, k), torch.int32),
            "s": TensorSpec((group_count(k, scheme.group_size), n), dtype),
        }

    def size(self, scheme: W4A16, stored: Tensors) -> tuple[int, int]:
        k_tiles, words = stored["B"].shape
        tile_n, tile_k = layout.marlin().tile
        return words // layout.marlin().words_per_tile * tile_n, k_tiles * tile_k

    def settle(self, scheme: W4A16, stored: Tensors) -> W4A16:
        return scheme

    def to_canonical(self, scheme: W4A16, stored: Tensors, n: int, k: int) -> dict[str, Tensor]:
        tile_n, tile_k = layout.marlin().tile
        if n % tile_n or k % tile_k:
            raise UserError(f"a Marlin layer is whole {tile_k} x {tile_n} tiles, not {k} x {n}.")
        check_stored(self, scheme, stored, n, k)
        codes = layout.marlin().unpack(stored["B"], n, k)
        order = torch.tensor(layout.marlin_scale_order(grouped=len(stored["s"]) > 1))
        runs = stored["s"].reshape(-1, len(order))
        scales = torch.empty_like(runs)
        scales[:, order] = runs
        scales = scales.reshape(-1, n).T
        return scheme.pack(codes, scales, scales)  # symmetric: the zeros are not stored

    def from_canonical(self, scheme: W4A16, tensors: Tensors) -> dict[str, Tensor]:
        raise UserError(self.refuses("", scheme, *shape_of(tensors)) or "")

    @staticmethod
    def refuses(module: str, scheme: W4A16, n: int, k: int) -> str | None:
        return (
            "Marlin files are read only: no engine loads them any more. Write compressed-tensors, "
            "which the Marlin kernels of today repack when they load it."
        )

    @staticmethod
    def config(schemes: Mapping[str, W4A16], ignore: Sequence[str]) -> dict[str, Any]:
        raise UserError("Marlin files are read only. Write compressed-tensors or gptq.")
