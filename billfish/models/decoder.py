"""Forward pass of the Llama family for the engine: over a flat list of tokens of many sequences,
with attention left to a callback.

`Decoder` wraps a model loaded by transformers and calls the model's own modules, so every linear
(nn.Linear, QuantLinear), norm and RoPE variant is the one that transformers runs; only the order of
the calls is written again here. Cache, mask and sampling belong to the caller. `of` refuses a model
whose blocks compute anything else (families.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from billfish.models.experts import Choice, Experts
from billfish.models.families import family_of, refusal
from billfish.models.joined import Product, gated, joined, side_by_side, stack
from billfish.models.prepacked import prepack
from billfish.schemes.base import GatedOp

# (layer, q, k, v) -> (tokens, heads, head_dim). q is (tokens, heads, head_dim), k and v are
# (tokens, kv_heads, head_dim); RoPE is already applied to q and k. All three are views into wider
# rows: only their last two dimensions are contiguous.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes that a KV cache and an attention kernel need."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int  # max_position_embeddings
    # Sliding window of each layer: position p attends to p - window + 1 ... p, as transformers
    # counts; None: full causal attention.
    windows: tuple[int | None, ...]
    scale: float  # factor of q k^T

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, (self.heads, self.kv_heads)
        assert len(self.windows) == self.layers, (self.windows, self.layers)


_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")


class Decoder:
    """Embedding, blocks, final norm and head of one model; build it with `of`. It shares the
    model's modules: the model must not be moved or cast afterwards."""

    def __init__(self, model: Any, shape: Shape) -> None:
        self.shape = shape
        self.embed = model.model.embed_tokens
        self._rotary = model.model.rotary_emb
        self.layers = list(model.model.layers)[: shape.layers]
        self.norm = model.model.norm
        self.head = model.lm_head
        # Joined products: on a CPU they save 90 of 210 calls a step.
        self._qkv = [_one(layer.self_attn, "qkv_proj", _QKV) for layer in self.layers]
        # Layers whose MLP is a router with experts: transformers' module, or models/experts.py's
        # for packed ones.
        self.mixtures = {i for i, layer in enumerate(self.layers) if hasattr(layer.mlp, "experts")}
        self._choices = {index: self._stack(self.layers[index].mlp) for index in self.mixtures}
        dense = {i: layer.mlp for i, layer in enumerate(self.layers) if i not in self.mixtures}
        self._gated = {i: _gated(mlp) for i, mlp in dense.items()}
        self._gate_up = {
            i: op.both if (op := self._gated[i]) else _one(mlp, "gate_up_proj", _GATE_UP)
            for i, mlp in dense.items()
        }
        self.dtype: torch.dtype = self.embed.weight.dtype
        self.device: torch.device = self.embed.weight.device

    @classmethod
    def of(cls, model: Any) -> "Decoder":
        """The decoder of a model loaded by transformers; raises UserError if its blocks are not
        Llama's."""
        family, config = family_of(model), model.config
        devices = sorted({str(parameter.device) for parameter in model.parameters()})
        if len(devices) > 1 or devices == ["meta"]:
            told = f"weights on {', '.join(devices)}: all must be in memory, on one device"
            raise refusal(model, [told])
        attention = model.model.layers[0].self_attn
        layers: int = config.num_hidden_layers
        return cls(
            model,
            Shape(
                layers=layers,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=attention.head_dim,
                vocabulary=config.vocab_size,
                context=config.max_position_embeddings,
                windows=tuple(family.window(config, index) for index in range(layers)),
                scale=attention.scaling,
            ),
        )

    def prepack(self) -> None:
        """Convert dense weights to the layout that the CPU's library multiplies fastest. This frees
        the weights of the model's own linears: only for a model that nothing else uses."""
        for index, layer in enumerate(self.layers):
            attention, mlp = layer.self_attn, layer.mlp
            parts = [getattr(attention, name) for name in _QKV if hasattr(attention, name)]
            self._qkv[index] = prepack(self._qkv[index], *parts)
            attention.o_proj = prepack(attention.o_proj)
            if index not in self.mixtures:
                parts = [getattr(mlp, name) for name in _GATE_UP if hasattr(mlp, name)]
                self._gate_up[index] = prepack(self._gate_up[index], *parts)
                mlp.down_proj = prepack(mlp.down_proj)
        # A tied head is then stored twice, as the embedding lookup needs plain rows. It saves 5 %
        # of a step of SmolLM2.
        tied = type(self.head) is nn.Linear and self.head.weight is self.embed.weight
        self.head = prepack(self.head, keep=tied)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,  # (tokens,) int64, of any sequences, in any order
        positions: Tensor,  # (tokens,) int64, of each token in its sequence
        attend: Attend,  # called once a layer, in order; must know each token's sequence
    ) -> Tensor:  # (tokens, hidden), after the final norm
        hidden: Tensor = self.embed(tokens)
        cos, sin = (table[:, None] for table in self.rope(positions))
        low, high = sin.chunk(2, -1)
        # negate here once instead of in every layer: see apply_rope
        sin = torch.cat((-low, high), -1)
        for index, layer in enumerate(self.layers):
            mixed = attend(index, *self._project(index, layer.input_layernorm(hidden), cos, sin))
            hidden = hidden + layer.self_attn.o_proj(mixed.flatten(1))
            hidden = hidden + self._mlp(index, layer.post_attention_layernorm(hidden))
        normed: Tensor = self.norm(hidden)
        return normed

    @torch.no_grad()
    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, (tokens, rotary dimensions) each, in the model's dtype."""
        like = self.embed.weight[:1]  # _rotary takes only its dtype and device
        cos, sin = self._rotary(like, positions[None])
        if cos.shape[-1] == len(self._rotary.inv_freq):  # gpt-oss: a number for two dimensions
            cos, sin = (torch.cat((table, table), -1) for table in (cos, sin))
        return cos[0], sin[0]

    def sinks(self, index: int) -> Tensor | None:
        """(kv_heads, heads of each) fp32: scores that join each softmax of a layer (gpt-oss)."""
        found = getattr(self.layers[index].self_attn, "sinks", None)
        return None if found is None else found.detach().float().view(self.shape.kv_heads, -1)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:  # (rows, hidden) -> (rows, vocabulary) fp32
        """Pass only rows that are sampled: the head is the widest linear of the model."""
        logits: Tensor = self.head(hidden)
        return logits.float()

    def qkv(self, index: int) -> Product:
        """(tokens, hidden) -> (tokens, (heads + 2 kv_heads) * head_dim): q, k, v of a layer."""
        return self._qkv[index]

    def gate_up(self, index: int) -> Product:
        """(tokens, hidden) -> (tokens, 2 * intermediate): all gates of a layer, then all ups."""
        return self._gate_up[index]

    def gated(self, index: int) -> Product | None:
        """(tokens, hidden) -> (tokens, intermediate): silu(gate) * up of a layer, with SwiGLU in
        the product's epilogue; None if its op has no such kernel."""
        return self._gated[index]

    def mixture(self, index: int, x: Tensor) -> Tensor:
        """(tokens, hidden) -> (tokens, hidden): router and experts of a layer."""
        mlp, choice = self.layers[index].mlp, self._choices[index]
        if choice is None:
            found = mlp(x[None])  # gpt-oss gives its router's weights, too
            mixed: Tensor = found[0] if isinstance(found, tuple) else found
            return mixed[0]
        op, logits = mlp.experts.op, nn.functional.linear(x, mlp.gate.weight)
        sums: Tensor = op(x, *op.choose(logits, choice.several, choice.normalized, choice.dtype))
        return sums

    def _stack(self, mlp: Any) -> Choice | None:
        """Lets the experts of a mixture run as one op, if they can; then how its router chooses,
        where the two are all of it and the op can choose alike."""
        if not isinstance(mlp.experts, Experts):
            return None
        stack(mlp.experts, self.embed.weight.dtype)
        plain = {name for name, _ in mlp.named_children()} == {"gate", "experts"}
        return Choice.of(mlp.gate) if plain and mlp.experts.op is not None else None

    def slow_mixtures(self) -> bool:
        """Whether experts of a layer run one after the other, as many as the host has counted."""
        mlps = (self.layers[index].mlp for index in self.mixtures)
        return any(getattr(mlp.experts, "op", None) is None for mlp in mlps)

    def _project(
        self, index: int, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of one layer, (tokens, heads, head_dim) each, with RoPE applied to q and k."""
        heads, kv_heads, head_dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        attention = self.layers[index].self_attn
        together = self.qkv(index)(x).view(len(x), heads + 2 * kv_heads, head_dim)
        qk, v = torch.split(together, [heads + kv_heads, kv_heads], dim=1)
        if hasattr(attention, "q_norm"):  # Qwen3 normalizes each head
            qk = torch.cat((attention.q_norm(qk[:, :heads]), attention.k_norm(qk[:, heads:])), 1)
        q, k = torch.split(apply_rope(qk, cos, sin), [heads, kv_heads], dim=1)
        return q, k, v

    def _mlp(self, index: int, x: Tensor) -> Tensor:
        mlp = self.layers[index].mlp
        if index in self.mixtures:
            return self.mixture(index, x)
        gated = self.gated(index)
        if gated is not None:
            y = gated(x)
        else:
            gate, up = self.gate_up(index)(x).chunk(2, -1)
            y = _act(mlp)(gate) * up
        out: Tensor = mlp.down_proj(y)
        return out


def _one(module: nn.Module, fused: str, names: tuple[str, ...]) -> Product:
    """The linears as one product: Phi-3's fused one, a joined one, or one linear after the
    other."""
    own: Product | None = getattr(module, fused, None)
    return own or joined(module, *names) or side_by_side(module, *names)


def _gated(mlp: Any) -> GatedOp | None:
    if type(_act(mlp)).__name__ not in ("SiLU", "SiLUActivation"):  # torch's, transformers'
        return None
    names = ("gate_up_proj",) if hasattr(mlp, "gate_up_proj") else _GATE_UP
    return gated(mlp, *names)


def _act(mlp: Any) -> Product:
    act: Product = getattr(mlp, "activation_fn", None) or mlp.act_fn  # Phi-3's name, all others'
    return act


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in fewer kernels than transformers' apply_rotary_pos_emb, with the same bits. Instead of
    swapping the halves of x and negating one, it rolls x and takes the sign from `sin`. Dimensions
    beyond those of `cos` are left unchanged (partial RoPE)."""
    rotary = cos.shape[-1]
    rotated = x[..., :rotary]
    rotated = rotated * cos + rotated.roll(rotary // 2, -1) * sin
    if rotary == x.shape[-1]:
        return rotated
    return torch.cat((rotated, x[..., rotary:]), -1)
