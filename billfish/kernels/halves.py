"""Products of x in fp32 and dense 16-bit weights, for CPUs that multiply in fp32: half the memory
traffic of fp32 weights and the same results, since fp32 represents every bf16 and fp16 number.
"""

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from billfish.kernels.cpu import isa, threads

ROWS, OUTPUTS = 4, 4  # of a register tile: 16 sums, 8 loads for 16 products
_compiling = threading.Lock()


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., k) in fp32 by weight (n, k) -> (..., n); k is a multiple of 16."""
    n, k = weight.shape
    x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], n))
    given = (weight.data_ptr(), x.data_ptr(), y.data_ptr(), n, k, x.numel() // k)
    _kernel(weight.dtype)(*given, threads())
    return y


@cache
def _kernel(dtype: torch.dtype) -> Callable[..., None]:
    from llvmlite import ir

    from billfish.kernels import llvm

    with _compiling:
        module = ir.Module()
        tiles = {
            (rows, outputs): _tile(module, dtype, rows, outputs)
            for rows in (ROWS, 1)
            for outputs in (OUTPUTS, 1)
        }
        w = llvm.Writer(module, "work", 1)
        weight, x, y, n, k, rows = (w.load(w.arguments[0] + 8 * i, llvm.I64) for i in range(6))
        column, last = llvm.Team(w).share(n)
        for outputs in (OUTPUTS, 1):
            end = column + (last - column) // outputs * outputs
            with w.loop(column, end, outputs) as output:
                row = w.number(0)
                for count in (ROWS, 1):
                    until = row + (rows - row) // count * count
                    with w.loop(row, until, count) as i:
                        at = (weight + output * k * dtype.itemsize, x + i * k * 4)
                        w.call(tiles[count, outputs], *at, y + (i * n + output) * 4, n, k)
                    row = until
            column = end
        llvm.write_start(module, w.end(), 6)
        return llvm.compiled(module, isa()).function("start", 7)


def _tile(module: Any, dtype: torch.dtype, rows: int, outputs: int) -> Any:
    from billfish.kernels import llvm

    w = llvm.Writer(module, f"tile{rows}x{outputs}", 5)
    weight, x, y, n, k = w.arguments
    lanes = isa().lanes
    kind = llvm.vector(llvm.F32, lanes)
    tile = [(row, output) for row in range(rows) for output in range(outputs)]
    totals = {at: w.variable(w.constant(kind, 0.0)) for at in tile}
    with w.loop(w.number(0), k, lanes) as i:
        inputs = [w.load(x + (k * row + i) * 4, kind) for row in range(rows)]
        for output in range(outputs):
            place = weight + (k * output + i) * dtype.itemsize
            numbers = llvm.load_floats(w, place, dtype, lanes)
            for row in range(rows):
                total = totals[row, output]
                name = f"llvm.fma.v{lanes}f32"
                total.set(w.intrinsic(name, kind, numbers, inputs[row], total.get()))
    for row, output in tile:
        w.store(w.summed(totals[row, output].get()), y + (n * row + output) * 4)
    return w.end()
