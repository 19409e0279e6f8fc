"""From a weight and what is known of its inputs to codes, scales and zeros: the methods of w4a16.

Offline. One call may take several linears stacked along n that read the same input. What the caller does with the
result (pack, write, run on) is not known here; neither is AWQ's folding, which touches other layers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from billfish.solvers import gptq
from billfish.solvers.clip import search_scales
from billfish.solvers.statistics import Statistics, output_error

if TYPE_CHECKING:
    from billfish.schemes.w4a16.scheme import W4A16

METHODS = ("rtn", "gptq", "awq")
NEEDS_DATA = {"rtn": False, "gptq": True, "awq": True}


@dataclass(frozen=True)
class Solved:
    codes: Tensor  # (n, k) uint8
    scales: Tensor  # (n, g) in the stored dtype
    zeros: Tensor  # (n, g) uint8
    decoded: Tensor  # (n, k) fp32
    error: float | None  # relative error of the output on the calibration inputs
    note: str | None

    def rows(self, start: int, end: int) -> "Solved":
        cut = [t[start:end] for t in (self.codes, self.scales, self.zeros, self.decoded)]
        return Solved(cut[0], cut[1], cut[2], cut[3], self.error, self.note)


def quantize(
    scheme: "W4A16",
    weight: Tensor,  # (n, k) fp32
    statistics: Statistics | None,
    method: str,
    dtype: torch.dtype,  # of the stored scales
) -> Solved:
    n, k = weight.shape
    grid, size = scheme.grid, k if scheme.group_size == -1 else scheme.group_size
    groups = weight.view(n, -1, size)
    note = None
    if statistics is None or statistics.tokens == 0:
        if method != "rtn":
            note = "saw no calibration token: rounded to nearest"
        scale, zero = grid.fit(groups.amin(-1), groups.amax(-1), dtype)
        codes = grid.encode(groups, scale[..., None], zero[..., None]).view(n, k)
        return _solved(scheme, weight, codes, scale, zero, dtype, None, note)

    hessian = statistics.hessian
    target = weight
    if method == "gptq" and statistics.drift is not None:
        target = gptq.undrift(weight, hessian, statistics.drift)
    finite = bool(torch.isfinite(hessian).all())
    scale, zero = search_scales(target, hessian if finite else None, grid, size, dtype)
    found = gptq.solve(target, hessian, grid, scale, zero) if method == "gptq" else None
    if found is not None:
        codes, note = found
    else:
        if method == "gptq":
            note = "Hessian not positive definite at any damping: rounded to nearest"
        target_groups = target.view(n, -1, size)
        codes = grid.encode(target_groups, scale[..., None], zero[..., None]).view(n, k)
    return _solved(scheme, weight, codes, scale, zero, dtype, hessian if finite else None, note)


def _solved(
    scheme: "W4A16",
    weight: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    dtype: torch.dtype,
    hessian: Tensor | None,
    note: str | None,
) -> Solved:
    n, k = weight.shape
    grouped = codes.view(n, scale.shape[1], -1)
    decoded = scheme.grid.decode(grouped, scale[..., None], zero[..., None]).view(n, k)
    error = None if hessian is None else output_error(weight, decoded, hessian)
    byte = torch.uint8
    return Solved(codes.to(byte), scale.to(dtype), zero.to(byte), decoded, error, note)
