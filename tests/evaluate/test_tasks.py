"""Zero-shot tasks against direct log-likelihoods, and what is said of wrong or missing data."""

import json
import math
import random
import string
import sys

import pytest
import torch

from billfish.errors import UserError
from billfish.evaluate import tasks
from billfish.evaluate.perplexity import windows
from billfish.evaluate.tasks import TASKS, ZeroShotTask, read_rows, run_task

ZERO_SHOT = [name for name, task in TASKS.items() if isinstance(task, ZeroShotTask)]


def requests_of(name, row):
    """(context, continuation, length to divide by) for each option."""
    if name == "piqa":
        context, options = f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]]
    elif name == "winogrande":
        return [(c, " " + row["continuation"], len(c)) for c in row["context_options"]]
    elif name == "hellaswag":
        context, options = row["query"], row["choices"]
    else:
        context, options = f"Question: {row['question']}\nAnswer:", row["choices"]
    return [(context, " " + option, len(option)) for option in options]


@torch.no_grad()
def log_likelihood(model, tokenizer, context, continuation):
    """(sum of log-probabilities, whether each token is the greedy one)."""
    ids = tokenizer(context + continuation, return_tensors="pt").input_ids
    logs = model(ids).logits[0, :-1].double().log_softmax(-1)[-len(continuation) :]
    targets = ids[0, -len(continuation) :]
    greedy = bool((logs.argmax(-1) == targets).all())
    return logs.gather(1, targets[:, None]).sum().item(), greedy


def expected_scores(model, tokenizer, name, rows):
    if name == "lambada":
        return [
            float(log_likelihood(model, tokenizer, r["context"], " " + r["continuation"])[1])
            for r in rows
        ]
    scores = []
    for row in rows:
        found = [
            log_likelihood(model, tokenizer, context, continuation)[0] / (length if norm else 1)
            for context, continuation, length in requests_of(name, row)
            for norm in [TASKS[name].metric == "acc_norm"]
        ]
        gold = row["label"] if name == "piqa" else row["gold"]
        scores.append(float(max(range(len(found)), key=found.__getitem__) == gold))
    return scores


@torch.no_grad()
def greedy_rows(model, tokenizer):
    """Three contexts that the model goes on with a space and then a letter."""
    source = random.Random(5)
    contexts = ["".join(source.choices(string.ascii_lowercase, k=8)) for _ in range(8000)]
    ids = windows(tokenizer, "".join(contexts), 8)
    space = tokenizer(" ").input_ids
    goes_on = (model(ids).logits[:, -1].argmax(-1) == space[0]).nonzero()[:, 0].tolist()
    rows = []
    for index in goes_on:
        whole = torch.cat([ids[index], torch.tensor(space)])
        letter = tokenizer.decode(model(whole[None]).logits[0, -1].argmax())
        if len(letter) == 1 and letter.strip():
            rows.append({"context": contexts[index], "continuation": letter})
    assert len(rows) >= 3
    return rows[:3]


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ZERO_SHOT)
def test_task_is_the_plain_computation(name, data_dir, llama, tokenizer):
    model = llama(0)
    lines = (data_dir / TASKS[name].file).read_text().splitlines()[:12]
    rows = [json.loads(line) for line in lines]
    if name == "lambada":  # a random model is not right by luck: let it write some of the answers
        rows[2:5] = greedy_rows(model, tokenizer)
        (data_dir / TASKS[name].file).write_text("\n".join(map(json.dumps, rows)))
    expected = expected_scores(model, tokenizer, name, rows)
    found = run_task(model, tokenizer, name, data_dir)
    assert found.scores == tuple(expected)
    assert 0 < found.value < 1  # both outcomes were seen
    assert found.value == pytest.approx(sum(expected) / 12)
    # of a share p of n: sqrt(p (1 - p) / (n - 1))
    assert found.stderr == pytest.approx(math.sqrt(found.value * (1 - found.value) / 11))
    assert (found.metric, found.samples) == (TASKS[name].metric, 12)
    assert run_task(model, tokenizer, name, data_dir, limit=3).scores == found.scores[:3]


def test_bf16_model_is_scored_in_fp32(data_dir, llama, tokenizer, monkeypatch):
    """In bf16 a sum of log-probabilities has three digits, and close options tie."""
    made, (*before, hflm, float32) = [], tasks._harness()

    def keep(**arguments):
        made.append(hflm(**arguments))
        return made[-1]

    monkeypatch.setattr(tasks, "_harness", lambda: (*before, keep, float32))
    model = llama(0).to(torch.bfloat16)
    run_task(model, tokenizer, "piqa", data_dir, limit=2)
    assert made[0].softmax_dtype == torch.float32
    assert made[0].model is model and model.dtype == torch.bfloat16


def test_rows_are_checked_one_by_one(data_dir):
    def refused(name, row):
        path = data_dir / TASKS[name].file
        good = path.read_text().splitlines()[0]
        path.write_text(f"{good}\n{row if isinstance(row, str) else json.dumps(row)}\n")
        with pytest.raises(UserError) as caught:
            read_rows(name, data_dir)
        assert f"{path}, line 2" in str(caught.value) and TASKS[name].row in str(caught.value)
        return str(caught.value)

    assert "not JSON" in refused("piqa", "{")
    assert "not a JSON object" in refused("piqa", "[1]")
    row = {"goal": "a", "sol1": "b", "sol2": "c", "label": 0}
    assert "'sol2' must be a str" in refused("piqa", {**row, "sol2": None})
    assert "'label' must be a int" in refused("piqa", {**row, "label": "0"})
    assert "'label' is 2 and there are 2 options" in refused("piqa", {**row, "label": 2})
    arc = {"question": "a", "choices": ["b", "c", "d"], "gold": 3}
    assert "'gold' is 3 and there are 3 options" in refused("arc_easy", arc)
    assert "'gold' is -1" in refused("arc_challenge", {**arc, "gold": -1})
    assert "'continuation' must be a str" in refused("lambada", {"context": "a"})

    (data_dir / TASKS["piqa"].file).write_text("\n")
    with pytest.raises(UserError, match="has no rows"):
        read_rows("piqa", data_dir)


def test_rows_keep_what_the_task_needs_and_no_more(data_dir):
    assert set(read_rows("arc_easy", data_dir, limit=1)[0]) == {"question", "choices", "gold"}
    assert len(read_rows("arc_easy", data_dir, limit=5)) == 5


def test_hellaswag_fragment_is_capitalized(data_dir):
    row = {"query": "Roof: A man sits. he is up. the man", "choices": ["a", "b"], "gold": 0}
    (data_dir / "hellaswag_val.jsonl").write_text(json.dumps(row))
    query = read_rows("hellaswag", data_dir)[0]["query"]
    assert query == "Roof: A man sits. he is up. The man"


def test_missing_data_names_file_directory_and_row(tmp_path):
    with pytest.raises(UserError) as caught:
        read_rows("piqa", tmp_path)
    for part in ("piqa_valid.jsonl", str(tmp_path), '"goal"', '"label": 0'):
        assert part in str(caught.value)
    with pytest.raises(UserError, match="no data directory was given"):
        tasks.read_text("wikitext2", None)


def test_missing_harness_says_what_to_install(data_dir, llama, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.task", None)
    with pytest.raises(UserError, match=r"pip install 'billfish\[eval\]'"):
        run_task(llama(0), tokenizer, "piqa", data_dir)
