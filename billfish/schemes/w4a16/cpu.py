"""w4a16 on a CPU: packed words in memory, no decoded copy of the weights kept.

Kernels are our own (cpu_kernels.py), compiled by LLVM for this processor when they are first
called. Codes are multiplied as they are; only where matrix units multiply bf16 (AMX) many rows of
bf16 decode one panel of outputs at a time and multiply it. Both are operators of torch, so that
torch.compile traces them.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from billfish.errors import UserError
from billfish.kernels import cpu
from billfish.schemes.base import Tensors, together, watched
from billfish.schemes.w4a16 import columns

if TYPE_CHECKING:
    from billfish.schemes.w4a16.scheme import W4A16

# From here on a panel, which is decoded once, costs less than multiplying codes row by row.
PANEL_ROWS = 48
# Codes decoded at once: 8 MB of bf16. A quarter of it would stay in L2, but the matmul of 1024
# outputs at k = 4096 beats that of 256 by more: 20 % of the time of 512 rows.
PANEL_CODES = 2**22
SLICE = 2**22  # numbers of x that are split into bytes at once: 8 MB
ROWS = 64  # n is padded to this: whole tiles of every instruction set
CHUNKS = (128, 64, 32, 16, 8)  # inputs; more would have coarser steps of x, fewer cost time
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_compiling = threading.Lock()  # LLVM has one context for all threads


@cache
def _kernel(name: str, *kind: Any) -> Callable[..., None]:
    from billfish.schemes.w4a16 import cpu_kernels  # imports LLVM

    with _compiling:
        compiled = getattr(cpu_kernels, name)(*kind)
        return compiled.function("start", 2)  # type: ignore[no-any-return]


def _start(
    name: str, dtype: torch.dtype, scales: Tensor, zeros: Tensor | None, *numbers: int
) -> None:
    kernel = _kernel(name, cpu.isa(), dtype, scales.dtype, zeros is not None)
    given = (ctypes.c_int64 * len(numbers))(*numbers)
    kernel(ctypes.addressof(given), cpu.threads())


def _product(
    x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None, middle: int, span: int
) -> Tensor:
    """x (m, padded k) by words as cpu_kernels has them -> (m, padded n) in x's dtype; a scale is
    for `span` chunks."""
    strips, chunks, planes, blocks, lanes, _ = words.shape
    y = x.new_empty(len(x), strips * lanes)
    step = max(1, SLICE // x.shape[1])
    room = torch.empty(min(step, len(x)) * chunks * (blocks * 16 + 8), dtype=torch.uint8)
    for start in range(0, len(x), step):
        rows = x[start : start + step]
        split = room.data_ptr() + len(rows) * chunks * 8
        _start(
            "product", x.dtype, scales, zeros,
            words.data_ptr(), scales.data_ptr(), middle if zeros is None else zeros.data_ptr(),
            scales.stride(0), rows.data_ptr(), y[start:].data_ptr(), split, room.data_ptr(),
            strips, chunks, span, blocks, planes - 1, len(rows),
        )  # fmt: skip
    return y


def _panel(
    words: Tensor, scales: Tensor, zeros: Tensor | None, middle: int, span: int,
    start: int, end: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Weights of strips [start, end), rounded once: (padded k, outputs)."""
    _, chunks, planes, blocks, lanes, _ = words.shape
    out = torch.empty(chunks * blocks * 8, (end - start) * lanes, dtype=dtype)
    _start(
        "panel", dtype, scales, zeros,
        words.data_ptr(), scales.data_ptr(), middle if zeros is None else zeros.data_ptr(),
        scales.stride(0), out.data_ptr(), start, end - start, chunks, span, blocks, planes - 1,
    )  # fmt: skip
    return out


_library = torch.library.Library("billfish", "FRAGMENT")  # type: ignore[no-untyped-call]
_arguments = "Tensor words, Tensor scales, Tensor? zeros, int middle, int span"
_library.define(f"w4a16_cpu_product(Tensor x, {_arguments}) -> Tensor")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    f"w4a16_cpu_panel({_arguments}, int start, int end, ScalarType dtype) -> Tensor"
)
_library.impl("w4a16_cpu_product", _product, "CPU")  # type: ignore[no-untyped-call]
_library.impl("w4a16_cpu_panel", _panel, "CPU")  # type: ignore[no-untyped-call]


@torch.library.register_fake("billfish::w4a16_cpu_product", lib=_library)  # type: ignore[untyped-decorator]
def _(x: Tensor, words: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], words.shape[0] * words.shape[4])


@torch.library.register_fake("billfish::w4a16_cpu_panel", lib=_library)  # type: ignore[untyped-decorator]
def _(words: Tensor, *rest: Any) -> Tensor:
    start, end, dtype = rest[-3:]
    shape = (words.shape[1] * words.shape[3] * 8, (end - start) * words.shape[4])
    return words.new_empty(shape, dtype=dtype)


class CpuOp:
    name: ClassVar[str] = "cpu"

    @staticmethod
    def refuses(scheme: "W4A16", n: int, k: int, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"its weights are on {device}; move the model to the CPU with model.to('cpu')."
        if find_spec("llvmlite") is None:
            return "llvmlite, which compiles its kernels, is not here; pip install llvmlite."
        return None

    def __init__(self, scheme: "W4A16", tensors: Tensors) -> None:
        self.scheme = scheme
        self.n, self.k = tensors["weight_shape"].tolist()
        codes, zeros, scales = scheme.codes(tensors), scheme.zeros(tensors), tensors["weight_scale"]
        self.groups = scales.shape[1]
        self.g_idx = tensors["weight_g_idx"] if scheme.has_g_idx else None
        self.order: Tensor | None = None
        if self.g_idx is not None:
            self.order = columns.by_group(self.g_idx, self.groups, self.name)
            codes = codes[:, self.order]
        self.group = self.k // self.groups
        # Inputs of a group are padded to whole blocks, of a single one to chunks of 32.
        self.padded_group = self.group + -self.group % (32 if self.groups == 1 else 8)
        self.chunk = next(size for size in CHUNKS if self.padded_group % size == 0)
        self.padded_n = self.n + -self.n % ROWS
        padding = (0, self.padded_group - self.group, 0, 0, 0, self.padded_n - self.n)
        codes = pad(codes.view(self.n, self.groups, self.group), padding)
        self.words = strip_words(codes.flatten(1), self.chunk, scheme.bits, cpu.isa().lanes)
        self.scales = self._by_group(scales)
        self.zeros = None if scheme.symmetric else self._by_group(zeros)

    def _by_group(self, values: Tensor) -> Tensor:  # (n, g) -> (g, padded n)
        return pad(values, (0, 0, 0, self.padded_n - self.n)).T.contiguous()

    @property
    def _weights(self) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
        span = self.padded_group // self.chunk
        return self.words, self.scales, self.zeros, self.scheme.grid.middle, span

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        shape = x.shape
        if x.dtype not in DTYPES:
            raise UserError(f"activations are {x.dtype}; known are {', '.join(map(str, DTYPES))}.")
        x = self._inputs(x.reshape(-1, self.k))
        if x.dtype == torch.bfloat16 and len(x) >= PANEL_ROWS and cpu.multiplies_bf16():
            y = self._panels(x)
        else:
            product = torch.ops.billfish.w4a16_cpu_product if watched(x) else _product
            y = product(x, *self._weights)
        y = y if self.padded_n == self.n else y[:, : self.n].contiguous()
        y = y.view(*shape[:-1], self.n)
        return y if bias is None else y + bias

    def _inputs(self, x: Tensor) -> Tensor:  # (m, k) -> (m, padded k), as words have them
        if self.order is not None:
            x = x[:, self.order]
        if self.padded_group != self.group:
            groups = x.reshape(-1, self.groups, self.group)
            x = pad(groups, (0, self.padded_group - self.group)).flatten(1)
        return x.contiguous()

    def _panels(self, x: Tensor) -> Tensor:
        panel = torch.ops.billfish.w4a16_cpu_panel if watched(x) else _panel
        strips, lanes = self.words.shape[0], self.words.shape[4]
        step = max(1, PANEL_CODES // (x.shape[1] * lanes))
        ends = [(start, min(start + step, strips)) for start in range(0, strips, step)]
        outputs = [x @ panel(*self._weights, *each, x.dtype) for each in ends]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def canonical(self) -> dict[str, Tensor]:
        codes = codes_of(self.words, self.scheme.bits)[: self.n]
        codes = codes.view(self.n, self.groups, -1)[:, :, : self.group].flatten(1)
        if self.order is not None:
            codes = codes[:, torch.argsort(self.order)]
        scales = self.scales[:, : self.n].T
        zeros = scales if self.zeros is None else self.zeros[:, : self.n].T
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
        for name, dim in (("words", 0), ("scales", 1), ("zeros", 1)):  # where outputs lie
            if getattr(whole, name) is not None:
                joined, parts = together([getattr(op, name) for op in ops], dim)
                for op, part in zip((whole, *ops), (joined, *parts), strict=True):
                    setattr(op, name, part)
        return whole

    @classmethod
    def gate(cls, ops: Sequence[Any]) -> None:
        """It has no such kernel."""


def strip_words(codes: Tensor, chunk: int, bits: int, lanes: int) -> Tensor:
    """(n, k) uint8 -> words as cpu_kernels has them."""
    n, k = codes.shape
    planes = [codes] if bits <= 4 else [codes >> 4, codes & 15]
    # (strips, lanes, chunks, blocks, 2, 4) of each plane
    parts = [plane.view(n // lanes, lanes, k // chunk, chunk // 8, 2, 4) for plane in planes]
    pairs = torch.stack([part[..., 0, :] | part[..., 1, :] << 4 for part in parts], 3)
    return pairs.permute(0, 2, 3, 4, 1, 5).contiguous()


def codes_of(words: Tensor, bits: int) -> Tensor:
    """The inverse of strip_words."""
    pairs = words.permute(0, 4, 1, 2, 3, 5)  # (strips, lanes, chunks, planes, blocks, 4)
    codes = torch.stack([pairs & 15, pairs >> 4], -2).flatten(-2)
    codes = codes[:, :, :, 0] if bits <= 4 else codes[:, :, :, 0] << 4 | codes[:, :, :, 1]
    return codes.reshape(words.shape[0] * words.shape[4], -1)
