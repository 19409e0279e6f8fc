"""A finetuned model as a user meets it: the options, the result, the report of `quantize` and of
`eval`."""

import copy
import json
import random
import string

import pytest
from tiny import write_checkpoint
from typer.testing import CliRunner

from billfish.cli import show
from billfish.cli.app import app

OPTIONS = "--method finetune --steps 12 --end-to-end 10 --group-size 32 --nsamples 12 --seqlen 64"


def billfish(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory):
    """A folder with the source, its finetuned version and its report; and what was printed."""
    folder, source = tmp_path_factory.mktemp("finetuned"), random.Random(0)
    write_checkpoint(folder / "source")
    words = ["".join(source.choices(string.ascii_lowercase, k=4)) for _ in range(99)]
    (folder / "text.txt").write_text(
        "\n\n".join(" ".join(source.choices(words, k=40)) for _ in words)
    )
    done = billfish(
        "quantize",
        folder / "source",
        "--output",
        folder / "out",
        "--data",
        folder / "text.txt",
        *OPTIONS.split(),
        "--report",
        folder / "quantize.html",
    )
    return folder, done


@pytest.fixture
def report(finetuned):
    return json.loads((finetuned[0] / "out" / "quantization_report.json").read_text())


def numbers(gain):
    return f"{gain['before']:.4g}", f"{gain['after']:.4g}"


def test_options_reach_the_job(report):
    training = report["training"]
    assert (training["steps"], training["end_to_end"]) == (12, 10)
    assert [gain["block"] for gain in training["blocks"]] == [0, 1, 2]


def test_what_is_printed_without_a_terminal(finetuned, report):
    blocks, whole = report["training"]["blocks"], report["training"]["whole_model"]
    lines = finetuned[1].stderr.splitlines()
    assert [line.split(",")[0] for line in lines[:3]] == [f"block {n}/3" for n in (1, 2, 3)]
    for line, gain in zip(lines, blocks, strict=False):
        assert f"held-out error {gain['before']:.3g} -> {gain['after']:.3g} (" in line
        assert ("not kept" in line) is not gain["kept"] and "left" in line
    assert lines[3].startswith("end to end: step 0/10")
    assert lines[4].startswith("end to end: step 10/10")
    assert lines[5].startswith(f"end to end: KL {whole['before']:.3g} -> {whole['after']:.3g} (")
    assert lines[6:] == ["comparing with the original"]
    kept = sum(gain["kept"] for gain in blocks)
    assert f"training   {kept} of 3 blocks improved, held-out error " in finetuned[1].stdout
    assert f"; whole model KL {whole['before']:.3g} -> " in finetuned[1].stdout


def test_reports_of_quantize_and_eval_show_every_block(finetuned, report):
    folder, written = finetuned[0], finetuned[0] / "eval.html"
    (folder / "eval.txt").write_text("the fish swims in the sea " * 20)
    limits = ["--limit", 1, "--seqlen", 64, "--report", written]
    billfish("eval", folder / "out", "--tasks", folder / "eval.txt", *limits)
    for page in (written, folder / "quantize.html"):
        text = page.read_text()
        section = text.partition("What training gained")[2].partition("</section>")[0]
        for gain in report["training"]["blocks"]:
            before, after = numbers(gain)
            row = f'{gain["block"]}</td><td class="num">{before}</td><td class="num">{after}</td>'
            assert row in section
            assert f"block {gain['block']}: error {before} before" in section
        before, after = numbers(report["training"]["whole_model"])
        assert f'nats a token</td><td class="num">{before}</td>' in section and after in section
        assert section.count("<polyline") == 2 and section.count("<circle") == 6


def test_the_result_in_words(report, capsys):
    result = {**copy.deepcopy(report), "seconds": 1.0, "output": "out"}
    good = {"before": 0.02, "after": 0.015, "kept": True, "note": None}
    bad = {"before": 0.02, "after": None, "kept": False, "note": "it [diverged]"}
    result["training"] = {
        "steps": 30,
        "end_to_end": 10,
        "blocks": [{"block": i, **gain} for i, gain in enumerate((good, good, bad))],
        "whole_model": {"before": 0.0525, "after": 0.0468, "kept": True, "note": None},
    }

    def shown():
        show.quantized(result)
        return capsys.readouterr().out

    text = shown()
    assert "2 of 3 blocks improved, held-out error -25.0 % (median); whole model KL" in text
    assert "KL 0.0525 -> 0.0468 (-10.9 %)\n" in text and "block 3/3: it [diverged]\n" in text
    result["training"].update(steps=0, whole_model=bad)  # distillation alone, in vain
    text = shown()
    assert "training   whole model KL 0.02, training not kept\n" in text
    assert "end to end: it [diverged]\n" in text
    result["training"]["whole_model"] = None  # neither
    assert "training" not in shown()
    result["training"] = None  # another method
    assert "training" not in shown()
