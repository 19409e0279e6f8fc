"""w4a16_24: 2:4 sparse 4-bit weights, 16-bit activations (Sparse-MARLIN)."""

from billfish.schemes.base import Family, Reference
from billfish.schemes.w4a16_24.cpu import CpuOp
from billfish.schemes.w4a16_24.cuda.op import CudaOp
from billfish.schemes.w4a16_24.cuda.stripe_op import StripeOp
from billfish.schemes.w4a16_24.scheme import W4A16Sparse

__all__ = ["FAMILY", "W4A16Sparse"]

FAMILY = Family(
    W4A16Sparse,
    ops=(CudaOp, StripeOp, CpuOp, Reference),
    quantizer="billfish.schemes.w4a16_24.quantize",
)
