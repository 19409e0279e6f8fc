"""w4a16_24 on a Hopper GPU: every product against the oracle, whatever m, the tile configuration or
the run; rows that do not depend on others; graphs, joined layers, SwiGLU."""

import pytest
import torch
from torch.nn.functional import silu

from billfish.kernels import cache, tiles
from billfish.kernels.device import gpu
from billfish.kernels.launch import plain_launches
from billfish.schemes.w4a16_24 import W4A16Sparse
from billfish.schemes.w4a16_24.cuda import plan
from billfish.schemes.w4a16_24.cuda.instances import INSTANCES
from billfish.schemes.w4a16_24.cuda.op import CudaOp

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_here")]

DEVICE = torch.device("cuda", 0)
FP16, BF16 = torch.float16, torch.bfloat16
ONE_ROUNDING = {FP16: 2**-11, BF16: 2**-8}
ROWS = (1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 129, 200, 257, 300)
every_dtype = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
# group size, n, k
LAYERS = [
    (32, 1, 32),
    (64, 65, 576),
    (-1, 200, 75),
    (64, 576, 1536),
    (128, 4096, 4096),
    (-1, 6144, 4096),
    (128, 4096, 14336),
    (32, 28672, 4096),
    (128, 57344, 1024),
]
every_layer = pytest.mark.parametrize(("group_size", "n", "k"), LAYERS, ids=str)


@pytest.fixture(scope="module")
def compiled_here(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BILLFISH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(cache, "_memory", {})
        yield


def layer(n, k, group_size, dtype, scale_dtype=None, seed=0):
    """A scheme, its tensors, 300 tokens and a bias."""
    scheme = W4A16Sparse(group_size)
    source = torch.Generator(DEVICE).manual_seed(n + k + seed)
    tensors = scheme.random_tensors(n, k, scale_dtype or dtype, source)
    x = torch.randn(max(ROWS), k, generator=source, device=DEVICE).to(dtype)
    return scheme, tensors, x, torch.randn(n, generator=source, device=DEVICE).to(dtype)


def near(y, exact, dtype):
    """Rounded once at the end; fp32 sums of the tensor cores lose a little more."""
    error = (y.double() - exact).norm() / exact.norm()
    assert error < 1.1 * ONE_ROUNDING[dtype], float(error)
    worst = (y.double() - exact).abs().max() / exact.abs().max()
    assert worst < 2 * ONE_ROUNDING[dtype], float(worst)


def oracles(scheme, tensors, x):
    """With weights as they are, and rounded to x's dtype as w4a16_24_batch rounds them."""
    weights = scheme.dequantize(tensors)
    return x.double() @ weights.double().T, x.double() @ weights.to(x.dtype).double().T


@every_dtype
@every_layer
def test_products(group_size, n, k, dtype):
    scheme, tensors, x, bias = layer(n, k, group_size, dtype)
    op = CudaOp(scheme, tensors)
    again = op.canonical()
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    few, many = oracles(scheme, tensors, x)
    alone = op(x[:1])
    for m in ROWS:
        exact = (few if m <= 16 else many)[:m]
        y = op(x[:m])
        near(y, exact, dtype)
        near(op(x[:m], bias), exact + bias.double(), dtype)
        assert torch.equal(y, op(x[:m])), "two runs differ"
        assert m > 16 or torch.equal(y[:1], alone), "a row depends on the others"
    assert op(x[:0]).shape == (0, n)


@pytest.mark.parametrize(("dtype", "scales"), [(FP16, BF16), (BF16, FP16)], ids=str)
def test_scales_of_another_type(dtype, scales):
    scheme, tensors, x, bias = layer(1040, 2048, 64, dtype, scales)
    op = CudaOp(scheme, tensors)
    exact, _ = oracles(scheme, tensors, x)
    for m in (1, 16, 40, 300):
        near(op(x[:m], bias), exact[:m] + bias.double(), dtype)


@every_dtype
def test_identity_returns_the_weights(dtype):
    """Metadata of every lane and step: each weight at its place, rounded once."""
    for group_size, k in ((32, 256), (64, 256), (128, 256), (-1, 250)):
        scheme, tensors, _, _ = layer(200, k, group_size, dtype)
        op, wanted = CudaOp(scheme, tensors), scheme.dequantize(tensors).to(dtype).T
        eye = torch.eye(k, dtype=dtype, device=DEVICE)
        assert torch.equal(op(eye), wanted)
        rows = [op(eye[i : i + 16]) for i in range(0, k, 16)]
        assert torch.equal(torch.cat(rows), wanted)


@every_dtype
@pytest.mark.parametrize("cut", list(tiles.cuts(INSTANCES, plan.COSTS.clusters)), ids=str)
def test_every_tile(cut, dtype):
    """Every instance and way to spread it, whatever the cost model would take."""
    for group_size, n, k in [(64, 1040, 4096), (32, 81, 1536), (128, 4096, 8192)]:
        scheme, tensors, x, bias = layer(n, k, group_size, dtype)
        op = CudaOp(scheme, tensors)
        shape, made = op.shape, plan.plan(0, op.shape, dtype)
        _, exact = oracles(scheme, tensors, x)
        exact += bias.double()
        for m in (7, 64, 129, 300):
            how = tiles.launch(cut, m, n, shape.k_tiles, shape.record_bytes, gpu(0))
            if how is None:
                continue
            first = None
            for _ in range(3):
                out = torch.full((m, n), 7.0, dtype=dtype, device=DEVICE)
                made.batch(m, False, how)(x[:m], op.records, bias, out)
                near(out, exact[:m], dtype)
                assert first is None or torch.equal(out, first), "two runs differ"
                first = out


@every_dtype
def test_graphs_and_plain_launches(dtype):
    scheme, tensors, x, _ = layer(4096, 4096, 128, dtype)
    op = CudaOp(scheme, tensors)
    for m in (1, 16, 64, 300):
        wanted = op(x[:m])
        with plain_launches():
            assert torch.equal(op(x[:m]), wanted)
        given = x[:m].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ys = [op(given) for _ in range(20)]
        for shift in (0, 1):
            given.copy_(x[:m].roll(shift, 0))
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(y, wanted.roll(shift, 0)) for y in ys)


@every_dtype
def test_joined_and_gated(dtype):
    sizes, k = (512, 128, 136), 1024
    parts = [layer(n, k, 64, dtype) for n in sizes]
    scheme, x = parts[0][0], parts[0][2]
    ops = [CudaOp(scheme, tensors) for _, tensors, _, _ in parts]
    exact = [oracles(scheme, tensors, x) for _, tensors, _, _ in parts]
    whole = CudaOp.join(ops)
    for m, which in ((16, 0), (300, 1)):
        near(whole(x[:m]), torch.cat([each[which][:m] for each in exact], -1), dtype)
        for op, each in zip(ops, exact, strict=True):
            near(op(x[:m]), each[which][:m], dtype)
    pair = [layer(264, k, 64, dtype, seed=seed)[1] for seed in (1, 2)]
    gated = CudaOp.gate([CudaOp(scheme, tensors) for tensors in pair])
    for m in (1, 16, 100):
        gate, up = gated.both(x[:m]).chunk(2, -1)
        for y, tensors in ((gate, pair[0]), (up, pair[1])):
            near(y, oracles(scheme, tensors, x[:m])[m > 16], dtype)
        y, wanted = gated(x[:m]), silu(gate) * up
        assert (y == wanted).float().mean() > 0.99
        torch.testing.assert_close(y, wanted, rtol=0.02, atol=1e-30)
    for part, tensors in zip(gated.parts, pair, strict=True):
        assert all(torch.equal(part.canonical()[name], tensors[name]) for name in tensors)


def test_views_and_compile():
    scheme, tensors, x, _ = layer(256, 512, 64, FP16)
    op = CudaOp(scheme, tensors)
    wanted, few = op(x), op(x[:12])
    assert torch.equal(op(x[:12].view(2, 3, 2, 512)).flatten(0, 2), few)
    assert torch.equal(op(x.T.contiguous().T), wanted)
    shifted = torch.empty(12 * 512 + 1, dtype=FP16, device=DEVICE)[1:].view(12, 512)
    shifted.copy_(x[:12])
    assert torch.equal(op(shifted), few)
    compiled = torch.compile(lambda v: op(v) * 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x[:12]), few)
