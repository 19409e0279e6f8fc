"""Dense bf16 weights on a CPU as oneDNN multiplies them: put into its order once, when they are
loaded. PyTorch has it done in every call, which is a third of a product of few tokens.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


class Prepacked(nn.Module):
    """A linear in the order of oneDNN: its numbers."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y


def prepack(linear: Any, *parts: nn.Linear, keep: bool = False) -> Any:
    """The linear in that order. Unless told to keep it, it is empty from now on, and so are its
    parts, the views of its rows: no weight is stored twice. What is no dense linear of bf16 on a
    CPU comes back as it is."""
    if type(linear) is not nn.Linear or linear.weight.dtype != torch.bfloat16:
        return linear
    if linear.weight.device.type != "cpu" or not _works():
        return linear
    packed = Prepacked(linear.weight.data, None if linear.bias is None else linear.bias.data)
    for each in () if keep else (linear, *parts):
        each.weight.data = each.weight.data.new_empty(0)
    return packed


@cache
def _works() -> bool:
    """These operators are PyTorch's for its own compiler, with no promise: they are tried."""
    weight = torch.linspace(-1, 1, 48 * 64).view(48, 64).bfloat16()
    bias = weight[:, 0].contiguous()
    try:
        found = Prepacked(weight, bias)(weight)
    except (AttributeError, RuntimeError):  # not there, or not for this processor
        return False
    wanted = nn.functional.linear(weight.float(), weight.float(), bias.float())
    return torch.allclose(found.float(), wanted, rtol=0.01, atol=0.01)
