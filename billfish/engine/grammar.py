"""llguidance's grammars; run as a script, the process in which untrusted ones are compiled first.

Imports nothing of Billfish, so that the process is small. llguidance limits what a grammar may
cost, but not everywhere: a thousand nested references overflow its stack, an array of 10^9 items
takes all memory, an intersection of twenty patterns takes minutes. None of these can be caught in
the server's process.
"""

import json
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

SECONDS = 2  # of CPU time for one grammar; an ordinary schema takes 0.001
MEMORY = 2**30  # bytes more than the process has at its start
STACK = 2**20  # bytes; the server's threads have at least 2 MB
STATM = Path("/proc/self/statm")


def learned(tokenizer: str, n_vocab: int, eos_token: int | None) -> LLTokenizer:
    """From the text of tokenizer.json."""
    return LLTokenizer(tokenizer, n_vocab=n_vocab, eos_token=eos_token)


def serialize(kind: str, text: str) -> str:
    """From a JSON schema, a regex, choices (a JSON list) or a grammar (Lark's or GBNF's syntax)."""
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = (json.dumps(one, ensure_ascii=False) for one in json.loads(text))
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(choices))
    return grammar_from("grammar", text)


def compiled(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """ValueError with the reason, also if the first mask, the most expensive one, costs too
    much."""
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
    """stdin: a tokenizer, then a grammar a line. stdout: a line for each, compiled or why not."""
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
