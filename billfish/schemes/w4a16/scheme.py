"""w4a16: integer weights of 2 to 8 bits (4 as a rule) in groups along k, 16-bit activations.

The canonical tensors are those of compressed-tensors `pack-quantized` (docs/FORMAT.md), so that a
checkpoint needs no translation and loads in vLLM and transformers as it is. MARLIN and QUICK are
ops of this one scheme.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from billfish.formats import layout
from billfish.formats.grid import Grid, group_count
from billfish.formats.spec import TensorSpec
from billfish.schemes.base import LinearOp, Tensors
from billfish.schemes.w4a16.cpu import CpuOp
from billfish.schemes.w4a16.cuda import CudaOp, InvariantOp, StripeOp
from billfish.schemes.w4a16.kleidiai import KleidiaiOp
from billfish.schemes.w4a16.reference import ReferenceOp


@dataclass(frozen=True)
class W4A16:
    name: ClassVar[str] = "w4a16"

    bits: int = 4
    group_size: int = 128  # -1: one scale per output channel
    symmetric: bool = True
    # Only foreign GPTQ checkpoints with desc_act have it: column k belongs to group g_idx[k]. We
    # never write such models: it costs a gather of x and breaks tensor parallelism (solvers/gptq.py
    # orders statically).
    has_g_idx: bool = False

    def __post_init__(self) -> None:
        Grid(self.bits, self.symmetric)  # checks the bits
        group_count(0, self.group_size)

    @property
    def grid(self) -> Grid:
        return Grid(self.bits, self.symmetric)

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        groups = group_count(k, self.group_size)
        specs = {
            "weight_packed": TensorSpec(
                layout.compressed_tensors(self.bits).shape(n, k), torch.int32
            ),
            "weight_scale": TensorSpec((n, groups), dtype),
            "weight_shape": TensorSpec((2,), torch.int64),
        }
        if not self.symmetric:
            shape = layout.compressed_tensors_zeros(self.bits).shape(n, groups)
            specs["weight_zero_point"] = TensorSpec(shape, torch.int32)
        if self.has_g_idx:
            specs["weight_g_idx"] = TensorSpec((k,), torch.int32)
        return specs

    def bits_per_weight(self, n: int, k: int, dtype: torch.dtype) -> float:
        """True cost: codes, scales, zeros and shape, as bytes on disk."""
        return sum(spec.nbytes for spec in self.tensors(n, k, dtype).values()) * 8 / (n * k)

    def pack(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
        """(n, k) integer codes, (n, g) scales in their stored dtype, (n, g) zeros -> canonical."""
        n, k = codes.shape
        tensors = {
            "weight_packed": layout.compressed_tensors(self.bits).pack(codes),
            "weight_scale": scales.contiguous(),
            "weight_shape": torch.tensor([n, k], dtype=torch.int64, device=codes.device),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = layout.compressed_tensors_zeros(self.bits).pack(zeros)
        return tensors

    def codes(self, tensors: Tensors) -> Tensor:  # (n, k) uint8
        n, k = shape_of(tensors)
        return layout.compressed_tensors(self.bits).unpack(tensors["weight_packed"], n, k)

    def zeros(self, tensors: Tensors) -> Tensor:  # (n, g) uint8
        n, groups = tensors["weight_scale"].shape
        if self.symmetric:
            device = tensors["weight_scale"].device
            return torch.full((n, groups), self.grid.middle, dtype=torch.uint8, device=device)
        packed = tensors["weight_zero_point"]
        return layout.compressed_tensors_zeros(self.bits).unpack(packed, n, groups)

    def group_of_column(self, tensors: Tensors) -> Tensor:  # (k,) int64
        _, k = shape_of(tensors)
        if self.has_g_idx:
            return tensors["weight_g_idx"].long()
        size = k if self.group_size == -1 else self.group_size
        return torch.arange(k, device=tensors["weight_scale"].device) // size

    def dequantize(self, tensors: Tensors) -> Tensor:
        group = self.group_of_column(tensors)
        codes, zeros = self.codes(tensors).float(), self.zeros(tensors).float()
        return (codes - zeros[:, group]) * tensors["weight_scale"].float()[:, group]

    def ops(self) -> tuple[type[LinearOp], ...]:
        return (CudaOp, StripeOp, InvariantOp, CpuOp, KleidiaiOp, ReferenceOp)


def shape_of(tensors: Tensors) -> tuple[int, int]:
    n, k = tensors["weight_shape"].tolist()
    return n, k
