"""w4a16_normed on the emulated GPU: the bits of the engine's norm and w4a16_decode one after the
other. And its launches, with a kernel that only looks at what it is given."""

import re
import struct
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cpp_compiler import needs_compiler
from emulated_launch import engine_norm
from test_emulated import INCLUDE, PACKAGE, compiled, layer, product  # noqa: F401
from thorough import every_third, some

from billfish.kernels import norm
from billfish.kernels.device import Gpu
from billfish.models.joined import Joined, norm_input
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda import normed, op, plan, tile
from billfish.schemes.w4a16.cuda.gated import interleaved
from billfish.schemes.w4a16.cuda.instances import KINDS
from billfish.schemes.w4a16.cuda.op import CudaOp, InvariantOp

SOURCE = PACKAGE / "schemes" / "w4a16" / "cuda" / "decode.cuh"
FP16, BF16 = torch.float16, torch.bfloat16
H200 = Gpu(0, "H200", "sm_90a", 132, 232448, 233472, 0)
EPS = 1e-5


@pytest.fixture(scope="module")
def rms_norm(tmp_path_factory):
    return engine_norm(tmp_path_factory.mktemp("small"))


def inputs(m, k, dtype):
    """hidden with zeros and an outlier, delta, weight."""
    source = torch.Generator().manual_seed(m + k)
    hidden = (torch.randn(m, k, generator=source) * 3).to(dtype)
    hidden[-1, k // 3], hidden[0, : k // 2] = 3000, -0.0
    delta = torch.randn(m, k, generator=source).to(dtype)
    return hidden, delta, (torch.rand(k, generator=source) + 0.5).to(dtype)


def together(compiled, scheme, tensors, hidden, delta, weight, bias, sms, seed, **more):  # noqa: F811
    given = torch.frombuffer(
        bytearray(struct.pack("<if", norm.threads(len(weight)), EPS)), dtype=torch.uint8
    )
    rest = {"norm": (delta, weight, given), **more}
    return product(compiled, "normed", scheme, tensors, hidden, bias, sms, seed, **rest)


# n, k, scheme, dtype, SMs, gated. One k tile: a CTA has no inputs; odd numbers of k tiles, k that
# ends within one; CTAs without bands; one pass and several; norms by 1 to 32 warps.
CASES = [
    (65, 104, W4A16(4, -1), BF16, 4, False),
    (250, 640, W4A16(4, 128), FP16, 4, False),
    (600, 384, W4A16(4, 32, False), FP16, 4, False),
    (1100, 1096, W4A16(4, -1, False), BF16, 4, False),
    (70, 2048, W4A16(4, 64), BF16, 8, False),
    (144, 640, W4A16(4, 64, False), FP16, 4, True),
    (1040, 4096, W4A16(4, 128), BF16, 4, True),
    (64, 4184, W4A16(4, -1), FP16, 4, False),
    (65, 8192, W4A16(4, 128), FP16, 4, False),
    (370, 1096, W4A16(4, -1, False), FP16, 10, False),  # clusters of four
]


@needs_compiler
@pytest.mark.parametrize(
    "case", some(CASES, 0, 1, 2, 3, 5, 7, 8, 9), ids=lambda case: f"{case[0]}x{case[1]}"
)
def test_bits_are_those_of_norm_and_product(case, compiled, rms_norm):  # noqa: F811
    n, k, scheme, dtype, sms, gated = case
    tensors, _, bias = layer(n, k, scheme, dtype)
    bias = None if gated else bias
    if gated:
        tensors = interleaved(scheme, [tensors])
    for m in (1, 2):
        hidden, more, weight = inputs(m, k, dtype)
        for delta in (None, more):
            summed = hidden.clone()
            x = rms_norm(summed, delta, weight, EPS)
            wanted = product(compiled, "decode", scheme, tensors, x, bias, sms, 1, gated=gated)
            y, total = together(
                compiled, scheme, tensors, hidden, delta, weight, bias, sms, m, gated=gated
            )
            assert y.isfinite().all() and torch.equal(y, wanted), (m, delta is None)
            untouched = torch.full_like(total.view(torch.int16), -2)
            assert torch.equal(
                total.view(torch.int16),
                untouched if delta is None else summed.view(torch.int16),
            )


MISTAKES = [
    ("decode", r"barrier_wait\(ready, 0\);", ";"),
    ("norm", r"  sync\(\);", ";"),
    ("norm", r"at\[i\] / 32\)", "at[i] / 32 % 8)"),
    ("norm", r"row\[i\] == blockIdx\.x", "row[i] == 0"),
    ("norm", r"first \+ at < chunks \?", "true ?"),
]


@needs_compiler
@pytest.mark.parametrize("mistake", every_third(MISTAKES), ids=lambda mistake: mistake[1])
def test_the_emulator_sees_mistakes(mistake, compiled, rms_norm):  # noqa: F811
    where, pattern, replacement = mistake
    path = SOURCE if where == "decode" else INCLUDE / f"{where}.cuh"
    broken, count = re.subn(pattern, replacement, path.read_text())
    assert count, "the text has changed: mend the pattern"
    n, k, scheme, m = 130, 8184, W4A16(4, -1), 2  # a warp reads the other ones' sums at once
    tensors, _, _ = layer(n, k, scheme, FP16)
    hidden, delta, weight = inputs(m, k, FP16)
    summed = hidden.clone()
    x = rms_norm(summed, delta, weight, EPS)
    wanted = product(compiled, "decode", scheme, tensors, x, None, 4, 1)
    for seed in range(3):
        try:
            y, total = together(
                compiled,
                scheme,
                tensors,
                hidden,
                delta,
                weight,
                None,
                4,
                seed,
                text=(path.name, broken),
            )
        except AssertionError:
            return  # the emulator stopped it
        if not (torch.equal(y, wanted) and torch.equal(total, summed)):
            return
    pytest.fail("nothing seen")


# -- the op, with a kernel that only looks at what it is given


@pytest.fixture
def given(monkeypatch):
    """The last launch: its arguments by the names of the kernel's parameters."""
    text = re.search(r"\nw4a16_normed\((.*?)\) \{", SOURCE.read_text(), re.DOTALL)[1]
    names, last = [each.split()[-1] for each in text.split(",")], {}

    def launch(bands, wanted, blocks, threads, arguments, smem, cluster, pdl):
        assert (threads, cluster, pdl) == (tile.threads(bands), wanted, True)
        last.clear()
        last.update(zip(names, arguments, strict=True), blocks=blocks, smem=smem)

    def kernel(kind, dtype, bands, cluster):
        loaded = SimpleNamespace(launch=partial(launch, bands, cluster))
        return SimpleNamespace(load=lambda index: loaded)

    def planned(index, n, k, kind, dtype):
        return SimpleNamespace(normed=normed.launches(0, n, k, KINDS[kind], dtype))

    monkeypatch.setattr(normed, "normed_kernel", kernel)
    monkeypatch.setattr(CudaOp, "_prepare", lambda op: None)
    for module in (op, plan):
        monkeypatch.setattr(module, "plan", planned)
    for module in (op, normed):
        monkeypatch.setattr(module, "gpu", lambda index: H200)
    return last


def op_of(scheme, n, k, dtype=FP16, kind=CudaOp):
    return kind(scheme, scheme.random_tensors(n, k, dtype, torch.Generator().manual_seed(n)))


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_what_is_launched(dtype, given):
    k, scheme, bias = 640, W4A16(4, 128), torch.ones(192, dtype=dtype)
    joined = CudaOp.join([op_of(scheme, n, k, dtype) for n in (128, 64)])
    gated = CudaOp.gate([op_of(scheme, 96, k, dtype) for _ in range(2)])
    for multiply, whole, width in (
        (joined, joined, 192),
        (Joined(joined, bias), joined, 192),
        (gated, gated.whole, 96),
    ):
        for m in (1, 2):
            hidden, more, weight = inputs(m, k, dtype)
            before = hidden.clone()
            for delta in (None, more):
                made, total = norm_input(multiply, hidden, delta, weight, EPS)
                y = multiply(made)
                assert y.shape == (m, width) and y.dtype == dtype
                how = tile.pick_normed(m, 192, 5, whole.records.shape[-1] * 4, H200)
                assert (total is hidden) == (delta is None) and total.shape == hidden.shape
                assert given == {
                    "records": whole.records.data_ptr(),
                    "hidden": hidden.data_ptr(),
                    "delta": 0 if delta is None else delta.data_ptr(),
                    "weight": weight.data_ptr(),
                    "summed": total.data_ptr(),
                    "threads": norm.threads(k),
                    "eps": given["eps"],
                    "bias": bias.data_ptr() if isinstance(multiply, Joined) else 0,
                    "out": y.data_ptr(),
                    "m": m,
                    "n": 192,
                    "k": k,
                    "k_tiles": 5,
                    "stages": how.stages,
                    "gated": multiply is gated,
                    "blocks": how.blocks,
                    "smem": how.asked,
                }
                assert given["eps"].nbytes == 4 and abs(given["eps"] - EPS) < 1e-10
            assert torch.equal(hidden, before)


def test_what_is_normed_apart(given):
    k, scheme = 256, W4A16(4, 32)
    hidden, delta, weight = inputs(2, k, FP16)
    good = op_of(scheme, 64, k)
    assert good.norm_input(hidden, delta, weight, EPS) is not None
    for refused in (
        (hidden, delta, weight.float()),
        (hidden.bfloat16(), delta.bfloat16(), weight.bfloat16()),  # not the type of the scales
        (hidden.T.contiguous().T, delta, weight),
        (hidden, delta[:1], weight),
        (hidden[:, :128].contiguous(), delta[:, :128].contiguous(), weight[:128]),
        (hidden[:0], delta[:0], weight),
        (*inputs(3, k, FP16)[:2], weight),
        (hidden.clone().requires_grad_(), delta, weight),
    ):
        assert good.norm_input(*refused, EPS) is None
    ordered = W4A16(4, 32, has_g_idx=True)
    tensors = {
        **scheme.random_tensors(64, k, FP16, torch.Generator()),
        "weight_g_idx": torch.arange(k, dtype=torch.int32).flip(0) // 32,
    }
    for other in (
        op_of(scheme, 64, k, kind=InvariantOp),
        op_of(W4A16(8, 32), 64, k),
        CudaOp(ordered, tensors),
    ):
        assert other.norm_input(hidden, delta, weight, EPS) is None
    for wide in (8320, 36):
        hidden, delta, weight = inputs(1, wide, FP16)
        assert op_of(W4A16(4, -1), 64, wide).norm_input(hidden, delta, weight, EPS) is None
