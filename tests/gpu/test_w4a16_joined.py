"""Joined layers on a GPU: one product for several, and SwiGLU stored by the product itself."""

import pytest
import torch
from torch.nn.functional import silu
from w4a16_layers import DEVICE, UNIT, every_dtype, make, name, same, some_x

from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda.gated import apart
from billfish.schemes.w4a16.cuda.op import CudaOp, InvariantOp, StripeOp

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled")]

ROWS = (1, 3, 8, 9, 16, 17, 40, 64, 65, 200, 300)
every_scheme = pytest.mark.parametrize("scheme", [W4A16(4, 64), W4A16(4, 32, False)], ids=name)


def close(y, wanted, dtype):
    """Sums in another order move some results by one rounding of a larger one."""
    error = (y.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < 2 * UNIT[dtype], float(error)


@every_dtype
@every_scheme
@pytest.mark.parametrize("op", [CudaOp, StripeOp, InvariantOp], ids=lambda op: op.name)
def test_joined(op, scheme, dtype):
    each, k = [make(scheme, n, 576, dtype) for n in (576, 192, 192)], 576
    parts = [op(scheme, tensors) for tensors in each]
    x = [some_x(m, k, dtype) for m in ROWS]
    before = [[part(rows) for part in parts] for rows in x]
    bytes_before = sum(part.nbytes() for part in parts)
    whole = op.join(parts)
    assert whole.nbytes() == bytes_before == sum(part.nbytes() for part in parts)
    for part, tensors in zip(parts, each, strict=True):
        same(part.canonical(), tensors)
    bias = some_x(1, 960, dtype)[0]
    for rows, apart_before in zip(x, before, strict=True):
        assert all(map(torch.equal, (part(rows) for part in parts), apart_before))
        close(whole(rows), torch.cat(apart_before, -1), dtype)
        close(whole(rows, bias), torch.cat(apart_before, -1) + bias, dtype)
    if op is InvariantOp:
        many = whole(x[-1])
        assert all(torch.equal(whole(x[-1][:m]), many[:m]) for m in ROWS)


@every_dtype
@every_scheme
@pytest.mark.parametrize("n", [72, 1536, 14336])
@pytest.mark.parametrize("op", [CudaOp, InvariantOp], ids=lambda op: op.name)
def test_gated(op, n, scheme, dtype):
    each, k = [make(scheme, n, 576, dtype) for _ in range(2)], 576
    gated = op.gate([op(scheme, tensors) for tensors in each])
    assert gated is not None
    for part, tensors in zip(gated.parts, each, strict=True):
        same(part.canonical(), tensors)
    for m in ROWS:
        x = some_x(m, k, dtype)
        y, both = gated(x), gated.both(x)
        assert y.shape == (m, n) and torch.equal(both, apart(gated.whole(x)))
        wanted = silu(both[:, :n]) * both[:, n:]
        assert (y == wanted).float().mean() > 0.99  # ties of rounding may fall elsewhere
        torch.testing.assert_close(y, wanted, rtol=4 * UNIT[dtype], atol=1e-30)
        assert torch.equal(gated.parts[1](x), both[:, n:])
        assert torch.equal(gated(x), y)
    assert gated(x[:0]).shape == (0, n)
    other = x.to(torch.float16 if dtype == torch.bfloat16 else torch.bfloat16)
    if op is CudaOp:  # x of another type than the scales: torch's operators gate
        close(gated(other), y, torch.bfloat16)


def test_gated_in_a_graph_and_at_the_ends():
    """A capture, and gates so large that exp overflows."""
    scheme, n = W4A16(4, 64), 1536
    tensors = make(scheme, n, 576, torch.bfloat16)
    tensors["weight_scale"] = tensors["weight_scale"] * 64
    gated = CudaOp.gate([CudaOp(scheme, tensors) for _ in range(2)])
    for m in (4, 40):
        x = some_x(m, 576, torch.bfloat16)
        y = gated(x)
        assert y.isfinite().all() and (gated.both(x) < -90).any()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = gated(x)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(again, y)
    assert x.device == DEVICE
