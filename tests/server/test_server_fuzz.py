"""Requests that nobody would send, several at once: bodies with fields of every value and type,
broken and deep JSON, headers, methods, and bytes that are hardly HTTP. Whatever comes, the answer
is no 5xx but 503, an error has OpenAI's form, nothing hangs, nothing is logged as an error, and
neither pages nor memory stay behind.
"""

import asyncio
import json
import logging
import math
import socket
import time
from collections import Counter
from contextlib import suppress

import fuzzing
import httpx
import pytest
from hypothesis import strategies as st
from served import MODEL, served

from billfish.engine.llm import LLM
from billfish.server.app import Service, make_app
from billfish.server.fields import KNOWN, UNSUPPORTED, WITHOUT_EFFECT

pytestmark = pytest.mark.fuzz
TOGETHER = 8  # requests at once
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ROUTES = [
    TEXT,
    CHAT,
    "/tokenize",
    "/detokenize",
    "/v1/models",
    f"/v1/models/{MODEL}",
    "/health",
    "/metrics",
    "/stats",
    "/version",
    "/tokenizer_info",
    "/",
    "/page.js",
    "/nowhere",
    "/v1/models/%ED%A0%80%00",
    "/v1//completions",
]

# Values
characters = st.characters(exclude_categories=())  # halves of surrogate pairs, too
texts = st.text(characters, max_size=20) | st.sampled_from(
    ["", "a billfish", "\ud800", "\0", "é" * 9]
)
extremes = st.sampled_from(
    [
        1e39,
        1e308,
        -1e39,
        1e-40,
        5e-324,
        math.nan,
        math.inf,
        -math.inf,
        2**31,
        2**63,
        2**64,
        10**30,
        10**400,
        True,
    ]
)
odd_numbers = extremes | st.sampled_from(
    [
        0,
        -0.0,
        1,
        -1,
        False,
        0.5,
        2,
        100,
        101,
        127,
        128,
        129,
        1e-5,
        1e38,
        2**31 - 1,
        -(2**31),
        2**32,
        2**53 + 1,
        2**63 - 1,
        -(2**63),
        -(2**63) - 1,
    ]
)
numbers = odd_numbers | st.integers(-5, 130) | st.floats(-3, 3)
scalars = st.none() | st.booleans() | numbers | texts
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
# What is right for each field.
right = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9) | st.just("a billfish")
ids = st.lists(st.integers(0, 127), min_size=1, max_size=6)
roles = st.sampled_from(["user", "system", "assistant", "developer"])
part = st.fixed_dictionaries({"type": st.just("text"), "text": right})
parts = right | st.lists(part, min_size=1, max_size=3)
message = st.fixed_dictionaries({"role": roles, "content": parts})
BOTH = {
    "model": st.just(MODEL),
    "n": st.integers(1, 3),
    "max_tokens": st.integers(2, 6),
    "min_tokens": st.integers(0, 2),
    "max_completion_tokens": st.integers(2, 6),
    "temperature": st.floats(0, 100),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 200),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.01, 100),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": right | st.lists(right, max_size=4),
    "stop_token_ids": ids,
    "ignore_eos": st.booleans(),
    "stream": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(0, 127).map(str), st.floats(-100, 100), max_size=4),
}
several = st.lists(right, min_size=1, max_size=3) | st.lists(ids, min_size=1, max_size=3)
FORMS = {  # needed, and not
    TEXT: (
        {"prompt": right | ids | several},
        {**BOTH, "echo": st.booleans(), "logprobs": st.integers(0, 20)},
    ),
    CHAT: (
        {"messages": st.lists(message, min_size=1, max_size=2)},
        {**BOTH, "logprobs": st.booleans()},
    ),
    "/tokenize": ({"prompt": right}, {"return_token_strs": st.booleans()}),
    "/detokenize": ({"tokens": ids}, {"model": st.just(MODEL)}),
}
NUMBERS = [
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
]
FIELDS = sorted(KNOWN | WITHOUT_EFFECT | set(UNSUPPORTED) | {"sampling"})


@st.composite
def body(draw, path):
    """Right but for one thing, so that what is wrong with it may reach the engine."""
    needed, more = FORMS.get(path, FORMS[TEXT])
    names = draw(st.lists(st.sampled_from(sorted(more)), max_size=6))
    made = {name: draw({**needed, **more}[name]) for name in (*needed, *names)}
    if made.get("stream") is True:
        made["stream_options"] = {"include_usage": draw(st.booleans())}
    kind = draw(st.sampled_from(["right", "number", "number", "number", "field", "new"]))
    if kind == "number":
        made[draw(st.sampled_from(NUMBERS))] = draw(odd_numbers)
    elif kind == "field":
        made[draw(st.sampled_from(FIELDS))] = draw(anything)
    elif kind == "new":
        made[draw(texts)] = draw(anything)
    return made


@st.composite
def content(draw, path):
    """Bytes of a body: JSON, JSON that was cut, joined or changed, or no JSON at all."""
    text = json.dumps(draw(body(path)))
    kind = draw(st.sampled_from(["whole"] * 12 + ["changed"] * 3 + ["deep", "bytes", "other"]))
    if kind == "deep":
        opening = draw(st.sampled_from(["[", '{"a":', '{"prompt":', '{"messages":[']))
        return (opening * draw(st.sampled_from([1, 50, 900, 5000, 100_000]))).encode()
    if kind == "bytes":
        return draw(st.binary(max_size=40))
    if kind == "other":
        return json.dumps(draw(anything)).encode()
    if kind == "changed":
        at, until = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        piece = draw(st.sampled_from(["", '"', "}", "\\u", "\x00", "9" * 5000, "NaN"]))
        text = text[:at] + piece + text[until:]
    return text.encode("utf-8", "surrogatepass")


header = st.sampled_from(
    [
        ("content-type", "text/plain"),
        ("content-type", "application/json; charset=utf-16"),
        ("content-length", "-1"),
        ("content-length", "9" * 30),
        ("content-length", "1e3"),
        ("content-length", "\u00b2"),
        ("host", "evil.example"),
        ("host", ""),
        ("host", "[::1"),
        ("authorization", "Bearer \xff"),
        ("sec-fetch-site", "cross-site"),
        ("expect", "100-continue"),
        ("transfer-encoding", "gzip"),
        ("x-long", "a" * 40_000),
        ("accept", "\x00"),
        ("cookie", "a=b"),
    ]
)


@st.composite
def request(draw):
    path = draw(st.sampled_from([TEXT] * 4 + [CHAT] * 4 + ROUTES))
    posted = path in (TEXT, CHAT, "/tokenize", "/detokenize")
    usual = ["POST" if posted else "GET"] * 40
    method = draw(st.sampled_from([*usual, "GET", "POST", "HEAD", "PUT", "OPTIONS", "A"]))
    headers = draw(st.lists(header, max_size=2)) if draw(st.integers(0, 5)) == 0 else []
    return path, method, headers, draw(content(path)) if method != "GET" else b""


class Errors(logging.Handler):
    def __init__(self):
        super().__init__(logging.ERROR)
        self.seen = []

    def emit(self, record):
        self.seen.append(record)


@pytest.fixture
def errors():
    """Whatever is logged as an error."""
    logging.getLogger().addHandler(handler := Errors())
    yield handler.seen
    logging.getLogger().removeHandler(handler)


def check(request, answer):
    path, method, _, sent = request
    told = (path, method, sent[:300], answer.status_code, answer.text[:300])
    assert answer.status_code < 500 or answer.status_code == 503, told
    if method == "HEAD":
        assert answer.status_code >= 400 or answer.content == b"", told
    elif answer.status_code >= 400:
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}, told
        assert 0 < len(error["message"]) < 1000, told
    elif answer.headers.get("content-type", "").startswith("text/event-stream"):
        *events, done, end = answer.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", ""), told
        assert all("error" not in strict(event[6:]) for event in events), told
    elif answer.headers.get("content-type", "") == "application/json":
        strict(answer.text)


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_requests(tiny_path, errors):
    settings = {"max_model_len": 48, "max_num_seqs": 4, "max_batched_tokens": 64, "pages": 24}
    sizes, seen, start = [], Counter(), time.monotonic()
    with LLM(tiny_path, **settings) as llm, asyncio.Runner() as runner:
        service = Service(llm, MODEL, 256)
        app = make_app(service, None, "127.0.0.1", 100)
        http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=None
        )

        async def send(one):
            path, method, headers, sent = one
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
            return await http.request(method, path, headers=raw, content=sent)

        async def together(batch):
            async with asyncio.timeout(60):  # nothing hangs
                return await asyncio.gather(*map(send, batch))

        def batch(requests):
            errors.clear()
            for one, answer in zip(requests, runner.run(together(requests)), strict=True):
                check(one, answer)
                seen[answer.status_code] += 1
            end = time.monotonic() + 10
            while not llm.engine.idle and time.monotonic() < end:
                time.sleep(0.001)
            assert llm.engine.idle and llm.engine.pages.used() == 0
            assert service.admission.live == app.live == 0 and errors == []

        fuzzing.rounds(
            st.lists(request(), min_size=TOGETHER, max_size=TOGETHER),
            fuzzing.count(160) // TOGETHER,
            batch,
            lambda: sizes.append(fuzzing.resident()),
        )
    assert sizes[-1] - sizes[min(3, len(sizes) - 1)] < 48, sizes
    assert seen[200] > seen.total() // 10 and seen[400] > seen.total() // 10, seen
    rate = seen.total() / (time.monotonic() - start)
    print(f"{dict(seen)}, {rate:.0f} a second, MB {sizes[0]:.0f} to {sizes[-1]:.0f}")


def test_bytes_that_are_hardly_http(tiny_path, errors):
    """Over a socket, since it is uvicorn's and h11's to read them, and ours to answer."""
    source = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    seeds = [
        head % (TEXT.encode(), len(source)) + source,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3,
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'd\r\n{"prompt":"a\r\n2\r\n"}\r\n0\r\nX: y\r\n\r\n',
        b"GET / HTTP/1.0\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    ]
    pieces = st.sampled_from(
        [
            b"",
            b"\r\n",
            b"\r\n\r\n",
            b" ",
            b"\0",
            b"\xff",
            b"0",
            b"-1",
            b"99999999999999999999",
            b"HTTP/9.9",
            b"Content-Length: 5\r\n",
            b"Transfer-Encoding: gzip\r\n",
            b"a" * 40_000,
            b": ",
            b"%00",
            b"\r\n folded\r\n",
        ]
    )
    place = st.floats(0, 1, exclude_max=True)
    change = st.tuples(place, st.integers(0, 12), pieces)
    requests = st.tuples(st.sampled_from(seeds), st.lists(change, max_size=4))

    with served(tiny_path, max_model_len=48, max_num_seqs=4) as made:
        port = int(made.url.rsplit(":", 1)[1])

        def send(one):
            sent, changes = one
            errors.clear()
            for place, size, piece in changes:
                at = int(place * len(sent))
                sent = sent[:at] + piece + sent[at + size :]
            found = b""
            raw = socket.create_connection(("127.0.0.1", port), timeout=20)
            with raw, suppress(OSError):  # the server may have closed it already
                raw.sendall(sent)
                raw.shutdown(socket.SHUT_WR)
                while some := raw.recv(2**16):
                    found += some
            statuses = {line.split()[1] for line in found.split(b"\n") if line[:7] == b"HTTP/1."}
            assert not {s for s in statuses if s >= b"500" and s != b"503"}, (sent, found)
            assert errors == [], sent

        fuzzing.rounds(requests, max(40, fuzzing.count(160) // 20), send)
        assert made.settle() == 0 and httpx.get(f"{made.url}/health").status_code == 200
