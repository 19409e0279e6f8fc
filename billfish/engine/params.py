"""SamplingParams: what a request asks for, checked when it is made.

Every number has a range, so that nothing a caller asks for overflows fp32 or int32 in a sampler,
on a CPU or in draw.cuh. The ranges are OpenAI's where OpenAI has one; temperature may be up to 100,
since vLLM's clients use 5 and more together with min_p.
"""

import reprlib
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields
from typing import Any

from billfish.engine.structured import Matcher, StructuredOutputsParams
from billfish.errors import UserError

LARGEST = 2**31 - 1  # integer without a bound of its own
STOPS, STOP_LENGTH, STOP_TOKENS = 16, 1024, 1024  # looked for after every token


@dataclass(frozen=True)
class SamplingParams:
    """Names and meanings are vLLM's and OpenAI's."""

    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0  # no end or stop token before
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
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True  # in the text
    ignore_eos: bool = False
    logprobs: int | None = (
        None  # how many of the most likely tokens to return beside the chosen one
    )
    prompt_logprobs: int | None = None  # the same for the prompt's tokens; max_tokens may be 0 then
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token -> added to its logit
    # What the text must match; a mapping becomes StructuredOutputsParams, which LLM compiles.
    structured_outputs: StructuredOutputsParams | Matcher | None = None

    def __post_init__(self) -> None:
        _whole("n", self.n, 1, 128)
        _whole("max_tokens", self.max_tokens, 0 if self.prompt_logprobs is not None else 1)
        _whole("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            told = f"min_tokens {self.min_tokens}: at most max_tokens {self.max_tokens}."
            raise UserError(told, "min_tokens")
        _number("temperature", self.temperature, 0, 100)
        _number("top_p", self.top_p, 0, 1, above=True)
        _whole("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0, 1)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, 20)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} {_told(getattr(self, name))}: true or false.", name)
        object.__setattr__(self, "structured_outputs", _structured(self.structured_outputs))
        stops = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        if len(stops) > STOPS:
            told = f"stop with {len(stops)} strings: at most {STOPS}. Leave some out."
            raise UserError(told, "stop")
        for text in stops:
            if not isinstance(text, str) or not 1 <= len(text) <= STOP_LENGTH:
                told = f"stop {_told(text)}: strings of 1 to {STOP_LENGTH} characters."
                raise UserError(told, "stop")
        ids = _items("stop_token_ids", self.stop_token_ids)
        if len(ids) > STOP_TOKENS:
            told = f"stop_token_ids with {len(ids)} tokens: at most {STOP_TOKENS}."
            raise UserError(told, "stop_token_ids")
        for token in ids:
            _whole("stop_token_ids", token, 0)
        if not isinstance(self.logit_bias, Mapping):
            told = f"logit_bias {_told(self.logit_bias)}: a mapping of token ids to numbers."
            raise UserError(told, "logit_bias")
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0, what="logit_bias: token")
            _number("logit_bias", bias, -100, 100, what=f"logit_bias: token {token}:")
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller keeps its own

    def check_for(self, vocabulary: int, eos: Set[int]) -> None:
        """Checks that need the model: its tokens are 0 to vocabulary - 1, `eos` end a sequence."""
        for name, what, ids in (
            ("stop_token_ids", "stop_token_ids", self.stop_token_ids),
            ("logit_bias", "logit_bias: token", tuple(self.logit_bias)),
        ):
            if wrong := [token for token in ids if token >= vocabulary]:
                told = f"{what} {wrong[0]}: this model's tokens are 0 to {vocabulary - 1}."
                raise UserError(told, name)
        ends = {token for token in (*eos, *self.stop_token_ids) if token < vocabulary}
        if self.min_tokens and len(ends) == vocabulary:
            raise UserError(
                f"min_tokens {self.min_tokens}: every token of this model is among stop_token_ids "
                "or its ends, so none could be written. Leave one of them out.",
                "min_tokens",
            )


def _structured(value: Any) -> StructuredOutputsParams | Matcher | None:
    if isinstance(value, Mapping):
        given = {str(name): one for name, one in value.items() if one is not None}
        known = {one.name for one in fields(StructuredOutputsParams)}
        if unknown := sorted(given.keys() - known):
            raise UserError(f"structured_outputs: {unknown[0]} is not supported. Leave it out.")
        return StructuredOutputsParams(**given)
    if value is None or isinstance(value, StructuredOutputsParams | Matcher):
        return value
    raise UserError(f"structured_outputs {value!r}: StructuredOutputsParams, or a mapping.")


def _items(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise UserError(f"{name} {_told(value)}: a list.", name)
    return tuple(value)


def _whole(name: str, value: Any, low: int, high: int = LARGEST, what: str = "") -> None:
    """`what`: how the error calls the value, if not by the parameter's name."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        told = f"{what or name} {_told(value)}: a whole number, {low} to {high}."
        raise UserError(told, name)


def _number(
    name: str, value: Any, low: float, high: float, above: bool = False, what: str = ""
) -> None:
    """`above`: low itself is refused."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not low <= value <= high or (above and value == low):  # NaN is in no range
        rule = f"above {low}, at most {high}" if above else f"{low} to {high}"
        raise UserError(f"{what or name} {_told(value)}: a number, {rule}.", name)


def _told(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return "that large"
