"""Prometheus metrics under vLLM's names, prefix included, so that dashboards and autoscalers made
for vLLM read them unchanged.
"""

from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from billfish.engine.core import RequestOutput

PREFIX = "vllm"
MS = (1, 2.5, 5, 10, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1e3, 2500, 5e3, 7500, 1e4)
SHORT = tuple(each / 1000 for each in MS)
LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
GAUGES = {
    "num_requests_running": "Texts that are being written.",
    "num_requests_waiting": "Texts that wait for it.",
    "kv_cache_usage_perc": "Pages of the cache in use; 1 is all.",
}
COUNTERS = {
    "prompt_tokens_total": "Tokens of prompts that were admitted.",
    "generation_tokens_total": "Tokens that were written.",
    "prefix_cache_queries_total": "Tokens of prompts that were looked for in the cache.",
    "prefix_cache_hits_total": "Tokens of prompts that were found in the cache.",
    "admission_rejections_total": "Requests refused because the queue was full.",
}
FINISH_REASONS = ("stop", "length", "abort", "error")
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", SHORT),
    "inter_token_latency_seconds": ("Between two tokens of a text.", SHORT),
    "time_per_output_token_seconds": ("The same, by its older name.", SHORT),
    "request_time_per_output_token_seconds": ("A request's mean after its first token.", SHORT),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", LONG),
}
Kind = TypeVar("Kind", bound=MetricWrapperBase)


class Metrics:
    """The metrics of one model, in a registry of their own."""

    def __init__(self, model: str, gauges: Mapping[str, Callable[[], float]]) -> None:
        """`gauges`: for each of GAUGES a function that reads its value."""
        self.registry, self._labels = CollectorRegistry(), {"model_name": model}

        def make(kind: type[Kind], name: str, told: str, *labels: str, **options: Any) -> Kind:
            names = [*self._labels, *labels]
            return kind(f"{PREFIX}:{name}", told, names, registry=self.registry, **options)

        for name, told in GAUGES.items():
            make(Gauge, name, told).labels(model).set_function(gauges[name])
        self.counters = {n: make(Counter, n, told).labels(model) for n, told in COUNTERS.items()}
        ended = "Texts that have ended, by reason."
        finished = make(Counter, "request_success_total", ended, "finished_reason")
        self.finished = {reason: finished.labels(model, reason) for reason in FINISH_REASONS}
        self.seconds = {
            name: make(Histogram, name, told, buckets=edges).labels(model)
            for name, (told, edges) in HISTOGRAMS.items()
        }

    def value(self, name: str, **labels: str) -> float:
        labels |= self._labels
        return self.registry.get_sample_value(f"{PREFIX}:{name}", labels) or 0.0

    def text(self) -> bytes:
        return generate_latest(_WithoutCreated(self.registry))


class _WithoutCreated(Collector):
    """A registry without `_created` series, which the library itself can only switch off for the
    whole process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [one for one in metric.samples if not one.name.endswith("_created")]
            yield metric


class RequestTimer:
    """Fills the metrics from the successive outputs of one request."""

    def __init__(self, metrics: Metrics, prompt_tokens: int, texts: int) -> None:
        self._metrics, self._start = metrics, monotonic()
        self._first: float | None = None
        self._seen, self._last = [0] * texts, [0.0] * texts
        self._ended: set[int] = set()
        metrics.counters["prompt_tokens_total"].inc(prompt_tokens)

    def update(self, output: RequestOutput) -> None:
        now, metrics = monotonic(), self._metrics
        for one in output.outputs:
            fresh = len(one.token_ids) - self._seen[one.index]
            if fresh:
                if self._first is None:
                    self._first = now
                    metrics.seconds["time_to_first_token_seconds"].observe(now - self._start)
                if self._seen[one.index]:
                    gap = (now - self._last[one.index]) / fresh
                    for _ in range(fresh):
                        metrics.seconds["inter_token_latency_seconds"].observe(gap)
                        metrics.seconds["time_per_output_token_seconds"].observe(gap)
                self._seen[one.index] += fresh
                self._last[one.index] = now
                metrics.counters["generation_tokens_total"].inc(fresh)
            if one.finish_reason is not None and one.index not in self._ended:
                self._ended.add(one.index)
                cancelled = one.finish_reason == "cancelled"
                metrics.finished["abort" if cancelled else one.finish_reason].inc()
                self._end(one.index, now)
        if output.finished:
            metrics.seconds["e2e_request_latency_seconds"].observe(now - self._start)
            metrics.counters["prefix_cache_queries_total"].inc(len(output.prompt_token_ids))
            metrics.counters["prefix_cache_hits_total"].inc(output.cached_tokens)

    def close(self) -> None:
        """Counts the texts that have not ended as aborted."""
        self._metrics.finished["abort"].inc(len(self._seen) - len(self._ended))

    def _end(self, index: int, now: float) -> None:
        if self._first is not None and self._seen[index] > 1:
            mean = (now - self._first) / (self._seen[index] - 1)
            self._metrics.seconds["request_time_per_output_token_seconds"].observe(mean)
