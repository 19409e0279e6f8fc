"""Captured launches of several contestants, timed in turns, and what their energy is.

(A B C) A B C A B C ...    all queued at once: the same clocks and temperature for all
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from billfish.bench import nvml
from billfish.bench.timing import GraphCard, Readings

READ = ("sm_mhz", "watts", "celsius")
CHUNK_SECONDS = 0.2  # of launches that stay queued while energy is counted
Point = dict[str, Any]


class Graph(Protocol):
    def replay(self) -> None: ...
    def reset(self) -> None: ...


@dataclass
class Runner:
    """A contestant's captured launches."""

    graph: Graph
    launches: int


class Track(GraphCard):
    """Where they run; tests have one without a GPU."""

    def capture(self, calls: Sequence[Callable[[], object]], launches: int) -> Graph:
        with torch.inference_mode():
            return self._capture(calls, launches)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def done(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, before: Any, after: Any) -> float:
        """Waits for `after`."""
        after.synchronize()
        return float(before.elapsed_time(after)) / 1000

    def joules(self) -> float | None:
        return nvml.joules(self.device)

    def now(self) -> float:
        return time.perf_counter()


def replays_of(track: Track, runner: Runner, seconds: float) -> int:
    runner.graph.replay()  # the first one also uploads
    before = track.mark()
    runner.graph.replay()
    one = track.seconds(before, track.mark())
    return max(1, round(seconds / max(one, 1e-6)))


def take_turns(
    track: Track, runners: Mapping[str, Runner], turns: int, seconds: float
) -> tuple[dict[str, list[float]], Point]:
    """us a launch of each in each turn, and clock, power and temperature meanwhile. All turns are
    queued at once: the GPU does not rest in between."""
    replays = {name: replays_of(track, runner, seconds) for name, runner in runners.items()}
    order = [name for _ in range(turns + 1) for name in runners]
    marks = [track.mark()]
    for name in order:
        for _ in range(replays[name]):
            runners[name].graph.replay()
        marks.append(track.mark())
    readings = [track.readings()]
    while not track.done(marks[-1]):
        time.sleep(0.02)
        readings.append(track.readings())
    times: dict[str, list[float]] = {name: [] for name in runners}
    for name, (before, after) in list(zip(order, pairwise(marks), strict=True))[len(runners) :]:
        launches = replays[name] * runners[name].launches
        times[name].append(track.seconds(before, after) * 1e6 / launches)
    return times, means(readings)


def energy(track: Track, runner: Runner, seconds: float) -> Point:
    """mJ of one launch as power x time, while the queue is never empty: the counter moves every few
    tens of milliseconds, so at the edges of a run it would count some of its neighbours'."""
    replays = replays_of(track, runner, CHUNK_SECONDS)
    marks, samples = [track.mark()], []
    while len(samples) < 2 or samples[-1][0] - samples[0][0] < seconds:
        for _ in range(replays):
            runner.graph.replay()
        marks.append(track.mark())
        if len(marks) > 2:  # one chunk stays queued behind the one that is waited for
            track.seconds(marks[0], marks[-2])
            samples.append((track.now(), track.joules(), track.readings()))
    launches = (len(samples) - 1) * replays * runner.launches
    us = track.seconds(marks[1], marks[len(samples)]) * 1e6 / launches
    track.seconds(marks[0], marks[-1])
    (began, first, _), (ended, last, _) = samples[0], samples[-1]
    watts = None if first is None or last is None else (last - first) / (ended - began)
    read = means([reading for _, _, reading in samples])
    return {"us": us, "mj": watts and watts * us / 1000, **read, "watts": watts}


def means(readings: Sequence[Readings]) -> Point:
    found = {name: [told[name] for told in readings if told and told[name]] for name in READ}
    return {name: statistics.mean(each) if each else None for name, each in found.items()}
