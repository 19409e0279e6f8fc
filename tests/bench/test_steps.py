"""scripts/steps.py: which parts a step leaves out, whose kernels it takes, and prompts beside
decodes in the engine on a CPU."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import steps
import torch
import transformers
from test_peers import Graph, Track
from tiny import GROUPED
from torch import nn

import billfish
from billfish.errors import UserError
from billfish.kernels import jit
from billfish.schemes.w4a16.cuda import instances

COSTS = {"qkv": 5, "o": 4, "gate_up": 16, "down": 9, "attention": 6, "norms": 2, "head": 250}
COSTS |= {"draw": 6}
LAYERS, HIDDEN, INNER, TOKENS = 3, 64, 96, 50


class Clock:
    """A runner whose parts take what COSTS says."""

    def __init__(self):
        self.us, self.widths = 0, []
        linears = {"o": (HIDDEN, HIDDEN), "down": (INNER, HIDDEN)}
        made = {
            name: [self.linear(name, *each) for _ in range(LAYERS)]
            for name, each in linears.items()
        }
        self.decoder = SimpleNamespace(
            shape=SimpleNamespace(heads=4, kv_heads=2, head_dim=16, layers=LAYERS),
            layers=[
                SimpleNamespace(
                    self_attn=SimpleNamespace(o_proj=o), mlp=SimpleNamespace(down_proj=down)
                )
                for o, down in zip(made["o"], made["down"], strict=True)
            ],
            embed=nn.Embedding(TOKENS, HIDDEN),
            dtype=torch.float32,
            device=torch.device("cpu"),
            head=self.part("head", TOKENS),
            _qkv=[self.part("qkv", 128)] * LAYERS,
            _gated=dict.fromkeys(range(LAYERS), self.part("gate_up", INNER)),
        )
        self.decoder.qkv = lambda i: self.decoder._qkv[i]
        self.decoder.gated = lambda i: self.decoder._gated[i]
        self.shape = self.decoder.shape
        self.fused = SimpleNamespace(norm=self.part("norms", 0), draw=self.part("draw", 0))

    def part(self, name, width):
        def run(*given):
            self.us += COSTS[name]
            return torch.zeros(len(given[0]) if len(given) else 1, width)

        return run

    def linear(self, name, k, n):
        made = nn.Linear(k, n)
        made.forward = self.part(name, n)
        return made

    def space(self, rows):
        return SimpleNamespace(x=torch.zeros(rows, HIDDEN))

    def _attend_joined(self, x):
        self.us += COSTS["attention"]

    def _step(self, rows, apart):
        x = torch.zeros(rows, HIDDEN)
        for i, layer in enumerate(self.decoder.layers):
            self.fused.norm(x)
            qkv = self.decoder.qkv(i)(x)
            self._attend_joined(qkv)
            x = layer.self_attn.o_proj(x)
            self.fused.norm(x)
            y = self.decoder.gated(i)(x)
            x = layer.mlp.down_proj(y)
            self.widths.append((qkv.shape, y.shape, x.shape))
        logits = self.decoder.head(x)
        self.fused.draw(logits)
        return logits


class Card(Track):
    """Whose graphs take what their capture took the clock."""

    def __init__(self, clock):
        super().__init__()
        self.of = clock

    def capture(self, calls, launches):
        before = self.of.us
        for call in calls:
            call()
        return Graph(self, "", (self.of.us - before) / launches, launches)


def test_parts_add_up(monkeypatch):
    monkeypatch.setattr(steps, "texts", lambda *given: None)
    clock = Clock()
    llm = SimpleNamespace(engine=SimpleNamespace(runner=clock))
    found = steps.time_parts(llm, Card(clock), 2)
    layer = sum(COSTS[name] for name in steps.PRODUCTS)
    step = LAYERS * (layer + COSTS["attention"] + 2 * COSTS["norms"]) + 256
    assert found["step_us"] == step and found["sequences"] == 2
    assert found["products_us_a_layer"] == layer
    assert found["alone_us"] == {name: COSTS[name] for name in steps.PRODUCTS}
    times = {"norms": 2 * LAYERS, "head": 1, "draw": 1}
    for name, cost in COSTS.items():
        assert found["left_out_us"][name] == times.get(name, LAYERS) * cost
    assert found["left_out_us"]["attention and norms"] == LAYERS * 10
    shapes = {tuple(map(tuple, each)) for each in clock.widths}
    assert shapes == {((2, 128), (2, INNER), (2, HIDDEN))}  # also where a part is left out
    before = clock.us
    clock._step(2, False)
    assert clock.us - before == step  # all parts are back


def test_kernels_of_another_checkout(tmp_path):
    kind = instances.kind_of(steps.SCHEME, "decode", torch.float16)

    def source():
        return instances.few_kernel(kind, torch.float16, 2, 1).program.source

    ours = Path(billfish.__file__).parent
    assert source().is_relative_to(ours)
    with steps.kernels_of(tmp_path):
        assert source().is_relative_to(tmp_path) and jit.INCLUDE.is_relative_to(tmp_path)
        assert not source().exists()
    assert source().is_relative_to(ours) and jit.INCLUDE.is_relative_to(ours)


def test_against_another_checkout(monkeypatch, tmp_path):
    """Theirs take 10 us where ours take 12, and write other texts."""
    monkeypatch.setattr(steps, "texts", lambda *given: None)
    track = Track()

    def again():
        ours = not jit.INCLUDE.is_relative_to(tmp_path)
        found = torch.tensor([[5 + ours, 0]] * 8)
        graphs = {(rows, False): (Graph(track, "", rows * (10 + 2 * ours), 1),) for rows in (1, 4)}
        return SimpleNamespace(graphs=graphs, found=found)

    llm = SimpleNamespace(engine=SimpleNamespace(runner=None))
    one, four = steps.time_against(llm, track, tmp_path, again, [1, 4])
    us = {"ours": 12, "theirs": 10, "ours again": 12, "theirs again": 10}
    assert one == {"sequences": 1, "us": us, "ratio": 1.2, "same_tokens": False}
    assert four["us"] == {name: 4 * each for name, each in us.items()}
    assert track.alive == 8  # four sets of graphs, made once for all batches


def test_prompts_beside_decodes(monkeypatch):
    monkeypatch.setattr(steps, "DECODES", 3)
    monkeypatch.setattr(steps, "INPUT", 8)
    sizes = {**GROUPED, "hidden_size": 128, "max_position_embeddings": 4096}
    config = transformers.LlamaConfig(**sizes)
    prompts = {"20": [20], "2 x 5": [5, 5]}
    with steps.engine(config, torch.device("cpu"), 1500, 8) as llm:
        found = steps.time_prompts(llm, prompts, 6)
        assert [each["prompts"] for each in found] == list(prompts)
        for each in found:  # two prompts may come in two steps
            assert 0 < each["steps"] <= 6 and each["gpu_ms"] is None
            assert 0 < each["host_ms"] <= each["host_ms_one_of_ten"]
        again = llm.generate([[1, 2, 3]], billfish.SamplingParams(max_tokens=2, ignore_eos=True))
        assert len(again[0].outputs[0].token_ids) == 2
    with (
        steps.engine(config, torch.device("cpu"), 40, 8) as llm,
        pytest.raises(UserError, match="ended before the prompts: give more --tokens"),
    ):
        steps.time_prompts(llm, prompts, 1000)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(monkeypatch):
    monkeypatch.setattr("sys.argv", ["steps.py", "parts"])
    with pytest.raises(UserError, match="PyTorch sees none"):
        steps.main()
