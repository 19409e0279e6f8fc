"""w4a16_24's op `stripe` on a GPU against Scheme.reference, and against PyTorch's product of the
decoded weights. A Hopper GPU runs it by name."""

import pytest
import torch
from torch.nn.functional import linear

from billfish.kernels import cache
from billfish.kernels.device import index_of
from billfish.schemes.w4a16_24 import W4A16Sparse
from billfish.schemes.w4a16_24.cuda.stripe_op import StripeOp
from billfish.schemes.w4a16_24.cuda.stripe_plan import stripe_plan

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_here")]

DEVICE = torch.device("cuda", 0)
FP16, BF16 = torch.float16, torch.bfloat16
UNIT = {FP16: 2**-11, BF16: 2**-8}  # the most that rounding a result once moves it, relatively
MOST = 700
ROWS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 129, 512, MOST)
every_dtype = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
every_scheme = pytest.mark.parametrize("group", [32, 64, 128, -1])


@pytest.fixture(scope="module")
def compiled_here(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BILLFISH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(cache, "_memory", {})
        yield


def layer_of(scheme, n, k, dtype, rows=MOST, scale_dtype=None):
    source = torch.Generator(DEVICE).manual_seed(n + k)
    tensors = scheme.random_tensors(n, k, scale_dtype or dtype, source)
    x = torch.randn(rows, k, generator=source, device=DEVICE).to(dtype)
    return tensors, x, torch.randn(n, generator=source, device=DEVICE).to(dtype)


def distance(y, exact):
    return float((y.double() - exact).norm() / exact.norm())


@every_dtype
@every_scheme
@pytest.mark.parametrize(("n", "k"), [(65, 512), (576, 1536), (4096, 4096), (1024, 14336)], ids=str)
def test_products(n, k, group, dtype):
    """Up to 16 tokens one rounding from the oracle; more no worse than torch's product."""
    scheme = W4A16Sparse(group)
    tensors, x, bias = layer_of(scheme, n, k, dtype)
    op, weight = StripeOp(scheme, tensors), scheme.dequantize(tensors)
    again = op.canonical()
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    exact, rounded = scheme.reference(tensors, x), weight.to(dtype)
    for m in ROWS:
        y = op(x[:m])
        assert y.shape == (m, n) and y.dtype == dtype and y.isfinite().all()
        most = UNIT[dtype] if m <= 16 else 1.1 * distance(linear(x[:m], rounded), exact[:m])
        assert distance(y, exact[:m]) < most, m
        if m <= 512:
            assert torch.equal(op(x[:m]), y), m
        more = exact[:m] + bias.double()
        assert distance(op(x[:m], bias), more) < 3 * UNIT[dtype], m
    assert op(x[:0]).shape == (0, n)


@every_dtype
def test_a_row_depends_on_no_other(dtype):
    scheme = W4A16Sparse(64)
    tensors, x, _ = layer_of(scheme, 1000, 2048, dtype)
    op = StripeOp(scheme, tensors)
    rows = torch.cat([op(x[i : i + 1]) for i in range(16)])
    assert all(torch.equal(op(x[:m]), rows[:m]) for m in range(1, 17))
    wide = op(x[:64])
    other = x[:64].clone()
    other[1:] = torch.nan
    assert torch.equal(op(other)[:1], wide[:1])


@every_dtype
def test_odd_sizes(dtype):
    for scheme, n, k in [
        *((W4A16Sparse(-1), 1, 1), (W4A16Sparse(-1), 7, 30), (W4A16Sparse(-1), 130, 1001)),
        *((W4A16Sparse(32), 129, 32), (W4A16Sparse(64), 200, 576), (W4A16Sparse(32), 3, 2**17)),
        (W4A16Sparse(128), 57344, 128),
    ]:
        tensors, x, bias = layer_of(scheme, n, k, dtype, rows=600)
        op, exact = StripeOp(scheme, tensors), scheme.reference(tensors, x) + bias.double()
        for m in (1, 7, 16, 40, 70, 600):
            y = op(x[:m], bias)
            assert distance(y, exact[:m]) < 3 * UNIT[dtype], (scheme, n, k, m)


@every_dtype
@every_scheme
def test_panels_are_the_weights_rounded_once(group, dtype):
    scheme = W4A16Sparse(group)
    for scale_dtype in (FP16, BF16):
        tensors, *_ = layer_of(scheme, 200, 1152, dtype, 1, scale_dtype)
        op = StripeOp(scheme, tensors)
        plan = stripe_plan(index_of(DEVICE), op.shape, dtype)
        wanted = scheme.dequantize(tensors).to(dtype)
        assert torch.equal(plan.decoded(op.records, 0, 4), wanted)
        assert torch.equal(plan.decoded(op.records, 1, 3), wanted[64:192])


@every_dtype
def test_scales_of_another_type(dtype):
    scheme, other = W4A16Sparse(64), BF16 if dtype == FP16 else FP16
    tensors, x, _ = layer_of(scheme, 300, 1024, dtype, scale_dtype=other)
    op, exact = StripeOp(scheme, tensors), scheme.reference(tensors, x)
    for m in (1, 16, 40, 128):
        assert distance(op(x[:m]), exact[:m]) < UNIT[dtype], m
    assert distance(op(x), exact) < 2 * UNIT[dtype]


@every_dtype
def test_graphs(dtype):
    """Many launches in one workspace, replayed."""
    scheme = W4A16Sparse(64)
    tensors, x, _ = layer_of(scheme, 4096, 4096, dtype)
    op = StripeOp(scheme, tensors)
    for m in (1, 16, 64, 300):
        given = x[:m].clone()
        wanted = op(given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ys = [op(given) for _ in range(20)]
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(y, wanted) for y in ys), m


@every_dtype
def test_joined(dtype):
    scheme, k = W4A16Sparse(64), 1024
    parts = [layer_of(scheme, n, k, dtype)[0] for n in (512, 128, 136)]
    x = layer_of(scheme, 8, k, dtype)[1]
    ops = [StripeOp(scheme, tensors) for tensors in parts]
    exact = torch.cat([scheme.reference(tensors, x) for tensors in parts], -1)
    before = [op(x[:20]) for op in ops]
    whole = StripeOp.join(ops)
    for m in (1, 16, 20, 65, 600):
        assert distance(whole(x[:m]), exact[:m]) < 3 * UNIT[dtype], m
    assert all(torch.equal(op(x[:20]), y) for op, y in zip(ops, before, strict=True))


def test_views_and_compile():
    scheme = W4A16Sparse(64)
    tensors, x, _ = layer_of(scheme, 256, 512, FP16, 40)
    op = StripeOp(scheme, tensors)
    y = op(x[:24])
    assert torch.equal(op(x[:24].view(2, 3, 4, 512)).flatten(0, 2), y)
    assert torch.equal(op(x[:24].T.contiguous().T), y)
    shifted = torch.empty(24 * 512 + 1, dtype=FP16, device=DEVICE)[1:].view(24, 512)
    shifted.copy_(x[:24])
    assert torch.equal(op(shifted), y)
    compiled = torch.compile(lambda v: op(v) * 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x[:24]), y)
