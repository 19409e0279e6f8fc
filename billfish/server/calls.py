"""Calls of tools in a text that may still grow: what is plain text, and what is called how.

A call's name comes first and its arguments last, so both can be told while they are written.
"""

import json
import re
from dataclasses import dataclass

from billfish.engine.text import overlap
from billfish.server.tools import Format

PYTHON = "<|python_tag|>"  # Llama's, in front of some calls
BETWEEN = re.compile(r"(?:</?tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|[\s\[\],;])*")
HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{"])', re.S
)
# A string may have no end yet: brackets in it do not count.
PIECE = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\]]', re.S)
CLOSED = re.compile(r"\s*\}")
decoder = json.JSONDecoder(strict=False)


@dataclass
class Call:
    name: str
    arguments: str  # JSON, as far as it is written


def read(form: Format, text: str, ended: bool) -> tuple[str, list[Call]]:
    """The plain text that is certain, and the calls so far. Both only grow with the text."""
    start = _start(form, text)
    if start is None:
        if ended:
            return text, []
        held = len(text) if not form.opens else overlap(text, form.opens)
        return _shown(text[: len(text) - held]), []
    if start < 0:
        return text if ended else _shown(text), []
    calls: list[Call] = []
    place: int | None = start
    while place is not None:
        between = BETWEEN.match(text, place)
        assert between is not None
        found, place = _call(text, between.end())
        if found is not None:
            calls.append(found)
    if not calls and ended:  # it was none
        return text, []
    return _shown(text[:start]), calls


def _start(form: Format, text: str) -> int | None:
    """Where calls begin; None: perhaps nowhere yet; -1: nowhere."""
    if form.opens:
        at = text.find(form.opens)
        return None if at < 0 else at
    stripped = text.lstrip()
    at = len(text) - len(stripped)
    if not stripped or (PYTHON.startswith(stripped) and stripped != PYTHON):
        return None
    return at if stripped.startswith(("{", PYTHON)) else -1


def _shown(text: str) -> str:
    """A line feed in front of a call is no answer."""
    return text if text.strip() else ""


def _call(text: str, at: int) -> tuple[Call | None, int | None]:
    """(the call there, where the next may be): None while it is not known."""
    head = HEAD.match(text, at)
    if head is None:  # in another order, perhaps, which can be told when it is whole
        return _whole(text, at)
    try:
        name = decoder.decode(head[1])
    except ValueError:
        return None, None
    start = head.end()
    end = _end(text, start)
    if text[start] == '"':  # JSON in a string
        return _whole(text, at)
    call = Call(name, text[start:end])
    if end is None:
        return call, None
    closed = CLOSED.match(text, end)
    return call, None if closed is None else closed.end()


def _whole(text: str, at: int) -> tuple[Call | None, int | None]:
    try:
        found, end = decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None, None
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(found["name"], arguments), end


def _end(text: str, start: int) -> int | None:
    """Behind the object that starts there."""
    depth = 0
    for piece in PIECE.finditer(text, start):
        if piece[0] in "{[":
            depth += 1
        elif piece[0] in "}]":
            depth -= 1
            if depth == 0:
                return piece.end()
    return None
