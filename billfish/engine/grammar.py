"""Grammars as llguidance takes them; run by its path, the process in which strangers' are tried.

Imports nothing of ours, so that the process is small. llguidance bounds what a grammar may cost,
but not everywhere: a thousand references in a row overflow its stack, an array of 10^9 items takes
all memory, twenty patterns that must all hold take minutes. None of these can be caught in a
process that has something to lose.
"""

import json
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

SECONDS = 2  # of a processor, for one grammar; an ordinary schema takes 0.001
MEMORY = 2**30  # bytes more than the process has when it is ready
STACK = 2**20  # bytes; threads that compile in earnest have 2 MB at least
STATM = Path("/proc/self/statm")


def learned(tokenizer: str, n_vocab: int, eos_token: int | None) -> LLTokenizer:
    """Of a tokenizer.json's text."""
    return LLTokenizer(tokenizer, n_vocab=n_vocab, eos_token=eos_token)


def serialize(kind: str, text: str) -> str:
    """Of a JSON schema, a regex, choices (a JSON list) or a grammar (Lark's or GBNF's syntax)."""
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = (json.dumps(one, ensure_ascii=False) for one in json.loads(text))
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(choices))
    return grammar_from("grammar", text)


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """ValueError with the reason. The first mask is the dearest: if it is too dear, that is told
    here, too."""
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(reason(matcher))
    return matcher


def reason(matcher: LLMatcher) -> str:
    told = one_line(matcher.get_error().partition("\n<")[0])  # a state, or a backtrace
    return "no text can match it" if told.startswith("NoExtension") else told


def one_line(error: object) -> str:
    return " ".join(str(error).split())[:300].strip(" .")


def _try(tokenizer: LLTokenizer, asked: dict[str, str]) -> dict[str, Any]:
    try:
        grammar = serialize(asked["kind"], asked["text"])
        compiled(tokenizer, grammar)
        return {"grammar": grammar}
    except (ValueError, RecursionError, MemoryError) as error:
        return {"error": one_line(error) or type(error).__name__}


def _serve() -> None:
    """A tokenizer in, then a grammar a line; a line for each: what is compiled, or why not."""
    tokenizer = learned(**json.loads(sys.stdin.readline()))
    if STATM.exists():  # Linux; other systems do not keep this limit
        held = int(STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # ends this process
        told = _try(tokenizer, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    threading.stack_size(STACK)
    threading.Thread(target=_serve).start()
