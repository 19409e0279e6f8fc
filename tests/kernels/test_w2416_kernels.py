"""w2416's kernels without a GPU: they compile and keep to registers, and their own text on the
emulated GPU (emulator/, test_emulated.py) gives the oracle's products in any order of events."""

import itertools
import re
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cpp_compiler import compile_cpp, needs_compiler
from thorough import also, every_third, second, some
from torch.nn.functional import silu

import billfish
from billfish.kernels import jit, tiles
from billfish.kernels.device import Gpu
from billfish.kernels.tiles import Cut
from billfish.schemes.gated import apart, order
from billfish.schemes.w2416 import W2416
from billfish.schemes.w2416.cuda import arrange, batch, plan, stripe, tile
from billfish.schemes.w2416.cuda.instances import SIXTEENTHS, programs, stripe_programs

HERE = Path(__file__).parent / "emulator"
PACKAGE = Path(billfish.__file__).parent
CUDA = PACKAGE / "schemes" / "w2416" / "cuda"
FP16, BF16 = torch.float16, torch.bfloat16
TYPES = {FP16: "Half", BF16: "Bfloat"}
THREADS = {
    "decode": tile.THREADS,
    "panel": plan.PANEL_THREADS,
    "order": batch.ORDER_THREADS,
    "stripe": stripe.THREADS,
    "batch": tiles.THREADS,
}
ONE_ROUNDING = {FP16: 2**-11, BF16: 2**-8}


# (kernel, tokens and bands) -> bytes: numbers of a tile or of a pass; in w2416_batch, where two
# blocks are on an SM, offsets, up to three of which are loaded in a stage, and the producers'
SPILLED = {("batch", "32, 1"): 124, ("batch", "64, 1"): 156, ("batch", "128, 2"): 12}
SPILLED["batch", "256, 1"] = 12


# bf16: the same text, and as many registers. `step`: each instance, or every second.
@pytest.mark.parametrize(
    ("dtype", "step"), [(FP16, 2), *(also(dtype, 1) for dtype in TYPES)], ids=str
)
def test_kernels_keep_to_their_registers(dtype, step):
    wanted = programs(dtype, "sm_90a")
    assert len(set(wanted)) == 13
    wanted = second(wanted, step)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda program: jit.compile(program, "sm_90a"), wanted))
    for program, cubin in zip(wanted, made, strict=True):
        instance = re.search(r"w2416_(.*), (\d+, \d)>", program.name)
        most = SPILLED.get(instance and (instance[1].partition("<")[0], instance[2]), 0)
        assert cubin.spill_bytes <= most, (program.name, cubin.spill_bytes)
        # two CTAs of 12 warps on an SM, or one where a tile has 128 tokens or more; of 10: decode
        alone = re.search(r"batch<.*, (128|256), \d>", program.name)
        most = 168 if alone else 96 if "decode" in program.name else 80
        assert 16 <= cubin.registers <= most, (program.name, cubin.registers)
    assert not programs(dtype, "sm_80") and not programs(torch.float32, "sm_90a")


# sm_86 and sm_89 run the text of sm_80: one type each, and the instances that need most registers.
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [("sm_80", FP16), also("sm_80", BF16), also("sm_86", FP16), ("sm_89", BF16)],
    ids=str,
)
def test_stripes_compile_without_spills(arch, dtype):
    wanted = stripe_programs(dtype, arch)
    assert len(set(wanted)) == 3
    for program in wanted if (arch, dtype) == ("sm_80", FP16) else wanted[1:]:
        cubin = jit.compile(program, arch)
        assert cubin.spill_bytes == 0 and cubin.stack_bytes == 0, program.name
        assert 16 <= cubin.registers <= 200, (program.name, cubin.registers)  # ten warps
    assert not stripe_programs(dtype, "sm_90a") and not stripe_programs(torch.float32, arch)


# -- on the emulated GPU


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder, known = tmp_path_factory.mktemp("emulator"), {}

    def build(kernel, arguments, text=None):
        key = (kernel, arguments, text)
        if key not in known:
            source = CUDA / f"{kernel}.cuh"
            if text is not None:
                source = folder / f"{len(known)}.cuh"
                source.write_text(text)
            tokens, _, bands = arguments.rpartition(",")
            known[key] = compile_cpp(
                HERE / "mixed.cpp",
                folder / f"run{len(known)}",
                f"-I{HERE}",
                f"-I{PACKAGE / 'kernels' / 'include'}",
                f'-DKERNEL_FILE="{source}"',
                f"-D{kernel.upper()}",
                f"-DTHREADS={THREADS[kernel]}",
                f"-DTOKENS={tokens.rpartition(',')[2]}",
                f"-DBANDS={bands}",
                f"-DKERNEL=w2416_{kernel}" + (f"<{arguments}>" if arguments else ""),
            )
        return known[key]

    return build


def bytes_of(tensor):
    content = b"" if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return struct.pack("<Q", len(content)) + content


def run(program, packed, m, grid, stages, smem, stage, x, bias=None, seed=1, gated=False, whole=0):
    shape = packed.shape
    sizes = (m, shape.n, shape.k, shape.tiles_2, shape.tiles_4, shape.sets)
    numbers = (seed, *sizes, packed.records.shape[1], grid, stages, smem, stage, int(gated))
    numbers += (tile.list_bytes(shape.longest), whole)
    given = b"".join(map(bytes_of, (packed.records, packed.columns, x, bias)))
    ran = subprocess.run([program, *map(str, numbers)], input=given, capture_output=True)
    assert ran.returncode == 0, ran.stdout[-200:].decode(errors="replace")
    return torch.frombuffer(bytearray(ran.stdout), dtype=shape.dtype)


def product(compiled, packed, x, bias, seed, text=None, gated=False, sms=4):
    gpu = Gpu(0, "emulated", "sm_90a", sms, 232448, 233472, 0)
    how = tile.pick_tile(len(x), packed.shape.n, packed.shape.k, packed.shape.longest, gpu)
    names = (TYPES[x.dtype], *SIXTEENTHS, how.tokens, how.bands)
    program = compiled("decode", ",".join(map(str, names)), text)
    stage = tile.stage_bytes(len(x), how.bands, packed.shape.longest)
    launch = (len(x), how.blocks, how.stages, how.smem, stage)
    return run(program, packed, *launch, x, bias, seed, gated).view(len(x), -1)


def product_of_many(compiled, packed, x, bias, seed, cut, text=None, gated=False):
    order = compiled("order", "")
    ordered = run(order, packed, len(x), 3, 0, 0, 0, x, seed=seed).view(len(x), -1)
    gpu = Gpu(0, "emulated", "sm_90a", 4, 232448, 233472, 0)
    stages, room = batch.stages_along_k(packed.shape), batch.band_bytes(packed.shape)
    how = tiles.launch(cut, len(x), packed.shape.n, stages, room, gpu)
    names = (TYPES[x.dtype], *SIXTEENTHS, cut.tokens, cut.bands)
    program = compiled("batch", ",".join(map(str, names)), text)
    launch = (len(x), how.blocks, how.stages, how.smem, how.stage_bytes)
    made = run(program, packed, *launch, ordered, bias, seed, gated, how.whole)
    return made.view(len(x), -1)


def striped(compiled, packed, x, bias, seed, text=None, sms=2, smem=99 * 1024):
    gpu, shape, m = Gpu(0, "emulated", "sm_86", sms, smem, smem, 0), packed.shape, len(x)
    names = (TYPES[x.dtype], *SIXTEENTHS, 8 if m <= 8 else 16)
    program = compiled("stripe", ",".join(map(str, names)), text)
    stages, room = stripe.stages(m, shape, gpu), stripe.smem_bytes(m, shape, gpu)
    launch = (m, stripe.partition(shape, sms).blocks, stages, room, 0)
    return run(program, packed, *launch, x, bias, seed).view(m, -1)


def layer(scheme, n, k, dtype):
    source = torch.Generator().manual_seed(n + k)
    tensors = scheme.random_tensors(n, k, dtype, source)
    some = tensors["outlier_place"][..., ::2]  # in groups of 4 bits, too
    some.copy_(torch.randint(16 * scheme.shares(k).part, some.shape, generator=source))
    x = torch.randn(80, k, generator=source).to(dtype)
    return tensors, x, torch.randn(n, generator=source).to(dtype)


# n, k, scheme, dtype, SMs, tokens. 4 SMs are 2 clusters, and 2 are 2 where there is much: up to 128
# outputs are passes of one band, 144 and 208 of two, 272 of three, 528 two passes. k = 96: no 4-bit
# groups; 1536: two parts; 1024 at 2.6 bits: a record with scales of two parts.
CASES = [
    (48, 576, W2416(2.91), FP16, 4, (1, 3, 8)),
    (112, 96, W2416(2.91), FP16, 4, (8,)),
    (144, 1536, W2416(3.3, 0.005), BF16, 4, (16,)),
    (208, 512, W2416(3.0, 0.0), BF16, 4, (3,)),
    (80, 1024, W2416(2.6), FP16, 4, (16,)),
    (272, 144, W2416(3.3, 0.01), BF16, 2, (16,)),
    (528, 160, W2416(3.9, 0.02), FP16, 2, (8,)),
]


@needs_compiler
@pytest.mark.parametrize(
    "case", some(CASES, 0, 1, 2, 4, 5), ids=lambda case: f"{case[0]}x{case[1]}"
)
def test_products(case, compiled):
    n, k, scheme, dtype, sms, tokens = case
    tensors, x, bias = layer(scheme, n, k, dtype)
    packed = arrange.pack(scheme, tensors)
    wanted = scheme.reference(tensors, x) + bias.double()
    # another order of everything, and memory that takes its time
    other = product(compiled, packed, x[: tokens[0]], bias, seed=1, sms=sms)
    for m in tokens:
        y = product(compiled, packed, x[:m], bias, seed=2, sms=sms)
        error = (y.double() - wanted[:m]).norm() / wanted[:m].norm()
        assert error < ONE_ROUNDING[dtype], (m, float(error))
        assert torch.equal(y[: len(other)], other[:m]), "a row depends on the others"


# n, k, scheme, dtype, tile configuration, tokens: tiles that are whole and split along k, one and
# several; k = 96: no 4-bit groups; 1024 at 2.6 bits: a record with scales of two parts; 2 % of
# outliers: lists of more than a warp's 32
BATCHES = [
    (48, 576, W2416(2.91), FP16, Cut(32, 1, 0), (17, 40)),
    (208, 96, W2416(2.91), BF16, Cut(32, 1, 0), (31,)),
    (144, 1536, W2416(3.3, 0.005), BF16, Cut(64, 1, 2), (61,)),
    (80, 1024, W2416(2.6), FP16, Cut(32, 1, 2), (17,)),
    (272, 2048, W2416(3.9, 0.02), FP16, Cut(128, 2, 1), (70,)),
    (528, 640, W2416(3.0, 0.0), BF16, Cut(64, 1, 1), (67,)),
    (128, 384, W2416(2.7), FP16, Cut(256, 1, 0), (80,)),
]


@needs_compiler
@pytest.mark.parametrize(
    "case", some(BATCHES, 0, 1, 2, 4, 6), ids=lambda case: f"{case[0]}x{case[1]}-{case[4]}"
)
def test_products_of_many_tokens(case, compiled):
    n, k, scheme, dtype, cut, tokens = case
    tensors, x, bias = layer(scheme, n, k, dtype)
    packed = arrange.pack(scheme, tensors)
    wanted = scheme.reference(tensors, x) + bias.double()
    for m in tokens:
        first, other = (
            product_of_many(compiled, packed, x[:m], bias, seed, cut) for seed in (1, 2)
        )
        error = (first.double() - wanted[:m]).norm() / wanted[:m].norm()
        assert error < 2 * ONE_ROUNDING[dtype], (m, float(error))  # weights are rounded, too
        assert torch.equal(first, other), "another order of events, another result"


@needs_compiler
def test_order_of_inputs(compiled):
    """Each of 64 inputs of 2 bits: four of each group of 16 for a k16 step, in the lanes' order."""
    scheme = W2416(2.91)
    tensors, x, _ = layer(scheme, 16, 576, FP16)
    packed = arrange.pack(scheme, tensors)
    made = run(compiled("order", ""), packed, 3, 2, 0, 0, 0, x[:3]).view(3, -1)
    middle = packed.shape.tiles_2 * 256
    columns = packed.columns.long()[:, None] + torch.arange(16)
    groups = torch.where(packed.columns[:, None] >= 0, x[:3][:, columns.clamp(min=0)], 0)
    blocks = groups[:, : middle // 16].view(3, -1, 4, 4, 2, 2)  # block, c, step, half, pair
    assert torch.equal(made[:, :middle], blocks.permute(0, 1, 3, 4, 2, 5).flatten(1))
    assert torch.equal(made[:, middle:], groups[:, middle // 16 :].flatten(1))


@needs_compiler
def test_tokens_do_not_change_a_row(compiled):
    """The instances for 8 and 16 tokens add in the same order."""
    scheme = W2416(3.3, 0.005)
    tensors, x, _ = layer(scheme, 144, 512, BF16)
    packed = arrange.pack(scheme, tensors)
    few, many = (product(compiled, packed, x[:m], None, 2) for m in (2, 9))
    assert torch.equal(few, many[:2])


@needs_compiler
@pytest.mark.parametrize("columns", [1, 200])  # all at one place; all in one row
def test_outliers_that_meet(columns, compiled):
    scheme = W2416(3.9, 0.02)
    tensors, x, _ = layer(scheme, 48, 576, FP16)
    places = 5 * 576 + torch.arange(tensors["outlier_place"].numel()) * 7 % columns
    tensors["outlier_place"] = places.view_as(tensors["outlier_place"]).to(torch.int16)
    packed, wanted = arrange.pack(scheme, tensors), scheme.reference(tensors, x[:3])
    y = product(compiled, packed, x[:3], None, 2)
    assert (y.double() - wanted).norm() < ONE_ROUNDING[FP16] * wanted.norm()


@needs_compiler
@pytest.mark.parametrize("sms", [6, 8])  # three clusters, four: every output belongs to one
def test_any_number_of_clusters(sms, compiled):
    scheme = W2416(2.91)
    tensors, x, _ = layer(scheme, 112, 144, FP16)
    packed, wanted = arrange.pack(scheme, tensors), scheme.reference(tensors, x[:8])
    y = product(compiled, packed, x[:8], None, 2, sms=sms)
    assert (y.double() - wanted).norm() < ONE_ROUNDING[FP16] * wanted.norm()


@needs_compiler
@pytest.mark.parametrize("cut", [None, Cut(64, 1, 2)], ids=str)
def test_gated_products(cut, compiled):
    """What the product without it stores, gated with torch's operators."""
    scheme, n, m = W2416(3.0, 0.0), 112, 20 if cut else 3
    tensors, x, _ = layer(scheme, 2 * n, 2048 if cut else 512, BF16)
    bands = order(2 * n, plan.RUN)[:: plan.RUN] // plan.RUN
    rows = {name: tensor for name, tensor in tensors.items() if name != "input_bits"}
    mixed = {
        name: tensor.view(2 * n // plan.RUN, -1, *tensor.shape[1:])[bands].flatten(0, 1)
        for name, tensor in rows.items()
    }
    packed = arrange.pack(scheme, {"input_bits": tensors["input_bits"], **mixed})
    y, both = (
        product_of_many(compiled, packed, x[:m], None, 2, cut, gated=g)
        if cut
        else product(compiled, packed, x[:m], None, 2, gated=g)
        for g in (True, False)
    )
    gate, up = apart(both, plan.RUN).chunk(2, -1)
    wanted = silu(gate) * up
    assert y.shape == (m, n) and (y == wanted).float().mean() > 0.99
    torch.testing.assert_close(y, wanted, rtol=4 * ONE_ROUNDING[BF16], atol=1e-30)
    exact = scheme.reference(tensors, x[:m])
    error = apart(both, plan.RUN).double() - exact
    assert error.norm() < (2 if cut else 1) * ONE_ROUNDING[BF16] * exact.norm()


# n, k, scheme, dtype, SMs, tokens: tiles of 128 outputs, 2 to 17 slices, 1 to 4 stripes. No 4-bit
# groups, no outliers, many; two parts, scales of two and of eight parts in a record; a tile of four
# stripes; stripes of several tiles.
STRIPES = [
    (112, 576, W2416(2.473, 0.0), FP16, 4, (8, 1)),
    (144, 1536, W2416(3.3, 0.005), BF16, 4, (16,)),
    (208, 512, W2416(3.0, 0.0), FP16, 1, (3, 1)),
    (16, 4096, W2416(2.6), FP16, 4, (16,)),
    (272, 144, W2416(3.3, 0.01), BF16, 2, (16,)),
    (528, 160, W2416(3.9, 0.02), FP16, 3, (8, 3)),
    (80, 1024, W2416(3.9, 0.02), FP16, 4, (9, 2)),
]


@needs_compiler
@pytest.mark.parametrize("case", STRIPES, ids=lambda case: f"{case[0]}x{case[1]}")
def test_stripes(case, compiled):
    """On sm_86, where the ring has 2 to 4 stages; a row is the same for every m."""
    n, k, scheme, dtype, sms, tokens = case
    tensors, x, bias = layer(scheme, n, k, dtype)
    packed = arrange.pack(scheme, tensors)
    wanted = scheme.reference(tensors, x) + bias.double()
    first = striped(compiled, packed, x[: tokens[0]], bias, seed=1, sms=sms)
    error = (first.double() - wanted[: tokens[0]]).norm() / wanted[: tokens[0]].norm()
    assert error < ONE_ROUNDING[dtype], float(error)
    # another order of everything, the ring of sm_80
    for m, smem in [(tokens[0], 163 * 1024), *((m, 99 * 1024) for m in tokens[1:])]:
        y = striped(compiled, packed, x[:m], bias, seed=2, sms=sms, smem=smem)
        assert torch.equal(y, first[:m]), "a row depends on the others"


@needs_compiler
def test_any_number_of_stripes(compiled):
    """Sums are added in another order, and end as near to the oracle's."""
    scheme = W2416(2.91)
    tensors, x, _ = layer(scheme, 240, 2048, FP16)
    packed, wanted = arrange.pack(scheme, tensors), scheme.reference(tensors, x[:2])
    for sms in (1, 3, 5):
        y = striped(compiled, packed, x[:2], None, 2, sms=sms)
        assert (y.double() - wanted).norm() < ONE_ROUNDING[FP16] * wanted.norm()


@needs_compiler
@pytest.mark.parametrize(("n", "k", "dtype"), [(80, 576, FP16), (16, 2048, BF16)], ids=str)
def test_panels_are_the_weights_rounded_once(n, k, dtype, compiled):
    for scheme in (W2416(2.6), W2416(3.9, 0.02)):
        tensors, _, _ = layer(scheme, n, k, dtype)
        packed = arrange.pack(scheme, tensors)
        program = compiled("panel", ",".join(map(str, (TYPES[dtype], *SIXTEENTHS))))
        made = run(program, packed, 0, packed.shape.bands, 0, plan.PANEL_SMEM, 0, None)
        assert torch.equal(made.view(n, k), scheme.dequantize(tensors).to(dtype))


MISTAKES = [
    ("decode", r"barrier_wait\(unread, pass - 1 & 1\)", "{}"),
    ("decode", r"barrier_init\(full \+ 8 \* i, 4 \+ 32\)", "barrier_init(full + 8 * i, 3 + 32)"),
    ("decode", r"\* \(kSetBytes / 2\)", "* 0"),  # the other half's outliers
    (
        "batch",
        r"barrier_init\(places\.full\(i\), kTeams \* kBands\)",
        "barrier_init(places.full(i), 1)",
    ),
    ("batch", r"if \(held\.last\) break;", "break;"),
    ("batch", r"index == first \* 4 \+ i", "false"),
    ("batch", r"mine\.y >> bit_of\(first \* 4 \+ i\) & 1", "false"),
    ("batch", r"any\(here && load_smem_4\(to \+ 4\) != which\) \|\| ", ""),  # two for one slot
    ("batch", r"store_smem_8\(to, 0, 0\);", ";"),  # outliers of the stage before
    ("batch", r"clear_slots\(turn, lane\);", ""),
    ("stripe", r"wait_copies<\d>\(\);", ";"),
    ("stripe", r"SetPlaces<kRecordK>\(lists, ", "SetPlaces<kRecordK>(lists + 4, "),
]


@needs_compiler
@pytest.mark.parametrize(
    "mistake", every_third(MISTAKES), ids=lambda mistake: f"{mistake[0]}: {mistake[1]}"
)
def test_the_emulator_sees_mistakes(mistake, compiled):
    kernel, pattern, replacement = mistake
    broken, count = re.subn(pattern, replacement, (CUDA / f"{kernel}.cuh").read_text())
    assert count, "the text has changed: mend the pattern"
    m = 20 if kernel == "batch" else 2
    size = (272, 1024) if kernel == "stripe" else (112, 4096)  # the ring goes round
    if "unread" in pattern:
        size = (1040, 96)  # several passes
    # lists of more than 32 outliers, and such of which a lane rarely has two
    schemes = (W2416(3.9, 0.02), W2416(3.0)) if kernel == "batch" else (W2416(3.9, 0.02),)
    layers = [(scheme, *layer(scheme, *size, FP16)) for scheme in schemes]
    for seed, (scheme, tensors, x, _) in itertools.product(range(8), layers):
        packed, wanted = arrange.pack(scheme, tensors), scheme.reference(tensors, x[:m])
        try:
            if kernel == "batch":
                cut = Cut(32, 1, 2)
                y = product_of_many(compiled, packed, x[:m], None, seed, cut, broken)
            else:
                call = product if kernel == "decode" else striped
                y = call(compiled, packed, x[:m], None, seed, broken, sms=2)
        except AssertionError:
            return  # the emulator stopped it
        if not torch.allclose(y.double(), wanted, rtol=1e-2, atol=1e-2):
            return
    pytest.fail("nothing seen")
