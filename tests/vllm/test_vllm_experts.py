"""Mixtures of experts in vLLM: its own loader takes our w4a16 files; our plug-in refuses them.

vLLM's CPU kernel for experts of 4 bits wants AMX, so what is compared is what its loader puts
where, on one rank and on two, and not what the kernel makes of it.
"""

from itertools import product
from pathlib import Path

import pytest
import torch
from tiny import write_checkpoint
from vllm_harness import Failed, loaded, vllm

from billfish.checkpoints.read import Checkpoint
from billfish.offline.driver import quantize
from billfish.offline.request import QuantizeRequest
from billfish.schemes.registry import from_options

pytestmark = pytest.mark.vllm

LAYERS, EXPERTS = 2, 4
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": LAYERS,
    "vocab_size": 1024,
    "max_position_embeddings": 256,
}
# -> what its config calls experts' sizes, and the names of an expert's gate, up and down
KINDS = {
    "MixtralForCausalLM": (
        {"intermediate_size": 256},
        "model.layers.{}.block_sparse_moe.experts",
        ("w1", "w3", "w2"),
    ),
    "Qwen3MoeForCausalLM": (
        {"moe_intermediate_size": 256, "head_dim": 64},
        "model.layers.{}.mlp.experts",
        ("gate_proj", "up_proj", "down_proj"),
    ),
}
TENSORS = ("weight_packed", "weight_scale")


def written(architecture: str, folder: Path, scheme: str = "w4a16", **options) -> Path:
    dense = write_checkpoint(folder / "dense", architecture, **SIZES, **KINDS[architecture][0])
    made = from_options(scheme, {"group_size": 64, **options})
    quantize(QuantizeRequest(dense, folder / scheme, made, method="rtn", check=False))
    return folder / scheme


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("architecture", KINDS)
def test_stock_vllm_loads_experts(architecture, ranks, tmp_path):
    """Gate and up, split by outputs, lie one above the other; down is split by inputs."""
    directory = written(architecture, tmp_path)
    checkpoint = Checkpoint(directory)
    _, prefix, (gate, up, down) = KINDS[architecture]
    found = loaded(directory, tmp_path / "rank", ranks, dtype="bfloat16")
    for rank, parameters in enumerate(found):
        for layer, expert, kind in product(range(LAYERS), range(EXPERTS), TENSORS):
            experts = prefix.format(layer)

            def part(leaf: str, dim: int, name=f"{experts}.{expert}.{{}}.{kind}", rank=rank):
                return checkpoint.tensor(name.format(leaf)).chunk(ranks, dim)[rank]

            wanted = {
                f"w13_{kind}": torch.cat([part(gate, 0), part(up, 0)]),
                f"w2_{kind}": part(down, 1),
            }
            for name, tensor in wanted.items():
                (key,) = (k for k in parameters if k.startswith(experts) and k.endswith(name))
                assert torch.equal(parameters[key][expert], tensor), (key, expert)


@pytest.mark.parametrize("scheme", ["w4a16", "w4ax"])
def test_the_plugin_refuses_packed_experts(scheme, tmp_path):
    directory = written("MixtralForCausalLM", tmp_path, scheme)
    with pytest.raises(Failed, match=r"block_sparse_moe.experts: its experts are quant") as failed:
        vllm(directory, [[1, 2]], 1, quantization="billfish")
    assert "Loading weights took" not in str(failed.value)
