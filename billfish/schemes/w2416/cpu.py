"""w2416 on a CPU: weights stay packed in memory at their true bits, without a decoded copy.

The kernels (cpu_kernels.py) are compiled by LLVM for this processor at their first call. They are
also a torch operator, for torch.compile.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from billfish.errors import UserError
from billfish.kernels import cpu
from billfish.schemes.base import Op, Tensors, together, watched
from billfish.schemes.w2416.cpu_words import (
    CODE_ORDER,
    COLUMNS,
    SCALE_ORDER,
    STEPS,
    TOP,
    by_band,
    by_row,
    inverse,
    reordered,
    room_bytes,
)
from billfish.schemes.w2416.scheme import W2416
from billfish.schemes.w2416.shares import BAND, GROUP

SLICE = 2**18  # elements of x that are split into whole steps at once: 1 MB, they stay in L2
LEAST = 64  # rows at once, however long they are: a band is decoded for all of them
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Attributes of an op in the order of the kernel's and the operator's arguments; the first dimension
# of all but `order` are bands.
WEIGHTS = (
    *("order", "words", "zeros", "scales", "bases"),
    *("words_4", "scales_4", "places", "values"),
)
_compiling = threading.Lock()  # LLVM's context is not thread safe
_room = cpu.Room()


@cache
def _kernel(isa: cpu.Isa, x: torch.dtype, scale: torch.dtype) -> Callable[..., None]:
    from billfish.schemes.w2416 import cpu_kernels, cpu_layer  # import LLVM

    with _compiling:
        return cpu_kernels.product(cpu_layer.Kind(isa, x, scale)).function("start", 6)


class Product:
    """The kernel's arguments for one layer. It holds pointers: the tensors must outlive it."""

    def __init__(self, isa: cpu.Isa, weights: Sequence[Tensor]) -> None:
        words, words_4, places = weights[1], weights[5], weights[7]
        bands, two, _ = words.shape
        _, parts, four, _, _ = words_4.shape
        self.groups = two + parts * four
        self.inputs, self.outputs = self.groups * GROUP, bands * BAND
        self.most = max(LEAST, SLICE // max(1, self.inputs))  # rows
        sizes = (bands, two, parts, four, places.shape[2], self.inputs // max(1, parts))
        numbers = (*(each.data_ptr() for each in weights), *sizes)
        self.numbers = (ctypes.c_int64 * len(numbers))(*numbers)
        self.layer = ctypes.addressof(self.numbers)
        self.isa, self.scale = isa, weights[6].dtype
        self.kernels = dict[torch.dtype, Callable[..., None]]()

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Compute y (rows, outputs) from x (rows, inputs): contiguous and of one dtype."""
        kernel = self.kernels.get(x.dtype) or self._compiled(x.dtype)
        rows, threads = y.numel() // self.outputs, cpu.threads()
        source, target = x.data_ptr(), y.data_ptr()
        while rows > 0:
            some = min(rows, self.most)
            room = _room.of(room_bytes(some, self.groups, threads))
            kernel(self.layer, source, target, room, some, threads)
            source += some * self.inputs * x.itemsize
            target += some * self.outputs * x.itemsize
            rows -= some

    def _compiled(self, dtype: torch.dtype) -> Callable[..., None]:
        self.kernels[dtype] = _kernel(self.isa, dtype, self.scale)
        return self.kernels[dtype]


def _product(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x (m, k) times packed weights -> (m, n) in x's dtype."""
    product = Product(cpu.isa(), weights)
    y = x.new_empty(len(x), product.outputs)
    product(x, y)
    return y


# The operator that torch.compile and dispatch modes see; eager calls use their cached Product.
_library = torch.library.Library("billfish", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("w2416_cpu(Tensor x, Tensor[] weights) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("w2416_cpu", _product, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("billfish::w2416_cpu", lib=_library)  # type: ignore[untyped-decorator]
def _(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return x.new_empty(x.shape[0], weights[1].shape[0] * BAND)


class CpuOp(Op):
    name: ClassVar[str] = "cpu"

    @classmethod
    def refuses(cls, scheme: W2416, n: int, k: int, device: torch.device) -> str | None:
        return cpu.refusal(device)

    @classmethod
    def tolerance(cls, scheme: W2416, tensors: Tensors, x: Tensor) -> float:
        """x is rounded to 16 bits, with an error of up to 1 / TOP of the largest x of its group."""
        weight = scheme.dequantize(tensors).double().abs()
        weight = weight.view(len(weight), -1, GROUP).sum(2)
        largest = x.double().abs().reshape(len(x), -1, GROUP).amax(2)
        return float((largest @ weight.T).max() / TOP)

    order: Tensor  # of the groups of x
    words: Tensor
    zeros: Tensor
    scales: Tensor
    bases: Tensor
    words_4: Tensor
    scales_4: Tensor
    places: Tensor
    values: Tensor

    def __init__(self, scheme: W2416, tensors: Tensors) -> None:
        self.scheme, self.isa = scheme, cpu.isa()
        self.n, self.k = scheme.size(tensors)
        share = scheme.shares(self.k)
        self.part, self.two = share.part, share.parts * share.two
        bits = tensors["input_bits"]
        self.order = torch.argsort(bits, stable=True).to(torch.int32)
        self.words = by_band(tensors["weight_packed"])
        self.zeros = tensors["weight_zero"].clone()
        self.scales = reordered(tensors["scale_code"].contiguous(), SCALE_ORDER)
        self.bases = pad(tensors["scale_base"], (0, -self.two % STEPS))
        codes = reordered(tensors["weight_packed_4"].contiguous(), CODE_ORDER)
        self.words_4 = by_band(codes.view(self.n, share.parts, share.four, 2))
        self.scales_4 = by_band(tensors["weight_scale_4"])
        self.places = _moved(tensors["outlier_place"], share.part, COLUMNS)
        self.values = tensors["outlier_value"].clone()
        self._product: Product | None = None

    @property
    def _weights(self) -> list[Tensor]:
        return [getattr(self, name) for name in WEIGHTS]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_product": None}  # its pointers are not valid in a copy

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype not in DTYPES:
            raise UserError(f"activations are {x.dtype}; known are {', '.join(map(str, DTYPES))}.")
        *lead, k = x.shape
        if k != self.k:
            raise ValueError(f"activations have {k} columns, the layer takes {self.k}")
        x = x.contiguous()
        if watched(x):
            y: Tensor = torch.ops.billfish.w2416_cpu(x.reshape(-1, k), self._weights)
            y = y.view(*lead, self.n)
        else:
            if self._product is None:
                self._product = Product(self.isa, self._weights)
            y = x.new_empty((*lead, self.n))
            self._product(x, y)
        return y if bias is None else y + bias

    def canonical(self) -> dict[str, Tensor]:
        bits = torch.full((self.k // GROUP,), 2, dtype=torch.uint8)
        bits[self.order[self.two : len(bits)].long()] = 4
        codes = by_row(self.words_4).view(self.n, -1)
        return {
            "input_bits": bits,
            "weight_packed": by_row(self.words),
            "weight_zero": self.zeros.clone(),
            "scale_code": reordered(self.scales, inverse(SCALE_ORDER)),
            "scale_base": self.bases[:, : self.two].contiguous(),
            "weight_packed_4": reordered(codes, inverse(CODE_ORDER)),
            "weight_scale_4": by_row(self.scales_4),
            "outlier_place": _moved(self.places, COLUMNS, self.part),
            "outlier_value": self.values.clone(),
        }

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._weights)

    @classmethod
    def join(cls, ops: Sequence["CpuOp"]) -> "CpuOp | None":
        whole = copy(ops[0])
        for op in ops:
            alike = (op.scheme, op.k, op.values.dtype) == (
                whole.scheme,
                whole.k,
                whole.values.dtype,
            )
            if not alike or not torch.equal(op.order, whole.order):
                return None
        whole.n = sum(op.n for op in ops)
        for name in WEIGHTS:
            joined, parts = together([getattr(op, name) for op in ops])
            for op, part in zip((whole, *ops), (joined, *parts), strict=True):
                setattr(op, name, part)
        for op in (whole, *ops):
            op._product = None
        return whole


def _moved(places: Tensor, columns: int, to: int) -> Tensor:
    """row * columns + column -> row * to + column, of unsigned 16 bits."""
    place = places.to(torch.int32) & 0xFFFF
    place = place // columns * to + place % columns
    return ((place ^ 0x8000) - 0x8000).to(torch.int16)
