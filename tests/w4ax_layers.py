"""Random layers of w4ax, and its oracle in exact integers, on any device."""

import torch
from torch.nn.functional import pad

from billfish.formats import layout


def layer(n, k, group_size, dtype, device="cpu", rows=300, asymmetric=False):
    """Canonical tensors, x, bias. The first and the last row have the largest weights; asymmetric
    ones have every zero, and the largest scale that it allows."""
    here = {"device": device}
    source = torch.Generator(device).manual_seed(n + k)
    groups = 1 if group_size == -1 else k // group_size
    codes = torch.randint(0, 16, (n, k), generator=source, **here)
    scales = torch.randint(1, 17, (n, groups), generator=source, **here)
    codes[0], scales[0] = 0, 16
    codes[-1], scales[-1] = 15, 16
    tensors = {
        "weight_packed": layout.compressed_tensors(4).pack(codes),
        "group_scale": layout.pack_stream(pad(scales - 1, (0, -groups % 8)), 4),
        "weight_scale": (torch.rand(n, 1, generator=source, **here) * 0.002 + 0.0001).to(dtype),
    }
    if asymmetric:
        zeros = torch.randint(0, 16, (n, groups), generator=source, **here)
        zeros[0], zeros[-1] = 15, 0
        scales = torch.minimum(scales, 127 // (15 - zeros).clamp(min=1))
        scales = torch.minimum(scales, 128 // zeros.clamp(min=1))
        tensors["group_scale"] = layout.pack_stream(pad(scales - 1, (0, -groups % 8)), 4)
        tensors["group_zero"] = layout.pack_stream(pad(zeros, (0, -groups % 8)), 4)
    x = torch.randn(rows, k, generator=source, **here)
    x[1::3, :: max(1, k // 5)] *= 30  # outliers
    return tensors, x.to(dtype), torch.randn(n, generator=source, **here).to(dtype)


def quantized(x):
    """Bytes and scales of tokens, by the rule. 127 / a is a tensor over a tensor: a number over a
    tensor is 127 * (1 / a) in torch, and a tensor over a number, on a GPU, a * (1 / 127)."""
    a = x.float().abs().amax(-1, keepdim=True)
    top = torch.full_like(a, 127)
    finite = a.isfinite()
    small = (x.float() * (top / a)).round().clamp(-127, 127)
    small = torch.where(finite & (a > 0), small, 0).to(torch.int64)
    return small, torch.where(finite, a / top, torch.nan)


def integers(tensors):
    """Codes (n, k), group scales 1 to 16 and zeros, int64."""
    words = tensors["weight_packed"]
    n, k = words.shape[0], words.shape[1] * 8
    codes = layout.compressed_tensors(4).unpack(words, n, k).long()
    scales = layout.unpack_stream(tensors["group_scale"], 4).long() + 1
    words = tensors.get("group_zero")
    zeros = torch.full_like(scales, 8) if words is None else layout.unpack_stream(words, 4).long()
    return codes, scales, zeros


def oracle(tensors, group_size, x, bias=None):
    codes, scales, zeros = integers(tensors)
    size = codes.shape[1] if group_size == -1 else group_size
    groups = codes.shape[1] // size
    q, zeros = (each[:, :groups].repeat_interleave(size, 1) for each in (scales, zeros))
    weights = (codes - zeros) * q
    assert weights.min() >= -128 and weights.max() <= 127
    small, scale = quantized(x)
    sums = (small.double() @ weights.double().T).long()  # below 2^53: exact
    y = sums.float() * (scale * tensors["weight_scale"].float().T)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def ordered(x):
    """(..., k) with each 16 inputs in the order of w4ax_quant's bytes; k is a multiple of 16."""
    place = torch.arange(x.shape[-1], device=x.device)
    j, t, b = place // 16, place // 4 % 4, place % 4
    return x[..., 16 * j + 2 * t + 8 * (b & 1) + (b >> 1)]
