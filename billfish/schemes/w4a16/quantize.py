"""Quantizes a weight to w4a16, given statistics of its inputs: GPTQ, AWQ and round-to-nearest.

For offline use. A call may take several linears stacked along n that share an input. AWQ's scales
are only searched here; offline/block.py folds them, because that changes other layers.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from billfish.schemes.base import Tensors
from billfish.schemes.w4a16.codes import Codes, PackedRows, TrainableCodes
from billfish.schemes.w4a16.scheme import W4A16
from billfish.solvers import awq, gptq
from billfish.solvers.clip import search_scales
from billfish.solvers.known import Known
from billfish.solvers.methods import METHODS
from billfish.solvers.statistics import Statistics, output_energy

ROW_CODES = {"cpu": 2**20, "cuda": 2**26}  # weights in one step: temporaries of 4 MB on a CPU


def quantize(
    scheme: W4A16,
    weight: Tensor,  # (n, k) fp32
    statistics: Statistics | None,
    method: str,
    dtype: torch.dtype,  # of the stored scales
) -> Codes:
    return _solve(scheme, weight, Known.of(statistics, METHODS[method]), dtype)


def quantize_rows(
    scheme: W4A16,
    portions: Iterable[Tensor],  # fp32, of rows one after another; multiples of 32 but the last
    statistics: Statistics | None,
    method: str,
    dtype: torch.dtype,
) -> PackedRows:
    """The same codes for a weight that comes in portions, of which one at a time is in memory: for
    a head of 128k rows, whose solution takes 10 GB at once."""
    known = Known.of(statistics, METHODS[method])
    return PackedRows.of(_solve(scheme, rows, known, dtype) for rows in portions)


def _solve(scheme: W4A16, weight: Tensor, known: Known, dtype: torch.dtype) -> Codes:
    k, target = weight.shape[1], known.target(weight)
    # Rows are independent; a few at a time keep the temporaries small.
    pieces = (
        _rows(scheme, rows, known, dtype)
        for rows in torch.split(target, max(64, ROW_CODES[weight.device.type] // k))
    )
    codes, scales, zeros = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    solved = Codes(None, known.note, target, scheme, codes, scales, zeros)
    if known.hessian is None:
        return solved
    return replace(solved, energy=output_energy(weight, solved.decoded, known.hessian))


def _rows(
    scheme: W4A16, target: Tensor, known: Known, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of some rows; rounded to nearest without a Hessian."""
    n, k = target.shape
    grid, size = scheme.grid, scheme.group_of(k)
    groups = target.view(n, -1, size)
    if known.hessian is None:
        scale, zero = grid.fit(groups.amin(-1), groups.amax(-1), dtype)
    else:
        scale, zero = search_scales(target, known.hessian, grid, size, dtype)
    if known.factor is None:
        codes = grid.encode(groups, scale[..., None], zero[..., None])
    else:
        rounder = gptq.GridRounder(grid, scale, zero, k)
        codes = gptq.solve(target, known.factor, rounder).view_as(groups)
    byte = torch.uint8
    return codes.view(n, k).to(byte), scale.to(dtype), zero.to(byte)


def trainable_scales(scheme: W4A16, tensors: Tensors) -> TrainableCodes:
    """Canonical tensors whose scales can be trained; codes and zeros stay as they are."""
    assert not scheme.has_g_idx, "Billfish writes columns in their own order"
    codes, zeros = scheme.codes(tensors), scheme.zeros(tensors)
    return TrainableCodes(scheme, codes, tensors["weight_scale"], zeros, None)


def search_fold(
    scheme: W4A16,
    weight: Tensor,  # (n, k) fp32: all linears that share an input, stacked
    statistics: Statistics,
    share: Tensor,  # (k,) int64: channels with equal values share a scale
    dtype: torch.dtype,
) -> Tensor:
    """AWQ's factor of each column, (k,) fp32."""
    return awq.search_fold(
        weight,
        statistics.hessian,
        statistics.magnitude,
        share,
        scheme.grid,
        scheme.group_of(weight.shape[1]),
        dtype,
    )
