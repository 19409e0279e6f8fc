"""Counters, gauges and histograms in Prometheus' text, by vLLM's names, prefix and all: dashboards
and autoscalers that are made for vLLM read them as they are.
"""

from bisect import bisect_left
from collections import Counter
from time import monotonic

from billfish.engine.core import RequestOutput

PREFIX = "vllm"
SHORT = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
COUNTERS = {
    "prompt_tokens_total": "Tokens of prompts that were admitted.",
    "generation_tokens_total": "Tokens that were written.",
    "prefix_cache_queries_total": "Tokens of prompts that were looked for in the cache.",
    "prefix_cache_hits_total": "Tokens of prompts that were found in the cache.",
    "admission_rejections_total": "Requests refused because the queue was full.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", SHORT),
    "inter_token_latency_seconds": ("Between two tokens of a text.", SHORT),
    "time_per_output_token_seconds": ("The same, by its older name.", SHORT),
    "request_time_per_output_token_seconds": ("A request's mean after its first token.", SHORT),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", LONG),
}


class Histogram:
    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges, self.counts, self.sum = edges, [0] * (len(edges) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += value * times


class Metrics:
    """Only the event loop's thread touches it."""

    def __init__(self, model: str) -> None:
        quoted = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._label = f'model_name="{quoted}"'
        self.counts: Counter[str] = Counter()
        self.ends: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.times = {name: Histogram(edges) for name, (_, edges) in HISTOGRAMS.items()}

    def text(self, gauges: dict[str, tuple[float, str]]) -> str:
        lines: list[str] = []

        def head(name: str, kind: str, told: str) -> str:
            lines.extend([f"# HELP {PREFIX}:{name} {told}", f"# TYPE {PREFIX}:{name} {kind}"])
            return f"{PREFIX}:{name}"

        for name, (value, told) in gauges.items():
            lines.append(f"{head(name, 'gauge', told)}{{{self._label}}} {value:g}")
        for name, told in COUNTERS.items():
            lines.append(f"{head(name, 'counter', told)}{{{self._label}}} {self.counts[name]}")
        full = head("request_success_total", "counter", "Texts that have ended, by reason.")
        for reason, times in self.ends.items():
            lines.append(f'{full}{{{self._label},finished_reason="{reason}"}} {times}')
        for name, histogram in self.times.items():
            full, below = head(name, "histogram", HISTOGRAMS[name][0]), 0
            edges = [*(f"{edge:g}" for edge in histogram.edges), "+Inf"]
            for edge, times in zip(edges, histogram.counts, strict=True):
                below += times
                lines.append(f'{full}_bucket{{{self._label},le="{edge}"}} {below}')
            lines.append(f"{full}_sum{{{self._label}}} {histogram.sum:.6f}")
            lines.append(f"{full}_count{{{self._label}}} {below}")
        return "\n".join(lines) + "\n"


class Watch:
    """One request's clock: told of every output, it fills the histograms."""

    def __init__(self, metrics: Metrics, prompt_tokens: int, texts: int) -> None:
        self._metrics, self._start = metrics, monotonic()
        self._first: float | None = None
        self._seen, self._last = [0] * texts, [0.0] * texts
        self._ended: set[int] = set()
        metrics.counts["prompt_tokens_total"] += prompt_tokens

    def note(self, output: RequestOutput) -> None:
        now, metrics = monotonic(), self._metrics
        for one in output.outputs:
            fresh = len(one.token_ids) - self._seen[one.index]
            if fresh:
                if self._first is None:
                    self._first = now
                    metrics.times["time_to_first_token_seconds"].add(now - self._start)
                if self._seen[one.index]:
                    gap = (now - self._last[one.index]) / fresh
                    metrics.times["inter_token_latency_seconds"].add(gap, fresh)
                    metrics.times["time_per_output_token_seconds"].add(gap, fresh)
                self._seen[one.index] += fresh
                self._last[one.index] = now
                metrics.counts["generation_tokens_total"] += fresh
            if one.finish_reason is not None and one.index not in self._ended:
                self._ended.add(one.index)
                cancelled = one.finish_reason == "cancelled"
                metrics.ends["abort" if cancelled else one.finish_reason] += 1
                self._end(one.index, now)
        if output.finished:
            metrics.times["e2e_request_latency_seconds"].add(now - self._start)
            metrics.counts["prefix_cache_queries_total"] += len(output.prompt_token_ids)
            metrics.counts["prefix_cache_hits_total"] += output.cached_tokens

    def gone(self) -> None:
        """Nobody waits any more."""
        self._metrics.ends["abort"] += len(self._seen) - len(self._ended)

    def _end(self, index: int, now: float) -> None:
        if self._first is not None and self._seen[index] > 1:
            mean = (now - self._first) / (self._seen[index] - 1)
            self._metrics.times["request_time_per_output_token_seconds"].add(mean)
