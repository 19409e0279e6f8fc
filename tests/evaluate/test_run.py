"""Whole evaluations of tiny checkpoints, and every request that is refused."""

import hashlib
import json
import math
import weakref

import pytest
import torch

from billfish.errors import UserError
from billfish.evaluate import run, tasks
from billfish.evaluate.perplexity import divergence, perplexity, windows
from billfish.evaluate.run import EvalRequest, evaluate
from billfish.evaluate.tasks import run_task


@pytest.fixture
def pair(checkpoint, llama):
    baseline, model = llama(0), llama(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.08 * torch.randn_like(weight)
    return checkpoint("model", model), checkpoint("baseline", baseline), model, baseline


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("kl", [False, True])
def test_evaluation(kl, pair, data_dir, tokenizer):
    path, baseline_path, model, baseline = pair
    report = {"scheme": {"bits": 4}, "layers": []}
    (path / "quantization_report.json").write_text(json.dumps(report))
    request = EvalRequest(
        model=path,
        baseline=baseline_path,
        tasks=("wikitext2", "piqa", "arc_easy"),
        data_dir=data_dir,
        limit=8,
        seqlen=64,
        kl=kl,
        command="billfish eval",
    )
    said = []
    result = evaluate(request, said.append)
    json.dumps(result, allow_nan=False)
    assert any("window 8 of 8" in line for line in said)

    ids = windows(tokenizer, tasks.read_text("wikitext2", data_dir), 64)[:8]
    text, piqa, arc = result["tasks"]
    ours, theirs = perplexity(model, ids), perplexity(baseline, ids)
    assert text["model"]["value"] == pytest.approx(ours.value, rel=1e-6)
    assert text["model"]["stderr"] == pytest.approx(ours.stderr, rel=1e-6)
    assert (text["model"]["samples"], text["model"]["tokens"]) == (8, 8 * 63)
    assert text["baseline"]["value"] == pytest.approx(theirs.value, rel=1e-6)
    assert text["recovery"]["value"] == pytest.approx(theirs.value / ours.value, rel=1e-6)
    moved = torch.tensor(theirs.losses) - torch.tensor(ours.losses)
    error = text["recovery"]["value"] * moved.std().item() / math.sqrt(8)
    assert text["recovery"]["stderr"] == pytest.approx(error, rel=1e-4)
    if kl:
        found = divergence(model, baseline, ids)
        assert text["kl"]["value"] == pytest.approx(found.kl.value, rel=1e-5)
        assert text["agreement"]["value"] == pytest.approx(found.agreement.value)
    else:
        assert text["kl"] is None and text["agreement"] is None

    scores = {}
    for entry in (piqa, arc):
        for role, one in (("model", model), ("baseline", baseline)):
            score = run_task(one, tokenizer, entry["name"], data_dir, limit=8)
            assert entry[role]["value"] == score.value
            assert entry[role]["samples"] == 8
            scores[entry["name"], role] = score.value
        ratio = scores[entry["name"], "model"] / scores[entry["name"], "baseline"]
        assert entry["recovery"]["value"] == pytest.approx(ratio)
    sums = [sum(v for (_, role), v in scores.items() if role == r) for r in ("model", "baseline")]
    assert result["mean_recovery"]["value"] == pytest.approx(sums[0] / sums[1])

    assert result["quantization"] == report
    assert result["model"]["bytes"] == (path / "model.safetensors").stat().st_size
    sha256 = hashlib.sha256((data_dir / "piqa_valid.jsonl").read_bytes()).hexdigest()
    assert {"task": "piqa", "file": "piqa_valid.jsonl", "sha256": sha256} in result["data"]
    assert result["settings"]["dtype"] == {"model": "float32", "baseline": "float32"}
    assert set(result["versions"]) == {"python", "torch", "transformers", "billfish", "lm-eval"}
    assert result["machine"]["threads"] == torch.get_num_threads()


def test_one_model_is_in_memory_at_a_time(pair, data_dir, monkeypatch):
    alive, load = [], run._load

    def counting(*args):
        loaded = load(*args)
        object.__setattr__(loaded.model, "itself", loaded.model)  # a cycle, as hooks make them
        alive.append(weakref.ref(loaded.model))
        at_once.append(sum(ref() is not None for ref in alive))
        return loaded

    for kl, expected in ((False, [1, 1]), (True, [1, 2])):
        at_once: list[int] = []
        alive.clear()
        monkeypatch.setattr(run, "_load", counting)
        evaluate(EvalRequest(pair[0], ("wikitext2",), pair[1], kl, data_dir, limit=1, seqlen=32))
        assert at_once == expected


def test_destroyed_model_is_reported_not_hidden(pair, checkpoint, data_dir):
    model = pair[2]
    torch.nn.init.constant_(model.lm_head.weight, 3e38)  # finite; its logits are not
    path = checkpoint("destroyed", model)
    result = evaluate(EvalRequest(path, ("wikitext2",), pair[1], data_dir=data_dir, seqlen=32))
    assert result["tasks"][0]["model"]["value"] is None
    assert result["tasks"][0]["recovery"]["value"] is None
    json.dumps(result, allow_nan=False)


def test_dtype_and_shipped_sample(pair, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sample_eval.txt").write_text("Once upon a time there was a fish. " * 50)
    monkeypatch.setattr(tasks.importlib.resources, "files", lambda package: tmp_path)
    result = evaluate(EvalRequest(pair[0], dtype="bfloat16"))
    assert result["tasks"][0]["name"] == "sample"
    assert result["settings"]["dtype"] == {"model": "bfloat16"}
    assert result["settings"]["seqlen"] == 512  # what the tiny model can take
    assert result["baseline"] is None and result["tasks"][0]["recovery"] is None
    assert "quantization" not in result and "lm-eval" not in result["versions"]


def test_a_text_of_the_users_own_is_a_task(pair, data_dir):
    own = str(data_dir / "wikitext2_test.raw.txt")
    result = evaluate(EvalRequest(pair[0], ("wikitext2", own), data_dir=data_dir, limit=2))
    known, given = (task["model"]["value"] for task in result["tasks"])
    assert given == known and result["tasks"][1]["title"] == "wikitext2_test.raw.txt"
    assert result["data"][0]["sha256"] == result["data"][1]["sha256"]


def test_requests_are_refused_before_a_model_is_loaded(pair, data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_load", lambda *args: pytest.fail("a model was loaded"))

    def refused(**changes):
        given = {"model": pair[0], "tasks": ("wikitext2",), "data_dir": data_dir, **changes}
        with pytest.raises(UserError) as caught:
            evaluate(EvalRequest(**given))
        return str(caught.value)

    assert "unknown task mmlu" in refused(tasks=("mmlu",))
    assert "no such text file" in refused(tasks=("./nothing.txt",))
    assert "no task" in refused(tasks=())
    assert "once" in refused(tasks=("piqa", "piqa"))
    assert "limit 0" in refused(limit=0)
    assert "batch size 0" in refused(batch_size=0)
    assert "seqlen 1" in refused(seqlen=1)
    assert "dtype 'int4'" in refused(dtype="int4")
    assert "no baseline was given" in refused(kl=True)
    assert "measured on a text" in refused(kl=True, baseline=pair[1], tasks=("piqa",))
    assert "no config.json" in refused(model=tmp_path / "nothing")
    assert "no config.json" in refused(baseline=tmp_path)
    assert "not in the data directory" in refused(data_dir=tmp_path)
    (pair[0] / "quantization_report.json").write_text("{")
    assert "not valid JSON" in refused()
    (pair[0] / "quantization_report.json").write_text("[]")
    assert "expected a JSON object" in refused()


def test_other_tokenizer_is_no_baseline(pair, data_dir):
    path = pair[1] / "tokenizer.json"
    changed = json.loads(path.read_text())
    vocabulary = changed["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(changed))
    for kl in (False, True):
        request = EvalRequest(pair[0], ("wikitext2",), pair[1], kl, data_dir, seqlen=32, limit=1)
        with pytest.raises(UserError, match="cut the text differently"):
            evaluate(request)
