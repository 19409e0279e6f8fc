"""Quantizes a weight to w4ax, given statistics of its inputs: GPTQ and round-to-nearest.

For offline use. A call may take several linears stacked along n that share an input. Factors of
input channels are only chosen here; offline/block.py folds them, because that changes other layers,
and rounds the inputs of linears that are quantized.
"""

from dataclasses import replace

import torch
from torch import Tensor

from billfish.schemes.base import Tensors
from billfish.schemes.w4ax.activations import round_tokens
from billfish.schemes.w4ax.codes import TrainableWhole, WholeScaled
from billfish.schemes.w4ax.descent import descend
from billfish.schemes.w4ax.scheme import W4AX
from billfish.schemes.w4ax.search import GRID, search
from billfish.schemes.w4ax.walk import Walk, walk_order
from billfish.solvers import straight
from billfish.solvers.known import Known
from billfish.solvers.methods import METHODS
from billfish.solvers.statistics import Statistics, output_energy

ROW_CODES = {"cpu": 2**20, "cuda": 2**26}  # weights in one step: temporaries of 4 MB on a CPU
# Exponent of a channel's root mean square in its factor. Output error of SmolLM2's linears with
# rounded activations: 0.15 0.00390, 0.25 0.00385, 0.35 0.00389; without factors 10 % more.
STRENGTH = 0.25
LEAST = 1e-6  # of the mean square of all channels: a dead channel gets no extreme factor


def quantize(
    scheme: W4AX,
    weight: Tensor,  # (n, k) fp32
    statistics: Statistics | None,
    method: str,
    dtype: torch.dtype,  # of the stored bases
) -> WholeScaled:
    order = None
    if statistics is not None:
        order = walk_order(statistics.hessian.diagonal(), scheme.group_size)
    known = Known.of(statistics, METHODS[method], order)
    target = known.target(weight)
    walk = None if known.factor is None else Walk(known.factor, scheme.group_size)
    # Rows are independent; a few at a time keep the temporaries small.
    pieces = (
        _rows(scheme, rows, known.hessian, walk, dtype)
        for rows in torch.split(target, max(64, ROW_CODES[weight.device.type] // weight.shape[1]))
    )
    codes, q, base = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    solved = WholeScaled(None, known.note, target, scheme, codes, q, base)
    if known.hessian is None:
        return solved
    return replace(solved, energy=output_energy(weight, solved.decoded, known.hessian))


def _rows(
    scheme: W4AX, target: Tensor, hessian: Tensor | None, walk: Walk | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, q and bases of some rows."""
    base, q = search(target, hessian, scheme.group_size, dtype)
    if walk is not None:
        codes, q = walk.run(target, base, q)
        if hessian is not None:
            codes = descend(target, codes, q * base, hessian)
    else:
        scale = (q * base)[..., None]
        groups = target.view(*q.shape, -1)
        codes = GRID.encode(groups, scale, torch.full_like(scale, GRID.middle)).view_as(target)
    byte = torch.uint8
    return codes.to(byte), q.to(byte), base.to(dtype)


def trainable_scales(scheme: W4AX, tensors: Tensors) -> TrainableWhole:
    """Canonical tensors whose bases can be trained; codes and q stay as they are."""
    base = tensors["weight_scale"]
    return TrainableWhole(scheme, scheme.codes(tensors), scheme.scales(tensors), base, None)


def rounded_input(scheme: W4AX, x: Tensor) -> Tensor:
    """Activations as ops round them, with the gradient of x."""
    x8, scale = round_tokens(x.detach())
    return straight.through((x8 * scale).to(x.dtype), x)


def channel_factors(
    scheme: W4AX,
    squares: Tensor,  # (k,) fp32: sums of squared inputs
    share: Tensor,  # (k,) int64: channels with equal values share a factor
) -> Tensor | None:
    """By what each input channel is divided before it is rounded, (k,) fp32: a token has one scale,
    so channels should be alike. None: they stay as they are, where several share a factor, as
    attention's outputs do with grouped queries."""
    shared = bool((share.bincount() > 1).any())
    if shared or not bool(torch.isfinite(squares).all()) or not bool(squares.any()):
        return None
    factor = squares.clamp(min=LEAST * float(squares.mean())) ** (STRENGTH / 2)
    return factor / (factor.max() * factor.min()).sqrt()
