"""small.cuh, draw.cuh and store.cuh on the emulated GPU, launched by Fused on the CPU's tensors.

The kernels' own text is compiled into a library (emulated_launch.py); a stand-in for
launch.Loaded calls it with the arguments that a GPU would get. Then the same text for real GPUs.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from cpp_compiler import needs_compiler
from emulated_launch import Emulated, library
from test_compile import complaints
from thorough import also, every_third
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import billfish
from billfish.engine.cuda import fused
from billfish.engine.cuda.pool import POOLS
from billfish.engine.cuda.tables import HeadNorms
from billfish.engine.kv.cache import Room
from billfish.engine.kv.codes import channel_blocks
from billfish.engine.kv.rotation import Rotation
from billfish.engine.params import SamplingParams
from billfish.engine.sampling import RULE, Chooser, choose_tokens
from billfish.models.decoder import Shape, apply_rope

HERE = Path(__file__).parent / "emulator"
PACKAGE = Path(billfish.__file__).parent
CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16]
EVERY = list(
    dict.fromkeys(
        program
        for dtype in DTYPES
        for kind in POOLS
        for head_dim in (64, 128)
        for turned in ((False, True) if kind == "kv4" else (False,))
        for program in fused.programs(dtype, kind, head_dim, turned)
    )
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_size = pytest.mark.parametrize("head_dim", (64, 128))
every_kind = pytest.mark.parametrize("kind", POOLS)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    sources = sorted({program.source for program in EVERY})
    return {
        source: library(
            tmp_path_factory.mktemp(source.stem), source, [p for p in EVERY if p.source == source]
        )
        for source in sources
    }


@pytest.fixture
def on_cpu(monkeypatch, libraries):
    """Fused on this machine; a dict of other libraries by source may be given."""

    def use(libraries):
        def kernel(program):
            found = Emulated(libraries[program.source], program.name)
            return SimpleNamespace(load=lambda device: found)

        monkeypatch.setattr(fused, "_kernel", kernel)

    use(libraries)
    return use


class Case:
    """A pool of two layers, RoPE's tables, and the Fused of both."""

    def __init__(self, kind, head_dim, dtype, group=4, kv_heads=2, rotary=None, rotation=None):
        self.kind, self.head_dim, self.dtype, self.group = kind, head_dim, dtype, group
        self.kv_heads, self.rotary = kv_heads, rotary or head_dim
        heads = kv_heads * group
        self.shape = Shape(2, heads, kv_heads, head_dim, 10, 99, (None, None), head_dim**-0.5)
        angles = torch.arange(99)[:, None] / 10000 ** (torch.arange(0, self.rotary, 2) / 90)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.pool = self.new_pool()
        self.fused = fused.Fused(self.shape, dtype, CPU, self.pool, self.cos, self.sin, rotation)

    def new_pool(self):
        size = (2, 3, 64, self.kv_heads, self.head_dim)
        return POOLS[self.kind](Room(*size, self.dtype, CPU))

    def qkv(self, tokens):
        return torch.randn(tokens, self.group + 2, self.kv_heads, self.head_dim).to(self.dtype)

    def parts(self, qkv):
        """q, k and v by heads, as _project cuts them."""
        rows = qkv.view(len(qkv), -1, self.head_dim)
        return rows.split((self.kv_heads * self.group, self.kv_heads, self.kv_heads), 1)

    def rotate(self, x, positions):
        cos = self.cos[positions].repeat(1, 2)[:, None]
        sin = self.sin[positions]
        return apply_rope(x, cos, torch.cat((-sin, sin), -1)[:, None])

    def store(self, qkv, positions, slots, norms=None):
        heads = self.kv_heads * self.group
        q = torch.full((len(qkv) + 1, heads, self.head_dim), 7.0, dtype=self.dtype)
        numbers = [torch.tensor(each, dtype=torch.int32) for each in (positions, slots)]
        self.fused.store(1, qkv, *numbers, q, norms)
        assert (q[-1] == 7).all() and not self.pool.records[0].any()
        return q[:-1]


POSITIONS, SLOTS = [0, 98, 5, 6, 33], [63, 64, -1, 190, 65]  # a page's end, padding
REAL = [i for i, slot in enumerate(SLOTS) if slot >= 0]


def stored_by_torch(case, k, v, feedback=None):
    pool = case.new_pool()
    pool.write(1, torch.tensor(SLOTS)[REAL], k[REAL], v[REAL], feedback)
    return pool


def off_by(one, other):
    """How many neighbours of their dtype lie between numbers."""
    a, b = (x.contiguous().view(torch.int16).int() for x in (one, other))
    return torch.where((a < 0) == (b < 0), (a - b).abs(), (a & 0x7FFF) + (b & 0x7FFF))


# -- norms


# Sums are added in another order than torch's, and a rounding may fall the other way: of the norm,
# and then of its product with the weight, which makes two of it where that is just above 2^n.
def nearly(one, other, rarely=0.01):
    off = off_by(one, other)
    return off.max() <= 2 and (off > 0).sum() <= 1 + rarely * off.numel()


@needs_compiler
@every_dtype
@pytest.mark.parametrize("width", [8, 264, 2048, 4104, 8200, 16384])
def test_rms_norm(on_cpu, dtype, width):
    run = Case("kv16", 64, dtype).fused
    theirs = LlamaRMSNorm(width, 1e-5).to(dtype)
    theirs.weight.data = (torch.rand(width) + 0.5).to(dtype)
    hidden, delta = (torch.randn(3, width) * 3).to(dtype), torch.randn(3, width).to(dtype)
    before, summed = hidden.clone(), hidden + delta
    out = torch.full((4, width), 7, dtype=dtype)
    run.norm(hidden, None, theirs.weight, 1e-5, out)
    assert torch.equal(hidden, before) and (out[3] == 7).all()
    assert nearly(out[:3], theirs(before))
    run.norm(hidden, delta, theirs.weight, 1e-5, out)
    assert torch.equal(hidden, summed)
    assert nearly(out[:3], theirs(summed))
    alone = torch.empty(1, width, dtype=dtype)
    run.norm(before[2:], delta[2:], theirs.weight, 1e-5, alone)
    assert torch.equal(alone, out[2:3]), "a row depends on the others"


@needs_compiler
@every_dtype
def test_swiglu(on_cpu, dtype):
    run = Case("kv16", 64, dtype).fused
    for width in (8, 1032):
        gate_up = (torch.randn(3, 2 * width) * 4).to(dtype)
        gate_up[1, :4] = torch.tensor([0.0, -200.0, 200.0, torch.nan])
        out = torch.full((4, width), 7, dtype=dtype)
        run.swiglu(gate_up, out[:3])
        gate, up = gate_up.chunk(2, -1)
        wanted = silu(gate) * up  # its exp is another one than glibc's
        assert (out[3] == 7).all() and out[1, 3].isnan() and wanted[1, 3].isnan()
        out[1, 3] = wanted[1, 3] = 0
        assert nearly(out[:3], wanted, 0.002)


DRAWS = [
    {},
    {"temperature": 0.1},
    {"temperature": 3.0},
    {"min_p": 0.05},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"top_k": 30, "top_p": 0.5},
    {"top_k": 7, "top_p": 0.95, "min_p": 0.02},
    {"top_p": 0.999, "temperature": 2.0},
    {"top_k": 10**6},
    {"temperature": 1e-4},
]


@needs_compiler
@every_dtype
@pytest.mark.parametrize("width", [1003, 9000])
def test_tokens_are_drawn_as_on_a_cpu(on_cpu, dtype, width):
    run = Case("kv16", 64, dtype).fused
    source = torch.Generator().manual_seed(width)
    logits = (3 * torch.randn(2 * len(DRAWS), width, generator=source)).to(dtype)
    logits[::2] = logits[::2].round()  # many equals, also where top_k and top_p end
    logits[:, 5::9] = -torch.inf
    logits[:, 7] = -0.0

    def choosers():
        rules = (
            SamplingParams(**{"temperature": 1.0, **DRAWS[i // 2], "seed": i})
            for i in range(len(logits))
        )
        return [Chooser(rule, [], width, frozenset()) for rule in rules]

    found = torch.zeros(len(logits), 2, dtype=torch.int32)
    rules = torch.from_numpy(numpy.stack([chooser.rule() for chooser in choosers()]))
    run.draw(logits, rules, found)
    assert found[:, 0].tolist() == [one.token for one in choose_tokens(logits.float(), choosers())]
    assert torch.equal(found[:, 1].view(torch.float32), logits.float().amax(-1))


@needs_compiler
@every_dtype
def test_embed_and_the_best_token(on_cpu, dtype):
    run = Case("kv16", 64, dtype).fused
    for width in (1000, 1003, 40_000):
        logits = torch.randn(7, width).to(dtype)
        logits[1, width // 2 :: 7] = 100.0  # of equals the first
        logits[2, width - 1] = torch.nan
        logits[3] = -torch.inf
        logits[4, 3::61], logits[4, 8::256], logits[4, -200:] = torch.inf, -torch.nan, torch.nan
        logits[5] = -logits[5].abs() - 1
        logits[5, 300::41], logits[5, 310::32] = -0.0, 0.0  # equals, too
        found = torch.zeros(8, 2, dtype=torch.int32)
        run.draw(logits, torch.zeros(7, RULE, dtype=torch.int32), found)
        peaks, best = logits.max(dim=-1)
        assert found[:7, 0].tolist() == best.tolist()
        told = found[:7, 1].view(torch.float32)
        assert torch.equal(told.nan_to_num(7.0), peaks.float().nan_to_num(7.0))
        assert (found[7] == 0).all()
    table, out = torch.randn(40, 72).to(dtype), torch.empty(3, 72, dtype=dtype)
    found[:3, 0] = torch.tensor([4, 39, 11])
    run.embed(torch.tensor([8, -2, -3], dtype=torch.int32), found, table, out)
    assert torch.equal(out, table[[8, 39, 11]])


@needs_compiler
def test_what_no_kernel_can_do_is_refused(on_cpu):
    run, x = Case("kv16", 64, torch.float16).fused, torch.zeros(1, 20, dtype=torch.float16)
    with pytest.raises(ValueError, match="norm of 20"):
        run.norm(x, None, x[0], 1e-5, x)
    wide = torch.zeros(1, 16392, dtype=torch.float16)
    with pytest.raises(ValueError, match="16392"):
        run.norm(wide, None, wide[0], 1e-5, wide)
    with pytest.raises(ValueError, match="SwiGLU of 20"):
        run.swiglu(x.repeat(1, 2), x)
    with pytest.raises(ValueError, match="RoPE over 12"):
        Case("kv16", 64, torch.float16, rotary=12)


# -- the pool


@needs_compiler
@every_kind
@every_size
@every_dtype
def test_store_and_gather(on_cpu, kind, head_dim, dtype):
    """Bit for bit what apply_rope and Pool.write do; and back what Pool.read does."""
    for group, rotary in ((1, head_dim), (3, 40), (4, head_dim), (8, head_dim // 2)):
        case = Case(kind, head_dim, dtype, group, rotary=rotary)
        qkv = case.qkv(5)
        q, k, v = case.parts(qkv)
        q_out = case.store(qkv, POSITIONS, SLOTS)
        assert torch.equal(q_out, case.rotate(q, POSITIONS))
        wanted = stored_by_torch(case, case.rotate(k, POSITIONS), v)
        assert torch.equal(case.pool.records, wanted.records), (group, rotary)
    slots = torch.tensor(SLOTS, dtype=torch.int32)[REAL]
    k_out, v_out = torch.full((2, 5, 2, head_dim), 7.0, dtype=dtype)
    count = torch.tensor([4], dtype=torch.int32)  # of five slots
    case.fused.gather(1, torch.cat((slots, slots[:1])), count, k_out, v_out)
    for got, read in zip((k_out, v_out), wanted.read(1, torch.arange(3), 192), strict=True):
        assert torch.equal(got[:4], read[slots.long()]) and (got[4] == 7).all()


@needs_compiler
@pytest.mark.parametrize("kind", ["kv8", "kv4"])
@every_dtype
def test_extremes_are_coded_as_pool_does(on_cpu, kind, dtype):
    """Constants, zeros, infinities and NaN. RoPE by 0, so that K is what is given."""
    case = Case(kind, 64, dtype, 1)
    qkv = case.qkv(5)
    _, k, v = case.parts(qkv)
    k[0, 0], v[0, 1], k[1, 1, 5], v[1, 0, 60] = 0, 1.5, torch.nan, torch.inf
    k[3, 0, 3], v[3, 1, :2], v[4, 0] = -torch.inf, torch.finfo(dtype).max, 6e-8
    v[3, 0] *= 1e-6  # a step that is subnormal in fp16
    case.store(qkv, [0] * 5, SLOTS)
    wanted = stored_by_torch(case, case.rotate(k, [0] * 5), v)
    places = case.pool.record_bytes(64) - 64 * 8  # codes; grids may be NaN of another kind
    assert torch.equal(case.pool.records[..., :places], wanted.records[..., :places])
    pages = torch.arange(3)
    for one, other in zip(case.pool.read(1, pages, 192), wanted.read(1, pages, 192), strict=True):
        assert torch.equal(one.nan_to_num(9e4), other.nan_to_num(9e4))
        assert one.isnan().any() == other.isnan().any()


@needs_compiler
@every_size
@every_dtype
def test_heads_are_normed_first(on_cpu, head_dim, dtype):
    """Qwen3."""
    case = Case("kv16", head_dim, dtype, 3)
    norms = [LlamaRMSNorm(head_dim, 1e-6).to(dtype) for _ in range(2)]
    for norm in norms:
        norm.weight.data = (torch.rand(head_dim) + 0.5).to(dtype)
    qkv = case.qkv(5) * 5
    q, k, v = case.parts(qkv)
    given = HeadNorms(norms[0].weight, norms[1].weight, 1e-6)
    got = case.store(qkv, POSITIONS, SLOTS, given)
    wanted = case.rotate(norms[0](q), POSITIONS)
    unit = torch.finfo(dtype).eps
    assert torch.allclose(got, wanted, rtol=0, atol=4 * unit)
    assert (got != wanted).float().mean() < 0.02
    read_k, read_v = case.pool.read(1, torch.arange(3), 192)
    slots = torch.tensor(SLOTS)[REAL]
    keys = case.rotate(norms[1](k), POSITIONS)[REAL]
    assert torch.allclose(read_k[slots], keys, rtol=0, atol=4 * unit)
    assert torch.equal(read_v[slots], v[REAL])


def rotation_of(layers, kv_heads, head_dim):
    matrices = torch.randn(2, layers, kv_heads, head_dim, head_dim) / head_dim**0.5
    mean = torch.randn(layers, kv_heads, head_dim)
    feedback = torch.zeros_like(matrices[0])
    for now, later in channel_blocks(head_dim):
        feedback[..., now, later] = 2 * torch.randn(feedback[..., now, later].shape) / head_dim**0.5
    return Rotation(mean, *matrices, feedback)


@needs_compiler
@every_size
@every_dtype
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("blocks", [1, 3, 5], ids="tokens over {} blocks".format)
def test_turned(on_cpu, head_dim, dtype, group, blocks):
    rotation = rotation_of(2, 2, head_dim)
    case = Case("kv4", head_dim, dtype, group, rotation=rotation)
    case.fused._most_blocks = blocks  # sets of four, two and one
    qkv = case.qkv(5)
    q, k, v = case.parts(qkv)
    got = case.store(qkv, POSITIONS, SLOTS)
    tq, tk = (m[1].half().double() for m in (rotation.to_queries, rotation.to_keys))
    grouped = case.rotate(q, POSITIONS).double().view(5, 2, group, head_dim)
    wanted = torch.einsum("thgd,hde->thge", grouped, tq).to(dtype).reshape(got.shape)
    assert nearly(got, wanted, 0.02)
    shifted = case.rotate(k, POSITIONS).double() - rotation.mean[1]
    keys = torch.einsum("thd,hde->the", shifted, tk).float()
    exact = stored_by_torch(case, keys, v, rotation.feedback[1].half().float())
    # Sums in fp32, errors carried in fp16: of the codes a few may fall the other way.
    assert (case.pool.records != exact.records).float().sum() <= 0.002 * keys.numel()
    slots = torch.tensor(SLOTS)[REAL]
    for one, other in zip(
        *(pool.read(1, torch.arange(3), 192) for pool in (case.pool, exact)), strict=True
    ):
        assert torch.allclose(one[slots].float(), other[slots].float(), rtol=0, atol=0.6)
        assert (one != other).float().mean() < 0.01


@needs_compiler
@every_size
@every_dtype
@pytest.mark.parametrize("blocks", [1, 5], ids="tokens over {} blocks".format)
def test_extremes_are_carried_as_pool_does(on_cpu, head_dim, dtype, blocks):
    rotation = rotation_of(2, 2, head_dim)
    rotation.mean.zero_()
    rotation.to_keys[:] = torch.eye(head_dim)
    case = Case("kv4", head_dim, dtype, 1, rotation=rotation)
    case.fused._most_blocks = blocks
    qkv = case.qkv(5)
    _, k, v = case.parts(qkv)
    k[0, 0], k[0, 1], k[1, 1, 5], k[3, 0, 3], k[4, 0, :9] = 0, 1.5, torch.nan, -torch.inf, 300
    k[3, 1] *= 1e-4
    case.store(qkv, [0] * 5, SLOTS)
    keys = case.rotate(k, [0] * 5).float().clamp(-65504, 65504)
    keys[1, 1] = torch.nan
    wanted = stored_by_torch(case, keys, v, rotation.feedback[1].half().float())
    codes = case.pool.record_bytes(head_dim) - 64 * 8  # grids may be NaN of another kind
    assert torch.equal(case.pool.records[..., :codes], wanted.records[..., :codes])
    for one, other in zip(
        *(pool.read(1, torch.arange(3), 192) for pool in (case.pool, wanted)), strict=True
    ):
        assert torch.equal(one.nan_to_num(9e4), other.nan_to_num(9e4))


MISTAKES = [
    ("store: heads", r"word \|= shuffle_xor\(word, 1\)", "(void)0"),
    ("store: heads", r"step_bits \+= [^;]+;", ";"),
    ("store: heads", r"sign = l < half \?", "sign = 0 ?"),
    ("store", r"(float d\[4\];\s+)__syncthreads\(\);", r"\1"),
    ("store", r"__syncthreads\(\);(\s+if \(warp / kPer <= now)", r"\1"),
    ("store", r"(told\.errors\[r / 2\])\[r % 2\](.*kPer)", r"\1[0]\2"),
    ("store", r"told\.errors\[r / 2\](.*kPer)", r"told.errors[0]\1"),
    ("store", r"wait_copies<0>\(\);", ""),
    ("store", r"(wait_copies<0>\(\);\s+)__syncthreads\(\);", r"\1"),
    ("small", r"__syncthreads\(\);", ""),
    ("small: norm", r"mine\[at\] = [^;]+;", ";"),
]


@needs_compiler
@pytest.mark.parametrize("mistake", every_third(MISTAKES), ids=lambda mistake: mistake[1])
def test_the_emulator_sees_mistakes(on_cpu, libraries, mistake, tmp_path):
    where, pattern, replacement = mistake
    name, _, header = where.partition(": ")
    source = PACKAGE / "engine" / "cuda" / f"{name}.cuh"
    include = PACKAGE / "kernels" / "include" / "billfish" / f"{header}.cuh"
    given = include if header else source
    broken, count = re.subn(pattern, replacement, given.read_text(), count=1)
    assert count, "the text has changed: mend the pattern"
    turned = any(word in pattern for word in ("float d", "kPer", "wait_copies"))
    programs = fused.programs(torch.float16, "kv4", 64, turned)
    mine = [program for program in programs if program.source == source]
    flags = []
    if header:  # found before the real one
        (tmp_path / "billfish").mkdir()
        (tmp_path / "billfish" / include.name).write_text(broken)
        broken, flags = None, [f"-iquote{tmp_path}"]
    on_cpu({**libraries, source: library(tmp_path, source, mine, broken, *flags)})
    with pytest.raises(AssertionError):
        if turned:
            test_turned(None, 64, torch.float16, 3, 1)
        elif name == "store":
            test_store_and_gather(None, "kv4", 64, torch.float16)
        else:
            test_rms_norm(None, torch.float16, 2048)


# -- on real GPUs


@pytest.mark.parametrize(
    ("arch", "but"), [("sm_90a", "Half"), also("sm_90a", "Bfloat"), also("sm_80", "nothing")]
)
def test_every_program_compiles_without_spills(arch, but):
    wanted = [program for program in EVERY if but not in program.name]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda program: complaints(program, arch), wanted)
    wrong = [(p.name, told) for p, told in zip(wanted, found, strict=True) if told]
    assert wanted and not wrong
