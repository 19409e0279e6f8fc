"""The engine's decoder against transformers' own forward pass, and the models it must refuse."""

from itertools import pairwise

import pytest
import torch
import transformers
from tiny import ARCHITECTURES, GROUPED, write_checkpoint
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from billfish.driver import Request, quantize
from billfish.errors import UserError
from billfish.models.decoder import Decoder
from billfish.models.linear import QuantLinear
from billfish.schemes.w4a16 import W4A16

CONFIGS = {
    **ARCHITECTURES,
    "Phi3ForCausalLM": ("Phi3Config", GROUPED),
    "GraniteForCausalLM": (
        "GraniteConfig",
        {**GROUPED, "logits_scaling": 4.0, "residual_multiplier": 0.5},
    ),
    "MixtralForCausalLM": ("MixtralConfig", GROUPED),
    "GptOssForCausalLM": ("GptOssConfig", {**GROUPED, "head_dim": 16, "num_local_experts": 4}),
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
        assert q.is_contiguous() and k.is_contiguous() and v.stride()[1:] == k.stride()[1:]
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
        {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        (8, None, 8),
    ),
    "phi3": ("Phi3ForCausalLM", {}, NONE),
    "phi3 window": ("Phi3ForCausalLM", {"sliding_window": 8}, ALL),
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
        Request(
            source, tmp_path / "out", scheme=scheme, method="rtn", data=text, dtype=torch.float32
        )
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    ).eval()
    assert isinstance(model.model.layers[0].self_attn.q_proj, QuantLinear)
    assert_same(model)


REFUSED = {
    "Gemma2ForCausalLM": ("gemma2", "softcapped logits", "block.pre_feedforward_layernorm"),
    "GemmaForCausalLM": ("gemma", "never compared"),
    "GraniteForCausalLM": ("granite", "scaled logits", "scaled residuals"),
    "CohereForCausalLM": ("cohere", "scaled logits", "block without post_attention_layernorm"),
    "MixtralForCausalLM": ("mixtral", "experts"),
    "GptOssForCausalLM": ("gpt_oss", "experts", "self_attn.sinks"),
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
        for module, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj")),
                              (layer.mlp, ("gate_proj", "up_proj"))):  # fmt: skip
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
