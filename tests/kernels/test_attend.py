"""attention.cuh's own text on an emulated GPU, against attention over what the pool reads back."""

import math
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import billfish
from billfish.engine import decode
from billfish.engine.cache import Room
from billfish.engine.pool import POOLS
from billfish.engine.scheduler import Piece, Sequence
from billfish.kernels import jit

HERE = Path(__file__).parent / "emulator"
PACKAGE = Path(billfish.__file__).parent
SOURCE = PACKAGE / "engine" / "attention.cuh"
FP16, BF16 = torch.float16, torch.bfloat16
CPU = torch.device("cpu")
PAGE = 64

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder, known = tmp_path_factory.mktemp("attend"), {}

    def build(kv, dtype, head_dim, text=None):
        key = (kv, dtype, head_dim, text)
        if key not in known:
            source = SOURCE
            if text is not None:
                source = folder / f"{len(known)}.cuh"
                source.write_text(text)
            known[key] = folder / f"run{len(known)}"
            subprocess.run([
                "g++", "-O1", "-std=c++20", "-w", f"-I{HERE}",
                f"-I{PACKAGE / 'kernels' / 'include'}", f'-DKERNEL_FILE="{source}"',
                f"-DTYPE={decode.TYPES[dtype]}", f"-DFORMAT={kv.capitalize()}",
                f"-DHEAD_DIM={head_dim}", HERE / "attend.cpp", "-o", known[key],
            ], check=True)  # fmt: skip
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

    def run(self, compiled, scale, window=0, blocks=5, seed=1, text=None):
        head_dim = self.q.shape[-1]
        kv_heads = self.q.shape[1] // self.group
        tables = decode.Tables(len(self.lengths), max(self.lengths), (window or None,), CPU)
        pieces = [
            Piece(Sequence("", [7] * length, length, pages=self.pages[start:].tolist()),
                  length - 1, 1, True)
            for start, length in zip(self.starts, self.lengths, strict=True)
        ]  # fmt: skip
        tables.fill(pieces, len(pieces))
        stage = decode.STAGE_TOKENS[self.kv] * self.pool.record_bytes(head_dim) // PAGE
        smem = min(decode.RING // stage, 6) * (stage + 16)
        numbers = (seed, len(pieces), kv_heads, self.group, blocks, scale * math.log2(math.e), smem)
        inputs = (self.pool.records, self.q, tables.card, tables.columns["heads"])
        given = b"".join(map(bytes_of, inputs))
        program = compiled(self.kv, self.dtype, head_dim, text)
        ran = subprocess.run([program, *map(str, numbers)], input=given, capture_output=True)
        assert ran.returncode == 0, ran.stdout[-200:].decode(errors="replace")
        return torch.frombuffer(bytearray(ran.stdout), dtype=self.dtype).view(self.q.shape)


# Lengths: below a stage, a page and a token, several chunks, many of them.
CASES = [
    ("kv4", FP16, 128, 2, 4, (1, 65, 700)),
    ("kv4", BF16, 64, 1, 3, (64, 200)),
    ("kv8", FP16, 128, 1, 8, (33, 300)),
    ("kv8", BF16, 64, 3, 1, (5, 130)),
    ("kv16", FP16, 128, 1, 4, (17, 600)),
    ("kv16", BF16, 64, 2, 7, (1, 16, 140)),
]


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[2]}-{c[1]}".replace("torch.", ""))
@pytest.mark.parametrize("window", [0, 100])
def test_every_format_attends(case, window, compiled):
    made = Case(*case)
    scale = 0.3
    wanted = made.wanted(scale, window)
    first, second = (made.run(compiled, scale, window, seed=seed) for seed in (1, 2))
    assert torch.equal(first, second)
    # What the pool reads back is rounded to dtype, the kernel does not; weights and result are.
    bound = 2**-7 if made.dtype is BF16 else 2**-10
    error = (first.double() - wanted).norm() / wanted.norm()
    assert error < bound, float(error)


@needs_compiler
def test_a_sequence_does_not_depend_on_the_others(compiled):
    together = Case("kv4", FP16, 128, 2, 4, (300, 1, 700))
    rows = together.run(compiled, 0.2)
    alone = Case("kv4", FP16, 128, 2, 4, (300, 1, 700))
    alone.lengths, alone.starts, alone.q = (700,), alone.starts[2:], alone.q[2:]
    assert torch.equal(alone.run(compiled, 0.2, blocks=2)[0], rows[2])


MISTAKES = [
    (r"barrier_wait\(full \+ 8 \* slot, parity\);", ";"),
    (r"fetched = fetched_ahead,", "fetched = 0,"),
    (r"if \(lane == 0\) \*counter = 0;", ";"),
]


@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[0])
def test_the_emulator_sees_mistakes(mistake, compiled):
    text, count = re.subn(*mistake, SOURCE.read_text())
    assert count == 1
    made = Case("kv16", FP16, 64, 1, 2, (700,))
    wanted = made.wanted(0.2, 0)
    with pytest.raises(AssertionError):
        for seed in range(1, 6):
            rows = made.run(compiled, 0.2, blocks=2, seed=seed, text=text)
            assert (rows.double() - wanted).norm() / wanted.norm() < 2**-10


@pytest.mark.parametrize("kv", POOLS)
@pytest.mark.parametrize("head_dim", decode.HEAD_DIMS)
@pytest.mark.parametrize("kind", decode.TYPES.values())
def test_it_compiles_without_spills(kv, head_dim, kind):
    name = f"billfish::attend<billfish::{kind}, billfish::{kv.capitalize()}, {head_dim}>"
    cubin = jit.build(jit.Program(SOURCE, name), "sm_90a")
    assert cubin.spill_bytes == cubin.stack_bytes == 0
    assert cubin.registers <= 255


def test_chunks_cover_every_page_and_are_few():
    lengths = np.arange(0, 200_000, 37, dtype=np.int32)
    counts = decode.chunks(lengths, None)
    pages = -(-lengths // PAGE)
    assert counts[0] == 0 and counts.max() <= 32
    assert ((counts > 0) == (lengths > 0)).all()
    each = decode.chunk_pages(pages)
    assert (counts * each >= pages).all() and ((counts - 1) * each < np.maximum(pages, 1)).all()
    windowed = decode.chunks(lengths, 4096)
    assert windowed.max() <= decode.chunks(np.array([4096 + 63], np.int32), None).max()


def test_tables_that_advance_are_those_built_anew(monkeypatch):
    sequences = [Sequence(str(i), [], 400, pages=[8 * i, 8 * i + 1]) for i in range(3)]
    old, advanced, inner = decode.Tables(4, 512, (None, None), CPU), [], decode.Tables._advance
    monkeypatch.setattr(
        decode.Tables, "_advance", lambda *args: advanced.append(inner(*args)) or advanced[-1]
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
        new = decode.Tables(4, 512, (None, None), CPU)
        new.fill(pieces, 4)
        assert not any(advanced[before:])
        end = new._shape[2]
        assert torch.equal(old.card[:end], new.card[:end]), step
    assert sum(advanced) > 80
