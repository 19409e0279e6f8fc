"""Dense weights on a CPU as they are multiplied fastest, arranged once, when they are loaded.

bf16: in oneDNN's order. PyTorch has it done in every call, a third of a product of few tokens.
fp32, where 16 bits hold the same numbers, as they do if the file had bf16: in 16 bits. Products of
few tokens take as long as weights take to read.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from billfish.kernels import halves

FEW = 32  # tokens; for more the library's products of fp32 are faster, conversion included


class Prepacked(nn.Module):
    """A linear in the order of oneDNN: its numbers."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y


class Halves(nn.Module):
    """A linear of fp32 whose numbers fit 16 bits."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() > FEW * x.shape[-1]:
            return nn.functional.linear(x, self.weight.float(), self.bias)
        y = halves.product(x, self.weight)
        return y if self.bias is None else y + self.bias


def prepack(linear: Any, *parts: nn.Linear, keep: bool = False) -> Any:
    """The linear arranged so. Unless told to keep it, it is empty from now on, and so are its
    parts, the views of its rows: no weight is stored twice. What is no dense linear on a CPU, or
    would gain nothing, comes back as it is."""
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
    """These operators are PyTorch's for its own compiler, with no promise: they are tried."""
    weight = torch.linspace(-1, 1, 48 * 64).view(48, 64).bfloat16()
    bias = weight[:, 0].contiguous()
    try:
        found = Prepacked(weight, bias)(weight)
    except (AttributeError, RuntimeError):  # not there, or not for this processor
        return False
    wanted = nn.functional.linear(weight.float(), weight.float(), bias.float())
    return torch.allclose(found.float(), wanted, rtol=0.01, atol=0.01)
