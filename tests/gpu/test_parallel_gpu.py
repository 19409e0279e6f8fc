"""Layers of other engines on a GPU: compiled by Inductor once for all batch sizes, and captured."""

import pytest
import torch

from billfish.checkpoints.own import Own
from billfish.integrations.parallel import Layer, Slices, Stored
from billfish.schemes.registry import with_options

pytestmark = pytest.mark.gpu

K, SIZES, DTYPE = 1024, (1024, 256, 256), torch.float16
SCHEMES = [
    with_options("w4a16", group_size=64),
    with_options("w2416"),
    with_options("w4ax", group_size=64),
    with_options("w4a16_24", group_size=64),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_compiled_and_captured(scheme):
    linears = []
    for n in SIZES:
        slices = Slices.of_outputs(K, (n,), (1,), 0, 1)
        linears.append(Stored(f"part of {n}", Own(scheme, {}), scheme, slices, DTYPE))
    layer = Layer(linears)
    for index, n in enumerate(SIZES):
        tensors = scheme.random_tensors(n, K, DTYPE, torch.Generator().manual_seed(0))
        for name, tensor in tensors.items():
            layer.take(index, name, tensor)
    product = layer.product(torch.device("cuda"))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: product(x) * 2, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (5, 2, 17, 64, 300):
            x = torch.randn(m, K, dtype=DTYPE, device="cuda")
            torch._dynamo.mark_dynamic(x, 0)
            assert torch.equal(compiled(x), product(x) * 2), m
        x, later = torch.randn(2, 17, K, dtype=DTYPE, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = compiled(x)
        x.copy_(later)
        graph.replay()
    assert torch.equal(y, product(later) * 2)
