"""w4a16_batch: every instance and way to spread it, whatever batch.pick would take."""

import pytest
import torch
from torch.nn.functional import linear
from w4a16_layers import DEVICE, op_of

from billfish.errors import UserError
from billfish.kernels import tiles
from billfish.kernels.device import gpu
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda import batch
from billfish.schemes.w4a16.cuda import op as cuda
from billfish.schemes.w4a16.cuda.op import CudaOp, InvariantOp

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16)
SCHEMES = (
    W4A16(4, 128),
    W4A16(4, 32, False),
    W4A16(4, 64),
    W4A16(3, 64),
    W4A16(4, -1, False),
    W4A16(8, 128),
    W4A16(6, 32, False),
)
SIZES = {128: (300, 1280), 32: (1000, 576), 64: (200, 640), -1: (65, 1100)}


def plan_of(op):
    return cuda.plan(0, op.shape.n, op.shape.k, op.kind, op.shape.scale_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.bits}bit-g{s.group_size}")
@pytest.mark.parametrize("instance", list(batch.INSTANCES), ids=str)
def test_every_cut(instance, scheme, dtype):
    n, k = SIZES[scheme.group_size]
    op, weight = op_of(CudaOp, scheme, n, k, dtype)
    plan, rounded, bias = plan_of(op), weight.to(dtype), torch.randn(n, device=DEVICE).to(dtype)
    launched = 0
    for cut in tiles.cuts([instance], batch.COSTS.clusters, batch.COSTS.twin_us):
        for m in (9, 17, cut.tokens, 2 * cut.tokens + 5):  # 9: some layers run so few here
            how = batch.launch(cut, m, n, plan.k_tiles, plan.kind.record_bytes, gpu(DEVICE))
            if how is None:
                continue
            launched += 1
            x = torch.randn(m, k, device=DEVICE).to(dtype)
            plan.cuts[m, False] = how
            plan.paths.clear()
            y, again = op(x, bias), op(x, bias)
            del plan.cuts[m, False]
            plan.paths.clear()
            exact = x.double() @ weight.double().T + bias.double()
            ours = (y.double() - exact).abs().max()
            theirs = (linear(x, rounded, bias).double() - exact).abs().max()
            one = exact.abs().max() * (2**-11 if dtype == torch.float16 else 2**-8)
            assert ours <= 2 * theirs + one, (cut, m, float(ours), float(theirs))
            assert torch.equal(y, again), (cut, m)
    assert launched


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16"])
def test_identity_gives_the_weights_rounded_once(dtype):
    op, weight = op_of(CudaOp, W4A16(4, 32, False), 1000, 576, dtype)
    eye = torch.eye(576, device=DEVICE, dtype=dtype)
    assert torch.equal(op(eye), weight.to(dtype).T)


def test_rows_of_a_batch_do_not_see_each_other():
    op, _ = op_of(CudaOp, W4A16(4, 128), 576, 1536, torch.float16)
    x = torch.randn(100, 1536, device=DEVICE).half()
    clean = op(x)
    for row in (0, 50, 99):
        spoilt = x.clone()
        spoilt[row] = float("nan")
        y = op(spoilt)
        others = torch.arange(100, device=DEVICE) != row
        assert torch.equal(y[others], clean[others]) and bool(y[row].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16"])
@pytest.mark.parametrize("size", [(4096, 4096), (300, 1280), (28672, 512), (1000, 576)])
def test_batch_invariance(size, dtype):
    n, k = size
    op, weight = op_of(InvariantOp, W4A16(4, 32, False), n, k, dtype)
    x, bias = torch.randn(1500, k, device=DEVICE).to(dtype), torch.randn(n, device=DEVICE).to(dtype)
    whole = op(x, bias)
    exact = x.double() @ weight.double().T + bias.double()
    error = (whole.double() - exact).abs().max() / exact.abs().max()
    assert error < (2**-9 if dtype == torch.float16 else 2**-6)
    for start, m in (
        (0, 1),
        (3, 2),
        (0, 8),
        (5, 17),
        (7, 33),
        (1, 64),
        (2, 100),
        (9, 129),
        (0, 257),
        (11, 600),
        (100, 1024),
    ):
        assert torch.equal(op(x[start : start + m], bias), whole[start : start + m]), (start, m)


def test_an_invariant_layer_of_other_scales_says_so():
    op, _ = op_of(InvariantOp, W4A16(4, 128), 128, 256, torch.bfloat16)
    with pytest.raises(UserError, match="scales' type"):
        op(torch.randn(4, 256, device=DEVICE).half())


def test_a_captured_graph_has_its_own_place_to_meet():
    op, _ = op_of(CudaOp, W4A16(4, 128), 512, 4096, torch.float16)
    x = torch.randn(40, 4096, device=DEVICE).half()
    wanted = op(x)
    assert plan_of(op).cuts[40, False].sums
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [op(x) for _ in range(3)]
    for _ in range(3):
        for out in outs:
            out.zero_()
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            others = [op(x) for _ in range(5)]
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, wanted) for out in (*outs, *others))
