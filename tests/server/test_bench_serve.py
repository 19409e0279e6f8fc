"""`bench serve` against our server: counts, times by definition, what is wrong, the picture."""

import json
import re

import pytest
from thorough import some, thorough
from typer.testing import CliRunner

from billfish.bench import local_server
from billfish.bench.serve import (
    Load,
    Seen,
    measure_server,
    parse_range,
    parse_rates,
    summarize_load,
)
from billfish.cli.app import app
from billfish.errors import UserError


def test_times_are_those_of_vllm():
    seen = [
        Seen(first=0.1, last=0.5, gaps=[0.2, 0.2], asked=7, written=5),
        Seen(first=0.3, last=0.3, asked=3, written=1),
        Seen(error="503: full"),
    ]
    told = summarize_load(seen, duration=2.0)
    assert (told["completed"], told["failed"], told["errors"]) == (2, 1, {"503: full": 1})
    assert told["requests_per_s"] == 1 and told["output_tokens_per_s"] == 3
    assert told["total_tokens_per_s"] == 8
    assert told["tpot_ms"]["mean"] == pytest.approx(100)  # (0.5 - 0.1) / 4; one token has none
    assert told["ttft_ms"]["p50"] == pytest.approx(200)
    assert told["ttft_ms"]["p99"] == pytest.approx(298)
    assert told["itl_ms"]["p50"] == pytest.approx(200) and told["e2e_ms"]["mean"] == 400
    assert summarize_load([seen[2]], 1.0)["tpot_ms"] is None


def test_a_run(server, tmp_path):
    pytest.importorskip("matplotlib")
    target, picture = tmp_path / "s.json", tmp_path / "s.png"
    options = f"--rate 50,inf --requests 12 --input 5-20 --output 4-9 --save {target}"
    arguments = ["bench", "serve", server.url, *options.split(), "--plot", str(picture)]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    assert "TPOT" in found.output and picture.stat().st_size > 10_000
    result = json.loads(target.read_text())
    assert result["complete"] and [point["rate"] for point in result["points"]] == [50.0, "inf"]
    for point in result["points"]:
        assert (point["completed"], point["failed"]) == (12, 0)
        times = [point[name] for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")]
        assert all(0 < told["p50"] <= told["p90"] <= told["p99"] for told in times)
        assert point["ttft_ms"]["p99"] <= point["e2e_ms"]["p99"]
        assert 4 * 12 <= point["output_tokens_per_s"] * point["duration_s"] <= 9 * 12 + 0.1


@pytest.mark.parametrize("variants", some([("fp32+kv8",), ("fp32+kv16", "fp32+kv8")], 0), ids=str)
def test_servers_of_its_own(tmp_path, variants, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(local_server, "ROUNDS", 1)  # over HTTP
    config, target, picture = (tmp_path / name for name in ("config.json", "s.json", "s.png"))
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "vocab_size": 300,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 512,
            }
        )
    )
    options = f"--config {config} --variants {','.join(variants)} --device cpu --rate 40"
    lengths = f"--requests 6 --input 8 --output 8 --save {target} --plot {picture}"
    found = CliRunner().invoke(app, ["bench", "serve", *options.split(), *lengths.split()])
    assert found.exit_code == 0, found.output
    assert "over HTTP" in found.output and picture.stat().st_size > 10_000
    result = json.loads(target.read_text())
    assert result["complete"] and len(result["servers"]) == len(variants)
    for server, variant in zip(result["servers"], variants, strict=True):
        alone = server["alone"]
        assert server["variant"] == variant and server["complete"]
        assert alone["engine_tokens_per_s"] > alone["http_tokens_per_s"] / 2 > 0
        assert server["points"][0]["completed"] == 6


@thorough
def test_a_server_of_its_own_that_cannot_load(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for arguments, told in (
        ([str(tmp_path), "--variants", "stored+kv16"], "stored\\+kv16"),
        (["--config", "llama9"], "llama9"),
        ([], "say what is measured"),
        (["http://127.0.0.1:9", "--variants", "fp16+kv16"], "drop it"),
    ):
        found = CliRunner().invoke(app, ["bench", "serve", *arguments, "--device", "cpu"])
        assert isinstance(found.exception, UserError) and re.search(told, str(found.exception))


def test_failures_are_counted_and_named(server):
    load = Load(server.url, (float("inf"),), 12, (120, 128), (3, 3))  # 126 and more do not fit
    kept = []
    result = measure_server(load, lambda told: None, lambda told: kept.append(len(told["points"])))
    (point,) = result["points"]
    assert point["completed"] + point["failed"] == 12 and 0 < point["failed"] < 12
    assert all("maximum context length" in error for error in point["errors"])
    assert kept == [1, 1]
    with pytest.raises(UserError, match="maximum context length"):  # it is seen before the load
        measure_server(
            Load(server.url, (1.0,), 9, (128, 128)), lambda told: None, lambda told: None
        )


def test_what_is_wrong():
    for text in ("", "a", "5-", "9-3", "0", "-4"):
        with pytest.raises(UserError):
            parse_range("--input", text)
    assert parse_range("--input", "7") == (7, 7) and parse_range("--input", "2-8") == (2, 8)
    assert parse_rates("1,2.5,inf") == (1, 2.5, float("inf"))
    for options in ({"url": "localhost"}, {"rates": ()}, {"rates": (0.0,)}, {"requests": 0}):
        with pytest.raises(UserError):
            Load(**{"url": "http://a", "rates": (1.0,), **options})
    with pytest.raises(UserError, match="Is a server there"):
        measure_server(Load("http://127.0.0.1:9", (1.0,)), lambda told: None, lambda result: None)
