"""w4a16_24's op for Hopper without one: what it refuses, joins and gates; how it would launch."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import silu

from billfish.errors import UserError
from billfish.kernels import jit, tiles
from billfish.kernels.device import Gpu
from billfish.schemes.base import Reference
from billfish.schemes.gated import Part, apart
from billfish.schemes.w4a16_24 import FAMILY, W4A16Sparse
from billfish.schemes.w4a16_24.cuda import plan, tile
from billfish.schemes.w4a16_24.cuda.op import CudaOp

H200 = Gpu(0, "NVIDIA H200", "sm_90a", 132, 232448, 233472, 60 * 2**20)
SCHEME, CARD = W4A16Sparse(64), torch.device("cuda")
FP16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The op arranges here, and its products are the oracle's."""

    def product(op, x, bias=None, gated=False):
        y = Reference(op.scheme, op.canonical())(x, bias)
        if not gated:
            return y
        gate, up = apart(y, op.run).chunk(2, -1)
        return silu(gate) * up

    monkeypatch.setattr(CudaOp, "_prepare", lambda op: None)
    monkeypatch.setattr(CudaOp, "__call__", product)


def layer(n, k=576, seed=0, scheme=SCHEME, dtype=BF16):
    return scheme.random_tensors(n, k, dtype, torch.Generator().manual_seed(seed + n))


def same(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_refusals(monkeypatch):
    assert FAMILY.ops[0] is CudaOp and not CudaOp.by_name
    assert "model.to('cuda')" in CudaOp.refuses(SCHEME, 64, 512, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "`billfish doctor`" in CudaOp.refuses(SCHEME, 64, 512, CARD)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for found in ((7, 5), (8, 6), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, f=found: f)
        reason = CudaOp.refuses(SCHEME, 64, 512, CARD)
        assert "Hopper" in reason and f"{found[0]}.{found[1]}" in reason
        assert 'op="stripe"' in reason and reason.endswith(".") and "\n" not in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert CudaOp.refuses(SCHEME, 64, 512, CARD) is None

    def missing():
        raise UserError("not here")

    monkeypatch.setattr(jit, "version", missing)
    assert "billfish[cuda]" in CudaOp.refuses(SCHEME, 64, 512, CARD)


@pytest.mark.parametrize("scheme", W4A16Sparse.examples(), ids=str)
def test_canonical_tensors_come_back(scheme, on_the_cpu):
    tensors = layer(80, scheme=scheme)
    op = CudaOp(scheme, tensors)
    same(op.canonical(), tensors)
    assert (op.n, op.device.type) == (80, "cpu")
    which = torch.tensor([3, 79, 4])
    weights = scheme.dequantize(tensors)[which]
    assert torch.equal(scheme.dequantize(op.rows(which)), weights)


def test_a_record_has_as_many_bits_as_told(on_the_cpu):
    """4 bits and a place of 2 for half of the weights, and a scale for each group."""
    for size in (32, 64, 128):
        op = CudaOp(W4A16Sparse(size), layer(256, 1024, scheme=W4A16Sparse(size)))
        assert op.nbytes() * 8 == 256 * 1024 * (3 + 16 / size)


def test_join(on_the_cpu):
    each = [layer(n) for n in (128, 64, 48)]
    ops = [CudaOp(SCHEME, tensors) for tensors in each]
    x = torch.randn(3, 576).bfloat16()
    before = [op(x) for op in ops]
    whole = CudaOp.join(ops)
    assert whole.n == 240 and torch.equal(whole(x), torch.cat(before, -1))
    for op, tensors in zip(ops, each, strict=True):
        assert op.records.untyped_storage().data_ptr() == whole.records.data_ptr()
        same(op.canonical(), tensors)
    assert CudaOp.join([CudaOp(SCHEME, layer(n)) for n in (48, 64)]) is None  # a band half full
    others = [layer(64, 512), layer(64, dtype=FP16)]
    assert all(CudaOp.join([CudaOp(SCHEME, layer(64)), CudaOp(SCHEME, o)]) is None for o in others)
    wide = W4A16Sparse(32)
    assert CudaOp.join([CudaOp(SCHEME, layer(64)), CudaOp(wide, layer(64, scheme=wide))]) is None


@pytest.mark.parametrize("n", [64, 104])
def test_gate(n, on_the_cpu):
    each = [layer(n, seed=seed) for seed in (0, 1)]
    gated = CudaOp.gate([CudaOp(SCHEME, tensors) for tensors in each])
    x = torch.randn(3, 576).bfloat16()
    gate, up = (Reference(SCHEME, tensors)(x) for tensors in each)
    assert torch.equal(gated(x), silu(gate) * up)
    assert torch.equal(gated.both(x), torch.cat([gate, up], -1))
    for part, tensors, y in zip(gated.parts, each, (gate, up), strict=True):
        same(part.canonical(), tensors)
        assert torch.equal(part(x), y) and part.nbytes() == gated.whole.nbytes() // 2
    assert Part.gate(gated.parts).whole is gated.whole
    assert CudaOp.gate([CudaOp(SCHEME, layer(n)), CudaOp(SCHEME, layer(n + 16))]) is None
    assert CudaOp.gate([CudaOp(SCHEME, layer(12))]) is None  # rows are gated 16 at a time
    (one,) = CudaOp.gate([CudaOp(SCHEME, layer(2 * n))]).parts  # gate and up in one layer
    same(one.canonical(), layer(2 * n))


@pytest.mark.parametrize("n", [16, 576, 4096, 6144, 28672, 57344, 151936])
def test_launches_fit_and_tokens_do_not_decide(n):
    for gpu in (H200, dataclasses.replace(H200, sms=2)):
        found = [tile.pick_tile(m, n, 4096, 3200, gpu) for m in range(1, 17)]
        assert len({(how.bands, how.blocks) for how in found}) == 1
        assert all(3 <= how.stages <= 8 and 2 * (how.smem + 1024) <= 233472 for how in found)


def test_wrong_activations_are_refused():
    records = torch.empty(1, 4, dtype=torch.int32)

    def call(x):
        return plan.linear(x, records, None, 64, 576, 9, 64, 0)

    with pytest.raises(UserError, match=r"float32.*float16 and bfloat16.*Load"):
        call(torch.zeros(1, 576))
    with pytest.raises(ValueError, match="600 columns, the layer takes 576"):
        call(torch.zeros(1, 600).half())
    with pytest.raises(ValueError, match="activations are on meta, the layer on cpu"):
        call(torch.zeros(1, 576, device="meta").half())
    assert call(torch.zeros(0, 576).half()).shape == (0, 64)


def parameters_of(kernel):
    """Names of what a kernel's text declares."""
    text = (Path(plan.__file__).parent / f"{kernel}.cuh").read_text()
    told = re.search(rf"w4a16_24_{kernel}\(([^)]*)\)", text)[1]
    return [each.split()[-1] for each in told.split(",")]


class Loaded:
    """A kernel whose launches are written down, not run."""

    def __init__(self, name, launched):
        self.name, self.launched = name, launched

    def load(self, index):
        return self

    def launch(self, grid, threads, arguments, smem=0, cluster=1, pdl=False):
        names = parameters_of("batch" if isinstance(self.name, tuple) else "decode")
        given = dict(zip(names, arguments, strict=True))
        self.launched.append((self.name, grid, threads, given, smem, cluster, pdl))


@pytest.mark.parametrize(("k", "dtype"), [(576, BF16), (72, FP16), (75, FP16)], ids=str)
def test_launches_of_every_m(k, dtype, monkeypatch, on_the_cpu):
    """`dtype` is that of scales; activations are bfloat16."""
    launched, asked = [], []

    def workspace(index, sums, locks):
        asked.append((sums, locks))
        return torch.zeros(1), torch.zeros(1, dtype=torch.int32)

    monkeypatch.setattr(plan, "gpu", lambda index: H200)
    monkeypatch.setattr(plan, "decode_kernel", lambda *kind: Loaded(kind[3], launched))
    monkeypatch.setattr(plan, "batch_kernel", lambda *kind: Loaded(kind[2:], launched))
    monkeypatch.setattr(plan.tensor_map, "of_rows", lambda *sizes: sizes[1:])
    monkeypatch.setattr(plan.workspace, "of_stream", workspace)
    n, scheme = 6144, SCHEME if k % 64 == 0 else W4A16Sparse(-1)
    op = CudaOp(scheme, layer(n, k, scheme=scheme, dtype=dtype))
    made = plan.Plan(0, op.shape, BF16)
    for m in (1, 8, 9, 16, 17, 40, 700):
        for gated in (False, True):
            launched.clear()
            x = torch.zeros(m, k, dtype=BF16)
            out = torch.zeros(m, n // (1 + gated), dtype=BF16)
            made.product(m, gated)(x, op.records, None, out)
            if dtype != BF16:  # scales of another type
                slices = [min(16, m - start) for start in range(0, m, 16)]
                assert [each[3]["m"] for each in launched] == slices
            else:
                assert len(launched) == 1 and isinstance(launched[0][0], tuple) == (m > 16)
            for name, grid, threads, given, smem, cluster, pdl in launched:
                assert pdl and given["gated"] == gated and given["n"] == n
                assert given["k_tiles"] == -(-k // 128) and given["x"][1] == -(-k // 8) * 8
                if isinstance(name, int):
                    assert name == (8 if given["m"] <= 8 else 16) == given["x"][2]
                    assert (threads, cluster) == (tile.THREADS, 2) and grid % 2 == 0
                    continue
                assert threads == tiles.THREADS and given["x"] == (m, k, name[0])
                assert cluster == given["splits"] and (given["m_tiles"] - 1) * name[0] < m
                assert smem == made.pick(m).asked and bool(given["locks"]) == bool(
                    made.pick(m).sums
                )
    assert (dtype == BF16) == bool(made.batches)
