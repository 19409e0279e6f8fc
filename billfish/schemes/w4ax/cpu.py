"""w4ax on a CPU: weights as int8 in memory, multiplied by PyTorch's int8 product.

oneDNN's kernels for it are exact where the processor adds four products in 32 bits (VNNI and later
on x86); on older ones sums of two may saturate at 16 bits. So it is tried once, on the largest
numbers, and where it is missing or wrong, products run in fp32, in blocks of inputs whose sums
fp32 holds exactly.
"""

from collections.abc import Sequence
from copy import copy
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.schemes.base import Op, Tensors, together, watched
from billfish.schemes.w4ax.activations import round_inputs
from billfish.schemes.w4ax.scheme import MIDDLE, NIBBLES, SHARED, W4AX, scaled

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 1024  # inputs: sums of 127 * 128 stay below 2^24
SLICE = 2**19  # outputs at once: temporaries of 2 MB, which malloc reuses
# Rows at once, however many outputs they have: oneDNN arranges the weights anew in each call.
# 4096x4096, 512 rows: 64 at once 83 ms, 128 61, 256 52, all 49.
LEAST = 256


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """int8 (m, k) and (n, k) -> int32 (m, n), by oneDNN."""
    return torch._int_mm(x, weight.t())


def fp32_product(x: Tensor, weight: Tensor) -> Tensor:
    """The same by products in fp32."""
    total = x.new_zeros(len(x), len(weight), dtype=torch.int32)
    for some, columns in zip(torch.split(x, BLOCK, 1), torch.split(weight, BLOCK, 1), strict=True):
        total += (some.float() @ columns.float().T).to(torch.int32)
    return total


@cache
def int8_works() -> bool:
    """Whether int8_product is exact here, found by trying: the largest products of both signs, one
    row and several, whole tiles and rests."""
    for m, n, k in ((1, 40, 64), (3, 7, 96), (17, 40, 288)):
        index = torch.arange(max(m, n) * k)
        x = torch.tensor([127, 127, -127])[index[: m * k] // 7 % 3].to(torch.int8).view(m, k)
        weight = torch.tensor([-128, 112, -128])[index[: n * k] // 5 % 3].to(torch.int8).view(n, k)
        x[0], weight[0] = 127, -128
        try:
            found = int8_product(x, weight)
        except RuntimeError:  # this build of PyTorch has none
            return False
        if not torch.equal(found.long(), x.long() @ weight.long().T):
            return False
    return True


def multiply(
    x: Tensor,  # (m, k)
    weight: Tensor,  # (n, k) int8
    base: Tensor,  # (n, 1)
    bias: Tensor | None,
    order: Tensor | None,  # of inputs and
    bits: Tensor | None,  # of blocks of them; none: a8
    rotation: bool,
) -> Tensor:
    """(m, n) in x's dtype."""
    y = x.new_empty(len(x), len(weight))
    product = int8_product if int8_works() else fp32_product
    size = max(LEAST, SLICE // len(weight))
    for start in range(0, len(x), size):
        x8, scale = round_inputs(x[start : start + size], order, bits, rotation)
        some = scaled(product(x8, weight), scale, base)
        y[start : start + size] = some if bias is None else some.add_(bias.float())
    return y


# The operator that torch.compile and dispatch modes see; eager calls need none.
_library = torch.library.Library("billfish", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "w4ax_cpu(Tensor x, Tensor weight, Tensor base, Tensor? bias, Tensor? order, Tensor? bits, "
    "bool rotation) -> Tensor"
)
_library.impl("w4ax_cpu", multiply, "CPU")  # type: ignore[no-untyped-call]
operator = torch.ops.billfish.w4ax_cpu.default


@torch.library.register_fake("billfish::w4ax_cpu", lib=_library)  # type: ignore[untyped-decorator]
def _(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


class CpuOp(Op):
    name: ClassVar[str] = "cpu"
    batch_invariant: ClassVar[bool] = True  # sums are exact

    @classmethod
    def refuses(cls, scheme: W4AX, n: int, k: int, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"its weights are on {device}; move the model to the CPU with model.to('cpu')."
        return None

    def __init__(self, scheme: W4AX, tensors: Tensors) -> None:
        self.scheme = scheme
        self.weight = scheme.whole_weight(tensors)  # (n, k) int8
        # All but the codes, as they are; those of inputs have no rows.
        self.rest = {name: t.clone() for name, t in tensors.items() if name != "weight_packed"}

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype not in DTYPES:
            raise UserError(f"activations are {x.dtype}; known are {', '.join(map(str, DTYPES))}.")
        *lead, k = x.shape
        n, inputs = self.weight.shape
        if k != inputs:
            raise ValueError(f"activations have {k} columns, the layer takes {inputs}")
        call = operator if watched(x) else multiply
        base, rotation = self.rest["weight_scale"], self.scheme.rotation
        rows, (order, bits) = x.reshape(-1, k), map(self.rest.get, SHARED)
        y: Tensor = call(rows, self.weight, base, bias, order, bits, rotation)
        return y.view(*lead, n)

    def canonical(self) -> dict[str, Tensor]:
        n, k = self.weight.shape
        shape = (n, k // self.scheme.group_size)
        q = NIBBLES.unpack(self.rest["group_scale"], *shape).to(torch.int8) + 1
        steps = (self.weight.view(*shape, -1) // q[..., None]).view(n, k)
        codes = steps + MIDDLE
        if not self.scheme.symmetric:
            zero = NIBBLES.unpack(self.rest["group_zero"], *shape).to(torch.int8)
            codes = steps + zero.repeat_interleave(self.scheme.group_size, 1)
        rest = {name: tensor.clone() for name, tensor in self.rest.items()}
        return {"weight_packed": NIBBLES.pack(codes), **rest}

    def nbytes(self) -> int:
        return self.weight.nbytes + sum(tensor.nbytes for tensor in self.rest.values())

    @classmethod
    def join(cls, ops: Sequence["CpuOp"]) -> "CpuOp | None":
        first = ops[0]
        for op in ops[1:]:
            if (op.scheme, op.weight.shape[1]) != (first.scheme, first.weight.shape[1]):
                return None
            if op.rest["weight_scale"].dtype != first.rest["weight_scale"].dtype:
                return None
            if any(not torch.equal(op.rest[n], first.rest[n]) for n in SHARED if n in op.rest):
                return None
        whole = copy(first)
        whole.rest = dict(first.rest)
        whole.weight, weights = together([op.weight for op in ops])
        for op, weight in zip(ops, weights, strict=True):
            op.weight = weight
        for name, tensor in whole.rest.items():
            each = [tensor] * len(ops)
            if name not in SHARED:
                whole.rest[name], each = together([op.rest[name] for op in ops])
            for op, part in zip(ops, each, strict=True):
                op.rest[name] = part
        return whole
