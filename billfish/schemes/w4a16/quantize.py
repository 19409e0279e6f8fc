"""From a weight and what is known of its inputs to codes, scales and zeros: the methods of w4a16.

Offline. One call may take several linears stacked along n that read the same input. What the caller
does with the result (pack, write, run on) is not known here; neither is AWQ's folding, which
touches other layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from billfish.schemes.base import Solved
from billfish.schemes.w4a16.scheme import W4A16
from billfish.solvers import awq, gptq
from billfish.solvers.clip import search_scales
from billfish.solvers.statistics import Statistics, output_energy

ROW_CODES = {"cpu": 2**20, "cuda": 2**26}  # weights solved at once: 4 MB a temporary on a CPU


@dataclass(frozen=True)
class Codes(Solved):
    """Codes, scales and zeros beside the decoded weights."""

    scheme: W4A16
    codes: Tensor  # (n, k) uint8
    scales: Tensor  # (n, g) in the stored dtype
    zeros: Tensor  # (n, g) uint8

    def rows(self, start: int, end: int) -> "Codes":
        cut = slice(start, end)
        energy = None if self.energy is None else self.energy[cut]
        return Codes(
            self.decoded[cut],
            energy,
            self.note,
            self.scheme,
            self.codes[cut],
            self.scales[cut],
            self.zeros[cut],
        )

    def tensors(self) -> dict[str, Tensor]:
        return self.scheme.pack(self.codes, self.scales, self.zeros)


def quantize(
    scheme: W4A16,
    weight: Tensor,  # (n, k) fp32
    statistics: Statistics | None,
    method: str,
    dtype: torch.dtype,  # of the stored scales
) -> Codes:
    k = weight.shape[1]
    known = statistics if statistics is not None and statistics.tokens else None
    hessian = None if known is None else known.hessian
    note = None
    if hessian is None and method != "rtn":
        note = "saw no calibration token: rounded to nearest"
    if hessian is not None and method == "awq" and not bool(torch.isfinite(hessian).all()):
        note, hessian = "calibration inputs are not finite: rounded to nearest", None
    factor = gptq.Factor.of(hessian) if hessian is not None and method == "gptq" else None
    if factor is not None:
        note = factor.note
    elif hessian is not None and method == "gptq":
        note = "Hessian not positive definite at any damping: rounded to nearest"
        hessian = None
    target = weight
    if factor is not None and known is not None and known.drift is not None:
        target = gptq.undrift(weight, factor, known.drift)
    # A few rows at a time: they are independent, and every temporary is as large as its rows.
    pieces = [
        _rows(scheme, rows, hessian, factor, dtype)
        for rows in torch.split(target, max(64, ROW_CODES[weight.device.type] // k))
    ]
    codes, scales, zeros, decoded = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    energy = None if hessian is None else output_energy(weight, decoded, hessian)
    return Codes(decoded, energy, note, scheme, codes, scales, zeros)


def _rows(
    scheme: W4A16,
    target: Tensor,
    hessian: Tensor | None,
    factor: gptq.Factor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, zeros and decoded weights of some rows. Without a Hessian, plain rounding."""
    n, k = target.shape
    grid, size = scheme.grid, scheme.group_of(k)
    groups = target.view(n, -1, size)
    if hessian is None:
        scale, zero = grid.fit(groups.amin(-1), groups.amax(-1), dtype)
    else:
        scale, zero = search_scales(target, hessian, grid, size, dtype)
    if factor is None:
        codes = grid.encode(groups, scale[..., None], zero[..., None])
    else:
        codes = gptq.solve(target, factor, grid, scale, zero).view_as(groups)
    decoded = grid.decode(codes, scale[..., None], zero[..., None]).view(n, k)
    byte = torch.uint8
    return codes.view(n, k).to(byte), scale.to(dtype), zero.to(byte), decoded


def search_fold(
    scheme: W4A16,
    weight: Tensor,  # (n, k) fp32: all linears that read one input, stacked
    statistics: Statistics,
    share: Tensor,  # (k,) int64: channels with one value get one scale
    dtype: torch.dtype,
) -> Tensor:
    """AWQ's factor of each column, (k,) fp32."""
    return awq.search_fold(
        weight,
        statistics.hessian,
        statistics.magnitude,
        share,
        scheme.grid,
        scheme.group_of(weight.shape[1]),
        dtype,
    )
