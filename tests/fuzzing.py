"""How long fuzzers run, and with which numbers: short in the suite, long by `make fuzz`.

BILLFISH_FUZZ is how many inputs each fuzzer makes, BILLFISH_FUZZ_SEED which ones: processes with
other seeds share a long run.
"""

import ctypes
import gc
import os
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

ROUND = 50  # examples; Hypothesis remembers all of a run, so a long one is many short ones


def count(short: int) -> int:
    return int(os.environ.get("BILLFISH_FUZZ", short))


def rounds(inputs, examples, check, between=lambda: None):
    """`check(one)` for so many examples of the strategy `inputs`, and `between` rounds of them."""
    first = int(os.environ.get("BILLFISH_FUZZ_SEED", 0)) * 10**6
    for number in range(-(-examples // ROUND)):
        size = min(ROUND, examples - number * ROUND)

        @seed(first + number)
        @settings(
            max_examples=size,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        @given(inputs)
        def one_round(one):
            check(one)

        one_round()
        between()


def resident() -> float:
    """MB of this process in memory, without what is only kept by the allocator."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
