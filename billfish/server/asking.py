"""What may be asked: a JSON body -> prompts or messages, and SamplingParams.

SamplingParams checks its own values. Whatever would change the answer and is not done here is
refused by name; what changes nothing (a user's name) is passed over; fields nobody knows are
passed over, too, and named once in the log.
"""

import logging
from collections.abc import Mapping
from typing import Any

from billfish.engine.llm import LLM
from billfish.engine.params import LARGEST, SamplingParams
from billfish.errors import UserError
from billfish.server.problem import Problem, short, wrong

log = logging.getLogger("billfish.server")
Body = dict[str, Any]
Prompt = str | list[int]

SAMPLING = (
    "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos",
)  # fmt: skip
# Not done, with the values that ask for nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "response_format": ({"type": "text"},),
    "structured_outputs": (), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "best_of": (1,), "suffix": ("",), "modalities": (["text"],), "audio": (),
    "prediction": (), "web_search_options": (), "reasoning_effort": (), "use_beam_search": (False,),
    "length_penalty": (1, 1.0), "prompt_logprobs": (), "chat_template": (), "documents": ([],),
    "chat_template_kwargs": ({},), "add_generation_prompt": (True,), "priority": (0,),
    "continue_final_message": (False,), "skip_special_tokens": (True,), "bad_words": ([],),
    "spaces_between_special_tokens": (True,), "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (), "allowed_token_ids": (), "logits_processors": (),
    "return_tokens_as_token_ids": (False,), "return_token_ids": (False,), "prompt_embeds": (),
}  # fmt: skip
READ = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream",
    "stream_options", "echo", "logprobs", "top_logprobs", "logit_bias", "add_special_tokens",
    *SAMPLING,
}  # fmt: skip
NO_MATTER = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "request_id", "parallel_tool_calls", "verbosity", "cache_salt",
}  # fmt: skip
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_told: set[str] = set()


def check_fields(body: Body) -> None:
    for name, value in body.items():
        if name in READ or name in NO_MATTER or value is None:
            continue
        if name in REFUSED:
            if value not in REFUSED[name]:
                raise Problem(
                    400, f"{name} {short(value)}: not supported by this server. Leave it out.",
                    name, "unsupported_parameter",
                )  # fmt: skip
        elif name not in _told and len(_told) < 100:
            _told.add(name)
            log.warning(
                "a request has %s, which is not known here and changes nothing", short(name)
            )


def flag(body: Body, name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def whole(body: Body, name: str, low: int, high: int = LARGEST) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not _is_id(value) or not low <= value <= high:
        raise wrong(name, value, f"a whole number, {low} to {high}")
    return int(value)


def wants_usage(body: Body) -> bool:
    """Whether a stream ends with a chunk of counts."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise wrong("stream_options", options, "an object")
    if not body.get("stream"):
        raise wrong("stream_options", options, "only together with stream")
    if flag(options, "continuous_usage_stats"):
        raise wrong("stream_options", options, "continuous_usage_stats is not supported")
    return flag(options, "include_usage")


def count(body: Body) -> int:
    """n: texts for each prompt."""
    return whole(body, "n", 1, 128) or 1


def prompts(body: Body) -> list[Prompt]:
    """A text, texts, token ids, or lists of them."""
    given = body.get("prompt")
    many: list[Any] = (
        given if isinstance(given, list) and given and not _is_id(given[0]) else [given]
    )
    for one in many:
        if isinstance(one, str):
            check_text("prompt", one)
        elif not isinstance(one, list) or not all(map(_is_id, one)):
            raise wrong(
                "prompt", given, "a text, a list of texts, token ids, or a list of lists of them"
            )
        if not one:
            raise wrong("prompt", given, "an empty one cannot be continued; give a token at least")
    return many


def messages(body: Body) -> list[dict[str, str]]:
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise wrong("messages", given, "a list of at least one message")
    return [_message(one, f"messages[{place}]") for place, one in enumerate(given)]


def _message(given: Any, where: str) -> dict[str, str]:
    if not isinstance(given, dict):
        raise wrong(where, given, "an object with role and content")
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    if given.get("tool_calls") or given.get("function_call"):
        raise wrong(where, given, "tool calls are not supported")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise wrong(f"{where}.content", part, "parts of type text only")
            check_text(f"{where}.content", part.get("text"))
        content = "".join(part["text"] for part in content)
    return {"role": ROLES[role], "content": check_text(f"{where}.content", content)}


def check_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(name, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(name, value, "half a surrogate pair is no character") from None
    return value


def max_tokens(body: Body, default: int | None) -> int | None:
    """0 is for `echo` alone, where the prompt's own log probabilities are wanted."""
    least = 0 if body.get("echo") else 1
    newer = whole(body, "max_completion_tokens", least)
    older = whole(body, "max_tokens", least)
    found = newer if newer is not None else older
    return default if found is None else found


def logprobs(body: Body, chat: bool) -> int | None:
    """How many of the best tokens to tell; None: no log probabilities at all."""
    if not chat:
        return whole(body, "logprobs", 0, 20)
    top = whole(body, "top_logprobs", 0, 20)
    if not flag(body, "logprobs"):
        if top:
            raise wrong("top_logprobs", top, "only together with logprobs: true")
        return None
    return top or 0


def params(body: Body, most: int, tops: int | None, llm: LLM, echo: bool = False) -> SamplingParams:
    """`most`: of tokens to be written. `tops` are the prompt's, too, where it is echoed."""
    scored = (tops if most else tops or 0) if echo else None
    given = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    bias = _bias(body.get("logit_bias"))
    try:
        made = SamplingParams(
            max_tokens=most, logprobs=tops, prompt_logprobs=scored, logit_bias=bias, **given
        )
        llm.check(made)
    except UserError as error:
        name = str(error).split(" ")[0].strip(":")
        raise Problem(400, str(error), name if name in READ else None) from None
    return made


def _bias(given: Any) -> dict[int, Any]:
    """JSON's keys are texts."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise wrong("logit_bias", given, "an object of token ids and numbers")
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) < 12):
            raise wrong("logit_bias", key, "its names are token ids")
    return {int(key): value for key, value in given.items()}


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
