"""w2416 on a GPU against the oracle: panels exact, products within their tolerance, the same bits
in every run and beside any neighbour; graphs, joined layers, SwiGLU. Needs a Hopper GPU, which runs
CudaOp and Ampere's StripeOp alike."""

import pytest
import torch
from torch.nn.functional import silu

from billfish.kernels import cache, tiles
from billfish.kernels.device import gpu
from billfish.kernels.launch import plain_launches
from billfish.schemes.base import Reference
from billfish.schemes.gated import apart
from billfish.schemes.w2416 import W2416
from billfish.schemes.w2416.cuda import batch, plan
from billfish.schemes.w2416.cuda.op import CudaOp, StripeOp

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_here")]

DEVICE = torch.device("cuda", 0)
FP16, BF16 = torch.float16, torch.bfloat16
UNIT = {FP16: 2.0**-11, BF16: 2.0**-8}
ROWS = (1, 2, 3, 5, 8, 9, 13, 16, 17, 33, 64, 65, 200)
every_op = pytest.mark.parametrize("kind", [CudaOp, StripeOp], ids=["cuda", "stripe"])
every_dtype = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])

# Bands end anywhere, one to sixteen parts, no 4-bit groups (k = 96), no outliers, many; one band a
# cluster, two, four, and several passes.
LAYERS = [
    (W2416(2.91), 16, 512),
    (W2416(2.91), 112, 96),
    (W2416(2.6), 576, 1536),
    (W2416(3.0, 0.0), 4096, 4096),
    (W2416(3.3, 0.005), 6144, 4096),
    (W2416(3.9, 0.02), 10240, 1024),
    (W2416(2.91), 4096, 14336),
    (W2416(2.91), 28672, 4096),
    (W2416(2.91), 57344, 1024),
]
every_layer = pytest.mark.parametrize(("scheme", "n", "k"), LAYERS, ids=str)


@pytest.fixture(scope="module")
def compiled_here(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BILLFISH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(cache, "_memory", {})
        yield


def make(scheme, n, k, dtype, seed=0):
    return scheme.random_tensors(n, k, dtype, torch.Generator(DEVICE).manual_seed(seed))


def some_x(m, k, dtype):
    return torch.randn(m, k, device=DEVICE).to(dtype)


def same(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def close(y, exact, dtype, share=1.5):  # the result's rounding, and three of 2-bit weights
    error = (y.double() - exact).norm() / exact.norm()
    assert error < share * UNIT[dtype], float(error)


@every_op
@every_dtype
@every_layer
def test_products(scheme, n, k, dtype, kind):
    tensors = make(scheme, n, k, dtype)
    op = kind(scheme, tensors)
    same(op.canonical(), tensors)
    weight, x = scheme.dequantize(tensors).double(), some_x(max(ROWS), k, dtype)
    bias = some_x(1, n, dtype)[0]
    exact = x.double() @ weight.T
    for m in ROWS:
        y = op(x[:m])
        assert y.shape == (m, n) and y.dtype == dtype
        close(y, exact[:m], dtype)
        worst = (y.double() - exact[:m]).abs().max()
        assert worst <= kind.tolerance(scheme, tensors, x[:m]) + UNIT[dtype] * exact.abs().max()
        close(op(x[:m], bias), exact[:m] + bias.double(), dtype)
        assert torch.equal(op(x[:m]), y)
    assert op(x[:0]).shape == (0, n)


@every_dtype
@pytest.mark.parametrize("cut", list(tiles.cuts()), ids=str)
def test_every_tile_of_many_tokens(cut, dtype):
    """Every instance of w2416_batch and way to spread it, whatever the cost model would take."""
    for scheme, n, k in [(W2416(2.91), 1040, 4096), (W2416(3.9, 0.02), 80, 1536)]:
        tensors = make(scheme, n, k, dtype)
        packed, x = CudaOp(scheme, tensors).packed, some_x(300, k, dtype)
        exact, made = scheme.reference(tensors, x), plan.plan(0, packed.shape)
        room = batch.band_bytes(packed.shape)
        for m in (17, 64, 129, 300):
            how = tiles.launch(cut, m, n, batch.stages_along_k(packed.shape), room, gpu(0))
            if how is None:
                continue
            first, second = (torch.full((m, n), 7.0, dtype=dtype, device=DEVICE) for _ in range(2))
            for out in (first, second):
                run = made.batches.of(m, False, how)
                run(x[:m], packed.records, packed.columns, None, out)
            close(first, exact[:m], dtype)
            assert torch.equal(first, second)


@every_dtype
@every_layer
def test_panels_are_the_weights_rounded_once(scheme, n, k, dtype):
    tensors = make(scheme, n, k, dtype)
    op = CudaOp(scheme, tensors)
    packed, shape = op.packed, op.packed.shape
    made = plan.plan(0, shape).decoded(packed.records, packed.columns, 0, shape.bands)
    assert torch.equal(made, scheme.dequantize(tensors).to(dtype))
    if shape.bands > 1:
        made = plan.plan(0, shape).decoded(packed.records, packed.columns, 1, shape.bands)
        assert torch.equal(made, scheme.dequantize(tensors)[64:].to(dtype))


@every_op
@every_dtype
@every_layer
def test_a_row_does_not_depend_on_its_batch(scheme, n, k, dtype, kind):
    op = kind(scheme, make(scheme, n, k, dtype))
    x = some_x(16, k, dtype)
    many = op(x)
    for m in range(1, 17):
        assert torch.equal(op(x[:m]), many[:m]), m
    poison = x.clone()
    poison[1:] = float("nan")
    assert torch.equal(op(poison)[0], many[0])


@every_op
@every_dtype
def test_zeros_and_single_inputs(dtype, kind):
    """A row of the identity fetches a column: as near as the weights are to their type."""
    scheme, n, k = W2416(3.3, 0.005), 576, 1536
    tensors = make(scheme, n, k, dtype)
    op, weight = kind(scheme, tensors), scheme.dequantize(tensors)
    assert not op(torch.zeros(9, k, dtype=dtype, device=DEVICE)).any()
    eye = torch.eye(k, dtype=dtype, device=DEVICE)
    columns = torch.cat([op(rows) for rows in eye.split(16)])
    off = (columns.float() - weight.T).abs().max()
    assert off <= 4 * UNIT[dtype] * weight.abs().max()


@every_op
@every_dtype
@pytest.mark.parametrize("size", [2.0**-8, 2.0**6])
def test_scales_of_other_sizes(size, dtype, kind):
    scheme, n, k = W2416(2.91), 576, 4096
    tensors = make(scheme, n, k, dtype)
    bits = tensors["scale_base"].int() & 0xFFFF
    base = (bits >> 4 << 3).to(torch.int16).view(FP16) * size
    bits = base.view(torch.int16).int() >> 3 << 4 | bits & 15
    tensors["scale_base"] = ((bits ^ 0x8000) - 0x8000).to(torch.int16)
    for name in ("weight_scale_4", "outlier_value"):
        tensors[name] = tensors[name] * size
    op, x = kind(scheme, tensors), some_x(64, k, dtype)
    exact = scheme.reference(tensors, x)
    for m in (1, 16, 64):
        close(op(x[:m]), exact[:m], dtype)


@every_op
@pytest.mark.parametrize("m", [1, 7, 16, 40, 100])
def test_graphs_and_plain_launches(m, kind):
    scheme, n, k = W2416(2.91), 6144, 4096
    op, x = kind(scheme, make(scheme, n, k, BF16)), some_x(m, k, BF16)
    y = op(x)
    with plain_launches():
        assert torch.equal(op(x), y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = [op(x) for _ in range(3)]
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(each, y) for each in again)
    compiled = torch.compile(lambda x: op(x) * 2, fullgraph=True)
    assert torch.equal(compiled(x), y * 2)


@every_op
def test_a_chain_of_layers_reads_what_the_one_before_wrote(kind):
    """With PDL a kernel begins before its predecessor has ended."""
    scheme, k = W2416(2.91), 4096
    ops = [kind(scheme, make(scheme, k, k, BF16, seed)) for seed in range(4)]
    x = some_x(3, k, BF16)
    with plain_launches():
        wanted = x
        for op in ops * 4:
            wanted = op(wanted) * 0.7
    for _ in range(20):
        y = x
        for op in ops * 4:
            y = op(y) * 0.7
        assert torch.equal(y, wanted)


def test_streams_have_workspaces_of_their_own():
    """Stripes that share a tile meet in a workspace: launches side by side must not."""
    scheme, n, k = W2416(2.91), 1024, 4096
    op, x = StripeOp(scheme, make(scheme, n, k, BF16)), some_x(16, k, BF16)
    y, streams = op(x), [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    made = []
    for i in range(80):
        with torch.cuda.stream(streams[i % 4]):
            made.append(op(x))
    torch.cuda.synchronize()
    assert all(torch.equal(each, y) for each in made)


@every_op
@every_dtype
def test_joined(dtype, kind):
    scheme, k = W2416(2.91), 4096
    each = [make(scheme, n, k, dtype, n) for n in (4096, 1024, 1008)]
    ops = [kind(scheme, tensors) for tensors in each]
    x = [some_x(m, k, dtype) for m in ROWS]
    before = [[op(rows) for op in ops] for rows in x]
    whole = kind.join(ops)
    for op, tensors in zip(ops, each, strict=True):
        same(op.canonical(), tensors)
    for rows, apart_before in zip(x, before, strict=True):
        close(whole(rows), torch.cat(apart_before, -1).double(), dtype, 2)
        assert all(map(torch.equal, (op(rows) for op in ops), apart_before))


@every_dtype
@pytest.mark.parametrize("n", [112, 1536, 14336])
def test_gated(n, dtype):
    scheme, k = W2416(2.91), 1024
    each = [make(scheme, n, k, dtype, seed) for seed in (0, 1)]
    gated = CudaOp.gate([CudaOp(scheme, tensors) for tensors in each])
    for part, tensors in zip(gated.parts, each, strict=True):
        same(part.canonical(), tensors)
    for m in ROWS:
        x = some_x(m, k, dtype)
        y, both = gated(x), gated.both(x)
        assert y.shape == (m, n) and torch.equal(both, apart(gated.whole(x), plan.RUN))
        close(both[:, :n], Reference(scheme, each[0])(x).double(), dtype, 2)
        wanted = silu(both[:, :n]) * both[:, n:]
        assert (y == wanted).float().mean() > 0.99  # ties of rounding may fall elsewhere
        torch.testing.assert_close(y, wanted, rtol=4 * UNIT[dtype], atol=1e-30)
        assert torch.equal(gated.parts[1](x), both[:, n:])
