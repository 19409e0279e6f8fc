"""w4ax on a Hopper GPU against exact integers: every bit of every product, whatever m, the tile
configuration, the run or the neighbours; graphs, joined layers, SwiGLU. test_w4ax_mixed_gpu.py has
activations of 4 bits and norms."""

from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import silu
from w4ax_layers import layer, oracle, ordered, quantized

from billfish.kernels import cache, tiles
from billfish.kernels.device import gpu
from billfish.kernels.launch import plain_launches
from billfish.schemes.w4ax.cuda import plan, rounding
from billfish.schemes.w4ax.cuda.instances import INSTANCES
from billfish.schemes.w4ax.cuda.op import CudaOp

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_here")]

DEVICE = torch.device("cuda", 0)
FP16, BF16 = torch.float16, torch.bfloat16
ROWS = (1, 2, 3, 8, 16, 17, 33, 64, 65, 129, 200, 257, 300)
every_dtype = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
# group size, n, k
LAYERS = [
    (32, 1, 32),
    (64, 65, 576),
    (-1, 200, 72),
    (64, 576, 1536),
    (128, 4096, 4096),
    (256, 6144, 4096),
    (128, 4096, 14336),
    (64, 28672, 4096),
    (128, 57344, 1024),
]
every_layer = pytest.mark.parametrize(("group_size", "n", "k"), LAYERS, ids=str)


@dataclass(frozen=True)
class Groups:
    """What the op knows of its scheme."""

    group_size: int
    symmetric: bool = True
    mixed: bool = False
    rotation: bool = False


@pytest.fixture(scope="module")
def compiled_here(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BILLFISH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(cache, "_memory", {})
        yield


@every_dtype
@every_layer
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_products(group_size, n, k, dtype, symmetric):
    tensors, x, bias = layer(n, k, group_size, dtype, DEVICE, max(ROWS), not symmetric)
    op = CudaOp(Groups(group_size, symmetric), tensors)
    again = op.canonical()
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    exact, more = oracle(tensors, group_size, x), oracle(tensors, group_size, x, bias)
    for m in ROWS:
        assert torch.equal(op(x[:m]), exact[:m]), m
        assert torch.equal(op(x[:m], bias), more[:m]), m
    assert op(x[:0]).shape == (0, n)


@every_dtype
@pytest.mark.parametrize("k", [8, 72, 4096, 28672])
def test_activations(k, dtype):
    """Zeros, Inf, NaN, one huge outlier."""
    x = torch.randn(9, k, device=DEVICE).to(dtype)
    x[1] = 0
    x[2, k // 2], x[3, -1], x[4, 0] = torch.inf, torch.nan, -torch.inf
    x[5] *= 1e-3
    x[5, k - 1] = -6e4
    wanted, scale = quantized(x)
    made = CudaOp(Groups(-1), layer(8, k, -1, dtype, DEVICE, 1)[0])
    inputs, tokens = rounding.rounding(0, dtype, k, False).quantize(x, 9, None)
    padded = torch.nn.functional.pad(wanted, (0, -k % 16))
    assert torch.equal(inputs.long(), ordered(padded))
    assert torch.equal(tokens[:9, 1].long(), 128 * wanted.sum(-1))
    found = tokens[:9, 0].contiguous().view(torch.float32)
    assert torch.equal(found.nan_to_num(-1), scale[:, 0].nan_to_num(-1))
    y = made(x)
    assert y[2:5].isnan().all() and y[5:].isfinite().all() and (y[1] == 0).all()


@every_dtype
@pytest.mark.parametrize("cut", list(tiles.cuts(INSTANCES)), ids=str)
def test_every_tile(cut, dtype):
    """Every instance and way to spread it, whatever the cost model would take."""
    for group_size, n, k in [(64, 1040, 4096), (32, 81, 1536), (128, 4096, 8192)]:
        tensors, x, bias = layer(n, k, group_size, dtype, DEVICE)
        packed = CudaOp(Groups(group_size), tensors).packed
        shape = packed.shape
        exact, made = oracle(tensors, group_size, x, bias), plan.plan(0, shape, dtype)
        for m in (7, 64, 129, 300):
            sizes = (m, n, shape.k_tiles, shape.record_bytes, gpu(0), plan.INPUT_BYTES)
            how = tiles.launch(cut, *sizes)
            if how is None:
                continue
            for _ in range(2):
                out = torch.full((m, n), 7.0, dtype=dtype, device=DEVICE)
                given = rounding.rounded(x[:m], k, None, DEVICE)
                made.batch(m, False, how)(given, packed.records, packed.bases, bias, out)
                assert torch.equal(out, exact[:m]), (m, how)


def test_the_largest_sums():
    """Unsigned sums pass 2^31, the result does not."""
    k = 2**17
    tensors, _, _ = layer(72, k, 128, BF16, DEVICE, 1)
    x = torch.ones(20, k, dtype=BF16, device=DEVICE)
    x[1], x[2, 1::2] = -1, -1
    assert torch.equal(CudaOp(Groups(128), tensors)(x), oracle(tensors, 128, x))


@every_dtype
def test_graphs_and_plain_launches(dtype):
    tensors, x, _ = layer(4096, 4096, 128, dtype, DEVICE)
    op = CudaOp(Groups(128), tensors)
    exact = oracle(tensors, 128, x)
    for m in (1, 16, 64, 300):
        with plain_launches():
            assert torch.equal(op(x[:m]), exact[:m])
        given = x[:m].clone()
        op(given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ys = [op(given) for _ in range(20)]
        for shift in (0, 1):
            given.copy_(x[:m].roll(shift, 0))
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(y, exact[:m].roll(shift, 0)) for y in ys)


@every_dtype
def test_joined_and_gated(dtype):
    sizes, k = (512, 128, 136), 1024
    parts = [layer(n, k, 64, dtype, DEVICE) for n in sizes]
    x = parts[0][1]
    ops = [CudaOp(Groups(64), tensors) for tensors, _, _ in parts]
    exact = [oracle(tensors, 64, x) for tensors, _, _ in parts]
    whole = CudaOp.join(ops)
    assert torch.equal(whole(x), torch.cat(exact, -1))
    assert all(torch.equal(op(x), y) for op, y in zip(ops, exact, strict=True))
    pair = [layer(n, k, 64, dtype, DEVICE)[0] for n in (264, 264)]
    pair[1] = {name: tensor.flip(0) for name, tensor in pair[1].items()}
    gated = CudaOp.gate([CudaOp(Groups(64), tensors) for tensors in pair])
    gate, up = (oracle(tensors, 64, x) for tensors in pair)
    for m in (1, 16, 100):
        assert torch.equal(gated.both(x[:m]), torch.cat([gate, up], -1)[:m])
        y, wanted = gated(x[:m]), silu(gate[:m]) * up[:m]
        assert (y == wanted).float().mean() > 0.99
        torch.testing.assert_close(y, wanted, rtol=0.02, atol=1e-30)
    for part, tensors in zip(gated.parts, pair, strict=True):
        assert all(torch.equal(part.canonical()[name], tensors[name]) for name in tensors)


def test_views_and_compile():
    tensors, x, _ = layer(256, 512, 64, FP16, DEVICE)
    op = CudaOp(Groups(64), tensors)
    exact = oracle(tensors, 64, x)
    assert torch.equal(op(x[:24].view(2, 3, 4, 512)).flatten(0, 2), exact[:24])
    assert torch.equal(op(x.T.contiguous().T), exact)
    shifted = torch.empty(20 * 512 + 1, dtype=FP16, device=DEVICE)[1:].view(20, 512)
    shifted.copy_(x[:20])
    assert torch.equal(op(shifted), exact[:20])
    compiled = torch.compile(lambda v: op(v) * 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x[:20]), exact[:20])
