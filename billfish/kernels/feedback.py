"""Rounding with error feedback inside a block of columns: the loop at the heart of GPTQ.

Each column is rounded to its grid, and its error is added to the later columns. A step is a few
numbers a row, less than Python's overhead for starting it: on a CPU the loop is one kernel (rows in
vector lanes, a block of columns in L1; it makes GPTQ's solver five times as fast), on a GPU a CUDA
graph. Other devices run torch's operations one by one.
"""

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from billfish.kernels.cpu import isa, threads

COLUMNS = 128  # at most
_compiling = threading.Lock()


def round_columns(
    block: Tensor,  # (columns, n) fp32, the weight transposed; overwritten
    steps: Tensor,  # (columns, n) fp32: the scale of each weight
    origins: Tensor,  # (columns, n) fp32: its zero point
    spread: Tensor,  # (columns, columns) fp32, upper triangular: error feedback
    levels: int | Tensor,  # codes are 0 to levels - 1; (columns, n) fp32: of each weight
) -> tuple[Tensor, Tensor]:
    """Codes and errors, each (columns, n) fp32."""
    if block.device.type == "cuda":
        same = levels if isinstance(levels, int) else None
        given = (block, steps, origins, spread, levels)[: 4 if same else 5]
        return _Graph.of(*block.shape, same, block.device)(*given)
    if block.device.type == "cpu":
        return _on_cpu(block, steps, origins, spread, levels)
    return one_by_one(block, steps, origins, spread, levels)


def one_by_one(
    block: Tensor, steps: Tensor, origins: Tensor, spread: Tensor, levels: int | Tensor
) -> tuple[Tensor, Tensor]:
    codes, errors = torch.empty_like(block), torch.empty_like(block)
    zero = torch.zeros((), device=block.device)
    for i in range(len(block)):
        code = torch.round(block[i] / steps[i]) + origins[i]
        if isinstance(levels, int):
            code = torch.clamp(code, 0, levels - 1)
        else:
            code = torch.clamp(code, zero, levels[i] - 1)
        codes[i] = code
        errors[i] = (block[i] - (code - origins[i]) * steps[i]) / spread[i, i]
        block[i + 1 :].addr_(spread[i, i + 1 :], errors[i], alpha=-1.0)
    return codes, errors


class _Graph:
    """The loop for one shape, captured once. The next run overwrites its result."""

    def __init__(self, columns: int, n: int, levels: int | None, device: torch.device) -> None:
        given = [torch.ones(columns, size, device=device) for size in (n, n, n, columns, n)]
        self.given = given[: 4 if levels else 5]

        def run() -> tuple[Tensor, Tensor]:
            block, steps, origins, spread, counts = given
            return one_by_one(block, steps, origins, spread, counts if levels is None else levels)

        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()  # warm-up
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = run()

    @staticmethod
    @cache
    def of(columns: int, n: int, levels: int | None, device: torch.device) -> "_Graph":
        return _Graph(columns, n, levels, device)

    def __call__(self, *given: Any) -> tuple[Tensor, Tensor]:
        for mine, value in zip(self.given, given, strict=True):
            mine.copy_(value)
        self.graph.replay()
        return self.result


def _on_cpu(
    block: Tensor, steps: Tensor, origins: Tensor, spread: Tensor, levels: int | Tensor
) -> tuple[Tensor, Tensor]:
    columns, n = block.shape
    assert columns <= COLUMNS
    room = -n % isa().lanes
    of_weights = [block, steps, origins]
    if isinstance(levels, Tensor):
        of_weights.append(levels)
    given = [torch.nn.functional.pad(t, (0, room), value=1.0).contiguous() for t in of_weights]
    spread = spread.contiguous()
    codes, errors = torch.empty_like(given[0]), torch.empty_like(given[0])
    places = [tensor.data_ptr() for tensor in (*given[:3], spread, codes, errors, given[-1])]
    same = levels if isinstance(levels, int) else None
    _kernel(same)(*places, columns, n + room, threads())
    return codes[:, :n], errors[:, :n]


@cache
def _kernel(levels: int | None) -> Callable[..., None]:
    """None: each weight has its own number of levels."""
    from llvmlite import ir

    from billfish.kernels import llvm

    with _compiling:
        module, lanes = ir.Module(), isa().lanes
        kind = llvm.vector(llvm.F32, lanes)
        w = llvm.Writer(module, "work", 1)
        with w.builder.goto_entry_block():
            place = w.builder.alloca(ir.ArrayType(llvm.F32, COLUMNS * lanes))
        local = llvm.Value(w, w.builder.ptrtoint(place, llvm.I64))
        block, steps, origins, spread, codes, errors, counts, columns, n = (
            w.load(w.arguments[0] + 8 * i, llvm.I64) for i in range(9)
        )
        zero, one = w.constant(kind, 0.0), w.constant(kind, 1.0)

        def call(name: str, *values: llvm.Value) -> llvm.Value:
            return w.intrinsic(f"llvm.{name}.v{lanes}f32", kind, *values)

        first, last = llvm.Team(w).share(n // lanes)
        with w.loop(first, last) as rows:
            at = rows * lanes * 4
            with w.loop(w.number(0), columns) as i:
                w.store(w.load(block + i * n * 4 + at, kind), local + i * lanes * 4)
            with w.loop(w.number(0), columns) as i:
                here = i * n * 4 + at
                value = w.load(local + i * lanes * 4, kind)
                step, origin = w.load(steps + here, kind), w.load(origins + here, kind)
                code = call("roundeven", value / step) + origin
                if levels is None:
                    top = w.load(counts + here, kind) - one
                else:
                    top = w.constant(kind, levels - 1)
                code = call("minnum", call("maxnum", code, zero), top)
                row = spread + i * columns * 4
                error = value - (code - origin) * step
                error = error / w.spread(w.load(row + i * 4, llvm.F32), lanes)
                w.store(code, codes + here)
                w.store(error, errors + here)
                back = zero - error
                with w.loop(i + 1, columns) as j:
                    behind = local + j * lanes * 4
                    share = w.spread(w.load(row + j * 4, llvm.F32), lanes)
                    w.store(call("fma", share, back, w.load(behind, kind)), behind)
        llvm.write_start(module, w.end(), 9)
        return llvm.compiled(module, isa()).function("start", 10)
