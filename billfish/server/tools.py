"""Tools: the choice a request makes, the formats in which models write calls, and their grammars.

The chat template shows which format a model was trained on. Where the template has no place for
tools they are described in the system message, in Hermes' format.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from billfish.engine.structured import SPACES, StructuredOutputsParams
from billfish.errors import UserError
from billfish.server.errors import ApiError, invalid
from billfish.server.protocol import ChatPrompt, Tool

Json = dict[str, Any]
MARKERS = re.compile(r"(</?tool_call>|\[TOOL_CALLS\])")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ASK = """You may call functions. Their signatures, a JSON object a line:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and its arguments in these tags:
<tool_call>
{{"name": "function-name", "arguments": {{"name": "value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls."""

    name: str
    opens: str  # begins the calls
    arguments: str  # key of the arguments
    before: str = ""
    after: str = ""  # of each call
    between: str = ""
    end: str = ""
    several: bool = True


FORMATS = {
    one.name: one
    for one in (
        ToolFormat("hermes", "<tool_call>", "arguments", "\n", "\n</tool_call>", "\n<tool_call>\n"),
        ToolFormat("llama3_json", "", "parameters", several=False),
        ToolFormat("mistral", "[TOOL_CALLS]", "arguments", "[", "", ", ", "]"),
    )
}


def detect_format(template: str) -> ToolFormat | None:
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else FORMATS["mistral"]
    if "<tool_call>" in template:
        other = "<function=" in template or "<arg_key>" in template
        return None if other else FORMATS["hermes"]
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return FORMATS["llama3_json"]
    return None


@dataclass(frozen=True)
class Tools:
    """A request's tools, and whether some of them may or must be called."""

    tools: list[Tool]
    choice: Literal["auto", "required"]
    parallel: bool

    @property
    def strict(self) -> bool:
        return any(one.function.strict for one in self.tools)


def requested(request: ChatPrompt) -> Tools | None:
    """None: no call is possible."""
    tools, choice = request.tools or [], request.tool_choice
    names = [one.function.name for one in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", names, "names must differ")
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = choice["function"].get("name") if isinstance(choice.get("function"), dict) else None
        if name not in names:
            rule = f"a function of tools: {', '.join(names) or 'none'}"
            raise invalid("tool_choice", choice, rule)
        return Tools([tools[names.index(name)]], "required", False)
    if choice not in (None, "none", "auto", "required"):
        raise invalid("tool_choice", choice, "none, auto, required, or a function by its name")
    if choice == "required" and not tools:
        raise invalid("tool_choice", choice, "only together with tools")
    if choice == "none" or not tools:
        return None
    return Tools(tools, choice or "auto", request.parallel_tool_calls)


class ToolSupport:
    """How one model is told of tools, and calls them."""

    def __init__(self, tokenizer: Any, parser: str = "auto") -> None:
        self._tokenizer = tokenizer
        template = _template(tokenizer)
        self.in_template = re.search(r"\btools\b", template) is not None
        self.known = detect_format(template) if self.in_template else FORMATS["hermes"]
        if parser != "auto":
            self.known = FORMATS[parser]
        self.format = self.known or FORMATS["hermes"]
        special = {
            str(one): token for token, one in tokenizer.added_tokens_decoder.items() if one.special
        }
        self._special = special
        markers = ("<|python_tag|>",) if self.format.name == "llama3_json" else (self.format.opens,)
        self.shows_special = any(marker in special for marker in markers)

    def check(self, tools: Tools) -> None:
        if tools.choice == "auto" and self.known is None:
            raise ApiError(
                400,
                "tool_choice auto: how this model writes calls is not known here. Start the "
                f"server with --tool-call-parser ({', '.join(FORMATS)}), or require a call.",
                "tool_choice",
            )

    def prompt(self, messages: list[Json], tools: Tools | None) -> tuple[list[Json], Any]:
        """Messages and tools as the template takes them."""
        if self.in_template:
            return messages, [one.given for one in tools.tools] if tools else None
        plain = [_as_text(one) for one in messages]
        if tools:
            lines = "\n".join(json.dumps(one.given, ensure_ascii=False) for one in tools.tools)
            told = ASK.format(tools=lines)
            if plain[0]["role"] == "system":
                plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n\n{told}"}
            else:
                plain.insert(0, {"role": "system", "content": told})
        return plain, None

    def grammar(
        self, tools: Tools, content: StructuredOutputsParams | None
    ) -> StructuredOutputsParams | None:
        """What the text must match: calls if they are required, else any text whose calls fit
        their functions, or calls or a text that matches `content`. None: no restriction."""
        if tools.choice == "auto" and not tools.strict and content is None:
            return None
        form, say = self.format, self._literal
        opens, before, end = say(form.opens), say(form.before), say(form.end)
        lines = [f"body: {' | '.join(f'body_{i}' for i in range(len(tools.tools)))}"]
        for place, one in enumerate(tools.tools):
            schema = {"x-guidance": SPACES, **(one.function.parameters or NO_PARAMETERS)}
            head = json.dumps(f'{{"name": "{one.function.name}", "{form.arguments}": ')
            lines.append(f'body_{place}: {head} %json {json.dumps(schema)} "}}"')
        lines.append(f"call: body {say(form.after)}")
        more = f"({say(form.between)} call)*" if tools.parallel and form.several else ""
        if tools.choice == "required":
            lines.append(f"start: {opens} {before} call {more} {end}")
        elif content is not None:
            if content.kind != "json" or not opens:
                raise ApiError(
                    400,
                    "response_format together with tools: this model's answers cannot be told "
                    "from calls. Set tool_choice to none or required.",
                    "response_format",
                )
            lines += [
                f"start: {opens} {before} call {more} {end} | content",
                f"content: %json {content.text}",
            ]
        elif not opens:
            lines += ["start: call | TEXT", r"TEXT: /([^{](.|\n)*)?/"]
        else:
            lines += [f"start: TEXT | head {before} call {more} {end}", r"TEXT: /(.|\n)*/"]
            lines.append(f"head: TEXT {opens}" if opens[0] == "<" else f"head[lazy]: TEXT {opens}")
        try:
            return StructuredOutputsParams(grammar="\n".join(["%llguidance {}", *lines]))
        except UserError as error:  # too long
            raise ApiError(400, f"tools: {error}", "tools") from None

    def _literal(self, text: str) -> str:
        """Lark syntax; special tokens by their ids."""
        parts = re.split(MARKERS, text)
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part)
            for part in parts
            if part
        )


def _template(tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template(None, [{}]))
    except ValueError:  # it has none
        return ""


def _as_text(message: Json) -> Json:
    """For a template without tools: calls and their results as plain text."""
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    calls = [
        json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", [])
    ]
    texts = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    content = "\n".join(filter(None, [message["content"], *texts]))
    return {"role": message["role"], "content": content}
