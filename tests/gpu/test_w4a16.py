"""w4a16 on a GPU against the oracle: exact decodes, products no worse than PyTorch's own, the same
bits in every run and beside any neighbour, and no memory but its own.

Needs a Hopper GPU, which runs CudaOp and Ampere's StripeOp alike.
"""

import math
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import linear
from w4a16_layers import (
    BF16,
    DEVICE,
    FP16,
    MISTAKES,
    ROWS,
    SCHEMES,
    alike,
    every_class,
    every_dtype,
    every_op,
    judge,
    make,
    name,
    op_of,
    planes,
    same,
    some_x,
)

from billfish.kernels.launch import plain_launches
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda.op import CudaOp
from billfish.schemes.w4a16.cuda.plan import TWO_PLANES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled")]


# -- values


@every_dtype
@every_op
def test_no_worse_than_torch(op_class, scheme, n, k, dtype):
    op, weight = op_of(op_class, scheme, n, k, dtype)
    x, rounded = some_x(max(ROWS), k, dtype), weight.to(dtype)
    exact = x.double() @ weight.double().T
    results = []
    for m in ROWS:
        y = op(x[:m])
        assert tuple(y.shape) == (m, n) and y.dtype == dtype and y.is_contiguous()
        results.append((m, y, linear(x[:m], rounded), exact[:m]))
    judge(results, dtype)
    assert tuple(op(x[:0]).shape) == (0, n)


def test_bias(layer):
    op, weight, n, k, dtype = layer
    x, bias = some_x(max(ROWS), k, dtype), some_x(1, n, dtype)[0] * 4
    exact = x.double() @ weight.double().T + bias.double()
    rounded = weight.to(dtype)
    results = [(m, op(x[:m], bias), linear(x[:m], rounded, bias), exact[:m]) for m in ROWS]
    judge(results, dtype)
    assert tuple(op(x[:0], bias).shape) == (0, n)
    nothing = torch.zeros_like(x[:5])
    assert torch.equal(op(nothing, bias), bias.expand(5, n))


def test_bias_that_lies_oddly(layer):
    op, _, n, k, dtype = layer
    spread = some_x(1, 2 * n + 1, dtype)[0]
    for bias in (spread[1::2], spread[1 : n + 1]):
        for m in (1, 16, 65):
            x = some_x(m, k, dtype)
            assert torch.equal(op(x, bias), op(x, bias.clone())), m
    wide = spread[:n].float()  # another dtype: right or refused, never its bits
    for m in (1, 65):
        x = some_x(m, k, dtype)
        try:
            y = op(x, wide)
        except MISTAKES:
            continue
        assert torch.equal(y, op(x, wide.to(dtype)))


def identity_is_exact(op, weight, dtype, most=2048):
    """Each row of the identity fetches one column of the weight, rounded once; or, where
    w4a16_batch decodes two planes, each of them rounded once."""
    k = weight.shape[1]
    count = min(k, most)
    expected = weight.to(dtype).T
    batches = type(op) is CudaOp and op.shape.planes == 2 and op.shape.scale_dtype == dtype
    split = sum(plane.to(dtype).float() for plane in planes(op)).to(dtype).T if batches else None
    eye = torch.eye(count, k, dtype=dtype, device=DEVICE)
    for m in (1, 5, 8, 13, 16, 33, 64, 65, 200, count):
        few = eye[: 8 * m] if m < 16 else eye
        y = torch.cat([op(x) for x in few.split(m)])
        rows = [split if batches and 16 < len(x) <= TWO_PLANES else expected for x in few.split(m)]
        wanted = [each[i * m : i * m + m] for i, each in enumerate(rows)]
        assert torch.equal(y, torch.cat(wanted)[: len(few)]), m
    last = torch.zeros(1, k, dtype=dtype, device=DEVICE)
    for column in {k - 1, k // 2, k - k % 128 - 1} & set(range(k)):
        last.zero_()[0, column] = 1
        assert torch.equal(op(last)[0], expected[column]), column


@every_dtype
@every_op
def test_identity_gives_dequantize_rounded_once(op_class, scheme, n, k, dtype):
    most = 2048 if n <= 4096 else 128
    identity_is_exact(*op_of(op_class, scheme, n, k, dtype), dtype, most)


@every_class
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("dtype", "scales"), [(FP16, BF16), (BF16, FP16)], ids=str)
def test_scales_of_the_other_type(dtype, scales, bits, op_class):
    op, weight = op_of(op_class, W4A16(bits, 64, False), 200, 576, scales)
    identity_is_exact(op, weight, dtype)
    x = some_x(max(ROWS), 576, dtype)
    exact = x.double() @ weight.double().T
    rounded = weight.to(dtype)
    judge([(m, op(x[:m]), linear(x[:m], rounded), exact[:m]) for m in ROWS], dtype)


@every_class
@every_dtype
def test_scales_of_any_size(dtype, op_class):
    """From the smallest normal number of the type to what just fits: nothing flushes in between."""
    scheme, n, k = W4A16(4, 32, False), 64, 128
    tensors = make(scheme, n, k, dtype)
    info = torch.finfo(dtype)
    exponents = torch.linspace(math.log2(info.tiny), math.log2(info.max) - 4, n)
    tensors["weight_scale"] = torch.exp2(exponents).to(dtype)[:, None].repeat(1, 4).to(DEVICE)
    identity_is_exact(op_class(scheme, tensors), scheme.dequantize(tensors), dtype)


# -- the same bits


def test_runs_are_equal(layer):
    """Back to back, so that dependent launches overlap; and the same without them."""
    op, _, _, k, dtype = layer
    for m in (1, 2, 7, 8, 9, 16, 17, 64, 65, 257):
        x = some_x(m, k, dtype)
        runs = [op(x) for _ in range(20)]
        with plain_launches():
            runs.append(op(x))
        assert all(torch.equal(run, runs[0]) for run in runs), m


def rows_alone(op, x, m):
    """The same bits up to 8 tokens, and from 9 to 16: for these another kernel may run, which adds
    in another order."""
    if m <= 8 or type(op) is not CudaOp:
        return torch.cat([op(row) for row in x.split(1)])
    zeros = x.new_zeros(15, x.shape[1])
    return torch.cat([op(torch.cat([row, zeros]))[:1] for row in x.split(1)])


def test_a_row_does_not_see_its_neighbours(layer):
    op, _, n, k, dtype = layer
    x = some_x(16, k, dtype)
    for m in range(1, 17):
        few = rows_alone(op, x, m)
        assert tuple(few.shape) == (16, n)
        assert torch.equal(op(x[:m]), few[:m]), m
        assert torch.equal(op(x[16 - m :]), few[16 - m :]), m


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_row_beside_rows_that_are_not_finite(layer, poison):
    op, _, _, k, dtype = layer
    x = some_x(16, k, dtype)
    bad = torch.full_like(x, poison)
    for m in range(2, 17):
        alone, wrong = rows_alone(op, x, m), []
        for i in range(m):
            mixed = bad[:m].clone()
            mixed[i] = x[i]
            y = op(mixed)
            others = torch.arange(m, device=DEVICE) != i
            wrong.append((y[i] != alone[i]).any() | y[others].isfinite().any())
        assert not bool(torch.stack(wrong).any()), m


@pytest.mark.parametrize("m", [1, 8, 16, 17, 65, 257])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_one_number_that_is_not_finite_spoils_its_row_alone(layer, m, poison):
    op, _, _, k, dtype = layer
    clean = some_x(m, k, dtype)
    y = op(clean)
    for row, column in {(0, 0), (m - 1, k - 1), (m // 2, k // 2)}:
        x = clean.clone()
        x[row, column] = poison
        spoiled = op(x)
        assert not bool(spoiled[row].isfinite().any()), (row, column)
        rest = torch.arange(m, device=DEVICE) != row
        assert torch.equal(spoiled[rest], y[rest]), (row, column)


# -- memory


@contextmanager
def new_memory_is_nan():
    """What torch.empty returns, wherever it is called: torch's own switch."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # cuBLAS wants a setting that does not matter here
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("m", [1, 7, 8, 9, 16, 17, 64, 65, 257])
def test_every_output_is_written(layer, m):
    op, _, n, k, dtype = layer
    x = some_x(m, k, dtype)
    first = op(x)  # loads; what it allocates for good is allocated now
    poison = [torch.full((m, n), float("nan"), dtype=dtype, device=DEVICE) for _ in range(8)]
    del poison  # into torch's cache, from which the next outputs come
    assert alike(op(x), first)
    with new_memory_is_nan():
        assert bool(torch.empty(m, n, dtype=dtype, device=DEVICE).isnan().all())
        y = op(x)
    assert not bool(y.isnan().any()) and alike(y, first)


@pytest.mark.parametrize("m", [1, 2, 8, 9, 15, 16, 17, 65])
def test_nothing_beside_x_is_read_into_the_sums(layer, m):
    """x in the middle of NaN: rows above and below, and memory that was NaN before."""
    op, _, _, k, dtype = layer
    x = some_x(m, k, dtype)
    expected = op(x)
    room = torch.full((m + 32, k), float("nan"), dtype=dtype, device=DEVICE)
    room[16 : 16 + m] = x
    assert alike(op(room[16 : 16 + m]), expected)
    wide = torch.full((m, k + 24), float("nan"), dtype=dtype, device=DEVICE)
    wide[:, 8 : 8 + k] = x
    assert alike(op(wide[:, 8 : 8 + k]), expected)


@pytest.mark.parametrize("m", [1, 3, 16, 40, 100])
def test_x_that_lies_oddly(layer, m):
    op, _, _, k, dtype = layer
    flat = some_x(1, (m + 2) * (k + 9), dtype)[0]
    sources = {
        "columns": flat[: m * (k + 9)].view(m, k + 9)[:, 1 : 1 + k],
        "aligned columns": flat[: m * (k + 8)].view(m, k + 8)[:, 8:],
        "transposed": flat[: m * k].view(k, m).T,
        "every second row": some_x(2 * m, k, dtype)[::2],
        "one row, many times": flat[:k].expand(m, k),
        "backwards": some_x(m, k, dtype).flip(0),
        **{f"from number {i}": flat[i : i + m * k].view(m, k) for i in range(1, 8)},
    }
    for how, x in sources.items():
        plain = torch.empty(m, k, dtype=dtype, device=DEVICE).copy_(x)
        assert plain.is_contiguous() and plain.data_ptr() % 16 == 0
        before = x.clone()
        assert alike(op(x), op(plain)), how
        assert torch.equal(x, before), how


def test_any_leading_shape(layer):
    op, _, n, k, dtype = layer
    x = some_x(6, k, dtype)
    y = op(x)
    assert torch.equal(op(x.view(2, 3, k)), y.view(2, 3, n))
    assert torch.equal(op(x.view(1, 2, 1, 3, k)), y.view(1, 2, 1, 3, n))
    turned = x.view(2, 3, k).transpose(0, 1)
    assert torch.equal(op(turned), y.view(2, 3, n).transpose(0, 1))
    assert torch.equal(op(x[0]), y[0])
    for shape in ((0, k), (2, 0, k), (0, 3, k)):
        empty = op(torch.empty(shape, dtype=dtype, device=DEVICE))
        assert tuple(empty.shape) == (*shape[:-1], n) and empty.dtype == dtype


@every_class
@every_dtype
@pytest.mark.parametrize(
    "scheme",
    [
        *SCHEMES,
        W4A16(2, 32),
        W4A16(3, 64, False),
        W4A16(4, 64, False, True),
        W4A16(8, 32, True, True),
    ],
    ids=name,
)
def test_canonical_is_what_came_in(scheme, dtype, op_class):
    n, k = 200, 384
    tensors = make(scheme, n, k, dtype)
    given = {key: tensor.clone() for key, tensor in tensors.items()}
    op = op_class(scheme, given)
    same(given, tensors)
    op(some_x(3, k, dtype))
    del given
    same(op.canonical(), tensors)
    padded = 256 * 384 * (1 if scheme.bits <= 4 else 2) / 2  # bytes of nibbles, in whole records
    order = 12 * k if scheme.has_g_idx else 0  # the column's group and its place
    assert padded <= op.nbytes() <= padded * (1 + 160 * 4 / 4096) + order
