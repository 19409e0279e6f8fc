"""w4a16 on a CPU: weights stay packed in memory, without a decoded copy.

The kernel (cpu_kernels.py) is compiled by LLVM for this processor at its first call. It multiplies
the codes themselves, for any number of rows of x. It is also a torch operator, for torch.compile.
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
from billfish.schemes.w4a16 import columns
from billfish.schemes.w4a16.cpu_words import VECTORS, codes_of, room_bytes, strip_words
from billfish.schemes.w4a16.scheme import W4A16

SLICE = 2**22  # elements of x that are split into bytes at once: 8 MB
ROWS = 64  # n is padded to a multiple of this: whole tiles for every instruction set
# inputs that share a step of x: longer chunks are less exact, shorter ones slower
CHUNKS = (128, 64, 32, 16, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_compiling = threading.Lock()  # LLVM's context is not thread safe


@cache
def _kernel(isa: cpu.Isa, x: torch.dtype, scale: torch.dtype, zeros: bool) -> Callable[..., None]:
    from billfish.schemes.w4a16 import cpu_kernels  # imports LLVM

    with _compiling:
        kind = cpu_kernels.Kind(isa, x, scale, zeros)
        return cpu_kernels.product(kind).function("start", 6)


_room = cpu.Room()


class Product:
    """The kernel's arguments for one layer. It holds pointers: the tensors must outlive it."""

    def __init__(
        self, isa: cpu.Isa, words: Tensor, scales: Tensor, zeros: Tensor | None, middle: int
    ) -> None:
        strips, self.chunks, planes, self.blocks, width, _ = words.shape
        self.inputs, self.outputs = self.chunks * self.blocks * 8, strips * width
        self.most = max(64, SLICE // self.inputs)  # rows
        numbers = (
            words.data_ptr(),
            scales.data_ptr(),
            middle if zeros is None else zeros.data_ptr(),
            scales.stride(0),
            strips,
            self.chunks,
            self.blocks,
            planes - 1,
        )
        self.numbers = (ctypes.c_int64 * len(numbers))(*numbers)
        self.layer = ctypes.addressof(self.numbers)
        self.kind = (scales.dtype, zeros is not None)
        self.isa, self.kernels = isa, dict[torch.dtype, Callable[..., None]]()

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Compute y (rows, outputs) from x (rows, inputs): contiguous and of one dtype."""
        kernel = self.kernels.get(x.dtype)
        if kernel is None:
            kernel = self.kernels[x.dtype] = _kernel(self.isa, x.dtype, *self.kind)
        rows, threads = x.numel() // self.inputs, cpu.threads()
        source, target = x.data_ptr(), y.data_ptr()
        while rows > 0:
            some = min(rows, self.most)
            room = _room.of(room_bytes(some, self.chunks, self.blocks, threads))
            kernel(self.layer, source, target, room, some, threads)
            source += some * self.inputs * x.itemsize
            target += some * self.outputs * x.itemsize
            rows -= some


def _product(x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None, middle: int) -> Tensor:
    """x (m, padded k) times packed words -> (m, padded n) in x's dtype."""
    product = Product(cpu.isa(), words, scales, zeros, middle)
    y = x.new_empty(len(x), product.outputs)
    product(x, y)
    return y


# The operator that torch.compile and dispatch modes see; eager calls use their cached Product.
_library = torch.library.Library("billfish", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "w4a16_cpu(Tensor x, Tensor words, Tensor scales, Tensor? zeros, int middle) -> Tensor"
)
_library.impl("w4a16_cpu", _product, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("billfish::w4a16_cpu", lib=_library)  # type: ignore[untyped-decorator]
def _(x: Tensor, words: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], words.shape[0] * words.shape[4])


class CpuOp(Op):
    name: ClassVar[str] = "cpu"

    @classmethod
    def refuses(cls, scheme: W4A16, n: int, k: int, device: torch.device) -> str | None:
        return cpu.refusal(device)

    @classmethod
    def tolerance(cls, scheme: W4A16, tensors: Tensors, x: Tensor) -> float:
        """x is rounded to 16 bits, with an error of up to 2^-15 of the largest x of its chunk; a
        chunk lies within a group."""
        weight, group = scheme.dequantize(tensors).double(), scheme.group_of_column(tensors)
        groups = range(int(group.max()) + 1)
        largest = torch.stack([x[:, group == g].abs().amax(1) for g in groups], 1)
        return float((largest.double()[:, group] @ weight.abs().T).max() * 2**-15)

    def __init__(self, scheme: W4A16, tensors: Tensors) -> None:
        self.scheme, self.isa = scheme, cpu.isa()
        self.n, self.k = tensors["weight_shape"].tolist()
        codes, zeros, scales = scheme.codes(tensors), scheme.zeros(tensors), tensors["weight_scale"]
        self.groups = scales.shape[1]
        self.g_idx = tensors["weight_g_idx"] if scheme.has_g_idx else None
        self.order: Tensor | None = None
        if self.g_idx is not None:
            self.order = columns.by_group(self.g_idx, self.groups, self.name)
            codes = codes[:, self.order]
        self.group = self.k // self.groups
        # A group's inputs are padded to a multiple of 8; a single group's to a multiple of 32.
        self.padded_group = self.group + -self.group % (32 if self.groups == 1 else 8)
        self.chunk = next(size for size in CHUNKS if self.padded_group % size == 0)
        self.plain = self.order is None and self.padded_group == self.group
        self.padded_n = self.n + -self.n % ROWS
        padding = (0, self.padded_group - self.group, 0, 0, 0, self.padded_n - self.n)
        codes = pad(codes.view(self.n, self.groups, self.group), padding)
        self.words = strip_words(
            codes.flatten(1), self.chunk, scheme.bits, VECTORS * self.isa.lanes
        )
        self.scales = self._by_chunk(scales)
        self.zeros = None if scheme.symmetric else self._by_chunk(zeros)
        self._product: Product | None = None

    def _by_chunk(self, values: Tensor) -> Tensor:  # (n, groups) -> (chunks, padded n)
        chunks = values.repeat_interleave(self.padded_group // self.chunk, dim=1)
        return pad(chunks, (0, 0, 0, self.padded_n - self.n)).T.contiguous()

    def _by_group(self, values: Tensor) -> Tensor:  # the inverse
        return values[:: self.padded_group // self.chunk, : self.n].T

    @property
    def _weights(self) -> tuple[Tensor, Tensor, Tensor | None, int]:
        return self.words, self.scales, self.zeros, self.scheme.grid.middle

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_product": None}  # its pointers are not valid in a copy

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype not in DTYPES:
            raise UserError(f"activations are {x.dtype}; known are {', '.join(map(str, DTYPES))}.")
        *lead, k = x.shape
        if k != self.k:
            raise ValueError(f"activations have {k} columns, the layer takes {self.k}")
        if not self.plain or not x.is_contiguous():
            x = self._inputs(x.reshape(-1, k))
        if watched(x):
            inputs = x.reshape(-1, self.groups * self.padded_group)
            y: Tensor = torch.ops.billfish.w4a16_cpu(inputs, *self._weights)
            y = y.view(*lead, self.padded_n)
        else:
            if self._product is None:
                self._product = Product(self.isa, *self._weights)
            y = x.new_empty((*lead, self.padded_n))
            self._product(x, y)
        y = y if self.padded_n == self.n else y[..., : self.n].contiguous()
        return y if bias is None else y + bias

    def _inputs(self, x: Tensor) -> Tensor:  # (m, k) -> (m, padded k), in the order of the words
        if self.order is not None:
            x = x[:, self.order]
        if self.padded_group != self.group:
            groups = x.reshape(-1, self.groups, self.group)
            x = pad(groups, (0, self.padded_group - self.group)).flatten(1)
        return x.contiguous()

    def canonical(self) -> dict[str, Tensor]:
        codes = codes_of(self.words, self.scheme.bits)[: self.n]
        codes = codes.view(self.n, self.groups, -1)[:, :, : self.group].flatten(1)
        if self.order is not None:
            codes = codes[:, torch.argsort(self.order)]
        scales = self._by_group(self.scales)
        zeros = scales if self.zeros is None else self._by_group(self.zeros)
        tensors = self.scheme.pack(codes, scales, zeros)
        if self.g_idx is not None:
            tensors["weight_g_idx"] = self.g_idx
        return tensors

    def nbytes(self) -> int:
        kept = (self.words, self.scales, self.zeros, self.g_idx, self.order)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    @classmethod
    def join(cls, ops: Sequence["CpuOp"]) -> "CpuOp | None":
        kinds = {(op.scheme, op.k, op.scales.dtype) for op in ops}
        whole = copy(ops[0])
        if len(kinds) > 1 or whole.g_idx is not None or any(op.n % ROWS for op in ops[:-1]):
            return None
        whole.n, whole.padded_n = sum(op.n for op in ops), sum(op.padded_n for op in ops)
        for name, dim in (("words", 0), ("scales", 1), ("zeros", 1)):  # dimension of outputs
            if getattr(whole, name) is not None:
                joined, parts = together([getattr(op, name) for op in ops], dim)
                for op, part in zip((whole, *ops), (joined, *parts), strict=True):
                    setattr(op, name, part)
        for op in (whole, *ops):
            op._product = None
        return whole
