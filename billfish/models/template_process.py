"""The process that renders chat templates: reads a conversation and writes its text, as lines of
JSON.

It is started by its path, so that no other module of Billfish is imported. SIGALRM ends it in the
middle of whatever a template does; a Python timer could not, as one long multiplication holds the
GIL.
"""

import json
import resource
import signal
import sys
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

STATM = Path("/proc/self/statm")


def main(seconds: int, characters: int, memory: int) -> None:
    if STATM.exists():  # Linux; other systems do not enforce RLIMIT_AS
        held = int(STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + memory, held + memory))
    for line in sys.stdin:
        asked = json.loads(line)
        signal.alarm(seconds)
        try:
            text = render_jinja_template(**asked)[0][0]
            text.encode()  # fails for lone surrogates
            told = {"text": text}
            if len(text) > characters:
                told = {"error": f"its text has {len(text)} characters, of {characters} at most"}
        except MemoryError:
            told = {"error": f"it needs more than {memory // 2**20} MB"}
        except Exception as error:
            why = str(error).partition("\n")[0][:400]
            told = {"error": f"{type(error).__name__}: {why}".rstrip(".")}
        answer = json.dumps(told)
        signal.alarm(0)
        print(answer, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
