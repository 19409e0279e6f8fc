"""What the GPU tests of w4a16 share: layers of every kind, x, and what a result is judged by."""

import pytest
import torch

from billfish.errors import UserError
from billfish.formats.grid import group_count
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda.op import CudaOp, StripeOp

DEVICE = torch.device("cuda", 0)
FP16, BF16 = torch.float16, torch.bfloat16
UNIT = {FP16: 2**-11, BF16: 2**-8}  # the most that rounding a result once moves it, relatively
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 64, 65, 257, 1024)
MOST_OWN_ROWS = 64
SHAPES = (
    (1, 8),
    (3, 40),
    (65, 100),
    (64, 128),
    (200, 576),
    (576, 1536),
    (4096, 4096),
    (28672, 512),
    (1000, 14336),
    (4830, 4992),  # clusters of four
)
GROUPS = (-1, 32, 64, 128)
SCHEMES = [
    *(W4A16(4, group, symmetric) for group in GROUPS for symmetric in (True, False)),
    *(W4A16(8, group, symmetric) for group in GROUPS for symmetric in (True, False)),
]
MISTAKES = (UserError, ValueError, TypeError, RuntimeError)  # with a message; not KeyError


def planes(op):
    """The decoded weight as the sum of its two planes of nibbles, fp32."""
    scheme, tensors = op.scheme, op.canonical()
    codes, zeros, scales = scheme.codes(tensors), scheme.zeros(tensors), tensors["weight_scale"]
    columns = torch.arange(codes.shape[1], device=codes.device)
    group = columns // (len(columns) // scales.shape[1]) if op.g_idx is None else op.g_idx.long()
    codes = codes.double()
    zeros, scales = (each.double()[:, group] for each in (zeros, scales))
    high = (codes // 16 - zeros // 16) * scales * 16
    return high.float(), ((codes % 16 - zeros % 16) * scales).float()


def takes(scheme, k):
    return scheme.group_size == -1 or k % scheme.group_size == 0


CASES = [
    *((scheme, *shape) for scheme in SCHEMES[:8] for shape in SHAPES if takes(scheme, shape[1])),
    *(
        (scheme, *shape)
        for scheme in SCHEMES[8:]
        for shape in SHAPES[2:6]
        if takes(scheme, shape[1])
    ),
    *(
        (W4A16(bits, 32, symmetric), 200, 576)
        for bits in (2, 3, 5, 6, 7)
        for symmetric in (True, False)
    ),
    (W4A16(4, 96), 200, 576),
    (W4A16(4, 256, False), 130, 1536),
    (W4A16(8, 256), 130, 1536),
    *(
        (W4A16(bits, 64, symmetric, has_g_idx=True), 200, 576)
        for bits in (4, 8)
        for symmetric in (True, False)
    ),
]
OPS = [
    *((CudaOp, *case) for case in CASES),
    *((StripeOp, *case) for case in CASES if case[1:] in SHAPES[1:5] or case[1] == 4096),
]
every_op = pytest.mark.parametrize(("op_class", "scheme", "n", "k"), OPS, ids=lambda v: name(v))
every_class = pytest.mark.parametrize("op_class", [CudaOp, StripeOp], ids=["cuda", "stripe"])
every_dtype = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])


def name(value):
    if not isinstance(value, W4A16):
        return getattr(value, "name", str(value))
    kind = f"{value.bits}bit-g{value.group_size}-{'sym' if value.symmetric else 'asym'}"
    return kind + ("-gidx" if value.has_g_idx else "")


def make(scheme, n, k, dtype):
    """Canonical tensors of every code and zero that can be stored, on the GPU."""
    levels, groups = scheme.grid.levels, group_count(k, scheme.group_size)
    codes = torch.randint(levels, (n, k), device=DEVICE).to(torch.uint8)
    zeros = torch.randint(levels, (n, groups), device=DEVICE).to(torch.uint8)
    scales = torch.rand(n, groups, device=DEVICE) * 0.02 + 0.001
    tensors = scheme.pack(codes, scales.to(dtype), zeros)
    if scheme.has_g_idx:
        plain = torch.arange(k, dtype=torch.int32, device=DEVICE) // scheme.group_size
        tensors["weight_g_idx"] = plain[torch.randperm(k, device=DEVICE)]
    return tensors


def op_of(op_class, scheme, n, k, dtype):
    tensors = make(scheme, n, k, dtype)
    return op_class(scheme, tensors), scheme.dequantize(tensors)


def some_x(m, k, dtype):
    return torch.randn(m, k, device=DEVICE).to(dtype)


def same(left, right):
    assert left.keys() == right.keys()
    for key in left:
        assert left[key].dtype == right[key].dtype and left[key].device == right[key].device, key
        assert torch.equal(left[key], right[key]), key


# Layers that many tests share: m tail, n tail and k tail, several passes, two planes.
SHARED = {
    "plain": (W4A16(4, 128), 576, 1536),
    "odd": (W4A16(4, -1, False), 65, 100),
    "planes": (W4A16(8, 32, False), 200, 576),
    "wide": (W4A16(4, 64, False), 28672, 512),
}
LAYERS = [(op, key, dtype) for op in (CudaOp, StripeOp) for key in SHARED for dtype in UNIT]


def judge(results, dtype):
    """err(ours, fp64) <= 2 err(torch, fp64) + one rounding of the largest output, over all m.

    `results` are (m, ours, torch's, exact). The rounding is there because a lucky torch may be
    exact where outputs are few.
    """
    errors = torch.stack(
        [
            torch.stack(
                [
                    (y.double() - exact).abs().max(),
                    (t.double() - exact).abs().max(),
                    exact.abs().max(),
                ]
            )
            for _, y, t, exact in results
        ]
    ).tolist()
    for (m, *_), (ours, theirs, size) in zip(results, errors, strict=True):
        assert ours <= 2 * theirs + UNIT[dtype] * size, (m, ours, theirs, size)


def alike(y, expected):
    """The same bits where our own kernels multiply; a library may choose another order of sums for
    another layout of x or another stream."""
    assert y.shape == expected.shape and y.dtype == expected.dtype
    if y.shape[:-1].numel() <= MOST_OWN_ROWS:
        return torch.equal(y, expected)
    off = (y.float() - expected.float()).abs().max()
    return bool(off <= 2 * UNIT[y.dtype] * expected.float().abs().max())
