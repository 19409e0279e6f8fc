"""/metrics has the names, types, labels and buckets that dashboards know: those of metrics.txt."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from billfish.server.metrics import Metrics

GOLDEN = (Path(__file__).parent / "metrics.txt").read_text()
GAUGES = {"num_requests_running": 2, "num_requests_waiting": 1, "kv_cache_usage_perc": 0.25}


def families(text):
    return [
        (family.name, family.type, family.documentation, sorted(map(sample, family.samples)))
        for family in text_string_to_metric_families(text)
    ]


def sample(one):
    labels = {name: float(value) if name == "le" else value for name, value in one.labels.items()}
    return one.name, sorted(labels.items()), round(one.value, 6)


def made(model):
    return Metrics(model, {name: lambda value=value: value for name, value in GAUGES.items()})


def test_the_text_is_what_it_was():
    metrics = made('a "quoted" \\ name')
    metrics.counters["prompt_tokens_total"].inc(5)
    metrics.counters["generation_tokens_total"].inc(3)
    metrics.finished["stop"].inc()
    for _ in range(3):
        metrics.seconds["inter_token_latency_seconds"].observe(0.02)
    metrics.seconds["e2e_request_latency_seconds"].observe(1000)
    text = metrics.text().decode()
    assert families(text) == families(GOLDEN)
    assert "_created" not in text


def test_two_models_share_nothing():
    one, other = made("one"), made("other")
    one.counters["prompt_tokens_total"].inc()
    assert other.value("prompt_tokens_total") == 0 and "one" not in other.text().decode()
