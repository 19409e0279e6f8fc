"""JSON mode and tools over real HTTP, as OpenAI's client sees them."""

import json
import random
import re

import jsonschema
import openai
import pytest
from pydantic import BaseModel
from served import MODEL, served
from structured import HERMES, LLAMA, MISTRAL, PERSON, PLAIN, byte_tokenizer, write_byte_checkpoint

from billfish.engine.structured import Matchers
from billfish.server.errors import ApiError
from billfish.server.protocol import ChatPrompt, parse_request
from billfish.server.tool_parser import parse_calls
from billfish.server.tools import FORMATS, ToolSupport, detect_format, requested

MESSAGES = [{"role": "user", "content": "who?"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}, "unit": {"enum": ["c", "f"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"City": {"type": "string", "maxLength": 6}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}


def requested_tools(body):
    return requested(parse_request(ChatPrompt, {"messages": MESSAGES, **body}))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Its template knows tools."""
    path = tmp_path_factory.mktemp("tools") / "hermes"
    with served(write_byte_checkpoint(path, HERMES), max_num_seqs=8) as made:
        yield made
        assert made.settle() == 0


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Its template does not."""
    path = tmp_path_factory.mktemp("tools") / "plain"
    with served(write_byte_checkpoint(path), max_num_seqs=8) as made:
        yield made


@pytest.fixture(params=["model", "plain"])
def either(request):
    return request.getfixturevalue(request.param)


def openai_client(model):
    return openai.OpenAI(base_url=f"{model.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def client(model):
    return openai_client(model)


def post(model, path, body):
    with model.http() as http:
        return http.post(path, json=body)


def ask(client, **more):
    return client.chat.completions.create(
        **{"model": MODEL, "messages": MESSAGES, "max_tokens": 600, **more}
    )


def test_json_mode(client, model):
    for seed in range(2):
        made = ask(client, response_format=SCHEMA, seed=seed, n=2, logprobs=True)
        for choice in made.choices:
            assert choice.finish_reason == "stop" and choice.message.tool_calls is None
            jsonschema.validate(json.loads(choice.message.content), PERSON)
        chunks = list(ask(client, response_format=SCHEMA, seed=seed, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == made.choices[0].message.content
    cut = ask(client, response_format=SCHEMA, max_tokens=5).choices[0]
    assert cut.finish_reason == "length" and cut.message.content.startswith("{")
    ends = {str(token): 8 for token in model.llm.tokenizer('"}').input_ids}
    free = ask(client, response_format={"type": "json_object"}, logit_bias=ends, seed=1)
    assert isinstance(json.loads(free.choices[0].message.content), dict)


def test_pydantic_models_are_parsed(client):
    class Point(BaseModel):
        x: int
        kind: bool

    made = client.chat.completions.parse(
        model=MODEL,
        messages=MESSAGES,
        response_format=Point,
        max_tokens=600,
        logit_bias={"0": 100},
    )
    assert isinstance(made.choices[0].message.parsed, Point)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"structured_outputs": {"regex": "[0-9]{4}"}}, "[0-9]{4}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "a{2}b"}, "aab"),
        ({"guided_json": {"const": 5}}, "5"),
        ({"guided_grammar": 'root ::= "q"'}, "q"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}},
            "7",
        ),
    ],
)
def test_texts_of_a_given_form(given, rule, model):
    answer = post(model, TEXT, {"prompt": ["a", "b"], **given})
    assert answer.status_code == 200, answer.text
    assert all(re.fullmatch(rule, one["text"]) for one in answer.json()["choices"])


NAMED = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize(
    ("of", "choice"), [("model", "required"), ("plain", "required"), ("model", NAMED)]
)
def test_calls_that_must_come(of, choice, request):
    client, wanted = openai_client(request.getfixturevalue(of)), {"clock"}
    if choice == "required":
        wanted.add("get_weather")
    for seed in range(2):
        settings = {
            "tools": [WEATHER, CLOCK],
            "tool_choice": choice,
            "seed": seed,
            "parallel_tool_calls": seed == 1,
            "logit_bias": {"0": 2},
        }
        made = ask(client, **settings).choices[0]
        assert made.finish_reason == "tool_calls" and made.message.content is None
        calls = made.message.tool_calls
        assert len(calls) == 1 or seed == 1
        for call in calls:
            assert call.function.name in wanted and call.id and call.type == "function"
            schema = (
                WEATHER["function"]["parameters"]
                if call.function.name != "clock"
                else {"type": "object", "maxProperties": 0}
            )
            jsonschema.validate(json.loads(call.function.arguments), schema)
        if seed == 0:
            continue
        chunks = [chunk.choices[0] for chunk in ask(client, **settings, stream=True)]
        assert chunks[0].delta.role == "assistant" and chunks[-1].finish_reason == "tool_calls"
        assert not any(chunk.delta.content for chunk in chunks)
        found = {}
        for piece in (p for chunk in chunks for p in chunk.delta.tool_calls or []):
            one = found.setdefault(piece.index, {"name": piece.function.name, "arguments": ""})
            assert (piece.id is None) == bool(one["arguments"]) or piece.function.name
            one["arguments"] += piece.function.arguments
        assert list(found.values()) == [
            {"name": c.function.name, "arguments": c.function.arguments} for c in calls
        ]


def test_a_conversation_with_calls(either):
    client, model = openai_client(either), either
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "clock", "arguments": '{"zone": "UTC"}'},
    }
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    with model.http() as http:
        told = http.post("/tokenize", json={"messages": messages, "tools": [CLOCK]}).json()
        text = http.post("/detokenize", json={"tokens": told["tokens"]}).json()["prompt"]
    assert '"zone": "UTC"' in text and "noon" in text and '"name": "clock"' in text
    made = ask(client, messages=messages, tools=[WEATHER], max_tokens=8)
    assert made.choices[0].message.content and made.choices[0].message.tool_calls is None
    for tools in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        plain = post(model, "/tokenize", {"messages": MESSAGES, **tools}).json()["tokens"]
        assert "weather" not in model.llm.tokenizer.decode(plain)


def test_strict_tools_and_answers_of_a_form(client):
    """With auto the model may answer instead of calling; whatever it does has its form."""
    strict = {**CLOCK, "function": {**CLOCK["function"], "strict": True}}
    made = ask(client, tools=[strict], max_tokens=30, logit_bias={"0": 100})
    assert made.choices[0].finish_reason == "stop"
    for seed in range(2):
        message = ask(client, tools=[CLOCK], response_format=SCHEMA, seed=seed).choices[0].message
        if message.tool_calls:
            assert message.tool_calls[0].function.name == "clock"
        else:
            jsonschema.validate(json.loads(message.content), PERSON)


DEEP: dict = {}
for _ in range(300):
    DEEP = {"items": DEEP}
WRONG = [
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [CLOCK, CLOCK]}, "tools"),
    ({"tools": {}, "tool_choice": "required"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": "maybe"}, "tool_choice"),
    (
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
    ),
    ({"tools": [CLOCK], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}],
            "tool_choice": "required",
        },
        "tools",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]},
        "tools[0].function",
    ),
    (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"enum": ["a" * 140_000]}},
                }
            ],
            "tool_choice": "required",
            "max_tokens": 1,
        },
        "tools",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
        "response_format",
    ),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
    (
        {
            "messages": [
                {"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}
            ]
        },
        "messages[0].tool_calls",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "{"}}],
                }
            ]
        },
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"json_schema": {"schema": {}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format"),
    ({"response_format": 5}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "fish"}}}},
        "response_format",
    ),
    (
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "response_format, guided_regex",
    ),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_ones_are_refused_by_name(body, param, model):
    answer = post(model, CHAT, {"messages": MESSAGES, "max_tokens": 5, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_hostile_schemas_are_refused_while_others_are_served(model):
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    form = {
        "type": "json_schema",
        "json_schema": {"schema": {"$defs": chain, "$ref": "#/$defs/d0"}},
    }
    answer = post(model, CHAT, {"messages": MESSAGES, "response_format": form})
    assert answer.status_code == 400 and "too much time" in answer.json()["error"]["message"]
    assert post(model, TEXT, {"prompt": "a", "guided_regex": "ab"}).json()["choices"][0]["text"]
    slow = post(
        model,
        TEXT,
        {"prompt": "a", "guided_regex": "(a|aa|aaa|b)*c{100000}", "seed": 1, "max_tokens": 200},
    )
    assert slow.status_code == 400 and "complex" in slow.json()["error"]["message"]


def test_stops_that_are_shown_and_embeddings_that_are_not(client, model):
    settings = {"prompt": "a", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    text = post(model, TEXT, settings).json()["choices"][0]["text"]
    shown = post(model, TEXT, {**settings, "stop": text[4:6], "include_stop_str_in_output": True})
    assert shown.json()["choices"][0]["text"] == text[: text.index(text[4:6]) + 2]
    with pytest.raises(openai.NotFoundError, match="an encoder makes"):
        client.embeddings.create(model=MODEL, input="a")


CALLS = [
    (
        "hermes",
        'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": "}<x"}}\n</tool_call>',
        "Well.\n",
        [("f", '{"a": "}<x"}')],
    ),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>\n{"name": "g", '
        '"arguments": {"b": [1, {"c": 2}]}}\n</tool_call>',
        "",
        [("f", "{}"), ("g", '{"b": [1, {"c": 2}]}')],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut \\', "", [("f", '{"a": "cut \\')]),
    ("hermes", "a <tool_call> is a tag", "a <tool_call> is a tag", []),
    ("hermes", "no call <tool", "no call <tool", []),
    ("llama3_json", ' {"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    ("llama3_json", '{"answer": 5}', '{"answer": 5}', []),
    ("llama3_json", "text {", "text {", []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": "]"}'), ("g", "{}")],
    ),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CALLS)
def test_calls_are_read_as_they_grow(form, text, content, calls):
    """However a text is cut: nothing that was told is taken back, and all of it adds up."""
    told = parse_calls(FORMATS[form], text, True)
    assert (told[0], [(c.name, c.arguments) for c in told[1]]) == (content, calls)
    shown, found = "", []
    for end in range(len(text) + 1):
        plain, growing = parse_calls(FORMATS[form], text[:end], False)
        assert plain.startswith(shown) and len(growing) >= len(found)
        for old, new in zip(found, growing, strict=False):
            assert new.name == old.name and new.arguments.startswith(old.arguments)
        shown, found = plain, growing
    assert content.startswith(shown) and len(found) <= len(calls)


def test_no_text_breaks_the_reader():
    draw = random.Random(0)
    pieces = [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": ',
        "{",
        "}",
        '"',
        "\\",
        "[",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        " ",
        "a",
        ",",
    ]
    for _ in range(3000):
        text = "".join(draw.choices(pieces, k=draw.randint(0, 12)))
        for form in FORMATS.values():
            plain, calls = parse_calls(form, text, draw.random() < 0.5)
            assert len(plain) + sum(len(one.arguments) for one in calls) <= 2 * len(text)


@pytest.mark.parametrize(
    ("template", "form"),
    [(HERMES, "hermes"), (LLAMA, "llama3_json"), (MISTRAL, "mistral"), (PLAIN, None)],
)
@pytest.mark.parametrize("special", [(), ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")])
def test_every_format_has_a_grammar_that_its_reader_reads(template, form, special):
    assert getattr(detect_format(template), "name", None) == form
    tokenizer = byte_tokenizer(template, special)
    box = ToolSupport(tokenizer)
    matchers = Matchers(tokenizer, len(tokenizer), frozenset({0}))
    call = '{"name": "%s", "%s": %s}'
    one = call % ("get_weather", box.format.arguments, '{"city": "Rome", "unit": "c"}')
    two = call % ("clock", box.format.arguments, "{}")
    texts = {
        "hermes": f"<tool_call>\n{one}\n</tool_call>\n<tool_call>\n{two}\n</tool_call>",
        "llama3_json": one,
        "mistral": f"[TOOL_CALLS][{one}, {two}]",
    }
    text = texts[box.format.name]
    strict = {**CLOCK, "function": {**CLOCK["function"], "strict": True}}
    for choice, said in (("required", text), ("auto", text), ("auto", "Hello.")):
        tools = requested_tools({"tools": [WEATHER, strict], "tool_choice": choice})
        matcher = matchers.compile(box.grammar(tools, None)).copy()
        for token in tokenizer(said, add_special_tokens=False).input_ids:
            assert matcher.mask()[token // 8] >> token % 8 & 1, (said, tokenizer.decode([token]))
            matcher.note(token)
        assert matcher.mask()[0] & 1  # it may end here
        shown = tokenizer.decode(tokenizer(said, add_special_tokens=False).input_ids)
        named = [] if said == "Hello." else ["get_weather", "clock"][: 1 + box.format.several]
        assert [call.name for call in parse_calls(box.format, shown, True)[1]] == named
    assert box.shows_special == bool(special)


def test_a_template_in_an_unknown_format():
    tokenizer = byte_tokenizer(HERMES + "<function=")
    tools = requested_tools({"tools": [CLOCK]})
    with pytest.raises(ApiError, match="--tool-call-parser"):
        ToolSupport(tokenizer).check(tools)
    ToolSupport(tokenizer, "mistral").check(tools)
    ToolSupport(tokenizer).check(requested_tools({"tools": [CLOCK], "tool_choice": "required"}))
