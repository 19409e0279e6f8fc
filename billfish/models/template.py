"""Chat templates: messages -> the text that a model was trained on.

A template is a program that comes with the checkpoint. transformers runs it in a sandbox, which
bounds what it may touch, but neither its time nor its memory, and a thread cannot be ended. So it
runs in a process of its own (`template_process.py`) under limits of the system's; one that ends by
them, or by a mistake, is one sentence here, and the next request starts another.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from billfish.errors import UserError

SECONDS = 10  # of one rendering
CHARACTERS = 8 * 2**20  # of its text
MEMORY = 2**30  # bytes more than the process has when it is ready
PROGRAM = Path(__file__).with_name("template_process.py")


class Renderer:
    """Renders one conversation at a time. Close it to end its process, whatever that is doing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self.closed = False

    def start(self) -> None:
        """Ahead of the first conversation: to import transformers takes a second."""
        if self._process is None and not self.closed:
            # -P: modules beside the program must not stand in for others of their name.
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
        """As the tokenizer's apply_chat_template, with the prompt for an answer at its end."""
        if not tokenizer.chat_template:
            raise UserError("this model has no chat template; give plain prompts.")
        try:
            template = tokenizer.get_chat_template(None, tools)
        except ValueError as error:  # several templates, none of which is the default
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
                if not answer.endswith("\n"):  # also if we were interrupted
                    self._process = None
                    process.kill()
                    process.wait()
            if answer.endswith("\n"):
                found: dict[str, Any] = json.loads(answer)
                return found
            return {"error": f"it took longer than {SECONDS} s, or ended its process"}
