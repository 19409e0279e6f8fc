"""Answers in OpenAI's shapes: a whole one, or a stream of chunks that add up to it.

`Chat` and `Text` say what one choice looks like; `whole` and `events` do what both have in common.
"""

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from billfish.engine.sampling import Chosen
from billfish.server.calls import Call, read
from billfish.server.desk import Job
from billfish.server.problem import Problem
from billfish.server.tools import Format
from billfish.server.words import Words

Json = dict[str, Any]
LEAST = -9999.0  # JSON has no -inf
encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


@dataclass
class Part:
    """What is new of one choice."""

    text: str
    chosen: Sequence[Chosen] | None  # None: log probabilities are not wanted
    offset: int  # characters of tokens before
    finish: str | None
    stop: str | int | None
    calls: list[Json]  # of tools, with their indices; later ones go on where the last one ended
    first: bool = False
    scored: bool = False  # begins with the prompt's first token, which has no probability


class Shape(Protocol):
    prefix: str
    whole: str
    chunk: str

    def choice(self, index: int, part: Part, words: Words, stream: bool) -> Json: ...


class Chat:
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, part: Part, words: Words, stream: bool) -> Json:
        message: Json = {"role": "assistant"} if part.first or not stream else {}
        if part.text or part.first or not stream:
            message["content"] = part.text or ("" if not part.calls else None)
        if part.calls:
            message["tool_calls"] = (
                part.calls
                if stream
                else [
                    {name: value for name, value in call.items() if name != "index"}
                    for call in part.calls
                ]
            )
        return {
            "index": index,
            "delta" if stream else "message": message,
            "logprobs": None
            if part.chosen is None
            else {
                "content": [self._token(one, words) for one in part.chosen],
                "refusal": None,
            },
            "finish_reason": part.finish,
            "stop_reason": part.stop,
        }

    def _token(self, one: Chosen, words: Words) -> Json:
        tops = [self._named(token, value, words) for token, value in one.top]
        return {**self._named(one.token, one.logprob, words), "top_logprobs": tops}

    def _named(self, token: int, value: float | None, words: Words) -> Json:
        text = words.text(token)
        # Some of a character's bytes alone are no text; which they are is not told.
        known = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(value), "bytes": known}


class Text:
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, part: Part, words: Words, stream: bool) -> Json:
        return {
            "index": index,
            "text": part.text,
            "logprobs": None if part.chosen is None else self._tokens(part, words),
            "finish_reason": part.finish,
            "stop_reason": part.stop,
        }

    def _tokens(self, part: Part, words: Words) -> Json:
        assert part.chosen is not None
        texts = [words.text(one.token) for one in part.chosen]
        offsets, offset = [], part.offset
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        values: list[float | None] = [_finite(one.logprob) for one in part.chosen]
        tops: list[Json | None] = [self._tops(one, words) for one in part.chosen]
        if part.scored:
            values[0] = tops[0] = None
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _tops(self, one: Chosen, words: Words) -> Json:
        """By text; of several tokens that read alike the best. The chosen one is always there."""
        found: Json = {}
        for token, value in (*one.top, (one.token, one.logprob)):
            found.setdefault(words.text(token), _finite(value))
        return found


@dataclass
class Answer:
    """One request's answer, once its job has begun."""

    job: Job
    shape: Shape
    words: Words
    head: Json  # id, created, model, system_fingerprint
    logprobs: bool
    echo: list[str] | None = None  # the prompts, in front of their texts
    tools: Format | None = None  # how calls are written in the text, if some may be

    def __post_init__(self) -> None:
        self._called: dict[int, list[int]] = {}  # characters of the arguments of each call
        self._shown: dict[int, tuple[int, int, int]] = {}  # characters, tokens, offset
        self._ended: set[int] = set()

    async def whole(self) -> Json:
        await self.job.done()
        choices = [self.shape.choice(index, part, self.words, False) for index, part in self._new()]
        return {
            **self.head,
            "object": self.shape.whole,
            "choices": choices,
            "usage": self.job.usage(),
        }

    async def events(self, usage: bool) -> AsyncIterator[bytes]:
        head = {**self.head, "object": self.shape.chunk}
        counts: Json = {"usage": None} if usage else {}
        try:
            async for _ in self.job.news():
                for index, part in self._new():
                    choice = self.shape.choice(index, part, self.words, True)
                    yield _event({**head, "choices": [choice], **counts})
            if usage:
                yield _event({**head, "choices": [], "usage": self.job.usage()})
        except Problem as problem:
            yield _event(problem.body())
        yield b"data: [DONE]\n\n"

    def _new(self) -> list[tuple[int, Part]]:
        """What was not shown before, and marks it as shown."""
        parts = []
        for index, place, output, one in self.job.completions():
            if index in self._ended:
                continue
            first = index not in self._shown
            characters, tokens, offset = self._shown.get(index, (0, 0, 0))
            finish: str | None = one.finish_reason
            whole, calls = one.text, list[Json]()
            if self.tools is not None:
                whole, found = read(self.tools, one.text, finish is not None)
                calls = self._new_calls(index, found, self.tools)
                finish = "tool_calls" if found and finish == "stop" else finish
            text, chosen = whole[characters:], list(one.logprobs[tokens:])
            scored = first and self.logprobs and output.prompt_logprobs is not None
            if first and self.echo is not None:
                text = self.echo[place] + text
            if scored:
                ids = output.prompt_token_ids
                chosen = [Chosen(ids[0]), *(output.prompt_logprobs or []), *chosen]
            if not (text or chosen or finish or first or calls):
                continue
            parts.append(
                (
                    index,
                    Part(
                        text,
                        chosen if self.logprobs else None,
                        offset,
                        finish,
                        one.stop_reason,
                        calls,
                        first,
                        scored,
                    ),
                )
            )
            offset += sum(len(self.words.text(each.token)) for each in chosen)
            self._shown[index] = (len(whole), len(one.logprobs), offset)
            if finish:
                self._ended.add(index)
        return parts

    def _new_calls(self, index: int, calls: list[Call], form: Format) -> list[Json]:
        """Of a call that was not shown its name, of every one what its arguments have more."""
        shown, told = self._called.setdefault(index, []), []
        for place, call in enumerate(calls):
            if place == len(shown):
                shown.append(0)
                # Mistral's template asks for 9 letters and digits.
                name = uuid.uuid4().hex
                name = name[:9] if form.name == "mistral" else f"call_{name}"
                function = {"name": call.name, "arguments": call.arguments}
                told.append({"index": place, "id": name, "type": "function", "function": function})
            elif more := call.arguments[shown[place] :]:
                told.append({"index": place, "function": {"arguments": more}})
            shown[place] = len(call.arguments)
        return told


def _event(told: Json) -> bytes:
    return b"data: " + encode(told).encode() + b"\n\n"


def _finite(value: float | None) -> float:
    return LEAST if value is None else max(LEAST, value)  # NaN, too, becomes LEAST
