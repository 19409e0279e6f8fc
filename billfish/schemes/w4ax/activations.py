"""Activations in 8 bits: one dynamic scale for each token, whole numbers from -127 to 127.

    a = max |x|    s = a / 127    x8 = round(x * (127 / a)), ties to even

All in fp32, with two divisions for each token, so that every device rounds alike. A token of zeros
has s = 0. One with Inf or NaN has s = NaN, which makes all its outputs NaN.
"""

import torch
from torch import Tensor

TOP = 127


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., k) of any dtype -> int8 (..., k) and s, fp32 (..., 1)."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    known = torch.isfinite(largest) & (largest > 0)
    # Below 4e-37 the factor is infinite: 0 times it counts as 0.
    steps = (x * torch.where(known, TOP / largest, 0.0)).nan_to_num_(0.0, TOP, -TOP)
    scale = torch.where(torch.isfinite(largest), largest / TOP, torch.nan)
    return steps.round_().clamp_(-TOP, TOP).to(torch.int8), scale
