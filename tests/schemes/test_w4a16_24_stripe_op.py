"""w4a16_24's op `stripe` without a GPU: what it refuses, gives back and joins; and all that it does
for m tokens, with its kernels' own text on the emulated GPU (tests/kernels/emulator)."""

from types import SimpleNamespace

import pytest
import torch
from cpp_compiler import needs_compiler
from emulated_launch import Emulated, library

from billfish.errors import UserError
from billfish.kernels import jit, striped, workspace
from billfish.kernels.device import Gpu
from billfish.kernels.stripes import Stripes
from billfish.schemes.w4a16_24 import FAMILY, W4A16Sparse
from billfish.schemes.w4a16_24.cuda import arrange, stripe, stripe_op, stripe_plan
from billfish.schemes.w4a16_24.cuda.op import CudaOp
from billfish.schemes.w4a16_24.cuda.stripe_op import StripeOp

A100 = Gpu(0, "NVIDIA A100", "sm_80", 108, 163 * 1024, 164 * 1024, 40 * 2**20)
SCHEME, CARD = W4A16Sparse(64), torch.device("cuda")
FP16, BF16 = torch.float16, torch.bfloat16
K = 192


def layer(n, k=K, scheme=SCHEME, dtype=FP16, seed=0):
    return scheme.random_tensors(n, k, dtype, torch.Generator().manual_seed(n + k + seed))


def same(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


class Kernel(Emulated):
    """A kernel without programmatic dependent launch, and a record of what was launched."""

    gpu = SimpleNamespace(index=-1, sms=3)

    def __init__(self, libraries, name, launched):
        super().__init__(None, name)
        self.libraries, self.launched = libraries, launched

    def launch(self, grid, block, args, smem=0, cluster=1, pdl=False):
        assert not pdl
        self.library = self.libraries[self.name]
        self.launched.append(self.name.partition("<")[0].rpartition("_")[2])
        if "stripe" in self.name:
            self.launched[-1] = (int(self.name.split(",")[3]), args[6])  # tokens, m
        super().launch(grid, block, args, smem, cluster, True)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Of both sources: x and scales of one type, and of two."""
    panels = [stripe.panel_kernel(FP16, dtype, 64).program for dtype in (FP16, BF16)]
    striped_ones = [stripe.stripe_kernel(FP16, FP16, 64, t).program for t in (8, 16, 32, 64)]
    striped_ones += [stripe.stripe_kernel(FP16, BF16, 64, t).program for t in (8, 16)]
    striped_ones += [stripe.stripe_kernel(FP16, FP16, 128, 8).program]
    made = {}
    for programs in (panels, striped_ones):
        folder = tmp_path_factory.mktemp("stripe")
        found = library(folder, programs[0].source, programs, None, "-DDYNAMIC_SMEM")
        made |= {program.name: found for program in programs}
    return made


@pytest.fixture
def launched(libraries, monkeypatch):
    """The op runs here; what it launches."""
    names = []

    def emulated(original):
        def kernel(*arguments):
            name = original(*arguments).program.name
            return SimpleNamespace(load=lambda index: Kernel(libraries, name, names))

        return kernel

    def sums_and_locks(index, sums, locks):
        return torch.full((sums,), torch.nan), torch.zeros(locks, dtype=torch.int32)

    monkeypatch.setattr(stripe_op, "index_of", lambda device: -1)
    monkeypatch.setattr(stripe_plan, "stripe_kernel", emulated(stripe.stripe_kernel))
    monkeypatch.setattr(stripe_plan, "panel_kernel", emulated(stripe.panel_kernel))
    monkeypatch.setattr(workspace, "of_stream", sums_and_locks)
    stripe_plan.stripe_plan.cache_clear()
    yield names
    stripe_plan.stripe_plan.cache_clear()


@pytest.fixture
def unprepared(monkeypatch):
    monkeypatch.setattr(StripeOp, "_prepare", lambda op: None)


def test_refusals(monkeypatch):
    assert FAMILY.ops[:2] == (CudaOp, StripeOp) and not StripeOp.by_name
    assert "model.to('cuda')" in StripeOp.refuses(SCHEME, 64, 512, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "`billfish doctor`" in StripeOp.refuses(SCHEME, 64, 512, CARD)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for found in ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, f=found: f)
        reason, here = StripeOp.refuses(SCHEME, 64, 512, CARD), f"{found[0]}.{found[1]}"
        assert reason is None if found >= (8, 0) else "8.0" in reason and here in reason
        reason = CudaOp.refuses(SCHEME, 64, 512, CARD)
        assert reason is None if found == (9, 0) else 'op="stripe"' in reason and here in reason

    def missing():
        raise UserError("not here")

    monkeypatch.setattr(jit, "version", missing)
    assert "billfish[cuda]" in StripeOp.refuses(SCHEME, 64, 512, CARD)


@pytest.mark.parametrize("scheme", W4A16Sparse.examples(), ids=str)
def test_canonical_tensors_come_back(scheme, unprepared):
    tensors = layer(80, 320, scheme)
    op = StripeOp(scheme, tensors)
    same(op.canonical(), tensors)
    assert (op.n, op.device.type) == (80, "cpu")
    bits = 8 * op.nbytes() / (128 * 384)  # padded
    assert bits == 3 + 16 / arrange.record_group(scheme.group_size)


# m -> (tokens of the kernel, rows); panels beyond 8 slices of 64
LAUNCHES = [
    *((1, [(8, 1)]), (8, [(8, 8)]), (9, [(16, 9)]), (17, [(32, 17)]), (64, [(64, 64)])),
    (65, [(64, 64), (8, 1)]),
    (8 * 64 + 1, ["panel"]),
]


@needs_compiler
@pytest.mark.parametrize(("m", "wanted"), LAUNCHES, ids=lambda given: str(given))
def test_products(m, wanted, launched):
    tensors = layer(100)
    op = StripeOp(SCHEME, tensors)
    source = torch.Generator().manual_seed(m)
    x, bias = (torch.randn(*size, generator=source).half() for size in ((m, K), (100,)))
    exact = SCHEME.reference(tensors, x) + bias.double()
    y = op(x, bias)
    assert launched == wanted
    assert y.shape == (m, 100) and y.dtype == FP16
    assert (y.double() - exact).norm() / exact.norm() < 2**-10


@needs_compiler
def test_shapes_of_x(launched):
    """Leading dimensions, strides, addresses that are no multiple of 16, no token at all."""
    tensors = layer(100)
    op, x = StripeOp(SCHEME, tensors), torch.randn(6, K).half()
    y = op(x)
    assert torch.equal(op(x.view(2, 3, K)), y.view(2, 3, 100))
    assert torch.equal(op(x.T.contiguous().T), y)
    shifted = torch.empty(6 * K + 1, dtype=FP16)[1:].view(6, K)
    shifted.copy_(x)
    assert torch.equal(op(shifted), y)
    assert op(x[:0]).shape == (0, 100) and launched == [(8, 6)] * 4


@needs_compiler
@pytest.mark.parametrize("k", [1, 30, 201])
def test_any_number_of_inputs(k, launched):
    """The last four may be cut, and rows of x are padded to 16 bytes."""
    scheme = W4A16Sparse(-1)
    tensors, x = layer(70, k, scheme), torch.randn(5, k).half()
    y, exact = StripeOp(scheme, tensors)(x), scheme.reference(tensors, x)
    assert (y.double() - exact).norm() / exact.norm() < 2**-11 and launched == [(8, 5)]


@needs_compiler
def test_scales_of_another_type(launched):
    """Decoded weights would be rounded twice: slices of 16 tokens."""
    tensors = layer(70, dtype=BF16)
    op, x = StripeOp.__new__(StripeOp), torch.randn(40, K).half()
    op.scheme = SCHEME
    op.shape, op.records = arrange.pack(SCHEME, tensors)
    exact = SCHEME.reference(tensors, x)
    assert (op(x).double() - exact).norm() / exact.norm() < 2**-11
    assert launched == [(16, 16), (16, 16), (8, 8)]
    x = torch.randn(129, K).half()
    exact = SCHEME.reference(tensors, x)
    assert (op(x).double() - exact).norm() / exact.norm() < 2**-10
    assert launched[3:] == ["panel"]


@needs_compiler
def test_panels_follow_one_another(launched, monkeypatch):
    monkeypatch.setattr(stripe_plan, "PANEL_WEIGHTS", 2 * 64 * K)
    tensors = layer(300)
    op, x, bias = StripeOp(SCHEME, tensors), torch.randn(513, K).half(), torch.randn(300).half()
    exact = SCHEME.reference(tensors, x) + bias.double()
    assert (op(x, bias).double() - exact).norm() / exact.norm() < 2**-10
    assert launched == ["panel"] * 3


@needs_compiler
def test_join(launched):
    each = [layer(n) for n in (128, 64, 48)]
    ops, x = [StripeOp(SCHEME, tensors) for tensors in each], torch.randn(3, K).half()
    before = [op(x) for op in ops]
    whole = StripeOp.join(ops)
    assert type(whole) is StripeOp and whole.n == 240
    assert torch.allclose(whole(x), torch.cat(before, -1), rtol=1e-3, atol=1e-3)
    for op, tensors, y in zip(ops, each, before, strict=True):
        assert op.records.untyped_storage().data_ptr() == whole.records.data_ptr()
        assert torch.equal(op(x), y)
        same(op.canonical(), tensors)


def test_what_cannot_be_joined(unprepared):
    one = StripeOp(SCHEME, layer(64))
    assert StripeOp.join([StripeOp(SCHEME, layer(48)), one]) is None  # a band that is not full
    assert StripeOp.join([one, StripeOp(SCHEME, layer(64, 128))]) is None
    assert StripeOp.join([one, StripeOp(SCHEME, layer(64, dtype=BF16))]) is None
    assert StripeOp.join([one, StripeOp(W4A16Sparse(32), layer(64, K, W4A16Sparse(32)))]) is None
    assert StripeOp.join([one, StripeOp(SCHEME, layer(30))]).n == 94
    assert StripeOp.gate([one, StripeOp(SCHEME, layer(64))]) is None


def test_no_sm_is_idle():
    shape = arrange.record_shape(SCHEME, 4096, 4096, FP16)
    for bands in striped.BANDS.values():
        assert Stripes(shape.n, shape.k_tiles, bands, A100.sms).blocks == A100.sms


def test_wrong_activations_are_refused():
    op = StripeOp.__new__(StripeOp)
    op.scheme, (op.shape, op.records) = SCHEME, arrange.pack(SCHEME, layer(64))
    with pytest.raises(UserError, match=r"float32.*float16 and bfloat16"):
        op(torch.zeros(1, K))
    with pytest.raises(ValueError, match="512 columns, the layer takes 192"):
        op(torch.zeros(1, 512).half())
    with pytest.raises(ValueError, match="activations are on meta, the layer on cpu"):
        op(torch.zeros(1, K, device="meta").half())
    with pytest.raises(UserError, match=r"scales are .*float32.*Load the model"):
        StripeOp(SCHEME, layer(64, dtype=torch.float32))
