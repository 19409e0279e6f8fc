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

QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16}
# Mixtures of experts, as ARCHITECTURES; two of their layers, as experts are many linears
MIXTURES = {
    "MixtralForCausalLM": (
        "MixtralConfig",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        {**GROUPED, **QWEN_MOE, "shared_expert_intermediate_size": 128},
    ),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**GROUPED, **QWEN_MOE, "head_dim": 16}),
    "GptOssForCausalLM": (
        "GptOssConfig",
        {**GROUPED, **GPT_OSS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
}
MLA = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
DEEPSEEK = {**SMALL, **MLA, "num_key_value_heads": 4, "v_head_dim": 16, "n_group": 1}
DEEPSEEK |= {"n_routed_experts": 4, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
DEEPSEEK |= {"topk_group": 1, "num_experts_per_tok": 4, "n_shared_experts": 1}
FOUR = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
PERIODS = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
# Models that the engine does not run: mixtures whose tokens all go to all experts, and models with
# recurrent layers; two layers each.
OTHERS = {
    "AfmoeForCausalLM": (
        "AfmoeConfig",
        {**GROUPED, **FOUR, "head_dim": 16, "num_dense_layers": 1, "num_shared_experts": 1},
    ),
    "PhimoeForCausalLM": (
        "PhimoeConfig",
        {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "GraniteMoeForCausalLM": (
        "GraniteMoeConfig",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 4},
    ),
    "Ernie4_5_MoeForCausalLM": (
        "Ernie4_5_MoeConfig",
        {**GROUPED, "moe_num_experts": 4, "moe_k": 4, "moe_intermediate_size": 64}
        | {"moe_num_shared_experts": 1, "moe_layer_start_index": 0},
    ),
    "DeepseekV3ForCausalLM": ("DeepseekV3Config", DEEPSEEK),
    "DeepseekV32ForCausalLM": (
        "DeepseekV32Config",
        {**DEEPSEEK, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 64},
    ),
    "Qwen3NextForCausalLM": (
        "Qwen3NextConfig",
        {**GROUPED, **FOUR, **DELTA, "linear_value_head_dim": 16, "head_dim": 16}
        | {"shared_expert_intermediate_size": 64}
        | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "JambaForCausalLM": (
        "JambaConfig",
        {**GROUPED, **PERIODS, "num_experts": 4, "num_experts_per_tok": 4}
        | {"expert_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 32},
    ),
    "BambaForCausalLM": ("BambaConfig", {**GROUPED, **MAMBA, "attn_layer_indices": [1]}),
    "MambaForCausalLM": ("MambaConfig", {**SMALL, "state_size": 16, "time_step_rank": 32}),
    "Lfm2MoeForCausalLM": (
        "Lfm2MoeConfig",
        {**GROUPED, **FOUR, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
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
    config_class, values = (ARCHITECTURES | MIXTURES | OTHERS)[architecture]
    changes = changes if architecture in ARCHITECTURES else {"num_hidden_layers": 2, **changes}
    config = getattr(transformers, config_class)(**{**values, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms and biases that do something
            parameter.data += 0.1 * torch.randn_like(parameter)
        elif "embed" not in name:
            parameter.data[..., ::7] *= 3  # channels that matter more than others
    model.save_pretrained(path, max_shard_size=shard)
    character_tokenizer().save_pretrained(path)
    return path
