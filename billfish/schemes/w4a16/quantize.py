"""From a weight and what is known of its inputs to codes, scales and zeros: the methods of w4a16.

Offline. One call may take several linears stacked along n that read the same input. What the caller
does with the result (pack, write, run on) is not known here; neither is AWQ's folding, which
touches other layers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from billfish.solvers import gptq
from billfish.solvers.clip import search_scales
from billfish.solvers.statistics import Statistics, output_energy

if TYPE_CHECKING:
    from billfish.schemes.w4a16.scheme import W4A16

METHODS = ("rtn", "gptq", "awq")
ROW_CODES = {"cpu": 2**20, "cuda": 2**26}  # weights solved at once: 4 MB a temporary on a CPU
NEEDS_DATA = {"rtn": False, "gptq": True, "awq": True}


@dataclass(frozen=True)
class Solved:
    codes: Tensor  # (n, k) uint8
    scales: Tensor  # (n, g) in the stored dtype
    zeros: Tensor  # (n, g) uint8
    decoded: Tensor  # (n, k) fp32
    energy: (
        Tensor | None
    )  # (n, 2): squared output error and squared output of each row; None: no data
    note: str | None

    @property
    def error(self) -> float | None:
        """Relative squared error of the layer's output on the calibration inputs."""
        if self.energy is None:
            return None
        lost, total = self.energy.double().sum(0).tolist()
        return float(lost / total) if total else 0.0

    def rows(self, start: int, end: int) -> "Solved":
        cut = [t[start:end] for t in (self.codes, self.scales, self.zeros, self.decoded)]
        energy = None if self.energy is None else self.energy[start:end]
        return Solved(cut[0], cut[1], cut[2], cut[3], energy, self.note)


def quantize(
    scheme: "W4A16",
    weight: Tensor,  # (n, k) fp32
    statistics: Statistics | None,
    method: str,
    dtype: torch.dtype,  # of the stored scales
) -> Solved:
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
    return Solved(codes, scales, zeros, decoded, energy, note)


def _rows(
    scheme: "W4A16",
    target: Tensor,
    hessian: Tensor | None,
    factor: gptq.Factor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, scales, zeros and decoded weights of some rows. Without a Hessian, plain rounding."""
    n, k = target.shape
    grid, size = scheme.grid, k if scheme.group_size == -1 else scheme.group_size
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
