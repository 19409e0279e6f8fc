"""The methods by name: what data each needs, what it follows, what it costs.

Which of them can make a scheme is the scheme's to say (`Scheme.methods`); how they run over a block
is offline/block.py's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Method:
    name: str
    needs_data: bool
    # Beside the inputs behind quantized layers it sees the original model's, group after group.
    follows_original: bool = False
    error_feedback: bool = False  # columns not yet rounded take up the errors of those that are
    folds: bool = False  # scales of columns, folded into the layer before
    # Last, before a block is settled: offline/block.py's Refining -> solved linears by path. It may
    # ask for gradients.
    refine: Callable[[Any], Mapping[str, Any]] | None = None
    # -- costs, for `plan`
    forwards: float = 0.0  # block forwards of a calibration token
    sums: float = 0.0  # (k, k) products a token: x x^T costs 0.65
    flops: Callable[[int, int], float] = lambda n, k: 0.0  # of a solver's products, for (n, k)


def _gptq_flops(n: int, k: int) -> float:
    """Spreading errors, the report, undoing drift (with the rows, or, if they are more than
    columns, with a matrix of their own), the factor."""
    row = 2 * n * k * k
    drift = 3 * row if n < k else row + 4 * k**3
    return 2.5 * row + drift + 4 / 3 * k**3


def _awq_flops(n: int, k: int) -> float:
    """39 candidates, the clipping search and the report."""
    return 41 * 2 * n * k * k


METHODS = {
    method.name: method
    for method in (
        # Both models once, gate and up twice in one.
        Method("gptq", True, True, True, forwards=2.6, sums=1.65, flops=_gptq_flops),
        Method("awq", True, folds=True, forwards=2.0, sums=0.65, flops=_awq_flops),
        Method("rtn", False),
    )
}
