"""Quantizes a weight to w2416, given statistics of its inputs.

A group's error in 2 bits decides whether it gets 4; the weights with the largest remaining errors
become outliers. Then scales and zeros are searched without the outliers, scales are rounded to
second order, and GPTQ rounds all columns, each on its own grid, outliers exactly. A call may take
several linears stacked along n that share an input: they get the same order of columns.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from billfish.formats.grid import Grid
from billfish.formats.layout import pack_stream
from billfish.kernels.feedback import round_columns
from billfish.schemes.base import Solved, Tensors
from billfish.schemes.w2416.codes import Mixed, TrainableMixed
from billfish.schemes.w2416.scheme import (
    W2416,
    ZERO,
    ZERO_STEP,
    pack_bands,
    pack_base,
    spread,
)
from billfish.schemes.w2416.search import (
    NEAR,
    Groups,
    choose_four,
    choose_outliers,
    columns_of,
    nearest,
    second_order,
)
from billfish.schemes.w2416.shares import BAND, GROUP, Shares
from billfish.solvers import gptq
from billfish.solvers.clip import diagonal_blocks, search_scales
from billfish.solvers.known import Known
from billfish.solvers.methods import METHODS
from billfish.solvers.statistics import Statistics, output_energy

SEARCHED = {"cpu": 2**18, "cuda": 2**24}  # weights in one step, as in solvers/clip.py
FOUR = Grid(4, symmetric=True)
FINE, WIDE = 2.0**12, 2.0**23  # the grid of outliers: steps of a 4096th of the group's, +-2048


def quantize(
    scheme: W2416,
    weight: Tensor,  # (n, k) fp32
    statistics: Statistics | None,
    method: str,
    dtype: torch.dtype,  # of the stored 16-bit numbers
) -> Solved:
    known = Known.of(statistics, METHODS[method])
    target = known.target(weight)
    n, k = target.shape
    share = scheme.shares(k)
    rows = max(BAND, SEARCHED[weight.device.type] // k // BAND * BAND)
    pieces = torch.split(target, rows)
    blocks = None if known.hessian is None else diagonal_blocks(known.hessian, GROUP)
    cost = torch.stack([_two_bit_cost(piece, blocks) for piece in pieces]).sum(0)
    plan = _Plan.of(known, share, choose_four(cost, share), blocks)
    found = [_solve(plan, piece, dtype) for piece in pieces]
    tensors = {name: torch.cat([part[name] for part in found]) for name in found[0]}
    tensors["input_bits"] = torch.where(plan.four, 4, 2).to(torch.uint8)
    made = {name: tensors[name].contiguous() for name in scheme.tensors(n, k, dtype)}
    solved = Mixed(None, known.note, target, scheme, made)
    if known.hessian is None:
        return solved
    return replace(solved, energy=output_energy(weight, solved.decoded, known.hessian))


def trainable_scales(scheme: W2416, tensors: Tensors) -> TrainableMixed:
    """Canonical tensors whose second-order and 4-bit scales can be trained."""
    return TrainableMixed(scheme, tensors, None)


def _two_bit_cost(rows: Tensor, blocks: Tensor | None) -> Tensor:  # (k / 16,)
    groups = Groups(_grouped(rows), blocks)
    groups.search()
    return groups.best.sum((1, 2))


def _grouped(rows: Tensor) -> Tensor:  # (n, g * 16) -> (g, n, 16)
    return rows.view(len(rows), -1, GROUP).transpose(0, 1).contiguous()


@dataclass(frozen=True)
class _Plan:
    """What all rows share."""

    known: Known
    share: Shares
    four: Tensor  # (k / 16,) bool
    columns_2: Tensor  # int64
    columns_4: Tensor
    blocks_2: Tensor | None  # (g, 16, 16)
    hessian_4: Tensor | None

    @staticmethod
    def of(known: Known, share: Shares, four: Tensor, blocks: Tensor | None) -> "_Plan":
        columns_2, columns_4 = (columns_of(which.nonzero()[:, 0]) for which in (~four, four))
        hessian = None
        if known.hessian is not None:
            hessian = known.hessian[columns_4[:, None], columns_4]
        blocks_2 = None if blocks is None else blocks[~four]
        return _Plan(known, share, four, columns_2, columns_4, blocks_2, hessian)


def _solve(plan: _Plan, target: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Canonical tensors of some bands, without input_bits."""
    n = len(target)
    share, two, four = plan.share, plan.columns_2, plan.columns_4
    groups = Groups(_grouped(target[:, two]), plan.blocks_2)
    groups.search()
    # Outliers: where the error weighs most, of 2-bit weights alone.
    cost = torch.full_like(target, -1.0)
    error = groups.errors.transpose(0, 1).reshape(n, -1).square_()
    if plan.known.hessian is not None:
        error *= plan.known.hessian.diagonal()[two]
    cost[:, two] = error
    places = choose_outliers(cost, share)
    outliers = _mask(places, share, n)
    counts = _grouped((~outliers[:, two]).float())
    groups = Groups(groups.weights, plan.blocks_2, counts)
    groups.search()
    base, offset = second_order(groups.scale[..., 0].T.contiguous())
    _search_codes(groups, spread(base), spread(offset))
    code, zero = groups.code[..., 0].T, groups.zero[..., 0].T  # (n, g)
    scale_2 = (code + spread(offset)) * spread(base)
    scale_4 = torch.ones(n, share.parts, device=target.device)
    if share.four:
        scale_4 = _scales_4(plan, target[:, four], dtype)

    grid = _Grid.of(plan, scale_2, zero * ZERO_STEP + ZERO, scale_4, outliers)
    rounded = grid.rounded(target, plan.known.factor)
    # What an outlier adds to the nearest code of its group.
    codes, found = rounded, rounded[outliers]
    step, origin = grid.two_step[outliers], grid.two_zero[outliers]
    value = (found - WIDE) * (step / FINE)
    codes[outliers] = (value / step + origin).round().clamp(0, 3)
    added = value - nearest(value, step, origin)
    delta = torch.zeros_like(target)
    delta[outliers] = added
    flat = _of_bands(delta, share)
    codes = codes.to(torch.uint8)
    return {
        "weight_packed": pack_stream(codes[:, two], 2),
        "weight_zero": pack_bands(zero, 2, torch.int32),
        "scale_code": pack_bands(code, 4, torch.int64),
        "scale_base": pack_base(base, offset),
        "weight_packed_4": pack_stream(codes[:, four], 4),
        "weight_scale_4": scale_4.to(dtype),
        "outlier_place": ((places ^ 0x8000) - 0x8000).to(torch.int16),
        "outlier_value": flat.gather(-1, places).to(dtype),
    }


def _of_bands(of_weights: Tensor, share: Shares) -> Tensor:
    """(n, k) -> (n / 16, parts, places)."""
    n, k = of_weights.shape
    bands = of_weights.view(n // BAND, BAND, share.parts, k // share.parts)
    return bands.transpose(1, 2).reshape(n // BAND, share.parts, -1)


def _mask(places: Tensor, share: Shares, n: int) -> Tensor:  # (n, k) bool
    bands, parts, _ = places.shape
    mask = torch.zeros(bands, parts, BAND * share.part, dtype=torch.bool, device=places.device)
    mask.scatter_(-1, places, True)
    return mask.view(bands, parts, BAND, -1).transpose(1, 2).reshape(n, -1)


def _search_codes(groups: Groups, base: Tensor, offset: Tensor) -> None:
    """Codes of scales and zeros, among those that can be stored."""
    wide, shift = base.T[..., None], offset.T[..., None]  # (g, n, 1)
    around = (groups.scale / wide - shift).round_()
    groups.best.fill_(torch.inf)
    for step in NEAR:
        code = (around + step).clamp_(0, 15)
        # (0 + 0) * base would be no scale: such a group decodes to zeros alone.
        code = torch.where(code + shift == 0, torch.ones_like(code), code)
        groups.attempt((code + shift) * wide, code)


def _scales_4(plan: _Plan, weight: Tensor, dtype: torch.dtype) -> Tensor:  # (n, parts)
    size = GROUP * plan.share.four
    if plan.hessian_4 is not None:
        return search_scales(weight, plan.hessian_4, FOUR, size, dtype)[0]
    parts = weight.view(len(weight), -1, size)
    return FOUR.fit(parts.amin(-1), parts.amax(-1), dtype)[0]


@dataclass(frozen=True)
class _Grid:
    """The grid of each weight, (n, k), columns in Hugging Face order."""

    step: Tensor
    shift: Tensor  # zeros that are not whole: the weight is rounded on a grid shifted by so much
    origin: Tensor  # whole zeros
    levels: Tensor
    two_step: Tensor  # of outliers: the grid that their code is on
    two_zero: Tensor

    @staticmethod
    def of(
        plan: _Plan, scale_2: Tensor, zero: Tensor, scale_4: Tensor, outliers: Tensor
    ) -> "_Grid":
        n, k = outliers.shape
        step, origin, levels = (torch.empty(n, k, device=zero.device) for _ in range(3))
        step[:, plan.columns_2] = scale_2.repeat_interleave(GROUP, 1)
        step[:, plan.columns_4] = scale_4.repeat_interleave(GROUP * plan.share.four, 1)
        origin[:, plan.columns_2] = zero.repeat_interleave(GROUP, 1)
        origin[:, plan.columns_4] = 8.0
        levels[:, plan.columns_2] = 4.0
        levels[:, plan.columns_4] = 16.0
        two_step, two_zero = step.clone(), origin.clone()
        step = torch.where(outliers, step / FINE, step)
        origin = torch.where(outliers, WIDE, origin)
        levels = torch.where(outliers, 2 * WIDE, levels)
        whole = origin.round()
        return _Grid(step, (whole - origin) * step, whole, levels, two_step, two_zero)

    def rounded(self, target: Tensor, factor: gptq.Factor | None) -> Tensor:
        """Codes, (n, k) fp32."""
        if factor is None:
            codes = ((target - self.shift) / self.step).round_().add_(self.origin)
            return torch.minimum(codes.clamp_(min=0), self.levels - 1)
        step, shift, origin, levels = (
            of.T.contiguous() for of in (self.step, self.shift, self.origin, self.levels)
        )

        def rounder(block: Tensor, places: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
            block = block - shift[places]
            return round_columns(block, step[places], origin[places], spread, levels[places])

        return gptq.solve(target, factor, rounder)
