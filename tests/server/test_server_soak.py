"""300 requests at once over HTTP, on few pages and a short queue: a fifth leaves early, a tenth is
malformed. What is valid ends with the text it would have alone, what is not gets its 4xx, the
server is healthy throughout, and neither pages nor memory stay behind.
"""

import asyncio
import gc
import json
import os
import random
from collections import Counter
from pathlib import Path

import httpx
from served import MODEL, served
from thorough import thorough

from billfish.engine.llm import LLM
from billfish.engine.params import SamplingParams

COUNT, CLIENTS = 300, 48
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BAD = [
    {"content": b"{"},
    {"content": b"[" * 50_000},
    {"content": b"\xff\xfe"},
    {"json": {"prompt": 5}},
    {"json": {"prompt": ""}},
    {"json": {"prompt": "a" * 129}},
    {"json": {"prompt": "a" * 10**6}},
    {"json": {"prompt": [1, -7]}},
    {"json": {"prompt": [10**30]}},
    {"json": {"prompt": "a", "max_tokens": -5}},
    {"json": {"prompt": "a", "max_tokens": 10**30}},
    {"json": {"prompt": "a", "n": 10**9}},
    {"json": {"prompt": "a", "temperature": "hot"}},
    {"json": {"prompt": "a", "stream": 1}},
    {"json": {"prompt": "a", "logit_bias": {"x": 1}}},
    {"json": {"messages": [{"role": "user", "content": None}]}},
    {"json": {"prompt": "a"}, "headers": {"X-Long": "x" * 2**20}},
]


def resident():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@thorough
def test_http_soak(tiny_path):
    source = random.Random(0)
    jobs = [
        ("".join(source.choices("abcdefgh ", k=source.randint(1, 40))), source.randint(1, 24))
        for _ in range(COUNT)
    ]
    with LLM(tiny_path, max_num_seqs=32) as llm:
        outputs = llm.generate([prompt for prompt, _ in jobs], [greedy(count) for _, count in jobs])
        wanted = [output.outputs[0].text for output in outputs]
    seen: Counter[str] = Counter()

    async def one(http, place):
        prompt, count = jobs[place]
        if place % 10 == 7:
            return await malformed(http, place // 10)
        body = {"model": MODEL, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        chat, stream = place % 3 == 0, place % 2 == 0
        body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        if place % 5 == 4:
            return await leave(http, CHAT if chat else TEXT, body, stream)
        while True:
            text = await (streamed if stream else plain)(http, CHAT if chat else TEXT, body)
            if text is not None:
                seen["right"] += text == wanted[place]
                return None
            seen["503"] += 1
            await asyncio.sleep(0.5 * source.random())  # Retry-After says a second; this is a test

    async def plain(http, path, body):
        answer = await http.post(path, json=body)
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "queue_full" and answer.headers["retry-after"]
            return None
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    async def streamed(http, path, body):
        async with http.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code == 503:
                await answer.aread()
                return None
            assert answer.status_code == 200, await answer.aread()
            events = [line[6:] async for line in answer.aiter_lines() if line]
        assert events[-1] == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)

    async def leave(http, path, body, stream):
        seen["left"] += 1
        try:
            async with asyncio.timeout(0.2 * source.random()):
                async with http.stream("POST", path, json={**body, "stream": stream}) as answer:
                    async for _ in answer.aiter_lines():
                        return
        except TimeoutError:
            pass

    async def malformed(http, kind):
        options = BAD[kind % len(BAD)]
        path = CHAT if "messages" in options.get("json", ()) else TEXT
        while True:
            try:
                answer = await http.post(path, **options)
            except httpx.TransportError:
                assert "headers" in options  # closed before it was read to its end
                break
            if answer.status_code != 503:
                told = 431 if "headers" in options else 400
                assert answer.status_code == told, (options, answer.text)
                assert answer.json()["error"]["message"]
                break
            seen["refused 503"] += 1  # full: it was not looked at
            await asyncio.sleep(0.5 * source.random())
        seen["refused"] += 1

    async def healthy(http):
        while True:
            assert (await http.get("/health")).status_code == 200
            seen["health"] += 1
            await asyncio.sleep(0.05)

    async def run(url, places):
        gate = asyncio.Semaphore(CLIENTS)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=CLIENTS)

        async def gated(place):
            async with gate:
                await one(http, place)

        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
            watch = asyncio.create_task(healthy(http))
            await asyncio.gather(*map(gated, places))
            assert not watch.done() or watch.result() is None
            watch.cancel()

    options = {"pages": 12, "max_num_seqs": 6, "max_batched_tokens": 24}
    with served(tiny_path, max_queue=24, **options) as made:
        asyncio.run(run(made.url, range(100)))
        before = resident()
        asyncio.run(run(made.url, range(100, COUNT)))
        assert made.settle() == 0
        assert resident() - before < 32
        assert made.admission.live == 0 and not made.admission.draining
    assert seen["right"] == COUNT * 7 // 10, seen  # all that were neither cut off nor malformed
    assert seen["left"] == COUNT * 2 // 10 and seen["503"] > 0 and seen["health"] > 10, seen
    assert seen["refused"] == COUNT // 10, seen
    print(dict(seen), f"{resident() - before:.1f} MB")
