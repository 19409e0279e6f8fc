"""Whether a kernel keeps its rate when the GPU runs for a minute and its clocks fall.

    first, last = median us of the first and of the last tenth of the seconds;  kept = first / last

Linear by linear and m by m: the scheme's op, and right after it cuBLAS for a quarter of the time.
Nothing waits for the card to cool, so that only the first point starts from a cold one.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from billfish.bench.kernels import (
    DTYPES,
    KernelRequest,
    Result,
    Run,
    Variant,
    circumstances,
    peaks_of,
)
from billfish.bench.shapes import Linear
from billfish.bench.timing import Call, Card, Rules
from billfish.errors import UserError

# Text, so that bench kernels --from, which reads its own version 1, refuses such a file.
RESULT_VERSION = "sustain 1"
LEAST_SECONDS = 2  # a first and a last
READ = ("sm_mhz", "watts", "celsius")


class Sustain(Run):
    """One request on one card, its first dtype and group size, with the default launch."""

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
        self.variant = Variant(request.dtypes[0], request.group_sizes[0], request.symmetric)

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

    def _linear(self, linear: Linear) -> None:
        k, n, dtype = linear.k, linear.n, self.variant.dtype
        dense_bytes = k * n * DTYPES[dtype].itemsize
        failed = None
        try:  # both before the first second: nothing is made between an op and cuBLAS
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
                except UserError as error:  # a kernel that does not compile here, say
                    point["error"] = str(error)
            self._keep()

    def _sustain(self, calls: list[Call], weights: int, point: Result, seconds: int) -> Result:
        k, n, m = point["k"], point["n"], point["m"]
        moved, flop = weights + self._traffic(k, n, m, self.variant.dtype), 2 * m * n * k
        launches = self.rules.launches(len(calls), self.peaks.floor_us(moved, flop))
        found = summary(self.card.sustain(calls, launches, seconds))
        return {"copies": len(calls), "launches": launches, **found}


def summary(timed: Sequence[tuple[float, dict[str, Any] | None]]) -> Result:
    """Samples, one a second, and what is left of the rate at their end."""
    samples = [
        {"second": second, "us": us, **{name: (told or {}).get(name) for name in READ}}
        for second, (us, told) in enumerate(timed, start=1)
    ]
    tenth, times = max(1, len(timed) // 10), [us for us, _ in timed]
    first, last = statistics.median(times[:tenth]), statistics.median(times[-tenth:])
    return {"samples": samples, "first": first, "last": last, "kept": first / last}
