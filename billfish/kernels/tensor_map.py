"""Tensor maps (CUtensorMap): descriptors of matrices for TMA, passed as kernel arguments."""

import functools
from typing import Any

BOX_COLUMNS = 64  # of 16 bits: a line of 128 bytes, with the 128-byte swizzle


@functools.lru_cache(4096)
def of_rows(pointer: int, rows: int, columns: int, box_rows: int) -> Any:
    """(rows, columns) 16-bit numbers, aligned to 16 bytes, copied in boxes of 64 columns.

    A map holds an address and keeps nothing alive: torch's allocator returns the same addresses
    again and again, so that most calls find theirs cached.
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
