"""Tokenizing for the server: encoding off the event loop, and the text of a single token."""

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from billfish.engine.llm import LLM
from billfish.errors import UserError
from billfish.server.errors import ApiError, shutting_down
from billfish.server.protocol import Prompt


class Tokenization:
    def __init__(self, llm: LLM) -> None:
        self.llm, self.tokenizer = llm, llm.tokenizer
        pages = llm.engine.pages
        self.max_tokens = min(llm.max_model_len, pages.count * pages.tokens)  # prompt and text
        # Before the engine runs: the first call switches off a truncation that tokenizer.json asks
        # for, which must not happen while the engine's thread decodes.
        self._context: list[int] = self.tokenizer("a", add_special_tokens=False).input_ids[-1:]
        self._context_text = self._decode(self._context)
        self._longest = max(map(len, self.tokenizer.get_vocab()), default=1)
        self._rendering = asyncio.Lock()
        self.text: Callable[[int], str] = lru_cache(2**16)(self._text)

    async def prompt(self, given: Prompt, special: bool = True) -> list[int]:
        if isinstance(given, str):
            self._check_characters(len(given))
            ids: list[int] = await asyncio.to_thread(
                lambda: self.tokenizer(given, add_special_tokens=special).input_ids
            )
            if not ids:
                raise ApiError(400, "the prompt has no token; give at least one.", "prompt")
            return ids
        top = self.llm.vocabulary - 1
        if beyond := next((token for token in given if not 0 <= token <= top), None):
            raise ApiError(400, f"token id {beyond} in prompt: ids are 0 to {top}.", "prompt")
        return given

    async def chat(self, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
        self._check_characters(sum(len(message["content"]) for message in messages))
        if not self.tokenizer.chat_template:
            raise ApiError(
                400,
                "this model has no chat template; use /v1/completions with a prompt.",
                "messages",
            )
        try:
            async with self._rendering:  # one at a time: slow templates must not take all threads
                text = await asyncio.to_thread(
                    self.llm.templates.render, self.tokenizer, messages, tools
                )
        except UserError as error:  # also what a template itself raises: roles that must alternate
            if self.llm.templates.closed:
                raise shutting_down() from None
            raise ApiError(400, str(error), "messages") from None
        self._check_characters(len(text))
        ids: list[int] = await asyncio.to_thread(
            lambda: self.tokenizer(text, add_special_tokens=False).input_ids
        )
        if not ids:
            raise ApiError(400, "these messages have no token; write something.", "messages")
        return ids

    def decode(self, ids: list[int]) -> str:
        return self._decode([token for token in ids if token < len(self.tokenizer)])

    def check_length(self, ids: list[int], asked: int | None) -> None:
        """`asked`: tokens to generate; None: as many as fit."""
        if len(ids) + (1 if asked is None else asked) <= self.max_tokens:
            return
        wanted = "" if asked is None else f" and {asked} to be written"
        self._refuse(f"{len(ids)} in the prompt{wanted}")

    def _check_characters(self, count: int) -> None:
        """Refuses a text that cannot fit before megabytes of it are encoded."""
        if (least := count // self._longest) >= self.max_tokens:
            self._refuse(f"at least {least} in the prompt")

    def _refuse(self, told: str) -> None:
        raise ApiError(
            400,
            f"this model's maximum context length is {self.max_tokens} tokens, and the request has "
            f"{told}. Shorten the prompt, or lower max_tokens.",
            "prompt",
            "context_length_exceeded",
        )

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _text(self, token: int) -> str:
        """Decoded after another token: decoders drop the space before a first word."""
        if token >= len(self.tokenizer):
            return ""
        text = self._decode([*self._context, token])
        return (
            text[len(self._context_text) :]
            if text.startswith(self._context_text)
            else self._decode([token])
        )

    def info(self) -> dict[str, Any]:
        names = ("eos_token", "bos_token", "pad_token", "chat_template")
        return {
            "tokenizer_class": type(self.tokenizer).__name__,
            **{name: getattr(self.tokenizer, name, None) for name in names},
        }
