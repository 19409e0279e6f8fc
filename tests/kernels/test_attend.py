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
from billfish.engine.cuda.tables import HEAD_DIMS, ROW, TYPES, Tables, rows_of, shared_bytes
from billfish.engine.kv.cache import Room
from billfish.engine.scheduler import Piece, Sequence
from billfish.kernels import jit

HERE = Path(__file__).parent / "emulator"
PACKAGE = Path(billfish.__file__).parent
SOURCE = PACKAGE / "engine" / "cuda" / "attention.cuh"
INCLUDE = PACKAGE / "kernels" / "include"
FP16, BF16 = torch.float16, torch.bfloat16
CPU = torch.device("cpu")
PAGE = 64


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
            place = torch.arange(length)
            slots = self.pages[int(start) + place // PAGE] * PAGE + place % PAGE
            k, v = torch.randn(2, length, kv_heads, head_dim, generator=source) + 0.3
            self.pool.write(0, slots, k.to(dtype), v.to(dtype))
            mine = self.pages[int(start) :]
            read = self.pool.read(0, mine, length) if length else (k.to(dtype), v.to(dtype))
            self.keys.append(read[0]), self.values.append(read[1])

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

    def run(self, compiled, scale, window=0, blocks=5, seed=1, changed=None, invariant=False):
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
        inputs = (self.pool.records, self.q, tables.card, tables.columns["heads"])
        given = b"".join(map(bytes_of, inputs))
        program = compiled(self.kv, self.dtype, head_dim, changed)
        ran = subprocess.run([program, *map(str, numbers)], input=given, capture_output=True)
        assert ran.returncode == 0, ran.stdout[-200:].decode(errors="replace")
        return torch.frombuffer(bytearray(ran.stdout), dtype=self.dtype).view(self.q.shape)


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


# None that ends in a deadlock: the emulator takes minutes to call it one.
MISTAKES = [
    (SOURCE, r"(barrier_wait\(full \+ 8 \* slot, parity\);)", r"if (slot || parity) \1"),
    (SOURCE, r"barrier_wait\(told \+ which \* 8, item_parity\);", ";"),
    (SOURCE, r"sync_some<1, kThreads>\(\);(\s*if \(owes\) settle)", r"\1"),
    (SOURCE, r"arrived\[v.x\] = 0;", ";"),
    (INCLUDE / "billfish" / "attend_stage.cuh", r"kRoom : 8\) / kStep \* kStep", "kRoom : 8) - 2"),
]


@needs_compiler
@pytest.mark.parametrize("mistake", every_third(MISTAKES), ids=lambda mistake: mistake[1])
def test_the_emulator_sees_mistakes(mistake, compiled):
    file, *change = mistake
    text, count = re.subn(*change, file.read_text())
    assert count == 1
    made = Case("kv16", FP16, 64, 1, 2, (10, 1100))
    wanted = made.wanted(0.2, 0)
    with pytest.raises(AssertionError):
        for seed in range(1, 7):  # the last mistake shows in every sixth order of events
            rows = made.run(compiled, 0.2, blocks=2, seed=seed, changed=(file.name, text))
            assert (rows.double() - wanted).norm() / wanted.norm() < 2**-10


@pytest.mark.parametrize("kv", POOLS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", some(TYPES.values(), 0))
def test_it_compiles_without_spills(kv, head_dim, kind):
    name = f"billfish::attend<billfish::{kind}, billfish::{kv.capitalize()}, {head_dim}>"
    cubin = jit.build(jit.Program(SOURCE, name), "sm_90a")
    assert cubin.spill_bytes == cubin.stack_bytes == 0
    assert cubin.registers <= 128  # 3 blocks of 5 warps on an SM


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
