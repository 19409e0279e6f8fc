"""The quantization methods by name, with what data each needs and what it costs.

A scheme names the methods that can make it (`Scheme.methods`); offline/block.py runs them over a
block.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from billfish.solvers.finetune import refine
from billfish.solvers.refining import Refined, Refining


@dataclass(frozen=True)
class Method:
    name: str
    needs_data: bool
    # Input groups are solved in execution order, and the original model's inputs are compared with
    # those of the quantized one.
    follows_original: bool = False
    error_feedback: bool = False  # columns not yet rounded compensate errors of those that are
    folds: bool = False  # column scales are folded into the preceding layer
    # Called when all linears of a block are quantized, to better them. It may enable gradients to
    # train them.
    refine: Callable[[Refining], Refined] | None = None
    # -- costs, for `plan`
    forwards: float = 0.0  # forward passes of a block over the calibration tokens
    sums: float = 0.0  # outer products of a token's inputs, in full (k, k): symmetric x x^T is 0.65
    flops: Callable[[int, int], float] = lambda n, k: 0.0  # of the solver's matrix products

    def __post_init__(self) -> None:
        assert self.refine is None or self.follows_original, "refine needs the original's outputs"


def _gptq_flops(n: int, k: int) -> float:
    """Error feedback and the report's errors; `undrift`, with whichever order of products is
    cheaper; the factorization."""
    row = 2 * n * k * k
    drift = 3 * row if n < k else row + 4 * k**3
    return 2.5 * row + drift + 4 / 3 * k**3


def _awq_flops(n: int, k: int) -> float:
    """39 candidates of scales, the clipping search and the report's errors."""
    return 41 * 2 * n * k * k


# A pass of both models; gate and up run twice in the quantized one.
_GPTQ = Method("gptq", True, True, True, forwards=2.6, sums=1.65, flops=_gptq_flops)
METHODS = {
    method.name: method
    for method in (
        _GPTQ,
        Method("awq", True, folds=True, forwards=2.0, sums=0.65, flops=_awq_flops),
        Method("rtn", False),
        # The whole block runs after training, where GPTQ runs the MLP alone.
        replace(_GPTQ, name="finetune", refine=refine, forwards=_GPTQ.forwards + 0.2),
    )
}
