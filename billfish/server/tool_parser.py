"""Reads tool calls out of generated text that may still grow.

A call's name comes before its arguments, so both are streamed while they are written.
"""

import json
import re
from dataclasses import dataclass

from billfish.engine.text import overlap
from billfish.server.tools import ToolFormat

PYTHON = "<|python_tag|>"  # Llama writes it in front of some calls
SEPARATORS = re.compile(r"(?:</?tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|[\s\[\],;])*")
HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{"])', re.S
)
# A string may have no end yet; brackets inside strings do not count.
STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\]]', re.S)
CLOSED = re.compile(r"\s*\}")
decoder = json.JSONDecoder(strict=False)


@dataclass
class ToolCall:
    name: str
    arguments: str  # JSON, as far as it is written


def parse_calls(form: ToolFormat, text: str, ended: bool) -> tuple[str, list[ToolCall]]:
    """(text outside of calls, as far as it is certain; the calls so far). Both only grow."""
    start = _start(form, text)
    if start is None:
        if ended:
            return text, []
        held = len(text) if not form.opens else overlap(text, form.opens)
        return _without_blank(text[: len(text) - held]), []
    if start < 0:
        return text if ended else _without_blank(text), []
    calls: list[ToolCall] = []
    place: int | None = start
    while place is not None:
        between = SEPARATORS.match(text, place)
        assert between is not None
        found, place = _call(text, between.end())
        if found is not None:
            calls.append(found)
    if not calls and ended:  # what looked like a call was none
        return text, []
    return _without_blank(text[:start]), calls


def _start(form: ToolFormat, text: str) -> int | None:
    """Where calls begin; None: not decided yet; -1: there are none."""
    if form.opens:
        at = text.find(form.opens)
        return None if at < 0 else at
    stripped = text.lstrip()
    at = len(text) - len(stripped)
    if not stripped or (PYTHON.startswith(stripped) and stripped != PYTHON):
        return None
    return at if stripped.startswith(("{", PYTHON)) else -1


def _without_blank(text: str) -> str:
    """White space alone, as in front of a call, is no content."""
    return text if text.strip() else ""


def _call(text: str, at: int) -> tuple[ToolCall | None, int | None]:
    """(the call at `at`, where the next one may begin); None while unknown."""
    head = HEAD.match(text, at)
    if head is None:  # keys in another order: only the complete object can be read
        return _complete(text, at)
    try:
        name = decoder.decode(head[1])
    except ValueError:
        return None, None
    start = head.end()
    end = _end(text, start)
    if text[start] == '"':  # the arguments are JSON inside a string
        return _complete(text, at)
    call = ToolCall(name, text[start:end])
    if end is None:
        return call, None
    closed = CLOSED.match(text, end)
    return call, None if closed is None else closed.end()


def _complete(text: str, at: int) -> tuple[ToolCall | None, int | None]:
    try:
        found, end = decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None, None
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(found["name"], arguments), end


def _end(text: str, start: int) -> int | None:
    """The position after the object that begins at `start`; None while it is incomplete."""
    depth = 0
    for piece in STRING_OR_BRACKET.finditer(text, start):
        if piece[0] in "{[":
            depth += 1
        elif piece[0] in "}]":
            depth -= 1
            if depth == 0:
                return piece.end()
    return None
