"""Numbers in and out of CPU kernels that compute in integers: activations rounded to whole steps of
up to 16 bits, and fp32 sums stored in any type.

The step of a chunk of x is a power of two, so that products with it are exact.
"""

import torch

from billfish.kernels.llvm import F16, F32, I16, I32, Value, Writer, vector


def step_of(w: Writer, largest: Value, top: int) -> tuple[Value, Value]:
    """The step in which the largest magnitude of a chunk (its bits in fp32) is at most `top`, which
    is 2^14 to 2^15, and the step's inverse. With Inf or NaN in the chunk the step is NaN."""
    # The step's exponent is that of the largest x, or one more where its mantissa is half a step
    # below top / 2^14 or above: there adding `carry` overflows into the exponent.
    carry = ((2**15 - top) * 2 + 1) * 2**8
    exponent = (largest + carry) >> 23
    exponent = w.pick(w.less(exponent, 30), w.constant(I32, 30), exponent)
    step = ((exponent - 14) << 23).as_bits(F32)
    inverse = ((w.constant(I32, 2 * 127 + 14) - exponent) << 23).as_bits(F32)
    number = w.less(largest, 0x7F800000)
    return w.pick(number, step, w.constant(F32, float("nan"))), inverse


def in_steps(w: Writer, value: Value, inverse: Value, top: int) -> Value:
    """A vector in whole steps, int32."""
    lanes = value.lanes
    value = w.intrinsic(f"llvm.rint.v{lanes}f32", value.type, value * w.spread(inverse, lanes))
    for name, bound in (("minnum", top), ("maxnum", -top)):  # NaN becomes a number, too
        limit = w.constant(value.type, float(bound))
        value = w.intrinsic(f"llvm.{name}.v{lanes}f32", value.type, value, limit)
    return value.to(I32)


def in_bytes(steps: Value) -> tuple[Value, Value]:
    """Upper and lower signed bytes of numbers up to BYTES."""
    upper = (steps + 128).halved(8)
    return upper, steps - (upper << 8)


def nearest_bf16(value: Value) -> Value:
    """Rounded to bf16 in the upper half, ties to even; not for NaN."""
    bits = value.as_bits(vector(I32, value.lanes))
    return bits + ((bits >> 16) & 1) + 0x7FFF


def store_floats(w: Writer, value: Value, address: Value, dtype: torch.dtype) -> None:
    """A vector of fp32, rounded to `dtype`."""
    if dtype == torch.bfloat16:
        bits = value.as_bits(vector(I32, value.lanes))
        number = w.less(bits & 0x7FFFFFFF, 0x7F800001)
        value = w.pick(number, nearest_bf16(value) >> 16, w.constant(bits.type, 0x7FC0)).to(I16)
    elif dtype == torch.float16:
        value = value.to(F16)
    w.store(value, address)
