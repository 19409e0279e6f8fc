"""Means with their standard errors.

A standard error needs two observations; with one it is None, never 0. Ratios are paired: both
models answer the same questions, so the difficulty of a question cancels, and the standard error of
a ratio comes from the differences within pairs (delta method).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Estimate:
    value: float
    stderr: float | None = None


def mean(observations: Sequence[float]) -> Estimate:
    count = len(observations)
    assert count > 0, "the mean of nothing"
    value = math.fsum(observations) / count
    if count == 1:
        return Estimate(value)
    variance = math.fsum((x - value) ** 2 for x in observations) / (count - 1)
    return Estimate(value, math.sqrt(variance / count))


def exp_mean(logs: Sequence[float]) -> Estimate:
    """exp of the mean; d exp(x) = exp(x) dx carries the standard error over."""
    log = mean(logs)
    try:
        value = math.exp(log.value)
    except OverflowError:  # above 709 nats a token: the model is broken
        return Estimate(math.inf)
    return Estimate(value, None if log.stderr is None else value * log.stderr)


def exp_difference(minuend: Sequence[float], subtrahend: Sequence[float]) -> Estimate:
    """exp(mean(minuend) - mean(subtrahend)), paired."""
    return exp_mean([a - b for a, b in zip(minuend, subtrahend, strict=True)])


def ratio_of_means(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> Estimate | None:
    """sum of means / sum of means over one or more independent sets of paired observations.

    None if the denominator is zero: the baseline got nothing right.
    With r the ratio, d r = sum_t (da_t - r db_t) / sum_t b_t, and da - r db is observed per pair.
    """
    above = math.fsum(mean(a).value for a, _ in pairs)
    below = math.fsum(mean(b).value for _, b in pairs)
    if below == 0.0:
        return None
    ratio = above / below
    variance = 0.0
    for a, b in pairs:
        residual = mean([x - ratio * y for x, y in zip(a, b, strict=True)])
        if residual.stderr is None:
            return Estimate(ratio)
        variance += residual.stderr**2
    return Estimate(ratio, math.sqrt(variance) / abs(below))


def finite(value: Any) -> Any:
    """A copy of nested dicts and lists with None for inf and nan, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
