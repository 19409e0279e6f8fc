"""The group size: fitted to the model; one that does not fit is refused or gives a warning."""

import json

import pytest
import torch
import transformers
from tiny import write_checkpoint
from typer.testing import CliRunner

from billfish.cli.app import app
from billfish.errors import UserError
from billfish.models.linear import QuantLinear
from billfish.offline.driver import quantize
from billfish.offline.request import QuantizeRequest
from billfish.offline.selection import fit_scheme
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.groups import weights_left
from billfish.schemes.w4a16.scheme import Fitted

SMOLLM2 = [(576, 576), (192, 576), (1536, 576), (576, 1536)]


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ([(64, 4096), (64, 14336)], 128),
        (SMOLLM2, 64),
        ([(8, 4096), (8, 864)], 32),
        ([(8, 128), (8, 48)], 128),  # nothing divides 48: the largest of those that leave it alone
        ([(8, 192), (8, 48)], 64),
        ([(8, 224), (80, 48)], 32),
    ],
)
def test_the_largest_that_leaves_the_fewest_weights(shapes, size):
    scheme, warning = fit_scheme(Fitted(3, False), shapes, False)
    assert scheme == W4A16(3, size, False)
    assert (warning is None) == (weights_left(shapes, size) == 0)


def test_a_chosen_size_that_leaves_much_is_refused_and_told():
    with pytest.raises(UserError, match=r"k = 576: 60.0%.* 16, 32, 64, -1 .*--allow-skipped"):
        fit_scheme(W4A16(4, 128), SMOLLM2, False)
    scheme, warning = fit_scheme(W4A16(4, 128), SMOLLM2, True)
    assert scheme.group_size == 128 and "60.0%" in warning
    little = [(1000, 128), (10, 64)]  # 0.5 %
    scheme, warning = fit_scheme(W4A16(4, 128), little, False)
    assert "0.5%" in warning
    assert fit_scheme(W4A16(4, -1), SMOLLM2, False) == (W4A16(4, -1), None)


def test_by_default_every_linear_of_a_block_is_packed(tmp_path):
    source = write_checkpoint(tmp_path / "source", intermediate_size=96, num_hidden_layers=2)
    report = quantize(QuantizeRequest(source, tmp_path / "out", method="rtn"))
    assert (
        QuantizeRequest(source, tmp_path).scheme == Fitted()
        and report["scheme"]["group_size"] == 32
    )
    assert report["fingerprint"]["scheme"] == report["scheme"] and report["warnings"] == []
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    made = [module for module in model.modules() if isinstance(module, QuantLinear)]
    dense = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert len(made) == 14 and dense == ["lm_head"]


def test_commands_say_the_group_and_each_reason_once(tmp_path):
    source = write_checkpoint(tmp_path / "source", intermediate_size=96, num_hidden_layers=2)
    ask = ["plan", str(source), "--method", "rtn"]
    shown = CliRunner().invoke(app, ask).stdout
    assert "w4a16 4 bit g32 sym" in shown
    assert json.loads(CliRunner().invoke(app, [*ask, "--json"]).stdout)["totals"]["quantized"] == 14
    refused = CliRunner().invoke(app, [*ask, "--group-size", "64"])
    assert isinstance(refused.exception, UserError)
    chosen = [*ask, "--group-size", "64", "--allow-skipped"]
    shown = CliRunner().invoke(app, chosen, env={"COLUMNS": "300"}).stdout
    assert shown.count("does not divide") == 2  # the reason, and the warning
    assert "down_proj: group size 64" in shown and "warning: group size 64" in shown
    assert CliRunner().invoke(app, [*ask, "--group-size", "wide"]).exit_code == 2
    done = ["quantize", *chosen[1:], "-o", str(tmp_path / "out")]
    assert "warning: group size 64" in CliRunner().invoke(app, done, env={"COLUMNS": "300"}).stdout
