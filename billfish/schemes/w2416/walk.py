"""GPTQ over a w2416 weight: 2-bit groups are rounded first, 4-bit groups last.

Every column's error is fed to the columns after it. Those with 4 bits come last, so that they make
up for the errors of all 2-bit columns on a grid that is fine enough: 12 % less output error than by
decreasing diagonal of H alone (docs/LOG.md, 2026-11-17). The scale of a group is chosen when its
turn comes, for the weights that it has by then (6 % less); so are the scales of the 4-bit weights.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from billfish.formats.grid import Grid
from billfish.kernels.feedback import round_columns
from billfish.schemes.w2416.scheme import ZERO, ZERO_STEP
from billfish.schemes.w2416.search import Groups, nearest
from billfish.schemes.w2416.shares import BAND, GROUP, Shares
from billfish.solvers.clip import search_scales
from billfish.solvers.gptq import BLOCK, Factor

FOUR = Grid(4, symmetric=True)
FINE, WIDE = 2.0**12, 2.0**23  # the grid of outliers: steps of a 4096th of the group's, +-2048


def walk_order(four: Tensor, importance: Tensor) -> Tensor:
    """(k,) int64: columns of 2-bit groups, then those of 4-bit groups, each by decreasing
    `importance` of their group; both are (k / 16,)."""
    by_importance = torch.argsort(importance, descending=True, stable=True)
    groups = torch.cat([by_importance[~four[by_importance]], by_importance[four[by_importance]]])
    return (groups[:, None] * GROUP + torch.arange(GROUP, device=groups.device)).flatten()


@dataclass
class Walked:
    """All but the first four: columns in Hugging Face order."""

    base: Tensor  # (n / 16, g) of 2-bit groups in stored order
    offset: Tensor
    code: Tensor  # (n, g): of scales
    zero: Tensor  # (n, g): 0 to 3
    scale_4: Tensor  # (n, parts)
    codes: Tensor  # (n, k)
    added: Tensor  # (n, k): what an outlier adds to the weight that its code decodes to


class Walk:
    """What the rows of a weight share; they can be walked in any portions of whole bands."""

    def __init__(
        self,
        order: Tensor,  # (k,) int64, as walk_order gives it
        share: Shares,
        hessian: Tensor | None,
        factor: Factor | None,  # in the same order; None: no error feedback
        dtype: torch.dtype,  # of stored scales
    ) -> None:
        self.order, self.share, self.dtype = order, share, dtype
        self.two = GROUP * share.two * share.parts  # columns of 2-bit groups
        self.upper = None if factor is None else factor.upper
        self.metric = self._metrics(hessian)
        ids = order[: self.two : GROUP]
        self.stored = torch.argsort(torch.argsort(ids)).tolist()  # of the groups in walking order
        columns, self.places_4 = order[self.two :].sort()
        self.hessian_4 = None if hessian is None else hessian[columns[:, None], columns]

    def _metrics(self, hessian: Tensor | None) -> Tensor | None:
        """(g, 16, 16), in walking order: e^T M e is the error of a group that is left when columns
        after it have compensated what they can; that is what the walk's errors add up to."""
        if self.upper is not None:
            places = torch.arange(self.two, device=self.order.device).view(-1, GROUP)
            blocks = self.upper[places[:, :, None], places[:, None]]
            one = torch.eye(GROUP, device=blocks.device).expand_as(blocks)
            inverse = torch.linalg.solve_triangular(blocks, one, upper=True)
            metric: Tensor = inverse @ inverse.transpose(1, 2)
            return metric
        if hessian is not None:
            places = self.order[: self.two].view(-1, GROUP)
            return hessian[places[:, :, None], places[:, None]]
        return None

    def run(self, target: Tensor, outliers: Tensor) -> Walked:
        """Rounds some rows, (n, k) fp32 and bool."""
        self.todo = target.T[self.order]  # (k, n): a step reads and writes whole columns
        self.outliers = outliers.T[self.order]
        self.codes = torch.empty_like(self.todo)
        n, groups = self.todo.shape[1], self.two // GROUP
        self.base, self.offset = torch.empty(2, n // BAND, groups, device=self.todo.device)
        self.code, self.zero = torch.empty(2, n, groups, device=self.todo.device)
        for start in range(0, self.two, BLOCK):
            end = min(start + BLOCK, self.two)
            errors = [self._two_bit_group(a, end) for a in range(start, end, GROUP)]
            self._feed(start, end, torch.cat(errors), len(self.todo))
        scale_4 = self._scales_4()
        step = scale_4.repeat_interleave(GROUP * self.share.four, 1).T  # of ascending columns
        step = step[torch.argsort(torch.argsort(self.order[self.two :]))]
        for start in range(self.two, len(self.todo), BLOCK):
            end = min(start + BLOCK, len(self.todo))
            self._four_bit_columns(start, end, step[start - self.two : end - self.two])
        back = torch.argsort(self.order)
        codes, added = self.codes[back].T, self.todo[back].T
        return Walked(self.base, self.offset, self.code, self.zero, scale_4, codes, added)

    def _two_bit_group(self, a: int, end: int) -> Tensor:
        """Round columns [a, a + 16) and feed their errors to those before `end`."""
        own, j = slice(a, a + GROUP), a // GROUP
        at = self.stored[j]
        weights, outliers = self.todo[own], self.outliers[own]
        metric = None if self.metric is None else self.metric[j : j + 1]
        groups = Groups(weights.T[None].contiguous(), metric, (~outliers).T[None].float())
        base, offset = groups.search_stored()
        self.base[:, at], self.offset[:, at] = base[:, 0], offset[:, 0]
        scale, zero = groups.scale[0, :, 0], groups.zero[0, :, 0]
        self.code[:, at], self.zero[:, at] = groups.code[0, :, 0], zero
        zero = zero * ZERO_STEP + ZERO
        # Outliers have a grid of their own, fine and wide. Zeros of round_columns are whole: the
        # rest is taken off the weight.
        step = torch.where(outliers, scale / FINE, scale)
        origin = torch.where(outliers, torch.full_like(step, WIDE), zero)
        levels = torch.where(outliers, torch.full_like(step, 2 * WIDE), torch.full_like(step, 4.0))
        whole = origin.round()
        spread = self._spread(own)
        shifted = weights - (whole - origin) * step
        codes, errors = round_columns(shifted, step, whole, spread, levels)
        value = (codes - WIDE) * step
        own_code = (value / scale).add_(zero).round_().clamp_(0, 3)
        self.codes[own] = torch.where(outliers, own_code, codes)
        added = value - nearest(value, scale, zero)
        self.todo[own] = torch.where(outliers, added, torch.zeros_like(added))
        self._feed(a, a + GROUP, errors, end)
        return errors.clone()  # the next call on a GPU overwrites them

    def _four_bit_columns(self, start: int, end: int, step: Tensor) -> None:
        own = slice(start, end)
        middle = torch.full_like(step, float(FOUR.middle))
        spread = self._spread(own)
        codes, errors = round_columns(self.todo[own].clone(), step, middle, spread, FOUR.levels)
        self.codes[own] = codes
        self.todo[own] = 0.0
        self._feed(start, end, errors, len(self.todo))

    def _scales_4(self) -> Tensor:  # (n, parts)
        """Of the 4-bit weights as errors of the 2-bit weights have left them."""
        n, share = self.todo.shape[1], self.share
        if not share.four:
            return torch.ones(n, share.parts, device=self.todo.device)
        weight, size = self.todo[self.two :][self.places_4].T.contiguous(), GROUP * share.four
        if self.hessian_4 is None:
            parts = weight.view(n, share.parts, size)
            return FOUR.fit(parts.amin(-1), parts.amax(-1), self.dtype)[0]
        return search_scales(weight, self.hessian_4, FOUR, size, self.dtype)[0]

    def _spread(self, own: slice) -> Tensor:
        if self.upper is not None:
            return self.upper[own, own]
        return torch.eye(own.stop - own.start, device=self.todo.device)

    def _feed(self, start: int, end: int, errors: Tensor, until: int) -> None:
        """Errors of columns [start, end) to columns [end, until)."""
        if self.upper is not None:
            feedback = self.upper[start:end, end:until]
            self.todo[end:until].addmm_(feedback.T, errors, alpha=-1.0)
