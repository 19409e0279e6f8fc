"""What a method's `refine` is given and gives: a quantized block that may still change."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Refining:
    """A block whose linears are quantized, in a model quantized up to it."""

    # Path of a linear -> its Solved. `refine` may take them out, so that their targets are freed.
    solved: dict[str, Any]
    inputs: list[Tensor]  # (batch, length, hidden): outputs of the quantized blocks before it
    targets: list[Tensor]  # outputs of the original block in the original model
    # run(input, weights): the block's output with `weights` (path of a linear -> weight) in place
    # of its own, for any number of sequences that shapes_of lists. Gradients flow into the weights
    # if the caller enables gradients.
    run: Callable[[Tensor, Mapping[str, Tensor]], Tensor]
    steps: int
    seed: int
    tell: Callable[[int], None]  # progress: steps done
    routes: bool = False  # run() computes other products for other inputs: no graph of it


@dataclass(frozen=True)
class Gain:
    """Error of a part of the model on held-out sequences, before and after training; None: not
    finite."""

    before: float | None
    after: float | None
    kept: bool  # whether the trained result replaces the solver's
    note: str | None = None

    @staticmethod
    def of(before: float, after: float, note: str | None) -> "Gain":
        def finite(value: float) -> float | None:
            return value if math.isfinite(value) else None

        return Gain(finite(before), finite(after), after < before, note)


@dataclass(frozen=True)
class Refined:
    solved: Mapping[str, Any]  # better solutions by path; linears that are missing keep theirs
    gain: Gain | None = None
