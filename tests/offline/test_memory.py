"""A job holds one block, whatever it does with it, and never the model."""

import subprocess
import sys

import pytest
import torch
import transformers
from thorough import some, thorough
from tiny import character_tokenizer, write_checkpoint

from billfish.checkpoints import write as files
from billfish.checkpoints.read import Checkpoint

BLOCKS, WIDE = 48, {"hidden_size": 512, "intermediate_size": 1024}
# A small job first: it loads the libraries and compiles the solver's kernel. VmHWM is the process's
# own peak; ru_maxrss would begin with that of the process that started it. Two blocks are solved;
# the others, of the same size, are rounded, with one scale tried instead of 17.
MEASURE = """
import sys
from itertools import count
from pathlib import Path
from billfish.offline.driver import quantize
from billfish.offline.request import QuantizeRequest
from billfish.schemes.w4a16 import W4A16
from billfish.solvers import clip, gptq

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

small, source, output, method, text, bits = sys.argv[1:]
steps = {"steps": 2, "end_to_end": 0} if method == "finetune" else {}

def run(model, name, group):
    scheme = W4A16(int(bits), group)
    asked = Path(model), Path(output) / name, scheme, method
    return quantize(QuantizeRequest(*asked, data=text, nsamples=2, seqlen=32, **steps))

run(small, "small", 32)
factor, calls = gptq.inverse_factor, count()

def two_blocks(hessian):
    if next(calls) < 8:
        return factor(hessian)
    clip.search_scales.__defaults__ = ((1.0,), ())

gptq.inverse_factor = two_blocks
before = peak()
report = run(source, "large", 128)
assert method != "finetune" or len(report["training"]["blocks"]) > 1
print(before, peak())
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Llama of equal blocks, in fp32."""
    config = transformers.LlamaConfig(
        **WIDE,
        num_hidden_layers=BLOCKS,
        vocab_size=128,
        num_attention_heads=8,
        num_key_value_heads=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    path = tmp_path_factory.mktemp("large") / "model"
    path.mkdir()
    block = torch.randn(1024, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    shards = []
    for index in [*range(BLOCKS), None]:
        prefix = "" if index is None else f"model.layers.{index}."
        inside = {
            name: (block if p.shape[1] == 512 else block.T)[: p.shape[0]].clone()
            if p.ndim == 2
            else torch.ones(p.shape)
            for name, p in model.named_parameters()
            if (name.startswith(prefix) if prefix else "layers" not in name)
        }
        shards.append(files.shard_name(len(shards) + 1, BLOCKS + 1))
        files.write_shard(path / shards[-1], inside)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    files.finish(path, shards)
    return path


def assert_streams(small, source, output, method, bits=4):
    """Weights are at least 4 times the resident memory that quantizing them adds at its peak."""
    text = output.with_suffix(".txt")
    text.write_text("tokens of a short text, as reading a long one takes memory. " * 9)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, small, source, output, method, text, str(bits)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    weights, added = Checkpoint(source).nbytes, after - before
    print(f"weights {weights / 2**20:.0f} MiB, added at the peak {added / 2**20:.0f} MiB")
    assert weights >= 4 * added, (weights, added)


@pytest.mark.parametrize("method", some(["gptq", "finetune"], 0))
def test_the_model_streams(method, source, tmp_path):
    small = write_checkpoint(tmp_path / "small", num_hidden_layers=1)
    assert_streams(small, source, tmp_path / "out", method)


@thorough
def test_the_experts_of_one_block_stream(tmp_path):
    """A single block: of its experts one is in memory, and what is packed already; in 2 bits, as
    a tiny block's weights must outweigh 20 MiB that any job adds."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=256,
        moe_intermediate_size=512,
        num_experts=128,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        vocab_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    source = tmp_path / "model"
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(source)
    character_tokenizer().save_pretrained(source)
    small = write_checkpoint(tmp_path / "small", "Qwen3MoeForCausalLM", num_hidden_layers=1)
    assert_streams(small, source, tmp_path / "out", "gptq", bits=2)
