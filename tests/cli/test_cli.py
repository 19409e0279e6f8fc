"""The command line as a user meets it: a subprocess, its exit codes, its help, its JSON."""

import json
import os
import subprocess
import sys

import pytest
import typer
from tiny import write_checkpoint
from typer.testing import CliRunner

from billfish.cli import app as cli
from billfish.solvers.finetune import END_TO_END, STEPS

COMMANDS = ("plan", "quantize", "inspect", "verify", "convert", "eval", "generate", "doctor")


def billfish(*args):
    done = subprocess.run(
        [sys.executable, "-m", "billfish", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def here(*args):
    """Likewise without a process of its own, which imports torch and compiles kernels again."""
    done = CliRunner().invoke(cli.app, list(map(str, args)), env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def stopped(monkeypatch, capsys):
    """main(), which the installed command calls, in this process: its exit code and message."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["billfish", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A source and its 4-bit version, made through the command line."""
    folder = tmp_path_factory.mktemp("models")
    source = write_checkpoint(folder / "source")
    done = billfish(
        "quantize",
        source,
        "--output",
        folder / "w4",
        "--group-size",
        32,
        "--nsamples",
        4,
        "--seqlen",
        64,
        "--report",
        folder / "report.html",
        "--json",
    )
    assert json.loads(done.stdout)["scheme"]["group_size"] == 32
    assert "<svg" in (folder / "report.html").read_text()
    return folder


def test_help_has_an_example_for_every_command():
    told = billfish("--help").stdout
    assert all(command in told for command in COMMANDS)
    runner = CliRunner()
    for command in COMMANDS:
        shown = runner.invoke(cli.app, [command, "--help"], prog_name="billfish")
        assert f"Example: billfish {command}" in shown.output


def test_json_is_a_flag_of_every_command_but_serve():
    def commands(group, path=()):
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from commands(command, (*path, name))
            else:
                yield (*path, name), command

    for path, command in commands(typer.main.get_command(cli.app)):
        flags = [param.is_flag for param in command.params if "--json" in param.opts]
        assert flags == ([] if path == ("serve",) else [True]), path


def test_importing_the_package_is_light():
    code = "import torch, time; t = time.time(); import billfish; print(time.time() - t);"
    code += (
        "import sys; assert 'transformers' not in sys.modules and not torch.cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.5


def test_plan_inspect_verify_speak_json_and_text(models):
    plan = json.loads(here("plan", models / "source", "--group-size", 32, "--json"))
    assert plan["totals"]["quantized"] == 21
    text = here("plan", models / "source", "--group-size", 32)
    assert all(kind in text for kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "lm_head"))
    found = json.loads(here("inspect", models / "w4", "--json"))
    assert found["dialect"] == "compressed-tensors" and found["packed_linears"] == 21
    assert "down_proj" in here("inspect", models / "w4")
    assert json.loads(here("verify", models / "w4", "--json"))["ok"]


def test_plan_says_how_long_training_is(models, text):
    def planned(*options):
        return here("plan", models / "source", "--group-size", 32, "--data", text, *options)

    given = ("--method", "finetune", "--steps", "7", "--end-to-end", "0")
    assert json.loads(planned(*given, "--json"))["training"] == {"steps": 7, "end_to_end": 0}
    assert "7 steps a block, 0 end to end" in planned(*given)
    usual = json.loads(planned("--method", "finetune", "--json"))["training"]
    assert usual == {"steps": STEPS, "end_to_end": END_TO_END}
    assert json.loads(planned("--json"))["training"] is None
    assert "training" not in planned()


def test_verify_exits_with_1_and_names_the_file(models, tmp_path):
    import shutil

    broken = shutil.copytree(models / "w4", tmp_path / "broken")
    shard = sorted(broken.glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    done = CliRunner().invoke(cli.app, ["verify", str(broken)], env={"COLUMNS": "200"})
    assert done.exit_code == 1 and shard.name in done.stdout


def test_convert_there_and_back(models, tmp_path, stopped):
    here("convert", models / "w4", tmp_path / "gptq", "--to", "gptq")
    here("convert", tmp_path / "gptq", tmp_path / "ct", "--to", "compressed-tensors", "--json")
    code, told = stopped("convert", models / "w4", tmp_path / "gptq", "--to", "awq")
    assert code == 1 and "exists and is not empty" in told


def test_generate_streams_repeats_and_reports_speed(models):
    draw = ["generate", models / "w4", "--prompt", "hello", "--max-tokens", 12, "--json"]
    hot = [*draw, "--temperature", 1.5]
    texts = [json.loads(here(*hot, "--seed", s))["text"] for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    told = CliRunner().invoke(cli.app, [*map(str, draw[:-1]), "--chat"])
    assert told.exit_code == 0 and "tokens/s" in told.stderr


def test_eval_writes_report_and_json(models, tmp_path):
    report = tmp_path / "r.html"
    told = here(
        "eval",
        models / "w4",
        "--baseline",
        models / "source",
        "--limit",
        2,
        "--seqlen",
        64,
        "--report",
        report,
        "--json",
    )
    task = json.loads(told)["tasks"][0]
    assert task["kl"]["value"] > 0 and 0.5 < task["recovery"]["value"] < 1.5
    assert report.exists() and report.with_suffix(".json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["quantize", "{source}"], 2, "--output"),
        (["quantize", "{source}", "--output", "x", "--bits", "9"], 2, "--bits"),
        (["quantize", "{source}", "--output", "x", "--method", "best"], 1, "best"),
        (["quantize", "{source}", "--output", "x", "--steps", "5"], 1, "gptq does not train"),
        (["plan", "{source}", "--end-to-end", "0", "--method", "awq"], 1, "awq does not train"),
        (["quantize", "{source}", "--output", "x", "--steps", "-1"], 2, "--steps"),
        (["plan", "{source}", "--end-to-end", "-1", "--method", "finetune"], 2, "--end-to-end"),
        (["plan", "{source}", "--steps", "many", "--method", "finetune"], 2, "valid integer"),
        (["frobnicate"], 2, "frobnicate"),
        (["quantize", "/nowhere/at/all", "--output", "x"], 1, "no such directory"),
        (["quantize", "{source}", "--output", "x", "--group-size", "48"], 1, "does not divide"),
        (["quantize", "{source}", "--output", "x", "--data", "no.txt"], 1, "no such calibration"),
        (["quantize", "{source}", "--output", "{w4}"], 1, "--fresh"),
        (["quantize", "{w4}", "--output", "x"], 1, "quantized already"),
        (["inspect", "/nowhere"], 1, "no such directory"),
        (["generate", "{w4}", "--prompt", "", "--max-tokens", "1"], 1, "empty"),
        (["generate", "{w4}", "--prompt", "a", "--max-tokens", "0"], 1, "at least 1"),
        (["generate", "{w4}", "--prompt", "a", "--max-tokens", "9999"], 1, "positions"),
        (["generate", "{w4}", "--prompt", "a", "--temperature", "-1"], 1, "0 (greedy) to 100"),
        (["eval", "{w4}", "--tasks", "chess"], 1, "chess"),
        (["eval", "{w4}", "--tasks", "piqa"], 1, "data"),
    ],
)
def test_wrong_use_gets_one_clear_message(
    models, tmp_path, arguments, code, message, monkeypatch, stopped
):
    places = {"source": models / "source", "w4": models / "w4"}
    monkeypatch.chdir(tmp_path)
    ended, told = stopped(*(a.format(**places) for a in arguments))
    assert ended == code and message in told
    assert not (tmp_path / "x" / "config.json").exists()


def test_a_place_that_cannot_be_written_is_said(models, tmp_path, stopped):
    """Root may write anywhere, so the place is a path below a file."""
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "out"
    code, told = stopped("quantize", models / "source", "--output", output, "--group-size", 32)
    assert code == 1 and str(tmp_path / "file") in told
