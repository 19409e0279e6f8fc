"""The order of rows in which gate and up of a SwiGLU layer are one product that stores
silu(gate) * up.

Their rows are interleaved by 8: of every 16 the first are gates and the next their ups, so that a
thread of a kernel that holds rows r and r + 8 of a tensor-core tile holds a gate and its up.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from billfish.schemes.base import Tensors
from billfish.schemes.w4a16.scheme import W4A16

RUN = 8  # rows of one kind


def order(n: int) -> Tensor:
    """Place among the n interleaved rows -> place among all gates, then all ups."""
    return torch.arange(n).view(2, -1, RUN).transpose(0, 1).flatten()


def interleaved(scheme: W4A16, layers: Sequence[Tensors]) -> dict[str, Tensor]:
    """Canonical tensors of [gates, ups], from one layer or two, in the kernels' order of rows."""
    codes = torch.cat([scheme.codes(each) for each in layers])
    scales = torch.cat([each["weight_scale"] for each in layers])
    zeros = torch.cat([scheme.zeros(each) for each in layers])
    rows = order(len(codes)).to(codes.device)
    return scheme.pack(codes[rows], scales[rows], zeros[rows])


def apart(y: Tensor) -> Tensor:
    """(..., n) in the kernels' order -> all gates, then all ups."""
    return y.view(*y.shape[:-1], -1, 2, RUN).transpose(-3, -2).reshape(y.shape)
