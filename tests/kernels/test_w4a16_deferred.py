"""w4a16_deferred on the emulated GPU: products after a deferred norm, and before one, whose sums
with the hidden states have the bits of a product and an addition."""

import re
import struct
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cpp_compiler import needs_compiler
from test_compile import complaints
from test_emulated import INCLUDE, ONE_ROUNDING, PACKAGE, compiled, layer, product  # noqa: F401
from thorough import also, every_third, some
from torch.nn.functional import silu

from billfish.kernels.deferred import PART, SCALE_BYTES, Norm, Stream
from billfish.kernels.device import Gpu
from billfish.models.joined import Joined, defers
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda import deferred as launched
from billfish.schemes.w4a16.cuda import instances, op, plan, tile
from billfish.schemes.w4a16.cuda.gated import apart, interleaved
from billfish.schemes.w4a16.cuda.op import CudaOp, InvariantOp

FP16, BF16 = torch.float16, torch.bfloat16
EPS = 1e-5
# n, k, scheme, dtype, SMs, tokens; as in test_emulated.py: blocks of one band, of two, of four in
# several passes, clusters of four; n that ends within a part, k that ends within a tile.
CASES = [
    (65, 104, W4A16(4, -1), BF16, 4, (1, 2, 16)),
    (250, 640, W4A16(4, 128), FP16, 4, (1, 2, 3, 8, 9, 16)),
    (600, 384, W4A16(4, 32, False), FP16, 4, (1, 5, 13)),
    (70, 5120, W4A16(4, 128), FP16, 4, (2, 9)),
    (370, 1096, W4A16(4, -1, False), BF16, 10, (1, 7, 16)),
    (1100, 128, W4A16(4, 64), BF16, 4, (1, 16)),
]
name = lambda case: f"{case[0]}x{case[1]}"  # noqa: E731


def run(compiled, scheme, tensors, x, bias, sms, seed, after=None, before=None, **more):  # noqa: F811
    """`after`: squares of x's rows and the norm; `before`: hidden states and the norm."""
    squares, norm = after or (None, Norm(None, 1.0, 0.0))
    hidden, following = before or (None, Norm(None, 1.0, 0.0))
    numbers = bytearray(struct.pack("<ff", norm.eps, norm.unit))
    given = (squares, torch.frombuffer(numbers, dtype=torch.uint8), hidden, following.weight)
    return product(compiled, "deferred", scheme, tensors, x, bias, sms, seed, norm=given, **more)


def parts(hidden):
    """Sums of squares of PART numbers, in the kernel's order: r and r + 8, then a tree."""
    m, width = hidden.shape
    squares = torch.nn.functional.pad(hidden.float().square(), (0, -width % PART)).view(m, -1, PART)
    for half in (8, 4, 2, 1):
        squares = squares[..., :half] + squares[..., half:]
    return squares[..., 0]


def hidden_states(m, k, dtype):
    """Hidden states with an outlier, what a product makes of them for the next, and the norm."""
    source = torch.Generator().manual_seed(m + k)
    hidden = (torch.randn(m, k, generator=source) * 3).to(dtype)
    hidden[-1, k // 3], hidden[0, : k // 2] = 3000, -0.0
    norm = Norm.of((torch.rand(k, generator=source) * 5 + 0.5).to(dtype), EPS)
    return hidden, hidden * norm.weight, parts(hidden), norm


def normed(hidden, norm):
    """In fp64, of the weights as they are."""
    x = hidden.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * norm.weight * norm.unit


@needs_compiler
@pytest.mark.parametrize("case", some(CASES, 0, 1, 4), ids=name)
def test_products_after_a_norm(case, compiled):  # noqa: F811
    n, k, scheme, dtype, sms, tokens = case
    tensors, _, bias = layer(n, k, scheme, dtype)
    weights = scheme.dequantize(tensors).double().T
    hidden, x, squares, norm = hidden_states(16, k, dtype)
    wanted = normed(hidden, norm) @ weights + bias.double()
    found = [
        run(compiled, scheme, tensors, x[:m], bias, sms, m, (squares[:m], norm)) for m in tokens
    ]
    for m, y in zip(tokens, found, strict=True):
        # x was rounded when it was multiplied by the norm's weights, and y
        error = (y.double() - wanted[:m]).norm(dim=1) / wanted[:m].norm(dim=1)
        assert error.max() < 1.5 * ONE_ROUNDING[dtype], m
        assert torch.equal(y, found[-1][:m]), "a row depends on the others"


@needs_compiler
@pytest.mark.parametrize("case", [(144, 640, FP16, 4), (608, 256, BF16, 4)], ids=name)
def test_gated(case, compiled):  # noqa: F811
    n, k, dtype, sms = case
    scheme = W4A16(4, 64)
    tensors, _, _ = layer(n, k, scheme, dtype)
    tensors = interleaved(scheme, [tensors])
    weights = scheme.dequantize(tensors).double().T
    for m in (1, 11):
        hidden, x, squares, norm = hidden_states(m, k, dtype)
        y = run(compiled, scheme, tensors, x, None, sms, m, (squares, norm), gated=True)
        gate, up = apart(normed(hidden, norm) @ weights).chunk(2, -1)
        wanted = silu(gate) * up
        assert y.shape == wanted.shape and y.isfinite().all()
        assert ((y.double() - wanted).norm() / wanted.norm()) < 3 * ONE_ROUNDING[dtype]


@needs_compiler
@pytest.mark.parametrize("case", some(CASES, 1, 2, 4), ids=name)
def test_products_before_a_norm(case, compiled):  # noqa: F811
    """The bits of the product and the engine's norm: rounded, then added; and its squares."""
    n, k, scheme, dtype, sms, tokens = case
    tensors, x, bias = layer(n, k, scheme, dtype)
    hidden, _, _, norm = hidden_states(16, n, dtype)
    for m in tokens:
        delta = product(compiled, "decode", scheme, tensors, x[:m], bias, sms, 1)
        total = hidden[:m] + delta
        before = hidden[:m], norm
        y, summed, squares = run(compiled, scheme, tensors, x[:m], bias, sms, m, before=before)
        assert torch.equal(summed, total), m
        assert torch.equal(y, total * norm.weight), m
        assert torch.equal(squares, parts(total)), m


MISTAKES = [
    ("deferred", r"sum_over<32, 4>\(square\)", "sum_over<32, 8>(square)"),
    ("deferred", r"unit \* norm_scale", "norm_scale"),
    ("deferred", r"token \+= kMathWarps", "token += 2 * kMathWarps"),
    ("teams", r"\(kTogether \? block \* 8 : token\) >= m", "token + 8 >= m"),
]


@needs_compiler
@pytest.mark.parametrize("mistake", every_third(MISTAKES), ids=lambda mistake: mistake[1])
def test_the_emulator_sees_mistakes(mistake, compiled):  # noqa: F811
    where, pattern, replacement = mistake
    path = INCLUDE / f"{where}.cuh"
    broken, count = re.subn(pattern, replacement, path.read_text())
    assert count, "the text has changed: mend the pattern"
    scheme, dtype, m = W4A16(4, 128), FP16, 16
    tensors, _, _ = layer(250, 640, scheme, dtype)
    _, x, squares, norm = hidden_states(m, 640, dtype)
    hidden, _, _, following = hidden_states(m, 250, dtype)
    given = (scheme, tensors, x, None, 4)
    wanted = run(compiled, *given, 1, (squares, norm), (hidden, following))
    for seed in range(3):
        try:
            found = run(
                compiled,
                *given,
                seed,
                (squares, norm),
                (hidden, following),
                text=(path.name, broken),
            )
        except AssertionError:
            return  # the emulator stopped it
        if not all(map(torch.equal, found, wanted)):
            return
    pytest.fail("nothing seen")


# -- machine code, and the op with a kernel that only looks at what it is given

H200 = Gpu(0, "H200", "sm_90a", 132, 232448, 233472, 0)


@pytest.mark.parametrize(
    ("group", "zeros", "dtype", "least"),
    [
        (128, False, FP16, 16),
        also(128, False, FP16, 1),
        *(also(group, zeros, FP16, 1) for group in (64, 32) for zeros in (False, True)),
        also(128, False, BF16, 1),
    ],
    ids=str,
)
def test_it_compiles_without_spills(group, zeros, dtype, least):
    """16 tokens need the most registers."""
    kind = instances.Kind("decode", group, zeros, 1, dtype)
    sizes = [t for t in tile.TOKENS if t >= least and (t < 16 or group > 32)]
    made = [instances.deferred_kernel(kind, dtype, t, *each) for t in sizes for each in tile.SHARES]
    found = {kernel.program.name: complaints(kernel.program, "sm_90a") for kernel in made}
    assert len(found) == len(made) and not any(found.values()), found


@pytest.fixture
def given(monkeypatch):
    """The last launch: its arguments by the names of the kernel's parameters."""
    source = PACKAGE / "schemes" / "w4a16" / "cuda" / "decode.cuh"
    text = re.search(r"\nw4a16_deferred\((.*?)\) \{", source.read_text(), re.DOTALL)[1]
    names, last = [each.split()[-1] for each in text.split(",")], {}

    def launch(tokens, bands, wanted, blocks, threads, arguments, smem, cluster, pdl):
        assert (threads, cluster, pdl) == (tile.threads(bands), wanted, True)
        last.clear()
        last.update(zip(names, arguments, strict=True), blocks=blocks, smem=smem, tokens=tokens)

    def kernel(kind, dtype, tokens, bands, cluster):
        loaded = SimpleNamespace(launch=partial(launch, tokens, bands, cluster))
        return SimpleNamespace(load=lambda index: loaded)

    class Planned(plan.Plan):
        def __init__(self, index, n, k, kind, dtype):
            self.n, self.k, self.kind, self.dtype = n, k, instances.KINDS[kind], dtype
            self.k_tiles, self.gpu, self.cuts = -(-k // 128), H200, {}

    monkeypatch.setattr(launched, "deferred_kernel", kernel)
    monkeypatch.setattr(CudaOp, "_prepare", lambda op: None)
    for module in (op, plan):
        monkeypatch.setattr(module, "plan", Planned)
    for module in (op, launched):
        monkeypatch.setattr(module, "gpu", lambda index: H200)
    monkeypatch.setattr(op, "index_of", lambda device: 0)
    return last


def op_of(scheme, n, k, dtype=FP16, kind=CudaOp):
    return kind(scheme, scheme.random_tensors(n, k, dtype, torch.Generator().manual_seed(n)))


@pytest.mark.parametrize("m", [1, 2, 5, 16])
def test_what_is_launched(m, given):
    k, scheme, bias = 640, W4A16(4, 128), torch.ones(192, dtype=FP16)
    joined = CudaOp.join([op_of(scheme, n, k) for n in (128, 64)])
    gated = CudaOp.gate([op_of(scheme, 96, k) for _ in range(2)])
    hidden, x, squares, norm = hidden_states(m, k, FP16)
    stream = Stream(hidden, x, squares, norm)
    for multiply, whole, width in (
        (Joined(joined, bias), joined, 192),
        (gated, gated.whole, 96),
    ):
        assert defers(multiply, m, FP16) and not defers(multiply, 17, FP16)
        y = multiply(stream)
        how = tile.pick_tile(m, 192, k, whole.records.shape[-1] * 4, H200, SCALE_BYTES)
        assert y.shape == (m, width) and y.dtype == FP16
        assert given == {
            "records": whole.records.data_ptr(),
            "x": x.data_ptr(),
            "squares": squares.data_ptr(),
            "eps": given["eps"],
            "unit": norm.unit,
            "bias": bias.data_ptr() if isinstance(multiply, Joined) else 0,
            "out": y.data_ptr(),
            **dict.fromkeys(("hidden", "weight", "left"), 0),
            "m": m,
            "n": 192,
            "x_k": k,
            "k_tiles": 5,
            "stages": how.stages,
            "gated": multiply is gated,
            "blocks": how.blocks,
            "smem": how.asked,
            "tokens": how.tokens,
        }
        assert given["eps"].nbytes == given["unit"].nbytes == 4 and abs(given["eps"] - EPS) < 1e-10
    down = op_of(scheme, k, 256)
    following = Norm.of(torch.rand(k).half(), EPS)
    down.add_to(stream, y := torch.ones(m, 256).half(), following)
    assert stream.norm is following
    written = {"out": x, "hidden": hidden, "weight": following.weight, "left": squares}
    assert {name: given[name] for name in written} == {
        name: tensor.data_ptr() for name, tensor in written.items()
    }
    assert (given["x"], given["squares"], given["n"], given["bias"]) == (y.data_ptr(), 0, k, 0)


def test_what_is_not_deferred(given):
    scheme, ordered = W4A16(4, 32), W4A16(4, 32, has_g_idx=True)
    assert op_of(scheme, 64, 256).defers(8, FP16)
    tensors = {
        **scheme.random_tensors(64, 256, FP16, torch.Generator()),
        "weight_g_idx": torch.arange(256, dtype=torch.int32).flip(0) // 32,
    }
    for refused in (
        op_of(scheme, 64, 256, kind=InvariantOp),
        op_of(W4A16(8, 32), 64, 256),
        op_of(W4A16(4, -1), 64, 36),
        CudaOp(ordered, tensors),
    ):
        assert not refused.defers(8, FP16)
    assert not op_of(scheme, 64, 256).defers(8, BF16)  # not the type of the scales
    assert not op_of(scheme, 64, 256).defers(9, FP16)  # 16 tokens with groups of 32 would spill
    assert op_of(W4A16(4, 64), 64, 256).defers(9, FP16)
