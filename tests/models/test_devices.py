"""An absent or unknown device gives a one-sentence error in every command and API."""

import sys

import pytest
import torch
from tiny import write_checkpoint

import billfish
from billfish.cli import app as cli
from billfish.errors import UserError
from billfish.models.compute import device_of
from billfish.offline.driver import quantize
from billfish.offline.request import QuantizeRequest

COMMANDS = {
    "plan": ["plan", "{model}"],
    "quantize": ["quantize", "{model}", "--output", "{out}"],
    "eval": ["eval", "{model}"],
    "generate": ["generate", "{model}", "--prompt", "a"],
    "serve": ["serve", "{model}", "--port", "0"],
    "bench generate": ["bench", "generate", "{model}"],
    "bench serve": ["bench", "serve", "{model}"],
}
NOT_HERE = {
    "cuda": "sees no GPU",
    "cuda:7": "sees no GPU",
    "foo": "known are auto, cpu, cuda",
    "mps": "known are auto, cpu, cuda",
    "cuda:-1": "known are auto, cpu, cuda",
    "": "known are auto, cpu, cuda",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("devices") / "model")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("device", NOT_HERE)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command, device, model, tmp_path, monkeypatch, capsys):
    places = {"model": model, "out": tmp_path / "out"}
    arguments = [word.format(**places) for word in COMMANDS[command]]
    monkeypatch.setattr(sys, "argv", ["billfish", *arguments, "--device", device])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().err
    assert ended.value.code == 1 and f"error: device {device}: " in told
    assert NOT_HERE[device] in told and not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", NOT_HERE)
def test_python(device, model, tmp_path):
    for door in (
        lambda: billfish.load(model, device=device),
        lambda: billfish.LLM(model, device=device),
        lambda: quantize(QuantizeRequest(model, tmp_path / "out", device=device)),
    ):
        with pytest.raises(UserError, match=NOT_HERE[device]):
            door()


def test_those_that_are_here(monkeypatch):
    assert device_of("auto") == device_of("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of("auto") == device_of("cuda") == torch.device("cuda")
    assert device_of("cuda:1") == device_of(torch.device("cuda", 1)) == torch.device("cuda", 1)
    with pytest.raises(UserError, match=r"cuda:7: PyTorch sees 2 here, the last is cuda:1"):
        device_of("cuda:7")
