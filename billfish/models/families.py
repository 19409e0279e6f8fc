"""The architectures whose blocks compute what Llama's do, but for what a Family says. Others are
refused with what is different about them, never run approximately.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from billfish.errors import UserError


@dataclass(frozen=True)
class Family:
    """How one architecture of transformers differs from the others."""

    model_type: str
    attention: frozenset[str]  # names of all children of self_attn
    # Which layers use config.sliding_window. Llama ignores it; Mistral, Mixtral, Phi-3 and
    # Qwen3-MoE use it in every layer; other Qwens have a type for each layer in layer_types
    # (derived from use_sliding_window and max_window_layers if a checkpoint has none).
    windows: str  # "none", "all" or "by type"
    spare: frozenset[str] = frozenset()  # children that self_attn may have, by its config

    def window(self, config: Any, index: int) -> int | None:
        """The sliding window of a layer."""
        if self.windows == "none":
            return None
        if self.windows == "by type" and config.layer_types[index] != "sliding_attention":
            return None
        window: int | None = config.sliding_window
        return window


_SPLIT = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_NORMS = frozenset({"q_norm", "k_norm"})
_NORMED = _SPLIT | _NORMS
_FUSED = frozenset({"qkv_proj", "o_proj"})
FAMILIES = {
    "LlamaForCausalLM": Family("llama", _SPLIT, "none"),
    "MistralForCausalLM": Family("mistral", _SPLIT, "all"),
    "Phi3ForCausalLM": Family("phi3", _FUSED, "all"),
    "Qwen2ForCausalLM": Family("qwen2", _SPLIT, "by type"),
    "Qwen3ForCausalLM": Family("qwen3", _NORMED, "by type"),
    "MixtralForCausalLM": Family("mixtral", _SPLIT, "all"),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", _SPLIT, "by type"),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _NORMED, "all"),
    "GptOssForCausalLM": Family("gpt_oss", _SPLIT | {"sinks"}, "by type"),
    "Glm4MoeForCausalLM": Family("glm4_moe", _SPLIT, "none", spare=_NORMS),
    "Dots1ForCausalLM": Family("dots1", _NORMED, "by type"),
    "HYV3ForCausalLM": Family("hy_v3", _NORMED, "none"),
    "SeedOssForCausalLM": Family("seed_oss", _SPLIT, "none"),
    "MinistralForCausalLM": Family("ministral", _SPLIT, "by type"),
    "CwmForCausalLM": Family("cwm", _SPLIT, "by type"),
}
_TOP = frozenset({"model", "lm_head"})
_MODEL = frozenset({"embed_tokens", "layers", "norm", "rotary_emb"})
_BLOCK = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})

# RoPE types with constant frequencies. Those of transformers' other types ("dynamic", "longrope")
# depend on the longest sequence of the call: results would depend on the rest of the batch, and
# keys already in the cache would become wrong as a sequence grows.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")

# Settings that explain, in the error message, how a model outside FAMILIES differs from Llama.
# They decide nothing: transformers ignores them in the architectures above.
_TELLTALES = {
    "num_local_experts": "experts",
    "num_experts": "experts",
    "n_routed_experts": "experts",
    "attn_logit_softcapping": "softcapped attention scores",
    "final_logit_softcapping": "softcapped logits",
    "logits_scaling": "scaled logits",
    "logit_scale": "scaled logits",
    "residual_multiplier": "scaled residuals",
    "embedding_multiplier": "scaled embeddings",
    "no_rope_layers": "layers without RoPE",
    "num_kv_shared_layers": "layers that share keys and values",
    "kv_lora_rank": "latent attention",
}


def unlike_llama(model: Any) -> list[str]:
    """How a model's blocks differ from Llama's; empty for a model that the engine runs. Weights are
    not read."""
    config: Any = getattr(model, "config", None)
    family = FAMILIES.get(type(model).__name__)
    if family is None or family.model_type != getattr(config, "model_type", None):
        found = _told_by(config) + _unlike(model, None)
        return found or ["more than its modules show; it was never compared"]
    return _unlike(model, family) or _unlike_settings(model, family)


def family_of(model: Any) -> Family:
    """The family of a model; raises UserError if its blocks are not Llama's."""
    if found := unlike_llama(model):
        raise refusal(model, found)
    return FAMILIES[type(model).__name__]


def _parts(module: nn.Module) -> set[str]:
    """Names of a module's children and own parameters, without dropout, which does nothing here."""
    children = {n for n, m in module.named_children() if not isinstance(m, nn.Dropout)}
    return children | {name for name, _ in module.named_parameters(recurse=False)}


def _compare(place: str, found: set[str], expected: frozenset[str]) -> list[str]:
    more, less = sorted(found - expected), sorted(expected - found)
    return [f"{place}.{name}" for name in more] + [f"{place} without {name}" for name in less]


def _unlike(model: Any, family: Family | None) -> list[str]:
    """Modules that the model has and Llama has not, or the reverse; without a family its attention
    may be that of any."""
    if not hasattr(model, "lm_head"):
        return ["no lm_head (a model without its head gives no logits)"]
    if not hasattr(getattr(model, "model", None), "layers"):
        return ["no blocks at model.layers"]
    found = _compare("top", _parts(model), _TOP) + _compare("model", _parts(model.model), _MODEL)
    for layer in model.model.layers:  # all of them: a single layer may differ
        found += _compare("block", _parts(layer), _BLOCK)
        if "self_attn" in _parts(layer):
            parts = _parts(layer.self_attn)
            families = [family] if family else list(FAMILIES.values())
            each = [_compare("self_attn", parts - one.spare, one.attention) for one in families]
            nearest: list[str] = min(each, key=len)
            found += nearest
        if found:
            return found
    return found


def _unlike_settings(model: Any, family: Family) -> list[str]:
    """Settings of a known architecture that Decoder does not implement."""
    found = []
    config, rope = model.config, model.model.rotary_emb.rope_type
    if rope not in _FIXED_ROPE:
        found.append(f"RoPE {rope!r}, whose frequencies follow the longest sequence of a batch")
    if not getattr(config, "is_causal", True):
        found.append("attention to tokens that come later (is_causal: false)")
    if family.windows == "by type":
        kinds = set(config.layer_types)
        found += [
            f"{kind} layers" for kind in sorted(kinds - {"full_attention", "sliding_attention"})
        ]
        if "sliding_attention" in kinds and config.sliding_window is None:
            found.append("sliding_attention layers without a sliding_window")
    return found


def _told_by(config: Any) -> list[str]:
    told = (reason for name, reason in _TELLTALES.items() if getattr(config, name, None))
    return list(dict.fromkeys(told))


def refusal(model: Any, found: list[str]) -> UserError:
    path = getattr(model, "name_or_path", "")
    kind = getattr(getattr(model, "config", None), "model_type", "no model_type")
    return UserError(
        f"{path + ': ' if path else ''}the engine does not run this {type(model).__name__} "
        f"({kind}). Unlike Llama, and not written: {'; '.join(found)}. It runs "
        f"{', '.join(FAMILIES)}. transformers itself runs the model: billfish.load(path), then "
        f"model.generate."
    )
