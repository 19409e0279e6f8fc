"""Running ahead: the next decode begins before the tokens of this one are known. On a CPU, with a
runner that hides them as a GPU would."""

import random

import pytest
import torch
from ahead import Ahead
from thorough import some
from tiny import write_checkpoint

from billfish import LLM, SamplingParams


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("ahead") / "model")


def ahead(path, **options):
    made = LLM(path, dtype="float32", **options)
    made.engine.runner = Ahead(made.engine.runner)
    return made


def requests(count, seed, plain):
    """Prompts and params of many kinds; some end by a token, some by a string, some by length.
    Those that are not plain keep the whole batch from running ahead."""
    draw = random.Random(seed)
    for _ in range(count):
        prompt = "".join(draw.choices("abcdefgh ", k=draw.randint(1, 40)))
        yield (
            prompt,
            SamplingParams(
                max_tokens=draw.randint(1, 60),
                temperature=draw.choice((0, 0.8, 1.3)),
                top_p=draw.choice((1, 0.7)),
                top_k=draw.choice((0, 0, 5)),
                min_p=draw.choice((0, 0, 0.1)),
                seed=draw.randrange(2**40),
                presence_penalty=0 if plain else draw.choice((0, 0, 0, 0.5)),
                stop=draw.choice(((), (), ("a",), ("bc", "\x0b"))),
                stop_token_ids=draw.choice(((), (5, 17))),
                logprobs=None if plain else draw.choice((None, None, None, 2)),
                min_tokens=draw.choice((0, 0, 1)),
            ),
        )


def facts(output):
    one = output.outputs[0]
    return one.text, one.token_ids, one.finish_reason, one.stop_reason, len(one.logprobs)


@pytest.fixture(scope="module", params=[True, False], ids=["plain", "mixed"])
def case(request, path):
    """Whether requests are plain, the requests, and what becomes of them without running ahead."""
    asked = list(requests(60, 1, request.param))
    prompts, params = map(list, zip(*asked, strict=True))
    with LLM(path, dtype="float32") as made:
        wanted = [facts(output) for output in made.generate(prompts, params)]
    return request.param, prompts, params, wanted


@pytest.mark.parametrize(
    "options",
    some(
        [{}, {"pages": 12}, {"max_num_seqs": 3}, {"max_batched_tokens": 16, "max_num_seqs": 8}],
        *(1, 3),
    ),
    ids=str,
)
def test_texts_are_the_same(options, case, path):
    plain, prompts, params, wanted = case
    with ahead(path, **options) as made:
        assert [facts(output) for output in made.generate(prompts, params)] == wanted
        assert made.engine.runner.promised > (50 if plain else -1)  # it did run ahead
        assert made.engine.pages.used() == 0


def test_one_alone_runs_ahead_all_the_way(path):
    params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    with ahead(path) as made:
        (output,) = made.generate(["abc"], params)
        assert len(output.outputs[0].token_ids) == 50
        assert made.engine.runner.promised == 49  # all but the last one, which no step reads


def test_decodes_run_ahead_beside_prompts(path):
    """Prompts of several chunks, admitted one after the other: all steps but the last mix both."""
    draw = random.Random(2)
    prompts = ["".join(draw.choices("abcdefgh ", k=60)) for _ in range(12)]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    options = {"max_batched_tokens": 24, "max_num_seqs": 4}
    with LLM(path, dtype="float32", **options) as made:
        wanted = [facts(output) for output in made.generate(prompts, params)]
    with ahead(path, **options) as made:
        beside = []
        inner = made.engine.runner.run

        def watched(pieces, rules=None):
            before = made.engine.runner.promised
            decoded = inner(pieces, rules)
            if any(piece.count > 1 for piece in pieces):
                beside.append(made.engine.runner.promised - before)
            return decoded

        made.engine.runner.run = watched
        assert [facts(output) for output in made.generate(prompts, params)] == wanted
        assert made.engine.runner.promised == 12 * 39
        assert sum(beside) > 60 and len(beside) > 30


def test_a_full_cache_runs_ahead_while_pages_have_room(path):
    """Only tokens that begin a page need a free one."""
    params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    with ahead(path) as made:
        need = -(-(len(made.tokenizer("abc").input_ids) + 50) // made.engine.pages.tokens)
    with ahead(path, pages=2 * need) as made:
        made.generate(["abc", "def"], params)
        assert made.engine.runner.promised == 2 * 49


def test_cancelled_while_it_flies(path):
    params = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
    with ahead(path) as made:
        engine = made.engine
        outputs = [made._request(prompt, params) for prompt in ("abc", "defgh")]
        for output in outputs:
            engine.add(output, params)
        for _ in range(10):
            engine.step()
        engine.cancel(outputs[0].name)
        while not engine.idle:
            engine.step()
        assert outputs[0].outputs[0].finish_reason == "cancelled"
        (alone,) = made.generate(["defgh"], params)
        assert outputs[1].outputs[0].token_ids == alone.outputs[0].token_ids
        assert engine.pages.used() == 0


def test_a_bad_row_ends_its_request_alone(path):
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with ahead(path) as made:
        engine, runner = made.engine, made.engine.runner
        inner, calls = runner.run, []

        def spoilt(pieces, rules=None):
            calls.append(len(pieces))
            decoded = inner(pieces, rules)
            if len(calls) == 5:
                decoded.found[1, 1] = torch.tensor(float("nan")).view(torch.int32)
            return decoded

        runner.run = spoilt
        outputs = [made._request(prompt, params) for prompt in ("abc", "defgh")]
        for output in outputs:
            engine.add(output, params)
        while not engine.idle:
            engine.step()
        assert "NaN" in outputs[1].outputs[0].error
        assert outputs[0].outputs[0].finish_reason == "length"
        assert len(outputs[0].outputs[0].token_ids) == 30
