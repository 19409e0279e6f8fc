"""The whole engine on a tiny model: texts as transformers writes them, whatever else is running."""

import asyncio
import os
import random
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny import write_checkpoint

from billfish.engine import build, core, sampling
from billfish.engine.llm import LLM
from billfish.engine.sampling import SamplingParams, logprobs_of
from billfish.errors import UserError
from billfish.models.load import load

PROMPTS = ["a billfish", "x", "the speed that memory allows", "0123456789" * 4, "ab" * 30]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("engine") / "llama")


@pytest.fixture(scope="module")
def llm(path):
    with LLM(path, max_num_seqs=8) as made:
        yield made


def texts(made, prompts=PROMPTS, params=GREEDY):
    return [output.outputs[0].text for output in made.generate(prompts, params)]


@pytest.fixture(scope="module")
def alone(llm):
    return [texts(llm, [prompt])[0] for prompt in PROMPTS]


def test_on_a_cpu_it_is_made_by_a_thread_that_ends(path, monkeypatch):
    """One that stays would keep OpenMP's threads, and slow down the engine's own."""
    makers = []

    def watched(*given):
        makers.append(threading.current_thread())
        return load(*given)

    monkeypatch.setattr(build, "load", watched)
    with LLM(path, device="cpu"):
        (maker,) = makers
        assert maker is not threading.main_thread() and not maker.is_alive()


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "GptOssForCausalLM",
    ],
)
def test_greedy_tokens_are_those_of_transformers(architecture, tmp_path):
    path = write_checkpoint(tmp_path / "model", architecture)
    model, tokenizer = load(path)
    with LLM(path) as made:
        outputs = made.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        wanted = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            min_new_tokens=24,
            eos_token_id=None,
        )
        assert output.outputs[0].token_ids == wanted[0, ids.shape[1] :].tolist()
        assert output.outputs[0].finish_reason == "length"


def test_a_text_does_not_depend_on_its_batch(llm, alone):
    assert texts(llm) == alone
    assert texts(llm, PROMPTS[::-1] * 2) == alone[::-1] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"pages": 9, "max_num_seqs": 5},  # 144 tokens for texts of up to 84
        {"max_batched_tokens": 7, "max_num_seqs": 3},  # prompts in chunks
        {"prefix_caching": False},
        {"pages": 7, "max_batched_tokens": 5, "max_num_seqs": 4},
    ],
    ids=str,
)
def test_nor_on_pages_chunks_or_the_prefix_cache(options, path, alone):
    with LLM(path, **options) as made:
        assert texts(made) == alone
        again = made.generate(PROMPTS, GREEDY)
        assert [output.outputs[0].text for output in again] == alone
        if options.get("prefix_caching", True) and "pages" not in options:
            assert again[3].cached_tokens >= 32
        assert made.engine.pages.used() == 0


def test_preemption_happens_and_is_not_seen(path, alone):
    with LLM(path, pages=7, max_num_seqs=5) as made:
        seen = []
        preempt = made.engine.scheduler.step

        def watched():
            pieces = preempt()
            seen.extend(piece.sequence.preempted for piece in pieces)
            return pieces

        made.engine.scheduler.step = watched
        assert texts(made) == alone
        assert max(seen) > 0


def test_a_seeded_text_does_not_depend_on_the_others(llm):
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=20, ignore_eos=True)
    others = SamplingParams(temperature=0.9, top_p=0.8, max_tokens=15)
    alone = texts(llm, ["hello"], params)
    mixed = llm.generate(["some", "hello", "texts"], [others, params, others])
    assert mixed[1].outputs[0].text == alone[0]
    several = llm.generate(
        "hello", SamplingParams(temperature=1.5, seed=7, max_tokens=20, n=3, ignore_eos=True)
    )[0]
    assert several.outputs[0].text == alone[0]
    assert len({output.text for output in several.outputs}) == 3


def test_stops_and_limits(llm, alone):
    text = alone[0]
    stop = text[5:8]
    (output,) = llm.generate(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=24, stop=(stop,), ignore_eos=True)
    )
    one = output.outputs[0]
    assert one.text == text[: text.index(stop)]
    assert (one.finish_reason, one.stop_reason) == ("stop", stop)
    token = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids[3]
    (output,) = llm.generate(
        PROMPTS[0], SamplingParams(temperature=0, stop_token_ids=(token,), ignore_eos=True)
    )
    assert output.outputs[0].stop_reason == token and output.outputs[0].finish_reason == "stop"
    assert len(output.outputs[0].token_ids) <= 4
    (output,) = llm.generate(
        "q" * 120, SamplingParams(temperature=0, max_tokens=99, ignore_eos=True)
    )
    assert len(output.outputs[0].token_ids) == 8 and output.outputs[0].finish_reason == "length"


def test_logprobs_are_the_models_own(llm, path):
    model, _ = load(path)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[2], params)
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    logits = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    for i, chosen in enumerate(output.outputs[0].logprobs):
        row = logits[len(output.prompt_token_ids) + i - 1]
        assert chosen.logprob == pytest.approx(float(row[chosen.token]), abs=1e-3)
        wanted = row.topk(3)
        assert [token for token, _ in chosen.top] == wanted.indices.tolist()


@pytest.mark.parametrize("options", [{}, {"pages": 9, "max_batched_tokens": 11}], ids=str)
def test_scores_are_the_models_own(options, path):
    model, tokenizer = load(path)
    with LLM(path, max_num_seqs=4, **options) as made:
        texts(made)  # pages that a score must not use
        found = made.score(PROMPTS * 2)
    for prompt, scores in zip(PROMPTS * 2, found, strict=True):
        ids = torch.tensor(tokenizer(prompt).input_ids)
        logprobs = model(ids[None]).logits[0].float().log_softmax(-1)
        wanted = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
        assert torch.allclose(torch.tensor(scores), wanted, atol=1e-3)


def test_a_stream_grows_and_ends(llm, alone):
    async def run():
        seen = [output.outputs[0].text async for output in llm.stream(PROMPTS[0], GREEDY)]
        both = await asyncio.gather(*(collect(prompt) for prompt in PROMPTS))
        return seen, both

    async def collect(prompt):
        async for output in llm.stream(prompt, GREEDY):
            last = output
        return last.outputs[0].text

    seen, both = asyncio.run(run())
    assert len(seen) > 20 and all(b.startswith(a) for a, b in pairwise(seen))
    assert seen[-1] == alone[0] and both == alone


def test_iterate_grows_and_ends_without_an_event_loop(llm, alone):
    seen = [output.outputs[0].text for output in llm.iterate(PROMPTS[0], GREEDY)]
    assert len(seen) > 20 and all(b.startswith(a) for a, b in pairwise(seen))
    assert seen[-1] == alone[0]
    with pytest.raises(UserError, match="empty"):
        next(llm.iterate([]))


def test_leaving_a_stream_frees_its_pages(path):
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)

    async def run(made):
        stream = made.stream("hello", long)
        async for _ in stream:
            break
        await stream.aclose()
        (output,) = await asyncio.to_thread(made.generate, "x", GREEDY)
        return output

    with LLM(path, prefix_caching=False) as made:
        output = asyncio.run(run(made))
        assert output.finished and made.engine.idle and made.engine.pages.used() == 0
        for _ in made.iterate("hello", long):
            break
        (output,) = made.generate("x", GREEDY)
        assert output.finished and made.engine.idle and made.engine.pages.used() == 0


def test_closing_tells_whoever_waits(path):
    made, found = LLM(path), []
    params = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
    waiting = threading.Thread(target=lambda: found.extend(made.generate(["a"] * 6, params)))
    waiting.start()
    while made.engine.idle and waiting.is_alive():
        pass
    made.close()
    waiting.join(10)
    assert not waiting.is_alive() and all(output.finished for output in found)
    with pytest.raises(UserError, match="closed"):
        made.generate("a")


def test_news_that_are_read_late_are_not_counted_twice(llm):
    """Outputs are filled in place: an old notice of a text may be read when the text is done."""

    class Worker:
        cancel = None

        def add(self, request, params, notify):
            def end():
                request.outputs[0].finish_reason = "length"
                notify(request)

            if request.prompt == "slow":
                threading.Timer(0.2, end).start()
            else:
                notify(request)
                end()

    real, llm._worker = llm._worker, Worker()
    try:
        assert all(output.finished for output in llm.generate(["quick", "slow", "quick"], GREEDY))
    finally:
        llm._worker = real


def test_one_bad_row_ends_one_request(path, alone):
    with LLM(path) as made:
        inner = made.engine.decoder.logits

        def spoilt(hidden):
            logits = inner(hidden)
            if len(logits) > 1:
                logits[1] = float("nan")
            return logits

        made.engine.decoder.logits = spoilt
        outputs = [made._request(prompt, GREEDY) for prompt in PROMPTS[:2]]
        for output in outputs:  # in this thread, so that the rows are known
            made.engine.add(output, GREEDY)
        while not made.engine.idle:
            made.engine.step()
        assert outputs[1].outputs[0].finish_reason == "error" and outputs[1].outputs[0].error
        assert outputs[0].outputs[0].text == alone[0]

        def broken(hidden):
            raise RuntimeError("out of memory")

        made.engine.decoder.logits = broken
        (output,) = made.generate(["x"], GREEDY)
        assert "out of memory" in output.outputs[0].error
        made.engine.decoder.logits = inner
        assert texts(made) == alone and made.engine.pages.used() == 0


WRONG = [
    (dict(prompts=""), "empty"),
    (dict(prompts=[[]]), "empty"),
    (dict(prompts=[[1, 500]]), "500"),
    (dict(prompts=[[1, -1]]), "-1"),
    (dict(prompts="y" * 128), "128"),
    (dict(prompts=["a", "b"], params=[GREEDY]), "2 prompts"),
]


@pytest.mark.parametrize(("given", "said"), WRONG, ids=[said for _, said in WRONG])
def test_wrong_requests(given, said, llm):
    with pytest.raises(UserError, match=said):
        llm.generate(**given)


OPTIONS = [
    (dict(kv="kv5"), "kv16, kv8, kv4"),
    (dict(pages=0), "pages 0"),
    (dict(max_num_seqs=0), "max_num_seqs 0"),
    (dict(gpu_memory=1.5), "gpu_memory"),
]


@pytest.mark.parametrize(("given", "said"), OPTIONS, ids=[said for _, said in OPTIONS])
def test_wrong_options(given, said, path):
    with pytest.raises(UserError, match=said):
        LLM(path, **given)


def test_a_text_that_never_fits_is_refused(path):
    with LLM(path, pages=2) as made:
        with pytest.raises(UserError, match="the cache has 2"):
            made.generate("abc", SamplingParams(max_tokens=60))
        assert made.generate("abc", SamplingParams(max_tokens=9))[0].finished


def test_models_it_does_not_run(tmp_path):
    path = write_checkpoint(tmp_path / "model", "GPTNeoXForCausalLM")
    with pytest.raises(UserError, match="transformers"):
        LLM(path)


def test_soak(path, llm):
    """Random lengths, a fifth cancelled, few pages: texts as alone, pages back, nothing left."""
    source = random.Random(0)
    jobs = [
        ("".join(source.choices("abcdefgh ", k=source.randint(1, 40))), source.randint(1, 24))
        for _ in range(160)
    ]
    outputs = llm.generate([prompt for prompt, _ in jobs], [greedy(count) for _, count in jobs])
    wanted = {job: one.outputs[0].text for job, one in zip(jobs, outputs, strict=True)}
    with LLM(path, pages=12, max_num_seqs=6, max_batched_tokens=24) as made:
        for job, text in list(wanted.items())[::6]:
            assert texts(made, [job[0]], greedy(job[1])) == [text]  # alone

        async def one(prompt, count, cancelled):
            await asyncio.sleep(source.random() * 0.05)
            async for output in made.stream(prompt, greedy(count)):
                if cancelled and output.outputs[0].token_ids:
                    return None
            return output.outputs[0].text

        async def run():
            return await asyncio.gather(*(one(*job, i % 5 == 4) for i, job in enumerate(jobs)))

        found = asyncio.run(run())
        before = resident()
        asyncio.run(run())
        assert resident() - before < 8 * 2**20  # flat
        made.generate("x", greedy(1))  # after the last cancel
        assert made.engine.idle and made.engine.pages.used() == 0
    for job, text in zip(jobs, found, strict=True):
        if text is not None:
            assert wanted[job] == text
    assert sum(text is None for text in found) >= 30


def resident():
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def test_prompts_are_scored_with_their_rivals_and_not_continued(path):
    model, _ = load(path)
    with LLM(path, max_model_len=60) as made:
        params = SamplingParams(max_tokens=0, prompt_logprobs=3)
        (output,) = made.generate(["x" * 60], params)  # no room for a token more
        assert output.finished and not output.outputs[0].token_ids
        (output,) = made.generate(["a billfish"], params)
        ids = output.prompt_token_ids
        logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        assert [one.token for one in output.prompt_logprobs] == ids[1:]
        for row, one in zip(logprobs, output.prompt_logprobs, strict=False):
            assert one.logprob == pytest.approx(float(row[one.token]), abs=1e-3)
            assert [token for token, _ in one.top] == row.topk(3).indices.tolist()
        with pytest.raises(UserError, match="max_tokens 0"):
            SamplingParams(max_tokens=0)
        assert made.engine.idle and made.engine.pages.used() == 0


@pytest.mark.parametrize("place", ["logprobs_of", "choose_tokens"])
def test_a_request_that_fails_in_a_step_fails_alone(place, llm, alone, monkeypatch):
    """Its prompt cannot be scored, or its token not be drawn."""
    inner = logprobs_of

    def broken(raw, tokens, counts):
        if 7 in counts:
            raise RuntimeError("out of luck")
        return inner(raw, tokens, counts)

    monkeypatch.setattr(core if place == "logprobs_of" else sampling, "logprobs_of", broken)
    asked = {"prompt_logprobs": 7} if place == "logprobs_of" else {"logprobs": 7}
    wrong = SamplingParams(temperature=0, max_tokens=20, **asked)
    found = llm.generate([PROMPTS[0], "abc", PROMPTS[1]], [GREEDY, wrong, GREEDY])
    assert [found[0].outputs[0].text, found[2].outputs[0].text] == alone[:2]
    assert found[1].outputs[0].error == "RuntimeError: out of luck"
    assert llm.engine.idle and llm.engine.pages.used() == 0


def test_what_a_model_cannot_do_is_said_at_once(llm, path):
    every = SamplingParams(stop_token_ids=list(range(128)), min_tokens=1)
    with pytest.raises(UserError, match="min_tokens 1: every token of this model"):
        llm.generate("a", every)
    with pytest.raises(UserError, match="stop_token_ids 128: this model's tokens are 0 to 127"):
        llm.generate("a", SamplingParams(stop_token_ids=[128]))
    with pytest.raises(UserError, match="max_model_len 129: this model has 128 positions"):
        LLM(path, max_model_len=129)
