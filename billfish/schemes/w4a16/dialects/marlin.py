"""Marlin's own format, read only: words in the order of its kernel (formats/layout.py)."""

from collections.abc import Mapping, Sequence
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
    flag,
    integer,
    is_lm_head,
    method_of,
)
from billfish.schemes.w4a16.scheme import W4A16


@dataclass(frozen=True)
class Marlin(Plain):
    name: ClassVar[str] = "marlin"
    known_as: ClassVar[str] = "marlin"
    words: ClassVar[str] = "B"
    kinds: ClassVar[Mapping[str, str]] = {"B": "packed", "s": "scales"}
    writable: ClassVar[bool] = False

    base: W4A16

    @staticmethod
    def claims(config: Config) -> bool:
        stored_as = config.get("checkpoint_format") or config.get("format")
        marlin = stored_as == "marlin" or bool(config.get("is_marlin_format"))
        return method_of(config) == "gptq" and marlin

    @classmethod
    def read(cls, config: Config) -> "Marlin":
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
        return scheme.pack(codes, scales, scales)  # pack() ignores the zeros of a symmetric scheme

    def from_canonical(self, scheme: W4A16, tensors: Tensors) -> dict[str, Tensor]:
        raise UserError(self.refuses("", scheme, *scheme.size(tensors)) or "")

    @staticmethod
    def refuses(module: str, scheme: W4A16, n: int, k: int) -> str | None:
        return (
            "Marlin files are read only: no engine loads them any more. Write compressed-tensors, "
            "which the Marlin kernels of today repack when they load it."
        )

    @staticmethod
    def config(schemes: Mapping[str, W4A16], ignore: Sequence[str]) -> dict[str, Any]:
        raise UserError("Marlin files are read only. Write compressed-tensors or gptq.")

    @staticmethod
    def config_of_all(scheme: W4A16, ignore: Sequence[str]) -> dict[str, Any]:
        return Marlin.config({"": scheme}, ignore)
