"""Ctrl-C and SIGTERM: every command ends with README's code and one line, whatever it is doing."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from tiny import write_checkpoint

from billfish.checkpoints import config
from billfish.cli import app as cli
from billfish.cli import show, signals

COMMANDS = {
    "quantize": ["quantize", "{model}", "--output", "{out}"],
    "plan": ["plan", "{model}"],
    "eval": ["eval", "{model}"],
    "generate": ["generate", "{model}", "--prompt", "a"],
    "bench": ["bench", "generate", "{model}", "--device", "cpu"],
    "convert": ["convert", "{model}", "{out}", "--to", "gptq"],
}


@pytest.fixture(autouse=True)
def handlers():
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)
    # A model that was being loaded is loaded to its end, and transformers is patched meanwhile.
    for thread in threading.enumerate():
        if thread.name == "billfish-load":
            thread.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", COMMANDS)
def test_each_ends_with_its_code(command, number, tmp_path, monkeypatch, capsys):
    """The signal comes while config.json is read: before quantize has written anything."""
    places = {"model": write_checkpoint(tmp_path / "model"), "out": tmp_path / "out"}
    arguments = [word.format(**places) for word in COMMANDS[command]]
    monkeypatch.setattr(sys, "argv", ["billfish", *arguments])
    real, sent = config.read_json, []

    def read(*args):
        # Once: some commands read in another thread, which goes on until the main thread has seen
        # the signal, and a second one would end the process.
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        return real(*args)

    monkeypatch.setattr(config, "read_json", read)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == (75 if command == "quantize" else 128 + number)
    told = capsys.readouterr().err
    assert "error: interrupted." in told and ("same command goes on" in told) == (
        command == "quantize"
    )
    assert signal.getsignal(number) is signals._end  # a second one does not wait


def test_while_it_streams_a_text(tmp_path, monkeypatch, capsys):
    model, shown = write_checkpoint(tmp_path / "model"), []

    def stream(piece):
        shown.append(piece)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(show, "stream", stream)
    arguments = ["generate", str(model), "--prompt", "a", "--max-tokens", "99"]
    monkeypatch.setattr(sys, "argv", ["billfish", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130 and len(shown) == 1
    assert "error: interrupted." in capsys.readouterr().err


BEFORE = """
import os, signal, sys
class Now:
    def find_spec(self, name, path=None, target=None):
        if name == "rich":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Now())
sys.argv = ["billfish", *sys.argv[1:]]
from billfish.__main__ import main
main()
"""


@pytest.mark.parametrize(("command", "code"), [("quantize", 75), ("eval", 130)])
def test_while_it_is_imported(command, code):
    done = subprocess.run([sys.executable, "-c", BEFORE, command], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "error: interrupted." in done.stderr and "Traceback" not in done.stderr
