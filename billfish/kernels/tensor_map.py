"""Tensor maps: what Hopper's copy engine must know of a matrix in memory; a kernel argument."""

import functools
from typing import Any

BOX_COLUMNS = 64  # of 16 bits: a line of 128 bytes, whose eight chunks are XORed with the row


@functools.lru_cache(4096)
def of_rows(pointer: int, rows: int, columns: int, box_rows: int) -> Any:
    """(rows, columns) 16-bit numbers on a multiple of 16 bytes, copied in boxes of 64 columns.

    A map knows an address, not what lies there, and keeps nothing alive: torch's allocator hands
    out the same addresses again and again, so most calls find theirs made.
    """
    from cuda.core._tensor_map import TensorMapSwizzle
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_cuda_array_interface(_Memory(pointer, rows, columns), -1)
    return view.as_tensor_map((box_rows, BOX_COLUMNS), swizzle=TensorMapSwizzle.SWIZZLE_128B)


class _Memory:
    def __init__(self, pointer: int, rows: int, columns: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (rows, columns),
            "typestr": "<u2",
            "data": (pointer, True),
            "strides": None,
            "version": 3,
        }
