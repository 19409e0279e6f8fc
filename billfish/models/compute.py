"""Where a model computes, and in which type: not the one in which weights are stored.

Weights are stored in bf16 because memory is slow. Products of bf16 are several times as fast as
those of fp32 where a processor has instructions for them (AMX, AVX512-BF16, Arm's BF16), and where
it has not, 4 times as slow (Cascade Lake, through oneDNN) to 280 times (Neoverse-N1). So they are
timed, once a process. fp16 is never chosen: few CPUs multiply it, and it overflows.
"""

import math
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch

from billfish.errors import UserError

VARIABLE = "BILLFISH_CPU_DTYPE"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPE = (32, 512, 512)  # m, n, k of the product that is timed: under a millisecond in fp32
ROUNDS = 9  # of which the best counts
FASTER = 0.8  # of fp32's time: more than noise must speak for bf16
HOPELESS = 3.0  # times fp32's: bf16 is not tried again
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Choice:
    dtype: torch.dtype
    why: str

    @property
    def name(self) -> str:
        return name_of(self.dtype)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def device_of(asked: str | torch.device) -> torch.device:
    """A device that is here, and that we run on; auto: a GPU, where there is one."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto":
        return torch.device("cuda" if there else "cpu")
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError, ValueError):  # each for another kind of nonsense
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {asked}: known are auto, cpu, cuda, and one of many: cuda:1.")
    if device.type == "cuda" and not there:
        raise UserError(f"device {asked}: PyTorch sees no GPU here. `billfish doctor` says why.")
    if device.type == "cuda" and (device.index or 0) >= there:
        raise UserError(f"device {asked}: PyTorch sees {there} here, the last is cuda:{there - 1}.")
    return device


def compute_dtype(
    stored: torch.dtype, device: str | torch.device, asked: str | torch.dtype = "auto"
) -> torch.dtype:
    """What is asked for; else on a CPU fp32 or what it is fast in, elsewhere what is stored."""
    if isinstance(asked, torch.dtype):
        return asked
    if asked != "auto":
        if asked not in DTYPES:
            raise UserError(f"dtype {asked!r}: known are auto, {', '.join(DTYPES)}.")
        return DTYPES[asked]
    if torch.device(device).type != "cpu":
        return stored
    return torch.float32 if stored.itemsize >= 4 else cpu_type().dtype


def cpu_type() -> Choice:
    """For what is stored in 16 bits: as the environment says, else as measured."""
    asked = os.environ.get(VARIABLE)
    if asked:
        if asked not in ("float32", "bfloat16"):
            raise UserError(
                f"{VARIABLE}={asked}: a CPU computes in float32 or bfloat16. Set it to one of "
                "them, or unset it and the faster is measured."
            )
        return Choice(DTYPES[asked], f"{VARIABLE} says so")
    with _one_at_a_time:
        return _measured(bool(torch.backends.mkldnn.enabled))


@cache
def _measured(onednn: bool) -> Choice:
    """By whether oneDNN may be used, without which no CPU has fast products in bf16."""
    with ThreadPoolExecutor(1) as one, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an Arm without bf16 would be told so at length
        return one.submit(_probe).result()  # how many threads compute is a thread's own setting


def _probe() -> Choice:
    """In one thread and its own time: two threads that wait for a busy core gave ratios from 0.6
    to 1.8 where one gives 3.0 to 3.4, and the type decides a job's bytes."""
    best = {torch.float32: math.inf, torch.bfloat16: math.inf}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for turn in range(ROUNDS):
            for dtype in best:
                best[dtype] = min(best[dtype], _seconds(dtype))
            fp32, bf16 = best.values()
            if turn and bf16 > HOPELESS * fp32:  # the first turn has made kernels, too
                break
    finally:
        torch.set_num_threads(threads)  # those that are started later take it from here
    told = f"{bf16 * 1e3:.2f} ms against {fp32 * 1e3:.2f}, {' x '.join(map(str, SHAPE))}"
    why = f"products in bf16 take {bf16 / fp32:.2g} times as long as in fp32 ({told})"
    return Choice(torch.bfloat16 if bf16 <= FASTER * fp32 else torch.float32, why)


def _seconds(dtype: torch.dtype) -> float:
    m, n, k = SHAPE
    x, weight = (torch.ones(rows, k, dtype=dtype, device="cpu") for rows in (m, n))
    started = time.thread_time()
    torch.nn.functional.linear(x, weight)
    return time.thread_time() - started
