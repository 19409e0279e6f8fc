"""Joins linears that share an input (q/k/v, gate/up) into one product, without storing weights
twice.

The weights of the linears become views of the joined ones, so the linears still run, move and save
as before. Linears that cannot be joined are left unchanged; the function then returns None.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from billfish.models.linear import QuantLinear
from billfish.schemes.base import GatedOp, LinearOp, together

Product = Callable[[Tensor], Tensor]  # (..., k) -> (..., sum of n)


def joined(module: nn.Module, *names: str) -> Product | None:
    """One product that gives the concatenated outputs of these linears, dense or packed; None if
    they are of different kinds, or their ops cannot be joined."""
    linears = [getattr(module, name) for name in names]
    kinds = {(type(linear), linear.bias is None) for linear in linears}
    if len(kinds) > 1:
        return None
    if type(linears[0]) is nn.Linear:
        bias, sizes = linears[0].bias is not None, [linear.out_features for linear in linears]
        whole = nn.Linear(linears[0].in_features, sum(sizes), bias, device="meta")
        for part in ("weight", "bias"):
            if (shared := _share(linears, part)) is not None:
                setattr(whole, part, nn.Parameter(shared, requires_grad=False))
        return whole
    op = _packed(linears) if type(linears[0]) is QuantLinear else None
    return op and partial(op, bias=_share(linears, "bias"))


def gated(module: nn.Module, *names: str) -> GatedOp | None:
    """silu(gate) * up as one op, for two packed linears or one fused one; None if their op has no
    such kernel, or they have a bias."""
    linears = [getattr(module, name) for name in names]
    if any(type(linear) is not QuantLinear or linear.bias is not None for linear in linears):
        return None
    ops = _ops(linears)
    op: GatedOp | None = type(ops[0]).gate(ops) if len(set(map(type, ops))) == 1 else None
    if op is not None:
        for linear, part in zip(linears, op.parts, strict=True):
            linear.op = part
    return op


def side_by_side(module: nn.Module, *names: str) -> Product:
    """The concatenated outputs as in `joined`, computed by one linear after the other."""
    linears = [getattr(module, name) for name in names]

    def run(x: Tensor) -> Tensor:
        taken = shared_input(linears, x)
        return torch.cat([linear(taken) for linear in linears], -1)

    return run


def shared_input(linears: list[Any], x: Tensor) -> Any:
    """The input for all of these linears, prepared once if their ops take the same form of it: else
    q, k and v would quantize the same activations three times."""
    if any(type(linear) is not QuantLinear for linear in linears):
        return x
    ops = _ops(linears)
    takes = {op.takes for op in ops}
    return ops[0].prepare(x) if len(takes) == 1 and takes != {"x"} else x


def _packed(linears: list[QuantLinear]) -> LinearOp | None:
    ops = _ops(linears)
    return type(ops[0]).join(ops) if len(set(map(type, ops))) == 1 else None


def _ops(linears: list[QuantLinear]) -> list[Any]:
    for linear in linears:
        if linear.op is None:
            linear.arrange(linear.asked, linear.invariant)
    return [linear.op for linear in linears]


def _share(linears: list[Any], part: str) -> Tensor | None:
    """All weights (or biases) in one tensor, of which the linears' own become views."""
    if getattr(linears[0], part) is None:
        return None
    whole, views = together([getattr(linear, part).data for linear in linears])
    for linear, view in zip(linears, views, strict=True):
        getattr(linear, part).data = view
    return whole
