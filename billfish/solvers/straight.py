"""Straight-through rounding: decoded weights of a uniform grid that gradients can train.

A weight is trained as `position`, its place on the grid in steps from zero; its code is the nearest
whole number in the grid's range. Rounding passes the gradient through as if it were not there. A
scale is trained as a relative change, rounded to the dtype it is stored in. The code depends on the
position alone, so a step of the scale moves decoded weights but flips no code: with weights in
place of positions, every scale's step would flip codes at the edges of their cells, against the
gradient that the same step followed.
"""

from typing import Any

import torch
from torch import Tensor

from billfish.formats.grid import Grid, round_scale

# A starting position is where the solver's target lies, but not beyond this part of its code's
# cell: error feedback often rounds to another code than the nearest, and that code must survive.
CELL = 0.45


def start(target: Tensor, steps: Tensor, scale: Tensor) -> Tensor:
    """Positions of weights that the solver rounded to `steps` whole steps from zero."""
    return steps + (target / scale - steps).clamp_(-CELL, CELL)


class Rounded(torch.autograd.Function):
    """(position, scale, zero) -> clamp(round(position), -zero, levels - 1 - zero) * scale.

    `position` is (..., size); `scale` and `zero`, which is a whole number, are (..., 1). Outside of
    the range the position has no gradient; there the weight follows its bound, so the zero has.
    Nothing but the arguments is kept for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, position: Tensor, scale: Tensor, zero: Tensor, levels: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(position, scale, zero)
        ctx.levels = levels
        return whole_steps(position, zero, levels).mul_(scale).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        position, scale, zero = ctx.saved_tensors
        grad = grads[0].to(position.dtype)
        steps = whole_steps(position, zero, ctx.levels)
        to_scale = (grad * steps).sum(-1, keepdim=True)
        to_code = grad * scale
        inside = steps.eq_(position.round())  # in place: a 70B model's largest has 0.9 GB
        to_zero = None
        if ctx.needs_input_grad[2]:
            to_zero = -(to_code * (1 - inside)).sum(-1, keepdim=True)
        return to_code.mul_(inside), to_scale, to_zero, None, None


class Reordered(torch.autograd.Function):
    """(x, order, back) -> x[:, order], where `back` is the inverse permutation. index_select's own
    gradient adds, which a GPU does in a fixed order only after sorting."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(1, back), None, None


def reordered(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    made: Tensor = Reordered.apply(x, order, back)  # type: ignore[no-untyped-call]
    return made


def rounded(
    position: Tensor, scale: Tensor, zero: Tensor, levels: int, dtype: torch.dtype
) -> Tensor:
    """Rounded with types."""
    made: Tensor = Rounded.apply(position, scale, zero, levels, dtype)  # type: ignore[no-untyped-call]
    return made


def whole_steps(position: Tensor, zero: Tensor, levels: int) -> Tensor:
    return torch.round(position).clamp_(-zero, levels - 1 - zero)


def through(rounded: Tensor, exact: Tensor) -> Tensor:
    """The value of `rounded` with the gradient of `exact`."""
    return exact + (rounded - exact).detach()


def changed(start: Tensor, change: Tensor, dtype: torch.dtype) -> Tensor:
    """A norm as stored, (1 + change) times where it started."""
    exact = start * (1 + change)
    return through(exact.detach().to(dtype).float(), exact)


def changed_scale(start: Tensor, change: Tensor, dtype: torch.dtype) -> Tensor:
    """Likewise a scale, which stays positive and finite."""
    exact = start * (1 + change)
    return through(round_scale(exact.detach(), dtype), exact)


def moved_zero(start: Tensor, move: Tensor, grid: Grid) -> Tensor:
    exact = start + move
    return through(exact.detach().round().clamp(0, grid.levels - 1), exact)
