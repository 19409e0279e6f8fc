"""w2416: 2 and 4 bits and 16-bit outliers in one matrix (2/4/16-bit paper)."""

from billfish.schemes.base import Family, Reference
from billfish.schemes.w2416.cpu import CpuOp
from billfish.schemes.w2416.cuda.op import CudaOp, StripeOp
from billfish.schemes.w2416.scheme import W2416

__all__ = ["FAMILY", "W2416"]

FAMILY = Family(
    W2416,
    ops=(CudaOp, StripeOp, CpuOp, Reference),
    quantizer="billfish.schemes.w2416.quantize",
)
