"""What a job will cost in memory, disk and time: estimates, and marked so.

Sums over shapes, divided by rates that half a second of work gives: two matrix products, and a
small layer solved by the very solver that the job will use. Knows nothing of files but their sizes.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch

from billfish.driver import Job
from billfish.models.checkpoint import COPIED
from billfish.schemes.w4a16.quantize import NEEDS_DATA, quantize
from billfish.solvers import awq
from billfish.solvers.statistics import Statistics

NOTE = "Estimates, from shapes and a short measurement on this machine; they may be off by half."
# Block forwards of a calibration token: GPTQ runs both models once, gate and up twice in one.
FORWARDS = {"rtn": 0.0, "gptq": 2.6, "awq": 2.0}
SUMS = {"rtn": 0.0, "gptq": 1.65, "awq": 0.65}  # (k, k) products a token: x x^T costs 0.65
WEIGHT_COPIES = 5  # fp32 matrices as large as the weights being solved that are held at once
HESSIAN_COPIES = 8  # sums and means of Hessian and drift, damped, factors
PROCESS = 5 * 10**8  # bytes of Python with torch and transformers, measured
DISK = 5 * 10**8  # bytes a second, assumed
PROBES, DEPTH = (256, 1024), 512  # n of two small layers, and their k but for whole groups
PRODUCT = {"cpu": 1024, "cuda": 4096}  # size of the product that is timed
PROBE_SECONDS = 0.1  # of each product


@dataclass(frozen=True)
class Linear:
    """One linear and its fate."""

    module: str
    n: int
    k: int
    skip: str | None  # why it stays as it is
    way: str | None  # what tensor parallelism cuts: n, 2n (two halves), k, whole; None: unknown


@dataclass(frozen=True)
class Rates:
    fp32: float  # flops a second
    running: float  # the same in the type of the calibration passes
    solver: float  # seconds a weight, besides its products
    column: float  # seconds a column, whatever its length


def input_groups(linears: list[Linear], prefix: str) -> list[tuple[int, int]]:
    """(n stacked, k) of the linears of a block that read one input, as far as names tell: those of
    one parent with one k, but those cut along k, which read what others of that parent made."""
    groups: dict[tuple[str, int], int] = {}
    for linear in linears:
        if linear.skip is None and linear.module.startswith(prefix):
            parent = linear.module if linear.way == "k" else linear.module.rpartition(".")[0]
            groups[parent, linear.k] = groups.get((parent, linear.k), 0) + linear.n
    return [(n, k) for (_, k), n in groups.items()]


def estimate(job: Job, linears: list[Linear], tokens: int, bytes_after: int) -> dict[str, Any]:
    prefixes = [job.model.block_prefix(i) for i in range(len(job.model.blocks))]
    groups = [input_groups(linears, prefix) for prefix in prefixes]
    config = job.model.model.config.get_text_config()
    hidden = getattr(config, "hidden_size", None) or max(linear.k for linear in linears)
    twice = 2 if job.request.method == "gptq" else 1  # it follows the original model too
    activations = tokens * hidden * job.dtype.itemsize * twice
    memory = estimate_memory(job, linears, groups, activations)
    companions = [job.source.path / name for name in COPIED]
    result = bytes_after + sum(path.stat().st_size for path in companions if path.is_file())
    disk = {"result": result, "job": 2 * activations}  # of two blocks for a moment
    return {
        "note": NOTE,
        "memory_bytes": memory.pop("peak"),
        "memory": memory,
        "disk_bytes": sum(disk.values()),
        "disk": disk,
        **estimate_time(job, linears, groups, tokens, bytes_after),
    }


def estimate_memory(
    job: Job, linears: list[Linear], groups: list[list[tuple[int, int]]], activations: int
) -> dict[str, int]:
    method, width, every = job.request.method, job.dtype.itemsize, [g for b in groups for g in b]
    model = job.model
    counts = {name: parameter.numel() for name, parameter in model.model.named_parameters()}
    blocks = [
        sum(count for name, count in counts.items() if name.startswith(model.block_prefix(i)))
        for i in range(len(model.blocks))
    ]
    once, widest = max(blocks) * width, max(k for _, k in every)
    if method == "rtn":
        block, statistics = once, 0
        solved = max(linear.n * linear.k for linear in linears if linear.skip is None)
    elif method == "gptq":
        block, statistics = 2 * once, widest**2 * 4 * HESSIAN_COPIES
        solved = max(n * k for n, k in every)
    else:  # fp32: a copy of the block to try folds in, and its weights; Hessians of all its inputs
        block, solved = once + max(blocks) * 8, max(n * k for n, k in every)
        statistics = max(sum(k * k for _, k in inputs) for inputs in groups) * 4 + 3 * widest**2 * 4
    solver = solved * 4 * WEIGHT_COPIES
    embeddings = (sum(counts.values()) - sum(blocks)) * width
    # Reading a tensor and looking for NaN takes two more copies of it and a byte a number.
    prefix = model.prefix + "."
    inside = {stored for name, stored in model.stored.items() if name.startswith(prefix)}
    outside = [entry for name, entry in job.source.entries.items() if name not in inside]
    embeddings += max((2 * entry.nbytes + prod(entry.shape) for entry in outside), default=0)
    # Embeddings and one block make the first activations; then blocks are solved, for which GPTQ
    # keeps what their attention gives; after each, the activations are saved.
    kept = activations if method == "gptq" else 0
    phases = (embeddings + once, block + solver + statistics + kept, once + activations)
    return {
        "process": PROCESS, "activations": activations, "block": block, "solver": solver,
        "statistics": statistics, "embeddings": embeddings,
        "peak": PROCESS + activations + max(phases),
    }  # fmt: skip


def estimate_time(
    job: Job,
    linears: list[Linear],
    groups: list[list[tuple[int, int]]],
    tokens: int,
    bytes_after: int,
) -> dict[str, Any]:
    method, rates = job.request.method, measure(job)
    every = [group for block in groups for group in block]
    inside = [linear for linear in linears if linear.module.startswith(job.model.prefix + ".")]
    passes = FORWARDS[method] * tokens * 2 * sum(linear.n * linear.k for linear in inside)
    width = getattr(job.model.model.config.get_text_config(), "hidden_size", 0)
    attention = 2 * tokens * min(job.request.seqlen, tokens) * 2 * width * len(groups)
    outer = SUMS[method] * tokens * sum(2 * k * k for _, k in every)
    seconds = {
        "passes": (passes + attention * (FORWARDS[method] > 0)) / rates.running,
        "statistics": outer / rates.fp32,
        "solver": sum(
            k * rates.column + n * k * rates.solver + products(method, n, k) / rates.fp32
            for n, k in every
        ),
        "files": (job.source.nbytes + bytes_after) / DISK,
    }
    return {"seconds": sum(seconds.values()), "time": seconds, "rates": asdict(rates)}


def products(method: str, n: int, k: int) -> float:
    """Flops of a solver's matrix products. GPTQ: spreading errors, the report, undoing drift (with
    the rows, or, if they are more than columns, with a matrix of their own), the factor. AWQ: 39
    candidates and the report."""
    row = 2 * n * k * k
    if method == "gptq":
        drift = 3 * row if n < k else row + 4 * k**3
        return 2.5 * row + drift + 4 / 3 * k**3
    return 41 * row if method == "awq" else 0.0


def measure(job: Job) -> Rates:
    """On the job's device, with the threads it will have."""
    device, request, scheme = job.model.device, job.request, job.scheme
    group = DEPTH if scheme.group_size == -1 else scheme.group_size
    k = group * max(1, DEPTH // group)

    def seconds(call: Callable[[], object], at_least: float) -> float:
        """Of one call, after one that warms up."""
        call()
        wait(device)
        started, count = time.perf_counter(), 0
        while not count or time.perf_counter() - started < at_least:
            call()
            wait(device)
            count += 1
        return (time.perf_counter() - started) / count

    size = PRODUCT[device.type]
    source = torch.Generator(device=device).manual_seed(0)
    left = torch.randn(size, size, device=device, generator=source)
    fast = left.to(job.dtype)
    fp32 = 2 * size**3 / seconds(lambda: left @ left, PROBE_SECONDS)
    running = 2 * size**3 / seconds(lambda: fast @ fast, PROBE_SECONDS)

    known = Statistics(k, device) if NEEDS_DATA[request.method] else None
    if known is not None:
        x = torch.randn(2 * k, k, device=device, generator=source)
        known.add(x, x + 0.01 if request.method == "gptq" else None)

    def solve(n: int) -> float:
        """Seconds of a layer, besides its products."""
        weight = torch.randn(n, k, device=device, generator=source)

        def once() -> None:
            if known is not None and request.method == "awq":
                share = torch.arange(k, device=device)
                awq.search_fold(
                    weight, known.hessian, known.magnitude, share, scheme.grid, group,
                    job.stored_dtype,
                )  # fmt: skip
            quantize(scheme, weight, known, request.method, job.stored_dtype)

        return max(0.0, seconds(once, 0) - products(request.method, n, k) / fp32)

    few, many = (solve(n) for n in PROBES)
    weight = max(0.0, many - few) / ((PROBES[1] - PROBES[0]) * k)
    return Rates(fp32, running, weight, max(0.0, few / k - PROBES[0] * weight))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
