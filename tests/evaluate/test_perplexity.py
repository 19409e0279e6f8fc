"""Perplexity and KL against plain fp64 computations; statistics against their formulas."""

import logging
import math
import statistics
from types import SimpleNamespace

import pytest
import torch

from billfish.errors import UserError
from billfish.evaluate import perplexity as module
from billfish.evaluate.estimate import exp_difference, exp_mean, finite, mean, ratio_of_means
from billfish.evaluate.perplexity import (
    default_seqlen,
    divergence,
    perplexity,
    wikitext_text,
    windows,
)

SEQLEN = 24


def random_ids(count=5, seqlen=SEQLEN, vocabulary=256):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(vocabulary, (count, seqlen), generator=generator)


@torch.no_grad()
def log_probabilities(model, ids):
    """fp64 (windows, seqlen - 1, vocabulary), all windows in one batch."""
    return model(ids).logits[:, :-1].double().log_softmax(-1)


def window_losses(model, ids):
    chosen = log_probabilities(model, ids).gather(-1, ids[:, 1:, None])[..., 0]
    return (-chosen.mean(-1)).tolist()


def test_perplexity_is_the_plain_computation(llama):
    model, ids = llama(0), random_ids()
    expected = window_losses(model, ids)
    calls = []
    found = perplexity(model, ids, on_window=lambda done, total: calls.append((done, total)))
    assert found.value == pytest.approx(math.exp(statistics.fmean(expected)), rel=1e-5)
    assert found.value > 300  # a random model with opinions is worse than a uniform one
    error = found.value * statistics.stdev(expected) / math.sqrt(5)
    assert found.stderr == pytest.approx(error, rel=1e-4)
    assert found.losses == pytest.approx(expected, rel=1e-5)
    assert (found.windows, found.tokens) == (5, 5 * (SEQLEN - 1))
    assert calls == [(i, 5) for i in range(1, 6)]


@pytest.mark.parametrize("positions", [1, 7, 23, 1000])
def test_pieces_change_nothing(llama, monkeypatch, positions):
    model, other, ids = llama(0), llama(1), random_ids(2)
    whole, whole_kl = perplexity(model, ids), divergence(model, other, ids)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 256 * positions + 5)
    assert perplexity(model, ids).value == pytest.approx(whole.value, rel=1e-9)
    assert divergence(model, other, ids).kl.value == pytest.approx(whole_kl.kl.value, rel=1e-9)


def test_uniform_model_has_the_vocabulary_as_perplexity(llama):
    model = llama(0)
    torch.nn.init.zeros_(model.lm_head.weight)
    found = perplexity(model, random_ids())
    assert found.value == pytest.approx(256, rel=1e-6)
    assert found.stderr == pytest.approx(0, abs=1e-4)


def test_one_window_has_no_standard_error(llama):
    assert perplexity(llama(0), random_ids(1)).stderr is None


def test_bf16_model_runs_in_bf16_and_is_judged_in_fp32(llama):
    model, ids = llama(0).to(torch.bfloat16), random_ids(3)
    with torch.no_grad():
        logits = torch.cat([model(window[None]).logits for window in ids])
    assert logits.dtype == torch.bfloat16
    exact = logits[:, :-1].double().log_softmax(-1).gather(-1, ids[:, 1:, None])
    assert perplexity(model, ids).value == pytest.approx(math.exp(-exact.mean()), rel=1e-5)
    rounded = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).double()
    assert abs(rounded.mean() - exact.mean()) > 1e-4  # so a bf16 softmax would have been seen

    other = llama(1).to(torch.bfloat16)
    with torch.no_grad():
        log_p = torch.cat([other(window[None]).logits[:, :-1] for window in ids]).double()
    log_p, log_q = log_p.log_softmax(-1), logits[:, :-1].double().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    assert divergence(model, other, ids).kl.value == pytest.approx(kl, rel=1e-5)


def test_model_does_not_diverge_from_itself(llama):
    model = llama(0)
    found = divergence(model, model, random_ids())
    assert (found.kl.value, found.kl.stderr) == (0.0, 0.0)
    assert (found.agreement.value, found.agreement.stderr) == (1.0, 0.0)


def test_divergence_is_the_plain_computation(llama):
    model, baseline, ids = llama(0), llama(0), random_ids()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn_like(weight)
    log_q, log_p = log_probabilities(model, ids), log_probabilities(baseline, ids)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean(-1).tolist()
    same = (log_p.argmax(-1) == log_q.argmax(-1)).double().mean(-1).tolist()

    found = divergence(model, baseline, ids)
    assert found.kl.value == pytest.approx(statistics.fmean(kl), rel=1e-4)
    assert found.kl.stderr == pytest.approx(statistics.stdev(kl) / math.sqrt(5), rel=1e-3)
    assert 0 < found.agreement.value < 1
    assert found.agreement.value == pytest.approx(statistics.fmean(same))
    assert found.agreement.stderr == pytest.approx(statistics.stdev(same) / math.sqrt(5))
    assert found.model == perplexity(model, ids)
    assert found.baseline == perplexity(baseline, ids)
    reverse = divergence(baseline, model, ids).kl.value
    assert abs(reverse - found.kl.value) > 1e-3  # KL(baseline || model), not the other way


def test_impossible_tokens_count_nothing(llama):
    """A vocabulary padded with -inf on both sides must not turn KL into nan."""

    class Masked:
        device = torch.device("cpu")

        def __init__(self, model):
            self.model = model

        def __call__(self, input_ids, use_cache):
            logits = self.model(input_ids=input_ids).logits.clone()
            logits[..., 200:] = -torch.inf
            return SimpleNamespace(logits=logits)

    ids = random_ids(2, vocabulary=200)
    found = divergence(Masked(llama(0)), Masked(llama(1)), ids).kl.value
    logs = [log_probabilities(SimpleLogits(llama(seed)), ids) for seed in (1, 0)]
    expected = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean()
    assert found == pytest.approx(expected.item(), rel=1e-4)


class SimpleLogits:
    """The first 200 tokens only."""

    def __init__(self, model):
        self.model = model

    def __call__(self, ids):
        return SimpleNamespace(logits=self.model(ids).logits[..., :200])


def test_divergence_needs_one_vocabulary(llama):
    with pytest.raises(UserError, match="256 logits a token and the baseline 300"):
        divergence(llama(0), llama(0, vocabulary=300), random_ids())


def test_windows_cut_the_text_once_and_drop_the_tail(tokenizer):
    text = "abcdefgh " * 100
    ids = windows(tokenizer, text, 64)
    assert ids.shape == (900 // 64, 64)
    assert tokenizer.decode(ids.flatten()).replace(" ", "") == text[: 14 * 64].replace(" ", "")


def test_long_text_is_no_reason_to_warn(tokenizer):
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        windows(tokenizer, "a" * 900, 64)  # the tokenizer's limit is 512
        assert records == []
        tokenizer("a" * 900)
        assert len(records) == 1  # so it would have been seen
    finally:
        logger.removeHandler(handler)


def test_windows_refuse_what_cannot_be_cut(tokenizer):
    with pytest.raises(UserError, match=r"has 10 tokens and a window has 64.*seqlen <= 10"):
        windows(tokenizer, "a" * 10, 64)
    with pytest.raises(UserError, match="seqlen=1"):
        windows(tokenizer, "a" * 10, 1)


def test_default_seqlen(llama):
    config = llama(0).config
    assert default_seqlen(config) == 512
    config.max_position_embeddings = 131072
    assert default_seqlen(config) == 2048


def test_wikitext_recipe(tmp_path):
    """The rows of a raw file: blank ones empty, others with their newline, joined by two."""
    lines = [
        " ",
        " = Title = ",
        " ",
        " One line . ",
        " \r",
        " = = Part = = ",
        " caf\u00e9 , 2 @.@ 5 ",
    ]
    path = tmp_path / "wiki.test.raw"
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    rows = module.wikitext_rows(path.read_bytes().decode())
    assert rows == ["", " = Title = \n", "", " One line . \n", "", *[x + "\n" for x in lines[5:]]]
    assert wikitext_text(path) == "\n\n".join(rows)
    assert len(rows) == path.read_bytes().count(b"\n")


def test_other_texts_are_read_as_they_are(tmp_path):
    path = tmp_path / "story.txt"
    path.write_bytes(b"\n = not a title\r\nOnce.\n\nTwice.\n")
    assert wikitext_text(path) == "\n = not a title\r\nOnce.\n\nTwice.\n"
    with pytest.raises(UserError, match=r"nothing\.txt does not exist"):
        wikitext_text(tmp_path / "nothing.txt")
    path.write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="byte 3 is not UTF-8"):
        wikitext_text(path)


def test_means_and_errors():
    observed = [1.0, 0.0, 1.0, 1.0]
    assert mean(observed).value == 0.75
    assert mean(observed).stderr == pytest.approx(statistics.stdev(observed) / 2)
    assert exp_mean([1000.0, 1000.0]).value == math.inf
    paired = exp_difference([2.0, 3.0], [2.5, 3.5])
    assert paired.value == pytest.approx(math.exp(-0.5))
    assert paired.stderr == pytest.approx(0, abs=1e-12)  # a constant shift has no error
    assert finite({"a": [math.nan, (1.0, math.inf)], "b": "x"}) == {
        "a": [None, [1.0, None]],
        "b": "x",
    }


def test_ratio_error_agrees_with_repetition():
    """The delta method against the spread of the ratio over many repeated experiments."""
    generator = torch.Generator().manual_seed(0)
    right = torch.rand(4000, 200, generator=generator) < 0.6
    lost = torch.rand(4000, 200, generator=generator) < 0.1
    baseline, model = right.double(), (right & ~lost).double()
    spread = (model.mean(1) / baseline.mean(1)).std().item()
    errors = [
        ratio_of_means([(m.tolist(), b.tolist())]).stderr
        for m, b in zip(model[:50], baseline[:50], strict=True)
    ]
    assert statistics.fmean(errors) == pytest.approx(spread, rel=0.06)
    halves = [(model[0, i::2].tolist(), baseline[0, i::2].tolist()) for i in (0, 1)]
    whole = ratio_of_means([(model[0].tolist(), baseline[0].tolist())])
    assert ratio_of_means(halves).value == pytest.approx(whole.value)
    assert ratio_of_means(halves).stderr == pytest.approx(whole.stderr, rel=0.05)
    assert ratio_of_means([([1.0], [0.0])]) is None
    assert ratio_of_means([([1.0], [1.0])]).stderr is None
