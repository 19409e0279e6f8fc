"""w2416's ops for GPUs without one: what they refuse, join and gate; how they would launch."""

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
from billfish.schemes.w2416 import FAMILY, W2416
from billfish.schemes.w2416.cuda import batch, plan, stripe, tile
from billfish.schemes.w2416.cuda.arrange import Shape
from billfish.schemes.w2416.cuda.op import CudaOp, StripeOp

H200 = Gpu(0, "NVIDIA H200", "sm_90a", 132, 232448, 233472, 60 * 2**20)
A100 = Gpu(0, "NVIDIA A100", "sm_80", 108, 163 * 1024, 164 * 1024, 40 * 2**20)
A10 = Gpu(0, "NVIDIA A10", "sm_86", 72, 99 * 1024, 100 * 1024, 6 * 2**20)
SCHEME, CARD = W2416(2.91), torch.device("cuda")


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


def layer(n, k=576, seed=0, scheme=SCHEME, dtype=torch.bfloat16):
    return scheme.random_tensors(n, k, dtype, torch.Generator().manual_seed(seed + n))


def same(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_refusals(monkeypatch):
    assert FAMILY.ops[:2] == (CudaOp, StripeOp)
    assert not CudaOp.by_name and not StripeOp.by_name
    assert "model.to('cuda')" in CudaOp.refuses(SCHEME, 64, 512, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "`billfish doctor`" in CudaOp.refuses(SCHEME, 64, 512, CARD)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for found in ((7, 5), (8, 6), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, f=found: f)
        reason = CudaOp.refuses(SCHEME, 64, 512, CARD)
        here = f"{found[0]}.{found[1]}"
        assert "Hopper" in reason and here in reason and 'op="stripe"' in reason
        assert reason.endswith(".") and "\n" not in reason
        reason = StripeOp.refuses(SCHEME, 64, 512, CARD)
        assert reason is None if found >= (8, 0) else "8.0" in reason and here in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert CudaOp.refuses(SCHEME, 64, 512, CARD) is None

    def missing():
        raise UserError("not here")

    monkeypatch.setattr(jit, "version", missing)
    assert "billfish[cuda]" in CudaOp.refuses(SCHEME, 64, 512, CARD)


@pytest.mark.parametrize("scheme", [*W2416.examples(), SCHEME], ids=str)
def test_canonical_tensors_come_back(scheme, on_the_cpu):
    tensors = layer(80, scheme=scheme)
    op = CudaOp(scheme, tensors)
    same(op.canonical(), tensors)
    assert (op.n, op.device.type) == (80, "cpu")
    assert op.nbytes() >= op.packed.records.nbytes


@pytest.mark.parametrize("kind", [CudaOp, StripeOp])
def test_join(kind, on_the_cpu):
    each = [layer(n) for n in (128, 64, 48)]
    ops = [kind(SCHEME, tensors) for tensors in each]
    x = torch.randn(3, 576).bfloat16()
    before = [op(x) for op in ops]
    whole = kind.join(ops)
    assert type(whole) is kind and whole.n == 240 and torch.equal(whole(x), torch.cat(before, -1))
    for op, tensors in zip(ops, each, strict=True):
        assert op.packed.records.untyped_storage().data_ptr() == whole.packed.records.data_ptr()
        same(op.canonical(), tensors)
    short = [CudaOp(SCHEME, layer(n)) for n in (48, 64)]
    assert CudaOp.join(short) is None  # the first does not fill its last band
    other = dict(layer(64), input_bits=layer(64)["input_bits"].flip(0))
    assert CudaOp.join([CudaOp(SCHEME, layer(64)), CudaOp(SCHEME, other)]) is None
    wide = CudaOp(W2416(3.0), layer(64, scheme=W2416(3.0)))
    assert CudaOp.join([CudaOp(SCHEME, layer(64)), wide]) is None


@pytest.mark.parametrize("n", [64, 112])
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
    assert StripeOp.gate([StripeOp(SCHEME, tensors) for tensors in each]) is None
    (one,) = CudaOp.gate([CudaOp(SCHEME, layer(2 * n))]).parts  # gate and up in one layer
    same(one.canonical(), layer(2 * n))


@pytest.mark.parametrize("n", [16, 576, 4096, 6144, 8192, 10240, 28672, 57344, 151936])
def test_launches_fit_and_tokens_do_not_decide(n):
    for gpu in (H200, dataclasses.replace(H200, sms=2)):
        tiles = [tile.pick_tile(m, n, 4096, 2, gpu) for m in range(1, 17)]
        assert len({(how.bands, how.blocks) for how in tiles}) == 1
        assert all(2 <= how.stages <= 8 and how.smem <= gpu.smem_per_block for how in tiles)
        if tiles[0].blocks > gpu.sms:  # both slots of an SM
            assert all(2 * (how.smem + 1024) <= gpu.smem_per_sm for how in tiles)
            assert (tiles[0].stages, tiles[7].stages, tiles[15].stages) in ((4, 3, 3), (4, 3, 2))


@pytest.mark.parametrize("gpu", [A100, A10, H200], ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("k", [128, 4096, 28672])
def test_stripes_fit_and_leave_no_sm_idle(k, gpu):
    for scheme in (*W2416.examples(), W2416(2.6)):  # eight sets of scales in a record
        share = scheme.shares(k)
        shape = Shape(4096, k, share.parts, share.two, share.four, torch.float16)
        depth = [stripe.stages(m, shape, gpu) for m in range(1, 17)]
        assert min(depth) >= 2 and max(depth) == 4 and depth == sorted(depth, reverse=True)
        if gpu is not A10 or shape.sets < 7:  # a 4-bit record is then no larger than a 2-bit one
            assert depth == ([4] * 2 + [3] * 6 + [2] * 8 if gpu is A10 else [4] * 16)
        for m in range(1, 17):
            assert stripe.smem_bytes(m, shape, gpu) <= gpu.smem_per_block
        blocks = stripe.partition(shape, gpu.sms).blocks
        assert blocks == (gpu.sms if k > 128 else 32)


def test_wrong_activations_are_refused():
    shape = (576, 1, 27, 9)  # n; parts, and groups of 2 and 4 bits of a part
    records = torch.empty(1, 4, dtype=torch.int32)

    def call(x, half=True):
        return plan.linear(x, records, records[0], None, *shape, 16, half)

    with pytest.raises(UserError, match=r"float32.*float16 and bfloat16"):
        call(torch.zeros(1, 576))
    with pytest.raises(UserError, match=r"bfloat16, scales of this layer .*float16.*Load"):
        call(torch.zeros(1, 576).bfloat16())
    with pytest.raises(ValueError, match="600 columns, the layer takes 576"):
        call(torch.zeros(1, 600).half())
    assert call(torch.zeros(0, 576).half()).shape == (0, 576)


def parameters_of(kernel):
    """How many a kernel's text declares."""
    text = (Path(plan.__file__).parent / f"{kernel}.cuh").read_text()
    return re.search(rf"w2416_{kernel}\(([^)]*)\)", text)[1].count(",") + 1


class Loaded:
    """A kernel whose launches are written down, not run."""

    def __init__(self, name, launched):
        self.name, self.launched = name, launched

    def load(self, index):
        return self

    def launch(self, grid, threads, arguments, smem=0, cluster=1, pdl=False):
        self.launched.append((self.name, grid, threads, arguments, smem, cluster, pdl))


def test_launches_of_every_m(monkeypatch, on_the_cpu):
    launched = []
    sums, locks = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(plan, "gpu", lambda index: H200)
    monkeypatch.setattr(plan, "decode_kernel", lambda dtype, m, bands: Loaded(m, launched))
    monkeypatch.setattr(plan, "panel_kernel", lambda dtype: Loaded("panel", launched))
    monkeypatch.setattr(batch, "order_kernel", lambda: Loaded("order", launched))
    monkeypatch.setattr(batch, "batch_kernel", lambda *instance: Loaded("batch", launched))
    monkeypatch.setattr(batch.tensor_map, "of_rows", lambda *sizes: sizes[1:])
    monkeypatch.setattr(batch.workspace, "of_stream", lambda *sizes: (sums, locks))
    packed = CudaOp(SCHEME, layer(6144)).packed
    crowded = dataclasses.replace(packed.shape, longest=20000)  # too many for shared memory
    many = ["order", "batch"]
    cases = [(1, [8]), (8, [8]), (9, [16]), (17, many), (40, many), (700, many)]
    cases = [(*case, packed.shape) for case in cases]
    # where a ring of one token has room for the lists and a ring of 16 has not, all m take panels
    between = next(i for i in range(1, 999) if not tile.fits(6144, 4096, i, H200))
    assert between > 8 and tile.pick_tile(1, 6144, 4096, between, H200).stages >= 2
    shape = dataclasses.replace(packed.shape, longest=between)
    assert all(plan.Plan(0, shape)._decode(m, False) is None for m in (1, 8, 16))
    for m, names, shape in [*cases, (3, ["panel"], crowded), (65, ["panel"], crowded)]:
        how = plan.Plan(0, shape)
        for gated in (False, True):
            launched.clear()
            x = torch.zeros(m, 576, dtype=torch.bfloat16)
            out = torch.zeros(m, 6144 // (1 + gated), dtype=torch.bfloat16)
            how.path(m, gated)(x, packed.records, packed.columns, None, out)
            assert [each[0] for each in launched] == names
            for name, grid, threads, arguments, smem, cluster, pdl in launched:
                kernel = "decode" if isinstance(name, int) else name
                assert len(arguments) == parameters_of(kernel)
                if kernel == "decode":
                    assert (threads, cluster, pdl) == (tile.THREADS, 2, True) and grid == 132
                    assert arguments[-1] == gated and arguments[-5] == packed.records.shape[1]
                    stages, stage = arguments[-3:-1]
                    assert smem == 256 + stages * stage + 1024 * name + tile.SPREAD_BYTES
                elif kernel == "order":
                    inputs = arguments[5]
                    assert grid[0] * threads * 8 >= inputs >= 576 and inputs % 128 == 0 and pdl
                elif kernel == "batch":
                    stages, stage, _, gates = arguments[-4:]
                    assert gates == gated and pdl and cluster == 1
                    assert smem == 1024 + stages * stage + tiles.TEAMS * tiles.TURN_BYTES
                    assert arguments[1][:2] == (m, inputs)
                else:
                    assert grid == (packed.shape.tiles, 96) and smem == plan.PANEL_SMEM


def test_stripes_of_every_m(monkeypatch, on_the_cpu):
    launched, asked = [], []

    def workspace(index, sums, locks):
        asked.append((sums, locks))
        return torch.empty(0), torch.empty(0)

    monkeypatch.setattr(plan, "gpu", lambda index: A10)
    monkeypatch.setattr(plan, "panel_kernel", lambda dtype: Loaded("panel", launched))
    monkeypatch.setattr(stripe, "stripe_kernel", lambda dtype, m: Loaded(m, launched))
    monkeypatch.setattr(stripe.workspace, "of_stream", workspace)
    packed = StripeOp(SCHEME, layer(6144)).packed
    how = plan.Plan(0, packed.shape, striped=True)
    for m, names in ((1, [8]), (8, [8]), (9, [16]), (40, [16, 16, 8]), (65, ["panel"])):
        launched.clear()
        x, out = (torch.zeros(m, size, dtype=torch.bfloat16) for size in (576, 6144))
        how.path(m, False)(x, packed.records, packed.columns, None, out)
        assert [each[0] for each in launched] == names
        for name, grid, threads, arguments, smem, cluster, pdl in launched:
            if name == "panel":
                continue
            assert len(arguments) == parameters_of("stripe")
            # 48 tiles of 4 slices: a stripe is not shorter than the ring
            assert (grid, threads, cluster, pdl) == (48, stripe.THREADS, 1, False)
            rows, *_, words, _, stages = arguments[7:]
            assert words == packed.records.shape[1] and rows in (m, 16, 8)
            each = stripe.stage_bytes(rows, packed.shape)
            assert smem == stages * each + tile.SPREAD_BYTES <= A10.smem_per_block
    # every stripe may leave a tile's sums behind
    assert set(asked) == {(72 * 128 * 16, 72)}
