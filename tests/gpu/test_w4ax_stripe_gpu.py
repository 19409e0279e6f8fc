"""w4ax's op `stripe` on a GPU against Scheme.reference, bit for bit. A Hopper GPU runs it by name:
it emulates the INT4 products, with the same results."""

import pytest
import torch
from test_w4ax_mixed_gpu import exactly, layer_of, same
from torch.nn.functional import silu

from billfish.kernels import cache
from billfish.schemes.w4ax.cuda.op import CudaOp
from billfish.schemes.w4ax.cuda.stripe_op import StripeOp
from billfish.schemes.w4ax.scheme import SHARED, W4AX

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_here")]

DEVICE = torch.device("cuda", 0)
FP16, BF16 = torch.float16, torch.bfloat16
ROWS = (1, 2, 8, 9, 16, 17, 33, 64, 65, 129, 300)
every_dtype = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
SCHEMES = [
    *(W4AX(32), W4AX(128), W4AX(64, False)),
    *(W4AX(128, True, "fmpq", 0.84, True), W4AX(128, True, "fmpq", 0.84, False)),
    *(W4AX(64, True, "fmpq", 0.5, True), W4AX(32, True, "fmpq", 0.84, True)),
    *(W4AX(256, False, "fmpq", 0.7, True), W4AX(64, False, "fmpq", 1.0, False)),
]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.describe())


@pytest.fixture(scope="module")
def compiled_here(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BILLFISH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(cache, "_memory", {})
        yield


@every_dtype
@every_scheme
@pytest.mark.parametrize(("n", "k"), [(65, 512), (576, 1536), (4096, 4096), (1024, 14336)], ids=str)
def test_products(n, k, scheme, dtype):
    """Zeros, Inf, NaN and outliers among the tokens; several launches in one workspace."""
    tensors, x, bias = layer_of(scheme, n, k, dtype)
    op = StripeOp(scheme, tensors)
    again = op.canonical()
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    exact, more = exactly(scheme, tensors, x), exactly(scheme, tensors, x, bias)
    for m in ROWS:
        assert same(op(x[:m]), exact[:m]), m
        assert same(op(x[:m], bias), more[:m]), m
    assert same(op(op.prepare(x[5:90]), bias), more[5:90])
    assert op(x[:0]).shape == (0, n)


@every_dtype
def test_odd_sizes(dtype):
    for scheme, n, k in [
        *((W4AX(32), 1, 32), (W4AX(64, True, "fmpq", 0.5, True), 200, 576)),
        *((W4AX(64, False, "fmpq", 0.7, True), 129, 64 * 33), (W4AX(32, True, "fmpq", 0.5), 7, 96)),
        (W4AX(128, True, "fmpq", 0.84, True), 3, 2**17),
    ]:
        tensors, x, bias = layer_of(scheme, n, k, dtype, rows=70)
        op, exact = StripeOp(scheme, tensors), exactly(scheme, tensors, x, bias)
        for m in (1, 7, 16, 40, 70):
            assert same(op(x[:m], bias), exact[:m]), (scheme, n, k, m)


@every_dtype
def test_the_bits_of_the_other_op(dtype):
    """What Hopper's own kernels give, and many tiles of tokens."""
    scheme = W4AX(128, True, "fmpq", 0.84, True)
    tensors, x, _ = layer_of(scheme, 2048, 4096, dtype, rows=2000)
    assert same(StripeOp(scheme, tensors)(x), CudaOp(scheme, tensors)(x))


@every_dtype
def test_graphs(dtype):
    scheme = W4AX(64, True, "fmpq", 0.5, True)
    tensors, x, _ = layer_of(scheme, 4096, 4096, dtype)
    op, exact = StripeOp(scheme, tensors), exactly(scheme, tensors, x)
    for m in (1, 16, 64, 300):
        given = x[:m].clone()
        op(given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ys = [op(given) for _ in range(20)]
        for shift in (0, 1):
            given.copy_(x[:m].roll(shift, 0))
            graph.replay()
            torch.cuda.synchronize()
            assert all(same(y, exact[:m].roll(shift, 0)) for y in ys)


@every_dtype
@pytest.mark.parametrize("scheme", [W4AX(64), W4AX(64, True, "fmpq", 0.5, True)], ids=str)
def test_joined_and_gated(scheme, dtype):
    k = 1024
    parts = [layer_of(scheme, n, k, dtype)[0] for n in (512, 128, 136)]
    for part in parts:
        part.update({name: parts[0][name] for name in SHARED if name in part})
    x = layer_of(scheme, 8, k, dtype)[1]
    ops = [StripeOp(scheme, tensors) for tensors in parts]
    exact = [exactly(scheme, tensors, x) for tensors in parts]
    whole = StripeOp.join(ops)
    assert same(whole(x), torch.cat(exact, -1))
    assert all(same(op(x), y) for op, y in zip(ops, exact, strict=True))
    pair = [parts[1], {**parts[1], "weight_packed": parts[1]["weight_packed"].flip(0)}]
    gated = StripeOp.gate([StripeOp(scheme, tensors) for tensors in pair])
    x = x[:20]
    gate, up = (exactly(scheme, tensors, x) for tensors in pair)
    assert same(gated.both(x), torch.cat([gate, up], -1))
    y, wanted = gated(x), silu(gate) * up
    assert (y == wanted).float().mean() > 0.99
    torch.testing.assert_close(y, wanted, rtol=0.02, atol=1e-30)


def test_views_and_compile():
    scheme = W4AX(64, True, "fmpq", 0.5, True)
    tensors, x, _ = layer_of(scheme, 256, 512, FP16)
    x = x[30:80]
    op, exact = StripeOp(scheme, tensors), exactly(scheme, tensors, x)
    assert torch.equal(op(x[:24].view(2, 3, 4, 512)).flatten(0, 2), exact[:24])
    assert torch.equal(op(x.T.contiguous().T), exact)
    shifted = torch.empty(20 * 512 + 1, dtype=FP16, device=DEVICE)[1:].view(20, 512)
    shifted.copy_(x[:20])
    assert torch.equal(op(shifted), exact[:20])
    compiled = torch.compile(lambda v: op(v) * 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x[:20]), exact[:20])
