"""Converts dense weights to the layout that a CPU multiplies fastest, once, when they are loaded.

bf16 weights are stored in oneDNN's blocked layout. PyTorch would convert them in every call, which
takes a third of a product of few tokens. fp32 weights that 16 bits represent exactly (from a bf16
file, for example) are stored in 16 bits: products of few tokens are bound by reading the weights.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from billfish.kernels import halves

FEW = 32  # tokens; for more, converting to fp32 and using PyTorch's product is faster


class Prepacked(nn.Module):
    """A linear whose weight is in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y


class Halves(nn.Module):
    """An fp32 linear whose weight is stored in 16 bits without loss."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > FEW * x.shape[-1]:
            return nn.functional.linear(x, self.weight.float(), self.bias)
        y = halves.product(x, self.weight)
        return y if self.bias is None else y + self.bias


def prepack(linear: Any, *parts: nn.Linear, keep: bool = False) -> Any:
    """The linear in a faster layout, or the linear itself if it is not dense, not on a CPU, or
    would gain nothing. Unless `keep` is set, the weights of the original linear and of `parts`,
    which are views of its rows, are freed: no weight is stored twice."""
    if type(linear) is not nn.Linear or linear.weight.device.type != "cpu":
        return linear
    packed: nn.Module | None = None
    weight = linear.weight.data
    bias = None if linear.bias is None else linear.bias.data
    if weight.dtype == torch.bfloat16 and _works():
        packed = Prepacked(weight, bias)
    elif weight.dtype == torch.float32 and weight.shape[1] % 16 == 0 and find_spec("llvmlite"):
        tried = (weight.to(dtype) for dtype in (torch.bfloat16, torch.float16))
        same = next((half for half in tried if torch.equal(half.float(), weight)), None)
        packed = None if same is None else Halves(same, bias)
    if packed is None:
        return linear
    for each in () if keep else (linear, *parts):
        each.weight.data = each.weight.data.new_empty(0)
    return packed


@cache
def _works() -> bool:
    """Whether oneDNN's operators work here. They are internal to PyTorch's compiler and may change,
    so they are tried."""
    weight = torch.linspace(-1, 1, 48 * 64).view(48, 64).bfloat16()
    bias = weight[:, 0].contiguous()
    try:
        found = Prepacked(weight, bias)(weight)
    except (AttributeError, RuntimeError):  # absent, or not built for this CPU
        return False
    wanted = nn.functional.linear(weight.float(), weight.float(), bias.float())
    return torch.allclose(found.float(), wanted, rtol=0.01, atol=0.01)
