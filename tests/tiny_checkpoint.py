"""A tiny random Llama as a checkpoint, quantized or not, and ways to damage it."""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from billfish.checkpoints.write import MANIFEST


def tiny_llama(**changes):
    """Untied, 2 blocks, seven linears each."""
    values = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**values | changes))


def all_tensors(path):
    return {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def edit(path, file, change):
    """Rewrite a shard and take the manifest away: what is left to find is in the tensors."""
    tensors = load_file(path / file)
    change(tensors)
    save_file(tensors, path / file, metadata={"format": "pt"})
    (path / MANIFEST).unlink(missing_ok=True)


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
