"""w4a16: the meaning of its codes and zeros, and which ops can be joined."""

import pytest
import torch
from every import same, seeded, stored

from billfish.errors import UserError
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cpu import CpuOp
from billfish.schemes.w4a16.cuda.op import CudaOp
from billfish.schemes.w4a16.scheme import Fitted

SHAPES = ((33, 47), (24, 96), (70, 256))
CASES = [(s, *shape) for s in W4A16.examples() for shape in SHAPES if s.refuses(*shape) is None]
every_case = pytest.mark.parametrize(("scheme", "n", "k"), CASES, ids=str)


@every_case
def test_unpack_inverts_pack(scheme, n, k):
    """Any codes and zeros, not only those that a solver would choose."""
    groups = scheme.tensors(n, k, torch.float16)["weight_scale"].shape[1]
    source = seeded(k, n)
    codes = torch.randint(0, scheme.grid.levels, (n, k), generator=source).to(torch.uint8)
    zeros = torch.randint(0, scheme.grid.levels, (n, groups), generator=source).to(torch.uint8)
    scales = (torch.rand(n, groups, generator=source) + 0.5).to(torch.float16)
    tensors = scheme.pack(codes, scales, zeros)
    assert torch.equal(scheme.codes(tensors), codes)
    assert torch.equal(tensors["weight_scale"], scales)
    middle = torch.full_like(zeros, 2 ** (scheme.bits - 1))
    assert torch.equal(scheme.zeros(tensors), middle if scheme.symmetric else zeros)
    same(scheme.pack(scheme.codes(tensors), scales, scheme.zeros(tensors)), tensors)


@every_case
def test_dequantize_is_the_formula(scheme, n, k):
    """(code - zero) * scale in fp32, one element at a time."""
    tensors = stored(scheme, n, k)
    weight, group = scheme.dequantize(tensors), scheme.group_of_column(tensors).tolist()
    assert weight.dtype == torch.float32 and tuple(weight.shape) == (n, k)
    codes, zeros = scheme.codes(tensors).tolist(), scheme.zeros(tensors).tolist()
    for i in (0, n // 2, n - 1):
        for j in range(0, k, 7):
            scale = tensors["weight_scale"][i, group[j]].float()
            assert weight[i, j] == (codes[i][j] - zeros[i][group[j]]) * scale


def test_ops_that_do_not_fit_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(CudaOp, "_prepare", lambda op: None)
    scheme, k = W4A16(4, 32), 96
    for op in (CpuOp, CudaOp):
        for first, second in (
            (stored(scheme, 33, k), stored(scheme, 64, k)),  # outputs that end within a band
            (stored(scheme, 64, k), stored(scheme, 64, 256)),
            (stored(scheme, 64, k), stored(scheme, 64, k, torch.float16)),
        ):
            parts = [op(scheme, first), op(scheme, second)]
            assert op.join(parts) is None
            same(parts[0].canonical(), first)
            same(parts[1].canonical(), second)
        other = op(W4A16(4, 96), stored(W4A16(4, 96), 64, k))
        assert op.join([op(scheme, stored(scheme, 64, k)), other]) is None


@pytest.mark.parametrize("symmetric", [True, False])
def test_random_tensors_have_every_code(symmetric):
    scheme, generator = W4A16(4, 32, symmetric), torch.Generator().manual_seed(1)
    tensors = scheme.random_tensors(64, 128, torch.bfloat16, generator)
    assert scheme.codes(tensors).unique().tolist() == list(range(16))
    assert (tensors["weight_scale"] != 0).all()
    assert symmetric or len(scheme.zeros(tensors).unique()) > 8


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({"group_size": 64}, W4A16(4, 64)),
        ({"bits": "3", "group_size": "-1", "symmetric": "false"}, W4A16(3, -1, False)),
        ({"symmetric": False}, Fitted(4, False)),
        ({}, Fitted()),
    ],
)
def test_options_are_values_or_their_text(options, made):
    assert W4A16.from_options(options) == made


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"bits": "four"}, "bits 'four': is a whole number"),
        ({"bits": 9}, "2 to 8 bits"),
        ({"group_size": 0}, "1 or more"),
        ({"symmetric": "maybe"}, "true or false"),
        ({"colour": 1}, "has no colour. It has bits, group_size, symmetric"),
    ],
)
def test_options_that_it_refuses(options, told):
    with pytest.raises(UserError, match=told):
        W4A16.from_options(options)
