"""SamplingParams: what a request asks for, checked when it is made."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from billfish.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks for. Names and meanings are vLLM's and OpenAI's."""

    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0  # end and stop tokens are impossible until then
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off; vLLM's -1 becomes 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    seed: int | None = None
    stop: tuple[str, ...] = ()  # a str or a list becomes a tuple
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many of the best tokens to tell beside the chosen one
    prompt_logprobs: int | None = None  # the same for the prompt's tokens; max_tokens may be 0 then
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token -> added to its logit

    def __post_init__(self) -> None:
        _whole("n", self.n, 1, 128)
        _whole("max_tokens", self.max_tokens, 0 if self.prompt_logprobs is not None else 1)
        _whole("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens {self.min_tokens}: at most max_tokens {self.max_tokens}.")
        _number("temperature", self.temperature, 0)
        _number("top_p", self.top_p, 0, 1, above=True)
        _whole("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0, above=True)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, 20)
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f"ignore_eos {self.ignore_eos!r}: true or false.")
        stops = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        if len(stops) > 16:
            raise UserError(f"stop with {len(stops)} strings: at most 16. Leave some out.")
        for text in stops:
            if not isinstance(text, str) or not text:
                raise UserError(f"stop {text!r}: a string of at least one character.")
        ids = _items("stop_token_ids", self.stop_token_ids)
        for token in ids:
            _whole("stop_token_ids", token, 0)
        if not isinstance(self.logit_bias, Mapping):
            raise UserError(f"logit_bias {self.logit_bias!r}: a mapping of token ids to numbers.")
        for token, bias in self.logit_bias.items():
            _whole("logit_bias: token", token, 0)
            _number(f"logit_bias: token {token}:", bias, -100, 100)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller keeps its own


def _items(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise UserError(f"{name} {value!r}: a list.")
    return tuple(value)


def _whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{name} {value!r}: a whole number.")
    if value < low or (high is not None and value > high):
        rule = f"at least {low}" if high is None else f"{low} to {high}"
        raise UserError(f"{name} {value}: a whole number, {rule}.")


def _number(name: str, value: Any, low: float, high: float = math.inf, above: bool = False) -> None:
    """`above`: low itself is refused."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{name} {value!r}: a number.")
    fits = low <= value <= high and not (above and value == low)  # false for NaN
    if not fits or math.isinf(value):
        rule = f"{'above' if above else 'at least'} {low}"
        raise UserError(f"{name} {value}: {rule}{'' if math.isinf(high) else f', at most {high}'}.")
