"""Launches that round x to bytes: w4ax_quant, and w4ax_norm, which first adds a residual and
normalizes. Both are one block a token; torch allocates what they write, so that they can be
captured in a CUDA graph."""

from functools import cache

import numpy
import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.kernels import norm
from billfish.schemes.w4ax.activations import REACH
from billfish.schemes.w4ax.cuda.inputs import Inputs, Rounded, row_bytes
from billfish.schemes.w4ax.cuda.instances import TYPES, norm_kernel, quant_kernel

THREADS, ROOM, UNIT = 1024, 384, 16  # quant.cuh; tests/kernels/test_layouts.py compares


def threads(k: int) -> int:
    """Of w4ax_quant. Up to 16384 inputs a thread keeps its 16 of them in registers."""
    units = -(-k // UNIT)
    each = -(-units // THREADS)
    return -(-units // each // 32) * 32


class Rounding:
    """Of inputs of one size on one GPU; `mixed`: fmpq."""

    def __init__(self, index: int, dtype: torch.dtype, k: int, mixed: bool) -> None:
        self.k, self.threads = k, threads(k)
        self.quant = quant_kernel(dtype, mixed).load(index)
        self.norm = norm_kernel(dtype, mixed).load(index)

    def quantize(self, x: Tensor, m: int, inputs: Inputs | None) -> tuple[Tensor, Tensor]:
        """Of x (..., k) with m rows."""
        if not x.is_contiguous():
            x = x.contiguous()
        if x.data_ptr() % 16:
            x = x.clone()
        made = self._room(m, x.device)
        gathered = inputs is not None and inputs.order is not None
        smem = ROOM + 2 * self.k if gathered else ROOM
        given = (x.data_ptr(), *(each.data_ptr() for each in made), *arguments(self.k, inputs))
        if m:
            self.quant.launch(m, self.threads, given, smem, pdl=True)
        return made

    def normalize(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        inputs: Inputs | None,
    ) -> tuple[Tensor, Tensor]:
        """hidden (m, k) += delta, in place; its RMS norm, rounded."""
        made = self._room(len(hidden), hidden.device)
        given = (
            hidden.data_ptr(),
            0 if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            *(each.data_ptr() for each in made),
            *arguments(self.k, inputs),
            numpy.float32(eps),
        )
        smem = ROOM + 2 * self.k
        self.norm.launch(len(hidden), norm.threads(self.k), given, smem, pdl=True)
        return made

    def _room(self, m: int, device: torch.device) -> tuple[Tensor, Tensor]:
        inputs = torch.empty(m, row_bytes(self.k), dtype=torch.int8, device=device)
        return inputs, torch.empty(m + m % 2, 2, dtype=torch.int32, device=device)


def arguments(k: int, inputs: Inputs | None) -> tuple[object, ...]:
    """How inputs are rounded, as the kernels take it."""
    reach = numpy.float32(REACH)
    if inputs is None:
        return (0, 0, k, 1, numpy.float32(0), reach)
    order, block = inputs.order, k // len(inputs.bits)
    turn = numpy.float32(block**-0.5 if inputs.rotated else 0)
    at = 0 if order is None else order.data_ptr()
    return (at, inputs.bits.data_ptr(), k, block // UNIT, turn, reach)


@cache
def rounding(index: int, dtype: torch.dtype, k: int, mixed: bool) -> Rounding:
    return Rounding(index, dtype, k, mixed)


def rounded(x: Tensor, k: int, inputs: Inputs | None, device: torch.device) -> Rounded:
    """x (..., k) as the products of a layer on this device read it."""
    if x.dtype not in TYPES:
        raise UserError(f"activations are {x.dtype}; CUDA kernels take float16 and bfloat16.")
    if x.shape[-1] != k:
        raise ValueError(f"activations have {x.shape[-1]} columns, the layer takes {k}")
    if x.device != device:
        raise ValueError(f"activations are on {x.device}, the layer on {device}")
    m, made = x.numel() // k, rounding(x.get_device(), x.dtype, k, inputs is not None)
    return Rounded(*made.quantize(x, m, inputs), x.dtype, tuple(x.shape[:-1]))


def normalized(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, inputs: Inputs | None
) -> Rounded | None:
    """RMS norm of hidden (m, k) += delta, rounded; None where the kernel does not take them, and
    then nothing has changed."""
    if hidden.dtype not in TYPES or not norm.takes(hidden, delta, weight):
        return None
    made = rounding(hidden.get_device(), hidden.dtype, hidden.shape[1], inputs is not None)
    both = made.normalize(hidden, delta, weight, eps, inputs)
    return Rounded(*both, hidden.dtype, (len(hidden),))
