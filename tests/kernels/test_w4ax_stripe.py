"""w4ax_stripe and w4ax_stripe_quant without a GPU: registers, and their own text on the emulated
GPU (emulator/), whose products must be Scheme.reference's bit for bit."""

import re
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cpp_compiler import compile_cpp, needs_compiler
from thorough import every_third, some
from torch.nn.functional import silu

import billfish
from billfish.kernels import jit, stripes
from billfish.schemes.gated import apart, order
from billfish.schemes.w4ax.activations import REACH
from billfish.schemes.w4ax.cuda import arrange, stripe
from billfish.schemes.w4ax.cuda.blocks import Blocks
from billfish.schemes.w4ax.cuda.plan import RUN
from billfish.schemes.w4ax.cuda.stripe import Mix, stripe_programs
from billfish.schemes.w4ax.scheme import SHARED, W4AX

HERE = Path(__file__).parent / "emulator"
PACKAGE = Path(billfish.__file__).parent
INCLUDE = PACKAGE / "kernels" / "include" / "billfish"
CUDA = PACKAGE / "schemes" / "w4ax" / "cuda"
FP16, BF16 = torch.float16, torch.bfloat16
TYPES = {FP16: "Half", BF16: "Bfloat"}
ONE_ROUNDING = {FP16: 2**-11, BF16: 2**-8}


def a8(size, symmetric=True):
    return W4AX(size, symmetric)


def fmpq(size, share, rotation=True, symmetric=True):
    return W4AX(size, symmetric, "fmpq", share, rotation)


# -- registers


@pytest.mark.parametrize("arch", some(["sm_80", "sm_86", "sm_89"], 0))
def test_nothing_spills(arch):
    wanted = {
        *stripe_programs(128, False, Mix(128, 0, True), FP16, arch),
        *stripe_programs(64, True, Mix(64, 0, True), BF16, arch),
        *stripe_programs(32, False, Mix(), BF16, arch),
    }
    assert len(wanted) == 15
    check(wanted, arch)


def test_nothing_spills_on_hopper_either():
    """There the op runs by name."""
    assert not stripe_programs(128, False, Mix(), FP16, "sm_90a")
    assert not stripe_programs(128, False, Mix(), torch.float32, "sm_80")
    check(
        [stripe.stripe_kernel(BF16, 128, True, tokens).program for tokens in stripe.BANDS], "sm_90a"
    )


def check(programs, arch):
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda program: (program, jit.compile(program, arch)), programs)
    for program, cubin in made:
        assert cubin.spill_bytes == 0 and cubin.stack_bytes == 0, program.name
        most = 64 if "quant" in program.name else 255
        assert 16 <= cubin.registers <= most, (program.name, cubin.registers)


# -- on the emulated GPU


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder, known = tmp_path_factory.mktemp("emulator"), {}

    def build(kernel, arguments, text=None):
        key = (kernel, arguments, text)
        if key not in known:
            source, changed = CUDA / f"{kernel}.cuh", HERE
            if text is not None:  # of the kernel, or of a header that is found before the real one
                changed = folder / str(len(known))
                (changed / "billfish").mkdir(parents=True)
                name, content = text
                (changed / "billfish" / name).write_text(content)
                source = changed / "billfish" / name if name == source.name else source
            known[key] = compile_cpp(
                HERE / "ax_stripe.cpp",
                folder / f"run{len(known)}",
                f"-I{changed}",
                f"-I{HERE}",
                f"-I{PACKAGE / 'kernels' / 'include'}",
                f'-DKERNEL_FILE="{source}"',
                "-DQUANT" if kernel == "stripe_quant" else "-DPRODUCT",
                f"-DKERNEL=w4ax_{kernel}<{arguments}>",
            )
        return known[key]

    return build


def bytes_of(tensor):
    content = b"" if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return struct.pack("<Q", len(content)) + content


def run(program, numbers, *inputs):
    given = b"".join(map(bytes_of, inputs))
    ran = subprocess.run([program, *map(str, numbers)], input=given, capture_output=True)
    assert ran.returncode == 0, ran.stdout[-200:].decode(errors="replace")
    return bytearray(ran.stdout)


class Layer:
    """As StripeOp has it."""

    def __init__(self, scheme, tensors):
        self.scheme, self.tensors, self.order, self.mix = scheme, tensors, None, Mix()
        if scheme.mixed:
            blocks = Blocks.of(scheme.group_size, scheme.block, tensors)
            self.order, self.places = blocks.order, blocks.places
            self.mix = Mix(scheme.block, blocks.fours, scheme.rotation)
            self.packed = arrange.pack(scheme.block, blocks.sorted(tensors))
        else:
            self.packed = arrange.pack(scheme.group_size, tensors)
        self.shape = self.packed.shape

    def quantize(self, compiled, x, seed, text=None):
        (m, k), how, k_tiles = x.shape, self.mix, self.shape.k_tiles
        names = f"{TYPES[x.dtype]},{how.block},{str(how.rotated).lower()}"
        threads = stripe.quant_threads(k_tiles)
        numbers = (seed, m, 0, k, k_tiles, how.fours, m, threads, stripe.QUANT_SMEM, 0, 0)
        program = compiled("stripe_quant", names, text)
        reach = struct.unpack("f", struct.pack("f", REACH))[0]
        found = run(program, (*numbers, reach), None, x, None, None, None, self.order)
        lines = torch.frombuffer(found[: m * k_tiles * 128], dtype=torch.int8)
        pairs = torch.frombuffer(found[m * k_tiles * 128 :], dtype=torch.int32)
        return lines.view(m, -1), pairs.view(m, 2)

    def product(self, compiled, x, bias, seed, sms, gated=False, text=None, quant=None, heavy=None):
        (m, k), shape = x.shape, self.shape
        lines, pairs = self.quantize(compiled, x, seed) if quant is None else quant
        pairs = torch.cat([pairs, torch.full((m % 2, 2), -2, dtype=torch.int32)])
        tokens = stripe.tokens_of(m)
        how = stripe.partition(m, shape, self.mix.halves, sms)
        zeros = str(shape.asymmetric).lower()
        names = (TYPES[x.dtype], shape.record_group, zeros, tokens, stripe.BANDS[tokens])
        program = compiled("stripe", ",".join(map(str, names)), text)
        smem = stripe.smem_bytes(tokens, shape.record_bytes)
        numbers = (seed, m, shape.n, k, shape.k_tiles, how.light, how.blocks, stripes.THREADS)
        numbers += (smem, heavy or how.heavy, int(gated), 0)
        given = (self.packed.records, lines, pairs, self.packed.bases, bias, None)
        return torch.frombuffer(run(program, numbers, *given), dtype=x.dtype).view(m, -1)

    def bytes_(self, lines):
        """x8 in stored order, from w4ax_stripe_quant's lines."""
        how, (m, width) = self.mix, lines.shape
        place = torch.arange(width)
        j, t, b = place // 16, place // 4 % 4, place % 4
        ordered = 16 * j + 2 * t + 8 * (b & 1) + (b >> 1)  # the input of each byte
        x8 = torch.empty(m, width, dtype=torch.long)
        x8[:, ordered] = lines.long()
        if how.halves:
            for i in range(how.fours):
                block = lines[:, i * how.block : (i + 1) * how.block].contiguous()
                words = block.view(torch.uint8)[:, : how.block // 2].long()
                numbers = block[:, how.block // 2 :].contiguous().view(torch.int32).long()
                low, high = ((each ^ 8) - 8 for each in (words & 15, words >> 4))
                both = torch.stack([low.view(m, -1, 16), high.view(m, -1, 16)], 2)
                part = torch.empty(m, how.block, dtype=torch.long)
                part[:, ordered[: how.block]] = both.view(m, -1)
                assert torch.equal(numbers[:, 1], -8 * part.sum(1))
                assert torch.equal(numbers[:, 2], part.sum(1))
                x8[:, i * how.block : (i + 1) * how.block] = part * numbers[:, :1]
        k = self.shape.k
        assert not x8[:, k:].any()
        if self.order is None:
            return x8[:, :k]
        stored = torch.empty_like(x8[:, :k]).view(m, -1, how.block)
        stored[:, self.places] = x8[:, :k].view(m, -1, how.block)
        return stored.view(m, k)


def layer(scheme, n, k, dtype, rows):
    source = torch.Generator().manual_seed(n + k)
    tensors = scheme.random_tensors(n, k, dtype, source)
    x = torch.randn(rows, k, generator=source)
    x[1::3, :: max(1, k // 5)] *= 30  # outliers
    return Layer(scheme, tensors), x.to(dtype), torch.randn(n, generator=source).to(dtype)


def oracle(layer, x, bias=None):
    y = layer.scheme.reference(layer.tensors, x).float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


ROUNDED = [
    *((a8(32), 32, FP16), (a8(32), 9216, BF16), (fmpq(32, 0.7), 160, FP16)),
    *((fmpq(64, 0.5), 64 * 9, BF16), (fmpq(64, 0.84, False), 64 * 5, FP16)),
    *((fmpq(128, 0.84), 128 * 7, FP16), (fmpq(256, 0.5), 1024, BF16), (fmpq(128, 1.0), 9216, BF16)),
]


@needs_compiler
@pytest.mark.parametrize(
    "case", some(ROUNDED, 0, 2, 4, 6), ids=lambda case: f"{case[0].describe()}-{case[1]}"
)
def test_activations(case, compiled):
    """Zeros, Inf, NaN, one huge outlier, the smallest numbers, numbers just between two."""
    scheme, k, dtype = case
    made, x, _ = layer(scheme, 8, k, dtype, 10)
    x[1] = 0
    x[2, k // 2], x[3, -1], x[4, 0] = torch.inf, torch.nan, -torch.inf
    x[5] *= 1e-3
    x[5, k - 1] = -6e4
    x[6] = (torch.arange(k) % 254 - 127) / 2
    x[7] = torch.finfo(dtype).tiny
    x[8, :32] = 0
    wanted, scale = scheme.round_inputs(made.tensors, x)
    for seed in (1, 2):
        lines, pairs = made.quantize(compiled, x, seed)
        x8 = made.bytes_(lines)
        assert torch.equal(x8, wanted.long())
        few = torch.zeros(k, dtype=torch.bool)
        if made.mix.halves:
            few = (made.tensors["input_bits"] == 4).repeat_interleave(scheme.block)
        assert torch.equal(pairs[:, 1].long(), 128 * wanted[:, ~few].long().sum(-1))
        found = pairs[:, 0].contiguous().view(torch.float32)
        right = torch.where(scale.isfinite(), scale, torch.nan)[:, 0]
        assert torch.equal(found.nan_to_num(-1), right.nan_to_num(-1))
        assert found.isnan().tolist() == [False, False, True, True, True, *[False] * 5]


# scheme, n, k, dtype, SMs, tokens: one tile and several, tails of n, k and m, 1 to 8 stripes,
# several tiles of tokens; no 4-bit blocks, all, and a record that is half of each
PRODUCTS = [
    (a8(32), 65, 96, BF16, 4, (1, 16)),
    (a8(128), 300, 640, FP16, 4, (3, 8, 9)),
    (a8(64), 520, 576, BF16, 8, (30, 64)),
    (fmpq(32, 0.7), 130, 416, FP16, 4, (5, 20)),
    (fmpq(64, 0.45), 200, 64 * 11, BF16, 5, (2, 13, 33)),
    (fmpq(64, 1.0, False), 65, 1024, FP16, 3, (1, 29)),
    (fmpq(128, 0.84), 300, 128 * 13, FP16, 7, (1, 16, 32, 64)),
    (fmpq(128, 0.5, False), 70, 512, BF16, 4, (7, 70, 131)),
    (fmpq(256, 0.5), 140, 1024, BF16, 6, (11, 65)),
    (fmpq(128, 0.0), 64, 256, FP16, 2, (4,)),
    (fmpq(64, 0.6), 270, 64 * 10, FP16, 7, (129,)),
    (a8(64, False), 100, 320, FP16, 3, (9,)),
    (fmpq(128, 0.7, True, False), 200, 128 * 9, BF16, 5, (2, 40)),
    (fmpq(64, 0.6, False, False), 90, 64 * 7, FP16, 3, (16, 67)),
    (fmpq(32, 0.6, True, False), 65, 352, BF16, 2, (3,)),
]


@needs_compiler
@pytest.mark.parametrize(
    "case",
    some(PRODUCTS, 0, 3, 7, 9, 12),
    ids=lambda case: f"{case[0].describe()}-{case[1]}x{case[2]}",
)
def test_products(case, compiled):
    """Bit for bit, in any order of events, with and without bias."""
    scheme, n, k, dtype, sms, tokens = case
    made, x, bias = layer(scheme, n, k, dtype, max(tokens))
    exact, more = oracle(made, x), oracle(made, x, bias)
    for m in tokens:
        for seed, add, right in ((1, bias, more), (2, None, exact)):
            y = made.product(compiled, x[:m], add, seed, sms)
            assert torch.equal(y, right[:m]), (m, seed)


@needs_compiler
def test_any_partition_gives_the_same_bits(compiled):
    made, x, _ = layer(fmpq(128, 0.5), 140, 2048, FP16, 6)
    exact, quant = oracle(made, x), made.quantize(compiled, x, 1)
    for sms in (1, 2, 3, 5, 8):
        for heavy in (1, 2):
            y = made.product(compiled, x, None, 2, sms, quant=quant, heavy=heavy)
            assert torch.equal(y, exact), (sms, heavy)


@needs_compiler
@pytest.mark.parametrize("scheme", [a8(128), fmpq(128, 0.5, False)], ids=str)
def test_the_largest_sums(scheme, compiled):
    """Weights of -128 and 112 and the largest bytes; a token of NaN touches no other."""
    k = 16384
    made, x, _ = layer(scheme, 72, k, BF16, 5)
    tensors = dict(made.tensors)
    tensors["weight_packed"][0], tensors["weight_packed"][-1] = 0, -1
    tensors["group_scale"][:] = -1  # q = 16
    made = Layer(scheme, tensors)
    x = torch.ones(5, k, dtype=BF16)
    x[1], x[2, 1::2], x[3, 7], x[4] = -1, -1, torch.nan, 0
    y, wanted = made.product(compiled, x, None, 1, 3), oracle(made, x)
    assert y[3].isnan().all() and (y[4] == 0).all()
    assert torch.equal(y[[0, 1, 2, 4]], wanted[[0, 1, 2, 4]])


@needs_compiler
@pytest.mark.parametrize("m", [3, 70])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gated_products(dtype, m, compiled):
    """What the product without it stores, gated with torch's operators."""
    n, scheme = 72, fmpq(64, 0.5)
    plain, x, _ = layer(scheme, 2 * n, 640, dtype, m)
    rows = order(2 * n, RUN)
    mixed = {
        name: tensor if name in SHARED else tensor[rows] for name, tensor in plain.tensors.items()
    }
    made, exact = Layer(scheme, mixed), oracle(plain, x)
    y, both = (made.product(compiled, x, None, 2, 4, gated=g) for g in (True, False))
    assert torch.equal(apart(both, RUN), exact)
    gate, up = exact.chunk(2, -1)
    wanted = silu(gate) * up
    assert y.shape == (m, n) and (y == wanted).float().mean() > 0.99
    torch.testing.assert_close(y, wanted, rtol=4 * ONE_ROUNDING[dtype], atol=1e-30)


MISTAKES = [
    ("stripe", r"wait_copies<Stage::kStages - 2>\(\);", "wait_copies<Stage::kStages - 1>();"),
    ("stripe", r"v\.x >> 4 & kEven", "v.x & kEven"),
    ("stripe", r"v\.w << 4 & ~kEven", "v.w & ~kEven"),
    ("stripe", r"kAsymmetric \? 0 : token\[i % 2\]\.y", "0"),
    ("stripe", r"\(chunk \^ row\) << 4", "chunk << 4"),
    ("stripe", r"x_at \^ group \* kGroup", "x_at"),
    ("stripe", r"left - slice \* 2", "left"),
    ("stripe", r"group \* \(kGroup / 16\) \+ kGroup / 32;", "group * (kGroup / 16);"),
    ("stripe", r"if \(\+\+m_tile == m_tiles\)", "if (++m_tile > 0)"),
    ("stripe", r"first \+ i \* 8 \+ lane / 4", "first + lane / 4"),
    ("stripe: stripes", r"while \(load_acquire\(locks \+ first\) != turn\) {}", ";"),
    ("stripe_quant", r"within<1>\(\);", "within<2>();"),
    ("stripe_quant", r"across<4>\(lane\)", "across<8>(lane)"),
    ("stripe_quant", r"word\[1\] << 4", "word[0] << 4"),
    ("stripe_quant", r"0u - 8 \* of_block", "0u - of_block"),
    ("stripe_quant", r"__fmul_rn\(v, kUp\)", "v"),
    ("stripe_quant", r"i % 2\) \* 2 \+ i / 2 % 2", "i / 2 % 2) * 2 + i % 2"),
    ("stripe_quant", r"__syncthreads\(\);", ""),
]


@needs_compiler
@pytest.mark.parametrize(
    "mistake", every_third(MISTAKES), ids=lambda mistake: f"{mistake[0]}: {mistake[1]}"
)
def test_the_emulator_sees_mistakes(mistake, compiled):
    where, pattern, replacement = mistake
    kernel, _, header = where.partition(": ")
    path = (INCLUDE if header else CUDA) / f"{header or kernel}.cuh"
    broken, count = re.subn(pattern, replacement, path.read_text())
    assert count, "the text has changed: mend the pattern"
    broken = (path.name, broken)
    # the ring goes round; several stripes
    made, x, _ = layer(fmpq(64, 0.4), 100, 64 * 71, FP16, 70)
    x, sms = (x, 1) if "tile" in pattern else (x[:20], 4)
    right, wanted = made.quantize(compiled, x, 1), oracle(made, x)
    for seed in range(6):
        try:
            if kernel == "stripe_quant":
                lines, pairs = made.quantize(compiled, x, seed, broken)
                if not torch.equal(pairs, right[1]):
                    return
                if not torch.equal(made.bytes_(lines), made.bytes_(right[0])):
                    return
            else:
                y = made.product(compiled, x, None, seed, sms, text=broken, quant=right)
                if not torch.equal(y, wanted):
                    return
        except AssertionError:
            return  # the emulator stopped it
    pytest.fail("nothing seen")
