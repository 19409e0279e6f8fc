"""w4a16 on a CPU: packed words in memory, no dequantised copy of the weights kept.

Few rows of bf16 run through PyTorch's own int4 kernel (AVX512 or AVX2). More rows, fp32 and fp16
activations, and groups the kernel does not take decode one panel of outputs at a time and multiply
it. Codes of more than 4 bits are two 4-bit planes, code = 16 * high + low, one after the other
along k: the kernel multiplies [low, high] by [x, x], and its fp32 sums are rounded once.

Words are in the kernel's own order, so that both paths read the same bytes:

    block of 2h outputs, for each plane and column k, h bytes:   byte j = code[j] | code[j + h] << 4
    h = 32 with AVX512, 16 with AVX2
"""

from collections.abc import Sequence
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from billfish.schemes.base import Tensors, together
from billfish.schemes.w4a16 import columns

if TYPE_CHECKING:
    from billfish.schemes.w4a16.scheme import W4A16

KERNEL_GROUPS = (256, 128, 64, 32)
# The kernel's time grows with every row, a panel is decoded once. They meet at 39 to 61 rows with
# one thread and at 45 or more with two, for 192 x 576 to 4096 x 4096 (table in docs/LOG.md).
MAX_KERNEL_ROWS = 40
# Codes decoded at once: 8 MB of bf16. A quarter of it would stay in L2, but the matmul of 1024
# outputs at k = 4096 beats that of 256 by more: 20 % of the time of 512 rows.
PANEL_CODES = 2**22
ROWS = 64  # n is padded to this: a whole block for either h


class CpuOp:
    name: ClassVar[str] = "cpu"

    @staticmethod
    def refuses(scheme: "W4A16", n: int, k: int, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"its weights are on {device}; move the model to the CPU with model.to('cpu')."
        return None

    def __init__(self, scheme: "W4A16", tensors: Tensors) -> None:
        self.scheme = scheme
        self.n, self.k = tensors["weight_shape"].tolist()
        codes, zeros, scales = scheme.codes(tensors), scheme.zeros(tensors), tensors["weight_scale"]
        groups = scales.shape[1]
        self.g_idx = tensors["weight_g_idx"] if scheme.has_g_idx else None
        self.order: Tensor | None = None
        if self.g_idx is not None:
            self.order = columns.by_group(self.g_idx, groups, self.name)
            codes = codes[:, self.order]

        self.planes = 1 if scheme.bits <= 4 else 2
        # Codes and zeros move so that the grid's middle is the kernel's own zero: its shift is then
        # exact for symmetric codes of every width, and as small as can be for asymmetric ones.
        self.middle = 8 if self.planes == 1 else 128
        self.moved = self.middle - scheme.grid.middle
        codes, zeros = codes + self.moved, zeros + self.moved

        # One scale per channel fits any k: pad it to what the kernel takes. Real groups divide k.
        self.padded_n = self.n + -self.n % ROWS
        self.padded_k = self.k + (-self.k % 32 if groups == 1 else 0)
        self.group = self.padded_k // groups
        codes = pad(codes, (0, self.padded_k - self.k, 0, self.padded_n - self.n))
        self.half = kernel_half() or 32
        nibbles = codes if self.planes == 1 else torch.cat([codes & 15, codes >> 4], dim=1)
        self.words = block_words(nibbles, self.half)

        scales, zeros = self._by_group(scales), self._by_group(zeros)
        self.zeros = None if scheme.symmetric else zeros
        self.kernel_group = next((g for g in KERNEL_GROUPS if self.group % g == 0), 0)
        self.sz: Tensor | None = None
        self.scales: Tensor | None = scales
        if kernel_half() and self.kernel_group and scales.dtype == torch.bfloat16:
            self.sz = self._kernel_scales(scales.float(), zeros.float())
            self.scales = None  # sz holds them, unchanged

    def _by_group(self, values: Tensor) -> Tensor:  # (n, g) -> (g, padded n)
        return pad(values, (0, 0, 0, self.padded_n - self.n)).T.contiguous()

    def _kernel_scales(self, scale: Tensor, zero: Tensor) -> Tensor:
        """(planes * k / kernel group, n, 2) bf16: the kernel computes (code - 8) * scale + shift.

        Symmetric: the shift is 0 (one plane) or 8 * scale (two), exact. Asymmetric: that of one
        plane is rounded to bf16, which moves a whole group by at most 2^-8 of eight steps, 1/32 of
        a step; two planes have two shifts that add up: the second takes what the first one lost.
        """
        if self.planes == 1:
            sz = torch.stack([scale, (8 - zero) * scale], dim=-1)
        else:  # code - zero = (low - 8) + 16 * (high - 8) + (136 - zero)
            shift = (136 - zero) * scale
            rounded = shift.bfloat16().float()
            low = torch.stack([scale, shift - rounded], dim=-1)
            sz = torch.cat([low, torch.stack([16 * scale, rounded], dim=-1)])
        return sz.to(torch.bfloat16).repeat_interleave(self.group // self.kernel_group, dim=0)

    def _scales(self) -> Tensor:  # (g, padded n)
        if self.scales is not None:
            return self.scales
        assert self.sz is not None
        low = self.sz[: self.padded_k // self.kernel_group]
        return low[:: self.group // self.kernel_group, :, 0]

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, self.k)
        if self.order is not None:
            x = x[:, self.order]
        if self.sz is not None and x.dtype == torch.bfloat16 and x.shape[0] <= MAX_KERNEL_ROWS:
            y = self._kernel(x, self.sz)
        else:
            y = self._panels(x)
        y = y.view(*shape[:-1], self.n)
        return y if bias is None else y + bias

    def _kernel(self, x: Tensor, sz: Tensor) -> Tensor:
        if self.padded_k != self.k:
            x = pad(x, (0, self.padded_k - self.k))
        x = x.contiguous() if self.planes == 1 else torch.cat([x, x], dim=1)
        words = self.words.view(self.padded_n, -1)
        sz = sz.contiguous()  # a part of a joined layer has a view
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        y: Tensor = multiply(x, words, self.kernel_group, sz)
        return y if self.padded_n == self.n else y[:, : self.n].contiguous()

    def _panels(self, x: Tensor) -> Tensor:
        blocks = len(self.words)
        step = max(1, PANEL_CODES // (self.padded_k * 2 * self.half))
        starts = range(0, blocks, step)
        outputs = [x @ self._panel(i, min(i + step, blocks), x.dtype) for i in starts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _panel(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Decoded weights of output blocks [start, end), transposed: (k, outputs) in `dtype`.

        Equal to dequantize() rounded once. A pass over bytes costs 0.04 ns a code, one in bf16 0.25
        or more, so all that can be done on bytes is. What lost to these passes is in docs/LOG.md.
        """
        rows = slice(start * 2 * self.half, end * 2 * self.half)
        codes = self._codes(start, end).view(-1, self.group, rows.stop - rows.start)
        zeros = self.middle if self.zeros is None else self.zeros[:, None, rows]
        if self.zeros is not None and self.scheme.bits == 8:
            steps = codes.to(torch.int16).sub_(zeros)  # -255 to 255
        else:
            steps = codes.sub_(zeros).view(torch.int8)  # wraps around, as two's complement does
        # A bf16 product rounds once, as wanted. Others are taken in fp32, as dequantize() does, and
        # rounded after; in fp16 too, because int8 -> fp16 is 8 times slower than int8 -> fp32.
        scales = self._scales()[:, None, rows]
        work = dtype if dtype == scales.dtype == torch.bfloat16 else torch.float32
        # Strided scales, as they lie in sz, would keep the product off vector code: 6 times slower.
        weights = steps.to(work).mul_(scales.to(work).contiguous())
        outputs = min(rows.stop, self.n) - rows.start
        return weights.view(self.padded_k, -1)[: self.k, :outputs].to(dtype)

    def _codes(self, start: int, end: int) -> Tensor:  # (k, blocks, 2, half) uint8
        words = self.words[start:end].transpose(0, 1)  # (planes * k, blocks, half)
        codes = torch.empty(*words.shape[:2], 2, self.half, dtype=torch.uint8)
        codes[:, :, 0], codes[:, :, 1] = words, words >> 4
        codes &= 15
        if self.planes == 1:
            return codes
        low, high = codes.chunk(2)
        return low.bitwise_or_(high.mul_(16))

    def canonical(self) -> dict[str, Tensor]:
        codes = self._codes(0, len(self.words)).view(self.padded_k, self.padded_n)
        codes = codes.T[: self.n, : self.k] - self.moved
        if self.order is not None:
            codes = codes[:, torch.argsort(self.order)]
        scales = self._scales()[:, : self.n].T
        zeros = scales if self.zeros is None else self.zeros[:, : self.n].T - self.moved
        tensors = self.scheme.pack(codes, scales, zeros)
        if self.g_idx is not None:
            tensors["weight_g_idx"] = self.g_idx
        return tensors

    def nbytes(self) -> int:
        kept = (self.words, self.sz, self.scales, self.zeros, self.g_idx, self.order)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    @classmethod
    def join(cls, ops: Sequence["CpuOp"]) -> "CpuOp | None":
        kinds = {(op.scheme, op.k, op._scales().dtype, op.sz is None) for op in ops}
        whole = copy(ops[0])
        if len(kinds) > 1 or whole.g_idx is not None or any(op.n % ROWS for op in ops[:-1]):
            return None
        whole.n, whole.padded_n = sum(op.n for op in ops), sum(op.padded_n for op in ops)
        for name, dim in (
            ("words", 0),
            ("sz", 1),
            ("scales", 1),
            ("zeros", 1),
        ):  # where outputs lie
            if getattr(whole, name) is not None:
                joined, parts = together([getattr(op, name) for op in ops], dim)
                for op, part in zip((whole, *ops), (joined, *parts), strict=True):
                    setattr(op, name, part)
        return whole

    @classmethod
    def gate(cls, ops: Sequence[Any]) -> None:
        """It has no such kernel."""


def block_words(codes: Tensor, half: int) -> Tensor:  # (n, k) uint8 -> (n / 2h, k, h) uint8
    n, k = codes.shape
    pairs = codes.view(n // (2 * half), 2, half, k)
    return (pairs[:, 0] | pairs[:, 1] << 4).transpose(1, 2).contiguous()


@cache
def kernel_half() -> int | None:
    """h of the int4 kernel of this CPU and PyTorch, found by packing a probe; None where neither
    fits (then every call decodes panels)."""
    codes = torch.arange(128 * 64, dtype=torch.int32).view(128, 64) * 7 // 3 % 16
    try:
        words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    for half in (32, 16):
        if torch.equal(words.flatten(), block_words(codes.to(torch.uint8), half).flatten()):
            return half
    return None
