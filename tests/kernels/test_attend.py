"""attention.cuh's own text on an emulated GPU, against attention over what the pool reads back."""

import math
import re
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from cpp_compiler import compile_cpp, needs_compiler
from thorough import every_third, some

import billfish
from billfish.engine.cuda.chunks import MOST, Chunking
from billfish.engine.cuda.pool import POOLS
from billfish.engine.cuda.tables import (
    HEAD_DIMS,
    JOINED,
    ROW,
    TYPES,
    Tables,
    program,
    rows_of,
    shared_bytes,
)
from billfish.engine.kv.cache import Room
from billfish.engine.scheduler import Piece, Sequence
from billfish.kernels import jit
from billfish.models.decoder import Shape, apply_rope

HERE = Path(__file__).parent / "emulator"
PACKAGE = Path(billfish.__file__).parent
SOURCE = PACKAGE / "engine" / "cuda" / "attention.cuh"
INCLUDE = PACKAGE / "kernels" / "include"
ITEM, STAGE = (INCLUDE / "billfish" / f"attend_{name}.cuh" for name in ("item", "stage"))
FP16, BF16 = torch.float16, torch.bfloat16
CPU = torch.device("cpu")
PAGE = 64
EPS = 1e-6


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder, known = tmp_path_factory.mktemp("attend"), {}

    def build(kv, dtype, head_dim, changed=None):  # changed: a file's name, and its text
        key = (kv, dtype, head_dim, changed)
        if key not in known:
            source, own = SOURCE, folder / str(len(known))
            if changed is not None:
                file = own / "billfish" / changed[0]
                file.parent.mkdir(parents=True)
                file.write_text(changed[1])
                source = file if changed[0] == SOURCE.name else SOURCE
            known[key] = compile_cpp(
                HERE / "attend.cpp",
                folder / f"run{len(known)}",
                f"-I{own}",
                f"-I{HERE}",
                f"-I{INCLUDE}",
                f'-DKERNEL_FILE="{source}"',
                f"-DTYPE={TYPES[dtype]}",
                f"-DFORMAT={kv.capitalize()}",
                f"-DHEAD_DIM={head_dim}",
            )
        return known[key]

    return build


def bytes_of(tensor):
    content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return struct.pack("<Q", len(content)) + content


class Case:
    """Sequences of these lengths in shuffled pages; what is not written is NaN or garbage."""

    def __init__(self, kv, dtype, head_dim, kv_heads, group, lengths, seed=0):
        self.kv, self.dtype, self.group = kv, dtype, group
        source = torch.Generator().manual_seed(seed)
        counts = [-(-length // PAGE) for length in lengths]
        pages = torch.randperm(sum(counts) + 2, generator=source)
        self.pool = POOLS[kv](Room(1, len(pages), PAGE, kv_heads, head_dim, dtype, CPU))
        self.pool.records.fill_(0xFF)
        self.lengths, self.starts = lengths, np.cumsum([0, *counts])[:-1]
        self.pages = pages[: sum(counts)]
        self.q = torch.randn(len(lengths), kv_heads * group, head_dim, generator=source).to(dtype)
        self.keys, self.values = [], []
        for start, length in zip(self.starts, lengths, strict=True):
            k, v = torch.randn(2, length, kv_heads, head_dim, generator=source) + 0.3
            self.write(int(start), torch.arange(length), k.to(dtype), v.to(dtype))
            self.keys.append(k.to(dtype)), self.values.append(v.to(dtype))
        self.read()

    def write(self, start, place, k, v):
        """Tokens of the sequence whose pages begin at `start`."""
        self.pool.write(0, self.pages[start + place // PAGE] * PAGE + place % PAGE, k, v)

    def read(self):
        """Keys and values as they are stored."""
        for i, start in enumerate(self.starts):
            read = self.pool.read(0, self.pages[int(start) :], self.lengths[i])
            self.keys[i], self.values[i] = read

    def wanted(self, scale, window):
        rows = []
        for q, k, v in zip(self.q, self.keys, self.values, strict=True):
            first = max(0, len(k) - window) if window else 0
            k, v = (
                x[first:].double().repeat_interleave(self.group, 1).transpose(0, 1) for x in (k, v)
            )
            scores = (k @ q.double()[:, :, None])[:, :, 0] * scale
            rows.append((scores.softmax(-1)[:, None] @ v)[:, 0])
        return torch.stack(rows)

    def run(self, *given, **named):
        out, _ = self.launch(*given, **named)
        return torch.frombuffer(bytearray(out), dtype=self.dtype).view(self.q.shape)

    def launch(
        self,
        compiled,
        scale,
        window=0,
        blocks=5,
        seed=1,
        changed=None,
        invariant=False,
        projected=None,
    ):
        """Bytes of the result and, of a projection, of the pool."""
        head_dim = self.q.shape[-1]
        kv_heads = self.q.shape[1] // self.group
        chunking = Chunking(self.kv, kv_heads, sms=blocks, invariant=invariant)
        tables = Tables(len(self.lengths), max(self.lengths), (window or None,), chunking, CPU)
        pieces = [
            Piece(
                Sequence(
                    "",
                    [7] * length,
                    length,
                    pages=self.pages[start : start - -length // PAGE].tolist(),
                ),
                length - 1,
                1,
                True,
            )
            for start, length in zip(self.starts, self.lengths, strict=True)
        ]
        tables.fill(pieces, len(pieces))
        smem = shared_bytes(self.kv, head_dim)
        numbers = (seed, len(pieces), kv_heads, self.group, blocks, scale * math.log2(math.e), smem)
        q, cos, sin, norms = projected or (self.q, *[torch.empty(0)] * 3)
        numbers += (2 * cos.shape[1] if projected else 0, EPS, self.pool.limit)
        inputs = (self.pool.records, q, tables.card, tables.columns["heads"], cos, sin, norms)
        given = b"".join(map(bytes_of, inputs))
        built = compiled(self.kv, self.dtype, head_dim, changed)
        ran = subprocess.run([built, *map(str, numbers)], input=given, capture_output=True)
        assert ran.returncode == 0, ran.stdout[-200:].decode(errors="replace")
        size = self.q.nbytes
        return ran.stdout[:size], ran.stdout[size:]


# Lengths: below a tile, a page and a token, one chunk, several, many.
CASES = [
    ("kv4", FP16, 128, 2, 4, (1, 65, 700)),
    ("kv4", FP16, 128, 1, 8, (513, 40)),
    ("kv4", BF16, 64, 1, 3, (64, 512, 1100)),
    ("kv4", FP16, 64, 1, 8, (4200,)),
    ("kv8", FP16, 128, 1, 8, (33, 1100)),
    ("kv8", BF16, 64, 3, 1, (5, 600)),
    ("kv16", FP16, 128, 1, 4, (17, 600)),
    ("kv16", FP16, 128, 1, 8, (512, 49)),
    ("kv16", BF16, 64, 2, 7, (1, 16, 700)),
]


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c[:5])))
@pytest.mark.parametrize("window", [0, 100])
def test_every_format_attends(case, window, compiled):
    made = Case(*case)
    scale = 0.3
    wanted = made.wanted(scale, window)
    first, second = (made.run(compiled, scale, window, seed=seed) for seed in (1, 2))
    assert torch.equal(first, second)
    # What the pool reads back is rounded to dtype, the kernel does not; weights and result are.
    bound = 2**-7 if made.dtype is BF16 else 2**-10
    made_of = [first]
    if not window:  # other chunks: several of every format and size are added up
        made_of.append(made.run(compiled, scale, invariant=True))
    for rows in made_of:
        error = (rows.double() - wanted).norm() / wanted.norm()
        assert error < bound, float(error)


@needs_compiler
def test_a_sequence_does_not_depend_on_the_others(compiled):
    together = Case("kv4", FP16, 128, 2, 4, (300, 1, 700))
    rows = together.run(compiled, 0.2, invariant=True)
    alone = Case("kv4", FP16, 128, 2, 4, (300, 1, 700))
    alone.lengths, alone.starts, alone.q = (700,), alone.starts[2:], alone.q[2:]
    assert torch.equal(alone.run(compiled, 0.2, blocks=2, invariant=True)[0], rows[2])


class Projection:
    """q, k and v of a step's newest tokens, as a layer's projection gives them, and what RoPE and
    norms make of them: the oracles of test_engine_kernels.py."""

    def __init__(self, made, rotary, normed, seed=5):
        source = torch.Generator().manual_seed(seed)
        heads, head_dim = made.q.shape[1:]
        kv_heads, dtype = heads // made.group, made.dtype
        rows = len(made.lengths)
        numbers = torch.randn(rows, heads + 2 * kv_heads, head_dim, generator=source)
        if normed:
            numbers[::2, :-kv_heads] *= EPS**0.5  # eps counts as much as their mean square
        self.qkv = numbers.to(dtype)
        angles = torch.arange(max(made.lengths))[:, None] / 50 ** (torch.arange(0, rotary, 2) / 90)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        weights = torch.rand(2, head_dim, generator=source) + 0.5
        self.norms = weights.to(dtype) if normed else torch.empty(0)
        self.turn(made)

    def turn(self, made):
        """What is made of qkv."""
        heads = made.q.shape[1]
        kv_heads = heads // made.group
        q, k, self.v = self.qkv.split((heads, kv_heads, kv_heads), 1)
        if len(self.norms):
            q, k = (rms_norm(x, w, EPS) for x, w in zip((q, k), self.norms, strict=True))
        place = torch.tensor(made.lengths) - 1
        cos, sin = (table[place][:, None] for table in (self.cos, self.sin))
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        self.q, self.k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)

    def append(self, made):
        """To the pool as Pool.write does, and to what is read back."""
        for i, (start, length) in enumerate(zip(made.starts, made.lengths, strict=True)):
            newest = slice(i, i + 1)
            made.write(int(start), torch.tensor([length - 1]), self.k[newest], self.v[newest])
        made.q = self.q
        made.read()


def rms_norm(x, weight, eps):
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


# As CASES; the part of a head that RoPE turns, and whether heads are normed. A newest token is the
# first of its page, of its stage, of the text, and the last of a page.
PROJECTED = [
    ("kv16", FP16, 128, 1, 4, (17, 600), 128, False),
    ("kv16", BF16, 128, 2, 8, (1, 65, 640), 128, True),
    ("kv16", BF16, 64, 2, 7, (1, 16, 700), 40, False),
    ("kv16", FP16, 64, 3, 1, (64, 33), 64, True),
    ("kv8", FP16, 128, 1, 8, (33, 1100), 64, True),
    ("kv8", BF16, 64, 3, 3, (5, 600), 64, False),
    ("kv8", FP16, 128, 2, 5, (128, 1, 97), 128, False),
]


@needs_compiler
@pytest.mark.parametrize("case", PROJECTED, ids=lambda c: "-".join(map(str, c[:5])))
@pytest.mark.parametrize("window", [0, 100])
def test_attention_of_a_projection(case, window, compiled):
    """Bit for bit what RoPE, Pool.write and attention of turned queries give one after the other;
    and the same pool, but for the newest tokens' places nothing is touched."""
    *sizes, rotary, normed = case
    made = Case(*sizes)
    step = Projection(made, rotary, normed)
    given = step.qkv, step.cos, step.sin, step.norms
    found = [made.launch(compiled, 0.3, window, seed=s, projected=given) for s in (1, 2, 3)]
    assert found[0] == found[1] == found[2]
    invariant = made.launch(compiled, 0.3, window, invariant=True, projected=given)
    before = made.pool.records.clone()
    step.append(made)
    assert not torch.equal(before, made.pool.records)
    out, pool = found[0]
    assert invariant[1] == pool
    if normed:  # its sums are in another order than torch's: a code may be another
        stored, (k, v) = made.pool.records.clone(), (made.keys, made.values)
        made.pool.records = torch.frombuffer(bytearray(pool), dtype=torch.uint8).view(stored.shape)
        made.read()
        bound = 0.01 if made.kv == "kv8" else 4 * torch.finfo(made.dtype).eps
        for ours, theirs in zip(made.keys + made.values, k + v, strict=True):
            assert torch.allclose(ours.float(), theirs.float(), rtol=bound, atol=2 * bound)
        rows = torch.frombuffer(bytearray(out), dtype=made.dtype).view(made.q.shape)
        wanted = made.wanted(0.3, window)
        error = (rows.double() - wanted).norm() / wanted.norm()
        assert error < (2**-6 if made.dtype is BF16 else 2**-9), float(error)
    else:
        assert torch.equal(
            torch.frombuffer(bytearray(pool), dtype=torch.uint8), made.pool.records.flatten()
        )
        assert out == made.launch(compiled, 0.3, window)[0]
        assert invariant[0] == made.launch(compiled, 0.3, window, invariant=True)[0]


@needs_compiler
@pytest.mark.parametrize(("kv", "dtype"), [("kv8", FP16), ("kv8", BF16), ("kv16", FP16)], ids=str)
def test_a_newest_token_of_any_size(kv, dtype, compiled):
    """Infinite numbers are stored as the largest that a code's grid allows, a NaN makes its head
    NaN: as Pool.write does it, which test_pool.py tests."""
    made = Case(kv, dtype, 128, 3, 2, (65, 3, 200))
    step = Projection(made, 128, False)
    k, v = (step.qkv[:, at : at + 3] for at in (6, 9))
    most = torch.finfo(dtype).max
    k[0, 0, 5], k[0, 1, 70], v[1, 2, :3] = math.inf, -math.inf, torch.tensor([most, -most, 1])
    v[0, 0], v[2, 0, 9] = math.inf, -math.inf
    k[1, 0, 64], v[2, 1, 127] = math.nan, math.nan
    step.turn(made)
    given = step.qkv, step.cos, step.sin, step.norms
    _, pool = made.launch(compiled, 0.3, projected=given)
    step.append(made)
    wanted = made.keys + made.values
    made.pool.records.copy_(
        torch.frombuffer(bytearray(pool), dtype=torch.uint8).view_as(made.pool.records)
    )
    made.read()
    nans = [int(torch.isnan(x[-1]).any(-1).sum()) for x in wanted]
    assert nans == [0, 1, 0, 0, 0, 1]
    for ours, theirs in zip(made.keys + made.values, wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)


# None that ends in a deadlock: the emulator takes minutes to call it one.
MISTAKES = [
    (SOURCE, r"(barrier_wait\(full \+ 8 \* slot, parity\);)", r"if (slot || parity) \1"),
    (SOURCE, r"barrier_wait\(told \+ which \* 8, item_parity\);", ";"),
    (SOURCE, r"sync_some<1, kThreads>\(\);(\s*if \(owes\) settle)", r"\1"),
    (SOURCE, r"arrived\[v.x\] = 0;", ";"),
    (SOURCE, r"(given\.template take<[^;]+;\s+)sync_some<1, kThreads>\(\);", r"\1"),
    (ITEM, r"(store_k<.*) ring, all\)", r"\1 all)"),
    (ITEM, r"(store_v<.*) ring, all\)", r"\1 ring)"),
    (SOURCE, r"of\.span\.length <= token \+ kTile\b", "true"),
    (ITEM, r"if \(first\) dependency_wait\(\);", ";"),
    (STAGE, r"kRoom : 8\) / kStep \* kStep", "kRoom : 8) - 2"),
]


@needs_compiler
@pytest.mark.parametrize("mistake", every_third(MISTAKES), ids=lambda mistake: mistake[1])
def test_the_emulator_sees_mistakes(mistake, compiled):
    file, *change = mistake
    text, count = re.subn(*change, file.read_text())
    assert count == 1
    made, changed = Case("kv16", FP16, 64, 1, 2, (10, 1100)), (file.name, text)
    wanted = made.wanted(0.2, 0)
    step = Projection(made, 64, False)
    given = step.qkv, step.cos, step.sin, step.norms
    whole = made.launch(compiled, 0.2, blocks=2, projected=given)
    with pytest.raises(AssertionError):
        for seed in range(1, 7):  # the last mistake shows in every sixth order of events
            rows = made.run(compiled, 0.2, blocks=2, seed=seed, changed=changed)
            assert (rows.double() - wanted).norm() / wanted.norm() < 2**-10
            assert whole == made.launch(
                compiled, 0.2, blocks=2, seed=seed, changed=changed, projected=given
            )


@pytest.mark.parametrize("kv", POOLS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", some(TYPES, 0), ids=str)
def test_it_compiles_without_spills(kv, head_dim, dtype):
    shape = Shape(1, 1, 1, head_dim, 9, 99, (None,), 1.0)
    for joined in {False, kv in JOINED}:
        cubin = jit.build(program(shape, dtype, kv, joined), "sm_90a")
        assert cubin.spill_bytes == cubin.stack_bytes == 0
        # A quarter of an SM then holds two of a block's five warps and three of w4a16_decode's.
        assert cubin.registers <= 128


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("window", [None, 4096])
def test_chunks_cover_every_page_and_are_few(window, invariant):
    chunking = Chunking("kv4", 8, 132, invariant)
    lengths = np.array([0, 1, 64, 65, 511, 513, 4096, 5000, 40_000, 131_072], np.int32)
    starts = 3 * np.arange(len(lengths), dtype=np.int32)
    rows = rows_of(lengths, starts, window, chunking)
    assert len(rows) <= chunking.most_chunks(len(lengths))
    for i in range(len(lengths)):
        _, table, token, pages, number, count, _, length = mine = rows[rows[:, 0] == i].T
        assert (number == np.arange(len(number))).all() and (count == len(number)).all()
        assert len(number) <= MOST
        assert mine.size == 0 or pages.max() - pages.min() <= 1
        named = [at + j for at, many in zip(table, pages, strict=True) for j in range(many)]
        first = max(0, int(lengths[i]) - window) // PAGE if window else 0
        assert named == list(range(starts[i] + first, starts[i] - -lengths[i] // PAGE))
        assert (token == (table - starts[i]) * PAGE).all() and (length == lengths[i]).all()


def test_invariant_chunks_follow_from_a_length_alone():
    pages = np.array([1, 8, 9, 300, 0, 2048], np.int32)
    together = Chunking("kv4", 8, 132, True).chunks(pages)
    assert together.tolist() == [
        int(Chunking("kv16", 2, 10, True).chunks(pages[i : i + 1])[0]) for i in range(len(pages))
    ]


# Sequences x tokens, and the pages of a chunk that were quickest among those tried (H200). Half as
# many cost up to 16 % where texts are few, and more where they are many.
SWEPT = [
    ("kv4", 32, 4096, 22),
    ("kv4", 64, 4096, 22),
    ("kv4", 64, 1024, 16),
    ("kv4", 1, 4096, 8),
    ("kv4", 1, 32768, 22),
    ("kv8", 32, 4096, 22),
    ("kv16", 32, 4096, 64),
    ("kv16", 64, 1024, 16),
    ("kv16", 1, 4096, 4),
    ("kv16", 1, 32768, 16),
    ("kv16", 8, 1024, 4),
]


@pytest.mark.parametrize(("kv", "sequences", "tokens", "best"), SWEPT)
def test_chunks_are_about_as_long_as_the_quickest_were(kv, sequences, tokens, best):
    pages = np.full(sequences, tokens // PAGE, np.int32)
    found = Chunking(kv, 8, 132).chunks(pages)
    assert (found == found[0]).all()
    assert (0.5 if sequences == 1 else 0.9) < tokens / PAGE / found[0] / best < 1.1


def test_a_long_text_among_many_short_ones_is_cut():
    pages = np.array([512] + [2] * 63, np.int32)
    found = Chunking("kv4", 8, 132).chunks(pages)
    assert found[0] > 8 and (found[1:] == 1).all()


def test_many_long_texts_fit_their_workspace():
    pages = np.arange(1, 1025, dtype=np.int32)
    chunking = Chunking("kv16", 8, 132)
    assert chunking.chunks(pages).sum() <= chunking.most_chunks(len(pages))


def test_tables_that_advance_are_those_built_anew(monkeypatch):
    sequences = [Sequence(str(i), [], 400, pages=[8 * i, 8 * i + 1]) for i in range(3)]
    chunking = Chunking("kv4", 8, 132)
    old, advanced, inner = Tables(4, 512, (None, None), chunking, CPU), [], Tables._advance
    monkeypatch.setattr(
        Tables, "_advance", lambda *args: advanced.append(inner(*args)) or advanced[-1]
    )
    for step in range(100):
        starts = [40 + step, 7 + step, 60 + step]
        for one, start in zip(sequences, starts, strict=True):
            one.prompt = [step + start] * (start + 1)
            one.pages += [50 + step] * (start // PAGE + 1 - len(one.pages))
        pieces = [Piece(one, start, 1, True) for one, start in zip(sequences, starts, strict=True)]
        pieces = pieces[: 3 - step % 37 // 36]  # one leaves, and comes back
        old.fill(pieces, 4)
        before = len(advanced)
        new = Tables(4, 512, (None, None), chunking, CPU)
        new.fill(pieces, 4)
        assert not any(advanced[before:])
        end = new._shape[2]
        assert torch.equal(old.card[:end], new.card[:end]), step
    assert sum(advanced) > 80


@pytest.mark.parametrize("windows", [(None,), (None, 128)], ids=str)
def test_the_flag_of_fresh_tables_ends_with_their_step(windows):
    """Set where rows read what their step writes, in every head; and the step after it is no
    increment of it, whose flag would stay."""
    sequence, chunking = Sequence("", [9, 8, 7], 400, pages=[3]), Chunking("kv16", 8, 132)
    old, new = (Tables(4, 512, windows, chunking, CPU) for _ in range(2))
    for start, fresh in enumerate((False, True, False)):
        pieces = [Piece(sequence, start, 1, not fresh)]
        old.fill(pieces, 4, fresh=fresh)
        flags = old.columns["heads"].view(-1, ROW)[:, 2]
        assert flags.tolist() == [fresh] * len(windows)
    new.fill(pieces, 4)
    assert torch.equal(old.card, new.card)
