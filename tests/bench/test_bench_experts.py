"""`billfish bench experts`: what is counted and compared, on a card without a GPU."""

import json

import pytest
import torch
from fake_card import RULES, FakeCard
from typer.testing import CliRunner

from billfish.bench import kernels, timing
from billfish.bench.experts import ExpertsBench, ExpertsRequest, Mixture
from billfish.cli.app import app
from billfish.errors import UserError
from billfish.models.experts import routed
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.cpu import CpuOp

SMALL = Mixture("small", 16, 2, 128, 64)


class OneByOne:
    """All experts of a layer, on a CPU."""

    def __init__(self, parts):
        self.parts = parts

    def __call__(self, x, index, weights):
        out = torch.zeros(x.shape)
        for expert, rows, places in routed(index, len(self.parts)):
            gate, up, down = self.parts[expert]
            y = down(torch.nn.functional.silu(gate(x[rows])) * up(x[rows]))
            out.index_add_(0, rows, (y * weights[rows, places, None]).float())
        return out.to(x.dtype)


@pytest.fixture(autouse=True)
def stacks(monkeypatch):
    monkeypatch.setattr(kernels, "commit", lambda: None)
    monkeypatch.setattr(CpuOp, "stack", classmethod(lambda cls, ops, dtype: OneByOne(ops)))


def measure(**asked):
    request = ExpertsRequest((SMALL,), (1, 2, 16), group_size=64, **asked)
    return ExpertsBench(request, FakeCard(), RULES).measure()


def test_bytes_are_those_of_the_experts_touched():
    result = measure()
    assert result["complete"] and [point["m"] for point in result["points"]] == [1, 2, 16]
    scheme = W4A16(4, 64)
    held = sum(
        spec.nbytes
        for n, k in ((64, 128), (64, 128), (128, 64))
        for spec in scheme.tensors(n, k, torch.bfloat16).values()
    )
    for point in result["points"]:
        m, active = point["m"], point["active"]
        assert active == m * 2 if m < 16 else 8 < active < 16
        assert point["bytes"] - m * 128 * 4 == pytest.approx(active * held, rel=0.1)
        assert point["flop"] == 6 * 2 * m * 128 * 64
        assert point["floor_us"] == pytest.approx(point["bytes"] / 4e6)  # the card's reads: 4 TB/s
        assert point["roofline"] == pytest.approx(point["floor_us"] / 10)
        assert point["speedup"] == pytest.approx(point["grouped_us"] / 10)


def test_few_tokens_do_not_find_their_experts_in_the_cache():
    bench = ExpertsBench(ExpertsRequest((SMALL,), (1,)), FakeCard(), RULES)
    deck = torch.cat(bench._routings(SMALL, 1)).flatten().tolist()
    assert len(deck) >= 32 and all(
        len(set(deck[i : i + 16])) == 16 for i in range(0, len(deck), 16)
    )


def test_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "GraphCard", lambda rules: FakeCard())
    monkeypatch.setattr(timing, "QUICK", RULES)
    config = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    config |= {"hidden_size": 64, "moe_intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ["bench", "experts", "--models", str(tmp_path / "config.json"), "--quick"]
    args += ["--m", "1,4", "--group-size", "32", "--save", str(tmp_path / "e.json")]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert "of roof" in done.output and "8 experts, 2 a token" in done.output
    saved = json.loads((tmp_path / "e.json").read_text())
    assert saved["complete"] and len(saved["points"]) == 2


def test_refusals(monkeypatch):
    assert Mixture.of("mixtral-8x7b") == Mixture("mixtral-8x7b", 8, 2, 4096, 14336)
    assert Mixture.of("qwen3-30b-a3b") == Mixture("qwen3-30b-a3b", 128, 8, 2048, 768)
    with pytest.raises(UserError, match="no experts"):
        Mixture.of("llama3-8b")
    with pytest.raises(UserError, match="dtype 'int8': known are float16, bfloat16"):
        ExpertsRequest((SMALL,), (1,), dtype="int8")
    with pytest.raises(UserError, match="mode none given: known are pdl, plain"):
        ExpertsRequest((SMALL,), (1,), modes=())
    monkeypatch.setattr(CpuOp, "stack", classmethod(lambda cls, ops, dtype: None))
    with pytest.raises(UserError, match="no op runs all experts"):
        measure()
