"""Chooses the device and the compute dtype of a model, which may differ from the stored dtype.

On CPUs with bf16 instructions (AMX, AVX512-BF16, Arm's BF16) products in bf16 are several times as
fast as in fp32; on others they are 4 times (Cascade Lake, through oneDNN) to 280 times
(Neoverse-N1) as slow. So both are timed, once a process. fp16 is never chosen: few CPUs multiply
it, and it overflows.
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
SHAPE = (32, 512, 512)  # m, n, k of the timed product: under a millisecond in fp32
ROUNDS = 9  # the fastest counts
FASTER = 0.8  # bf16 must take at most this share of fp32's time, to be chosen beyond noise
HOPELESS = 3.0  # times fp32's time: stop timing, bf16 is too slow
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
    """The device; auto: a GPU if there is one. Raises if it is unknown or absent."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "auto":
        return torch.device("cuda" if there else "cpu")
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError, ValueError):  # depends on how the name is malformed
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
    """`asked`; for auto on a CPU fp32, or cpu_type() for 16-bit weights; elsewhere `stored`."""
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
    """Compute dtype of 16-bit weights on this CPU: from the environment variable, else measured."""
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
    """Cached for each setting of oneDNN, without which no CPU has fast products in bf16."""
    with ThreadPoolExecutor(1) as one, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns at length on an Arm without bf16
        return one.submit(_probe).result()  # set_num_threads is per thread


def _probe() -> Choice:
    """Timed with one compute thread, in CPU time: two threads on a busy core gave ratios from 0.6
    to 1.8 where one gives 3.0 to 3.4, and the dtype decides a job's bytes."""
    best = {torch.float32: math.inf, torch.bfloat16: math.inf}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for turn in range(ROUNDS):
            for dtype in best:
                best[dtype] = min(best[dtype], _seconds(dtype))
            fp32, bf16 = best.values()
            if turn and bf16 > HOPELESS * fp32:  # the first turn also built kernels
                break
    finally:
        torch.set_num_threads(threads)  # threads started later inherit it
    told = f"{bf16 * 1e3:.2f} ms against {fp32 * 1e3:.2f}, {' x '.join(map(str, SHAPE))}"
    why = f"products in bf16 take {bf16 / fp32:.2g} times as long as in fp32 ({told})"
    return Choice(torch.bfloat16 if bf16 <= FASTER * fp32 else torch.float32, why)


def _seconds(dtype: torch.dtype) -> float:
    m, n, k = SHAPE
    x, weight = (torch.ones(rows, k, dtype=dtype, device="cpu") for rows in (m, n))
    started = time.thread_time()
    torch.nn.functional.linear(x, weight)
    return time.thread_time() - started
