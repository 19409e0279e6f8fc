"""w4ax's products without a GPU: records, registers, and the kernels' own text on the emulated GPU
(emulator/, test_emulated.py), whose products must be the oracle's bit for bit. The
kernels before them: test_w4ax_rounding.py."""

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
from w4ax_layers import integers, layer, oracle, ordered, quantized

import billfish
from billfish.errors import UserError
from billfish.kernels import jit, tiles
from billfish.kernels.device import Gpu
from billfish.kernels.tiles import Cut
from billfish.schemes.gated import apart, order
from billfish.schemes.w4ax.cuda import arrange, plan, tile
from billfish.schemes.w4ax.cuda.instances import programs

HERE = Path(__file__).parent / "emulator"
PACKAGE = Path(billfish.__file__).parent
INCLUDE = PACKAGE / "kernels" / "include" / "billfish"
CUDA = PACKAGE / "schemes" / "w4ax" / "cuda"
FP16, BF16 = torch.float16, torch.bfloat16
TYPES = {FP16: "Half", BF16: "Bfloat"}
THREADS = {"decode": tile.THREADS, "batch": tiles.THREADS}
ONE_ROUNDING = {FP16: 2**-11, BF16: 2**-8}


# -- records

SHAPES = [(64, 128, 128), (65, 576, 64), (130, 96, 32), (3, 72, -1), (70, 1024, 512), (9, 192, 96)]


@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("asymmetric", [False, True], ids=["sym", "asym"])
def test_records_return_the_canonical_tensors(n, k, group_size, dtype, asymmetric):
    tensors, _, _ = layer(n, k, group_size, dtype, asymmetric=asymmetric)
    packed = arrange.pack(group_size, tensors)
    shape = packed.shape
    assert packed.records.shape == (shape.bands, shape.k_tiles, shape.record_bytes // 4)
    again = arrange.unpack(packed)
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype and torch.equal(again[name], tensor), name


@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES[:5], ids=str)
@pytest.mark.parametrize("asymmetric", [False, True], ids=["sym", "asym"])
def test_a_lane_reads_fragments_of_bytes(n, k, group_size, asymmetric):
    """PTX: register r of lane l has, of 16 outputs x 32 inputs, row l / 4 + 8 (r % 2) and, in byte
    b, input 16 (r / 2) + 4 (l % 4) + b; x's bytes are in the order of w4ax_quant."""
    tensors, _, _ = layer(n, k, group_size, FP16, asymmetric=asymmetric)
    codes, scales, zeros = integers(tensors)
    packed = arrange.pack(group_size, tensors)
    shape = packed.shape
    codes = pad(codes, (0, shape.k_tiles * 128 - k, 0, shape.bands * 64 - n))
    input_at = ordered(torch.arange(128))
    assert sorted(input_at.tolist()) == list(range(128))
    size = k if group_size == -1 else group_size
    for band, k_tile in itertools.product(range(shape.bands), range(shape.k_tiles)):
        record = packed.records[band, k_tile].view(torch.uint8)
        words = record[:4096].view(2, 4, 32, 4, 4)  # k64, n16, lane, step, byte
        bytes_ = record[4096:].view(-1, 4, 8, 2, shape.record_groups)
        assert len(bytes_) == 1 + asymmetric
        for n16, lane, r in itertools.product(range(4), (0, 5, 18, 31), range(4)):
            row = n16 * 16 + lane // 4 + 8 * (r % 2)
            for k32 in range(4):
                word = words[k32 // 2, n16, lane, k32 % 2 * 2 + r // 2]
                found = (word >> 4 if r % 2 else word & 15).tolist()
                first = k32 * 32 + 16 * (r // 2) + 4 * (lane % 4)
                inputs = k_tile * 128 + input_at[first : first + 4]
                assert found == codes[band * 64 + row, inputs].tolist()
                group = int(inputs[0]) // size
                if band * 64 + row < n and group < shape.groups:
                    place = (n16, lane // 4, r % 2, k32 * 32 // shape.record_group)
                    q, zero = (int(each[band * 64 + row, group]) for each in (scales, zeros))
                    assert [int(each[place]) for each in bytes_] == [q, 128 - zero * q][
                        : len(bytes_)
                    ]


def test_records_refuse_what_they_cannot_hold():
    tensors, _, _ = layer(8, 96, 32, FP16)
    with pytest.raises(UserError, match="groups of 48; its kernels take multiples of 32"):
        arrange.pack(48, tensors)
    with pytest.raises(UserError, match=r"scales are torch\.float32"):
        arrange.pack(32, {**tensors, "weight_scale": tensors["weight_scale"].float()})


def test_joined_layers_are_views():
    parts = [arrange.pack(64, layer(n, 192, 64, BF16)[0]) for n in (128, 64, 40)]
    whole, views = arrange.Packed.joined(parts)
    assert whole.shape.n == 232 and len(whole.records) == 4
    for part, view in zip(parts, views, strict=True):
        assert view.records.untyped_storage().data_ptr() == whole.records.data_ptr()
        for name, tensor in arrange.unpack(part).items():
            assert torch.equal(arrange.unpack(view)[name], tensor)


# -- registers


# The other type has the same text, and as many registers. `step`: each instance, or every second.
@pytest.mark.parametrize(
    ("dtype", "asymmetric", "sizes", "step"),
    [
        (FP16, False, (128,), 2),
        also(BF16, True, (64,), 2),
        *(also(FP16, asymmetric, (32, 128), 1) for asymmetric in (False, True)),
        *(also(BF16, asymmetric, (64,), 1) for asymmetric in (False, True)),
    ],
    ids=str,
)
def test_kernels_keep_to_their_registers(dtype, asymmetric, sizes, step):
    wanted = [
        program
        for size in sizes
        for program in programs(size, dtype, "sm_90a", asymmetric, asymmetric)
    ]
    wanted = list(dict.fromkeys(wanted))
    assert len(wanted) == 2 + 12 * len(sizes)
    wanted = second(wanted, step)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda program: jit.compile(program, "sm_90a"), wanted))
    for program, cubin in zip(wanted, made, strict=True):
        assert cubin.spill_bytes == 0 and cubin.stack_bytes == 0, program.name
        assert "Performance Loss" not in cubin.log  # wgmma one after the other
        # two CTAs of 12 warps on an SM, or one where a tile has 128 tokens or more; of 10: decode
        alone = re.search(r"batch<.*, (128, 1|256, 1|\d+, 2)>", program.name)
        most = 168 if alone else 96 if "decode" in program.name else 80
        most = 64 if "quant.cuh" in program.source.name else most  # 1024 threads
        assert 16 <= cubin.registers <= most, (program.name, cubin.registers)
    assert not programs(64, dtype, "sm_80") and not programs(64, torch.float32, "sm_90a")


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
            *_, tokens, bands = "0", *arguments.split(",")
            known[key] = compile_cpp(
                HERE / "ax.cpp",
                folder / f"run{len(known)}",
                f"-I{changed}",
                f"-I{HERE}",
                f"-I{PACKAGE / 'kernels' / 'include'}",
                f'-DKERNEL_FILE="{source}"',
                f"-D{kernel.upper()}",
                f"-DTHREADS={THREADS[kernel]}",
                f"-DTOKENS={tokens}",
                f"-DBANDS={bands}",
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


def rounded(x):
    """Bytes (m, row bytes) in the kernels' order, and {scale, 128 * sum} of each token."""
    small, scale = quantized(x)
    inputs = ordered(pad(small, (0, -x.shape[1] % 16))).to(torch.int8)
    sums = 128 * small.sum(-1, keepdim=True).to(torch.int32)
    return inputs, torch.cat([scale.view(torch.int32), sums], -1)


def product(
    compiled,
    tensors,
    group_size,
    x,
    bias,
    seed,
    cut=None,
    text=None,
    gated=False,
    sms=4,
):
    """By w4ax_batch with the tile configuration `cut`, or by w4ax_decode."""
    packed, (m, k) = arrange.pack(group_size, tensors), x.shape
    shape = packed.shape
    inputs, pairs = rounded(x)
    pairs = torch.cat([pairs, torch.full((m % 2, 2), -2, dtype=torch.int32)])
    gpu, whole = Gpu(0, "emulated", "sm_90a", sms, 232448, 233472, 0), 0
    if cut is None:
        how = tile.pick_tile(m, shape.n, shape.k, shape.record_bytes, gpu)
        size = (how.tokens, how.bands)
    else:
        sizes = (m, shape.n, shape.k_tiles, shape.record_bytes, gpu, plan.HELD)
        how = tiles.launch(cut, *sizes)
        size, whole = (cut.tokens, cut.bands), how.whole
    asymmetric = str(shape.asymmetric).lower()
    names = (TYPES[x.dtype], shape.record_group, asymmetric, *size)
    kernel = "batch" if cut else "decode"
    program = compiled(kernel, ",".join(map(str, names)), text)
    sizes = (m, shape.n, k, shape.k_tiles, how.blocks, how.stages, how.smem, whole)
    given = (packed.records, inputs, pairs, packed.bases, bias)
    splits = cut.splits if cut else 1
    made = run(program, (seed, *sizes, int(gated), splits), *given)
    return torch.frombuffer(made, dtype=x.dtype).view(m, -1)


# n, k, group size, dtype, SMs, tokens; also asymmetric up to k = 1024. 4 SMs are 2 clusters,
# or 4 where there is much: 65 to 130 outputs are passes of one band, 250 of two, 600 and 1100 of up
# to four, and several passes.
FEW = [
    (65, 104, -1, BF16, 4, (1, 16)),
    (130, 256, 128, FP16, 4, (2, 11)),
    (250, 640, 64, FP16, 4, (1, 3, 8, 9, 16)),
    (600, 384, 32, BF16, 4, (5, 13)),
    (1100, 128, 64, FP16, 2, (1, 15)),
    (70, 5120, 128, BF16, 4, (1, 9)),
    (300, 1152, 32, FP16, 6, (8, 16)),
]


@needs_compiler
@pytest.mark.parametrize("case", some(FEW, 0, 3), ids=lambda case: f"{case[0]}x{case[1]}")
def test_products_of_few_tokens(case, compiled):
    n, k, group_size, dtype, sms, tokens = case
    for m, asymmetric in itertools.product(tokens, (False, True)[: 1 + (k <= 1024)]):
        tensors, x, bias = layer(n, k, group_size, dtype, asymmetric=asymmetric)
        for seed, add in ((1, bias), (2, None)):
            y = product(compiled, tensors, group_size, x[:m], add, seed, sms=sms)
            assert torch.equal(y, oracle(tensors, group_size, x[:m], add)), (m, seed)


# n, k, group size, dtype, tile configuration, tokens, asymmetric, too, up to k = 1024: tiles that
# are whole and split along k, one and several; tails of n, k and m; every instance
BATCHES = [
    (128, 256, 128, FP16, Cut(32, 1, 0), (1, 17, 32)),
    (65, 72, -1, BF16, Cut(32, 1, 0), (3,)),
    (130, 1024, 32, FP16, Cut(64, 2, 1), (37,)),
    (301, 1152, 32, FP16, Cut(32, 1, 2), (16, 17)),
    (130, 1536, 64, BF16, Cut(64, 1, 2), (61,)),
    (520, 1408, 128, FP16, Cut(32, 1, 1), (40,)),
    (200, 576, 64, BF16, Cut(64, 1, 0), (67,)),
    (420, 1280, 32, FP16, Cut(64, 2, 1), (64, 9)),
    (77, 1024, 64, FP16, Cut(128, 1, 1), (129,)),
    (272, 1024, 32, BF16, Cut(128, 2, 1), (70,)),
    (300, 1024, 256, FP16, Cut(128, 2, 0), (131,)),
    (260, 1152, 128, BF16, Cut(256, 1, 1), (70,)),
    (136, 384, 64, FP16, Cut(256, 1, 0), (257,)),
    (200, 1152, 64, FP16, Cut(32, 1, 0, 2), (20, 32)),  # clusters
    (130, 2560, 128, BF16, Cut(64, 1, 0, 4), (61,)),
    (72, 1664, 64, FP16, Cut(64, 1, 0, 3), (50,)),
    (250, 1408, 32, FP16, Cut(128, 2, 0, 2), (70,)),
    (128, 2048, 64, BF16, Cut(256, 1, 0, 4), (131,)),
]


@needs_compiler
@pytest.mark.parametrize(
    "case",
    some(BATCHES, 0, 2, 4, 9, 13, 15),
    ids=lambda case: f"{case[0]}x{case[1]}-{case[4]}",
)
def test_products(case, compiled):
    """Bit for bit, in any order of events, with and without bias."""
    n, k, group_size, dtype, cut, tokens = case
    for m, asymmetric in itertools.product(tokens, (False, True)[: 1 + (k <= 1024)]):
        tensors, x, bias = layer(n, k, group_size, dtype, asymmetric=asymmetric)
        for seed, add in ((1, bias), (2, None)):
            y = product(compiled, tensors, group_size, x[:m], add, seed, cut)
            assert torch.equal(y, oracle(tensors, group_size, x[:m], add)), (m, seed)


@needs_compiler
def test_the_largest_sums(compiled):
    """All weights -128 or 112 and all bytes -127 or 127: unsigned sums pass 2^31, the result does
    not; and a token of NaN touches no other."""
    n, k = 72, 70_016
    tensors, x, _ = layer(n, k, 128, BF16)
    x = torch.ones(5, k, dtype=BF16)
    x[1], x[2, 1::2], x[3, 7], x[4] = -1, -1, torch.nan, 0
    wanted, base = oracle(tensors, 128, x), tensors["weight_scale"].float()
    for cut in (Cut(32, 1, 2), None):
        y = product(compiled, tensors, 128, x, None, 1, cut)
        assert y[3].isnan().all() and (y[4] == 0).all()
        assert torch.equal(y[[0, 1, 2, 4]], wanted[[0, 1, 2, 4]])
        assert float(y[0, 0]) == float((-128.0 * 127 * k * (base[0] / 127)).to(BF16))


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "cut"),
    [(BF16, Cut(64, 1, 2)), (FP16, Cut(32, 1, 0)), (BF16, Cut(128, 2, 1)), (FP16, None)],
    ids=str,
)
def test_gated_products(dtype, cut, compiled):
    """What the product without it stores, gated with torch's operators."""
    n, k, m = 72, 2048, 35 if cut else 13
    tensors, x, _ = layer(2 * n, k, 64, dtype)
    mixed = {name: tensor[order(2 * n, plan.RUN)] for name, tensor in tensors.items()}
    exact = oracle(tensors, 64, x[:m])
    y, both = (product(compiled, mixed, 64, x[:m], None, 2, cut, gated=g) for g in (True, False))
    assert torch.equal(apart(both, plan.RUN), exact)
    gate, up = exact.chunk(2, -1)
    wanted = silu(gate) * up
    assert y.shape == (m, n) and (y == wanted).float().mean() > 0.99
    torch.testing.assert_close(y, wanted, rtol=4 * ONE_ROUNDING[dtype], atol=1e-30)


MISTAKES = [
    ("batch", r"barrier_wait\(places\.full\(slot\.index\), slot\.parity\);", ";"),
    ("batch: tiles", r"barrier_wait\(places\.empty\(slot\.index\), slot\.parity\);", ";"),
    ("batch: bytes", r"word >> 4 & 0x0f0f0f0fu", "word & 0x0f0f0f0fu"),
    ("batch: bytes", r"0x80808080u - ", "0x78787878u - "),
    ("decode: bytes", r"lower \* kGroups \+ group;", "lower * kGroups;"),  # another group's scale
    ("decode: bytes", r"\(n16 \* 8 \+ lane / 4\) \* 2", "(n16 * 8 + lane / 4)"),
    ("decode: bytes", r"sum - excess", "sum"),
    ("decode", r"barrier_wait\(full \+ 8 \* slot\.index, slot\.parity\);", ";"),
    ("decode", r"barrier_wait\(empty \+ 8 \* slot\.index, slot\.parity\);", ";"),
    ("decode", r"barrier_wait\(barrier, pass >> 1 & 1\);", ";"),
    ("decode: bytes", r"x_at \^ k64 \* 64", "x_at"),
    ("decode", r"half \* 2 \+ brick, lane", "half * 2, lane"),
    ("batch", r"\(k64 \* 64 \+ step \* 32\) / 16", "(k64 * 64 + step * 16) / 16"),
    ("batch", r"j % 2 \? two\.z : two\.x", "two.x"),
    ("batch: tiles", r"while \(load_acquire\(flags - i \* kWarps\) == 0\) {}", ";"),
    ("cluster", r"cluster_wait\(\);\n            const int rank", "const int rank"),
    ("cluster: tiles", r"k_tiles \* rank / splits", "k_tiles * rank / splits / 2"),
    ("decode: bytes: asym", r"byte % 4 \* 0x1111", "byte % 4"),
    ("batch: bytes: asym", r"more\.load\(record, n16, lane\)", "more.load(record, 0, lane)"),
]


@needs_compiler
@pytest.mark.parametrize(
    "mistake", every_third(MISTAKES), ids=lambda mistake: f"{mistake[0]}: {mistake[1]}"
)
def test_the_emulator_sees_mistakes(mistake, compiled):
    where, pattern, replacement = mistake
    kernel, header, asymmetric = (*where.split(": "), "", "")[:3]
    clustered, kernel = kernel == "cluster", kernel.replace("cluster", "batch")
    path = (INCLUDE if header else CUDA) / f"{header or kernel}.cuh"
    broken, count = re.subn(pattern, replacement, path.read_text())
    assert count, "the text has changed: mend the pattern"
    broken = (path.name, broken)
    # the ring goes round; tiles are split
    tensors, x, _ = layer(200, 8192, 64, FP16, asymmetric=bool(asymmetric))
    m, cut = (3, None) if kernel == "decode" else (20, Cut(32, 1, 2))
    if clustered:
        cut = Cut(32, 1, 0, 2)
    wanted = oracle(tensors, 64, x[:m])
    for seed in range(6):
        try:
            given = (tensors, 64, x[:m], None, seed, cut, broken)
            if not torch.equal(product(compiled, *given), wanted):
                return
        except AssertionError:
            return  # the emulator stopped it
    pytest.fail("nothing seen")
