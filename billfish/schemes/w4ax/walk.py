"""GPTQ over a w4ax weight: group after group, each with a scale that is chosen when its turn comes.

Groups are rounded by decreasing diagonal of H, and so are the columns of a group. Earlier errors
have changed a group's weights by its turn; its q and zero are searched for these, by the error that
columns after it will leave. Output error of SmolLM2's linears 2.4 % smaller than with columns
ordered across groups and scales from before: a little smaller than with 16-bit scales (docs/LOG.md,
2026-11-18).
"""

import torch
from torch import Tensor

from billfish.formats.grid import Grid
from billfish.kernels.feedback import COLUMNS, round_columns
from billfish.schemes.w4ax.search import choose_q
from billfish.solvers.gptq import Factor

NEAR = (-1, 1, -2, 2, -3, 3)


def walk_order(diagonal: Tensor, size: int) -> Tensor:
    """(k,) int64: groups by decreasing sum of `diagonal`, their columns by decreasing diagonal."""
    groups = diagonal.view(-1, size)
    inside = torch.argsort(groups, dim=1, descending=True, stable=True)
    first = torch.arange(len(groups), device=diagonal.device)[:, None] * size
    order = torch.argsort(groups.sum(1), descending=True, stable=True)
    columns: Tensor = first + inside
    return columns[order].flatten()


class Walk:
    """What the rows of a weight share; they can be walked in any portions."""

    def __init__(self, factor: Factor, size: int, grid: Grid) -> None:  # in walk_order's order
        self.grid = grid
        self.order, self.upper, self.size = factor.order, factor.upper, size
        self.groups = (self.order[::size] // size).tolist()
        places = torch.arange(len(self.order), device=self.order.device).view(-1, size)
        blocks = self.upper[places[:, :, None], places[:, None]]
        one = torch.eye(size, device=blocks.device).expand_as(blocks)
        inverse = torch.linalg.solve_triangular(blocks, one, upper=True)
        # e^T M e is what the walk's errors of a group add up to.
        self.metric = inverse @ inverse.transpose(1, 2)  # (g, size, size)

    def run(
        self, target: Tensor, base: Tensor, q: Tensor, zero: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Codes (n, k), q and zeros (n, g) of some rows, given those that groups had before."""
        todo = target.T[self.order]  # (k, n): a step reads and writes whole columns
        codes, q, zero = torch.empty_like(todo), q.clone(), zero.clone()
        for i, group in enumerate(self.groups):
            start, own = i * self.size, slice(group, group + 1)
            weights = todo[start : start + self.size].T[None].contiguous()
            q[:, own], zero[:, own] = choose_q(
                weights, self.metric[i : i + 1], self.grid, base, q[:, own], zero[:, own], NEAR
            )
            step, middle = (q[:, own] * base).T, zero[:, own].T
            for first in range(start, start + self.size, COLUMNS):
                last = min(first + COLUMNS, start + self.size)
                codes[first:last] = self._round(todo, first, last, step, middle)
        return codes[torch.argsort(self.order)].T, q, zero

    def _round(self, todo: Tensor, first: int, last: int, step: Tensor, zero: Tensor) -> Tensor:
        """Codes of columns [first, last); their errors are fed to all columns after them."""
        own, count = slice(first, last), last - first
        steps, zeros = step.expand(count, -1), zero.expand(count, -1)
        spread = self.upper[own, own]
        codes, errors = round_columns(todo[own].clone(), steps, zeros, spread, self.grid.levels)
        todo[last:].addmm_(self.upper[own, last:].T, errors, alpha=-1.0)
        return codes
