"""Converts canonical tensors of w4a16 to records of the CUDA kernels and back, on any device.

A record holds 64 outputs x 128 inputs: words, then scales, then (if asymmetric) zeros, contiguous,
so that one bulk copy fetches all that a warp needs. kernels/include/billfish/record.cuh reads them.
Groups larger than 128 repeat their scale in every record, which costs up to 1/32 more bytes and
saves a kernel. Codes of more than 4 bits are two planes of nibbles, one after the other along k:

    code - zero = 16 * (high - zero high) + (low - zero low)      scales 16 s and s
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from billfish.errors import UserError
from billfish.formats import layout
from billfish.schemes.base import Tensors
from billfish.schemes.w4a16.scheme import W4A16

N, K = layout.BRICK_N, layout.BRICK_K
WORDS = N * K // 8
SCALE_DTYPES = (torch.float16, torch.bfloat16)
CODES_AT_ONCE = 2**26


@dataclass(frozen=True)
class Shape:
    """Layout of one layer's records; it decides the kernel instance."""

    n: int
    k: int
    groups: int  # groups of the scheme along k
    record_group: int  # group size in a record: 32, 64 or 128
    planes: int
    zeros: bool  # whether records hold zeros
    scale_dtype: torch.dtype

    @property
    def bands(self) -> int:
        return math.ceil(self.n / N)

    @property
    def k_tiles(self) -> int:  # in one plane
        return math.ceil(self.k / K)

    @property
    def record_groups(self) -> int:
        return K // self.record_group

    @property
    def columns(self) -> int:  # columns of scales over all records of a row
        return self.k_tiles * self.record_groups

    @property
    def repeats(self) -> int:  # of one scale of the scheme in records
        return self.columns if self.groups == 1 else self.k // self.groups // self.record_group

    @property
    def record_words(self) -> int:
        return WORDS + self.record_groups * (N // 2 + (N // 8 if self.zeros else 0))


def record_shape(scheme: W4A16, n: int, k: int, scale_dtype: torch.dtype) -> Shape:
    size = scheme.group_of(k)
    # One group for all of k may be padded to whole records. Other group sizes must be multiples of
    # 32.
    whole = (K,) if scheme.group_size == -1 else tuple(g for g in (128, 64, 32) if size % g == 0)
    if not whole and size != k:
        raise UserError(f"groups of {size}: CUDA kernels take multiples of 32.")
    planes = 1 if scheme.bits <= 4 else 2
    # The two planes of a symmetric grid have different zeros, so these are stored, too.
    zeros = not scheme.symmetric or planes == 2
    return Shape(n, k, max(1, k // size), (*whole, K)[0], planes, zeros, scale_dtype)


def pack(scheme: W4A16, tensors: Tensors) -> tuple[Shape, Tensor]:
    """(bands, planes * k tiles, record words) int32."""
    scales = tensors["weight_scale"]
    if scales.dtype not in SCALE_DTYPES:
        raise UserError(
            f"scales are {scales.dtype}; CUDA kernels take float16 and bfloat16. Load the model "
            "with one of these dtypes."
        )
    codes = scheme.codes(tensors)
    n, k = codes.shape
    shape = record_shape(scheme, n, k, scales.dtype)
    zeros = scheme.zeros(tensors)
    if shape.planes == 1:
        # 2 and 3 bits: shift codes so that the grid's middle is the kernel's 8
        moved = 8 - scheme.grid.middle
        return shape, _records(shape, codes + moved, scales, zeros + moved)
    if bool((scales * 16).isinf().any() & scales.isfinite().all()):
        raise UserError(
            f"scales of up to {float(scales.max()):g} in {scales.dtype}: codes of more than 4 bits "
            "need 16 times as much. Load the model in bfloat16."
        )
    high = _records(shape, codes >> 4, scales * 16, zeros >> 4)
    low = _records(shape, codes & 15, scales, zeros & 15)
    return shape, torch.cat([high, low], dim=1)


def unpack(scheme: W4A16, shape: Shape, records: Tensor) -> dict[str, Tensor]:
    """The canonical tensors, bit for bit."""
    if shape.planes == 1:
        codes, scales, zeros = _parts(shape, records)
        moved = 8 - scheme.grid.middle
        return scheme.pack(codes - moved, scales, zeros - moved)
    (high, _, zeros_high), (low, scales, zeros_low) = (
        _parts(shape, plane) for plane in records.chunk(2, dim=1)
    )
    return scheme.pack(high << 4 | low, scales, zeros_high << 4 | zeros_low)


def _records(shape: Shape, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    # A few rows at a time, as packing widens codes to 64 bits.
    step = max(1, CODES_AT_ONCE // (N * codes.shape[1])) * N
    starts = range(0, len(codes), step)
    words = torch.cat([layout.brick().pack(codes[start : start + step]) for start in starts])
    words = words.view(shape.bands, shape.k_tiles, WORDS)
    parts = [words, _by_lane(shape, scales).view(torch.int32)]
    if shape.zeros:
        parts.append(layout.pack_stream(_by_lane(shape, zeros), 4))
    return torch.cat(parts, dim=-1)


def _parts(shape: Shape, records: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # codes, scales, zeros
    groups = shape.record_groups
    words, scales, zeros = records.tensor_split((WORDS, WORDS + groups * N // 2), dim=-1)
    codes = layout.brick().unpack(words.reshape(shape.bands, -1), shape.n, shape.k)
    scales = _by_row(shape, scales.contiguous().view(shape.scale_dtype))
    if not shape.zeros:
        return codes, scales, torch.full_like(scales, 8, dtype=torch.uint8)
    return codes, scales, _by_row(shape, layout.unpack_stream(zeros, 4))


def _by_lane(shape: Shape, values: Tensor) -> Tensor:
    """(n, groups) -> (bands, k tiles, 64 * record groups): [group][half][quad][row q + 8 i]."""
    values = values.repeat_interleave(shape.repeats, dim=1)
    values = pad(values, (0, shape.columns - values.shape[1], 0, shape.bands * N - shape.n))
    lanes = values.view(shape.bands, 2, 4, 8, shape.k_tiles, shape.record_groups)
    lanes = lanes.permute(0, 4, 5, 1, 3, 2)  # band, k tile, group, half, quad, i
    return lanes.reshape(shape.bands, shape.k_tiles, -1)


def _by_row(shape: Shape, lanes: Tensor) -> Tensor:
    lanes = lanes.view(shape.bands, shape.k_tiles, shape.record_groups, 2, 8, 4)
    rows = lanes.permute(0, 3, 5, 4, 1, 2).reshape(shape.bands * N, -1)
    return rows[: shape.n, :: shape.repeats][:, : shape.groups].contiguous()
