"""Deferred RMS norms (deferred.cuh): W (g x / rms) is (W (g x)) / rms, so the product after a norm
divides its results. The one before adds its own to the hidden states and stores what that needs."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# As in deferred.cuh; tests/kernels/test_layouts.py compares.
PART, SCALE_BYTES = 16, 128


class Norm(NamedTuple):
    """The weights of an RMS norm, divided by a power of two such that none is above 1: times finite
    hidden states they are finite."""

    weight: Tensor
    unit: float
    eps: float

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> "Norm":
        most = float(weight.float().abs().max())
        unit = 2.0 ** math.ceil(math.log2(most)) if 0 < most < math.inf else 1.0
        return cls((weight.float() / unit).to(weight.dtype), unit, eps)


@dataclass
class Stream:
    """Hidden states between two products, and the deferred norm between these."""

    hidden: Tensor  # (m, width); products add to it in place
    x: Tensor  # hidden * norm.weight
    squares: Tensor  # (m, parts) fp32: sums of squares of PART numbers of hidden
    norm: Norm | None = None

    @classmethod
    def of(cls, hidden: Tensor) -> "Stream":
        m, width = hidden.shape
        squares = torch.empty(m, -(-width // PART), dtype=torch.float32, device=hidden.device)
        return cls(hidden, torch.empty_like(hidden), squares)
