"""A tiny random Llama, its linears rounded to nearest, written as a checkpoint of any dialect."""

import json

import torch
from safetensors.torch import save_file
from tiny import character_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from billfish.checkpoints.dialects import read_dialect
from billfish.formats import layout
from billfish.formats.grid import Grid, group_count
from billfish.schemes.w4a16 import W4A16
from billfish.schemes.w4a16.dialects.compressed import CompressedTensors
from billfish.schemes.w4a16.dialects.gptq import Gptq

GPTQ_META = {"quant_method": "gptq", "desc_act": False, "lm_head": False}


def tiny_config(**changes):
    values = {
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaConfig(**values | changes)


def tiny_model(seed=0, **changes):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(**changes)).eval()
    for name, parameter in model.named_parameters():
        if "proj" in name and parameter.ndim == 2:
            parameter.data.mul_(4)  # away from zero, so that logits differ from token to token
    return model


def random_canonical(n, k, scheme, dtype=torch.float16, seed=0):
    """Any codes and zeros; scales that are not all alike."""
    source = torch.Generator().manual_seed(seed)
    groups = group_count(k, scheme.group_size)
    codes = torch.randint(0, 2**scheme.bits, (n, k), generator=source)
    zeros = torch.randint(0, 2**scheme.bits, (n, groups), generator=source)
    scales = (torch.rand(n, groups, generator=source) + 0.5).to(dtype)
    tensors = scheme.pack(codes, scales, zeros)
    if scheme.has_g_idx:
        plain = torch.arange(k, dtype=torch.int32) // (k // groups)
        tensors["weight_g_idx"] = plain[torch.randperm(k, generator=source)].contiguous()
    return tensors


def round_to_nearest(weight, scheme, dtype):
    """Canonical tensors of a real weight."""
    n, k = weight.shape
    grid = Grid(scheme.bits, scheme.symmetric)
    groups = group_count(k, scheme.group_size)
    order = torch.arange(k)
    if scheme.has_g_idx:
        order = torch.randperm(k, generator=torch.Generator().manual_seed(n))
    grouped = weight.float()[:, order].reshape(n, groups, -1)
    scale, zero = grid.fit(grouped.amin(-1), grouped.amax(-1), dtype)
    codes = torch.empty(n, k, dtype=torch.int64)
    codes[:, order] = grid.encode(grouped, scale[..., None], zero[..., None]).reshape(n, k).long()
    tensors = scheme.pack(codes, scale.to(dtype), zero.long())
    if scheme.has_g_idx:
        g_idx = torch.empty(k, dtype=torch.int32)
        g_idx[order] = torch.arange(k, dtype=torch.int32) // (k // groups)
        tensors["weight_g_idx"] = g_idx
    return tensors


def quantized(model, schemes, dtype=torch.float16):
    """{module: canonical tensors} for `schemes` = {module: scheme}."""
    return {
        name: round_to_nearest(model.get_submodule(name).weight.data, scheme, dtype)
        for name, scheme in schemes.items()
    }


def linear_names(model, lm_head=False):
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and (lm_head or name != "lm_head")
    ]


def marlin_tensors(scheme, tensors):
    """Only tests write Marlin files."""
    n, groups = tensors["weight_scale"].shape
    order = torch.tensor(layout.marlin_scale_order(grouped=groups > 1))
    runs = tensors["weight_scale"].T.reshape(-1, len(order))[:, order]
    return {
        "B": layout.marlin().pack(scheme.codes(tensors)),
        "s": runs.reshape(groups, n).contiguous(),
    }


def write_checkpoint(path, model, canonical, schemes, config, dtype=torch.float16):
    """A directory in the dialect that `config` describes."""
    dialect = read_dialect(config)
    tensors = {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module in canonical:
            scheme = schemes[module]
            stored = (
                marlin_tensors(scheme, canonical[module])
                if dialect.name == "marlin"
                else dialect.from_canonical(scheme, canonical[module])
            )
            tensors.update({f"{module}.{key}": value for key, value in stored.items()})
        elif not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            tensors[name] = tensor.to(dtype).contiguous()
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    content = model.config.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "dtype": str(dtype).removeprefix("torch."),
        "quantization_config": config,
    }
    (path / "config.json").write_text(json.dumps(content))
    character_tokenizer().save_pretrained(path)
    return tensors


def dense_twin(model, canonical, schemes, dtype=torch.float16):
    """The same model with the decoded weights: what a loaded checkpoint must compute."""
    twin = LlamaForCausalLM(model.config).eval()
    state = {name: tensor.to(dtype).float() for name, tensor in model.state_dict().items()}
    for module, tensors in canonical.items():
        state[f"{module}.weight"] = schemes[module].dequantize(tensors)
    twin.load_state_dict(state)
    return twin


def config_of(name, scheme, modules):
    """The quantization_config of a model whose `modules` all have `scheme`."""
    schemes = dict.fromkeys(modules, scheme)
    if name == "marlin":
        return GPTQ_META | {
            "bits": 4,
            "group_size": scheme.group_size,
            "sym": True,
            "checkpoint_format": "marlin",
        }
    if name == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": scheme.group_size,
            "zero_point": True,
            "version": "gemm",
        }
    writer = {"compressed-tensors": CompressedTensors, "gptq": Gptq}[name]
    return writer.config(schemes, [] if "lm_head" in modules else ["lm_head"])


CASES = {
    "compressed-tensors": W4A16(4, 32),
    "compressed-tensors asym": W4A16(4, 32, symmetric=False),
    "compressed-tensors channel": W4A16(8, -1),
    "compressed-tensors 3 bit": W4A16(3, 64, symmetric=False),
    "gptq": W4A16(4, 32),
    "gptq v2": W4A16(4, 64, symmetric=False),
    "gptq desc_act": W4A16(4, 32, has_g_idx=True),
    "gptq 8 bit": W4A16(8, -1),
    "awq": W4A16(4, 32, symmetric=False),
    "marlin": W4A16(4, 128),
    "marlin channel": W4A16(4, -1),
}


def write_case(case, path, **changes):
    """(model, schemes, canonical, stored tensors) of one of CASES, written to `path`."""
    scheme, name = CASES[case], case.split()[0]
    model = tiny_model(**changes)
    schemes = dict.fromkeys(linear_names(model), scheme)
    canonical = quantized(model, schemes)
    stored = write_checkpoint(
        path, model, canonical, schemes, config_of(name, scheme, list(schemes))
    )
    return model, schemes, canonical, stored
