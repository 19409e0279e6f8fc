"""Many families through quantizing and transformers: mixtures whose routers, names or files are
unlike Mixtral's, latent attention, recurrent layers."""

import pytest
import torch
import transformers
from jobs import request as asked
from safetensors.torch import load_file, save_file
from test_written_experts import dense_twin
from thorough import some
from tiny import OTHERS, write_checkpoint

from billfish.checkpoints import match
from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.tensors import read_tensors
from billfish.checkpoints.verify import verify
from billfish.errors import UserError
from billfish.models.blocks import StreamedModel
from billfish.models.linear import QuantLinear
from billfish.models.load import load
from billfish.offline.driver import quantize
from billfish.offline.plan import plan
from billfish.schemes.w4a16 import W4A16

# What must stay dense although it is a linear, or acts like one
DENSE = {
    "AfmoeForCausalLM": "model.layers.1.mlp.router.gate",
    "PhimoeForCausalLM": "model.layers.1.mlp.router",
    "GraniteMoeForCausalLM": "model.layers.1.block_sparse_moe.router",
    "Ernie4_5_MoeForCausalLM": "model.layers.1.mlp.gate",
    "DeepseekV3ForCausalLM": "model.layers.1.mlp.gate",
    "DeepseekV32ForCausalLM": "model.layers.1.self_attn.indexer.wq_b",
    "Qwen3NextForCausalLM": "model.layers.1.mlp.shared_expert_gate",
    "JambaForCausalLM": "model.layers.0.mamba.dt_proj",
    "BambaForCausalLM": "model.layers.0.mamba.conv1d",
    "MambaForCausalLM": "backbone.layers.0.mixer.dt_proj",
    "Lfm2MoeForCausalLM": "model.layers.1.feed_forward.gate",
}


@pytest.mark.parametrize("architecture", some([*OTHERS], 0, 1, 2, 5, 6, 8, 9))
def test_they_are_quantized_whole_and_run_packed(architecture, tmp_path, text):
    source = write_checkpoint(tmp_path / "source", architecture)
    out, scheme = tmp_path / "out", W4A16(8, 32)
    report = quantize(asked(source, out, text, scheme=scheme, stored_dtype=torch.float32))
    assert verify(out)["problems"] == []
    assert {*read_tensors(out)} == {*Checkpoint(source)}  # every tensor is accounted for
    assert all(each["error"] < 1e-3 for each in report["layers"])
    model, _ = load(out, dtype=torch.float32)
    packed = [name for name, each in model.named_modules() if isinstance(each, QuantLinear)]
    assert len(packed) == len(report["layers"]) > 5
    assert isinstance(model.get_submodule(DENSE[architecture]).weight, torch.nn.Parameter)
    assert not any(name.startswith(DENSE[architecture]) for name in packed)
    twin, ids = dense_twin(source, model), torch.randint(3, 100, (2, 40))
    with torch.no_grad():
        found, expected = model(ids).logits, twin(ids).logits
    assert (found - expected).norm() < 1e-3 * expected.norm()


def test_experts_that_files_fuse_are_those_of_the_model(tmp_path):
    """Granite: (experts, outputs, inputs), gates first, under other names than the model's."""
    source = write_checkpoint(tmp_path / "source", "GraniteMoeForCausalLM")
    model = StreamedModel(Checkpoint(source), torch.float32, torch.device("cpu"))
    held = Checkpoint(source)
    both, down = (
        held.tensor(f"model.layers.0.block_sparse_moe.{name}_linear.weight")
        for name in ("input", "output")
    )
    parts = {"gate_proj": both[:, :128], "up_proj": both[:, 128:], "down_proj": down}
    for leaf, wanted in parts.items():
        for expert in range(4):
            name = f"model.layers.0.block_sparse_moe.experts.{expert}.{leaf}.weight"
            assert torch.equal(model.checkpoint.tensor(name), wanted[expert])
            assert model.checkpoint.entries[name].shape == wanted[expert].shape
            assert model.checkpoint.entries[name].nbytes == wanted[expert].nbytes


@pytest.mark.parametrize(
    ("architecture", "name", "shape", "said"),
    [
        ("Llama", "experts.999999999.gate_proj.weight", (4, 4), "missing: the layer has"),
        ("Llama", "experts.gate_up_proj", (99999999, 0, 0), "has no such tensor"),
        ("GptOss", "experts.gate_up_proj", (99999999, 0, 0), "gate_up_proj' has shape"),
        ("GptOss", "experts.gate_up_proj", (99999, 1, 2), "gate_up_proj' has shape"),
        ("GptOss", "experts.gate_up_proj", (5, 64, 256), "is in the files, and .* 4 experts"),
    ],
    ids=["number", "llama", "empty", "many", "one more"],
)
def test_numbers_of_experts_as_large_as_one_likes(architecture, name, shape, said, tmp_path, text):
    """One message, in seconds and in little memory."""
    source = write_checkpoint(tmp_path / "source", f"{architecture}ForCausalLM")
    held = load_file(source / "model.safetensors")
    held[f"model.layers.0.mlp.{name}"] = torch.zeros(shape)
    save_file(held, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=said):
        plan(asked(source, None, text))
    assert verify(source)["problems"]


def test_what_transformers_could_not_load_again_is_refused_before_any_work(
    tmp_path, text, monkeypatch
):
    """Mistral 4's text model: a class for writing text that no config leads to."""
    source = write_checkpoint(tmp_path / "source")
    monkeypatch.setattr(match.transformers, "MODEL_FOR_CAUSAL_LM_MAPPING", {})
    with pytest.raises(UserError, match="model_type 'llama' is no causal LM of transformers"):
        plan(asked(source, None, text))


def test_blocks_that_share_weights_are_refused(tmp_path, text):
    config = transformers.Zamba2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        mamba_ngroups=1,
        n_mamba_heads=8,
        mamba_headdim=16,
        mamba_d_state=16,
    )
    transformers.Zamba2ForCausalLM(config).save_pretrained(tmp_path / "zamba")
    with pytest.raises(UserError, match=r"its blocks share weights \(model\.layers\.3\."):
        quantize(asked(tmp_path / "zamba", tmp_path / "out", text))
