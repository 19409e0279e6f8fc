"""Activations in 8 bits: one dynamic scale for each token, whole numbers from -127 to 127.

    a = max |x|    s = a / 127    x8 = round(x * (127 / a)), ties to even

All in fp32, with two divisions for each token, so that every device rounds alike. A token of zeros
has s = 0. In one with Inf or NaN all x8 are 0 and s is Inf or NaN, and 0 times it makes all its
outputs NaN.
"""

import torch
from torch import Tensor

TOP = 127


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """(..., k) of any dtype -> int8 (..., k) and s, fp32 (..., 1)."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    top = torch.full_like(largest, TOP)  # torch would multiply by a number's reciprocal
    # The quotient is infinite for a < 4e-37, and 0 times it counts as 0; else no product is beyond
    # 127 by more than a rounding.
    steps = (x * (top / largest)).nan_to_num_(0.0, TOP, -TOP)
    return steps.round_().to(torch.int8), largest / top
