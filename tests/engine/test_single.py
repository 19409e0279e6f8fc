"""`billfish generate`: one text, by the engine, or through transformers where it must be."""

import math

import pytest
import torch
from tiny import write_checkpoint

from billfish.engine import single
from billfish.engine.llm import LLM
from billfish.engine.sampling import SamplingParams
from billfish.engine.single import generate
from billfish.errors import UserError
from billfish.models.generate import Sampling
from billfish.models.load import load

PROMPT, SHORT = "a billfish", Sampling(max_tokens=24)
OTHERS = ["Gemma2ForCausalLM", "OPTForCausalLM"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("single") / "llama")


def test_it_is_what_the_engine_writes_in_no_more_pages_than_it_needs(path, monkeypatch):
    made = []
    monkeypatch.setattr(
        single.LLM,
        "of",
        lambda *args, of=LLM.of, **kwargs: made.append(of(*args, **kwargs)) or made[-1],
    )
    pieces, timing = generate(*load(path), PROMPT, SHORT, say=pytest.fail)
    pieces = list(pieces)
    with LLM(path) as llm:
        (wanted,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))
    assert "".join(pieces) == wanted.outputs[0].text and len(pieces) > 10
    assert timing.tokens == len(wanted.outputs[0].token_ids) and timing.prompt_tokens == 10
    assert timing.prompt_seconds > 0 and timing.tokens_per_second > 0
    assert made[0].closed and made[0].engine.pages.count == math.ceil((10 + 24) / 16)


@pytest.mark.parametrize("architecture", OTHERS)
def test_what_the_engine_does_not_run_goes_through_transformers(architecture, tmp_path):
    model, tokenizer = load(write_checkpoint(tmp_path / "model", architecture))
    ids, said = tokenizer(PROMPT, return_tensors="pt").input_ids, []
    wanted = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )
    pieces, timing = generate(model, tokenizer, PROMPT, SHORT, say=said.append)
    whole = tokenizer.decode(wanted[0], skip_special_tokens=True)
    assert tokenizer.decode(ids[0]) + "".join(pieces) == whole
    assert timing.tokens == wanted.shape[1] - 10 and timing.tokens_per_second > 0
    (line,) = said
    assert line.startswith(f"runs through transformers: {architecture} has ")
    hot = [Sampling(max_tokens=24, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    texts = ["".join(generate(model, tokenizer, PROMPT, one, say=said.append)[0]) for one in hot]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_a_model_that_computes_nan_is_told_in_one_sentence(architecture, tmp_path):
    model, tokenizer = load(write_checkpoint(tmp_path / "model", architecture))
    model.model.norm.weight.data.fill_(math.nan)
    pieces, _ = generate(model, tokenizer, PROMPT, SHORT, say=lambda line: None)
    with pytest.raises(UserError, match=r"NaN.*`billfish verify`"):
        list(pieces)
