"""`billfish kernels warmup`: which kernels a checkpoint needs, compiled once, without a GPU."""

import json
from pathlib import Path

import pytest
import torch
from tiny import write_checkpoint
from tiny_checkpoint import edit_json, tiny_llama
from typer.testing import CliRunner

from billfish.cli import kernels as cli_kernels
from billfish.cli import warmup
from billfish.errors import UserError
from billfish.kernels import cache, jit
from billfish.kernels.jit import Program
from billfish.offline.driver import quantize
from billfish.offline.request import QuantizeRequest
from billfish.schemes.w4a16 import W4A16

PROBE = Path(jit.__file__).parent / "probe.cuh"
SCHEME = W4A16(4, 32, symmetric=False)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    path = tmp_path_factory.mktemp("dense") / "model"
    tiny_llama().to(torch.float16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def packed(dense, tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "model"
    quantize(QuantizeRequest(dense, path, SCHEME, "rtn"))
    return path


@pytest.fixture(autouse=True)
def asked(monkeypatch, tmp_path):
    """What the scheme's CUDA op was asked; it always needs two probes."""
    monkeypatch.setenv("BILLFISH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = []

    def programs(schemes, dtype, arch, experts):
        asked.extend((scheme, dtype, arch) for scheme in schemes)
        asked.extend(("experts", scheme) for scheme in experts)
        return [Program(PROBE, f"billfish::probe<{i}>") for i in (2, 3)]

    monkeypatch.setattr(warmup, "programs", programs)
    return asked


def test_compiles_once(packed, asked):
    said: list[str] = []
    result = warmup.warmup(packed, "sm_90a", "auto", said.append)
    assert asked == [(SCHEME, torch.float16, "sm_90a")]  # fourteen linears and more, one scheme
    assert (result["compiled"], result["cached"]) == (2, 0) and result["linears"] >= 14
    assert [kernel["name"] for kernel in result["kernels"]] == [
        "billfish::probe<2>",
        "billfish::probe<3>",
    ]
    assert all(kernel["registers"] > 0 and not kernel["cached"] for kernel in result["kernels"])
    assert said[-1] == "compiling kernels 2/2 for sm_90a"
    cache._memory.clear()
    result = warmup.warmup(packed, "sm_90a", "auto", said.append)
    assert (result["compiled"], result["cached"]) == (0, 2) and len(said) == 3
    assert warmup.warmup(packed, "sm_80")["compiled"] == 2  # other machine code


@pytest.mark.parametrize(
    ("architecture", "stacked"), [("MixtralForCausalLM", True), ("GptOssForCausalLM", False)]
)
def test_experts_are_asked_for_unless_biases_keep_them_apart(
    tmp_path, asked, architecture, stacked
):
    source = write_checkpoint(tmp_path / "source", architecture)
    scheme = W4A16(4, 64)
    quantize(QuantizeRequest(source, tmp_path / "out", scheme, "rtn", check=False))
    warmup.warmup(tmp_path / "out", "sm_90a")
    assert asked == [(scheme, torch.bfloat16, "sm_90a"), *[("experts", scheme)] * stacked]


@pytest.mark.parametrize(
    ("said", "dtype", "expected"),
    [
        ("bfloat16", "auto", torch.bfloat16),
        ("float32", "auto", torch.float16),
        (None, "auto", torch.float16),
        ("float16", "bfloat16", torch.bfloat16),
    ],
)
def test_dtype(packed, asked, tmp_path, said, dtype, expected):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in packed.iterdir():
        (copy / file.name).symlink_to(file)
    (copy / "config.json").unlink()
    (copy / "config.json").write_text((packed / "config.json").read_text())
    edit_json(copy / "config.json", lambda config: config.update(dtype=said, torch_dtype=said))
    warmup.warmup(copy, "sm_90a", dtype)
    assert asked[0][1] == expected


def test_refusals(dense, packed, tmp_path):
    with pytest.raises(UserError, match=r"no GPU here.*--arch sm_90a"):
        warmup.warmup(packed)
    for arch in ("90a", "sm90", "hopper", "sm_90a -G", "sm_42", "sm_90", "sm_100f", "sm_75"):
        with pytest.raises(UserError, match=r"known are sm_80, .*sm_89, sm_90a, sm_100a"):
            warmup.warmup(packed, arch)
    with pytest.raises(UserError, match=r"not a quantized model.*billfish quantize"):
        warmup.warmup(dense, "sm_90a")
    with pytest.raises(UserError, match="no such directory"):
        warmup.warmup(tmp_path / "nothing", "sm_90a")


def test_command(packed):
    runner = CliRunner()
    done = runner.invoke(cli_kernels.app, ["warmup", str(packed), "--arch", "sm_90a", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["compiled"] == 2
    done = runner.invoke(cli_kernels.app, ["warmup", str(packed), "--arch", "sm_90a"])
    assert "0 compiled, 2 were cached" in done.stdout and "billfish::probe<3>" in done.stdout
    helped = runner.invoke(cli_kernels.app, ["warmup", "--help"])
    assert "Example: billfish kernels warmup" in helped.output
