"""w4a16_24's kernels without a GPU: registers, and their own text on the emulated GPU (emulator/,
test_emulated.py), whose mma.sp and wgmma.sp unfold 2:4 weights by the metadata of PTX's figures."""

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
from torch.nn.functional import pad, silu

import billfish
from billfish.kernels import jit, tiles
from billfish.kernels.device import Gpu
from billfish.kernels.tiles import Cut
from billfish.schemes.gated import apart, order
from billfish.schemes.w4a16_24 import W4A16Sparse
from billfish.schemes.w4a16_24.cuda import arrange, plan, tile
from billfish.schemes.w4a16_24.cuda.instances import INSTANCES, decode_kernel, programs

HERE = Path(__file__).parent / "emulator"
PACKAGE = Path(billfish.__file__).parent
INCLUDE = PACKAGE / "kernels" / "include" / "billfish"
CUDA = PACKAGE / "schemes" / "w4a16_24" / "cuda"
FP16, BF16 = torch.float16, torch.bfloat16
TYPES = {FP16: "Half", BF16: "Bfloat"}
THREADS = {"decode": tile.THREADS, "batch": tiles.THREADS}
ONE_ROUNDING = {FP16: 2**-11, BF16: 2**-8}
H200 = Gpu(0, "NVIDIA H200", "sm_90a", 132, 232448, 233472, 0)


# -- registers


@pytest.mark.parametrize(
    ("dtype", "step"), [(FP16, 2), *(also(dtype, 1) for dtype in TYPES)], ids=str
)
def test_kernels_keep_to_their_registers(dtype, step):
    # the other type has the same text, and about as many registers
    wanted = [*programs(128 if dtype == FP16 else 32, dtype, "sm_90a")]
    assert len(wanted) == 12 == len(set(wanted))
    other = next(each for each in TYPES if each != dtype)
    wanted += [decode_kernel(dtype, other, 32, 16, bands).program for bands in (1, 2, 4)]
    wanted = second(wanted, step)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda program: jit.compile(program, "sm_90a"), wanted))
    for program, cubin in zip(wanted, made, strict=True):
        assert cubin.spill_bytes == 0 and cubin.stack_bytes == 0, program.name
        assert "Performance Loss" not in cubin.log  # wgmma one after the other
        # two CTAs of 12 warps on an SM, or one where a tile has 128 tokens or more; of 10: decode
        alone = re.search(r"batch<.*, (128, 1|256, 1|\d+, 2)>", program.name)
        most = 168 if alone else 96 if "decode" in program.name else 80
        assert 16 <= cubin.registers <= most, (program.name, cubin.registers)
    assert programs(-1, dtype, "sm_90a") == programs(128, dtype, "sm_90a")
    assert not programs(64, dtype, "sm_80") and not programs(64, torch.float32, "sm_90a")


def test_tile_configurations_fit():
    """Shared memory of an H200, and tiles that every m finds."""
    for group, n in itertools.product((32, 64, 128), (64, 4096, 28672, 57344)):
        size = arrange.Shape(n, 4096, 4096 // group, group, FP16).record_bytes
        for m in (1, 8, 9, 16):
            how = tile.pick_tile(m, n, 4096, size, H200)
            assert how.stages >= 3 and how.smem <= H200.smem_per_sm // 2 - 1024
        for m in (17, 64, 100, 1000, 5000):
            found = tiles.cheapest(m, n, 32, size, H200, plan.COSTS)
            assert found.stages >= 2 and found.smem <= H200.smem_per_block
            if found.cut.splits > 1:  # a cluster's sums lie in its ring
                sums = found.cut.tokens * found.cut.outputs * 4
                assert sums <= found.stages * found.stage_bytes
    assert set(plan.COSTS.stage_us) == set(INSTANCES)


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
            tokens, bands = arguments.split(",")[-2:]
            known[key] = compile_cpp(
                HERE / "sparse.cpp",
                folder / f"run{len(known)}",
                f"-I{changed}",
                f"-I{HERE}",
                f"-I{PACKAGE / 'kernels' / 'include'}",
                f'-DKERNEL_FILE="{source}"',
                f"-D{kernel.upper()}",
                f"-DTHREADS={THREADS[kernel]}",
                f"-DTOKENS={tokens}",
                f"-DBANDS={bands}",
                f"-DKERNEL=w4a16_24_{kernel}<{arguments}>",
            )
        return known[key]

    return build


def bytes_of(tensor):
    content = b"" if tensor is None else tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return struct.pack("<Q", len(content)) + content


def product(compiled, scheme, tensors, x, bias, seed, cut=None, text=None, gated=False, sms=4):
    """By w4a16_24_batch with the tile configuration `cut`, or by w4a16_24_decode."""
    shape, records = arrange.pack(scheme, tensors)
    m, whole, splits = len(x), 0, 1
    x = pad(x, (0, -x.shape[1] % 8))
    gpu = Gpu(0, "emulated", "sm_90a", sms, 232448, 233472, 0)
    names = [TYPES[x.dtype], shape.record_group]
    if cut is None:
        how = tile.pick_tile(m, shape.n, shape.k, shape.record_bytes, gpu)
        names.insert(1, TYPES[shape.scale_dtype])
        names += [how.tokens, how.bands]
    else:
        how = tiles.launch(cut, m, shape.n, shape.k_tiles, shape.record_bytes, gpu)
        whole, splits = how.whole, cut.splits
        names += [cut.tokens, cut.bands]
    program = compiled("batch" if cut else "decode", ",".join(map(str, names)), text)
    sizes = (m, shape.n, x.shape[1], shape.k_tiles, how.blocks, how.stages, how.smem, whole)
    given = b"".join(map(bytes_of, (records, x, bias)))
    numbers = map(str, (seed, *sizes, int(gated), splits))
    ran = subprocess.run([program, *numbers], input=given, capture_output=True)
    assert ran.returncode == 0, ran.stdout[-200:].decode(errors="replace")
    return torch.frombuffer(bytearray(ran.stdout), dtype=x.dtype).view(m, -1)


def layer(n, k, size, dtype, scale_dtype=None):
    """A scheme, its tensors, 260 tokens and a bias."""
    scheme, source = W4A16Sparse(size), torch.Generator().manual_seed(n + k)
    tensors = scheme.random_tensors(n, k, scale_dtype or dtype, source)
    x = torch.randn(260, k, generator=source).to(dtype)
    return scheme, tensors, x, torch.randn(n, generator=source).to(dtype)


# n, k, group size, dtype, dtype of scales, SMs, tokens. 4 SMs are 2 clusters, or 4 where there is
# much: 65 to 130 outputs are passes of one band, 250 of two, 600 and 1100 of up to four, and
# several passes.
FEW = [
    (65, 101, -1, BF16, BF16, 4, (1, 16)),
    (130, 256, 128, FP16, BF16, 4, (2, 11)),
    (250, 640, 64, FP16, FP16, 4, (1, 3, 8, 9, 16)),
    (600, 384, 32, BF16, FP16, 4, (5, 13)),
    (1100, 128, 64, FP16, FP16, 2, (1, 15)),
    (70, 5120, 128, BF16, BF16, 4, (1, 9)),
    (300, 1152, 32, FP16, FP16, 6, (8, 16)),
]


@needs_compiler
@pytest.mark.parametrize("case", some(FEW, 0, 2, 3, 5), ids=lambda case: f"{case[0]}x{case[1]}")
def test_products_of_few_tokens(case, compiled):
    """Rounded once, at the end; a row's bits do not depend on the others."""
    n, k, size, dtype, scale_dtype, sms, tokens = case
    scheme, tensors, x, bias = layer(n, k, size, dtype, scale_dtype)
    wanted = scheme.reference(tensors, x)
    alone = product(compiled, scheme, tensors, x[:1], None, 1, sms=sms)
    for m in tokens:
        for seed, add in ((1, bias), (2, None)):  # another order of everything
            y = product(compiled, scheme, tensors, x[:m], add, seed, sms=sms)
            exact = wanted[:m] if add is None else wanted[:m] + add.double()
            error = (y.double() - exact).norm() / exact.norm()
            assert error < ONE_ROUNDING[dtype], (m, seed, float(error))
            assert add is not None or torch.equal(y[:1], alone), "a row depends on the others"


# n, k, group size, dtype, tile configuration, tokens: tiles that are whole and split along k, one
# and several; tails of n, k and m; every instance; clusters
BATCHES = [
    (128, 256, 128, FP16, Cut(32, 1, 0), (1, 17, 32)),
    (65, 75, -1, BF16, Cut(32, 1, 0), (3,)),
    (130, 1024, 32, FP16, Cut(64, 2, 1), (37,)),
    (301, 1152, 32, FP16, Cut(32, 1, 2), (16, 17)),
    (130, 1536, 64, BF16, Cut(64, 1, 2), (61,)),
    (520, 1408, 128, FP16, Cut(32, 1, 1), (40,)),
    (200, 576, 64, BF16, Cut(64, 1, 0), (67,)),
    (77, 1024, 64, FP16, Cut(128, 1, 1), (129,)),
    (272, 1024, 32, BF16, Cut(128, 2, 1), (70,)),
    (260, 1152, 128, BF16, Cut(256, 1, 1), (70,)),
    (136, 384, 64, FP16, Cut(256, 1, 0), (257,)),
    (200, 1152, 64, FP16, Cut(32, 1, 0, 2), (20, 32)),
    (72, 1664, 64, BF16, Cut(64, 1, 0, 3), (50,)),
    (250, 1408, 32, FP16, Cut(128, 2, 0, 2), (70,)),
]


@needs_compiler
@pytest.mark.parametrize(
    "case",
    some(BATCHES, 0, 2, 4, 8, 10, 12),
    ids=lambda case: f"{case[0]}x{case[1]}-{case[4]}",
)
def test_products(case, compiled):
    """Weights and results are rounded once each; the same bits in any order of events."""
    n, k, size, dtype, cut, tokens = case
    scheme, tensors, x, bias = layer(n, k, size, dtype)
    decoded = scheme.dequantize(tensors).to(dtype).double()
    for m in tokens:
        for add in (bias, None):
            y, again = (
                product(compiled, scheme, tensors, x[:m], add, seed, cut) for seed in (1, 2)
            )
            exact = x[:m].double() @ decoded.T + (0 if add is None else add.double())
            error = (y.double() - exact).norm() / exact.norm()
            assert error < ONE_ROUNDING[dtype], (m, float(error))
            assert torch.equal(y, again)


@needs_compiler
@pytest.mark.parametrize("cut", [None, Cut(32, 1, 0)], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_identity_returns_the_weights_rounded_once(dtype, cut, compiled):
    scheme, tensors, _, _ = layer(70, 96, 32, dtype)
    eye, wanted = torch.eye(96, dtype=dtype), scheme.dequantize(tensors).to(dtype).T
    for tokens in (slice(0, 96),) if cut else (slice(25, 41), slice(80, 96)):
        y = product(compiled, scheme, tensors, eye[tokens], None, 1, cut)
        assert torch.equal(y, wanted[tokens])


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "cut"),
    [(BF16, Cut(64, 1, 2)), (FP16, Cut(32, 1, 0, 2)), (BF16, Cut(128, 2, 1)), (FP16, None)],
    ids=str,
)
def test_gated_products(dtype, cut, compiled):
    """What the product without it stores, gated with torch's operators."""
    n, k, m = 72, 2048, 35 if cut else 13
    scheme, tensors, x, _ = layer(2 * n, k, 64, dtype)
    rows = order(2 * n, plan.RUN)
    codes, places = scheme.kept(tensors)
    mixed = scheme.pack(codes[rows], places[rows], tensors["weight_scale"][rows], 2 * n, k)
    y, both = (
        product(compiled, scheme, mixed, x[:m], None, 2, cut, gated=g) for g in (True, False)
    )
    plain = product(compiled, scheme, tensors, x[:m], None, 2, cut)
    assert torch.equal(apart(both, plan.RUN), plain)
    gate, up = plain.chunk(2, -1)
    wanted = silu(gate) * up
    assert y.shape == (m, n) and (y == wanted).float().mean() > 0.99
    torch.testing.assert_close(y, wanted, rtol=4 * ONE_ROUNDING[dtype], atol=1e-30)


# Rings, walks and reductions are those of w4ax, whose tests break them.
MISTAKES = [
    ("batch", r"barrier_wait\(slot\.full, slot\.parity\);", ";"),
    ("batch", r"marks\[k64\], step\)", "marks[k64], 0)"),  # another lane's metadata
    ("batch", r"marks\[k64\], step\)", "marks[0], step)"),
    ("batch", r"step \* 64\)", "step * 32)"),
    ("batch", r"k / kGroup \* 128", "0"),  # another group's scales
    ("batch", r"zero\(8, true\)", "zero(8, false)"),
    ("cluster", r"cluster_wait\(\);\n            const int rank", "const int rank"),
    ("decode", r"barrier_wait\(full \+ 8 \* slot\.index, slot\.parity\);", ";"),
    ("decode", r"\(first \+ box\)", "first"),
    ("decode: sparse", r"places\[step / 2\]", "places[0]"),
    ("decode: sparse", r"half \* 64 \+ lane / 4 \* 8", "lane / 4 * 8"),
    ("decode: sparse", r"0xd480d480u", "0xd400d400u"),  # zero points of the upper eight outputs
    ("decode: sparse", r"k / kGroup \* 128", "0"),
]


@needs_compiler
@pytest.mark.parametrize(
    "mistake", every_third(MISTAKES), ids=lambda mistake: f"{mistake[0]}: {mistake[1]}"
)
def test_the_emulator_sees_mistakes(mistake, compiled):
    where, pattern, replacement = mistake
    kernel, _, header = where.partition(": ")
    clustered, kernel = kernel == "cluster", kernel.replace("cluster", "batch")
    path = (INCLUDE if header else CUDA) / f"{header or kernel}.cuh"
    broken, count = re.subn(pattern, replacement, path.read_text())
    assert count, "the text has changed: mend the pattern"
    broken = (path.name, broken)
    scheme, tensors, x, _ = layer(200, 4096, 64, FP16)  # the ring goes round; tiles are split
    m, cut = (3, None) if kernel == "decode" else (20, Cut(32, 1, 2))
    if clustered:
        cut = Cut(32, 1, 0, 2)
    wanted = scheme.reference(tensors, x[:m])
    for seed in range(6):
        try:
            y = product(compiled, scheme, tensors, x[:m], None, seed, cut, broken)
        except AssertionError:
            return  # the emulator stopped it
        if not (y.double() - wanted).norm() < 0.01 * wanted.norm():
            return
    pytest.fail("nothing seen")
