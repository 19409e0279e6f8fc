"""The report parses, stands alone, escapes, shows the right numbers, and can lack any part."""

import copy
import json
import os
import re
from html.parser import HTMLParser

import pytest

from billfish.evaluate.layers import error_series, kind_and_block, mean_bits_per_weight
from billfish.evaluate.page import duration, quantity, size
from billfish.evaluate.plot import Axis
from billfish.evaluate.report import report_html, write_report

VOID = {"meta", "br", "link", "img", "hr", "input"}
HOSTILE = "<script>alert(1)</script>\"' onload=x &amp;"


class Page(HTMLParser):
    """Fails on tags that do not close in order; keeps tags, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


def layer(block, kind, error, bits=4.25, n=64, k=32, **more):
    name = f"model.layers.{block}.mlp.{kind}"
    return {"name": name, "n": n, "k": k, "bits_per_weight": bits, "error": error, **more}


@pytest.fixture
def result():
    def numbers(value, stderr, samples, tokens=None):
        return {
            "value": value,
            "stderr": stderr,
            "samples": samples,
            "tokens": tokens,
            "seconds": 75.0,
        }

    return {
        "schema_version": 1,
        "created": "2026-01-02T03:04:05+00:00",
        "command": "billfish eval out",
        "model": {"path": "some/out", "bytes": 120_000_000},
        "baseline": {"path": "some/original", "bytes": 480_000_000},
        "tasks": [
            {
                "name": "wikitext2",
                "title": "WikiText-2",
                "kind": "text",
                "metric": "perplexity",
                "model": numbers(12.5, 0.25, 20, 40940),
                "baseline": numbers(11.25, 0.2, 20, 40940),
                "recovery": {"value": 0.9, "stderr": 0.004},
                "kl": {"value": 0.0625, "stderr": 0.001},
                "agreement": {"value": 0.913, "stderr": 0.002},
            },
            {
                "name": "piqa",
                "title": "PIQA",
                "kind": "zero_shot",
                "metric": "acc_norm",
                "model": numbers(0.671, 0.011, 1838),
                "baseline": numbers(0.69, 0.011, 1838),
                "recovery": {"value": 0.9725, "stderr": 0.008},
                "kl": None,
                "agreement": None,
            },
        ],
        "mean_recovery": {"value": 0.9725, "stderr": 0.008},
        "settings": {
            "dtype": {"model": "bfloat16"},
            "seqlen": 2048,
            "limit": None,
            "device": "cpu",
        },
        "data": [{"task": "piqa", "file": "piqa_valid.jsonl", "sha256": "c0ffee"}],
        "machine": {"cpu": "A CPU", "threads": 2},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "seconds": 301.0,
        "quantization": {
            "scheme": {"name": "w4a16", "bits": 4, "group_size": 64},
            "method": "gptq",
            "seed": 7,
            "calibration": {"sha256": "facade", "nsamples": 128, "seqlen": 512, "source": "c4"},
            "layers": [
                layer(0, "up_proj", 0.01, seconds=1.5),
                layer(0, "down_proj", 0.04, bits=8.25, n=192, note="kept finer"),
                layer(1, "up_proj", 0.02),
                layer(1, "down_proj", None),
            ],
            "bytes_before": 1,
            "bytes_after": 1,
            "seconds": 3725,
            "versions": {"billfish": "0.1"},
        },
    }


@pytest.fixture
def trained(result):
    """Blocks whose training was kept, did not help, and diverged."""
    result["quantization"]["training"] = {
        "steps": 400,
        "end_to_end": 200,
        "blocks": [
            {"block": 0, "before": 0.0125, "after": 0.01, "kept": True, "note": None},
            {"block": 1, "before": 0.02, "after": 0.025, "kept": False, "note": None},
            {"block": 2, "before": 0.04, "after": None, "kept": False, "note": "it diverged"},
            {"block": 3, "before": 0.05, "after": 0.03, "kept": True, "note": None},
        ],
        "whole_model": {"before": 0.0525, "after": 0.0468, "kept": True, "note": None},
    }
    return result


def test_full_report(result):
    page = Page(report_html(result))
    for shown in (
        "120 MB",
        "from 480 MB, 4.00\u00d7 smaller",
        "6.250",
        "12.50",
        "from 11.25, WikiText-2, 20 windows",
        "97.2",
        "0.0625",
        "91.3% same first choice",
        "67.1 \u00b1 1.1",
        "90.0 % \u00b1 0.4",
        "1,838",
        "w4a16, bits 4, group_size 64 \u00b7 gptq",
        "kept finer",
        "c0ffee",
        "facade",
        "billfish eval out",
        "1 h 02 min",
        "2 min 30 s",
        "torch 2.13.0",
        "none: whole data sets",
        "model.layers.0.mlp.down_proj: error 0.04, 8.25 bits",
    ):
        assert shown in page.text, shown
    assert page.tags.count("circle") == 3  # one layer has no error
    assert page.tags.count("polyline") == 2
    assert {"svg", "details", "style"} <= set(page.tags)


def test_what_training_gained(trained):
    page = Page(report_html(trained))
    for shown in (
        "What training gained",
        "Error of a block, median 0.03 0.025 -10.0 % 2 of 4",  # of 0.01, 0.02, 0.03, 0.04
        "KL of the whole model, nats a token 0.0525 0.0468 -10.9 % yes",
        "All 4 blocks",
        "0 0.0125 0.01 -20.0 % yes",
        "1 0.02 0.025 +25.0 % no: not better",
        "2 0.04 not finite \N{EN DASH} it diverged",
        "3 0.05 0.03 -40.0 % yes",
        "block 0: error 0.0125 before, 0.01 after",
        "block 2: error 0.04 before, training not kept",
    ):
        assert shown in page.text, shown
    assert page.tags.count("circle") == 3 + 2 * 4
    assert page.tags.count("polyline") == 2 + 2
    assert "before training after training" in page.text  # the legend
    lines = [value for _, name, value in page.attributes if name == "points"]
    before, after = (line.split() for line in lines[:2])
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True, True, False]


def test_errors_before_training_that_are_not_finite(trained):
    gains = trained["quantization"]["training"]["blocks"]
    gains[0]["before"] = gains[1]["before"] = gains[1]["after"] = None
    page = Page(report_html(trained))
    assert "0 not finite 0.01 \N{EN DASH} yes" in page.text
    assert "1 not finite not finite \N{EN DASH} no: not better" in page.text
    assert "median 0.045 0.03 -20.0 % 2 of 4" in page.text  # of what is known
    assert page.tags.count("circle") == 3 + 2 + 3
    for gain in gains:
        gain.update(before=None, after=None, kept=False)
    text = report_html(trained)
    assert "All 4 blocks" in text and "before training" not in text


def test_without_training_there_is_no_section(trained):
    training = trained["quantization"]["training"]
    training["whole_model"] = None
    assert "KL of the whole model" not in Page(report_html(trained)).text
    training["steps"] = 0  # blocks were measured, not trained
    assert "What training gained" not in report_html(trained)
    training["whole_model"] = {"before": 0.5, "after": 0.25, "kept": True, "note": None}
    text = Page(report_html(trained)).text
    assert "0.5 0.25 -50.0 % yes" in text and "blocks" not in text
    trained["quantization"]["training"] = None
    assert "What training gained" not in report_html(trained)


def test_trained_layers_have_no_error(trained):
    """And the report after quantize says what training gained instead."""
    for each in trained["quantization"]["layers"]:
        each["error"] = None
    page = Page(report_html({"quantization": trained["quantization"]}))
    assert "Where the error is" not in page.text and "Layer error" not in page.text
    assert "Training -10.0 %" in page.text and "median of 4 blocks" in page.text
    trained["quantization"]["layers"][0]["error"] = 0.01
    text = Page(report_html({"quantization": trained["quantization"]})).text
    assert "Layers whose error is not known are left out" in text and "Layer error 0.01" in text


def test_a_broken_model_is_called_so(result):
    check = {"kl": 0.2, "greedy_tokens": 128, "greedy_same": 96, "problem": None}
    result["quantization"]["check"] = check
    assert "75 % of greedy tokens as the original" in Page(report_html(result)).text
    check["problem"] = "model.layers.3 begins to fail: <b>"
    text = Page(report_html(result)).text
    assert "broken" in text and "model.layers.3 begins to fail: <b>" in text
    result["quantization"]["check"] = None
    assert "greedy" not in Page(report_html(result)).text


def test_on_paper_closed_tables_are_hidden_and_plots_are_not(trained):
    """A section is hidden if it holds nothing but a closed table."""
    text = report_html(trained)
    assert "section:has(h2 + details:not([open])){display:none}" in text
    assert "<h2>Every layer</h2><details>" in text
    assert "<h2>What training gained</h2><p" in text


def test_page_stands_alone(result):
    text = report_html(result)
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not [a for a in page.attributes if a[1] in ("src", "href", "xlink:href")]
    assert "http://" not in text and "https://" not in text
    assert "url(" not in text and "@import" not in text
    assert "prefers-color-scheme:dark" in text and "@media print" in text


def test_every_string_is_escaped(trained):
    def poisoned(value):
        if isinstance(value, dict):
            return {key: poisoned(item) for key, item in value.items()}
        if isinstance(value, list):
            return [poisoned(item) for item in value]
        return value + HOSTILE if isinstance(value, str) else value

    bad = poisoned(trained)
    bad["model"]["path"] = HOSTILE
    bad["quantization"]["calibration"][HOSTILE] = HOSTILE
    bad["quantization"]["layers"][0]["name"] = HOSTILE
    bad["quantization"]["layers"][0]["note"] = HOSTILE
    bad["versions"] = HOSTILE
    page = Page(report_html(bad))
    assert "script" not in page.tags
    assert not [a for a in page.attributes if a[1].startswith("on")]
    assert "script>\"' onload=x &amp;" in page.text  # shown as it was given


def test_without_baseline(result):
    result["baseline"] = result["mean_recovery"] = None
    for task in result["tasks"]:
        task.update(baseline=None, recovery=None, kl=None, agreement=None)
    text = Page(report_html(result)).text
    assert "Score" in text and "Recovery" not in text and "Baseline" not in text
    assert "12.50" in text and "KL" not in text


def test_after_quantize_only(result):
    page = Page(report_html({"quantization": result["quantization"]}))
    assert "Billfish quantization" in page.text and "Scores" not in page.text
    assert "1 h 02 min" in page.text and "0.02" in page.text  # the median error
    assert page.tags.count("circle") == 3


def test_without_quantization(result):
    del result["quantization"]
    page = Page(report_html(result))
    assert "Where the error is" not in page.text and "Bits per weight" not in page.text
    assert "120 MB" in page.text


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tasks": []},
        {"tasks": [{}]},
        {"quantization": {}},
        {"quantization": {"layers": [{}]}},
        {"quantization": {"layers": [{"name": "lm_head", "error": 0.0}]}},
        {"quantization": {"layers": [{"name": 3, "error": "much", "n": None}, 5]}},
        {"quantization": {"training": 5}},
        {"quantization": {"training": {"steps": 1, "blocks": "all", "whole_model": []}}},
        {"quantization": {"training": {"steps": 1, "blocks": [None, {}, {"before": 1.0}]}}},
        {"quantization": {"training": {"steps": 1, "blocks": [{"block": 0, "before": 0.0}]}}},
        {"quantization": {"training": {"whole_model": {"before": 1, "kept": True}}}},
        {"quantization": {"layers": None, "scheme": "w4", "calibration": None, "versions": []}},
        {"model": None, "data": None, "settings": {}, "tasks": [{"name": "x", "model": None}]},
    ],
)
def test_missing_parts_are_left_out(given):
    Page(report_html(given))


def test_non_finite_values_are_said(result, tmp_path):
    result["tasks"][0]["model"]["value"] = None
    result["quantization"]["layers"][0]["error"] = float("nan")
    write_report(result, tmp_path / "a.html", tmp_path / "a.json")
    assert "not finite" in Page((tmp_path / "a.html").read_text()).text

    def refuse(constant):
        raise AssertionError(constant)

    kept = json.loads((tmp_path / "a.json").read_text(), parse_constant=refuse)
    assert kept["quantization"]["layers"][0]["error"] is None


def test_files_are_whole_or_absent(result, tmp_path, monkeypatch):
    before = copy.deepcopy(result)
    write_report(result, tmp_path / "new" / "a.html", tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == before == result
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a.html", "a.json", "new"]

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    old = (tmp_path / "a.json").read_text()
    with pytest.raises(OSError, match="disk full"):
        write_report({}, None, tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == old
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


def test_bits_are_weighted_by_size(result):
    layers = result["quantization"]["layers"]
    assert mean_bits_per_weight(layers) == pytest.approx((3 * 64 * 4.25 + 192 * 8.25) / (6 * 64))
    assert mean_bits_per_weight([{"name": "x"}]) is None


def test_series_by_kind_and_block():
    assert kind_and_block("model.layers.12.self_attn.q_proj") == ("q_proj", 12)
    assert kind_and_block("transformer.h.3.mlp.experts.7.fc1") == ("fc1", 3)
    assert kind_and_block("lm_head") == ("lm_head", None)
    layers = [layer(b, "up_proj", 0.1 + b) for b in (1, 0)]
    layers += [layer(0, f"experts.{i}.fc", 0.2 * i) for i in (1, 2)]
    layers += [{"name": "lm_head", "error": 0.5}]
    series, outside = error_series(layers)
    assert {one.name: [(p.x, p.y) for p in one.points] for one in series} == {
        "up_proj": [(0, 0.1), (1, 1.1)],
        "fc": [(0, pytest.approx(0.3))],  # experts of one block share a point
        "lm_head": [(2, 0.5)],
    }
    assert outside == "outside"
    many = [layer(0, f"kind{i}", 1.0 + i) for i in range(12)]
    names = [one.name for one in error_series(many)[0]]
    assert len(names) == 8 and "other" in names and "kind11" in names and "kind0" not in names


def test_axis_is_logarithmic_where_the_range_needs_it():
    linear, log = Axis.over([0.1, 1.0]), Axis.over([0.001, 1.0])
    assert (linear.log, log.log, Axis.over([0.0, 5.0]).log) == (False, True, False)
    assert linear.ticks()[0] == 0.0 and linear.ticks()[-1] >= 1.0
    assert set(log.ticks()) >= {0.001, 0.01, 0.1, 1.0}
    middle = log.place(10**-1.5)
    assert middle == pytest.approx((log.place(0.001) + log.place(1.0)) / 2)
    assert log.place(1.0) < log.place(0.001)  # upwards on the screen
    tiny = Axis.over([0.0, 0.0])
    assert tiny.place(0.0) > tiny.place(1.0)


def test_numbers_as_people_read_them():
    assert [size(x) for x in (12, 1500, 98_400_000, 1.6e10)] == [
        "12 B",
        "1.5 kB",
        "98.4 MB",
        "16 GB",
    ]
    assert [duration(x) for x in (0.04, 59.9, 60, 3600)] == [
        "0.0 s",
        "59.9 s",
        "1 min 00 s",
        "1 h 00 min",
    ]
    assert [quantity(x) for x in (20.966, 7712.3, 0.04217, None, float("inf"))] == [
        "20.97",
        "7,712",
        "0.04217",
        "not finite",
        "not finite",
    ]
