"""Texts that must match: every draw stays inside the grammar, and the neighbours do not notice."""

import json
import re
import sys

import jsonschema
import pytest
from ahead import Ahead
from structured import PERSON, write_byte_checkpoint

from billfish import LLM, SamplingParams, StructuredOutputsParams, UserError


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = write_byte_checkpoint(tmp_path_factory.mktemp("structured") / "llama")
    with LLM(path, device="cpu", dtype="float32", max_num_seqs=16) as made:
        yield made


def wants(kind, value, **more):
    return SamplingParams(**{"max_tokens": 400, **more}, structured_outputs={kind: value})


def test_json_fits_its_schema_whatever_is_drawn_beside_it(llm):
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    (alone,) = llm.generate("a fish", plain)
    asked = [wants("json", PERSON, seed=seed, n=2, top_p=0.9, logprobs=2) for seed in range(12)]
    *outputs, beside = llm.generate(["a fish"] * 13, [*asked, plain])
    assert beside.outputs[0].text == alone.outputs[0].text
    texts = [one for output in outputs for one in output.outputs]
    for one in texts:
        assert (one.finish_reason, one.error) == ("stop", None)
        jsonschema.validate(json.loads(one.text), PERSON)
        assert len(one.logprobs) == len(one.token_ids)
    assert len({one.text for one in texts}) > 20
    again = llm.generate("a fish", asked[3])[0]
    assert [one.text for one in again.outputs] == [one.text for one in outputs[3].outputs]


def test_where_the_device_draws_the_host_does(llm):
    """A runner that draws by itself and runs ahead, as a GPU's: not for these texts."""
    asked = [wants("json", PERSON, seed=seed) for seed in range(2)]
    asked += [SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)] * 2
    texts = [[one.text for one in output.outputs] for output in llm.generate(["fish"] * 4, asked)]
    inner = llm.engine.runner
    llm.engine.runner = Ahead(inner)
    try:
        again = llm.generate(["fish"] * 4, asked)
        assert llm.engine.runner.promised > 0  # those that are left at the end run ahead
    finally:
        llm.engine.runner = inner
    assert [[one.text for one in output.outputs] for output in again] == texts


def test_log_probabilities_are_the_models_own(llm):
    """A token that the grammar forces has the probability that the model gave it, not 1."""
    (free,) = llm.generate("a fish", SamplingParams(max_tokens=1, temperature=0, logprobs=20))
    (bound,) = llm.generate("a fish", wants("regex", "zz", temperature=0, logprobs=20))
    first = bound.outputs[0].logprobs[0]
    assert bound.outputs[0].text == "zz"
    assert first.top == free.outputs[0].logprobs[0].top and first.logprob < -1


@pytest.mark.parametrize(
    ("kind", "value", "rule"),
    [
        ("regex", r"[0-9]{3}-[a-f]+!", r"[0-9]{3}-[a-f]+!"),
        ("choice", ['say "hi"', "back\\slash", "two\nlines", "été 🐟"], None),
        ("grammar", 'start: "x" DIGITS\nDIGITS: /[0-9]{2}/', "x[0-9]{2}"),
        ("grammar", 'root ::= "y" [0-9] "z"', "y[0-9]z"),
        ("json_object", True, None),
    ],
)
def test_other_forms(kind, value, rule, llm):
    ends = {token: 8 for token in llm.tokenizer('"}', add_special_tokens=False).input_ids}
    for seed in range(3):
        (one,) = llm.generate("a", wants(kind, value, seed=seed, logit_bias=ends))[0].outputs
        assert one.finish_reason == "stop"
        if rule is not None:
            assert re.fullmatch(rule, one.text)
        elif kind == "choice":
            assert one.text in value
        else:
            assert isinstance(json.loads(one.text), dict)


def test_ends_lengths_and_stops(llm):
    bound = {"temperature": 0, "ignore_eos": True}
    (output,) = llm.generate("a", wants("regex", "abc", **bound, min_tokens=50))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abc", "stop")
    (output,) = llm.generate("a", wants("regex", "[ab]{9,30}", min_tokens=20, seed=1))
    assert 20 <= len(output.outputs[0].text) <= 30
    (output,) = llm.generate("a", wants("regex", "abcdef", **bound, max_tokens=3))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abc", "length")
    (output,) = llm.generate("a", wants("regex", "abc", **bound, max_tokens=3))
    assert output.outputs[0].finish_reason == "stop"
    (output,) = llm.generate("a", wants("regex", "abcdef", **bound, stop="d"))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("abc", "d")
    eos = llm.tokenizer.eos_token_id
    (output,) = llm.generate(
        "a", SamplingParams(logit_bias={eos: 100}, structured_outputs={"regex": "[a-f]{5,}"})
    )
    assert len(output.outputs[0].text) == 5  # it may end there, and not before


def test_a_stop_string_may_be_shown(llm):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    text = llm.generate("a", params)[0].outputs[0].text
    stop = text[4:7]
    end = text.index(stop) + len(stop)
    for given, token in (({"stop": stop}, None), ({"stop_token_ids": (5,)}, 5)):
        bias = {"logit_bias": {5: 100}} if token else {}
        (one,) = llm.generate(
            "a",
            SamplingParams(
                temperature=0, max_tokens=20, include_stop_str_in_output=True, **given, **bias
            ),
        )[0].outputs
        assert one.text == (llm.tokenizer.decode([5]) if token else text[:end])
        assert (one.finish_reason, one.stop_reason) == ("stop", token or stop)


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json", {"type": "fish"}, "Invalid type: fish"),
        ("json", "{", "no JSON"),
        ("json", {"$ref": "#"}, "no text can match"),
        ("regex", "(a", "unclosed group"),
        ("grammar", "start: missing", "missing"),
        ("choice", [], "1 to 1000"),
        ("regex", 5, "a text"),
        ("regex", "a" * 200_000, "at most"),
        ("structural_tag", {}, "structural_tag is not supported"),
    ],
)
def test_what_cannot_be_is_told(kind, value, reason, llm):
    with pytest.raises(UserError, match=reason):
        llm.generate("a", wants(kind, value))


def test_one_form_at_a_time():
    with pytest.raises(UserError, match="one of json, regex"):
        StructuredOutputsParams(regex="a", choice=["b"])
    with pytest.raises(UserError, match="one of json, regex"):
        StructuredOutputsParams()


def test_a_grammar_that_becomes_too_complex_ends_its_request_alone(llm):
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    hard = wants("regex", "(a|aa|aaa|b)*c{100000}", seed=1)
    alone = llm.generate("a", plain)[0].outputs[0].text
    (failed, beside) = llm.generate(["a", "a"], [hard, plain])
    assert failed.outputs[0].finish_reason == "error" and "complex" in failed.outputs[0].error
    assert beside.outputs[0].text == alone
    assert llm.engine.pages.used() == 0


HOSTILE = {
    "time": {"allOf": [{"type": "string", "pattern": f".*a{{{i}}}.*"} for i in range(25)]},
    "memory": {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
    "stack": {
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)},
        "$ref": "#/$defs/d0",
    },
}


def test_hostile_grammars_end_a_process_that_has_nothing_to_lose(llm, monkeypatch):
    for schema in HOSTILE.values():
        with pytest.raises(UserError, match="too much time, memory or depth"):
            llm.matchers.compile(StructuredOutputsParams(json=schema), tried=True)
    assert llm.matchers.compile(StructuredOutputsParams(json=PERSON), tried=True)


def test_without_the_library(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(
        "billfish.engine.structured.find_spec", lambda name: None if name == "llguidance" else 1
    )
    with pytest.raises(UserError, match=r"pip install 'billfish\[serve\]'"):
        llm.generate("a", wants("regex", "never seen"))
