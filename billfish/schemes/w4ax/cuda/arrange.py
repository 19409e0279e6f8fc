"""Converts canonical tensors of w4ax to records of the CUDA kernels and back, on any device.

A record holds 64 outputs x 128 inputs: words in the order of w4a16's records, then the group scales
q, 1 to 16, a byte each; asymmetric ones have 128 - zero * q behind them. bytes.cuh reads them.
Groups larger than 128 repeat their scale in every record. The rows' bases are a vector beside the
records, in fp32, which holds either type exactly.

    4096 B        words         [k64 (2)][n16 (4)][lane (32)][k16 step (4)]
      64 B x g    group scales  [n16 (4)][row q (8)][q, q + 8][group (g)]    g = 1, 2 or 4 groups
      64 B x g    zeros         the same; asymmetric only
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from billfish.errors import UserError
from billfish.formats import layout
from billfish.schemes.base import Tensors, together
from billfish.schemes.w4ax.cuda.inputs import Inputs

N, K = layout.BRICK_N, layout.BRICK_K
WORDS = N * K // 8
BASE_DTYPES = (torch.float16, torch.bfloat16)
CODES_AT_ONCE = 2**26
MIDDLE = 128  # of unsigned bytes
RECORD_GROUPS = (128, 64, 32)  # group sizes within a record


@dataclass(frozen=True)
class Shape:
    """Layout of one layer's records; it decides the kernel instance."""

    n: int
    k: int
    groups: int  # along k
    record_group: int
    asymmetric: bool = False

    @property
    def bands(self) -> int:
        return math.ceil(self.n / N)

    @property
    def k_tiles(self) -> int:
        return math.ceil(self.k / K)

    @property
    def record_groups(self) -> int:
        return K // self.record_group

    @property
    def columns(self) -> int:  # of group scales over all records of a row
        return self.k_tiles * self.record_groups

    @property
    def repeats(self) -> int:  # of one group scale in records
        return self.columns if self.groups == 1 else self.k // self.groups // self.record_group

    @property
    def record_bytes(self) -> int:
        return WORDS * 4 + N * self.record_groups * (2 if self.asymmetric else 1)


@dataclass(frozen=True)
class Packed:
    shape: Shape
    records: Tensor  # (bands, k tiles, record words) int32
    bases: Tensor  # (n,) fp32
    dtype: torch.dtype  # of the canonical bases
    inputs: Inputs | None = None  # of fmpq

    @classmethod
    def joined(cls, parts: list[Self]) -> tuple[Self, list[Self]]:
        """Layers of one input, stored and rounded alike, as one, and each as a view of it. All but
        the last fill their bands."""
        shape = replace(parts[0].shape, n=sum(part.shape.n for part in parts))
        records, records_of = together([part.records for part in parts])
        bases, bases_of = together([part.bases for part in parts])
        views = [
            replace(part, records=its_records, bases=its_bases, inputs=parts[0].inputs)
            for part, its_records, its_bases in zip(parts, records_of, bases_of, strict=True)
        ]
        return replace(parts[0], shape=shape, records=records, bases=bases), views


def record_group(group_size: int) -> int:
    """The group size in records. -1, and one odd group for all of k, repeat their scale."""
    return next((size for size in RECORD_GROUPS if group_size % size == 0), K)


def refuses_group(group_size: int, k: int) -> str | None:
    """Why records cannot hold such groups, in a few words; or None."""
    if group_size in (-1, k) or group_size % min(RECORD_GROUPS) == 0:
        return None
    return f"groups of {group_size}; its kernels take multiples of 32, and -1"


def record_shape(group_size: int, n: int, k: int, asymmetric: bool = False) -> Shape:
    reason = refuses_group(group_size, k)
    if reason is not None:
        raise UserError(f"a {n} x {k} layer has {reason}.")
    groups = 1 if group_size == -1 else k // group_size
    return Shape(n, k, groups, record_group(group_size), asymmetric)


def pack(group_size: int, tensors: Tensors, rotated: bool = False) -> Packed:
    words, bases = tensors["weight_packed"], tensors["weight_scale"]
    if bases.dtype not in BASE_DTYPES:
        raise UserError(
            f"scales are {bases.dtype}; CUDA kernels take float16 and bfloat16. Load the model "
            "with one of these dtypes."
        )
    n, k = words.shape[0], words.shape[1] * 8
    shape = record_shape(group_size, n, k, "group_zero" in tensors)
    # A few rows at a time, as packing widens codes to 64 bits.
    step = max(1, CODES_AT_ONCE // (N * k)) * N
    bricks = [_bricks(words[start : start + step]) for start in range(0, n, step)]
    scales = layout.unpack_stream(tensors["group_scale"], 4)[:, : shape.groups] + 1
    parts = [torch.cat(bricks).view(shape.bands, -1, WORDS)]
    parts += [_by_lane(shape, scales).view(torch.int32)]
    if shape.asymmetric:
        zeros = layout.unpack_stream(tensors["group_zero"], 4)[:, : shape.groups]
        parts += [_by_lane(shape, MIDDLE - zeros * scales).view(torch.int32)]
    inputs = Inputs.of(tensors, rotated)
    return Packed(shape, torch.cat(parts, dim=-1), bases.float().flatten(), bases.dtype, inputs)


def unpack(packed: Packed) -> dict[str, Tensor]:
    """The canonical tensors, bit for bit."""
    shape = packed.shape
    ends = (WORDS, WORDS + N * shape.record_groups // 4)
    words, scales, zeros = packed.records.tensor_split(ends, dim=-1)
    step = max(1, CODES_AT_ONCE // (N * shape.k))
    parts = [
        _canonical(words[start : start + step], min(step * N, shape.n - start * N), shape.k)
        for start in range(0, shape.bands, step)
    ]
    q = _by_row(shape, scales)
    tensors = {
        "weight_packed": torch.cat(parts),
        "group_scale": _nibbles(shape, q - 1),
        "weight_scale": packed.bases.to(packed.dtype)[:, None],
    }
    if shape.asymmetric:
        tensors["group_zero"] = _nibbles(shape, (MIDDLE - _by_row(shape, zeros)) // q)
    if packed.inputs is not None:
        tensors |= packed.inputs.canonical(shape.k)
    return tensors


def _bricks(words: Tensor) -> Tensor:  # rows of inputs in order -> records' words
    codes = layout.compressed_tensors(4).unpack(words, len(words), words.shape[1] * 8)
    return layout.brick().pack(codes)


def _canonical(bricks: Tensor, n: int, k: int) -> Tensor:
    codes = layout.brick().unpack(bricks.reshape(len(bricks), -1), n, k)
    return layout.compressed_tensors(4).pack(codes)


def _nibbles(shape: Shape, numbers: Tensor) -> Tensor:  # of each row and group
    return layout.pack_stream(pad(numbers, (0, -shape.groups % 8)), 4)


def _by_lane(shape: Shape, scales: Tensor) -> Tensor:
    """(n, groups) bytes -> (bands, k tiles, 64 * record groups): [n16][row q][q, q + 8][group]."""
    scales = scales.repeat_interleave(shape.repeats, dim=1)
    scales = pad(scales, (0, shape.columns - scales.shape[1], 0, shape.bands * N - shape.n))
    lanes = scales.view(shape.bands, 4, 2, 8, shape.k_tiles, shape.record_groups)
    lanes = lanes.permute(0, 4, 1, 3, 2, 5)
    return lanes.reshape(shape.bands, shape.k_tiles, -1)


def _by_row(shape: Shape, lanes: Tensor) -> Tensor:
    lanes = lanes.contiguous().view(torch.uint8)
    lanes = lanes.view(shape.bands, shape.k_tiles, 4, 8, 2, shape.record_groups)
    rows = lanes.permute(0, 2, 4, 3, 1, 5).reshape(shape.bands * N, -1)
    return rows[: shape.n, :: shape.repeats][:, : shape.groups].contiguous()
