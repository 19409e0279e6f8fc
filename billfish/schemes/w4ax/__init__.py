"""w4ax: 4-bit weights and 8-bit activations, multiplied as whole numbers (COMET's W4A8)."""

from billfish.schemes.base import Family, Reference
from billfish.schemes.w4ax.cpu import CpuOp
from billfish.schemes.w4ax.cuda.op import CudaOp
from billfish.schemes.w4ax.cuda.stripe_op import StripeOp
from billfish.schemes.w4ax.scheme import W4AX

__all__ = ["FAMILY", "W4AX"]

FAMILY = Family(
    W4AX, ops=(CudaOp, StripeOp, CpuOp, Reference), quantizer="billfish.schemes.w4ax.quantize"
)
