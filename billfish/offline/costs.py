"""Estimates what a job will need in memory, disk and time.

Operation counts are summed over the layers' shapes and divided by rates measured in half a second:
those of two matrix products, and of small layers quantized by the job's own solver. Of files only
sizes are used.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from billfish.checkpoints.write import COPIED
from billfish.offline.head import portion_rows
from billfish.offline.task import PackedHead, Task
from billfish.offline.training_costs import (
    BYTES_SOLVED,
    measure_training,
    training_memory,
    training_seconds,
)
from billfish.schemes.registry import quantizer
from billfish.solvers.statistics import Statistics

NOTE = "Estimates, from shapes and a short measurement on this machine; they may be off by half."
WEIGHT_COPIES = 5  # fp32 copies of the weights being quantized that exist at once
HESSIAN_COPIES = 8  # (k, k) fp32 matrices at once: Hessian, drift, damped copies, factors
PROCESS = 5 * 10**8  # bytes of a process with torch and transformers, measured
DISK = 5 * 10**8  # bytes a second, assumed
PROBES, DEPTH = (256, 1024), 512  # n of two small layers; the least k, the scheme may need more
PRODUCT = {"cpu": 1024, "cuda": 4096}  # m = n = k of the timed product
PROBE_SECONDS = 0.1  # of each product


@dataclass(frozen=True)
class Linear:
    """One linear, and how the job and tensor parallelism treat it."""

    module: str
    n: int
    k: int
    skip: str | None  # why it is not quantized
    # Dimension that tensor parallelism splits: n, 2n (two stacked halves), k; whole: replicated;
    # None: unknown.
    tp_axis: str | None
    share: float = 1.0  # of the tokens that it multiplies: an expert's


@dataclass(frozen=True)
class Rates:
    fp32: float  # flops a second
    running: float  # flops a second in the compute dtype of the calibration passes
    solver: float  # seconds a weight, without matrix products
    column: float  # seconds a column, independent of n


Group = tuple[int, int, float]  # sum of n, k, share of the tokens


def input_groups(linears: list[Linear], prefix: str) -> list[Group]:
    """The linears of a block that share an input, guessed from names: those with
    the same parent and k. A linear that is split along k (o_proj, down_proj) reads the others'
    outputs and is a group of its own."""
    groups: dict[tuple[str, int, float], int] = {}
    for linear in linears:
        if linear.skip is None and linear.module.startswith(prefix):
            parent = linear.module if linear.tp_axis == "k" else linear.module.rpartition(".")[0]
            key = parent, linear.k, linear.share
            groups[key] = groups.get(key, 0) + linear.n
    return [(n, k, share) for (_, k, share), n in groups.items()]


def estimate(task: Task, linears: list[Linear], tokens: int, bytes_after: int) -> dict[str, Any]:
    prefixes = [task.model.block_prefix(i) for i in range(len(task.model.blocks))]
    groups = [input_groups(linears, prefix) for prefix in prefixes]
    twice = 2 if task.request.how.follows_original else 1  # the original's activations, too
    activations = tokens * task.hidden_size * task.dtype.itemsize * twice
    memory = estimate_memory(task, linears, groups, activations, tokens)
    companions = [task.source.path / name for name in COPIED]
    result = bytes_after + sum(path.stat().st_size for path in companions if path.is_file())
    disk = {"result": result, "job": 2 * activations}  # old and new activations exist for a moment
    return {
        "note": NOTE,
        "memory_bytes": memory.pop("peak"),
        "memory": memory,
        "disk_bytes": sum(disk.values()),
        "disk": disk,
        **estimate_time(task, linears, groups, tokens, bytes_after),
    }


def estimate_memory(
    task: Task,
    linears: list[Linear],
    groups: list[list[Group]],
    activations: int,
    tokens: int,
) -> dict[str, int]:
    method, width, every = task.request.how, task.dtype.itemsize, [g for b in groups for g in b]
    model = task.model
    counts = {name: parameter.numel() for name, parameter in model.model.named_parameters()}
    every_block = range(len(model.blocks))
    sizes = [
        sum(count for name, count in counts.items() if name.startswith(model.block_prefix(i)))
        for i in every_block
    ]
    # Of experts one is in memory, with its copies in `solver`; training has all of them.
    apart = [
        sum(x.n * x.k for x in linears if x.share < 1 and _in(task, x, i)) for i in every_block
    ]
    blocks = [size - experts for size, experts in zip(sizes, apart, strict=True)]
    once, widest = max(blocks) * width, max(k for _, k, _ in every)
    if not method.needs_data:
        block, statistics = once, 0
        solved = max(n * k for block in block_shapes(task, linears) for n, k in block)
    elif method.follows_original:
        block, statistics = 2 * once, widest**2 * 4 * HESSIAN_COPIES
        solved = max(n * k for n, k, _ in every)
    else:  # fp32: a copy of the block to test folds, and its weights; Hessians of all inputs
        block, solved = once + max(blocks) * 8, max(n * k for n, k, _ in every)
        statistics = (
            max(sum(k * k for _, k, share in some if share == 1) for some in groups) * 4
            + 3 * widest**2 * 4
        )
    solver = solved * 4 * WEIGHT_COPIES
    filled = (sum(counts.values()) - sum(sizes)) * width
    # Reading a tensor and checking it for NaN takes two more copies of it and a byte an element.
    prefix = model.prefix + "."
    inside = {stored for name, stored in model.stored.items() if name.startswith(prefix)}
    outside = [entry for name, entry in task.source.entries.items() if name not in inside]
    reading = max((2 * entry.nbytes + prod(entry.shape) for entry in outside), default=0)
    embeddings = filled + reading
    # Peak of several phases: embeddings and one block compute the first activations; a block is
    # quantized, while GPTQ caches the output of its attention; activations are saved; a block is
    # trained; the whole model is.
    kept = activations if method.follows_original else 0
    if any(apart):  # inputs and outputs of experts, in both models
        kept += 2 * activations
    phases = [embeddings + once, block + solver + statistics + kept, once + activations]
    if task.head is not None:
        phases.append(filled + head_memory(task, task.head))
    trained: dict[str, int] = {}
    if method.refine is not None:
        phases[1] += BYTES_SOLVED * max(sizes)
        trained = training_memory(task, block_shapes(task, linears), tokens, filled)
        phases += [trained["training"], trained["distillation"] - activations // 2]
    return {
        "process": PROCESS,
        "activations": activations,
        "block": block,
        "solver": solver,
        "statistics": statistics,
        "embeddings": embeddings,
        **trained,
        "peak": PROCESS + activations + max(phases),
    }


def head_memory(task: Task, head: PackedHead) -> int:
    """To quantize the head: its weight as stored and packed, a portion of rows, statistics."""
    portion = min(head.n, portion_rows(head)) * head.k * 4 * WEIGHT_COPIES
    specs = head.scheme.tensors(head.n, head.k, task.stored_dtype).values()
    packed = 2 * sum(spec.nbytes for spec in specs)  # portions, and then the whole
    statistics = head.k**2 * 4 * HESSIAN_COPIES if task.request.how.needs_data else 0
    return task.source.entries[head.weight].nbytes + portion + packed + statistics


def estimate_time(
    task: Task,
    linears: list[Linear],
    groups: list[list[Group]],
    tokens: int,
    bytes_after: int,
) -> dict[str, Any]:
    method, rates = task.request.how, measure(task)
    every = [group for block in groups for group in block]
    every += [] if task.head is None else [(task.head.n, task.head.k, 1.0)]
    inside = [linear for linear in linears if linear.module.startswith(task.model.prefix + ".")]
    passes = method.forwards * tokens * 2 * sum(x.n * x.k * x.share for x in inside)
    attention = 2 * tokens * min(task.request.seqlen, tokens) * 2 * task.hidden_size * len(groups)
    outer = method.sums * tokens * sum(2 * k * k * share for _, k, share in every)
    seconds = {
        "passes": (passes + attention * (method.forwards > 0)) / rates.running,
        "statistics": outer / rates.fp32,
        "solver": sum(
            k * rates.column + n * k * rates.solver + method.flops(n, k) / rates.fp32
            for n, k, _ in every
        ),
        "files": (task.source.nbytes + bytes_after) / DISK,
    }
    told = asdict(rates)
    if method.refine is not None:
        timed = partial(mean_seconds, task.device, PROBE_SECONDS)
        trained = measure_training(task, PRODUCT[task.device.type], timed)
        seconds |= training_seconds(task, block_shapes(task, linears), tokens, trained)
        told["training"] = asdict(trained)
    return {"seconds": sum(seconds.values()), "time": seconds, "rates": told}


def _in(task: Task, linear: Linear, block: int) -> bool:
    return linear.module.startswith(task.model.block_prefix(block))


def block_shapes(task: Task, linears: list[Linear]) -> list[list[tuple[int, int]]]:
    """(n, k) of the quantized linears of each block."""
    prefixes = [task.model.block_prefix(i) for i in range(len(task.model.blocks))]
    made = [linear for linear in linears if linear.skip is None]
    return [[(x.n, x.k) for x in made if x.module.startswith(prefix)] for prefix in prefixes]


def mean_seconds(device: torch.device, at_least: float, call: Callable[[], object]) -> float:
    """Mean time of a call after one warm-up call."""
    call()
    wait(device)
    started, count = time.perf_counter(), 0
    while not count or time.perf_counter() - started < at_least:
        call()
        wait(device)
        count += 1
    return (time.perf_counter() - started) / count


def measure(task: Task) -> Rates:
    """Measured on the job's device with the job's number of threads."""
    device, method, scheme = task.model.device, task.request.how, task.scheme
    k = next((k for k in range(DEPTH, 2 * DEPTH) if not scheme.refuses(PROBES[0], k)), DEPTH)
    solver, size = quantizer(scheme), PRODUCT[device.type]
    source = torch.Generator(device=device).manual_seed(0)
    left = torch.randn(size, size, device=device, generator=source)
    fast = left.to(task.dtype)
    fp32 = 2 * size**3 / mean_seconds(device, PROBE_SECONDS, lambda: left @ left)
    running = 2 * size**3 / mean_seconds(device, PROBE_SECONDS, lambda: fast @ fast)

    known = Statistics(k, device) if method.needs_data else None
    if known is not None:
        x = torch.randn(2 * k, k, device=device, generator=source)
        known.add(x, x + 0.01 if method.follows_original else None)

    def solve(n: int) -> float:
        """Seconds to quantize an (n, k) layer, without matrix products."""
        weight = torch.randn(n, k, device=device, generator=source)

        def once() -> None:
            if known is not None and method.folds:
                share = torch.arange(k, device=device)
                solver.search_fold(scheme, weight, known, share, task.stored_dtype)
            solver.quantize(scheme, weight, known, method.name, task.stored_dtype)

        return max(0.0, mean_seconds(device, 0, once) - method.flops(n, k) / fp32)

    few, many = (solve(n) for n in PROBES)
    weight = max(0.0, many - few) / ((PROBES[1] - PROBES[0]) * k)
    return Rates(fp32, running, weight, max(0.0, few / k - PROBES[0] * weight))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
