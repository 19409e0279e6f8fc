"""Structured outputs: completions that must match a JSON schema, a regex, a choice or a grammar.

    SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))

llguidance computes which tokens may come next; sampling.py masks the others. End tokens are allowed
where the grammar may end, and a completion ends by itself where nothing else can follow.
"""

import json
import subprocess
import sys
import threading
from collections import OrderedDict
from copy import copy
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from billfish.errors import UserError

LARGEST = 128 * 1024  # characters of a grammar
MOST_CHOICES = 1000
KEPT = 32  # compiled grammars
# At most one space between JSON's items: some models never stop writing spaces. A schema's own
# "x-guidance" overrides it.
SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
PROGRAM = Path(__file__).with_name("grammar.py")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one is given; names are vLLM's."""

    json: str | dict[str, Any] | bool | None = None  # a schema
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None  # Lark's syntax as llguidance has it, or GBNF
    json_object: bool | None = None  # any JSON object

    def __post_init__(self) -> None:
        given = [one.name for one in fields(self) if getattr(self, one.name) not in (None, False)]
        if self.json is False or len(given) != 1:
            names = ", ".join(one.name for one in fields(self))
            raise UserError(f"structured_outputs: one of {names}, not {len(given)}.")
        kind, value = given[0], getattr(self, given[0])
        if kind == "json" and not isinstance(value, str | dict | bool):
            raise UserError("structured_outputs: json is a schema, an object or its text.")
        if kind == "choice" and not (
            isinstance(value, list | tuple)
            and 0 < len(value) <= MOST_CHOICES
            and all(isinstance(one, str) and one for one in value)
        ):
            raise UserError(f"structured_outputs: choice is a list of 1 to {MOST_CHOICES} texts.")
        if kind in ("regex", "grammar") and not isinstance(value, str):
            raise UserError(f"structured_outputs: {kind} is a text.")
        if len(self.text) > LARGEST:
            raise UserError(
                f"structured_outputs: {kind} has {len(self.text)} characters, of {LARGEST} at most."
            )

    @property
    def kind(self) -> str:
        names = ("regex", "choice", "grammar")
        return next((name for name in names if getattr(self, name) not in (None, False)), "json")

    @cached_property
    def text(self) -> str:
        value = {"type": "object"} if self.json_object else getattr(self, self.kind)
        try:
            if self.kind == "json":
                schema = json.loads(value) if isinstance(value, str) else value
                value = {"x-guidance": SPACES, **schema} if isinstance(schema, dict) else schema
            elif isinstance(value, str):
                return value
            return json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"structured_outputs: {self.kind} is no JSON: {error}.") from None


class Matcher:
    """The state of one sequence in its grammar."""

    def __init__(self, inner: Any, eos: int, ends: NDArray[np.int64]) -> None:
        self._inner, self._eos, self._ends = inner, eos, ends

    def copy(self) -> "Matcher":
        return Matcher(self._inner.deep_copy(), self._eos, self._ends)

    def mask(self) -> NDArray[np.uint8]:
        """Tokens that may come next, a bit each; none after an error."""
        bits = np.frombuffer(self._inner.compute_bitmask(), np.uint8).copy()
        if self._inner.is_error():
            return np.zeros_like(bits)
        put_bits(bits, self._ends, bool(bits[self._eos // 8] >> self._eos % 8 & 1))
        return bits

    def note(self, token: int) -> None:
        self._inner.consume_token(self._eos if token in self._ends else token)

    @property
    def ended(self) -> bool:
        """Nothing can follow."""
        return bool(self._inner.is_stopped() and not self._inner.is_error())

    @property
    def error(self) -> str | None:
        if not self._inner.is_error():
            return None
        from billfish.engine.grammar import reason

        return reason(self._inner)


class Matchers:
    """Compiles grammars for one tokenizer. llguidance is imported when first needed, which takes
    a second."""

    def __init__(self, tokenizer: Any, vocabulary: int, eos: frozenset[int]) -> None:
        self._tokenizer, self._vocabulary, self._eos = tokenizer, vocabulary, sorted(eos)
        self._lock, self._trying = threading.Lock(), threading.Lock()
        self._ready: Any = None
        self._known: OrderedDict[tuple[str, str], Matcher] = OrderedDict()
        self._trial: subprocess.Popen[str] | None = None
        self._closed = False

    def known(self, wanted: StructuredOutputsParams) -> Matcher | None:
        """From the cache of compiled grammars."""
        with self._lock:
            if (found := self._known.get((wanted.kind, wanted.text))) is not None:
                self._known.move_to_end((wanted.kind, wanted.text))
            return found

    def compile(self, wanted: StructuredOutputsParams, tried: bool = False) -> Matcher:
        """UserError with llguidance's reason. `tried`: first in a process of its own, which a
        hostile grammar may crash."""
        if (found := self.known(wanted)) is not None:
            return found
        if find_spec("llguidance") is None:
            raise UserError(
                "structured outputs need the package llguidance: pip install 'billfish[serve]'"
            )
        from billfish.engine import grammar as library

        kind, text = wanted.kind, wanted.text
        try:
            if self._ready is None:
                self._ready = library.learned(**self._tokens())
        except ValueError as error:
            raise UserError(f"llguidance does not know such a tokenizer: {error}.") from None
        try:
            with self._trying:
                serialized = self._try(kind, text) if tried else library.serialize(kind, text)
            inner = library.compiled(self._ready, serialized)
        except ValueError as error:
            raise UserError(f"this {kind} cannot be compiled: {library.one_line(error)}.") from None
        ends = np.array([token for token in self._eos if token < self._vocabulary], np.int64)
        made = Matcher(inner, self._ready.eos_token, ends)
        with self._lock:
            self._known[kind, text] = made
            while len(self._known) > KEPT:
                self._known.popitem(last=False)
        return made

    def close(self) -> None:
        self._closed, process, self._trial = True, self._trial, None
        if process is not None:
            process.kill()
            process.wait()

    def _tokens(self) -> dict[str, Any]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                "structured outputs need a fast tokenizer (tokenizer.json); this model has none."
            )
        plain = copy(backend)
        plain.no_padding()
        plain.no_truncation()
        eos = self._eos[0] if self._eos else self._tokenizer.eos_token_id
        size = max(self._vocabulary, len(self._tokenizer))
        return {"tokenizer": plain.to_str(), "n_vocab": size, "eos_token": eos}

    def _try(self, kind: str, text: str) -> str:
        """In the other process, which lives until a grammar crashes it."""
        if self._trial is None and not self._closed:
            self._trial = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM)],
                stdin=subprocess.PIPE,
                encoding="ascii",
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            _tell(self._trial, self._tokens())
        if (process := self._trial) is None:
            raise UserError("this LLM is closed; make another.")
        _tell(process, {"kind": kind, "text": text})
        assert process.stdout is not None
        answer = process.stdout.readline()
        if not answer.endswith("\n"):
            self._trial = None
            process.kill()
            process.wait()
            raise ValueError("it takes too much time, memory or depth; simplify it")
        told = json.loads(answer)
        if "error" in told:
            raise ValueError(told["error"])
        return str(told["grammar"])


def put_bits(bits: NDArray[np.uint8], places: NDArray[np.int64], value: bool) -> None:
    for place in places.tolist():
        one = np.uint8(1 << place % 8)
        bits[place // 8] = bits[place // 8] | one if value else bits[place // 8] & ~one


def _tell(process: subprocess.Popen[str], line: dict[str, Any]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(line) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has died: its answer will be empty
