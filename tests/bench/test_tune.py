"""The search of cuts: what it tries, and how its table grows. The timing itself needs a GPU."""

import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from billfish.bench import tune
from billfish.bench.shapes import parse_shapes
from billfish.cli.app import app
from billfish.errors import UserError
from billfish.kernels import tiles
from billfish.kernels.device import Gpu
from billfish.schemes.w4a16.cuda import batch
from billfish.schemes.w4a16.cuda import tune as tuner

H200 = Gpu(0, "NVIDIA H200", "sm_90a", 132, 232448, 233472, 60 * 2**20)
TABLE = json.loads(batch.TABLE.read_text())


def test_it_tries_the_models_choice_first_and_nothing_hopeless():
    tried = tuner.worth_trying(64, 4096, 32, 4224, H200)
    expected = [tiles.model_us(how, 32, H200, batch.COSTS) for how in tried]
    assert expected == sorted(expected) and expected[-1] <= 2 * expected[0]
    assert len(tried) > 1
    sizes = (64, 4096, 32, 4224, H200, tiles.LINES)
    every = [tiles.launch(cut, *sizes) for cut in tiles.cuts(batch.INSTANCES)]
    left_out = {how for how in every if how} - set(tried)
    assert all(tiles.model_us(how, 32, H200, batch.COSTS) > 2 * expected[0] for how in left_out)


def test_a_search_replaces_what_the_table_has_of_its_layers():
    layer = {"k": 4096, "n": 4096, "cuts": {"32": [32, 1, 2]}, "us": {"32": 1.0}}
    found = {"device": "NVIDIA H200", "date": "2030-01-01", "layers": [layer]}
    table = tune.merged(TABLE, found)
    layers = [each for search in table["searches"] for each in search["layers"]]
    assert [each for each in layers if (each["k"], each["n"]) == (4096, 4096)] == [layer]
    assert len(layers) == sum(len(search["layers"]) for search in TABLE["searches"])
    other = tune.merged(TABLE, {**found, "device": "another"})
    assert other["searches"][:-1] == TABLE["searches"]
    assert json.loads(tune.text(table)) == table


def test_the_table_is_written_as_the_search_writes_it():
    assert batch.TABLE.read_text() == tune.text(TABLE)


class Card:
    """Times calls by what they say of themselves."""

    device = torch.device("cpu")

    def __init__(self, us):
        self.us = us

    def time(self, calls, launches, mode):
        return SimpleNamespace(median=self.us[calls[0]()])


@pytest.mark.parametrize(("us", "taken"), [(5.0, True), (3.0, False)])
def test_few_tokens_are_kept_where_the_kernel_of_few_is_slower(us, taken, monkeypatch):
    """Of 16 tokens; 24 are w4a16_batch's in any case."""
    kind = SimpleNamespace(record_bytes=4224)
    plan = SimpleNamespace(index=0, batches=True, cuts={}, paths={}, k_tiles=216, kind=kind)
    plan.few_path = lambda m: lambda *given: "few"

    class Op:
        kind = records = None

        def __init__(self, scheme, tensors):
            pass

        def nbytes(self):
            return 1

        def __call__(self, x):
            assert (len(x), False) in plan.cuts
            return "batch"

    monkeypatch.setattr(tuner, "CudaOp", Op)
    monkeypatch.setattr(tuner, "plan", lambda *given: plan)
    monkeypatch.setattr(tuner, "gpu", lambda device: H200)
    rules = SimpleNamespace(copies=lambda nbytes, least: 2, least_copies=2, launches=lambda *_: 2)
    card = Card({"few": us, "batch": 4.0})
    layer = tuner.search_layer(64, 27648, (16, 24), card, rules, lambda message: None)
    assert set(layer["cuts"]) == set(layer["us"]) == ({"16", "24"} if taken else {"24"})
    assert not plan.cuts


def test_few_tokens_that_the_table_has():
    """Down-projections of Qwen2.5 7B and 32B."""
    for n, k_tiles in ((3584, 148), (5120, 216)):
        assert [batch.takes_few(m, n, k_tiles, 4224, H200) for m in (8, 9, 16, 17)] == [0, 1, 1, 0]
        assert (
            batch.pick(12, n, k_tiles, 4224, H200).cut == batch.table()[H200.name, n, k_tiles][16]
        )
    assert not batch.takes_few(16, 4096, 32, 4224, H200)


@pytest.mark.parametrize("rows", [(8,), (32, 4)])
def test_tokens_that_other_kernels_take(rows):
    with pytest.raises(UserError, match="9 tokens and more"):
        tune.search(parse_shapes("4096x4096"), rows, None, None, print)


def test_no_gpu_is_said_before_anything_else(tmp_path):
    done = CliRunner().invoke(app, ["bench", "tune", "--save", str(tmp_path / "t.json")])
    assert done.exit_code != 0
    assert not (tmp_path / "t.json").exists()
