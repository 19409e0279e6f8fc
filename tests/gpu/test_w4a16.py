"""w4a16 on a GPU against the oracle: exact decodes, products no worse than PyTorch's own, the same
bits in every run and beside any neighbour, and the rooms it must work in: streams, graphs, compile.

Needs a Hopper GPU, which runs CudaOp and Ampere's StripeOp alike.
"""

import math
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch.nn.functional import linear

from billfish.errors import UserError
from billfish.formats.grid import group_count
from billfish.kernels import cache, jit
from billfish.kernels.device import gpu
from billfish.kernels.launch import plain_launches
from billfish.models.linear import QuantLinear
from billfish.schemes.base import choose
from billfish.schemes.w4a16 import W4A16, cuda
from billfish.schemes.w4a16.cuda import CudaOp, StripeOp

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
FP16, BF16 = torch.float16, torch.bfloat16
UNIT = {FP16: 2**-11, BF16: 2**-8}  # the most that rounding a result once moves it, relatively
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 64, 65, 257, 1024)
MOST_OWN_ROWS = 64
SHAPES = ((1, 8), (3, 40), (65, 100), (64, 128), (200, 576), (576, 1536), (4096, 4096),
          (28672, 512), (1000, 14336))  # fmt: skip
GROUPS = (-1, 32, 64, 128)
SCHEMES = [
    *(W4A16(4, group, symmetric) for group in GROUPS for symmetric in (True, False)),
    *(W4A16(8, group, symmetric) for group in GROUPS for symmetric in (True, False)),
]
MISTAKES = (UserError, ValueError, TypeError, RuntimeError)  # with a message; not KeyError


def takes(scheme, k):
    return scheme.group_size == -1 or k % scheme.group_size == 0


CASES = [
    *((scheme, *shape) for scheme in SCHEMES[:8] for shape in SHAPES if takes(scheme, shape[1])),
    *((scheme, *shape) for scheme in SCHEMES[8:] for shape in SHAPES[2:6]
      if takes(scheme, shape[1])),
    *((W4A16(bits, 32, symmetric), 200, 576) for bits in (2, 3, 5, 6, 7)
      for symmetric in (True, False)),
    (W4A16(4, 96), 200, 576),
    (W4A16(4, 256, False), 130, 1536),
    (W4A16(8, 256), 130, 1536),
    *((W4A16(bits, 64, symmetric, has_g_idx=True), 200, 576) for bits in (4, 8)
      for symmetric in (True, False)),
]  # fmt: skip
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


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """All kernels, side by side, in a cache of this module's own."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BILLFISH_CACHE_DIR", str(folder))
        patch.setattr(cache, "_memory", {})
        arch = gpu(DEVICE).arch
        wanted = {
            program: None
            for scheme in SCHEMES
            for dtype in UNIT
            for listed in (arch, "sm_80")  # the latter's run here, too
            for program in cuda.programs(scheme, dtype, listed)
        }
        jit.build_all(list(wanted), arch)
        yield folder


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


@pytest.fixture(scope="module")
def shared(compiled):
    torch.manual_seed(0)
    return {
        (op_class, key, dtype): op_of(op_class, *SHARED[key], dtype)
        for op_class, key, dtype in LAYERS
    }


@pytest.fixture(params=LAYERS, ids=lambda v: f"{v[0].name}-{v[1]}-{str(v[2])[6:]}")
def layer(request, shared):
    """(op, weight, n, k, dtype)"""
    op, weight = shared[request.param]
    return op, weight, *weight.shape, request.param[2]


# -- values


def judge(results, dtype):
    """err(ours, fp64) <= 2 err(torch, fp64) + one rounding of the largest output, over all m.

    `results` are (m, ours, torch's, exact). The rounding is there because a lucky torch may be
    exact where outputs are few.
    """
    errors = torch.stack(
        [
            torch.stack([(y.double() - exact).abs().max(), (t.double() - exact).abs().max(),
                         exact.abs().max()])
            for _, y, t, exact in results
        ]
    ).tolist()  # fmt: skip
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
    """Each row of the identity fetches one column of the weight, rounded once."""
    k = weight.shape[1]
    count = min(k, most)
    expected = weight.to(dtype).T
    eye = torch.eye(count, k, dtype=dtype, device=DEVICE)
    for m in (1, 5, 8, 13, 16, 33, 64, 65, 200, count):
        few = eye[: 8 * m] if m < 16 else eye
        y = torch.cat([op(x) for x in few.split(m)])
        assert torch.equal(y, expected[: len(few)]), m
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


def test_a_row_does_not_see_its_neighbours(layer):
    op, _, n, k, dtype = layer
    x = some_x(16, k, dtype)
    alone = torch.cat([op(row) for row in x.split(1)])
    assert tuple(alone.shape) == (16, n)
    for m in range(1, 17):
        assert torch.equal(op(x[:m]), alone[:m]), m
        assert torch.equal(op(x[16 - m :]), alone[16 - m :]), m


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_row_beside_rows_that_are_not_finite(layer, poison):
    op, _, _, k, dtype = layer
    x = some_x(16, k, dtype)
    alone = torch.cat([op(row) for row in x.split(1)])
    bad = torch.full_like(x, poison)
    for m in range(2, 17):
        wrong = []
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


# -- streams, graphs, compile


def test_on_a_side_stream(layer):
    """It waits for what its stream did before, and what follows waits for it."""
    op, _, _, k, dtype = layer
    for m in (1, 16, 65):
        late, x = some_x(m, k, dtype), torch.zeros(m, k, dtype=dtype, device=DEVICE)
        expected, side = op(late), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            x.copy_(late)
            y = op(x)
            kept = y.clone()
        side.synchronize()
        assert alike(kept, expected), m


def test_streams_at_once(layer):
    """Two streams run the same layer beside each other: they share no place to meet."""
    op, _, _, k, dtype = layer
    streams = [torch.cuda.Stream() for _ in range(3)]
    for m in (1, 16):
        x = [some_x(m, k, dtype) for _ in streams]
        expected = [op(each) for each in x]
        results = []
        torch.cuda.synchronize()
        for _ in range(20):
            for each, right, stream in zip(x, expected, streams, strict=True):
                with torch.cuda.stream(stream):
                    results.append((op(each) != right).sum())
        torch.cuda.synchronize()
        assert sum(map(int, results)) == 0, m


@every_class
def test_a_chain_of_layers(op_class):
    """Each launch depends on the one before, whose end it may not have seen (PDL)."""
    op, _ = op_of(op_class, W4A16(4, 64), 512, 512, FP16)
    x = some_x(4, 512, FP16)

    def chain():
        y = x
        for _ in range(50):
            y = op(y)
            y = y / y.abs().amax()
        z = x
        for _ in range(10):  # nothing in between: decode after decode
            z = op(z)
        return y, z

    with plain_launches():
        expected = chain()
    for _ in range(5):
        assert all(map(torch.equal, chain(), expected))


@every_dtype
@pytest.mark.parametrize("m", [8, 16])
def test_a_chain_beside_library_products(dtype, m):
    """Where a kernel starts while the library's last one still runs, its loads take longest: a slot
    of the ring was once given back before they had ended."""
    layers = [op_of(CudaOp, W4A16(4, 128), 4096, 4096, dtype) for _ in range(4)]
    x, small = some_x(m, 4096, dtype), torch.zeros(256, device=DEVICE)
    dense = layers[0][1].to(dtype)
    with plain_launches():
        expected = [op(x) for op, _ in layers]
    linear(x, dense)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = []
        for _ in range(6):
            for i, (op, _) in enumerate(layers):
                linear(x, dense)
                results.append((op(x), expected[i]))
                small.add_(1)
    for _ in range(100):
        graph.replay()
        assert all(torch.equal(y, right) for y, right in results)


@pytest.mark.parametrize("m", [1, 8, 16, 40, 100])
def test_graph_capture_and_replay(layer, m):
    op, _, n, k, dtype = layer
    x, bias = some_x(m, k, dtype), some_x(1, n, dtype)[0]
    op(x, bias)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        op(x, bias)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x, bias)
        twice = op(x)
    for _ in range(3):
        x.copy_(some_x(m, k, dtype))
        y.fill_(float("nan"))
        graph.replay()
        assert alike(y, op(x, bias)) and alike(twice, op(x))
    other = some_x(m, k, dtype)  # a replay and a plain call beside each other
    expected, beside = op(x), op(other)
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(side):
            graph.replay()
        plain = op(other)
        torch.cuda.synchronize()
        assert alike(twice, expected) and alike(plain, beside)


@every_class
def test_compile_traces_it_whole(shared, op_class):
    dtype = FP16
    op, weight = shared[op_class, "odd", dtype]
    n, k = weight.shape
    bias = some_x(1, n, dtype)[0]

    def model(x):
        return op(x, bias).relu() + op(x * 2)

    torch._dynamo.reset()
    traced = torch.compile(model, fullgraph=True, backend="aot_eager")
    for shape in ((1, k), (3, k), (2, 9, k), (100, k)):
        x = torch.randn(shape, device=DEVICE).to(dtype)
        assert alike(traced(x), model(x)), shape


# -- mistakes


def test_x_of_another_width(layer):
    op, _, _, k, dtype = layer
    for width in (k + 8, k - 1, 2 * k, 1):
        for leading in ((), (1,), (2,), (k,)):  # so that the numbers of elements fit by chance, too
            x = torch.zeros(*leading, width, device=DEVICE, dtype=dtype)
            with pytest.raises(MISTAKES, match=rf"\b{k}\b") as caught:
                op(x)
            assert str(width) in str(caught.value)


def test_x_of_another_type(layer):
    op, _, _, k, dtype = layer
    for x in (torch.zeros(2, k, device=DEVICE), torch.zeros(2, k, device=DEVICE).double()):
        with pytest.raises(MISTAKES, match=str(x.dtype).removeprefix("torch.")):
            op(x)
    assert op(some_x(1, k, dtype)).isfinite().all()  # and it still works


def test_refusals():
    assert CudaOp.refuses(W4A16(4, 128), 64, 256, DEVICE) is None
    assert "32" in CudaOp.refuses(W4A16(4, 16), 64, 256, DEVICE)
    assert CudaOp.refuses(W4A16(4, 128), 64, 256, torch.device("cpu"))
    assert choose(W4A16(4, 128), 64, 256, DEVICE) is CudaOp


# -- QuantLinear


@every_dtype
@pytest.mark.parametrize("scheme", [W4A16(4, 64), W4A16(8, 32, False)], ids=name)
def test_linear_moves_between_devices(scheme, dtype):
    n, k = 200, 576
    tensors = make(scheme, n, k, dtype)
    layer = QuantLinear(scheme, n, k, bias=True, dtype=dtype, device=DEVICE)
    layer.set_tensors(tensors)
    layer.bias.data = some_x(1, n, dtype)[0]
    x = some_x(5, k, dtype)
    y = layer(x)
    assert layer.op.name == "cuda"
    weight = scheme.dequantize(tensors)
    exact = x.double() @ weight.double().T + layer.bias.double()
    judge([(5, y, linear(x, weight.to(dtype), layer.bias), exact)], dtype)

    state = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    same({key: state[key] for key in tensors}, tensors)
    fresh = QuantLinear(scheme, n, k, bias=True, dtype=dtype, device=DEVICE)
    assert fresh.load_state_dict(state).missing_keys == []
    assert torch.equal(fresh(x), y)

    layer.to("cpu")
    assert layer.op.name == "cpu"
    same(layer.state_dict(), {key: tensor.cpu() for key, tensor in state.items()})
    layer.to(DEVICE)
    assert layer.op.name == "cuda"
    same(layer.state_dict(), state)
    assert torch.equal(layer(x), y)


# -- what is compiled, and what a call costs

WORKER = """
import torch
from billfish.kernels import jit
from billfish.schemes.w4a16 import W4A16, cuda

def refuse(program, arch, options=()):
    raise SystemExit(f"programs() does not list {program.name}")

jit.compile = refuse
for bits, group, symmetric in SCHEMES:
    scheme = W4A16(bits, group, symmetric)
    for dtype in (torch.float16, torch.bfloat16):
        for n in (1, 64, 1024, 4096, 6144, 8192, 12800, 17000, 28672):
            k = 128
            groups = 1 if group == -1 else k // group
            codes = torch.zeros(n, k, dtype=torch.uint8, device="cuda")
            scales = torch.ones(n, groups, dtype=dtype, device="cuda")
            tensors = scheme.pack(codes, scales, codes[:, :groups])
            op = cuda.CudaOp(scheme, tensors)
            for m in (1, 9, 17, 65, 300):
                op(torch.ones(m, k, dtype=dtype, device="cuda"))
torch.cuda.synchronize()
print("all listed", flush=True)
for m in (1, 65):
    try:
        op(torch.ones(m, k, dtype=dtype))
        torch.cuda.synchronize()
    except Exception as error:
        print("x on the cpu:", type(error).__name__, str(error).splitlines()[0], flush=True)
"""


@pytest.fixture(scope="module")
def worker(compiled):
    """Another process with the cache of this one: it may compile nothing, and may break."""
    arguments = [(s.bits, s.group_size, s.symmetric) for s in SCHEMES]
    done = subprocess.run(
        [sys.executable, "-c", f"SCHEMES = {arguments}\n{WORKER}"], capture_output=True, text=True,
        env={**os.environ, "BILLFISH_CACHE_DIR": str(compiled)}, timeout=300,
    )  # fmt: skip
    return done


def test_programs_lists_all_that_is_needed(worker):
    """What `billfish kernels warmup` compiles is enough."""
    assert worker.stdout.startswith("all listed\n"), worker.stderr[-2000:]


def test_x_in_another_place(worker):
    """Refused, with words: its address would mean nothing to a kernel, or kill the process."""
    told = worker.stdout.splitlines()[1:]
    assert len(told) == 2, worker.stderr[-2000:]
    for line in told:
        assert line.startswith("x on the cpu: ") and "cpu" in line.partition(": ")[2].lower()
        assert "illegal" not in line and "AcceleratorError" not in line, line


COST = """
import statistics, time, torch
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda import CudaOp

scheme, codes = W4A16(4, 128), torch.zeros(64, 128, dtype=torch.uint8, device="cuda")
scales = torch.ones(64, 1, dtype=torch.float16, device="cuda")
op = CudaOp(scheme, scheme.pack(codes, scales, torch.full_like(codes[:, :1], 8)))
x, times = torch.zeros(1, 128, dtype=torch.float16, device="cuda"), []
for i in range(1100):
    if i % 50 == 0:
        torch.cuda.synchronize()  # the queue never fills
    begin = time.perf_counter()
    op(x)
    times.append(time.perf_counter() - begin)
print(statistics.median(times[100:]) * 1e6)
"""


def test_what_a_call_costs(compiled, capsys):
    """Of the CPU's time, python and the launch, in a process of its own: after hundreds of tests a
    call takes half as long again."""
    done = subprocess.run(
        [sys.executable, "-c", COST], capture_output=True, text=True, timeout=300,
        env={**os.environ, "BILLFISH_CACHE_DIR": str(compiled)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    median = float(done.stdout)
    with capsys.disabled():
        print(f"\none call at 64 x 128: {median:.1f} us")
    assert median <= 12
