"""What may be asked: a JSON body -> prompts or messages, and SamplingParams.

SamplingParams checks its own values. Whatever would change the answer and is not done here is
refused by name; what changes nothing (a user's name) is passed over; fields nobody knows are
passed over, too, and named once in the log.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

from billfish.engine.llm import LLM
from billfish.engine.params import LARGEST, SamplingParams
from billfish.engine.structured import Matcher, StructuredOutputsParams
from billfish.errors import UserError
from billfish.server.problem import Problem, short, wrong

log = logging.getLogger("billfish.server")
Body = dict[str, Any]
Prompt = str | list[int]

SAMPLING = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
# Not done, with the values that ask for nothing.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "structural_tag": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "best_of": (1,),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": (),
    "chat_template": (),
    "documents": ([],),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "priority": (0,),
    "continue_final_message": (False,),
    "bad_words": ([],),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "logits_processors": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "prompt_embeds": (),
}
READ = {
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "echo",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "add_special_tokens",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "structured_outputs",
    *GUIDED,
    *SAMPLING,
}
NO_MATTER = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "request_id",
    "verbosity",
    "cache_salt",
}
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_told: set[str] = set()


def check_fields(body: Body) -> None:
    for name, value in body.items():
        if name in READ or name in NO_MATTER or value is None:
            continue
        if name in REFUSED:
            if value not in REFUSED[name]:
                raise Problem(
                    400,
                    f"{name} {short(value)}: not supported by this server. Leave it out.",
                    name,
                    "unsupported_parameter",
                )
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


def structured(body: Body) -> StructuredOutputsParams | None:
    """What the text must match, in OpenAI's words or in vLLM's."""
    asked: dict[str, Any] = {}
    form = body.get("response_format")
    if form is not None and form != {"type": "text"}:
        form = form if isinstance(form, dict) else {"type": form}
        schema = form["json_schema"] if isinstance(form.get("json_schema"), dict) else {}
        if form.get("type") == "json_object":
            asked["response_format"] = {"json_object": True}
        elif form.get("type") == "json_schema" and "schema" in schema:
            asked["response_format"] = {"json": schema["schema"]}
        else:
            raise wrong(
                "response_format",
                form,
                "of type text, json_object, or json_schema with json_schema: {name, schema}",
            )
    if body.get("structured_outputs") is not None:
        asked["structured_outputs"] = body["structured_outputs"]
    for name, kind in GUIDED.items():
        if body.get(name) is not None:
            asked[name] = {kind: body[name]}
    if len(asked) > 1:
        raise wrong(", ".join(asked), None, "one of them")
    for name, value in asked.items():
        try:
            made = SamplingParams(structured_outputs=value).structured_outputs
        except UserError as error:
            raise Problem(400, str(error), name) from None
        assert isinstance(made, StructuredOutputsParams)
        return made
    return None


def messages(body: Body) -> list[dict[str, Any]]:
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise wrong("messages", given, "a list of at least one message")
    return [_message(one, f"messages[{place}]") for place, one in enumerate(given)]


def _message(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise wrong(where, given, "an object with role and content")
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    if given.get("function_call"):
        raise wrong(where, given, "function_call is not supported; tool_calls are")
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise wrong(f"{where}.tool_calls", calls, "a list, of an assistant's message")
    if calls and content is None:
        content = ""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise wrong(f"{where}.content", part, "parts of type text only")
            check_text(f"{where}.content", part.get("text"))
        content = "".join(part["text"] for part in content)
    made: dict[str, Any] = {"role": ROLES[role]}
    made["content"] = check_text(f"{where}.content", content)
    if calls:
        made["tool_calls"] = [
            _called(one, f"{where}.tool_calls[{i}]") for i, one in enumerate(calls)
        ]
    if role == "tool":
        made["tool_call_id"] = check_text(f"{where}.tool_call_id", given.get("tool_call_id"))
        if given.get("name") is not None:
            made["name"] = check_text(f"{where}.name", given["name"])
    return made


def _called(given: Any, where: str) -> dict[str, Any]:
    """Templates take arguments as an object; clients send its text."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict):
        raise wrong(where, given, "an object with id and function")
    arguments = function.get("arguments") or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or too_deep(arguments):
        raise wrong(f"{where}.function.arguments", function["arguments"], "the text of an object")
    name = check_text(f"{where}.function.name", function.get("name"))
    identity = check_text(f"{where}.id", given.get("id", ""))
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def too_deep(value: Any, left: int = 64) -> bool:
    """For whoever goes through it by recursion: templates, JSON's own writer, grammars."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(too_deep(one, left - 1) for one in inner)


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


def params(
    body: Body,
    most: int,
    tops: int | None,
    llm: LLM,
    echo: bool = False,
    matcher: Matcher | None = None,
    **more: Any,
) -> SamplingParams:
    """`most`: of tokens to be written. `tops` are the prompt's, too, where it is echoed."""
    scored = (tops if most else tops or 0) if echo else None
    given = {name: body[name] for name in SAMPLING if body.get(name) is not None} | more
    bias = _bias(body.get("logit_bias"))
    try:
        made = SamplingParams(
            max_tokens=most,
            logprobs=tops,
            prompt_logprobs=scored,
            structured_outputs=matcher,
            logit_bias=bias,
            **given,
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
