"""Request bodies as pydantic models: the fields of OpenAI's API, and those that vLLM adds.

Types are strict: 1 is no text and true is no number. null counts as absent. The sampling fields are
left to SamplingParams, which has their types and ranges.
"""

import json
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from billfish.engine.params import LARGEST
from billfish.server.errors import ApiError, invalid

Json = dict[str, Any]
Prompt = str | list[int]

SAMPLING = (
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
MAX_DEPTH = 64  # of JSON that others walk by recursion: templates, encoders, grammars
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
RULES = {  # pydantic's error types in the words of all other messages
    "bool_type": "true or false",
    "dict_type": "an object",
    "greater_than_equal": "at least {ge}",
    "int_type": "a whole number",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "an object",
    "string_type": "a text",
    "string_unicode": "a lone surrogate is no character",
    "too_long": "at most {max_length} items",
    "too_short": "at least {min_length} item",
}


def wrong(rule: str) -> PydanticCustomError:
    return PydanticCustomError("rule", "{rule}", {"rule": rule})


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(RULES["string_unicode"]) from None
    return value


def _function_name(value: str) -> str:
    if not NAME.fullmatch(value):
        raise wrong("1 to 64 letters, digits, dots, _ and -")
    return value


def _too_deep(value: Any, left: int = MAX_DEPTH) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_too_deep(one, left - 1) for one in inner)


def _not_deep(given: Any) -> Any:
    if _too_deep(given):
        raise wrong(f"at most {MAX_DEPTH} levels deep")
    return given


def _arguments(given: Any) -> Any:
    """Clients send the text of an object; templates take the object."""
    try:
        made = json.loads(given or "{}") if isinstance(given or "", str) else given
    except (ValueError, RecursionError):
        made = None
    if not isinstance(made, dict) or _too_deep(made):
        raise wrong("the text of an object")
    return made


def _content(given: Any) -> Any:
    """Joins a list of text parts."""
    if not isinstance(given, list):
        return given
    for one in given:
        if (
            not isinstance(one, dict)
            or one.get("type") != "text"
            or type(one.get("text")) is not str
        ):
            raise wrong("parts of type text only")
    return "".join(one["text"] for one in given)


def _prompts(given: Any) -> list[Prompt]:
    """A text, texts, token ids, or lists of them -> prompts."""
    many = given if isinstance(given, list) and given and not _is_id(given[0]) else [given]
    for one in many:
        if isinstance(one, str):
            _text(one)
        elif not isinstance(one, list) or not all(map(_is_id, one)):
            raise wrong("a text, a list of texts, token ids, or a list of lists of them")
        if not one:
            raise wrong("an empty one cannot be continued; give a token at least")
    return many


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bias(given: Any) -> Any:
    """Token ids are texts in JSON."""
    if isinstance(given, dict):
        if not all(key.isascii() and key.isdecimal() and len(key) < 12 for key in given):
            raise wrong("its names are token ids")
        return {int(key): value for key, value in given.items()}
    return given


Text = Annotated[str, AfterValidator(_text)]
NoneIfEmpty = BeforeValidator(lambda given: given or None)
TopLogprobs = Annotated[int | None, Field(ge=0, le=20)]
MaxTokens = Annotated[int | None, Field(ge=0, le=LARGEST)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True)

    def check(self) -> None:
        """Raises ApiError where fields contradict each other."""


class ToolFunction(Body):
    name: Annotated[str, AfterValidator(_function_name)]
    description: Text | None = None
    parameters: Json | None = None  # a JSON schema
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Annotated[ToolFunction, BeforeValidator(_not_deep)]
    _given: Json = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, given: Any, validate: ModelWrapValidatorHandler["Tool"]) -> "Tool":
        made = validate(given)
        made._given = {"type": "function", "function": given["function"]}
        return made

    @property
    def given(self) -> Json:
        """As the client wrote it: templates show the keys in its order, and those unknown here."""
        return self._given


class FunctionCall(Body):
    name: Text
    arguments: Annotated[Json, BeforeValidator(_arguments)] = {}


class PastCall(Body):
    """A tool call that the assistant made earlier in the conversation."""

    id: Text = ""
    function: FunctionCall


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text | None, BeforeValidator(_content)] = None
    tool_calls: Annotated[list[PastCall] | None, FailFast(), NoneIfEmpty] = None
    tool_call_id: Text | None = None
    name: Text | None = None
    function_call: Any = None

    def for_template(self, where: str) -> Json:
        """Raises ApiError where the fields do not fit the role."""
        if self.function_call:
            raise invalid(
                where, self.function_call, "function_call is not supported; tool_calls are"
            )
        if self.tool_calls and self.role != "assistant":
            raise invalid(f"{where}.tool_calls", self.role, "only in an assistant's message")
        if self.content is None and not self.tool_calls:
            raise invalid(f"{where}.content", None, RULES["string_type"])
        if self.role == "tool" and self.tool_call_id is None:
            raise invalid(f"{where}.tool_call_id", None, RULES["string_type"])
        made: Json = {"role": "system" if self.role == "developer" else self.role}
        made["content"] = self.content or ""
        if self.tool_calls:
            calls = [(one.id, one.function.model_dump()) for one in self.tool_calls]
            made["tool_calls"] = [
                {"id": name, "type": "function", "function": function} for name, function in calls
            ]
        if self.role == "tool":
            made["tool_call_id"] = self.tool_call_id
            made |= {} if self.name is None else {"name": self.name}
        return made


class ChatPrompt(Body):
    """What becomes the prompt of a chat."""

    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    tools: Annotated[list[Tool] | None, Field(max_length=128), FailFast(), NoneIfEmpty] = None
    tool_choice: Any = None  # see tools.py
    parallel_tool_calls: bool = True

    def template_messages(self) -> list[Json]:
        return [one.for_template(f"messages[{i}]") for i, one in enumerate(self.messages)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class Generating(Body):
    """What both endpoints that generate have in common."""

    n: int = Field(1, ge=1, le=128)
    echo: bool = False
    max_completion_tokens: MaxTokens = None
    max_tokens: MaxTokens = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[int, Any], BeforeValidator(_bias)] = {}
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    sampling: Json = {}  # the fields of SAMPLING

    def check(self) -> None:
        for name in ("max_completion_tokens", "max_tokens"):
            if getattr(self, name) == 0 and not self.echo:  # 0 scores an echoed prompt
                raise invalid(name, 0, "at least 1")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", None, "only together with stream")

    @property
    def limit(self) -> int | None:
        """Tokens to generate at most."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatRequest(ChatPrompt, Generating):
    logprobs: bool = False
    top_logprobs: TopLogprobs = None

    def check(self) -> None:
        super().check()
        if self.echo:
            raise invalid("echo", True, "not for chats; it is what /v1/completions has")
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", self.top_logprobs, "only together with logprobs: true")


class CompletionRequest(Generating):
    prompt: Annotated[list[Prompt], PlainValidator(_prompts)]
    add_special_tokens: bool = True
    logprobs: TopLogprobs = None


class TokenizeText(Body):
    prompt: Text
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(ChatPrompt):
    return_token_strs: bool = False


class Detokenize(Body):
    tokens: Annotated[list[int], FailFast()]


Parsed = TypeVar("Parsed", bound=Body)


def parse_request(kind: type[Parsed], body: Json) -> Parsed:
    given = {name: body[name] for name in kind.model_fields if body.get(name) is not None}
    given.pop("sampling", None)
    if issubclass(kind, Generating):
        given["sampling"] = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    try:
        made = kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from None
    made.check()
    return made


def _refusal(error: ErrorDetails) -> ApiError:
    name = ""
    for step in error["loc"]:
        name += f"[{step}]" if isinstance(step, int) else f".{step}" if name else step
    if error["type"] == "missing":
        return ApiError(400, f"{name} is missing.", name)
    rule = RULES.get(error["type"])
    rule = error["msg"] if rule is None else rule.format(**error.get("ctx", {}))
    return invalid(name, error["input"], rule)
