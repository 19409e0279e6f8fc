"""Cases for the tests that run over all schemes and ops of the registry (test_every, test_refusals,
test_quant_linear). They come from Scheme.examples, so a new line in SCHEMES is tested without a
change here."""

from functools import cache

import pytest
import torch
from thorough import also, one_each

from billfish.schemes import SCHEMES
from billfish.schemes.registry import quantizer, with_options

SHAPES = ((33, 47), (24, 96), (70, 256))  # (n, k); a scheme is tested with those that it takes
ROUND = ((32, 96), (48, 256))  # for those that take none of them
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = tuple(map(torch.device, ("cpu", "cuda", "cuda:1", "meta")))
EVERY = [
    scheme
    for name, family in SCHEMES.items()
    for scheme in (with_options(name), *family.scheme.examples())
]
CASES = [
    (scheme, *shape)
    for scheme in EVERY
    for shape in (SHAPES if any(scheme.refuses(*s) is None for s in SHAPES) else ROUND)
    if scheme.refuses(*shape) is None
]
every_case = pytest.mark.parametrize(("scheme", "n", "k"), CASES, ids=str)
# QuantLinear knows no shape and no bit: the last shape of each scheme will do, and of the schemes
# the usual ones and every third.
LAYERS = list({case[0]: case for case in CASES}.values())
USUAL = [*map(with_options, SCHEMES), *(case[0] for case in LAYERS[::3])]
every_layer = pytest.mark.parametrize(
    ("scheme", "n", "k"),
    [case if case[0] in USUAL else also(*case) for case in LAYERS],
    ids=str,
)
# Each case in one type; a family's examples are many, and so is each of them tested in all types.
every_typed_case = pytest.mark.parametrize(
    ("scheme", "n", "k", "dtype"),
    one_each(CASES, DTYPES),
    ids=lambda value: str(value).removeprefix("torch."),
)


def seeded(n, k):
    return torch.Generator().manual_seed(1000 * n + k)


@cache
def solved(scheme, n, k, dtype):
    """What the scheme's own solver makes of a random weight with some outliers and a dead group."""
    weight = torch.randn(n, k, generator=seeded(n, k))
    weight[:, 3] *= 20
    weight[-1, : k // 2] = 0
    return quantizer(scheme).quantize(scheme, weight, None, "rtn", dtype)


def stored(scheme, n, k, dtype=torch.bfloat16):
    """Canonical tensors of `solved`; what we never make, and only read, at random."""
    drawn = scheme.random_tensors(n, k, dtype, seeded(n, k))
    return {**drawn, **solved(scheme, n, k, dtype).tensors()}


def scales_of(tensors):
    """The name of a tensor that all weights are multiplied by."""
    return next(name for name, tensor in tensors.items() if tensor.is_floating_point())


def without_zeros(scheme, tensors):
    """w4a16's weight as kernels have it that add what zeros make of x afterwards; fp64."""
    scales = tensors["weight_scale"].double()[:, scheme.group_of_column(tensors)]
    return (scheme.codes(tensors).double() - scheme.grid.middle) * scales


def same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name
