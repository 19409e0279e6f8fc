"""What every scheme and every op of the registry must keep: opt-out, never opt-in. A new line in
SCHEMES is tested without another word. Here the cases; test_every, test_refusals and
test_quant_linear ask of each."""

import importlib
from functools import cache

import pytest
import torch

from billfish.schemes import SCHEMES
from billfish.schemes.w4a16 import W4A16

VARIANTS = {
    "w4a16": [
        *(W4A16(bits, 32, symmetric) for bits in range(2, 9) for symmetric in (True, False)),
        *(W4A16(bits, -1, symmetric) for bits in (3, 4, 8) for symmetric in (True, False)),
        *(W4A16(4, size, symmetric) for size in (16, 64, 256) for symmetric in (True, False)),
        *(W4A16(bits, 32, symmetric, True) for bits in (4, 8) for symmetric in (True, False)),
        W4A16(4, 48),
    ]
}
SHAPES = ((33, 47), (24, 96), (70, 256))  # (n, k); a scheme is tested with those that it takes
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = tuple(map(torch.device, ("cpu", "cuda", "cuda:1", "meta")))
EVERY = [scheme for name, make in SCHEMES.items() for scheme in (make(), *VARIANTS.get(name, []))]
CASES = [
    (scheme, *shape)
    for scheme in EVERY
    for shape in SHAPES
    if scheme.group_size == -1 or shape[1] % scheme.group_size == 0
]
every_case = pytest.mark.parametrize(("scheme", "n", "k"), CASES, ids=str)
# QuantLinear knows no shape and no bit: the last shape of each scheme will do.
every_layer = pytest.mark.parametrize(
    ("scheme", "n", "k"), list({case[0]: case for case in CASES}.values()), ids=str
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def seeded(n, k):
    return torch.Generator().manual_seed(1000 * n + k)


@cache
def solved(scheme, n, k, dtype):
    """What the scheme's own folder makes of a random weight with some outliers and a dead group."""
    weight = torch.randn(n, k, generator=seeded(n, k))
    weight[:, 3] *= 20
    weight[-1, : k // 2] = 0
    folder = importlib.import_module(f"billfish.schemes.{scheme.name}.quantize")
    return folder.quantize(scheme, weight, None, "rtn", dtype)


def stored(scheme, n, k, dtype=torch.bfloat16):
    """Canonical tensors of `solved`. Reordered columns are never made by us, only read."""
    result = solved(scheme, n, k, dtype)
    tensors = scheme.pack(result.codes, result.scales, result.zeros)
    if scheme.has_g_idx:
        plain = torch.arange(k, dtype=torch.int32) // scheme.group_size
        tensors["weight_g_idx"] = plain[torch.randperm(k, generator=seeded(n, k))]
    return tensors


def without_zeros(scheme, tensors):
    """The weight as kernels have it that add what zeros make of x afterwards; fp64."""
    scales = tensors["weight_scale"].double()[:, scheme.group_of_column(tensors)]
    return (scheme.codes(tensors).double() - scheme.grid.middle) * scales


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name
