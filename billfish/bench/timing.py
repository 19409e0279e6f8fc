"""How kernels are timed on a GPU.

A chain of launches over rotating copies of the weights is captured in a CUDA graph and replayed.
The copies do not fit in the L2 cache, so every launch reads from memory, as in a model. The cache
is not flushed: a flush writes, and its dirty lines would be written back while a kernel is timed.

    copy 0, copy 1, ... copy c-1, copy 0, ...   one graph;  event | replay | event | replay | event

Mode "pdl" launches with programmatic dependencies, as models do; in mode "plain" each launch waits
for the end of the one before.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from billfish.bench import nvml
from billfish.errors import UserError
from billfish.kernels import device, jit, launch

Call = Callable[[], object]
Readings = dict[str, Any] | None
MODES = ("pdl", "plain")
READ_BYTES = 2**30
READ_THREADS, READ_BLOCK = 512, 512 * 8 * 16  # read.cuh
READ = launch.Kernel(jit.Program(Path(jit.__file__).parent / "read.cuh", "billfish::read_block"))
MATMUL = 8192


@dataclass(frozen=True)
class Rules:
    """The numbers of the measuring protocol; every result file has them."""

    rotating_bytes: int = 400_000_000  # of all copies together; the L2 cache of an H200 has 60 MB
    least_copies: int = 4
    most_copies: int = 4096  # reached below 100 kB a copy: such layers may stay in the L2 cache
    least_dense_copies: int = 2  # of fp16 weights above 400 MB: two exceed the L2 cache, and fit
    least_launches: int = 50
    most_launches: int = 200
    graph_us: float = 2000.0  # within those limits a graph lasts so long, which hides its start
    warm_seconds: float = 0.03
    least_replays: int = 7
    most_replays: int = 100
    seconds: float = 0.5  # that one measurement lasts, unless least_replays take longer

    def copies(self, nbytes: int, least: int) -> int:
        return max(least, min(self.rotating_bytes // nbytes + 1, self.most_copies))

    def launches(self, copies: int, floor_us: float) -> int:
        """A multiple of the copies within the limits; every copy once if the copies exceed them."""
        wanted = min(max(self.graph_us / floor_us, self.least_launches), self.most_launches)
        rounds = max(1, int(wanted) // copies)
        if rounds * copies < self.least_launches:
            rounds = math.ceil(self.least_launches / copies)
        return rounds * copies

    def replays(self, seconds: float) -> int:
        """`seconds`: of one replay."""
        wanted = int(self.seconds / max(seconds, 1e-9))
        return min(max(wanted, self.least_replays), self.most_replays)


QUICK = Rules(warm_seconds=0.01, least_replays=5, most_replays=15, seconds=0.1)


@dataclass(frozen=True)
class Timing:
    """Microseconds per launch, over replays."""

    median: float
    p10: float
    p90: float
    replays: int

    @classmethod
    def of(cls, times: Sequence[float]) -> "Timing":
        tenths = statistics.quantiles(times, n=10, method="inclusive")
        return cls(statistics.median(times), tenths[0], tenths[-1], len(times))

    def times(self, factor: float) -> "Timing":
        return Timing(self.median * factor, self.p10 * factor, self.p90 * factor, self.replays)


class Card(Protocol):
    """Runs and times launches; tests have one without a GPU."""

    device: torch.device

    def facts(self) -> dict[str, Any]:
        """What stays the same during a run: name, architecture, driver."""

    def readings(self) -> Readings:
        """Clocks, power and temperature now; None if unknown."""

    def ceilings(self) -> dict[str, Any]:
        """Bandwidth of plain reads and FLOP/s of cuBLAS on this card in this run."""

    def time(self, calls: Sequence[Call], launches: int, mode: str) -> Timing:
        """`launches` in all, going round the calls."""

    def sustain(
        self, calls: Sequence[Call], launches: int, seconds: int
    ) -> list[tuple[float, Readings]]:
        """(us per launch, readings) for each second of a run without a pause."""


class GraphCard:
    def __init__(self, rules: Rules) -> None:
        if not torch.cuda.is_available():
            raise UserError(
                "billfish bench needs an NVIDIA GPU and a PyTorch built for CUDA; "
                f"PyTorch {torch.__version__} sees no GPU here. Plots of an earlier run need none: "
                "billfish bench kernels --from FILE.json --plot DIR."
            )
        self.rules = rules
        self.device = torch.device("cuda", torch.cuda.current_device())

    def facts(self) -> dict[str, Any]:
        found = device.gpu(self.device)
        return {
            "name": found.name,
            "arch": found.arch,
            "sm_count": found.sms,
            "memory_bytes": torch.cuda.get_device_properties(self.device).total_memory,
            "l2_bytes": found.l2_bytes,
            "driver": nvml.driver_version(),
            "cuda": torch.version.cuda,
            "nvrtc": nvrtc_version(),
        }

    def readings(self) -> Readings:
        return nvml.readings(self.device)

    def ceilings(self) -> dict[str, Any]:
        buffer = torch.zeros(READ_BYTES, dtype=torch.uint8, device=self.device)
        kernel, address = READ.load(device.index_of(self.device)), buffer.data_ptr()
        blocks = READ_BYTES // READ_BLOCK
        call = partial(kernel.launch, blocks, READ_THREADS, (address, address))
        read = self.time([call], self.rules.least_launches, "plain").median * 1e-6
        del buffer
        a, b = (torch.randn(MATMUL, MATMUL, device=self.device).half() for _ in range(2))
        matmul = self._eager(lambda: torch.matmul(a, b))
        return {
            "read_bytes_per_s": READ_BYTES / read,
            "read_how": "16-byte loads over 1 GiB (kernels/read.cuh), median in a graph",
            "flop_per_s": 2 * MATMUL**3 / matmul,
            "flop_how": f"torch.matmul of two fp16 {MATMUL} x {MATMUL}, median of single launches",
        }

    def _eager(self, call: Call, repeats: int = 20) -> float:
        """Median seconds of one launch, long enough to be timed without a graph."""
        marks = _marks(2 * repeats)
        for _ in range(5):
            call()
        for before, after in zip(marks[::2], marks[1::2], strict=True):
            before.record()
            call()
            after.record()
        torch.cuda.synchronize(self.device)
        pairs = zip(marks[::2], marks[1::2], strict=True)
        return statistics.median(_seconds(before, after) for before, after in pairs)

    def time(self, calls: Sequence[Call], launches: int, mode: str) -> Timing:
        edges = launch.plain_launches() if mode == "plain" else nullcontext()
        with edges, torch.inference_mode():
            graph = self._capture(calls, launches)
        try:
            graph.replay()  # the first replay also uploads
            torch.cuda.synchronize(self.device)
            seconds = self._replay(graph, 1)[0]
            self._replay(graph, max(1, int(self.rules.warm_seconds / max(seconds, 1e-6))))
            times = self._replay(graph, self.rules.replays(seconds))
        finally:
            graph.reset()
        return Timing.of([seconds * 1e6 / launches for seconds in times])

    def sustain(
        self, calls: Sequence[Call], launches: int, seconds: int
    ) -> list[tuple[float, Readings]]:
        with torch.inference_mode():
            graph = self._capture(calls, launches)
        try:
            graph.replay()  # the first replay also uploads
            torch.cuda.synchronize(self.device)
            one = statistics.median(self._replay(graph, self.rules.least_replays))
            return self._sustain(graph, launches, seconds, one)
        finally:
            torch.cuda.synchronize(
                self.device
            )  # after an interrupt up to two seconds of work are queued
            graph.reset()

    def _sustain(
        self, graph: torch.cuda.CUDAGraph, launches: int, seconds: int, one: float
    ) -> list[tuple[float, Readings]]:
        """Queues the next second's work before it waits for this one; a thread takes readings."""
        marks, replays = _marks(seconds + 1), list[int]()
        times: list[float] = []
        taken: list[Future[Readings]] = []

        def queue() -> None:  # about a second of replays, by the time of the last ones
            replays.append(max(1, round(1 / max(one, 1e-6))))
            for _ in range(replays[-1]):
                graph.replay()
            marks[len(replays)].record()

        marks[0].record()
        queue()
        with ThreadPoolExecutor(1) as reader:
            for second in range(seconds):
                # A reading that takes longer than a second counts for the next second as well.
                late = taken and not taken[-1].done()
                taken.append(taken[-1] if late else reader.submit(self.readings))
                if len(replays) < seconds:
                    queue()
                marks[second + 1].synchronize()
                one = _seconds(marks[second], marks[second + 1]) / replays[second]
                times.append(one * 1e6 / launches)
            return [(us, reading.result()) for us, reading in zip(times, taken, strict=True)]

    def _capture(self, calls: Sequence[Call], launches: int) -> torch.cuda.CUDAGraph:
        # Runs eagerly first, on another stream: kernels compile, ops allocate their workspaces, and
        # memory runs out here instead of during the capture.
        aside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            for call in calls:
                call()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(launches):
                calls[index % len(calls)]()  # y is freed at once: the graph's memory pool reuses it
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
        """Seconds of each replay. All are queued at once, which hides the host's time."""
        marks = _marks(replays + 1)
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.cuda.synchronize(self.device)
        return [_seconds(before, after) for before, after in pairwise(marks)]


def _marks(count: int) -> list[torch.cuda.Event]:
    make = partial(torch.cuda.Event, enable_timing=True)
    return [make() for _ in range(count)]


def _seconds(before: torch.cuda.Event, after: torch.cuda.Event) -> float:
    return float(before.elapsed_time(after)) / 1000


def nvrtc_version() -> str | None:
    """None if the bindings are not installed."""
    try:
        return jit.version()
    except UserError:
        return None
