"""What OpenAI's clients rely on, over real HTTP: answers, streams, counts, and errors by name."""

import json
import math

import openai
import pytest
import torch
from served import MODEL

from billfish.engine.params import SamplingParams
from billfish.models.load import load

PROMPT = "a billfish"
MESSAGES = [{"role": "user", "content": PROMPT}]
EXTRA = {"ignore_eos": True}


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def wanted(server):
    return server.llm.generate(PROMPT, greedy(12))[0].outputs[0]


def greedy(count, **more):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def post(server, path, body):
    with server.http() as http:
        return http.post(path, json=body)


def test_a_completion(client, wanted):
    made = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, extra_body=EXTRA, user="someone"
    )
    assert made.id.startswith("cmpl-") and made.object == "text_completion"
    assert made.model == MODEL and made.system_fingerprint.startswith("fp_")
    assert made.choices[0].text == wanted.text and made.choices[0].finish_reason == "length"
    usage = made.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 12, 22)


def test_a_chat(client, wanted):
    made = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=12, temperature=0, extra_body=EXTRA
    )
    assert made.id.startswith("chatcmpl-") and made.object == "chat.completion"
    message = made.choices[0].message
    assert (message.role, message.content) == ("assistant", wanted.text)
    parts = [{"role": "developer", "content": [{"type": "text", "text": part} for part in PROMPT]}]
    again = client.chat.completions.create(
        model=MODEL, messages=parts, max_tokens=12, temperature=0, extra_body=EXTRA
    )
    assert again.choices[0].message.content == wanted.text
    long = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, extra_body=EXTRA
    )
    assert long.usage.total_tokens == 128  # all that fits


def test_prompts_in_every_shape(client, server, wanted):
    ids = server.llm.tokenizer(PROMPT).input_ids
    for prompt in (PROMPT, [PROMPT, PROMPT], ids, [ids, ids]):
        made = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=12, temperature=0, extra_body=EXTRA
        )
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        assert [one.text for one in made.choices] == [wanted.text] * (2 if several else 1)
        assert [one.index for one in made.choices] == list(range(len(made.choices)))


def test_a_stream_adds_up(client, wanted):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=EXTRA,
    )
    chunks = list(stream)
    *parts, last = chunks
    assert last.choices == [] and last.usage.completion_tokens == 12
    assert all(part.usage is None and len(part.choices) == 1 for part in parts)
    assert len({chunk.id for chunk in chunks}) == 1
    assert parts[0].choices[0].delta.role == "assistant"
    assert all(part.choices[0].delta.role is None for part in parts[1:])
    assert "".join(part.choices[0].delta.content or "" for part in parts) == wanted.text
    ends = [part.choices[0].finish_reason for part in parts]
    assert ends[-1] == "length" and not any(ends[:-1])


def test_a_stream_on_the_wire(server, wanted):
    body = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "n": 2,
    }
    answer = post(server, "/v1/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(e.startswith("data: ") for e in events[:-1])
    texts = {0: "", 1: ""}
    for event in events[:-2]:
        (choice,) = json.loads(event[6:])["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: wanted.text, 1: wanted.text}


def test_n_seeds_and_stops(client, server, wanted):
    settings = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 1.5}
    made = [client.completions.create(**settings, n=3, seed=5, extra_body=EXTRA) for _ in range(2)]
    texts = [[choice.text for choice in one.choices] for one in made]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3
    stop = wanted.text[5:8]
    for given in (stop, [stop, "never"]):
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stop": given, **EXTRA}
        (choice,) = post(server, "/v1/completions", body).json()["choices"]
        assert choice["text"] == wanted.text[: wanted.text.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    body = {"prompt": PROMPT, "stop_token_ids": [wanted.token_ids[2]], "temperature": 0, **EXTRA}
    assert post(server, "/v1/completions", body).json()["choices"][0]["finish_reason"] == "stop"


def test_a_bias_by_text_keys(client, server):
    token = server.llm.tokenizer("z").input_ids[0]
    made = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0, logit_bias={str(token): 100}
    )
    assert made.choices[0].text.replace(" ", "") == "zzzz"


def test_logprobs_of_a_chat(client, server):
    (output,) = server.llm.generate(PROMPT, greedy(5, logprobs=2))
    made = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body=EXTRA,
    )
    content = made.choices[0].logprobs.content
    assert [one.logprob for one in content] == [one.logprob for one in output.outputs[0].logprobs]
    assert "".join(one.token for one in content) == made.choices[0].message.content
    for one in content:
        assert len(one.top_logprobs) == 2 and one.top_logprobs[0].logprob == one.logprob
        assert bytes(one.bytes).decode() == one.token
    streamed = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=5,
        temperature=0,
        logprobs=True,
        stream=True,
        extra_body=EXTRA,
    )
    told = [one for chunk in streamed for one in chunk.choices[0].logprobs.content]
    assert [one.logprob for one in told] == [one.logprob for one in content]


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_logprobs_of_the_prompt(count, stream, server, tiny_path):
    model, tokenizer = load(tiny_path)
    body = {
        "prompt": tokenizer(PROMPT).input_ids,
        "max_tokens": count,
        "temperature": 0,
        "logprobs": 2,
        "echo": True,
        "stream": stream,
        **EXTRA,
    }
    answer = post(server, "/v1/completions", body)
    if stream:
        parts = [json.loads(line[6:])["choices"][0] for line in answer.text.split("\n\n")[:-2]]
        told = {
            name: [x for part in parts for x in part["logprobs"][name]]
            for name in parts[0]["logprobs"]
        }
        text = "".join(part["text"] for part in parts)
    else:
        assert answer.json()["usage"]["completion_tokens"] == count
        (choice,) = answer.json()["choices"]
        told, text = choice["logprobs"], choice["text"]
    size = len(PROMPT) + count
    assert {len(values) for values in told.values()} == {size}
    assert text.startswith(tokenizer.decode(tokenizer(PROMPT).input_ids))
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert told["text_offset"][0] == 0 and told["text_offset"] == sorted(told["text_offset"])
    ids = (
        tokenizer(PROMPT).input_ids + server.llm.generate(PROMPT, greedy(5))[0].outputs[0].token_ids
    )
    logits = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    for place in range(1, size):
        value = told["token_logprobs"][place]
        assert value == pytest.approx(float(logits[place - 1, ids[place]]), abs=1e-3)
        best = float(logits[place - 1].max())
        assert max(told["top_logprobs"][place].values()) == pytest.approx(best, abs=1e-3)
        greedy_here = int(logits[place - 1].argmax()) == ids[place]
        assert (value == max(told["top_logprobs"][place].values())) == greedy_here


def test_echo_alone_and_of_a_prompt_that_fills_the_model(server):
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True}
    (choice,) = post(server, TEXT, body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert choice["logprobs"] is None
    full = post(server, TEXT, {**body, "prompt": "ab" * 64, "logprobs": 1}).json()
    assert len(full["choices"][0]["logprobs"]["tokens"]) == 128
    more = {"max_tokens": 2, "ignore_eos": True, "logprobs": 0, "n": 2}
    two = post(server, TEXT, {**body, **more}).json()["choices"]
    assert [len(one["logprobs"]["tokens"]) for one in two] == [12, 12]


def test_cached_tokens_are_told(client):
    prompt = "0123456789" * 5
    for cached in (False, True):
        made = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
        assert (made.usage.prompt_tokens_details.cached_tokens >= 32) == cached


def test_models_health_version_tokens(client, server):
    (model,) = client.models.list().data
    assert model.id == MODEL and model.max_model_len == 128
    assert client.models.retrieve(MODEL).id == MODEL
    with server.http() as http:
        assert http.get("/health").content == b""
        for path in ("/health", "/v1/models", f"/v1/models/{MODEL}", "/metrics", "/version", "/"):
            head = http.head(path)
            assert head.status_code == 200 and head.content == b""
            assert head.headers["content-length"] == http.get(path).headers["content-length"]
        assert http.get("/version").json()["version"]
        assert http.get("/tokenizer_info").json()["eos_token"] == "<eos>"
        told = http.post("/tokenize", json={"prompt": "abc", "return_token_strs": True}).json()
        assert told["count"] == 3 and len(told["token_strs"]) == 3
        assert http.post("/tokenize", json={"messages": MESSAGES}).json()["count"] == len(PROMPT)
        assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
        back = http.post("/detokenize", json={"tokens": told["tokens"]}).json()
        assert back["prompt"].replace(" ", "") == "abc"


def test_metrics(server):
    post(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 4, **EXTRA})
    with server.http() as http:
        answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = {}
    for line in answer.text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            assert name.startswith("vllm:") and f'model_name="{MODEL}"' in name
            name = name.replace(f'model_name="{MODEL}"', "").replace(",}", "}")
            values[name] = float(value)
    assert values["vllm:num_requests_running{}"] == 0
    assert values["vllm:kv_cache_usage_perc{}"] == 0
    assert values["vllm:generation_tokens_total{}"] >= 4
    assert values['vllm:request_success_total{finished_reason="length"}'] >= 1
    for name in (
        "time_to_first_token",
        "inter_token_latency",
        "time_per_output_token",
        "request_time_per_output_token",
        "e2e_request_latency",
    ):
        count = values[f"vllm:{name}_seconds_count{{}}"]
        assert count >= 1 and values[f'vllm:{name}_seconds_bucket{{le="+Inf"}}'] == count
        assert values[f"vllm:{name}_seconds_sum{{}}"] > 0


TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
WRONG = [
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": 5}, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "prompt"),
    (TEXT, {"prompt": [1, True]}, "prompt"),
    (TEXT, {"prompt": [500]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": "\ud800"}, "prompt"),
    (TEXT, {"prompt": "a", "stop": "\ud800", "n": "\ud800"}, "n"),
    (TEXT, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    (TEXT, {"prompt": "a", "n": 10**9}, "n"),
    (TEXT, {"prompt": "a", "n": 0}, "n"),
    (TEXT, {"prompt": ["a"] * 3000}, "n"),
    (TEXT, {"prompt": "a", "temperature": -1}, "temperature"),
    (TEXT, {"prompt": "a", "temperature": "hot"}, "temperature"),
    (TEXT, {"prompt": "a", "temperature": 10**400}, "temperature"),
    (TEXT, {"prompt": "a", "temperature": 1e39}, "temperature"),
    (TEXT, {"prompt": "a", "temperature": math.inf}, "temperature"),
    (TEXT, {"prompt": "a", "temperature": math.nan}, "temperature"),
    (TEXT, {"prompt": "a", "temperature": True}, "temperature"),
    (TEXT, {"prompt": "a", "repetition_penalty": 1e39}, "repetition_penalty"),
    (TEXT, {"prompt": "a", "repetition_penalty": 1e-40}, "repetition_penalty"),
    (TEXT, {"prompt": "a", "top_k": 2**63}, "top_k"),
    (TEXT, {"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
    (TEXT, {"prompt": "a", "min_tokens": 10**30}, "min_tokens"),
    (TEXT, {"prompt": "a", "stop": "a" * 1025}, "stop"),
    (TEXT, {"prompt": "a", "stop_token_ids": [1] * 1025}, "stop_token_ids"),
    (TEXT, {"prompt": "a", "min_tokens": 1, "stop_token_ids": [*range(128)]}, "min_tokens"),
    (TEXT, {"prompt": "a", "logit_bias": {"1": 10**400}}, "logit_bias"),
    (TEXT, {"prompt": "a", "top_p": 0}, "top_p"),
    (TEXT, {"prompt": "a", "seed": 2**70}, "seed"),
    (TEXT, {"prompt": "a", "stop": [""]}, "stop"),
    (TEXT, {"prompt": "a", "stop": {}}, "stop"),
    (TEXT, {"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids"),
    (TEXT, {"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (TEXT, {"prompt": "a", "stream": "yes"}, "stream"),
    (TEXT, {"prompt": "a", "stream_options": {}}, "stream_options"),
    (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
    (TEXT, {"prompt": "a", "best_of": 2}, "best_of"),
    (TEXT, {"prompt": "a", "model": 5}, "model"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": ["a"]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
    ),
    (CHAT, {"messages": [{"role": "user", "content": ""}]}, "messages"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "logprobs": 3}, "logprobs"),
    (CHAT, {"messages": MESSAGES, "echo": True}, "echo"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [1, 500]}, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG, ids=lambda value: str(value)[:50])
def test_wrong_requests_are_refused_by_name(path, body, param, server):
    with server.http() as http:
        answer = http.post(path, content=json.dumps(body))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert len(error["message"]) < 1000


def test_harmless_defaults_are_taken(server):
    body = {
        "messages": MESSAGES,
        "max_tokens": 2,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "u",
        "metadata": {},
        "unheard_of": 1,
        "logprobs": False,
        "stop": None,
        "seed": None,
        "parallel_tool_calls": True,
    }
    assert post(server, CHAT, body).status_code == 200


BODIES = [b"", b"{", b"[]", b"5", b"\xff", b"[" * 100_000, b'{"prompt": ' + b"9" * 5000 + b"}"]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:12]))
def test_bodies_that_are_no_json_object(body, server):
    with server.http() as http:
        answer = http.post(TEXT, content=body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


def test_lengths_are_told(client, server):
    with pytest.raises(openai.BadRequestError, match=r"128 tokens.*200 in the prompt") as caught:
        client.completions.create(model=MODEL, prompt="a" * 200, max_tokens=5)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="100 in the prompt and 29 to be"):
        client.completions.create(model=MODEL, prompt="a" * 100, max_tokens=29)
    with pytest.raises(openai.BadRequestError, match="at least"):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a" * 10**6}]
        )
    assert client.completions.create(model=MODEL, prompt="a" * 100, max_tokens=28).usage


def test_unknown_models_paths_and_methods(client, server):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-5", prompt="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")
    with server.http() as http:
        for answer in (http.get("/nowhere"), http.get(TEXT), http.get("/docs")):
            assert answer.status_code in (404, 405) and answer.json()["error"]["message"]


def test_an_engine_that_fails_fails_one_request(server, wanted):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **EXTRA}
    inner = server.llm.engine.decoder.logits

    def broken(hidden):
        raise RuntimeError("out of memory")

    server.llm.engine.decoder.logits = broken
    try:
        answer = post(server, TEXT, body)
        assert answer.status_code == 500 and "out of memory" in answer.json()["error"]["message"]
        events = post(server, TEXT, {**body, "stream": True}).text.split("\n\n")
        assert "out of memory" in json.loads(events[0][6:])["error"]["message"]
        assert events[-2] == "data: [DONE]"
    finally:
        server.llm.engine.decoder.logits = inner
    assert post(server, TEXT, body).json()["choices"][0]["text"] == wanted.text


def test_a_mistake_of_ours_is_one_500(server, monkeypatch, wanted):
    def broken(*_):
        raise KeyError("ours")

    monkeypatch.setattr(server.admission, "enter", broken)
    answer = post(server, TEXT, {"prompt": PROMPT})
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert "ours" not in answer.text
    monkeypatch.undo()
    assert post(server, TEXT, {"prompt": PROMPT}).status_code == 200
