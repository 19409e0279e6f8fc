"""Tools: what a client may ask for, how a model is told, and the grammar of its calls.

Models write calls in formats of their own, which their chat template shows. A template that knows
no tools gets them in the system message, in Hermes' format.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from billfish.engine.structured import SPACES, StructuredOutputsParams
from billfish.errors import UserError
from billfish.server.asking import too_deep
from billfish.server.problem import Problem, wrong

Json = dict[str, Any]
Body = dict[str, Any]
MOST = 128
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
MARKERS = re.compile(r"(</?tool_call>|\[TOOL_CALLS\])")
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
ASK = """You may call functions. Their signatures, a JSON object a line:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and its arguments in these tags:
<tool_call>
{{"name": "function-name", "arguments": {{"name": "value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class Format:
    """How a model writes calls."""

    name: str
    opens: str  # what is in front of them
    arguments: str  # the key
    before: str = ""
    after: str = ""  # of each call
    between: str = ""
    end: str = ""
    several: bool = True


FORMATS = {
    one.name: one
    for one in (
        Format("hermes", "<tool_call>", "arguments", "\n", "\n</tool_call>", "\n<tool_call>\n"),
        Format("llama3_json", "", "parameters", several=False),
        Format("mistral", "[TOOL_CALLS]", "arguments", "[", "", ", ", "]"),
    )
}


def recognise(template: str) -> Format | None:
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
    """A request's tools, and which of them may or must be called."""

    given: list[Json]
    choice: Literal["none", "auto", "required"]
    parallel: bool

    @property
    def strict(self) -> bool:
        return any(one["function"].get("strict") for one in self.given)


def asked(body: Body) -> Tools | None:
    """None: no call may come."""
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if not isinstance(tools, list) or len(tools) > MOST:
        raise wrong("tools", tools, f"a list of at most {MOST} functions")
    given = [_function(one, f"tools[{place}]") for place, one in enumerate(tools)]
    names = [one["function"]["name"] for one in given]
    if len(set(names)) < len(names):
        raise wrong("tools", names, "names must differ")
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise wrong("parallel_tool_calls", parallel, "true or false")
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = choice["function"].get("name") if isinstance(choice.get("function"), dict) else None
        if name not in names:
            raise wrong("tool_choice", choice, f"a function of tools: {', '.join(names) or 'none'}")
        return Tools([given[names.index(name)]], "required", False)
    if choice not in (None, "none", "auto", "required"):
        raise wrong("tool_choice", choice, "none, auto, required, or a function by its name")
    if choice == "required" and not given:
        raise wrong("tool_choice", choice, "only together with tools")
    if choice == "none" or not given:
        return None
    return Tools(given, choice or "auto", parallel is not False)


def _function(given: Any, where: str) -> Json:
    if not isinstance(given, dict) or given.get("type") != "function":
        raise wrong(where, given, "an object of type function")
    function = given.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{where}.function", function, "an object with a name and parameters")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise wrong(f"{where}.function.name", name, "1 to 64 letters, digits, _, - and .")
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong(f"{where}.function.parameters", parameters, "a JSON schema, an object")
    if too_deep(function):
        raise wrong(f"{where}.function", function, "at most 64 levels deep")
    for key, kind in (("description", str), ("strict", bool)):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise wrong(f"{where}.function.{key}", function[key], kind.__name__)
    return {"type": "function", "function": function}


class Toolbox:
    """What one model knows of tools."""

    def __init__(self, tokenizer: Any, parser: str = "auto") -> None:
        self._tokenizer = tokenizer
        template = _template(tokenizer)
        self.taught = re.search(r"\btools\b", template) is not None  # by its template
        self.known = recognise(template) if self.taught else FORMATS["hermes"]
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
            raise Problem(
                400,
                "tool_choice auto: how this model writes calls is not known here. Start the "
                f"server with --tool-call-parser ({', '.join(FORMATS)}), or require a call.",
                "tool_choice",
            )

    def prompt(self, messages: list[Json], tools: Tools | None) -> tuple[list[Json], Any]:
        """Messages and tools as the template takes them."""
        if self.taught:
            return messages, tools.given if tools else None
        plain = [_plain(one) for one in messages]
        if tools:
            lines = "\n".join(json.dumps(one, ensure_ascii=False) for one in tools.given)
            told = ASK.format(tools=lines)
            if plain[0]["role"] == "system":
                plain[0] = {"role": "system", "content": f"{plain[0]['content']}\n\n{told}"}
            else:
                plain.insert(0, {"role": "system", "content": told})
        return plain, None

    def grammar(
        self, tools: Tools, content: StructuredOutputsParams | None
    ) -> StructuredOutputsParams | None:
        """What the answer must match: calls where they are required, or text in which every call
        fits its function, or a text of its own form (`content`). None: anything goes."""
        if tools.choice == "auto" and not tools.strict and content is None:
            return None
        form, say = self.format, self._literal
        opens, before, end = say(form.opens), say(form.before), say(form.end)
        lines = [f"body: {' | '.join(f'body_{i}' for i in range(len(tools.given)))}"]
        for place, one in enumerate(tools.given):
            function = one["function"]
            schema = {**(function.get("parameters") or NOTHING)}
            schema.setdefault("x-guidance", SPACES)
            head = json.dumps(f'{{"name": "{function["name"]}", "{form.arguments}": ')
            lines.append(f'body_{place}: {head} %json {json.dumps(schema)} "}}"')
        lines.append(f"call: body {say(form.after)}")
        more = f"({say(form.between)} call)*" if tools.parallel and form.several else ""
        if tools.choice == "required":
            lines.append(f"start: {opens} {before} call {more} {end}")
        elif content is not None:
            if content.kind != "json" or not opens:
                raise Problem(
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
            raise Problem(400, f"tools: {error}", "tools") from None

    def _literal(self, text: str) -> str:
        """In Lark's syntax, special tokens by their ids."""
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


def _plain(message: Json) -> Json:
    """For a template that knows no tools."""
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
