"""w4ax's op `stripe` without a GPU: what it refuses, gives back, joins and gates; how it would
launch."""

import pytest
import torch
from torch.nn.functional import silu

from billfish.errors import UserError
from billfish.kernels import jit, stripes
from billfish.kernels.device import Gpu
from billfish.schemes.base import Reference
from billfish.schemes.gated import apart
from billfish.schemes.w4ax import FAMILY, W4AX
from billfish.schemes.w4ax.cuda import arrange, stripe
from billfish.schemes.w4ax.cuda.op import CudaOp
from billfish.schemes.w4ax.cuda.stripe_op import StripeOp
from billfish.schemes.w4ax.cuda.stripe_plan import linear

A100 = Gpu(0, "NVIDIA A100", "sm_80", 108, 163 * 1024, 164 * 1024, 40 * 2**20)
SCHEME, CARD = W4AX(64, True, "fmpq", 0.5, True), torch.device("cuda")


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The op arranges here, and its products are the oracle's."""

    def product(op, x, bias=None, gated=False):
        y = Reference(op.scheme, op.canonical())(x, bias)
        if not gated:
            return y
        gate, up = apart(y, op.run).chunk(2, -1)
        return silu(gate) * up

    monkeypatch.setattr(StripeOp, "_prepare", lambda op: None)
    monkeypatch.setattr(StripeOp, "__call__", product)


def layer(n, k=576, seed=0, scheme=SCHEME):
    """Layers of one seed have inputs in the same order."""
    tensors = scheme.random_tensors(n, k, torch.bfloat16, torch.Generator().manual_seed(n + seed))
    if scheme.mixed:
        source = torch.Generator().manual_seed(seed)
        tensors["input_order"] = torch.randperm(k, generator=source).int()
        tensors["input_bits"] = scheme.block_bits(torch.rand(k // scheme.block, generator=source))
    return tensors


def same(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_refusals(monkeypatch):
    assert FAMILY.ops[:2] == (CudaOp, StripeOp) and not StripeOp.by_name
    assert "model.to('cuda')" in StripeOp.refuses(SCHEME, 64, 512, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "`billfish doctor`" in StripeOp.refuses(SCHEME, 64, 512, CARD)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for found in ((7, 5), (8, 6), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, f=found: f)
        reason, here = StripeOp.refuses(SCHEME, 64, 2**17, CARD), f"{found[0]}.{found[1]}"
        assert reason is None if found >= (8, 0) else "8.0" in reason and here in reason
        reason = CudaOp.refuses(SCHEME, 64, 512, CARD)
        assert reason is None if found == (9, 0) else 'op="stripe"' in reason and here in reason

    def missing():
        raise UserError("not here")

    monkeypatch.setattr(jit, "version", missing)
    assert "billfish[cuda]" in StripeOp.refuses(SCHEME, 64, 512, CARD)


@pytest.mark.parametrize("scheme", [*W4AX.examples(), SCHEME], ids=str)
def test_canonical_tensors_come_back(scheme, on_the_cpu):
    tensors = layer(80, 1024, scheme=scheme)
    op = StripeOp(scheme, tensors)
    same(op.canonical(), tensors)
    assert (op.n, op.device.type) == (80, "cpu")
    assert op.nbytes() >= op.packed.records.nbytes


def test_four_bits_come_first(on_the_cpu):
    op, tensors = StripeOp(SCHEME, layer(64)), layer(64)
    bits = tensors["input_bits"]
    assert (op.mix.fours, op.mix.halves) == (4, 4) and int((bits == 4).sum()) == 4
    assert torch.equal(bits[op.blocks.places], torch.tensor([4] * 4 + [8] * 5, dtype=torch.uint8))
    weight = SCHEME.whole_weight(tensors).view(64, 9, 64)[:, op.blocks.places].reshape(64, -1)
    inner = {name: each for name, each in arrange.unpack(op.packed).items()}
    assert torch.equal(W4AX(64).whole_weight(inner), weight)


def test_join(on_the_cpu):
    each = [layer(n) for n in (128, 64, 48)]
    ops = [StripeOp(SCHEME, tensors) for tensors in each]
    assert len({op.takes for op in ops}) == 1
    x = torch.randn(3, 576).bfloat16()
    before = [op(x) for op in ops]
    whole = StripeOp.join(ops)
    assert type(whole) is StripeOp and whole.n == 240
    assert torch.equal(whole(x), torch.cat(before, -1))
    for op, tensors in zip(ops, each, strict=True):
        assert op.packed.records.untyped_storage().data_ptr() == whole.packed.records.data_ptr()
        same(op.canonical(), tensors)
    assert StripeOp.join([StripeOp(SCHEME, layer(n)) for n in (48, 64)]) is None
    bits = layer(64)["input_bits"]
    for other in (layer(64, seed=1), dict(layer(64), input_bits=bits[bits.argsort()])):
        assert StripeOp.join([StripeOp(SCHEME, layer(64)), StripeOp(SCHEME, other)]) is None


@pytest.mark.parametrize("scheme", [W4AX(64), SCHEME, W4AX(64, False)], ids=str)
def test_gate(scheme, on_the_cpu):
    each = [layer(n, scheme=scheme) for n in (72, 72)]
    each[1] = {**each[1], "weight_packed": each[1]["weight_packed"].flip(0)}
    gated = StripeOp.gate([StripeOp(scheme, tensors) for tensors in each])
    x = torch.randn(3, 576).bfloat16()
    gate, up = (Reference(scheme, tensors)(x) for tensors in each)
    assert torch.equal(gated(x), silu(gate) * up)
    assert torch.equal(gated.both(x), torch.cat([gate, up], -1))
    for part, tensors in zip(gated.parts, each, strict=True):
        same(part.canonical(), tensors)


def test_stripes_fit_and_leave_no_sm_idle():
    for group, asymmetric in ((32, True), (64, False), (128, False)):
        shape = arrange.record_shape(group, 4096, 4096, asymmetric)
        for tokens in stripe.BANDS:
            assert stripe.smem_bytes(tokens, shape.record_bytes) <= stripes.MOST_SMEM
        for m in (1, 16, 64, 65, 1000):
            how = stripe.partition(m, shape, 40, A100.sms)
            assert how.blocks == A100.sms and how.m_tiles == -(-m // 64)
            assert how.heavy == (1 if m <= 64 else 2)  # COMET's weights where products take longer
    assert [stripe.tokens_of(m) for m in (1, 8, 9, 17, 33, 64, 65)] == [8, 8, 16, 32, 64, 64, 64]
    assert [stripe.quant_threads(k) for k in (1, 9, 64, 65, 1024)] == [32, 160, 1024, 1024, 1024]


def test_wrong_activations_are_refused():
    records, bases = torch.empty(1, 1, 4, dtype=torch.int32), torch.empty(64)
    more = (576, 9, 64, False, None, 64, 0, False)
    with pytest.raises(UserError, match=r"float32.*float16 and bfloat16"):
        linear(torch.zeros(1, 576), records, bases, None, *more)
    with pytest.raises(ValueError, match="512 columns, the layer takes 576"):
        linear(torch.zeros(1, 512).half(), records, bases, None, *more)
