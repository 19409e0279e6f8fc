"""Row order of a joined gate and up layer whose kernel applies SwiGLU in its epilogue.

Rows are interleaved by 8: of every 16 rows, 8 gates are followed by their 8 ups. A thread that
holds rows r and r + 8 of a tensor-core tile then holds a gate and its up.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from billfish.schemes import gated
from billfish.schemes.base import Tensors
from billfish.schemes.w4a16.scheme import W4A16

RUN = 8  # consecutive gates or ups


def order(n: int) -> Tensor:
    return gated.order(n, RUN)


def interleaved(scheme: W4A16, layers: Sequence[Tensors]) -> dict[str, Tensor]:
    """Canonical tensors of gate and up, one fused layer or two, with interleaved rows."""
    codes = torch.cat([scheme.codes(each) for each in layers])
    scales = torch.cat([each["weight_scale"] for each in layers])
    zeros = torch.cat([scheme.zeros(each) for each in layers])
    rows = order(len(codes)).to(codes.device)
    return scheme.pack(codes[rows], scales[rows], zeros[rows])


def apart(y: Tensor) -> Tensor:
    return gated.apart(y, RUN)
