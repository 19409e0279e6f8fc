"""Products of a layer's experts on the emulated GPU (emulator/), and the kernels around them.

Routings have experts with no token, one, a full item and one token more, and all tokens on one.
"""

import ctypes
import re
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cpp_compiler import compile_cpp, needs_compiler
from emulated_launch import Emulated, library
from test_compile import complaints
from test_emulated import BF16, FP16, ONE_ROUNDING, TYPES, bytes_of, layer
from thorough import also, every_third, some
from torch.nn.functional import silu

import billfish
from billfish.kernels import routing, tiles
from billfish.kernels.clusters import CLUSTER
from billfish.kernels.device import Gpu
from billfish.kernels.tiles import Cut
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cuda import arrange, experts, experts_tile
from billfish.schemes.w4a16.cuda.gated import apart, interleaved
from billfish.schemes.w4a16.cuda.instances import kind_of

HERE = Path(__file__).parent / "emulator"
PACKAGE = Path(billfish.__file__).parent
FOLDER = PACKAGE / "schemes" / "w4a16" / "cuda"
H200 = Gpu(0, "NVIDIA H200", "sm_90a", 132, 232448, 233472, 62914560)


def emulated(sms):
    return Gpu(0, "emulated", "sm_90a", sms, 232448, 233472, 0)


def routings(experts_count, several):
    """Names -> (m, several): the experts of each token."""
    source = torch.Generator().manual_seed(experts_count)

    def some(m, of=experts_count):
        return torch.stack([torch.randperm(of, generator=source)[:several] for _ in range(m)])

    last = torch.arange(experts_count - several, experts_count)
    return {
        "one token": some(1),
        "one expert": last.repeat(11, 1),  # the others have none
        "17 of one": torch.cat((last.repeat(17, 1), last.flip(0)[None] - 1)),
        "many": some(33),
    }


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder, known = tmp_path_factory.mktemp("experts"), {}

    def build(kernel, arguments, text=None):
        key = (kernel, arguments, text)
        if key not in known:
            source, changed = FOLDER / f"{kernel}.cuh", HERE
            if text is not None:
                changed = folder / str(len(known))
                (changed / "billfish").mkdir(parents=True)
                (changed / "billfish" / text[0]).write_text(text[1])
                source = changed / "billfish" / text[0] if text[0] == source.name else source
            few = kernel == "experts"
            known[key] = compile_cpp(
                HERE / "experts.cpp",
                folder / f"run{len(known)}",
                f"-I{changed}",
                f"-I{HERE}",
                f"-I{PACKAGE / 'kernels' / 'include'}",
                f'-DKERNEL_FILE="{source}"',
                *([] if few else ["-DBATCH"]),
                f"-DTHREADS={experts_tile.THREADS if few else tiles.THREADS}",
                f"-DTOKENS={arguments.split(',')[3]}",
                f"-DKERNEL=w4a16_{kernel}<{arguments}>",
            )
        return known[key]

    return build


class Case:
    """One linear of several experts, gate and up of each where `gated`."""

    def __init__(self, count, n, k, scheme, dtype, gated=False):
        self.scheme, self.dtype, self.n, self.k, self.gated = scheme, dtype, n, k, gated
        self.tensors = []
        for expert in range(count):
            parts = [layer(n + 64 * expert + 8 * i, k, scheme, dtype)[0] for i in range(1 + gated)]
            cut = [self.first(each, n // (1 + gated)) for each in parts]
            self.tensors.append(interleaved(scheme, cut) if gated else cut[0])
        shapes, records = zip(*(arrange.pack(scheme, each) for each in self.tensors), strict=True)
        self.k_tiles, self.records = shapes[0].k_tiles, torch.stack(records)
        self.kind = kind_of(scheme, "decode", dtype)

    def first(self, tensors, rows):
        codes, zeros = self.scheme.codes(tensors), self.scheme.zeros(tensors)
        return self.scheme.pack(codes[:rows], tensors["weight_scale"][:rows], zeros[:rows])

    def x(self, m):
        source = torch.Generator().manual_seed(m)
        return (torch.randn(m, self.k, generator=source) / (1 + self.gated)).to(self.dtype)

    def wanted(self, x, index):
        """(pairs, n), exact; gated: (pairs, n / 2)."""
        several, rows = index.shape[1], []
        for pair, expert in enumerate(index.flatten().tolist()):
            y = self.scheme.reference(self.tensors[expert], x[pair // several][None])[0]
            if self.gated:
                gate, up = apart(y).chunk(2)
                y = silu(gate) * up
            rows.append(y)
        return torch.stack(rows)

    def names(self, *numbers):
        return ",".join(
            map(str, (TYPES[self.dtype], self.kind.group, str(self.kind.zeros).lower(), *numbers))
        )

    def run(self, program, numbers, x, table):
        given = b"".join(map(bytes_of, (self.records, x, table)))
        ran = subprocess.run([program, *map(str, numbers)], input=given, capture_output=True)
        assert ran.returncode == 0, ran.stdout[-200:].decode(errors="replace")
        wide = self.n // 2 if self.gated else self.n
        return torch.frombuffer(bytearray(ran.stdout), dtype=self.dtype).view(-1, wide)

    def few(self, compiled, x, index, sms, seed, known=False, text=None):
        """As ExpertsPlan.few launches it."""
        pairs, count = index.numel(), len(self.records)
        how = experts_tile.few(pairs, count, self.n, self.kind.record_bytes, emulated(sms))
        program = compiled("experts", self.names(how.tokens), text)
        sizes = (self.n, self.k, self.k_tiles, how.blocks, how.stages, how.smem, how.own)
        numbers = (seed, pairs, pairs // len(x), count, *sizes, how.table_bytes, CLUSTER)
        numbers += (int(known), int(self.gated))
        return self.run(program, numbers, x, index)

    def many(self, compiled, x, routed, cut, sms, seed, text=None):
        """As ExpertsPlan.many launches it: rows at the places of pairs."""
        sizes = (self.n, self.k_tiles, self.kind.record_bytes)
        pairs, how = len(x), experts_tile.launch(cut, *sizes, emulated(sms))
        program = compiled("experts_batch", self.names(cut.tokens, cut.bands), text)
        sizes = (self.n, self.k, self.k_tiles, how.blocks, how.stages, how.smem, how.n_tiles, 0, 1)
        numbers = (seed, pairs, 1, 1, *sizes, seed % 2, int(self.gated))
        return self.run(program, numbers, x, routed.items)


# experts, several, n, k, scheme, dtype, SMs, gated, routings
FEW = [
    (5, 2, 200, 640, W4A16(4, 128), FP16, 4, False, ("one token", "17 of one")),
    (4, 2, 65, 104, W4A16(4, -1), BF16, 2, False, ("one expert", "17 of one")),
    (9, 3, 272, 384, W4A16(4, 64, False), BF16, 6, True, ("one token", "one expert")),
    # One pass for each of six clusters, two have none.
    (9, 3, 256, 384, W4A16(4, 128), FP16, 16, True, ("one token", "one expert")),
    (70, 4, 48, 128, W4A16(4, 32, False), FP16, 4, True, ("one token", "many")),
    (3, 1, 320, 128, W4A16(4, 32), FP16, 8, False, ("one token", "17 of one", "many")),
]


@needs_compiler
@pytest.mark.parametrize(
    "case", some(FEW, 0, 1, 2, 4), ids=lambda case: f"{case[0]}x{case[2]}x{case[3]}"
)
def test_few_tokens_of_each_expert(case, compiled):
    count, several, n, k, scheme, dtype, sms, gated, names = case
    made, known = Case(count, n, k, scheme, dtype, gated), routings(count, several)
    for name in names:
        index = known[name]
        x = made.x(len(index))
        wanted = made.wanted(x, index)
        first, second = (
            made.few(compiled, x, index, sms, seed, known=bool(seed % 2)) for seed in (1, 2)
        )
        error = (first.double() - wanted).norm() / wanted.norm()
        assert error < (4 if gated else 1) * ONE_ROUNDING[dtype], (name, float(error))
        assert torch.equal(first, second), name
        alone = made.few(compiled, x[:1], index[:1], sms, 3)
        assert torch.equal(first[:several], alone), "a row depends on the others"


@needs_compiler
def test_a_row_of_x_for_each_pair(compiled):
    """As down is multiplied."""
    made = Case(5, 130, 384, W4A16(4, 128), BF16)
    index = routings(5, 2)["17 of one"]
    x = made.x(index.numel())
    y = made.few(compiled, x, index, 4, 1)
    wanted = made.wanted(x, index.reshape(-1, 1))
    assert (y.double() - wanted).norm() / wanted.norm() < ONE_ROUNDING[BF16]


@pytest.fixture(scope="module")
def router_library(tmp_path_factory):
    wanted = dict.fromkeys(p for dtype in (FP16, BF16) for p in routing.programs(dtype))
    folder = tmp_path_factory.mktemp("router")
    return library(folder, routing.SOURCE, list(wanted), None, "-DDYNAMIC_SMEM")


@pytest.fixture
def router(monkeypatch, router_library):
    """A dtype -> Router on this machine."""

    def kernel(program):
        return SimpleNamespace(load=lambda device: Emulated(router_library, program.name))

    monkeypatch.setattr(routing, "kernel", kernel)
    return lambda dtype: routing.Router(dtype, torch.device("cpu"))


@needs_compiler
@pytest.mark.parametrize(("count", "several", "m"), [(4, 2, 1), (70, 3, 50), (128, 8, 300)])
def test_pairs_are_sorted_by_expert(router, count, several, m):
    source = torch.Generator().manual_seed(m)
    index = torch.rand(m, count, generator=source).argsort(-1)[:, :several].contiguous()
    index[:, 0] = torch.where(torch.arange(m) % 3 == 0, index[:, 0], 1)  # one with a third of all
    run, tokens = router(FP16), 32
    place, items = run.route(index, count, tokens)
    order = index.flatten().argsort(stable=True)
    assert torch.equal(place[order].long(), torch.arange(m * several))
    counts, wanted, start = index.flatten().bincount(minlength=count).tolist(), [], 0
    for expert, rows in enumerate(counts):
        for first in range(0, rows, tokens):
            wanted.append([expert, start + first, start + min(first + tokens, rows), 0])
        start += rows
    assert int(items[0, 0]) == len(wanted) < len(items)
    assert items[1 : len(wanted) + 1].tolist() == wanted
    x = torch.randn(m, 264, generator=source).half()
    gathered = run.gather(x, place)
    assert torch.equal(gathered, x[order // several])


@needs_compiler
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("several", [1, 8])
def test_the_sum_of_a_tokens_experts(router, dtype, several):
    rows, weights = torch.randn(5 * several, 1032).to(dtype), torch.rand(5, several)
    place, run = torch.randperm(5 * several, dtype=torch.int32), router(dtype)
    for given in (weights, weights.to(dtype)):
        for at in (None, place):
            mine = rows if at is None else rows[at.long()]
            parts = (mine.view(5, several, -1).double() * given.double()[..., None]).unbind(1)
            wanted = torch.stack(parts).sum(0)
            y = run.combine(rows, at, given)
            torch.testing.assert_close(
                y.double(), wanted, rtol=ONE_ROUNDING[dtype], atol=ONE_ROUNDING[dtype] * 1e-2
            )


@needs_compiler
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize(("count", "several"), [(8, 2), (60, 4), (128, 8), (512, 10), (3, 3)])
def test_a_routers_choice(router, dtype, count, several):
    run = router(dtype)
    logits = (torch.randn(7, count) * 3).to(dtype)
    logits[0], logits[1] = 1, torch.arange(count).to(dtype) - 2 * count  # all alike; far apart
    softmax = logits.float().softmax(-1)
    # torch leaves open which of equal ones it takes: here the first
    wanted = torch.sort(softmax, dim=-1, descending=True, stable=True)
    for normalized in (False, True):
        for kind in (dtype, torch.float32):
            index, weights = run.choose(logits, several, normalized, kind)
            assert index.dtype == torch.int64 and weights.dtype == kind
            assert torch.equal(index, wanted.indices[:, :several])
            exact = wanted.values[:, :several]
            exact = exact / exact.sum(-1, keepdim=True) if normalized else exact
            torch.testing.assert_close(weights.float(), exact, rtol=ONE_ROUNDING[dtype], atol=1e-7)


# experts, several, n, k, scheme, dtype, cut, gated, routing
MANY = [
    (3, 2, 200, 256, W4A16(4, 128), FP16, Cut(32, 1, 0), False, "one token"),
    (4, 2, 144, 200, W4A16(4, -1), BF16, Cut(32, 2, 0), True, "17 of one"),
    (3, 1, 72, 384, W4A16(4, 32, False), FP16, Cut(64, 2, 0), False, "many"),
    (4, 3, 272, 192, W4A16(4, 64), BF16, Cut(96, 2, 0), True, "many"),
    # Stripes: of two tiles, of the last four of ten, of one.
    (4, 2, 144, 2560, W4A16(4, 128), BF16, Cut(32, 2, 0), True, "one expert"),
    (5, 2, 300, 1280, W4A16(4, 128), FP16, Cut(32, 2, 0), False, "many"),
    (2, 1, 130, 1536, W4A16(4, 64, False), FP16, Cut(128, 2, 0), False, "one token"),
]


@needs_compiler
@pytest.mark.parametrize("case", MANY, ids=lambda case: f"{case[0]}x{case[2]}x{case[3]}")
def test_many_tokens_of_each_expert(case, compiled, router):
    count, several, n, k, scheme, dtype, cut, gated, name = case
    made, index = Case(count, n, k, scheme, dtype, gated), routings(count, several)[name]
    x, run = made.x(len(index)), router(dtype)
    routed = run.route(index, count, cut.tokens)
    rows = run.gather(x, routed.place)
    first, second = (made.many(compiled, rows, routed, cut, 3, seed) for seed in (1, 2))
    assert torch.equal(first, second)
    wanted = made.wanted(x, index)
    error = (first[routed.place.long()].double() - wanted).norm() / wanted.norm()
    assert error < (6 if gated else 2) * ONE_ROUNDING[dtype], float(error)


class Launched:
    """launch.Loaded of a product, on this machine: reads and writes the tensors that the arguments
    point to."""

    def __init__(self, program, stack, x_rows):
        self.program, self.stack, self.x_rows = program, stack, x_rows

    def launch(self, grid, block, args, smem=0, cluster=1, pdl=False):
        assert pdl and args[0] == self.stack.records.data_ptr()
        if cluster == CLUSTER:
            assert block == experts_tile.THREADS
            _, x, table, out, pairs, each, count, n, bands, k, k_tiles, *more, gated = args
            stages, own, table_bytes, known = more
            size, tail = 8 * pairs, (own, table_bytes, cluster, known, gated)
            assert bands == -(-n // 64) and (pairs // each, k) == (self.x_rows, self.stack.k)
        else:
            assert block == tiles.THREADS
            _, (x, pairs, k, _), table, out, _, _, n, n_tiles, k_tiles, *more, gated = args
            stages, known = more
            each = count = 1
            size = 16 * (1 + int(torch.frombuffer(at(table, 4), dtype=torch.int32)))
            tail = (n_tiles, 0, cluster, known, gated)
        assert known is not gated
        numbers = (1, pairs, each, count, n, k, k_tiles, grid, stages, smem, *tail)
        given = [bytes(at(args[0], self.stack.records.nbytes)), bytes(at(x, pairs // each * k * 2))]
        given.append(bytes(at(table, size)))
        sent = b"".join(struct.pack("<Q", len(each)) + each for each in given)
        told = [str(int(number)) for number in numbers]
        ran = subprocess.run([self.program, *told], input=sent, capture_output=True)
        assert ran.returncode == 0, ran.stdout[-200:].decode(errors="replace")
        ctypes.memmove(out, ran.stdout, len(ran.stdout))


def at(pointer, size):
    return (ctypes.c_char * size).from_address(pointer)


@needs_compiler
@pytest.mark.parametrize("m", [3, 70])
def test_a_layer_from_choice_to_sum(m, compiled, router, monkeypatch):
    """The op's own launches, three or five of them, in its own order."""
    count, several, hidden, wide, scheme = 4, 2, 128, 64, W4A16(4, 64)
    gate_up = Case(count, 2 * wide, hidden, scheme, BF16, True)
    down = Case(count, hidden, wide, scheme, BF16)
    stacks = [experts.Stack(case.records, case.n, case.k) for case in (gate_up, down)]
    made = object.__new__(experts.ExpertsPlan)
    made.gpu, made.kind, made.router = emulated(4), gate_up.kind, router(BF16)
    asked = []

    def launched(kernel, case, *numbers):
        class Either:
            """The kernel of both linears: which one is launched, the records say."""

            def launch(self, grid, block, args, *more, **options):
                stack = next(s for s in stacks if s.records.data_ptr() == args[0])
                asked.append((kernel, numbers[0], stack is stacks[0]))
                rows = m if stack is stacks[0] else m * several
                program = compiled(kernel, case.names(*numbers))
                Launched(program, stack, rows).launch(grid, block, args, *more, **options)

        return Either()

    made._few = {t: launched("experts", gate_up, t) for t in experts_tile.TOKENS}
    made._many = {
        each: launched("experts_batch", gate_up, *each) for each in experts_tile.INSTANCES
    }
    monkeypatch.setattr(experts, "plan", lambda *given: made)
    monkeypatch.setattr(experts, "index_of", lambda device: 0)
    monkeypatch.setattr(experts.tensor_map, "of_rows", lambda *given: given)
    left = (torch.empty(0), torch.empty(0))  # the emulator has its own
    monkeypatch.setattr(experts.workspace, "of_stream", lambda *given: left)
    op = experts.CudaExperts(gate_up.kind, *stacks, [])
    x, logits = gate_up.x(m), torch.randn(m, count).bfloat16()
    index, weights = op.choose(logits, several, True, BF16)
    y = op(x, index, weights)
    few = experts_tile.runs_few(m * several, count)
    assert few == (m == 3) and [first for _, _, first in asked] == [True, False]
    assert {kernel for kernel, *_ in asked} == {"experts" if few else "experts_batch"}
    h = gate_up.wanted(x, index).bfloat16()
    rows = down.wanted(h, index.reshape(-1, 1)).view(m, several, hidden)
    wanted = (rows * weights.double()[..., None]).sum(1)
    assert (y.double() - wanted).norm() / wanted.norm() < 4 * ONE_ROUNDING[BF16]
    assert op(x[:0], index[:0], weights[:0]).shape == (0, hidden)


MISTAKES = [
    ("experts", r"barrier_wait\(full \+ 8 \* slot\.index, slot\.parity\);", ";"),
    ("experts", r"barrier_wait\(empty \+ 8 \* slot\.index, slot\.parity\);", ";"),
    ("experts", r"barrier_wait\(barrier, where >> 31\);", ";"),
    ("experts", r"bands - band", "kExpertsBands"),
    ("routing", r"token \+= __popc\(all\);", ";"),
    ("routing", r"- \(v >> 16\) \* kTokens", ""),
    ("one token: routing", r"index - item \* passes", "0"),
    ("one token: routing", r"all & \(1u << first\) - 1", "all"),
    ("experts_batch", r"if \(others > 0\) here", "if (others > 1) here"),
    ("experts_batch", r"k_tiles \+ walk\.first\)", "k_tiles)"),
]


def breaks_many(case, compiled, run, text):
    count, several, n, k, scheme, dtype, cut, gated, name = case
    made, index = Case(count, n, k, scheme, dtype, gated), routings(count, several)[name]
    x, routed = made.x(len(index)), run.route(index, count, cut.tokens)
    try:
        y = made.many(compiled, run.gather(x, routed.place), routed, cut, 3, 1, text)
    except AssertionError:
        return True
    wanted = made.wanted(x, index)
    return not torch.allclose(y[routed.place.long()].double(), wanted, rtol=1e-2, atol=1e-2)


@needs_compiler
@pytest.mark.parametrize(
    "mistake", every_third(MISTAKES), ids=lambda mistake: f"{mistake[0]}: {mistake[1]}"
)
def test_the_emulator_sees_mistakes(mistake, compiled, router):
    where, pattern, replacement = mistake
    name, _, where = where.rpartition(": ")
    include = PACKAGE / "kernels" / "include" / "billfish"
    path = (include if where == "routing" else FOLDER) / f"{where}.cuh"
    broken, count = re.subn(pattern, replacement, path.read_text())
    assert count, "the text has changed: mend the pattern"
    if where == "experts_batch":
        assert breaks_many(MANY[-2], compiled, router(FP16), (path.name, broken))
        return
    made, index = Case(5, 330, 2560, W4A16(4, 128), FP16), routings(5, 2)[name or "17 of one"]
    x = made.x(len(index))
    try:
        y = made.few(compiled, x, index, 16 if name else 4, 1, text=(path.name, broken))
    except AssertionError:
        return  # the emulator stopped it
    assert not torch.allclose(y.double(), made.wanted(x, index), rtol=1e-2, atol=1e-2)


# -- sizes, and the text for real GPUs


@pytest.mark.parametrize("experts_count", [2, 8, 60, 128, 512])
@pytest.mark.parametrize("n", [64, 1536, 28672])
def test_sizes_fit_every_spread(experts_count, n):
    for pairs in (1, 7, 8, 64, 128, 512, 2048):
        if not experts_tile.runs_few(pairs, experts_count):
            how, _ = experts_tile.many(pairs, experts_count, ((n, 16), (1024, n // 64)), 4736, H200)
            assert how.stages >= 2 and how.smem <= H200.smem_per_block
            assert how.cut.per_sm * (how.smem + 1024) <= H200.smem_per_sm
            continue
        how = experts_tile.few(pairs, experts_count, n, 4736, H200)
        assert how.stages >= 2 and 2 * (how.smem + 1024) <= H200.smem_per_sm
        bands, clusters = -(-n // 64), how.blocks // CLUSTER
        most = routing.most_items(pairs, experts_count, how.tokens)
        for items in range(1, most + 1):
            for index in {0, 1, clusters // 2, clusters - 1}:
                begin, end = (items * bands * i // clusters for i in (index, index + 1))
                assert begin == end or (end - 1) // bands - begin // bands < how.own


def test_few_tokens_are_read_once_and_many_are_batched():
    """Qwen3-30B-A3B and Mixtral: which kernel, and items of which size."""
    layers = {128: ((1536, 16), (2048, 6)), 8: ((28672, 32), (4096, 112))}
    chosen = {
        (m, count): experts_tile.few(m * several, count, 1536, 4224, H200).tokens
        if experts_tile.runs_few(m * several, count)
        else experts_tile.many(m * several, count, layers[count], 4224, H200)[0].cut.tokens * 1j
        for count, several in ((128, 8), (8, 2))
        for m in (1, 16, 64, 256, 4096)
    }
    assert chosen == {
        (1, 128): 8,
        (16, 128): 8,
        (64, 128): 8,
        (256, 128): 32j,
        (4096, 128): 96j,
        (1, 8): 8,
        (16, 8): 8,
        (64, 8): 32j,
        (256, 8): 96j,
        (4096, 8): 128j,
    }


EVERY = [W4A16(4, group, symmetric) for group in (32, 64, 128) for symmetric in (True, False)]


# bf16 is the same text with as many registers.
@pytest.mark.parametrize(
    ("dtype", "schemes"),
    [
        (FP16, [W4A16(4, 128)]),
        also(FP16, EVERY),
        also(BF16, [W4A16(4, 128), W4A16(4, 32, False)]),
    ],
    ids=["fp16", "fp16, all", "bf16"],
)
def test_every_program_compiles_without_spills(dtype, schemes):
    wanted = dict.fromkeys(
        program
        for scheme in schemes
        for program in experts.programs(kind_of(scheme, "decode", dtype))
    )
    wrong = {program.name: told for program in wanted if (told := complaints(program, "sm_90a"))}
    assert not wrong
