"""Quantizes a weight to w4ax, given statistics of its inputs: GPTQ and round-to-nearest.

For offline use. A call may take several linears stacked along n that share an input. Factors and
places of input channels are only chosen here; offline/block.py folds them, because that changes
other layers, and rounds the inputs of linears that are quantized.

fmpq: channels are ordered by decreasing mean square, so that large ones share blocks. Blocks that
would harm outputs most by 4 bits keep 8. All of GPTQ is done in stored order, with weights and
Hessian rotated as inputs are.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from billfish.formats.grid import Grid
from billfish.schemes.base import Tensors
from billfish.schemes.w4ax.codes import Inputs, TrainableWhole, WholeScaled, rounded_input
from billfish.schemes.w4ax.scheme import W4AX
from billfish.schemes.w4ax.search import search
from billfish.schemes.w4ax.walk import Walk, walk_order
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
    inputs = choose_inputs(scheme, weight, statistics) if scheme.mixed else None
    if inputs is not None:
        weight = scheme.stored_order(weight, inputs.order, inputs.bits)
        if statistics is not None:
            # Both sides: H' = T H T^t for x' = T x
            def turn(rows: Tensor) -> Tensor:
                return scheme.stored_order(rows, inputs.order, inputs.bits)

            statistics = statistics.transformed(turn)
    order = None
    if statistics is not None:
        order = walk_order(statistics.hessian.diagonal(), scheme.group_size)
    known = Known.of(statistics, METHODS[method], order)
    target, grid = known.target(weight), Grid(4, scheme.symmetric)
    walk = None if known.factor is None else Walk(known.factor, scheme.group_size, grid)
    # Rows are independent; a few at a time keep the temporaries small.
    pieces = (
        _rows(scheme, grid, rows, known.hessian, walk, dtype)
        for rows in torch.split(target, max(64, ROW_CODES[weight.device.type] // weight.shape[1]))
    )
    codes, q, zero, base = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    solved = WholeScaled(None, known.note, target, scheme, codes, q, zero, base, inputs)
    if known.hessian is None:
        return solved
    return replace(solved, energy=output_energy(weight, solved.stored, known.hessian))


def _rows(
    scheme: W4AX,
    grid: Grid,
    target: Tensor,
    hessian: Tensor | None,
    walk: Walk | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, q, zeros and bases of some rows."""
    base, q, zero = search(target, hessian, grid, scheme.group_size, dtype)
    if walk is not None:
        codes, q, zero = walk.run(target, base, q, zero)
    else:
        groups = target.view(*q.shape, -1)
        codes = grid.encode(groups, (q * base)[..., None], zero[..., None]).view_as(target)
    byte = torch.uint8
    return codes.to(byte), q.to(byte), zero.to(byte), base.to(dtype)


def choose_inputs(scheme: W4AX, weight: Tensor, statistics: Statistics | None) -> Inputs:
    """fmpq: the order of inputs, and the bits of blocks. Rounding a block adds errors in proportion
    to its mean square to all of its columns, so it costs that times their squared norm. Without
    data inputs keep their order, and the first blocks have 8 bits."""
    k = weight.shape[1]
    order = torch.arange(k, device=weight.device)
    if statistics is None or not statistics.tokens:
        return Inputs(order, scheme.block_bits(-order[:: scheme.block].float()))
    squares = statistics.hessian.diagonal()
    if not statistics.placed:
        order = squares.argsort(descending=True, stable=True)
    noise, norms = (
        each[order].view(-1, scheme.block).sum(1) for each in (squares, weight.square().sum(0))
    )
    return Inputs(order, scheme.block_bits(noise * norms))


def trainable_scales(scheme: W4AX, tensors: Tensors) -> TrainableWhole:
    """Canonical tensors whose bases can be trained; all else stays as it is."""
    inputs = _inputs(scheme, tensors)
    codes, q, zero = scheme.codes(tensors), scheme.scales(tensors), scheme.zeros(tensors)
    base = tensors["weight_scale"]
    return TrainableWhole(WholeScaled(None, None, None, scheme, codes, q, zero, base, inputs), None)


def input_rounding(scheme: W4AX, tensors: Tensors) -> Callable[[Tensor], Tensor]:
    """Activations -> as ops round them before these canonical tensors."""
    return partial(rounded_input, scheme, _inputs(scheme, tensors))


def _inputs(scheme: W4AX, tensors: Tensors) -> Inputs | None:
    if not scheme.mixed:
        return None
    return Inputs(tensors["input_order"].long(), tensors["input_bits"])


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


def channel_order(scheme: W4AX, squares: Tensor) -> Tensor | None:
    """(k,) int64: the order of channels that the layer before may produce, if it can produce them
    in any; None: they stay in place."""
    return squares.argsort(descending=True, stable=True) if scheme.mixed else None
