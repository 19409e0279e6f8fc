"""w4a16 on a CPU: packed words in memory, no dequantised copy of the weights kept.

Few rows run through PyTorch's own int4 kernel (bf16, AVX512 or AVX2); more rows, fp32 and fp16 activations
and what the kernel does not take (groups below 32) decode one panel of outputs at a time and multiply it.
Codes of more than 4 bits are two 4-bit planes: code = 16 * high + low.

Words are in the kernel's own order, so that both paths read the same bytes:

    block of 2h outputs, for each column k, h bytes:   byte j = code[j] | code[j + h] << 4
    h = 32 with AVX512, 16 with AVX2
"""

from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from billfish.schemes.base import Tensors

if TYPE_CHECKING:
    from billfish.schemes.w4a16.scheme import W4A16

KERNEL_GROUPS = (256, 128, 64, 32)
# Above this many rows, decoding the panel once beats the kernel, whose time grows with every row
# (docs/LOG.md has the crossover).
MAX_KERNEL_ROWS = 32
PANEL_CODES = 2**20  # codes decoded at once: 2 MB of bf16, an L2's worth
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
        # Columns of one group next to each other; x follows by one gather per call.
        self.order = None if self.g_idx is None else torch.argsort(self.g_idx, stable=True)
        if self.order is not None:
            codes = codes[:, self.order]

        # One scale per channel fits any k: pad it to what the kernel takes. Real groups divide k.
        self.padded_n = self.n + -self.n % ROWS
        self.padded_k = self.k + (-self.k % 32 if groups == 1 else 0)
        self.group = self.padded_k // groups
        codes = pad(codes, (0, self.padded_k - self.k, 0, self.padded_n - self.n))
        self.half = kernel_half() or 32
        planes = [codes] if scheme.bits <= 4 else [codes & 15, codes >> 4]
        self.words = torch.stack([block_words(plane, self.half) for plane in planes])

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
        """(planes, k / kernel group, n, 2) bf16: the kernel computes (code - 8) * scale + shift.

        Symmetric 4-bit: shift = 0 and the numbers are exact. Asymmetric: shift = (8 - zero) * scale is
        rounded to bf16, at most 2^-9 of eight steps: less than rounding the decoded weight to bf16.
        """
        if self.words.shape[0] == 1:
            parts = [torch.stack([scale, (8 - zero) * scale], dim=-1)]
        else:
            low, high = zero % 16, zero // 16
            parts = [
                torch.stack([scale, (8 - low) * scale], dim=-1),
                torch.stack([16 * scale, (8 - high) * 16 * scale], dim=-1),
            ]
        repeat = self.group // self.kernel_group
        return torch.stack(parts).to(torch.bfloat16).repeat_interleave(repeat, dim=1)

    def _scales(self) -> Tensor:  # (g, padded n)
        if self.scales is not None:
            return self.scales
        assert self.sz is not None
        return self.sz[0, :: self.group // self.kernel_group, :, 0]

    def __call__(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, self.k)
        if self.order is not None:
            x = x[:, self.order]
        if self.padded_k != self.k:
            x = pad(x, (0, self.padded_k - self.k))
        if self.sz is not None and x.dtype == torch.bfloat16 and x.shape[0] <= MAX_KERNEL_ROWS:
            y = self._kernel(x.contiguous(), self.sz)
        else:
            y = self._panels(x)
        if self.padded_n != self.n:
            y = y[:, : self.n]
        return y.reshape(*shape[:-1], self.n)

    def _kernel(self, x: Tensor, sz: Tensor) -> Tensor:
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        words = self.words.view(-1, self.padded_n, self.padded_k // 2)
        y: Tensor = multiply(x, words[0], self.kernel_group, sz[0])
        if len(words) == 2:
            y = y + multiply(x, words[1], self.kernel_group, sz[1])
        return y

    def _panels(self, x: Tensor) -> Tensor:
        blocks = self.words.shape[1]
        step = max(1, PANEL_CODES // (self.padded_k * 2 * self.half))
        outputs = [x @ self._panel(i, min(i + step, blocks), x.dtype) for i in range(0, blocks, step)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _panel(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Decoded weights of output blocks [start, end), transposed: (k, outputs) in `dtype`.

        Codes, zeros and their difference are at most 8 bits wide, exact in bf16, so the only rounding is
        that of the product; where the stored scale has another dtype, the product is taken in fp32.
        """
        rows = slice(start * 2 * self.half, end * 2 * self.half)
        scales = self._scales()[:, None, rows]
        work = dtype if scales.dtype == dtype else torch.float32
        words = self.words[:, start:end].transpose(1, 2)  # (planes, k, blocks, half)
        out = torch.empty(self.padded_k, end - start, 2, self.half, dtype=work)
        out[:, :, 0], out[:, :, 1] = words[0] & 15, words[0] >> 4
        if len(words) == 2:
            out[:, :, 0] += (words[1] & 15) << 4
            out[:, :, 1] += words[1] & 0xF0
        grouped = out.view(-1, self.group, (end - start) * 2 * self.half)
        if self.zeros is None:
            grouped -= self.scheme.grid.middle
        else:
            grouped -= self.zeros[:, None, rows].to(work)
        grouped *= scales.to(work)
        return out.view(self.padded_k, -1).to(dtype)

    def canonical(self) -> dict[str, Tensor]:
        planes = [unblock_words(words, self.half) for words in self.words]
        codes = planes[0] if len(planes) == 1 else planes[0] | planes[1] << 4
        codes = codes[: self.n, : self.k]
        if self.order is not None:
            codes = codes[:, torch.argsort(self.order)]
        scales = self._scales()[:, : self.n].T
        zeros = scales if self.zeros is None else self.zeros[:, : self.n].T
        tensors = self.scheme.pack(codes, scales, zeros)
        if self.g_idx is not None:
            tensors["weight_g_idx"] = self.g_idx
        return tensors

    def nbytes(self) -> int:
        kept = (self.words, self.sz, self.scales, self.zeros, self.g_idx, self.order)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)


def block_words(codes: Tensor, half: int) -> Tensor:  # (n, k) uint8 -> (n / 2h, k, h) uint8
    n, k = codes.shape
    pairs = codes.view(n // (2 * half), 2, half, k)
    return (pairs[:, 0] | pairs[:, 1] << 4).transpose(1, 2).contiguous()


def unblock_words(words: Tensor, half: int) -> Tensor:  # the inverse
    pairs = torch.stack([words & 15, words >> 4], dim=1)  # (blocks, 2, k, h)
    return pairs.transpose(2, 3).reshape(-1, words.shape[1])


@cache
def kernel_half() -> int | None:
    """h of the int4 kernel of this CPU and PyTorch, found by packing a probe; None where neither fits
    (then every call decodes panels)."""
    codes = torch.arange(128 * 64, dtype=torch.int32).view(128, 64) * 7 // 3 % 16
    try:
        words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    for half in (32, 16):
        if torch.equal(words.flatten(), block_words(codes.to(torch.uint8), half).flatten()):
            return half
    return None
