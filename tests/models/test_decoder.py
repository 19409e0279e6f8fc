"""The engine's decoder against transformers' own forward pass, and the models it must refuse."""

import copy
from itertools import pairwise

import pytest
import torch
import transformers
from tiny import ARCHITECTURES, GROUPED, write_checkpoint
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from billfish.errors import UserError
from billfish.models.decoder import Decoder
from billfish.models.linear import QuantLinear
from billfish.offline.driver import quantize
from billfish.offline.request import QuantizeRequest
from billfish.schemes.base import Reference
from billfish.schemes.w4a16 import W4A16

QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHARED |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
SHARED |= {"head_dim": 16}
CONFIGS = {
    **ARCHITECTURES,
    "Phi3ForCausalLM": ("Phi3Config", GROUPED),
    "GraniteForCausalLM": (
        "GraniteConfig",
        {**GROUPED, "logits_scaling": 4.0, "residual_multiplier": 0.5},
    ),
    "MixtralForCausalLM": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        {**GROUPED, **QWEN_MOE, "mlp_only_layers": [1], "shared_expert_intermediate_size": 96},
    ),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**GROUPED, **QWEN_MOE, "head_dim": 16}),
    "GptOssForCausalLM": (
        "GptOssConfig",
        {**GROUPED, "head_dim": 16, "num_local_experts": 4, "sliding_window": 8},
    ),
    "Glm4MoeForCausalLM": ("Glm4MoeConfig", {**GROUPED, **SHARED}),
    "Dots1ForCausalLM": ("Dots1Config", {**GROUPED, **SHARED}),
    "HYV3ForCausalLM": (
        "HYV3Config",
        {**GROUPED, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
        | {"num_shared_experts": 1, "moe_intermediate_size": 48},
    ),
    "SeedOssForCausalLM": ("SeedOssConfig", {**GROUPED, "head_dim": 16}),
    "MinistralForCausalLM": (
        "MinistralConfig",
        {**GROUPED, "head_dim": 16, "sliding_window": 8},
    ),
    "CwmForCausalLM": ("CwmConfig", {**GROUPED, "head_dim": 16, "sliding_window": 8}),
    "SmolLM3ForCausalLM": ("SmolLM3Config", GROUPED),
    "CohereForCausalLM": ("CohereConfig", GROUPED),
    "GemmaForCausalLM": ("GemmaConfig", {**GROUPED, "head_dim": 16}),
    "LlamaModel": ("LlamaConfig", GROUPED),
}
LENGTHS = (5, 40, 1, 23)
# fp32, relative to the largest logit: only the order of sums differs (measured: below 1e-6)
TOLERANCE = 1e-4


def tiny_model(architecture, dtype=torch.float32, **changes):
    config_class, values = CONFIGS[architecture]
    config = getattr(transformers, config_class)(**{**values, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norms and biases that do something
            parameter.data += 0.3 * torch.randn_like(parameter)
        elif "q_proj" in name or "qkv_proj" in name:
            parameter.data *= 4  # scores large enough that a wrong mask or angle is seen
    return model.to(dtype)


def rope(kind, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def causal(decoder, lengths):
    """Attention of several sequences that lie one after another."""

    def attend(layer, q, k, v):
        shape = decoder.shape
        assert q.shape == (sum(lengths), shape.heads, shape.head_dim)
        assert k.shape == v.shape == (sum(lengths), shape.kv_heads, shape.head_dim)
        assert all(t.stride()[1:] == (shape.head_dim, 1) for t in (q, k, v))
        each = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
        return torch.cat([one(decoder, layer, *sequence) for sequence in each])

    return attend


def one(decoder, layer, q, k, v):
    """Attention of one sequence, whose last tokens q belongs to."""
    at = torch.arange(len(k))
    queries, window = at[-len(q) :, None], decoder.shape.windows[layer]
    seen = at <= queries
    if window is not None:
        seen &= at > queries - window
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    sinks = decoder.sinks(layer)
    if sinks is not None:
        k, v = (t.repeat_interleave(sinks.shape[1], 1) for t in (k, v))
        scores = (q @ k.mT * decoder.shape.scale).masked_fill(~seen, -torch.inf)
        joined = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, joined), -1).softmax(-1)[..., :-1]
        return (weights @ v)[0].transpose(0, 1)
    mixed = scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=decoder.shape.scale, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)


def assert_same(model, tolerance=TOLERANCE):
    """Several sequences in one flat batch give each the logits that transformers gives it alone."""
    decoder = Decoder.of(model)
    tokens = torch.randint(1, decoder.shape.vocabulary, (sum(LENGTHS),))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    got = decoder.logits(decoder.forward(tokens, positions, causal(decoder, LENGTHS)))
    assert got.dtype == torch.float32 and got.shape == (len(tokens), decoder.shape.vocabulary)
    assert not got.requires_grad
    for sequence, logits in zip(tokens.split(LENGTHS), got.split(LENGTHS), strict=True):
        with torch.no_grad():
            expected = model(sequence[None]).logits[0].float()
        error = (logits - expected).abs().max() / expected.abs().max()
        assert error < tolerance, error
    return decoder


WINDOW = {"use_sliding_window": True, "sliding_window": 8}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
ALL, NONE = (8, 8, 8), (None, None, None)
CASES = {
    "llama": ("LlamaForCausalLM", {}, NONE),
    "one key for each query": ("LlamaForCausalLM", {"num_key_value_heads": 4}, NONE),
    "biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, NONE),
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}, NONE),
    "wide heads": ("LlamaForCausalLM", {"head_dim": 32}, NONE),
    "window unheeded": ("LlamaForCausalLM", {"sliding_window": 8}, NONE),
    "linear": ("LlamaForCausalLM", rope("linear", factor=4.0), NONE),
    "llama3": (
        "LlamaForCausalLM",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        NONE,
    ),
    "yarn": (
        "Qwen2ForCausalLM",
        rope("yarn", factor=4.0, original_max_position_embeddings=32),
        NONE,
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": 8}, ALL),
    "mistral without": ("MistralForCausalLM", {"sliding_window": None}, NONE),
    "qwen2": ("Qwen2ForCausalLM", {"sliding_window": 8}, NONE),  # use_sliding_window is false
    "qwen2 windows": (
        "Qwen2ForCausalLM",
        {**WINDOW, "max_window_layers": 1},
        (None, 8, 8),
    ),
    "qwen3": ("Qwen3ForCausalLM", {}, NONE),
    "qwen3 tied": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}, NONE),
    "qwen3 types": (
        "Qwen3ForCausalLM",
        {**WINDOW, "layer_types": TYPES},
        (8, None, 8),
    ),
    "phi3": ("Phi3ForCausalLM", {}, NONE),
    "phi3 window": ("Phi3ForCausalLM", {"sliding_window": 8}, ALL),
    "mixtral": ("MixtralForCausalLM", {"sliding_window": 8}, ALL),
    "qwen2 moe": ("Qwen2MoeForCausalLM", {}, NONE),  # a dense layer between two mixtures
    "qwen2 moe windows": (
        "Qwen2MoeForCausalLM",
        {**WINDOW, "max_window_layers": 3},
        (8, None, 8),
    ),
    "qwen3 moe": ("Qwen3MoeForCausalLM", {}, NONE),
    "qwen3 moe windows": ("Qwen3MoeForCausalLM", WINDOW, ALL),
    "gpt-oss": ("GptOssForCausalLM", {}, (8, None, 8)),  # its default RoPE is yarn
    "gpt-oss, RoPE of no type": ("GptOssForCausalLM", rope("default"), (8, None, 8)),
    "glm4 moe": ("Glm4MoeForCausalLM", rope("default", partial_rotary_factor=0.5), NONE),
    "glm4 moe normed": ("Glm4MoeForCausalLM", {"use_qk_norm": True}, NONE),
    "dots1": ("Dots1ForCausalLM", {}, NONE),
    "dots1 windows": ("Dots1ForCausalLM", {**WINDOW, "layer_types": TYPES}, (8, None, 8)),
    "hy v3": ("HYV3ForCausalLM", {}, NONE),
    "seed-oss": ("SeedOssForCausalLM", {}, NONE),
    "ministral": ("MinistralForCausalLM", {"layer_types": TYPES}, (8, None, 8)),
    "cwm": ("CwmForCausalLM", {"layer_types": TYPES, **rope("default")}, (8, None, 8)),
    "phi3 partial": ("Phi3ForCausalLM", rope("default", partial_rotary_factor=0.5), NONE),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case):
    architecture, changes, windows = CASES[case]
    model = tiny_model(architecture, **changes)
    decoder = assert_same(model)
    config, shape = model.config, decoder.shape
    assert shape.windows == windows
    assert (shape.layers, shape.heads, shape.vocabulary, shape.context) == (3, 4, 128, 128)
    assert shape.kv_heads == config.num_key_value_heads
    assert shape.scale == shape.head_dim**-0.5
    assert (decoder.dtype, decoder.device) == (torch.float32, torch.device("cpu"))


def test_bf16_logits_follow_and_rope_has_the_same_bits():
    model = tiny_model("LlamaForCausalLM", torch.bfloat16)
    decoder = assert_same(model, tolerance=0.05)  # sums in another order, rounded to 8 bits
    seen = {}

    def attend(layer, q, k, v):
        seen.setdefault("q k", (q, k))
        return q

    tokens, positions = torch.randint(1, 128, (9,)), torch.randint(0, 128, (9,))
    decoder.forward(tokens, positions, attend)
    layer = model.model.layers[0]
    with torch.no_grad():
        x = layer.input_layernorm(model.model.embed_tokens(tokens))
        q = layer.self_attn.q_proj(x).view(1, 9, 4, 16)
        k = layer.self_attn.k_proj(x).view(1, 9, 2, 16)
        cos, sin = model.model.rotary_emb(x, positions[None])
        expected = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    for got, want in zip(seen["q k"], expected, strict=True):
        assert torch.equal(got, want[0])


@pytest.mark.parametrize("case", ["llama", "qwen3 types", "phi3 window"])
def test_a_cache_behind_the_callback_is_enough_to_decode(case):
    """Prompts first, then a token of each sequence a step, in another order every time."""
    architecture, changes, _ = CASES[case]
    model = tiny_model(architecture, **changes)
    decoder = Decoder.of(model)
    prompts = [torch.randint(1, 128, (length,)) for length in (3, 17, 9)]
    cache = {}

    def step(order, pieces):
        def attend(layer, q, k, v):
            mixed, start = [], 0
            for sequence, piece in zip(order, pieces, strict=True):
                rows = slice(start, start := start + len(piece))
                old = cache.get((layer, sequence), (k[:0], v[:0]))
                new = torch.cat((old[0], k[rows])), torch.cat((old[1], v[rows]))
                cache[layer, sequence] = new
                mixed.append(one(decoder, layer, q[rows], *new))
            return torch.cat(mixed)

        before = [len(cache.get((0, s), [()])[0]) for s in order]
        positions = [b + torch.arange(len(p)) for b, p in zip(before, pieces, strict=True)]
        hidden = decoder.forward(torch.cat(pieces), torch.cat(positions), attend)
        last = torch.tensor([len(piece) for piece in pieces]).cumsum(0) - 1
        return decoder.logits(hidden[last]).argmax(-1)

    order, texts = [0, 1, 2], list(prompts)
    found = step(order, prompts)
    for _ in range(6):
        for sequence, token in zip(order, found, strict=True):
            texts[sequence] = torch.cat((texts[sequence], token[None]))
        order = order[1:] + order[:1]
        found = step(order, [texts[sequence][-1:] for sequence in order])
    for prompt, text in zip(prompts, texts, strict=True):
        with torch.no_grad():
            logits = model(text[None]).logits[0, len(prompt) - 1 : -1]
        assert torch.equal(text[len(prompt) :], logits.argmax(-1))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_packed_linears(tmp_path, text, architecture):
    source = write_checkpoint(tmp_path / "source", architecture)
    scheme = W4A16(bits=4, group_size=32)
    quantize(
        QuantizeRequest(
            source, tmp_path / "out", scheme, "rtn", data=text, stored_dtype=torch.float32
        )
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    ).eval()
    assert isinstance(model.model.layers[0].self_attn.q_proj, QuantLinear)
    assert_same(model)


def packed(linear, scheme, dtype):
    """A random weight of the same shape, rounded."""
    n, k = linear.out_features, linear.in_features
    layer = QuantLinear(scheme, n, k, bias=linear.bias is not None, dtype=dtype)
    groups = layer.weight_scale.shape[1]
    codes, zeros = torch.randint(2**scheme.bits, (n, k)), torch.randint(2**scheme.bits, (n, groups))
    scales = (torch.rand(n, groups) * 0.02 + 0.001).to(dtype)
    layer.set_tensors(scheme.pack(codes.byte(), scales, zeros.byte()))
    if linear.bias is not None:
        layer.bias.data = torch.randn(n).to(dtype)
    return layer


def packed_model(architecture, scheme, dtype, **changes):
    model = tiny_model(architecture, dtype, **changes)
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            for name, linear in module.named_children():
                if isinstance(linear, torch.nn.Linear):
                    setattr(module, name, packed(linear, scheme, dtype))
    return model


SMOL = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "num_hidden_layers": 1,
}
PACKED = {  # architecture, changes, whether layers line up
    "smollm2": ("LlamaForCausalLM", SMOL, True),
    "wide heads, biases": ("Qwen2ForCausalLM", {"head_dim": 32, "hidden_size": 128}, True),
    "norms": ("Qwen3ForCausalLM", {"head_dim": 32}, True),
    "keys of half a band": ("LlamaForCausalLM", {}, False),
    "phi3": ("Phi3ForCausalLM", {}, None),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", PACKED)
def test_packed_linears_are_joined_and_stored_once(case, dtype):
    architecture, changes, lines_up = PACKED[case]
    model = packed_model(architecture, W4A16(4, 64, False), dtype, **changes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.arange(1, 20)[None]
    logits = model(ids).logits
    bytes_before = sum(m.nbytes() for m in model.modules() if isinstance(m, QuantLinear))
    decoder = assert_same(model, TOLERANCE if dtype == torch.float32 else 0.05)
    assert torch.equal(model(ids).logits, logits)  # of the modules themselves
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    modules = [m for m in model.modules() if isinstance(m, QuantLinear)]
    assert sum(m.nbytes() for m in modules) == bytes_before
    storages = {m.op.words.untyped_storage().data_ptr() for m in modules}
    each = {True: 4, False: 6, None: 4}[lines_up]  # q k v, o, gate up, down
    assert len(storages) == each * len(model.model.layers)
    x, shape = torch.randn(3, model.config.hidden_size, dtype=dtype), decoder.shape
    for index, layer in enumerate(model.model.layers):
        names = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
        wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        assert decoder.qkv(index)(x).shape == (3, wide)
        assert decoder.gate_up(index)(x).shape == (3, 2 * model.config.intermediate_size)
        for product, module in (("qkv", layer.self_attn), ("gate_up", layer.mlp)):
            fused = getattr(module, f"{product}_proj", None)
            with torch.no_grad():
                parts = [fused] if fused else [getattr(module, name) for name in names[product]]
                apart = torch.cat([part(x) for part in parts], -1)
                got = getattr(decoder, product)(index)(x)
            torch.testing.assert_close(got, apart, rtol=2**-7, atol=1e-4)
            assert dtype == torch.float32 or torch.equal(got, apart)


class Fused:
    """An op that gates: the reference, and a product of both that applies SwiGLU."""

    made = ()

    def __init__(self, ops):
        self.parts = [copy.copy(op) for op in ops]
        self.made.append(self)

    def both(self, x):
        return torch.cat([part(x) for part in self.parts], -1)

    def __call__(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM"])
def test_gated_products_are_used_where_an_op_has_them(architecture, monkeypatch):
    monkeypatch.setattr(Fused, "made", [])
    monkeypatch.setattr(Reference, "gate", Fused)
    model = packed_model(architecture, W4A16(4, 64), torch.float32)
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.arrange("reference")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    decoder = assert_same(model)
    assert [decoder.gated(i) for i in range(3)] == Fused.made
    for layer, made in zip(model.model.layers, Fused.made, strict=True):
        linears = [
            module for name, module in layer.mlp.named_children() if "gate" in name or "up" in name
        ]
        assert [linear.op for linear in linears] == made.parts
    x = torch.randn(3, 64)
    gate, up = decoder.gate_up(0)(x).chunk(2, -1)
    assert torch.equal(decoder.gated(0)(x), torch.nn.functional.silu(gate) * up)
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"mlp_bias": True}], ids=str)
def test_other_activations_and_biases_are_not_gated(changes, monkeypatch):
    monkeypatch.setattr(Reference, "gate", Fused)
    model = packed_model("LlamaForCausalLM", W4A16(4, 64), torch.float32, **changes)
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.arrange("reference")
    assert assert_same(model).gated(0) is None


def test_dense_linears_are_not_gated():
    assert Decoder.of(tiny_model("LlamaForCausalLM")).gated(0) is None


REFUSED = {
    "Gemma2ForCausalLM": ("gemma2", "softcapped logits", "block.pre_feedforward_layernorm"),
    "GemmaForCausalLM": ("gemma", "never compared"),
    "GraniteForCausalLM": ("granite", "scaled logits", "scaled residuals"),
    "CohereForCausalLM": ("cohere", "scaled logits", "block without post_attention_layernorm"),
    "SmolLM3ForCausalLM": ("smollm3", "layers without RoPE"),
    "OPTForCausalLM": ("opt", "model.layers"),
    "FalconForCausalLM": ("falcon", "model.layers"),
    "GPTNeoXForCausalLM": ("gpt_neox", "model.layers"),
    "BertModel": ("bert", "no lm_head"),
    "LlamaModel": ("llama", "no lm_head"),
}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_dense_linears_are_joined_and_stored_once(architecture):
    model = tiny_model(architecture)
    ids = torch.arange(1, 20)[None]
    before = model(ids).logits
    Decoder.of(model)
    for layer in model.model.layers:
        for module, names in (
            (layer.self_attn, ("q_proj", "k_proj", "v_proj")),
            (layer.mlp, ("gate_proj", "up_proj")),
        ):
            parts = [getattr(module, name) for name in names]
            for part, behind in pairwise(parts):
                assert part.weight.data_ptr() + part.weight.nbytes == behind.weight.data_ptr()
                if part.bias is not None:
                    assert part.bias.data_ptr() + part.bias.nbytes == behind.bias.data_ptr()
    assert torch.equal(model(ids).logits, before)


def assert_refused(model, *words):
    with pytest.raises(UserError) as told:
        Decoder.of(model)
    for word in (type(model).__name__, "billfish.load", *words):
        assert word in str(told.value), told.value


@pytest.mark.parametrize("architecture", REFUSED)
def test_other_architectures_are_refused(architecture):
    assert_refused(tiny_model(architecture), *REFUSED[architecture])


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    "architecture, changes, word",
    [
        ("LlamaForCausalLM", rope("dynamic", factor=2.0), "'dynamic'"),
        (
            "Phi3ForCausalLM",
            {**rope("longrope", **FACTORS), "original_max_position_embeddings": 64},
            "'longrope'",
        ),
        ("LlamaForCausalLM", {"is_causal": False}, "is_causal"),
        (
            "Qwen2ForCausalLM",
            {"layer_types": ["sliding_attention"] * 3},
            "without a sliding_window",
        ),
    ],
)
def test_settings_that_it_does_not_run_are_refused(architecture, changes, word):
    assert_refused(tiny_model(architecture, **changes), word)


def test_changed_modules_are_refused():
    model = tiny_model("LlamaForCausalLM")
    model.model.layers[2].self_attn.k_norm = torch.nn.Identity()
    assert_refused(model, "self_attn.k_norm")
    model = tiny_model("LlamaForCausalLM")
    model.model.layers[1].to("meta")
    assert_refused(model, "cpu, meta")
    model = tiny_model("Qwen3ForCausalLM")
    model.config.model_type = "another"
    assert_refused(model, "another")
    assert_refused(torch.nn.Linear(2, 2), "no model_type")
