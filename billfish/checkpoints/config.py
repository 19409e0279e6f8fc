"""Reads config.json and the other JSON files of a checkpoint, and validates them before use.

A checkpoint is untrusted input. Files must be regular and of limited size and depth; numbers must
be finite and sizes positive integers; no setting may name code or another file of weights. Symbolic
links are followed, because the hub's cache consists of them.
"""

import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from billfish.checkpoints.unfinished import unfinished
from billfish.errors import UserError

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
GENERATION = "generation_config.json"
TEMPLATES = "additional_chat_templates"
MAX_JSON = 100 * 2**20  # bytes; the largest known tokenizer.json has 34 MB
MAX_DEPTH = 64  # real configs have up to 8 levels; transformers processes them recursively
# Files that transformers reads from a checkpoint directory.
READ = (
    CONFIG,
    ADAPTER,
    GENERATION,
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "processor_config.json",
    "preprocessor_config.json",
)
SIZES = {
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "n_embd",
    "n_layer",
    "n_layers",
    "n_head",
    "n_heads",
    "n_positions",
    "num_layers",
    "num_heads",
    "d_model",
}
MAX_SIZE = 2**31 - 1
TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id"}
ENDLESS = "time_step_limit"  # Mamba 2's range from 0 to infinity: may be infinite
KERNELS = {
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
}


def regular(path: Path) -> int:
    """Size of a regular file; raises for a FIFO or a device, which might never end."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Copy it again.") from None
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path}: is no regular file; only those are read.")
    return found.st_size


def parse(path: Path, text: bytes, once: bool = False) -> Any:
    """Parse JSON. With `once` duplicate keys are an error: readers differ in which one they
    take."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise UserError(f"{path}: names {key!r} twice, and readers differ in which counts.")
            found[key] = value
        return found

    try:
        content = json.loads(text.decode("utf8"), object_pairs_hook=unique if once else None)
        if b"\\ud" in text.lower():  # lone surrogates cannot be encoded as UTF-8
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error}). Copy it again.") from None


def read_json(path: Path, once: bool = False) -> dict[str, Any]:
    size = regular(path)
    if size > MAX_JSON:
        raise UserError(f"{path}: {size} bytes; at most {MAX_JSON} of JSON are read.")
    content = parse(path, path.read_bytes(), once)
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}.")
    if depth(content) > MAX_DEPTH:
        raise UserError(f"{path}: nested more than {MAX_DEPTH} levels deep; refused.")
    return content


def depth(content: Any) -> int:
    level, found = [content], 0
    while level and found <= MAX_DEPTH:
        found += 1
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, dict | list)
        ]
    return found


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a local directory, validated; remote code and adapters are refused."""
    if not path.is_dir():
        raise UserError(
            f"{path}: no such directory. Give a local Hugging Face checkpoint "
            "(config.json and *.safetensors)."
        )
    for folder in (path, path / TEMPLATES):
        for file in folder.iterdir() if folder.is_dir() else ():
            size = regular(file) if file.exists() and not file.is_dir() else 0
            if size > MAX_JSON and file.name in READ:
                raise UserError(f"{file}: larger than {MAX_JSON} bytes; refused.")
    if (path / ADAPTER).exists():
        raise UserError(
            f"{path}: has {ADAPTER}, so it is an adapter of another model. Merge the two "
            "(peft: merge_and_unload) and save the result."
        )
    file = path / CONFIG
    if not file.exists():
        told = f"{path}: has no config.json, so it is not a Hugging Face checkpoint."
        raise UserError(unfinished(path) or told)
    config = read_json(file)
    if config.get("auto_map"):
        raise UserError(
            f"{path}: its config.json asks for remote code (auto_map: {config['auto_map']}); "
            "Billfish never runs code from a checkpoint. Use a model class that transformers ships."
        )
    check_values(file, config)
    if (path / GENERATION).exists():
        check_values(path / GENERATION, read_json(path / GENERATION))
    return config


def check_values(file: Path, config: dict[str, Any]) -> None:
    for where, key, value in walk(config):
        problem = next((said for rule in RULES if (said := rule(key, value))), None)
        if problem:
            raise UserError(f"{file}: {where} is {_short(value)}; {problem}.")
    for key, of in (("model_type", str), ("architectures", list)):
        if not isinstance(config.get(key), of | None):
            raise UserError(f"{file}: {key} is {_short(config[key])}; expected a {of.__name__}.")
    if not all(isinstance(name, str) for name in config.get("architectures") or []):
        raise UserError(f"{file}: architectures holds {config['architectures']}; expected names.")


def walk(value: Any, where: str = "", key: str = "") -> Iterator[tuple[str, str, Any]]:
    """(full name, key, value) of every value in a config; items of a list have the list's key."""
    inner = [(key, item) for item in value] if isinstance(value, list) else []
    for name, item in value.items() if isinstance(value, dict) else inner:
        full = f"{where}.{name}".removeprefix(".") if isinstance(value, dict) else where
        yield full, name, item
        yield from walk(item, full, name)


def _finite(key: str, value: Any) -> str | None:
    endless = isinstance(value, float) and not math.isfinite(value) and key != ENDLESS
    return "numbers must be finite" if endless else None


def _size(key: str, value: Any) -> str | None:
    if key not in SIZES or value is None or isinstance(value, list):
        return None
    good = type(value) is int and 1 <= value <= MAX_SIZE
    return None if good else f"it must be an integer from 1 to {MAX_SIZE}"


def _token(key: str, value: Any) -> str | None:
    if key not in TOKENS or value is None:
        return None
    if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        return None  # its members come one by one
    good = type(value) is int and -1 <= value <= MAX_SIZE  # -1 means none in old configs
    return None if good else "it must be the number of a token"


def _probability(key: str, value: Any) -> str | None:
    wrong = "drop" in key and type(value) in (int, float) and not 0 <= value <= 1
    return "a probability is 0 to 1" if wrong else None


def _dtype(key: str, value: Any) -> str | None:
    if key not in ("dtype", "torch_dtype") or value is None or isinstance(value, dict):
        return None
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    known = isinstance(getattr(torch, name, None), torch.dtype) or name == "auto"
    return None if known else "it must name a type of torch, such as bfloat16"


def _hub_kernel(key: str, value: Any) -> str | None:
    foreign = key in KERNELS and value is not None and (type(value) is not str or "/" in value)
    return "kernels of the hub are code, never taken from a checkpoint" if foreign else None


def _other_weights(key: str, value: Any) -> str | None:
    named = key == "transformers_weights" and value is not None
    return "weights are read from model.safetensors or its index alone" if named else None


RULES: tuple[Callable[[str, Any], str | None], ...] = (
    _finite,
    _size,
    _token,
    _probability,
    _dtype,
    _hub_kernel,
    _other_weights,
)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
