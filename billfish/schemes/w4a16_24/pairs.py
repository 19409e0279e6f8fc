"""Which two of four weights are kept, and what they are rounded to.

A four's error e costs e^T M e; A = M^-1. Once the weights w_P of a pair P are pruned, the cheapest
change of the two others is -A_KP A_PP^-1 w_P: so much of the error they take over before they are
rounded, and the second one likewise takes over the first one's rounding error. All six pairs are
rounded this way, and the one with the smallest cost is kept: an exact comparison, where
SparseGPT's w^2 / A_jj looks at one weight at a time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from billfish.formats.grid import Grid
from billfish.schemes.w4a16_24.scheme import FOUR, PAIRS

GRID = Grid(4, symmetric=True)
FREE = -1  # a pair that is to be chosen


@dataclass
class Found:
    """The fours of some rows, as far as they are rounded; in the order of their inputs."""

    made: Tensor  # (f, 4, n): rounded weights
    exact: Tensor  # (f, 2, n): those of kept places, before they were rounded
    pairs: Tensor  # (f, n) int64: which places are kept, an index of PAIRS

    def put(self, four: int, made: Tensor, exact: Tensor, pair: Tensor) -> None:
        self.made[four], self.exact[four], self.pairs[four] = made, exact, pair

    @property
    def places(self) -> Tensor:  # (f, 2, n) int64
        return torch.tensor(PAIRS, device=self.pairs.device)[self.pairs].transpose(1, 2)


class Pairs:
    def __init__(self, inverse: Tensor) -> None:  # (f, 4, 4): A of each four
        device, exact = inverse.device, inverse.double()
        self.kept = torch.tensor(PAIRS, device=device)
        self.pruned = self.kept.flip(0)  # PAIRS backwards lists the other two of each
        self.metric = torch.linalg.inv(exact).float()
        self.pruned_metric = self._solved(exact, self.pruned, self.pruned)[1].float()
        # (f, 6, 2, 2): what the kept weights lose for each pruned one
        self.taken = self._solved(exact, self.kept, self.pruned)[0].float()
        # (f, 6, 1): what the second kept weight loses for an error of the first
        three = torch.cat([self.pruned, self.kept[:, :1]], 1)
        self.passed = self._solved(exact, self.kept[:, 1:], three)[0][..., 0, 2:].float()

    @staticmethod
    def _solved(inverse: Tensor, to: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
        """A_to,of A_of,of^-1, and A_of,of^-1, for six index sets each."""
        within = torch.linalg.inv(inverse[:, of[:, :, None], of[:, None]])
        return inverse[:, to[:, :, None], of[:, None]] @ within, within

    def rounded(
        self,
        i: int,  # which four
        weights: Tensor,  # (4, n)
        scale: Tensor,  # (n,)
        given: Tensor,  # (n,) int64: index of its pair, or FREE
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The rounded weights (4, n); those of the kept places before rounding (2, n); the pairs
        (n,)."""
        exact = weights[self.kept] - self.taken[i] @ weights[self.pruned]  # (6, 2, n)
        first = GRID.nearest(exact[:, 0], scale, scale)
        exact[:, 1] -= self.passed[i] * (exact[:, 0] - first)
        kept = torch.stack([first, GRID.nearest(exact[:, 1], scale, scale)], 1)
        error = weights - self._placed(kept)
        cost = (error * (self.metric[i] @ error)).sum(1)
        pair = torch.where(given == FREE, cost.argmin(0), given)
        at = pair.expand(1, 2, -1)
        made = torch.zeros_like(weights).scatter_(0, self.kept[pair].T, kept.gather(0, at)[0])
        return made, exact.gather(0, at)[0], pair

    def pruned_only(self, fours: slice, weights: Tensor, given: Tensor) -> Tensor:
        """Some fours' weights (f, 4, n) with two of four pruned, and nothing rounded."""
        gone = weights[:, self.pruned]  # (f, 6, 2, n)
        cost = (gone * (self.pruned_metric[fours] @ gone)).sum(2)
        pair = torch.where(given == FREE, cost.argmin(1), given)  # (f, n)
        kept = weights[:, self.kept] - self.taken[fours] @ gone
        chosen = kept.gather(1, pair[:, None, None].expand(-1, 1, 2, -1))[:, 0]
        return torch.zeros_like(weights).scatter_(1, self.kept[pair].transpose(1, 2), chosen)

    def _placed(self, kept: Tensor) -> Tensor:  # (6, 2, n) -> (6, 4, n)
        made = kept.new_zeros(len(PAIRS), FOUR, kept.shape[2])
        return made.scatter_(1, self.kept[..., None].expand_as(kept), kept)
