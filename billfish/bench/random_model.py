"""Models with random weights and the shapes of known models, for benchmarks without checkpoints.

Speed does not depend on the values of weights. transformers builds the modules on the meta device,
which takes no memory; then each weight is drawn in its dtype on the target device, module by
module. Quantized linears get random tensors of their scheme, arranged as those of a checkpoint are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from billfish.bench.shapes import SETS
from billfish.checkpoints.config import read_config, read_json
from billfish.checkpoints.match import BUILDING
from billfish.errors import UserError
from billfish.models.experts import Experts, gates_of, is_fused, split_experts
from billfish.models.linear import QuantLinear
from billfish.schemes.base import STD, Scheme
from billfish.schemes.registry import compile_kernels, head_scheme


@dataclass(frozen=True)
class _Rest:
    """What SETS does not have of a model."""

    model_type: str
    layers: int
    head: int
    vocabulary: int
    theta: float  # of RoPE
    context: int
    tied: bool = False


_REST = {
    "llama2-7b": _Rest("llama", 32, 128, 32000, 1e4, 4096),
    "llama3-8b": _Rest("llama", 32, 128, 128256, 5e5, 8192),
    "llama3-70b": _Rest("llama", 80, 128, 128256, 5e5, 8192),
    "mistral-7b": _Rest("mistral", 32, 128, 32768, 1e6, 32768),  # v0.3
    "qwen2.5-7b": _Rest("qwen2", 28, 128, 152064, 1e6, 32768),
    "qwen3-8b": _Rest("qwen3", 36, 128, 151936, 1e6, 40960),
    "smollm2-135m": _Rest("llama", 30, 64, 49152, 1e5, 8192, tied=True),
}
# Mixtures of experts, by what their config.json says
_QWEN3_30B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
_MIXTRAL_8X7B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_window": None,
}
_MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": ("qwen3_moe", _QWEN3_30B),
    "mixtral-8x7b": ("mixtral", _MIXTRAL_8X7B),
}
NAMES = (*_REST, *_MIXTURES)


class Silent:
    """A tokenizer with an empty vocabulary, so that the engine decodes nothing and texts stay
    empty."""

    eos_token_id = None
    chat_template = None
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012  always empty

    def __len__(self) -> int:
        return 0

    def __call__(self, text: str) -> Any:
        raise UserError(
            f"prompt {text[:20]!r}: a random model has no tokenizer; give a list of token ids."
        )

    def decode(self, tokens: Any, **_: Any) -> str:
        return ""


def numbered(vocabulary: int) -> Any:
    """A tokenizer with text for every token, which HTTP needs: ASCII characters first, and the
    other tokens are written as their number."""
    names = [chr(i) for i in range(min(128, vocabulary))]
    names += [f" {i}" for i in range(len(names), vocabulary)]
    core = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?")  # type: ignore[no-untyped-call]


def config_of(given: str) -> Any:
    """From a model's name, a config.json, or a directory with one."""
    if given in _REST:
        return _named(given)
    if given in _MIXTURES:
        kind, told = _MIXTURES[given]
        return AutoConfig.for_model(kind, **told)
    path = Path(given)
    if not path.exists():
        raise UserError(
            f"config {given!r}: no such model, file or directory. Known models: "
            f"{', '.join(NAMES)}; or give a config.json, or a directory with one."
        )
    told = read_config(path) if path.is_dir() else read_json(path)
    told.pop("quantization_config", None)  # the variant decides the weights' format
    kind = told.pop("model_type", None)
    try:
        return AutoConfig.for_model(kind, **told)
    except ValueError:
        raise UserError(
            f"{given}: model_type {kind!r} is not known to this transformers. Give the config.json "
            f"of a Llama, Mistral, Qwen2, Qwen3 or Phi-3 model, or one of {', '.join(NAMES)}."
        ) from None


def _named(name: str) -> Any:
    rest, (qkv, o, _, down) = _REST[name], SETS[name].linears
    return AutoConfig.for_model(
        rest.model_type,
        hidden_size=qkv.k,
        intermediate_size=down.k,
        num_hidden_layers=rest.layers,
        num_attention_heads=o.k // rest.head,
        num_key_value_heads=(qkv.n - o.k) // 2 // rest.head,
        head_dim=rest.head,
        vocab_size=rest.vocabulary,
        max_position_embeddings=rest.context,
        rope_parameters={"rope_type": "default", "rope_theta": rest.theta},
        sliding_window=None,
        tie_word_embeddings=rest.tied,
    )


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """On the meta device: without memory for weights."""
    with BUILDING, torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    return model.eval().requires_grad_(False)


def planned_bytes(model: Any, scheme: Scheme | None, head_bits: int | None = None) -> int:
    """Of an empty model's weights, once filled; raises if a scheme does not fit a linear."""
    if scheme is not None:
        split_experts(model)
    total: int = sum(parameter.nbytes for parameter in model.parameters())
    tied = model.config.tie_word_embeddings
    for _, linear, packed in _packed(model, scheme, head_bits):
        weight = linear.weight
        n, k = weight.shape
        total += sum(spec.nbytes for spec in packed.tensors(n, k, weight.dtype).values())
        total -= 0 if linear is model.lm_head and tied else weight.nbytes
    return total


def fill(
    model: Any,
    scheme: Scheme | None,  # of the linears, but lm_head; None: dense
    device: torch.device,
    say: Callable[[str], None] = lambda message: None,
    head_bits: int | None = None,  # of lm_head; None: dense
) -> None:
    """Gives an empty model its weights."""
    generator = torch.Generator(device).manual_seed(0)
    if scheme is not None:
        split_experts(model)
    linears = list(_packed(model, scheme, head_bits))
    compile_kernels({packed for _, _, packed in linears}, model.dtype, device, say)
    for name, linear, packed in linears:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _quantized(linear, packed, generator))
    # Rotary frequencies are computed, not drawn; on the meta device they had no values.
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=model.config).to(device)
    if model.config.tie_word_embeddings and not isinstance(model.lm_head, QuantLinear):
        model.lm_head.weight = model.model.embed_tokens.weight
    drawn: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type == "meta":
                if id(parameter) not in drawn:  # a tied one is drawn once
                    drawn[id(parameter)] = _drawn(name, parameter, generator)
                setattr(module, name, drawn[id(parameter)])


def held_bytes(model: Any) -> int:
    """Memory of all weights."""
    dense: int = sum(parameter.nbytes for parameter in model.parameters())
    return dense + sum(m.nbytes() for m in model.modules() if isinstance(m, QuantLinear))


def read_bytes(model: Any) -> int:
    """Weights that every step reads: all linears, lm_head included, of experts as many as one token
    is sent to. The embedding counts only where it is tied to lm_head: otherwise a step reads one
    row of it for each token."""
    total = 0.0
    active = getattr(model.config, "num_experts_per_tok", 0)
    for name, module in model.named_modules():
        fused = is_fused(module)
        if fused or isinstance(module, nn.Linear | QuantLinear):
            held = sum(parameter.nbytes for parameter in module.parameters())
            held += module.nbytes() if isinstance(module, QuantLinear) else 0
            owner = model.get_submodule(name.rsplit(".", 2)[0]) if name.count(".") > 1 else None
            count = len(module.gate_up_proj) if fused else getattr(owner, "count", 0)
            total += held * active / count if fused or isinstance(owner, Experts) else held
    return round(total)


def _packed(
    model: Any, scheme: Scheme | None, head_bits: int | None
) -> Iterator[tuple[str, nn.Linear, Scheme]]:
    """The linears that checkpoints hold packed, and their schemes: those of the blocks, and with
    `head_bits` lm_head."""
    gates = gates_of(model)
    for name, module in model.named_modules():
        inside = isinstance(module, nn.Linear) and module is not model.lm_head
        if scheme is not None and inside and name not in gates:
            yield name, module, scheme
    if head_bits is not None:
        n, k = model.lm_head.weight.shape
        yield "lm_head", model.lm_head, head_scheme(head_bits, n, k)


def _quantized(linear: nn.Linear, scheme: Scheme, generator: torch.Generator) -> QuantLinear:
    n, k = linear.weight.shape
    dtype = linear.weight.dtype
    made = QuantLinear(scheme, n, k, linear.bias is not None, dtype, "meta")
    made.set_tensors(scheme.random_tensors(n, k, dtype, generator))
    made.arrange()
    return made


def _drawn(name: str, like: Tensor, generator: torch.Generator) -> nn.Parameter:
    made = torch.empty_like(like, device=generator.device)
    if like.ndim > 1:
        made.normal_(0, STD, generator=generator)
    else:
        made.fill_(0 if name == "bias" else 1)
    return nn.Parameter(made, requires_grad=False)
