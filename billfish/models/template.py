"""Chat templates: messages -> the prompt text in the format that the model was trained on.

A template is a program that comes with the checkpoint. transformers' sandbox limits what it can
access, but neither its time nor its memory, and a thread cannot be killed. So it runs in a process
of its own (`template_process.py`) with limits that the system enforces. If that process dies, the
request gets an error and the next request starts a new process.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from billfish.errors import UserError

SECONDS = 10  # for one conversation
CHARACTERS = 8 * 2**20  # of rendered text
MEMORY = 2**30  # bytes in addition to what the idle process has
PROGRAM = Path(__file__).with_name("template_process.py")


class Renderer:
    """Renders one conversation at a time. `close` kills its process, also while it renders."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self.closed = False

    def start(self) -> None:
        """Start the process ahead of the first conversation: importing transformers takes a
        second."""
        if self._process is None and not self.closed:
            # -P: modules in the program's directory must not shadow others of the same name.
            command = [sys.executable, "-P", str(PROGRAM), str(SECONDS), str(CHARACTERS)]
            self._process = subprocess.Popen(
                [*command, str(MEMORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="ascii",
                start_new_session=True,
            )

    def render(
        self,
        tokenizer: Any,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The tokenizer's apply_chat_template with add_generation_prompt."""
        if not tokenizer.chat_template:
            raise UserError("this model has no chat template; give plain prompts.")
        try:
            template = tokenizer.get_chat_template(None, tools)
        except ValueError as error:  # several templates and no default
            raise UserError(f"this model's chat template: {error}") from None
        told = self._ask(
            json.dumps(
                {
                    **tokenizer.special_tokens_map,
                    "conversations": [list(messages)],
                    "tools": tools,
                    "chat_template": template,
                    "add_generation_prompt": True,
                },
                default=str,
            )
        )
        if "error" in told:
            raise UserError(f"this model's chat template failed: {told['error']}.")
        return str(told["text"])

    def close(self) -> None:
        self.closed, process, self._process = True, self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def __enter__(self) -> "Renderer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, line: str) -> dict[str, Any]:
        with self._lock:
            self.start()
            if self._process is None:
                raise UserError("this model is closed; make another.")
            process, answer = self._process, ""
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(line + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                pass
            finally:
                if not answer.endswith("\n"):  # also after KeyboardInterrupt
                    self._process = None
                    process.kill()
                    process.wait()
            if answer.endswith("\n"):
                found: dict[str, Any] = json.loads(answer)
                return found
            return {"error": f"it took longer than {SECONDS} s, or ended its process"}
