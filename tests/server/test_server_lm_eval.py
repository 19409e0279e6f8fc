"""lm-eval's local-completions asks our server: log likelihoods, what is greedy, and texts."""

import pytest
import torch
from served import MODEL

from billfish.models.load import load

models = pytest.importorskip("lm_eval.models.openai_completions")
instances = pytest.importorskip("lm_eval.api.instance")

PAIRS = [("the fastest fish", " in the sea"), ("a", "b"), ("0123456789" * 6, "01234"), ("x", "yzz")]


@pytest.fixture(scope="module", params=["remote", "huggingface"])
def harness(request, server, tiny_path):
    own = {"tokenizer": str(tiny_path)} if request.param == "huggingface" else {}
    return models.LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model=MODEL,
        max_length=128,
        batch_size=2,
        tokenizer_backend="auto" if request.param == "remote" else "huggingface",
        **own,
    )


def ask(kind, arguments):
    return [
        instances.Instance(request_type=kind, doc={}, arguments=one, idx=place)
        for place, one in enumerate(arguments)
    ]


def test_log_likelihoods(harness, server, tiny_path):
    model, tokenizer = load(tiny_path)
    pairs = list(PAIRS)
    for prompt, _ in PAIRS:  # ends as the model itself would write them
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        best = tokenizer.decode([int(model(ids).logits[0, -1].argmax())])
        if len(tokenizer(best).input_ids) == 1:
            pairs.append((prompt, best))
    found = harness.loglikelihood(ask("loglikelihood", pairs))
    for (prompt, end), (value, is_greedy) in zip(pairs, found, strict=True):
        before, ids = tokenizer(prompt).input_ids, tokenizer(prompt + end).input_ids
        logits = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        rows = logits[len(before) - 1 : -1]
        wanted = rows.gather(1, torch.tensor(ids[len(before) :])[:, None]).sum()
        assert value == pytest.approx(float(wanted), abs=1e-2)
        assert is_greedy == (rows.argmax(-1).tolist() == ids[len(before) :])
    assert {greedy for _, greedy in found} == {True, False}


def test_texts(harness, server):
    options = {"until": ["\x00"], "max_gen_toks": 8, "temperature": 0}
    asked = ask("generate_until", [(prompt, dict(options)) for prompt, _ in PAIRS])
    found = harness.generate_until(asked)
    for (prompt, _), text in zip(PAIRS, found, strict=True):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        with server.http() as http:
            wanted = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert text == wanted
