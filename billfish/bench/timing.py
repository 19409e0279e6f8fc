"""How a kernel is timed, and the card that runs it: the one file of the bench that needs a GPU.

A chain of launches over rotating copies of the weights is captured in a CUDA graph and replayed.
The copies are too many for the L2, so every launch reads from memory, as in a model; nothing is
flushed, because a flush that writes leaves dirty lines whose way out is then timed as well.

    copy 0, copy 1, ... copy c-1, copy 0, ...   one graph;  event | replay | event | replay | event

"pdl" is the default launch with programmatic edges, "plain" waits for the launch before it.
Clocks and power are read, never set.
"""

import math
import shutil
import statistics
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch

from billfish.errors import UserError
from billfish.kernels import device, jit, launch

Call = Callable[[], object]
Readings = dict[str, Any] | None
MODES = ("pdl", "plain")
READ_BYTES = 2**30
MATMUL = 8192
SMI_FIELDS = {  # name of ours -> name of nvidia-smi's
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "most_sm_mhz": "clocks.max.sm",
    "watts": "power.draw",
    "limit_watts": "power.limit",
    "celsius": "temperature.gpu",
}


@dataclass(frozen=True)
class Rules:
    """The numbers of the protocol; they are written into every result."""

    rotating_bytes: int = 400_000_000  # copies hold more than this; the L2 of an H200 has 60 MB
    least_copies: int = 4
    most_copies: int = 4096  # reached below 100 kB a copy: such layers may be found in the L2
    least_dense_copies: int = 2  # fp16 weights of 400 MB and more: two are enough, and fit
    least_launches: int = 50
    most_launches: int = 200
    graph_us: float = 2000.0  # between the two: launches enough to make the start of a graph small
    warm_seconds: float = 0.03
    least_replays: int = 7
    most_replays: int = 100
    seconds: float = 0.5  # of one measurement, as far as least_replays allows

    def copies(self, nbytes: int, least: int) -> int:
        return max(least, min(self.rotating_bytes // nbytes + 1, self.most_copies))

    def launches(self, copies: int, floor_us: float) -> int:
        """A multiple of the copies within the limits; one round where the copies are more."""
        wanted = min(max(self.graph_us / floor_us, self.least_launches), self.most_launches)
        rounds = max(1, int(wanted) // copies)
        if rounds * copies < self.least_launches:
            rounds = math.ceil(self.least_launches / copies)
        return rounds * copies

    def replays(self, seconds: float) -> int:
        """Of a graph that takes so long."""
        wanted = int(self.seconds / max(seconds, 1e-9))
        return min(max(wanted, self.least_replays), self.most_replays)


QUICK = Rules(warm_seconds=0.01, least_replays=5, most_replays=15, seconds=0.1)


@dataclass(frozen=True)
class Timing:
    """us per launch, over replays."""

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
    """What runs and times the launches; tests bring their own."""

    device: torch.device

    def facts(self) -> dict[str, Any]:
        """Name, architecture, driver: what does not change."""

    def readings(self) -> Readings:
        """Clocks, power and temperature now; None where nothing can tell."""

    def ceilings(self) -> dict[str, Any]:
        """What this card reaches in this run, whatever its datasheet says."""

    def time(self, calls: Sequence[Call], launches: int, mode: str) -> Timing:
        """Launches in all, going round the calls."""

    def sustain(
        self, calls: Sequence[Call], launches: int, seconds: int
    ) -> list[tuple[float, Readings]]:
        """Of each second of a run without a pause: us per launch, and readings."""


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
        found, driver = device.gpu(self.device), self._smi(["driver_version"])
        return {
            "name": found.name,
            "arch": found.arch,
            "sm_count": found.sms,
            "memory_bytes": torch.cuda.get_device_properties(self.device).total_memory,
            "l2_bytes": found.l2_bytes,
            "driver": driver[0] if driver else None,
            "cuda": torch.version.cuda,
            "nvrtc": nvrtc_version(),
        }

    def readings(self) -> Readings:
        values = self._smi(list(SMI_FIELDS.values()))
        if values is not None:
            return {name: number(value) for name, value in zip(SMI_FIELDS, values, strict=True)}
        try:  # through pynvml, where that is installed
            return {
                "sm_mhz": torch.cuda.clock_rate(self.device),
                "watts": torch.cuda.power_draw(self.device) / 1000,
                "celsius": torch.cuda.temperature(self.device),
            }
        except Exception:  # NVML has exceptions of its own, and no reading is worth a run
            return None

    def _smi(self, fields: list[str]) -> list[str] | None:
        uuid = getattr(torch.cuda.get_device_properties(self.device), "uuid", None)
        if shutil.which("nvidia-smi") is None or uuid is None:
            return None
        query = [f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}"]
        command = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (subprocess.SubprocessError, OSError):
            return None
        values = [value.strip() for value in done.stdout.strip().split(",")]
        return values if len(values) == len(fields) else None

    def ceilings(self) -> dict[str, Any]:
        buffer = torch.rand(READ_BYTES // 4, device=self.device)
        read = self._eager(buffer.sum)
        del buffer
        a, b = (torch.randn(MATMUL, MATMUL, device=self.device).half() for _ in range(2))
        matmul = self._eager(lambda: torch.matmul(a, b))
        return {
            "read_bytes_per_s": READ_BYTES / read,
            "read_how": "torch.sum over 1 GiB of fp32, median of single launches",
            "flop_per_s": 2 * MATMUL**3 / matmul,
            "flop_how": f"torch.matmul of two fp16 {MATMUL} x {MATMUL}, median of single launches",
        }

    def _eager(self, call: Call, repeats: int = 20) -> float:
        """Median seconds of one long launch: its own start is not worth a graph."""
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
            torch.cuda.synchronize(self.device)  # an interrupt leaves up to two seconds queued
            graph.reset()

    def _sustain(
        self, graph: torch.cuda.CUDAGraph, launches: int, seconds: int, one: float
    ) -> list[tuple[float, Readings]]:
        """The next second is always queued before this one is waited for; a thread reads."""
        marks, replays = _marks(seconds + 1), list[int]()
        times: list[float] = []
        told: list[Future[Readings]] = []

        def queue() -> None:  # about a second, by the replay last timed
            replays.append(max(1, round(1 / max(one, 1e-6))))
            for _ in range(replays[-1]):
                graph.replay()
            marks[len(replays)].record()

        marks[0].record()
        queue()
        with ThreadPoolExecutor(1) as reader:
            for second in range(seconds):
                # A reading that takes longer than its second stands for the next one as well.
                late = told and not told[-1].done()
                told.append(told[-1] if late else reader.submit(self.readings))
                if len(replays) < seconds:
                    queue()
                marks[second + 1].synchronize()
                one = _seconds(marks[second], marks[second + 1]) / replays[second]
                times.append(one * 1e6 / launches)
            return [(us, reading.result()) for us, reading in zip(times, told, strict=True)]

    def _capture(self, calls: Sequence[Call], launches: int) -> torch.cuda.CUDAGraph:
        # Eager first, on a stream of its own: it compiles, makes what an op makes once, and runs
        # out of memory here and not in the middle of a capture.
        aside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            for call in calls:
                call()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(launches):
                calls[index % len(calls)]()  # y is dropped at once: the graph's pool reuses it
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
        """Seconds of each. Queued without a pause, so that the host's time is not in them."""
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


def number(text: str) -> float | None:
    """nvidia-smi says [N/A] or [Not Supported] where it does not know."""
    try:
        return float(text)
    except ValueError:
        return None


def nvrtc_version() -> str | None:
    """Of the compiler that kernels are made with; None where its bindings are missing."""
    try:
        return jit.version()
    except UserError:
        return None
