"""`bench serve`: load on any HTTP server with OpenAI's completions endpoint.

Requests arrive as a Poisson process of a given rate. Times are defined as in `vllm bench serve`,
for each request from the moment it is sent:

    TTFT  to the first chunk        TPOT  (E2E - TTFT) / (output tokens - 1)
    E2E   to the last chunk         ITL   between one chunk and the next

Failed requests are counted with their errors and left out of the times.
"""

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from billfish.errors import UserError

if TYPE_CHECKING:
    import httpx

RESULT_VERSION = 1
Result = dict[str, Any]
Say = Callable[[str], None]
PERCENTILES = (50, 90, 99)
# Prompts are its tokens in random order, so that no two share a prefix worth caching.
SAMPLE = (
    "The quick brown fox jumps over the lazy dog while 42 sailors watch billfish at the speed of "
    "memory; few bits are enough, they say, if each of them is read once and in the right order."
)


@dataclass(frozen=True)
class Load:
    url: str
    rates: tuple[float, ...]  # requests a second; inf: all at once
    requests: int = 100  # at each rate
    input: tuple[int, int] = (64, 64)  # fewest and most tokens
    output: tuple[int, int] = (64, 64)
    model: str | None = None  # None: the server's first
    key: str | None = None
    seed: int = 0
    seconds: float = 600.0  # timeout of one request

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"{self.url}: give a server's address, such as http://127.0.0.1:8000.")
        if not self.rates or not all(rate > 0 for rate in self.rates):
            raise UserError("--rate: numbers above 0, such as 1,2,4; inf sends all at once.")
        if self.requests < 1:
            raise UserError(f"--requests {self.requests}: at least 1.")


@dataclass
class Seen:
    """What was observed of one request; times in seconds since it was sent."""

    first: float | None = None
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    asked: int = 0  # prompt tokens, as the server counts them
    written: int = 0
    error: str | None = None


def parse_rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(word) for word in text.split(",") if word.strip()))
    except ValueError:
        raise UserError(f"--rate {text}: numbers, such as 1,2,4 or inf.") from None


def parse_range(option: str, text: str) -> tuple[int, int]:
    """`64`, or the range `16-128`."""
    low, dash, high = text.partition("-")
    if low.isdecimal() and (high.isdecimal() or not dash):
        found = int(low), int(high or low)
        if 1 <= found[0] <= found[1]:
            return found
    raise UserError(f"{option} {text}: a number of tokens, or a range such as 16-128.")


def measure_server(load: Load, say: Say, keep: Callable[[Result], None]) -> Result:
    try:
        import httpx
    except ImportError:
        raise UserError("bench serve needs httpx: pip install 'billfish[serve]'") from None

    try:
        return asyncio.run(_measure(load, say, keep))
    except httpx.HTTPError as error:
        raise UserError(
            f"{load.url}: {error or type(error).__name__}. Is a server there? billfish serve DIR "
            "starts one."
        ) from None


async def _measure(load: Load, say: Say, keep: Callable[[Result], None]) -> Result:
    import httpx

    headers = {} if load.key is None else {"Authorization": f"Bearer {load.key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    base = load.url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(
        base_url=base, headers=headers, timeout=load.seconds, limits=limits
    ) as http:
        model = load.model or (await _json(http, "GET", "/v1/models"))["data"][0]["id"]
        told = await _json(
            http,
            "POST",
            "/tokenize",
            {
                "model": model,
                "prompt": SAMPLE,
                "add_special_tokens": False,
            },
        )
        words = sorted(set(told["tokens"]))
        settings = {name: value for name, value in asdict(load).items() if name != "key"}
        settings |= {"model": model, "rates": list(map(_rate, load.rates))}
        result: Result = {
            "result_version": RESULT_VERSION,
            "bench": "serve",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": settings,
            "points": [],
            "complete": False,
        }
        say("warming up")
        draw = random.Random(load.seed - 1)
        warm = await _one(http, model, draw.choices(words, k=load.input[0]), load.output[0])
        if warm.error:
            raise UserError(f"{load.url}: {warm.error}")
        for place, rate in enumerate(load.rates):
            say(f"{load.requests} requests at {_rate(rate)} a second")
            draw = random.Random(load.seed + place)
            started = time.perf_counter()
            seen = await _all(http, model, words, load, rate, draw)
            point = summarize_load(seen, time.perf_counter() - started)
            result["points"].append({"rate": _rate(rate), **point})
            keep(result)
    result["complete"] = True
    keep(result)
    return result


async def _all(
    http: "httpx.AsyncClient",
    model: str,
    words: list[int],
    load: Load,
    rate: float,
    draw: random.Random,
) -> list[Seen]:
    tasks = []
    due = time.perf_counter()
    for _ in range(load.requests):
        prompt = draw.choices(words, k=draw.randint(*load.input))
        count = draw.randint(*load.output)
        # At absolute times: the time that sending takes does not lower the rate.
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(_one(http, model, prompt, count)))
        due += 0.0 if math.isinf(rate) else draw.expovariate(rate)
    return list(await asyncio.gather(*tasks))


async def _one(http: "httpx.AsyncClient", model: str, prompt: list[int], count: int) -> Seen:
    import httpx

    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    seen, start = Seen(), time.perf_counter()
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                seen.error = _reason(answer.status_code, await answer.aread())
                return seen
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _note(seen, json.loads(line[6:]), time.perf_counter() - start)
    except (httpx.HTTPError, ValueError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    if seen.error is None and (seen.first is None or not seen.written):
        seen.error = "the stream had no text, or no usage at its end"
    return seen


def _note(seen: Seen, event: Any, now: float) -> None:
    if "error" in event:
        seen.error = str(event["error"].get("message"))
    if usage := event.get("usage"):
        seen.asked, seen.written = usage["prompt_tokens"], usage["completion_tokens"]
    if event.get("choices"):
        if seen.first is None:
            seen.first = now
        else:
            seen.gaps.append(now - seen.last)
        seen.last = now


def summarize_load(seen: list[Seen], duration: float) -> Result:
    good = [one for one in seen if one.error is None and one.first is not None]
    errors = Counter(one.error for one in seen if one.error is not None)
    written = sum(one.written for one in good)
    several = [one for one in good if one.written > 1]
    return {
        "completed": len(good),
        "failed": len(seen) - len(good),
        "errors": dict(errors.most_common(5)),
        "duration_s": duration,
        "requests_per_s": len(good) / duration,
        "output_tokens_per_s": written / duration,
        "total_tokens_per_s": (written + sum(one.asked for one in good)) / duration,
        "ttft_ms": _times([one.first for one in good if one.first is not None]),
        "tpot_ms": _times([(one.last - (one.first or 0)) / (one.written - 1) for one in several]),
        "itl_ms": _times([gap for one in good for gap in one.gaps]),
        "e2e_ms": _times([one.last for one in good]),
    }


def _times(seconds: list[float]) -> Result | None:
    """In ms; percentiles are interpolated linearly, as NumPy's are."""
    if not seconds:
        return None
    ranked = sorted(1e3 * each for each in seconds)
    told: Result = {"mean": sum(ranked) / len(ranked)}
    for percent in PERCENTILES:
        place = (len(ranked) - 1) * percent / 100
        low = math.floor(place)
        high = min(low + 1, len(ranked) - 1)
        told[f"p{percent}"] = ranked[low] + (ranked[high] - ranked[low]) * (place - low)
    return told


async def _json(http: "httpx.AsyncClient", method: str, path: str, body: Any = None) -> Any:
    answer = await http.request(method, path, json=body)
    if answer.status_code != 200:
        told = _reason(answer.status_code, answer.content)
        raise UserError(f"{answer.url}: {told}")
    return answer.json()


def _reason(status: int, body: bytes) -> str:
    try:
        return f"{status}: {json.loads(body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"status {status}"


def _rate(rate: float) -> float | str:
    return "inf" if math.isinf(rate) else rate  # JSON has no infinity
