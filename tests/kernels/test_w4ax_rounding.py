"""w4ax_quant and w4ax_norm on the emulated GPU, launched by Rounding on the CPU's tensors: the bits
of activations.py, and of the engine's norm before it."""

import re
from types import SimpleNamespace

import pytest
import torch
from cpp_compiler import needs_compiler
from emulated_launch import PACKAGE, Emulated, engine_norm, library
from thorough import also, every_third, some
from torch.nn.functional import pad
from w4ax_layers import ordered

from billfish.kernels import norm
from billfish.models.joined import Joined, joined, norm_input, shared_op, side_by_side
from billfish.models.linear import QuantLinear
from billfish.schemes.w4ax import activations
from billfish.schemes.w4ax.activations import round_blocks, round_tokens
from billfish.schemes.w4ax.cuda import rounding
from billfish.schemes.w4ax.cuda.inputs import Inputs
from billfish.schemes.w4ax.cuda.instances import norm_kernel, quant_kernel
from billfish.schemes.w4ax.cuda.op import CudaOp
from billfish.schemes.w4ax.scheme import W4AX

SOURCE = PACKAGE / "schemes" / "w4ax" / "cuda" / "quant.cuh"
FP16, BF16 = torch.float16, torch.bfloat16
every_dtype = pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
EVERY = [
    kernel(dtype, mixed).program
    for kernel in (quant_kernel, norm_kernel)
    for dtype in (FP16, BF16)
    for mixed in (False, True)
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return library(tmp_path_factory.mktemp("quant"), SOURCE, EVERY, None, "-DDYNAMIC_SMEM")


@pytest.fixture(scope="module")
def rms_norm(tmp_path_factory):
    return engine_norm(tmp_path_factory.mktemp("small"))


@pytest.fixture
def round_on_cpu(monkeypatch, compiled):
    """Rounding on this machine, with another library if one is given."""

    def make(k, dtype, mixed, seed=1, made=compiled):
        def kernel(original):
            def load(index):
                found = Emulated(made, original(dtype, mixed).program.name)
                found.seed = seed
                return found

            return lambda dtype, mixed: SimpleNamespace(load=load)

        monkeypatch.setattr(rounding, "quant_kernel", kernel(quant_kernel))
        monkeypatch.setattr(rounding, "norm_kernel", kernel(norm_kernel))
        return rounding.Rounding(0, dtype, k, mixed)

    return make


def tokens(k, dtype):
    """Zeros, Inf, NaN, one huge outlier, numbers just between two bytes, subnormal ones."""
    x = torch.randn(9, k, generator=torch.Generator().manual_seed(k)).to(dtype)
    x[1] = 0
    x[2, k // 2], x[3, -1], x[4, 0] = torch.inf, torch.nan, -torch.inf
    x[5] *= 1e-3
    x[5, k - 1] = -6e4
    x[6] = (torch.arange(k) % 254 - 127) / 2
    x[6, 0] = 127 / 2 if k == 8 else x[6, 0]
    x[7] = torch.finfo(dtype).tiny
    return x


def mixed_inputs(k, block, rotated, plain=False):
    source = torch.Generator().manual_seed(k + block)
    order = torch.arange(k) if plain else torch.randperm(k, generator=source)
    bits = torch.where(torch.rand(k // block, generator=source) < 0.8, 4, 8).to(torch.uint8)
    bits[: 2 if len(bits) > 1 else 1] = torch.tensor([4, 8][: len(bits)], dtype=torch.uint8)
    tensors = {"input_order": order.int(), "input_bits": bits}
    return Inputs.of(tensors, rotated), tensors


def expected(x, tensors=None, rotated=False):
    if tensors is None:
        return round_tokens(x)
    return round_blocks(x[:, tensors["input_order"].long()], tensors["input_bits"], rotated)


def same(made, wanted):
    """Whether the kernel's bytes, scales and sums are those of the rule."""
    (inputs, pairs), (small, scale) = made, wanted
    m, k = small.shape
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    found = pairs[:m, :1].contiguous().view(torch.float32)
    return (
        torch.equal(inputs, ordered(pad(small, (0, -k % 16))))
        and torch.equal(pairs[:m, 1].long(), 128 * small.long().sum(-1))
        and torch.equal(found.nan_to_num(-1), scale.nan_to_num(-1))
    )


@needs_compiler
@every_dtype
@pytest.mark.parametrize("k", [8, 72, 576, 4096, 9216, 16416, 28672])
def test_activations(k, dtype, round_on_cpu):
    x = tokens(k, dtype)
    wanted = expected(x)
    assert wanted[1].isfinite()[:, 0].tolist() == [True, True, *[False] * 3, *[True] * 4]
    for seed in (1, 2):
        assert same(round_on_cpu(k, dtype, False, seed).quantize(x, 9, None), wanted)


# k, block, rotated, in order: one block, one unit a thread, several; every block size
MIXED = [
    (32, 32, True, False),
    (576, 32, True, False),
    (576, 64, False, False),
    (1536, 64, True, False),
    (4096, 128, True, False),
    (4096, 128, True, True),
    (14336, 128, False, True),
    (16416, 32, True, False),
    (28672, 128, True, False),
]


@needs_compiler
@every_dtype
@pytest.mark.parametrize(
    ("k", "block", "rotated", "plain"),
    [each if i % 2 == 0 else also(*each) for i, each in enumerate(MIXED)],
    ids=str,
)
def test_mixed_activations(k, block, rotated, plain, dtype, round_on_cpu):
    x = tokens(k, dtype)
    inputs, tensors = mixed_inputs(k, block, rotated, plain)
    assert (inputs.order is None) == plain
    assert all(torch.equal(inputs.canonical(k)[name], tensors[name]) for name in tensors)
    wanted = expected(x, tensors, rotated)
    for seed in (1, 2):
        assert same(round_on_cpu(k, dtype, True, seed).quantize(x, 9, inputs), wanted)


@needs_compiler
@every_dtype
@pytest.mark.parametrize("block", [None, 32, 64, 128])
@pytest.mark.parametrize("k", some([64, 128, 576, 4096, 8320, 16384], 0, 2, 3, 5))
def test_norms(k, block, dtype, round_on_cpu, rms_norm):
    """The engine's norm, then the rule: every bit, with and without a residual."""
    if block is not None and k % block:
        pytest.skip("no whole blocks")
    source = torch.Generator().manual_seed(k)
    hidden = (torch.randn(4, k, generator=source) * 3).to(dtype)
    hidden[1, k // 3], hidden[2] = 3000, 0
    delta = torch.randn(4, k, generator=source).to(dtype)
    delta[2], delta[3, 5] = 0, torch.nan
    weight = (torch.rand(k, generator=source) + 0.5).to(dtype)
    inputs, tensors = (None, None) if block is None else mixed_inputs(k, block, True)
    launch = round_on_cpu(k, dtype, block is not None)
    for more in (None, delta):
        mine, theirs = hidden.clone(), hidden.clone()
        x = rms_norm(theirs, more, weight, 1e-5)
        made = launch.normalize(mine, more, weight, 1e-5, inputs)
        assert torch.equal(mine.nan_to_num(-7), theirs.nan_to_num(-7))
        assert torch.equal(mine, hidden) == (more is None)
        assert same(made, expected(x, tensors, True))
        alone = launch.normalize(
            hidden[:1].clone(), None if more is None else more[:1], weight, 1e-5, inputs
        )
        assert torch.equal(alone[0], made[0][:1]), "a row depends on the others"


def test_threads():
    assert [rounding.threads(k) for k in (8, 4096, 14336, 16384, 16416, 28672)] == [
        *(32, 256, 896, 1024, 544, 896)
    ]
    assert [norm.threads(k) for k in (8, 4096, 8192, 8320, 16384)] == [32, 512, 1024, 544, 1024]


def test_names_say_whether_layers_round_alike():
    one, tensors = mixed_inputs(256, 64, True)
    again = Inputs.of({name: tensor.clone() for name, tensor in tensors.items()}, True)
    assert one.takes() == again.takes()
    bits = tensors["input_bits"].flip(0)
    others = [
        Inputs.of(tensors, False),
        Inputs.of({**tensors, "input_bits": bits}, True),
        Inputs.of({**tensors, "input_order": tensors["input_order"].flip(0)}, True),
        Inputs.of({**tensors, "input_order": torch.arange(256).int()}, True),
    ]
    assert len({one.takes(), *(other.takes() for other in others)}) == 5


# -- the op: its input without its product


SCHEMES = [W4AX(64), W4AX(64, False, "fmpq", 0.5, True)]
EPS = 1e-5


@pytest.fixture
def op_on_cpu(monkeypatch, round_on_cpu):
    """CudaOp on this machine; it can round, not multiply."""
    monkeypatch.setattr(CudaOp, "_prepare", lambda op: None)
    rounding.rounding.cache_clear()

    def make(scheme, n, k, change=None):
        round_on_cpu(k, FP16, scheme.mixed)  # its kernels from now on
        tensors = scheme.random_tensors(n, k, FP16, torch.Generator().manual_seed(n))
        return CudaOp(scheme, {**tensors, **(change or {})})

    yield make
    rounding.rounding.cache_clear()


def equal(one, other):
    m = len(one.bytes)
    tokens = [each.tokens[:m] for each in (one, other)]
    same_shape = (one.dtype, one.lead) == (other.dtype, other.lead)
    return same_shape and torch.equal(one.bytes, other.bytes) and torch.equal(*tokens)


@needs_compiler
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.describe())
def test_an_op_takes_a_norm_with_its_input(scheme, op_on_cpu, rms_norm):
    k = 256
    op, module = op_on_cpu(scheme, 64, k), torch.nn.Module()
    hidden, delta = torch.randn(2, 3, k).to(FP16)
    weight = (torch.rand(k) + 0.5).to(FP16)
    summed = hidden.clone()
    wanted = op.prepare(rms_norm(summed, delta, weight, EPS))
    assert equal(op.prepare(hidden.view(3, 1, k)), op.prepare(hidden)._replace(lead=(3, 1)))

    for name, n in (("q", 72), ("k", 64)):  # q does not fill its bands: they are not joined
        linear = QuantLinear(scheme, n, k, False, FP16)
        linear.op = op_on_cpu(scheme, n, k)
        module.add_module(name, linear)
    gate = CudaOp.gate([op_on_cpu(scheme, 64, k) for _ in range(2)])
    assert joined(module, "q", "k") is None
    for product in (op, gate, Joined(op, None), module.q, side_by_side(module, "q", "k")):
        mine = hidden.clone()
        made, total = norm_input(product, mine, delta, weight, EPS)
        assert equal(made, wanted)
        assert total is mine and torch.equal(mine, summed)
    assert norm_input(torch.nn.Linear(k, 8), hidden, delta, weight, EPS) is None

    before = hidden.clone()
    for given in (
        (hidden, delta, weight.float()),
        (hidden.bfloat16(), delta, weight),
        (hidden.T.contiguous().T, delta, weight),
        (hidden, delta[:2], weight),
        (hidden[:, :128].contiguous(), delta[:, :128].contiguous(), weight[:128]),
        (hidden[:0], delta[:0], weight),
        (hidden.clone().requires_grad_(), delta, weight),
    ):
        assert op.norm_input(*given, EPS) is None
    assert torch.equal(hidden, before)
    watched = hidden.clone().requires_grad_()
    assert op.prepare(watched) is watched  # the torch operator rounds it
    with pytest.raises(ValueError, match="columns"):
        op.prepare(hidden[:, :128])


@needs_compiler
def test_layers_join_if_they_round_alike(op_on_cpu):
    scheme, k = SCHEMES[1], 256
    ops = [op_on_cpu(scheme, n, k) for n in (64, 128)]
    whole = CudaOp.join(ops)
    assert whole.n == 192 and {op.takes for op in (whole, *ops)} == {whole.takes}
    assert ops[1].packed.inputs is whole.packed.inputs
    bits = 12 - whole.packed.inputs.bits
    order = torch.arange(k, dtype=torch.int32)
    for change in ({"input_bits": bits}, {"input_order": order}):
        odd = [op_on_cpu(scheme, 64, k), op_on_cpu(scheme, 64, k, change)]
        assert CudaOp.join(odd) is None and CudaOp.gate(odd) is None
        linears = [QuantLinear(scheme, 64, k, False, FP16) for _ in odd]
        for linear, op in zip(linears, odd, strict=True):
            linear.op = op
        assert shared_op(linears) is None and shared_op(linears[:1]) is odd[0]


MISTAKES = [
    (r"i / 4 \* 2 \+ i % 2 \* 8 \+ i / 2 % 2", "i"),  # x's own order
    (r"__float2int_rn\((.*?) \* step\)", r"(int)(\1 * step)"),
    (r"total \* 128", "total"),
    (r"__syncthreads\(\);", ""),
    (r"step < how\.lanes", "step < 2"),  # a smaller matrix
    (r"second \? other - z\[i\]", "second ? z[i] - other"),
    (r"__uint_as_float\(most\) \* kWiden", "__uint_as_float(most)"),
    (r"if \(!once\)", "if (false)"),
    (r"if \(first > 0\) places", "if (false) places"),
    (r"z\[i\] \* how\.turn", "z[i]"),
    (r"__float2int_ru", "__float2int_rn"),
    (r"low = -8", "low = -7"),
]


@needs_compiler
@pytest.mark.parametrize("mistake", every_third(MISTAKES), ids=lambda mistake: mistake[0])
def test_the_emulator_sees_mistakes(mistake, round_on_cpu, tmp_path, monkeypatch):
    for module in (activations, rounding):
        monkeypatch.setattr(module, "REACH", 0.12)  # so that the largest numbers are clamped
    broken, count = re.subn(*mistake, SOURCE.read_text())
    assert count, "the text has changed: mend the pattern"
    program = [quant_kernel(FP16, True).program]
    made = library(tmp_path, SOURCE, program, broken, "-DDYNAMIC_SMEM")
    k = 18432  # two units for some threads
    inputs, tensors = mixed_inputs(k, 128, True)
    x = tokens(k, FP16)
    wanted = expected(x, tensors, True)
    for seed in range(6):
        try:
            found = round_on_cpu(k, FP16, True, seed, made).quantize(x, 9, inputs)
            if not same(found, wanted):
                return
        except AssertionError:
            return  # the emulator stopped it
    pytest.fail("nothing seen")
