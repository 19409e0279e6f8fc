"""A toy scheme in one file: 8-bit floats with a scale for each row (w8f). The package does not know
it; test_seam.py registers it and runs every command, to prove that a scheme needs no other edit."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.formats.spec import TensorSpec
from billfish.schemes.base import STD, Family, Op, Reference, Solved

FP8, LARGEST = torch.float8_e4m3fn, 448.0


@dataclass(frozen=True)
class W8F:
    name: ClassVar[str] = "w8f"
    methods: ClassVar[tuple[str, ...]] = ("rtn",)

    margin: int = 1  # the largest weight of a row becomes LARGEST / margin

    def __post_init__(self):
        if not 1 <= self.margin <= 16:
            raise UserError(f"margin {self.margin}: is 1 to 16.")

    @classmethod
    def from_options(cls, options):
        if unknown := sorted(set(options) - {"margin"}):
            raise UserError(f"scheme {cls.name} has no {', '.join(unknown)}. It has margin.")
        return cls(int(options.get("margin", 1)))

    @classmethod
    def examples(cls):
        return [cls(2), cls(8)]

    def describe(self):
        return f"8 bit float, margin {self.margin}"

    def tensors(self, n, k, dtype):
        return {
            "weight_packed": TensorSpec((n, k), torch.uint8),
            "weight_scale": TensorSpec((n, 1), dtype),
        }

    def size(self, tensors):
        return tuple(tensors["weight_packed"].shape)

    def refuses(self, n, k):
        return f"k = {k} is odd" if k % 2 else None

    def misfit(self, shapes):
        return "some k are odd", "None would fit"

    def check(self, tensors):
        pass

    def refuses_cut(self, dim, at, size):
        return f"{at} inputs are not pairs" if dim == 1 and at % 2 else None

    def shard(self, tensors, dim, begin, end):
        size = self.size(tensors)[dim]
        if reason := self.refuses_cut(dim, begin, size) or self.refuses_cut(dim, end, size):
            raise UserError(f"cannot be cut: {reason}.")
        codes, scales = tensors["weight_packed"], tensors["weight_scale"]
        if dim == 0:
            codes, scales = codes[begin:end], scales[begin:end]
        else:
            codes = codes[:, begin:end]
        return {"weight_packed": codes.contiguous(), "weight_scale": scales.contiguous()}

    def random_tensors(self, n, k, dtype, generator):
        weight = torch.randn(n, k, generator=generator, device=generator.device) * STD
        return quantize(self, weight, None, "rtn", dtype).tensors()

    def dequantize(self, tensors):
        return tensors["weight_packed"].view(FP8).float() * tensors["weight_scale"].float()

    def reference(self, tensors, x):
        return x.double() @ self.dequantize(tensors).double().T


@dataclass(frozen=True)
class Codes(Solved):
    codes: Tensor
    scales: Tensor

    @property
    def decoded(self):
        return self.codes.view(FP8).float() * self.scales.float()

    def rows(self, start, end):
        cut = slice(start, end)
        return Codes(None, self.note, None, self.codes[cut], self.scales[cut])

    def tensors(self):
        return {"weight_packed": self.codes.contiguous(), "weight_scale": self.scales.contiguous()}


def quantize(scheme, weight, statistics, method, dtype):
    scales = (weight.abs().amax(1, keepdim=True) * scheme.margin / LARGEST).clamp(min=1e-6)
    scales = scales.to(dtype)
    codes = (weight / scales.float()).clamp(-LARGEST, LARGEST).to(FP8)
    return Codes(None, None, None, codes.view(torch.uint8), scales)


class Rounded:
    """Activations as the CPU op takes them: in fp32, made once for linears of one input."""

    count = 0

    def __init__(self, x):
        Rounded.count += 1
        self.values, self.dtype = x.float(), x.dtype


class CpuOp(Op):
    name: ClassVar[str] = "cpu"
    batch_invariant: ClassVar[bool] = False
    takes: ClassVar[str] = "fp32"

    @classmethod
    def refuses(cls, scheme: Any, n: int, k: int, device: torch.device) -> str | None:
        return None if device.type == "cpu" else f"its weights are on {device}; it is a CPU's op."

    def __init__(self, scheme, tensors):
        self.scheme, self.tensors = scheme, dict(tensors)
        self.weight = scheme.dequantize(tensors)

    def prepare(self, x):
        return Rounded(x)

    def __call__(self, x, bias=None):
        taken = x if isinstance(x, Rounded) else Rounded(x)
        y = taken.values @ self.weight.T
        return (y if bias is None else y + bias.float()).to(taken.dtype)

    def canonical(self):
        return dict(self.tensors)

    def nbytes(self):
        return self.weight.nbytes


FAMILY = Family(W8F, ops=(CpuOp, Reference), quantizer=__name__)
