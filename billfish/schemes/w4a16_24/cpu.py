"""w4a16_24 on a CPU: w4a16's op on dense codes, in which pruned weights have the code of zero.

A CPU has no sparse products, so the words are w4a16's, 4 bits for every input. The places of kept
weights stay beside them, packed: they alone tell a kept zero from a pruned weight.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from billfish.formats.layout import unpack_stream
from billfish.schemes.base import Tensors, together
from billfish.schemes.w4a16.cpu import CpuOp as DenseOp
from billfish.schemes.w4a16.scheme import W4A16
from billfish.schemes.w4a16_24.scheme import MIDDLE, PLACE_BITS, W4A16Sparse, kept_at, spread


class CpuOp(DenseOp):
    def __init__(self, scheme: W4A16Sparse, tensors: Tensors) -> None:
        super().__init__(*_dense(scheme, tensors))
        self.sparse, self.meta = scheme, tensors["weight_meta"].clone()

    @classmethod
    def tolerance(cls, scheme: Any, tensors: Tensors, x: Tensor) -> float:
        return super().tolerance(*_dense(scheme, tensors), x)

    def canonical(self) -> dict[str, Tensor]:
        dense = super().canonical()
        places = unpack_stream(self.meta, PLACE_BITS)
        codes = kept_at(self.scheme.codes(dense), places, MIDDLE)
        places = places[:, : codes.shape[1]]
        return self.sparse.pack(codes, places, dense["weight_scale"], self.n, self.k)

    def nbytes(self) -> int:
        return super().nbytes() + self.meta.nbytes

    @classmethod
    def join(cls, ops: Sequence[Any]) -> "CpuOp | None":
        whole = super().join(ops)
        if whole is None:
            return None
        assert isinstance(whole, CpuOp)
        whole.meta, parts = together([op.meta for op in ops])
        for op, part in zip(ops, parts, strict=True):
            op.meta = part
        return whole


def _dense(scheme: W4A16Sparse, tensors: Tensors) -> tuple[W4A16, dict[str, Tensor]]:
    """The layer in w4a16."""
    codes, places = scheme.kept(tensors)
    codes = spread(codes, places, scheme.size(tensors)[1], MIDDLE)
    dense, scales = W4A16(4, scheme.group_size), tensors["weight_scale"]
    return dense, dense.pack(codes, scales, torch.empty(0))
