"""Quantizes a weight to w2416, given statistics of its inputs.

A group's error in 2 bits decides whether it gets 4; the weights with the largest errors in 2-bit
groups become outliers; then walk.py rounds all columns. A call may take several linears stacked
along n that share an input: they get the same groups of 4 bits.
"""

import torch
from torch import Tensor

from billfish.formats.layout import pack_stream
from billfish.schemes.base import Solved, Tensors
from billfish.schemes.w2416.codes import Mixed, TrainableMixed
from billfish.schemes.w2416.scheme import W2416, pack_bands, pack_base
from billfish.schemes.w2416.search import (
    Groups,
    choose_four,
    choose_outliers,
    grouped,
    of_bands,
)
from billfish.schemes.w2416.shares import BAND, GROUP, Shares
from billfish.schemes.w2416.walk import Walk, Walked, walk_order
from billfish.solvers.clip import diagonal_blocks
from billfish.solvers.known import Known
from billfish.solvers.methods import METHODS
from billfish.solvers.statistics import Statistics, output_energy

SEARCHED = {"cpu": 2**16, "cuda": 2**22}  # weights in one step, times four zeros
# Weights in one walk, which holds several fp32 copies of them: memory is bounded by this, not by
# the layer (docs/LOG.md, 2026-11-17).
WALKED = {"cpu": 2**22, "cuda": 2**25}


def quantize(
    scheme: W2416,
    weight: Tensor,  # (n, k) fp32
    statistics: Statistics | None,
    method: str,
    dtype: torch.dtype,  # of the stored 16-bit numbers
) -> Solved:
    share = scheme.shares(weight.shape[1])
    hessian = _finite(statistics)
    cost, errors = _two_bits_everywhere(weight, hessian)
    four = choose_four(cost, share)
    importance = cost if hessian is None else hessian.diagonal().view(-1, GROUP).sum(1)
    order = walk_order(four, importance)
    known = Known.of(statistics, METHODS[method], order)
    target = known.target(weight)
    errors[:, four.repeat_interleave(GROUP)] = -1.0  # no outlier in 4-bit groups
    walk, made, energy = Walk(order, share, known.hessian, known.factor, dtype), [], []
    size = max(1, WALKED[weight.device.type] // (BAND * weight.shape[1])) * BAND
    for start in range(0, len(weight), size):
        rows = slice(start, start + size)
        places = choose_outliers(errors[rows], share)
        walked = walk.run(target[rows], _mask(places, share))
        made.append(_tensors(walked, four, places, share, dtype))
        if known.hessian is not None:
            decoded = scheme.dequantize(made[-1])
            energy.append(output_energy(weight[rows], decoded, known.hessian))
    whole = {name: torch.cat([some[name] for some in made]) for name in made[0]}
    whole["input_bits"] = made[0]["input_bits"]
    return Mixed(torch.cat(energy) if energy else None, known.note, target, scheme, whole)


def trainable_scales(scheme: W2416, tensors: Tensors) -> TrainableMixed:
    """Canonical tensors whose second-order and 4-bit scales can be trained."""
    return TrainableMixed(scheme, tensors, None)


def _finite(statistics: Statistics | None) -> Tensor | None:
    if statistics is None or not statistics.tokens:
        return None
    return statistics.hessian if bool(torch.isfinite(statistics.hessian).all()) else None


def _two_bits_everywhere(weight: Tensor, hessian: Tensor | None) -> tuple[Tensor, Tensor]:
    """What every group would cost in 2 bits, (k / 16,), and every weight, (n, k)."""
    n, k = weight.shape
    metric = None if hessian is None else diagonal_blocks(hessian, GROUP)
    cost, errors = torch.zeros(k // GROUP, device=weight.device), torch.empty_like(weight)
    size = max(BAND, SEARCHED[weight.device.type] // k)
    for start in range(0, n, size):
        rows = slice(start, start + size)
        groups = Groups(grouped(weight[rows]), metric)
        groups.search()
        cost += groups.best.sum((1, 2))
        errors[rows] = groups.errors.transpose(0, 1).reshape(-1, k)
    errors.square_()
    return cost, errors if hessian is None else errors.mul_(hessian.diagonal())


def _mask(places: Tensor, share: Shares) -> Tensor:  # (n, k) bool
    bands, parts, _ = places.shape
    mask = torch.zeros(bands, parts, BAND * share.part, dtype=torch.bool, device=places.device)
    mask.scatter_(-1, places, True)
    return mask.view(bands, parts, BAND, -1).transpose(1, 2).reshape(bands * BAND, -1)


def _tensors(
    walked: Walked, four: Tensor, places: Tensor, share: Shares, dtype: torch.dtype
) -> dict[str, Tensor]:
    codes, columns = walked.codes.to(torch.uint8), four.repeat_interleave(GROUP)
    added = of_bands(walked.added, share).gather(-1, places)
    return {
        "input_bits": torch.where(four, 4, 2).to(torch.uint8),
        "weight_packed": pack_stream(codes[:, ~columns], 2),
        "weight_zero": pack_bands(walked.zero, 2, torch.int32),
        "scale_code": pack_bands(walked.code, 4, torch.int64),
        "scale_base": pack_base(walked.base, walked.offset),
        "weight_packed_4": pack_stream(codes[:, columns], 4),
        "weight_scale_4": walked.scale_4.to(dtype),
        "outlier_place": ((places ^ 0x8000) - 0x8000).to(torch.int16),
        "outlier_value": added.to(dtype),
    }
