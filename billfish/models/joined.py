"""Joins linears that share an input (q/k/v, gate/up) into one product, without storing weights
twice.

The weights of the linears become views of the joined ones, so the linears still run, move and save
as before. Linears that cannot be joined are left unchanged; the function then returns None.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from billfish.models.experts import Experts
from billfish.models.linear import QuantLinear
from billfish.schemes.base import GatedOp, LinearOp, NormInput, together

Product = Callable[[Any], Tensor]  # (..., k), or what ops prepare of it -> (..., sum of n)


class Joined:
    """The op of several linears, and their biases."""

    def __init__(self, op: LinearOp, bias: Tensor | None) -> None:
        self.op, self.bias, self.norm_input = op, bias, op.norm_input

    def __call__(self, x: Any) -> Tensor:
        return self.op(x, self.bias)


class SideBySide:
    """One linear after the other."""

    def __init__(self, linears: list[Any]) -> None:
        self.linears = linears

    def norm_input(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> NormInput:
        op = shared_op(self.linears)
        return None if op is None else op.norm_input(hidden, delta, weight, eps)

    def __call__(self, x: Any) -> Tensor:
        op = shared_op(self.linears) if isinstance(x, Tensor) else None
        taken = x if op is None else op.prepare(x)
        return torch.cat([linear(taken) for linear in self.linears], -1)


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
    return op and Joined(op, _share(linears, "bias"))


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


def stack(experts: Experts, dtype: torch.dtype) -> None:
    """Let all experts run as one op, for activations of `dtype`; unchanged if they are not packed,
    their op has no such kernels, or they compute anything but SwiGLU without biases."""
    linears: list[list[Any]] = [list(expert.children()) for expert in experts.all()]
    plain = all(type(one) is QuantLinear and one.bias is None for each in linears for one in each)
    if experts.op is not None or not plain or not experts.gating.is_swiglu():
        return
    ops = [_ops(each) for each in linears]
    kinds = {type(op) for each in ops for op in each}
    experts.op = kinds.pop().stack(ops, dtype) if len(kinds) == 1 else None
    if experts.op is not None:
        for each, parts in zip(linears, experts.op.parts, strict=True):
            for linear, part in zip(each, parts, strict=True):
                linear.op = part


def side_by_side(module: nn.Module, *names: str) -> Product:
    """The concatenated outputs as in `joined`, computed by one linear after the other."""
    return SideBySide([getattr(module, name) for name in names])


def norm_input(
    product: Product, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> NormInput:
    """The RMS norm of hidden + delta as an input of the product, and the sum, as a LinearOp's."""
    ask: Callable[..., NormInput] | None = getattr(product, "norm_input", None)
    return ask and ask(hidden, delta, weight, eps)


def shared_op(linears: list[Any]) -> LinearOp | None:
    """The op that prepares the input for all of these linears, if their ops take the same form of
    it: else q, k and v would quantize the same activations three times."""
    if any(type(linear) is not QuantLinear for linear in linears):
        return None
    ops = _ops(linears)
    takes = {op.takes for op in ops}
    op: LinearOp = ops[0]
    return op if len(takes) == 1 and takes != {"x"} else None


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
