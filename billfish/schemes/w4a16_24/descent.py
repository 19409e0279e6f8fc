"""Coordinate descent over the fours of a 2:4 weight that a walk has rounded.

The walk chose a four's pair when most of the others were not known, and it could hand its error to
later fours alone. Here each four is chosen anew, pair and codes, as the best there is with all
others as they are; the output error never grows. 16 linears of SmolLM2, error after 1, 2, 4, 8 and
16 passes: 0.88, 0.85, 0.83, 0.82 and 0.82 of the walk's. All of int4 cost 0.05 of it.
"""

import torch
from torch import Tensor

from billfish.schemes.w4a16_24.pairs import Pairs
from billfish.schemes.w4a16_24.scheme import FOUR
from billfish.solvers.gptq import BLOCK, DAMPING

PASSES = 4


class Descent:
    """What the rows of a weight share."""

    def __init__(self, hessian: Tensor) -> None:  # (k, k), finite
        self.hessian = hessian.clone()
        diagonal = self.hessian.diagonal()
        live = diagonal > 0
        mean = diagonal[live].mean() if bool(live.any()) else diagonal.new_ones(())
        diagonal.copy_(torch.where(live, diagonal, mean) + DAMPING[0] * mean)
        places = torch.arange(len(hessian), device=hessian.device).view(-1, FOUR)
        self.inverse = torch.linalg.inv(self.hessian[places[:, :, None], places[:, None]])
        self.pairs = Pairs(self.inverse)

    def run(
        self,
        target: Tensor,  # (n, k)
        given: Tensor,  # (f, n): pairs that are fixed, or FREE
        scales: Tensor,  # (g, n)
        kept: Tensor,  # (f, 2, n): rounded weights; updated
        pairs: Tensor,  # (f, n): their places; updated
    ) -> None:
        n, k = target.shape
        size = k // len(scales)
        made = torch.zeros(k // FOUR, FOUR, n, device=target.device)
        made.scatter_(1, self.pairs.kept[pairs].transpose(1, 2), kept)
        made = made.flatten(0, 1)
        slope = self.hessian @ (target.T - made)  # (k, n)
        for start in [*range(0, k, BLOCK)] * PASSES:
            block = slice(start, min(start + BLOCK, k))
            before, near = made[block].clone(), slope[block].clone()
            for a in range(block.start, block.stop, FOUR):
                i, own, at = a // FOUR, slice(a, a + FOUR), a - start
                best = made[own] + self.inverse[i] @ near[at : at + FOUR]  # were nothing rounded
                new, kept[i], pairs[i] = self.pairs.rounded(i, best, scales[a // size], given[i])
                near.addmm_(self.hessian[block, own], new - made[own], alpha=-1.0)
                made[own] = new
            slope.addmm_(self.hessian[:, block], made[block] - before, alpha=-1.0)
