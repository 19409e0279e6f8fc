"""Tiny random checkpoints of many architectures, with a tokenizer of one character a token."""

import string
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.08,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
OPT = {"ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.08}
GEMMA = {**GROUPED, "head_dim": 16, "sliding_window": 16}
# architecture -> (config class, its parameters)
ARCHITECTURES = {
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "MistralForCausalLM": ("MistralConfig", {**GROUPED, "sliding_window": 32}),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED),
    "Qwen3ForCausalLM": ("Qwen3Config", {**GROUPED, "head_dim": 16}),
    "Gemma2ForCausalLM": ("Gemma2Config", GEMMA),
    "OPTForCausalLM": ("OPTConfig", {**SMALL, **OPT}),
    "FalconForCausalLM": ("FalconConfig", {**SMALL, "new_decoder_architecture": False}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SMALL),
    "BertModel": ("BertConfig", SMALL),
}


def character_tokenizer():
    characters = ["<eos>", "<unk>", *string.printable]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )


def write_checkpoint(path: Path, architecture="LlamaForCausalLM", shard="10GB", **changes) -> Path:
    config_class, values = ARCHITECTURES[architecture]
    config = getattr(transformers, config_class)(**{**values, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms and biases that do something
            parameter.data += 0.1 * torch.randn_like(parameter)
        elif "embed" not in name:
            parameter.data[:, ::7] *= 3  # channels that matter more than others
    model.save_pretrained(path, max_shard_size=shard)
    character_tokenizer().save_pretrained(path)
    return path
