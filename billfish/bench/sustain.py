"""Whether a kernel keeps its speed when the GPU is busy for a minute and its clocks drop.

    first, last = median us of the first and of the last tenth of the seconds;  kept = first / last

For each linear and m the scheme's op runs, and right after it cuBLAS for a quarter of the time. The
card does not cool down in between: only the first point starts on a cold one.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from billfish.bench.kernels import (
    DTYPES,
    KernelBench,
    KernelRequest,
    KernelVariant,
    Result,
    circumstances,
)
from billfish.bench.peaks import peaks_of
from billfish.bench.shapes import LinearShape
from billfish.bench.timing import Call, Card, Rules
from billfish.errors import UserError

# Not a number: `bench kernels --from` accepts version 1 of its own results, and refuses this one.
RESULT_VERSION = "sustain 1"
LEAST_SECONDS = 2  # one for `first`, one for `last`
READ = ("sm_mhz", "watts", "celsius")


class Sustain(KernelBench):
    """One request on one card, in its first dtype and group size, with programmatic launches."""

    def __init__(
        self,
        request: KernelRequest,
        card: Card,
        rules: Rules,
        seconds: int,
        say: Callable[[str], None] = lambda message: None,
        keep: Callable[[Result], None] = lambda result: None,
    ) -> None:
        super().__init__(request, card, rules, say, keep)
        self.seconds, self.dense_seconds = seconds, max(LEAST_SECONDS, seconds // 4)
        self.variant = KernelVariant(request.dtypes[0], request.group_sizes[0], request.symmetric)

    def measure(self) -> Result:
        self.request.refuse(self.device)
        facts = self.card.facts()
        self.peaks = peaks_of(facts["name"], self.card.ceilings())
        self.result = {
            "result_version": RESULT_VERSION,
            "complete": False,
            **circumstances(facts),
            "seconds": self.seconds,
            "cublas_seconds": self.dense_seconds,
            "scheme": self.request.scheme,
            **asdict(self.variant),
            "points": [],
        }
        linears = {(each.k, each.n): each for made in self.request.sets for each in made.linears}
        for linear in linears.values():
            self._linear(linear)
        self.result["complete"] = True
        self._keep()
        return self.result

    def _linear(self, linear: LinearShape) -> None:
        k, n, dtype = linear.k, linear.n, self.variant.dtype
        dense_bytes = k * n * DTYPES[dtype].itemsize
        failed = None
        try:  # all weights before the first second, so that cuBLAS follows the op at once
            ops = self._ops(linear, self.variant)
            copies = self.rules.copies(dense_bytes, self.rules.least_dense_copies)
            weights = [self._randn(n, k, dtype) for _ in range(copies)]
        except torch.OutOfMemoryError:
            failed = "out of memory for the copies of the weights"
        except UserError as error:
            failed = str(error)
        for m in self.request.rows:
            point: Result = {"k": k, "n": n, "m": m, "op": None, "cublas": None, "error": failed}
            self.points[k, n, m, self.variant] = point
            if failed is None:
                what = f"{k} x {n}, m = {m}"
                try:
                    x = self._randn(m, k, dtype)
                    self.say(f"{what}: {ops[0].name}, {self.seconds} s")
                    calls: list[Call] = [partial(op, x) for op in ops]
                    found = self._sustain(calls, ops[0].nbytes(), point, self.seconds)
                    point.update(found, op=ops[0].name)
                    self.say(f"{what}: cuBLAS, {self.dense_seconds} s")
                    calls = [partial(torch.matmul, x, weight.T) for weight in weights]
                    point["cublas"] = self._sustain(calls, dense_bytes, point, self.dense_seconds)
                except torch.OutOfMemoryError:
                    point["error"] = f"out of memory at m = {m}"
                except UserError as error:  # such as a kernel that does not compile for this GPU
                    point["error"] = str(error)
            self._keep()

    def _sustain(self, calls: list[Call], weights: int, point: Result, seconds: int) -> Result:
        k, n, m = point["k"], point["n"], point["m"]
        moved, flop = weights + self._traffic(k, n, m, self.variant.dtype), 2 * m * n * k
        launches = self.rules.launches(len(calls), self.peaks.floor_us(moved, flop))
        found = summarize_seconds(self.card.sustain(calls, launches, seconds))
        return {"copies": len(calls), "launches": launches, **found}


def summarize_seconds(timed: Sequence[tuple[float, dict[str, Any] | None]]) -> Result:
    """One sample a second, and the share of the first speed that is left at the end."""
    samples = [
        {"second": second, "us": us, **{name: (told or {}).get(name) for name in READ}}
        for second, (us, told) in enumerate(timed, start=1)
    ]
    tenth, times = max(1, len(timed) // 10), [us for us, _ in timed]
    first, last = statistics.median(times[:tenth]), statistics.median(times[-tenth:])
    return {"samples": samples, "first": first, "last": last, "kept": first / last}
