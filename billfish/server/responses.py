"""Responses in OpenAI's shapes: one JSON object, or a stream of chunks that add up to it.

`ChatChoice` and `TextChoice` format one choice; `Reply` has what both endpoints share.
"""

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from billfish.engine.sampling import Chosen
from billfish.server.admission import Generation
from billfish.server.errors import ApiError
from billfish.server.tokenization import Tokenization
from billfish.server.tool_parser import ToolCall, parse_calls
from billfish.server.tools import ToolFormat

Json = dict[str, Any]
LOWEST = -9999.0  # stands for -inf, which JSON lacks; vLLM uses the same
encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


@dataclass
class Delta:
    """What one choice has gained since the last chunk."""

    text: str
    chosen: Sequence[Chosen] | None  # None: log probabilities are not wanted
    offset: int  # characters before it
    finish: str | None
    stop: str | int | None
    calls: list[Json]  # tool calls with their indices; one already begun has new arguments only
    first: bool = False
    scored: bool = False  # begins with the prompt's first token, which has no log probability


class ChoiceFormat(Protocol):
    prefix: str
    object: str
    chunk: str

    def choice(self, index: int, delta: Delta, tokenizer: Tokenization, stream: bool) -> Json: ...


class ChatChoice:
    prefix, object, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, delta: Delta, tokenizer: Tokenization, stream: bool) -> Json:
        message: Json = {"role": "assistant"} if delta.first or not stream else {}
        if delta.text or delta.first or not stream:
            message["content"] = delta.text or ("" if not delta.calls else None)
        if delta.calls:
            message["tool_calls"] = (
                delta.calls
                if stream
                else [
                    {name: value for name, value in call.items() if name != "index"}
                    for call in delta.calls
                ]
            )
        return {
            "index": index,
            "delta" if stream else "message": message,
            "logprobs": None
            if delta.chosen is None
            else {
                "content": [self._token(one, tokenizer) for one in delta.chosen],
                "refusal": None,
            },
            "finish_reason": delta.finish,
            "stop_reason": delta.stop,
        }

    def _token(self, one: Chosen, tokenizer: Tokenization) -> Json:
        tops = [self._named(token, value, tokenizer) for token, value in one.top]
        return {**self._named(one.token, one.logprob, tokenizer), "top_logprobs": tops}

    def _named(self, token: int, value: float | None, tokenizer: Tokenization) -> Json:
        text = tokenizer.text(token)
        # A token that is part of a character's bytes: the decoder hides which bytes they are.
        known = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(value), "bytes": known}


class TextChoice:
    prefix, object, chunk = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, delta: Delta, tokenizer: Tokenization, stream: bool) -> Json:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": None if delta.chosen is None else self._tokens(delta, tokenizer),
            "finish_reason": delta.finish,
            "stop_reason": delta.stop,
        }

    def _tokens(self, delta: Delta, tokenizer: Tokenization) -> Json:
        assert delta.chosen is not None
        texts = [tokenizer.text(one.token) for one in delta.chosen]
        offsets, offset = [], delta.offset
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        values: list[float | None] = [_finite(one.logprob) for one in delta.chosen]
        tops: list[Json | None] = [self._tops(one, tokenizer) for one in delta.chosen]
        if delta.scored:
            values[0] = tops[0] = None
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _tops(self, one: Chosen, tokenizer: Tokenization) -> Json:
        """Text -> log probability; of tokens with equal text the best; with the chosen one."""
        found: Json = {}
        for token, value in (*one.top, (one.token, one.logprob)):
            found.setdefault(tokenizer.text(token), _finite(value))
        return found


@dataclass
class Reply:
    """The response to one request, while its texts are generated."""

    generation: Generation
    format: ChoiceFormat
    tokenizer: Tokenization
    head: Json  # id, created, model, system_fingerprint
    logprobs: bool
    echo: list[str] | None = None  # the prompts, to be sent in front of their texts
    tools: ToolFormat | None = None  # how the text writes calls, where the request allows them

    def __post_init__(self) -> None:
        self._called: dict[int, list[int]] = {}  # characters sent of the arguments of each call
        self._sent: dict[int, tuple[int, int, int]] = {}  # characters, tokens, offset
        self._ended: set[int] = set()

    async def complete(self) -> Json:
        await self.generation.done()
        choices = [
            self.format.choice(index, delta, self.tokenizer, False)
            for index, delta in self._deltas()
        ]
        return {
            **self.head,
            "object": self.format.object,
            "choices": choices,
            "usage": self.generation.usage(),
        }

    async def events(self, usage: bool) -> AsyncIterator[bytes]:
        head = {**self.head, "object": self.format.chunk}
        counts: Json = {"usage": None} if usage else {}
        try:
            async for _ in self.generation.updates():
                for index, delta in self._deltas():
                    choice = self.format.choice(index, delta, self.tokenizer, True)
                    yield _event({**head, "choices": [choice], **counts})
            if usage:
                yield _event({**head, "choices": [], "usage": self.generation.usage()})
        except ApiError as error:
            yield _event(error.body())
        yield b"data: [DONE]\n\n"

    def _deltas(self) -> list[tuple[int, Delta]]:
        """What was not sent yet of each choice; from now on it counts as sent."""
        parts = []
        for index, place, output, one in self.generation.completions():
            if index in self._ended:
                continue
            first = index not in self._sent
            characters, tokens, offset = self._sent.get(index, (0, 0, 0))
            finish: str | None = one.finish_reason
            whole, calls = one.text, list[Json]()
            if self.tools is not None:
                whole, found = parse_calls(self.tools, one.text, finish is not None)
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
                    Delta(
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
            offset += sum(len(self.tokenizer.text(each.token)) for each in chosen)
            self._sent[index] = (len(whole), len(one.logprobs), offset)
            if finish:
                self._ended.add(index)
        return parts

    def _new_calls(self, index: int, calls: list[ToolCall], form: ToolFormat) -> list[Json]:
        """Name and id of calls that are new, and what the arguments of each have gained."""
        sent, told = self._called.setdefault(index, []), []
        for place, call in enumerate(calls):
            if place == len(sent):
                sent.append(0)
                # Mistral's template accepts ids of 9 letters and digits only.
                name = uuid.uuid4().hex
                name = name[:9] if form.name == "mistral" else f"call_{name}"
                function = {"name": call.name, "arguments": call.arguments}
                told.append({"index": place, "id": name, "type": "function", "function": function})
            elif more := call.arguments[sent[place] :]:
                told.append({"index": place, "function": {"arguments": more}})
            sent[place] = len(call.arguments)
        return told


def _event(told: Json) -> bytes:
    return b"data: " + encode(told).encode() + b"\n\n"


def _finite(value: float | None) -> float:
    return LOWEST if value is None else max(LOWEST, value)  # NaN becomes LOWEST, too
