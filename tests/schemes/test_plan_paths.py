"""Which launches a w4a16 layer makes for m tokens, with kernels that multiply on the CPU instead of
CUDA's: the choice, the slices, padding and alignment of x, and what is done after a kernel."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu

from billfish.errors import UserError
from billfish.kernels.device import Gpu
from billfish.schemes.w4a16.cuda import batch, plan
from billfish.schemes.w4a16.cuda.gated import order
from billfish.schemes.w4a16.cuda.plan import Plan

N, K = 32, 44  # k is padded to 48 for kernels


class Layer:
    """A Plan without a GPU, and a record of which kernels ran how many rows."""

    def __init__(self, few, batches, k=K, planes=1):
        self.ran = []
        self.weight = torch.randn(N, k, generator=torch.Generator().manual_seed(0))
        made = self.plan = object.__new__(Plan)
        made.n, made.k, made.dtype, made.bands = N, k, torch.float32, 1
        made.k_tiles, made.gpu, made.cuts = (
            planes,
            Gpu(0, "a GPU", "sm_90a", 132, 232448, 233472, 0),
            {},
        )
        made.kind = SimpleNamespace(scale_dtype=torch.float16, planes=planes, record_bytes=4224)
        made.few = {tokens: self.kernel(f"few{tokens}") for tokens in few}
        made.most, made.batches, made.paths = max(few), batches, {}
        made.batch = lambda x, records, bias, out, m, invariant, gated: self.kernel(
            "invariant" if invariant else "batch"
        )(x, records, bias, out, m, gated)
        made.decoded = lambda records, start, end: self.weight

    def kernel(self, name):
        def run(x, records, bias, out, m, gated):
            self.ran.append((name, m))
            assert x.is_contiguous() and x.data_ptr() % 16 == 0
            y = x.reshape(-1, x.shape[-1])[:m, : self.plan.k] @ self.weight.T
            y = y if bias is None else y + bias
            if gated:
                gate, up = y[:, torch.argsort(order(N))].chunk(2, -1)
                y = silu(gate) * up
            out.view(-1, y.shape[-1])[:m] = y

        return run

    def __call__(self, x, invariant=False, gated=False, bias=None):
        self.ran.clear()
        m = x.numel() // self.plan.k
        out = torch.full((*x.shape[:-1], N // 2 if gated else N), torch.nan)
        self.plan.path(m, invariant, gated)(x, None, bias, out)
        return out


HOPPER = ((8, 16), {(64, 1): None})
AMPERE = ((8, 16, 32, 64), {})
PLAIN = ((8, 16), {})  # Hopper, scales of another type than x


def test_few_tokens_that_were_faster_in_a_batch(monkeypatch):
    monkeypatch.setattr(batch, "table", lambda: {("a GPU", N, 1): {16: None, 24: None}})
    for layer, name in ((Layer(*HOPPER), "batch"), (Layer(*PLAIN), "few16")):
        for m, ran in ((8, "few8"), (9, name), (16, name)):
            layer(torch.randn(m, K))
            assert layer.ran == [(ran, m)]
            layer(torch.randn(m, K), gated=True)
            assert layer.ran == [(ran, m)]
    layer = Layer(*HOPPER)
    layer(torch.randn(16, K), invariant=True)
    assert layer.ran == [("invariant", 16)]
    layer.plan.few_path(16)(torch.randn(16, K), None, None, torch.empty(16, N))
    assert layer.ran == [("invariant", 16), ("few16", 16)]


def test_two_planes_of_few_tokens_are_not_in_the_table(monkeypatch):
    monkeypatch.setattr(batch, "table", lambda: {("a GPU", N, 2): {16: None}})
    layer = Layer(*HOPPER, planes=2)
    layer(torch.randn(16, K))
    assert layer.ran == [("few16", 16)]


@pytest.mark.parametrize(
    ("kernels", "m", "ran"),
    [
        (HOPPER, 1, [("few8", 1)]),
        (HOPPER, 9, [("few16", 9)]),
        (HOPPER, 17, [("batch", 17)]),
        (HOPPER, 900, [("batch", 900)]),
        (AMPERE, 16, [("few16", 16)]),
        (AMPERE, 17, [("few32", 17)]),
        (AMPERE, 200, [("few64", 64), ("few64", 64), ("few64", 64), ("few8", 8)]),
        (AMPERE, 257, []),
        (PLAIN, 40, [("few16", 16), ("few16", 16), ("few8", 8)]),
        (PLAIN, 65, []),  # decoded panels
    ],
)
@pytest.mark.parametrize("k", [K, 48])
def test_m_decides_and_rows_come_out_in_place(kernels, m, ran, k):
    layer = Layer(*kernels, k)
    x, bias = torch.randn(m, k), torch.randn(N)
    assert torch.allclose(layer(x, bias=bias), x @ layer.weight.T + bias, atol=1e-4)
    assert layer.ran == ran
    strided = torch.randn(m, 2 * k)[:, ::2]
    assert torch.allclose(layer(strided), strided @ layer.weight.T, atol=1e-4)
    shifted = torch.randn(m * k + 1)[1:].view(m, k)  # 4 bytes past any alignment
    assert torch.allclose(layer(shifted), shifted @ layer.weight.T, atol=1e-4)


def test_an_invariant_layer_takes_rows_in_fixed_slices():
    layer = Layer(*HOPPER)
    m = batch.MOST_INVARIANT + 3
    x = torch.randn(m, K)
    assert torch.allclose(layer(x, invariant=True), x @ layer.weight.T, atol=1e-4)
    assert layer.ran == [("invariant", batch.MOST_INVARIANT), ("invariant", 3)]
    with pytest.raises(UserError, match="takes those of its scales' type"):
        Layer(*PLAIN)(x, invariant=True)


@pytest.mark.parametrize("kernels", [HOPPER, PLAIN])
@pytest.mark.parametrize("m", [3, 30, 70])
@pytest.mark.parametrize("planes", [1, 2])
def test_gates_are_applied_in_the_kernel_or_after_it(kernels, m, planes, monkeypatch):
    monkeypatch.setattr(plan, "TWO_PLANES", 64)
    layer, x = Layer(*kernels, planes=planes), torch.randn(m, K)
    gate, up = (x @ layer.weight.T)[:, torch.argsort(order(N))].chunk(2, -1)
    assert torch.allclose(layer(x, gated=True), silu(gate) * up, atol=1e-4)


@pytest.mark.parametrize(("m", "ran"), [(16, "few16"), (17, "batch"), (64, "batch"), (65, None)])
def test_two_planes_are_decoded_beforehand_for_many_tokens(m, ran, monkeypatch):
    monkeypatch.setattr(plan, "TWO_PLANES", 64)
    layer, x = Layer(*HOPPER, planes=2), torch.randn(m, K)
    assert torch.allclose(layer(x), x @ layer.weight.T, atol=1e-4)
    assert layer.ran == ([(ran, m)] if ran else [])
