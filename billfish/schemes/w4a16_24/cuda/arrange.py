"""Converts canonical tensors of w4a16_24 to records of the CUDA kernels and back, on any device.

A record holds 64 outputs x 128 inputs, of which 64 were kept, contiguous, so that one bulk copy
fetches all that a warp needs. kernels/include/billfish/sparse.cuh reads it. One group for all of k
repeats its scale in every record. n and k are padded: code 8 (zero) at places 0 and 1, scale 0.

    2048 B        words     [n16 (4)][lane (32)][k32 step (4)]    8 kept codes: half a brick
    1024 B        metadata  [n16 (4)][lane (32)][k64 (2)]         16 places: brick_places
     128 B x g    scales    [half (2)][quad (8)][row q, q + 8, q + 16, q + 24]    g groups
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from billfish.errors import UserError
from billfish.formats import layout
from billfish.schemes.base import Tensors
from billfish.schemes.w4a16_24.scheme import MIDDLE, W4A16Sparse, kept_of

N, K = layout.BRICK_N, layout.BRICK_K
KEPT = K // 2  # of a record's inputs, in a row
WORDS, PLACES = N * KEPT // 8, N * KEPT // 16  # 32 bits each
SCALE_DTYPES = (torch.float16, torch.bfloat16)
CODES_AT_ONCE = 2**26


@dataclass(frozen=True)
class Shape:
    """Layout of one layer's records; it decides the kernel instance."""

    n: int
    k: int
    groups: int  # along k
    record_group: int  # group size in a record: 32, 64 or 128
    scale_dtype: torch.dtype

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
    def columns(self) -> int:  # of scales over all records of a row
        return self.k_tiles * self.record_groups

    @property
    def repeats(self) -> int:  # of one scale in records
        return self.columns if self.groups == 1 else 1

    @property
    def record_bytes(self) -> int:
        return 4 * (WORDS + PLACES) + 2 * N * self.record_groups


def record_group(group_size: int) -> int:
    """The group size in records; -1 repeats its scale."""
    return K if group_size == -1 else group_size


def record_shape(scheme: W4A16Sparse, n: int, k: int, scale_dtype: torch.dtype) -> Shape:
    groups = max(1, k // scheme.group_of(k))
    return Shape(n, k, groups, record_group(scheme.group_size), scale_dtype)


def pack(scheme: W4A16Sparse, tensors: Tensors) -> tuple[Shape, Tensor]:
    """(bands, k tiles, record words) int32."""
    scales = tensors["weight_scale"]
    if scales.dtype not in SCALE_DTYPES:
        raise UserError(
            f"scales are {scales.dtype}; CUDA kernels take float16 and bfloat16. Load the model "
            "with one of these dtypes."
        )
    shape = record_shape(scheme, *scheme.size(tensors), scales.dtype)
    codes, places = scheme.kept(tensors)
    # A few rows at a time, as packing widens codes to 64 bits.
    step = max(1, CODES_AT_ONCE // (N * codes.shape[1])) * N
    starts = range(0, shape.n, step)
    parts = [
        torch.cat([_words(codes[start : start + step]) for start in starts]),
        torch.cat([_metadata(places[start : start + step]) for start in starts]),
        _by_lane(shape, scales).view(torch.int32),
    ]
    return shape, torch.cat(parts, dim=-1)


def unpack(scheme: W4A16Sparse, shape: Shape, records: Tensor) -> dict[str, Tensor]:
    """The canonical tensors, bit for bit."""
    words, meta, scales = records.tensor_split((WORDS, WORDS + PLACES), dim=-1)
    n, kept = shape.n, kept_of(shape.k)
    words = pad(words, (0, 0, 0, shape.k_tiles % 2)).reshape(shape.bands, -1)  # to whole bricks
    codes = layout.brick().unpack(words, n, words.shape[1] // WORDS * KEPT)[:, :kept]
    places = layout.brick_places().unpack(meta.reshape(shape.bands, -1), n, shape.k_tiles * KEPT)
    rows = _by_row(shape, scales.contiguous().view(shape.scale_dtype))
    return scheme.pack(codes.contiguous(), places[:, :kept].contiguous(), rows, n, shape.k)


def _words(codes: Tensor) -> Tensor:
    """Kept codes -> (bands, k tiles, WORDS): a brick has two halves along k, a record one."""
    tiles = math.ceil(codes.shape[1] / KEPT)
    codes = pad(codes, (0, -codes.shape[1] % (2 * KEPT), 0, -len(codes) % N), value=MIDDLE)
    return layout.brick().pack(codes).view(len(codes) // N, -1, WORDS)[:, :tiles]


def _metadata(places: Tensor) -> Tensor:
    """Places -> (bands, k tiles, PLACES); those of padding are 0 and 1 by turns."""
    n, kept = places.shape
    rows, columns = n + -n % N, kept + -kept % KEPT
    padded = (torch.arange(columns, device=places.device) % 2).to(places.dtype).repeat(rows, 1)
    padded[:n, :kept] = places
    return layout.brick_places().pack(padded).view(rows // N, -1, PLACES)


def _by_lane(shape: Shape, scales: Tensor) -> Tensor:
    """(n, groups) -> (bands, k tiles, 64 * record groups): [group][half][quad][row q + 8 i]."""
    scales = scales.repeat_interleave(shape.repeats, dim=1)
    scales = pad(scales, (0, shape.columns - scales.shape[1], 0, shape.bands * N - shape.n))
    lanes = scales.view(shape.bands, 2, 4, 8, shape.k_tiles, shape.record_groups)
    lanes = lanes.permute(0, 4, 5, 1, 3, 2)  # band, k tile, group, half, quad, i
    return lanes.reshape(shape.bands, shape.k_tiles, -1)


def _by_row(shape: Shape, lanes: Tensor) -> Tensor:
    lanes = lanes.view(shape.bands, shape.k_tiles, shape.record_groups, 2, 8, 4)
    rows = lanes.permute(0, 3, 5, 4, 1, 2).reshape(shape.bands * N, -1)
    return rows[: shape.n, :: shape.repeats][:, : shape.groups].contiguous()
