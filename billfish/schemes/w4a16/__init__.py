"""w4a16: integer weights in groups, 16-bit activations (MARLIN, QUICK)."""

from billfish.schemes.base import Family, Reference
from billfish.schemes.w4a16.cpu import CpuOp
from billfish.schemes.w4a16.cuda.op import CudaOp, InvariantOp, StripeOp
from billfish.schemes.w4a16.dialects.awq import Awq
from billfish.schemes.w4a16.dialects.compressed import CompressedTensors
from billfish.schemes.w4a16.dialects.gptq import Gptq
from billfish.schemes.w4a16.dialects.marlin import Marlin
from billfish.schemes.w4a16.kleidiai import KleidiaiOp
from billfish.schemes.w4a16.scheme import W4A16

__all__ = ["FAMILY", "W4A16"]

FAMILY = Family(
    W4A16,
    ops=(CudaOp, StripeOp, InvariantOp, CpuOp, KleidiaiOp, Reference),
    quantizer="billfish.schemes.w4a16.quantize",
    dialects=(CompressedTensors, Marlin, Gptq, Awq),
    tuner="billfish.schemes.w4a16.cuda.tune",
)
