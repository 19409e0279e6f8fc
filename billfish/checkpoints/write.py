"""Writes checkpoint files atomically, so that no crash leaves half a file, and checks their hashes.

A file appears under its name only when it is complete and on disk: temporary name, fsync, rename,
fsync of the directory. The index is written after all shards and the sha256 manifest last, so a
directory with a manifest is complete. docs/FORMAT.md is the contract.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from billfish.checkpoints.config import read_json
from billfish.checkpoints.header import read_header
from billfish.checkpoints.read import INDEX
from billfish.errors import UserError

MANIFEST = "billfish_manifest.json"
TEMPORARY = ".partial"
# Files of the tokenizer and for generation that are copied to the result; weights and pickles are
# not.
COPIED = (
    "generation_config.json",
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
    "preprocessor_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)


def shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file and rename it to `path`. After a failure it is deleted."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors sorted by name, so that equal tensors give equal bytes."""
    contiguous = {name: tensors[name].contiguous() for name in sorted(tensors)}

    def write(temporary: Path) -> None:
        try:
            save_file(contiguous, temporary, metadata={"format": "pt"})
        except Exception as error:  # safetensors reports the errno only in its text
            if "No space left" in str(error) or "os error 28" in str(error):
                raise OSError(28, "No space left on device", str(path)) from None
            raise

    write_atomically(path, write)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda temporary: _write_text(temporary, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf8")


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy tokenizer, chat template and generation config; returns their names."""
    names = [name for name in COPIED if (source / name).is_file()]
    for name in names:
        write_atomically(target / name, lambda path, name=name: _copy(source / name, path))  # type: ignore[misc]
    return names


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def finish(target: Path, shards: Iterable[str]) -> None:
    """Write the index, then the manifest, which marks the checkpoint as complete."""
    write_index(target, shards)
    write_manifest(target)


def write_index(target: Path, shards: Iterable[str]) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for shard in shards:
        for name, entry in read_header(target / shard).items():
            weight_map[name] = shard
            total += entry.nbytes
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(target / INDEX, index)


def write_manifest(target: Path) -> None:
    files = sorted(
        path.name
        for path in target.iterdir()
        if path.is_file() and path.name != MANIFEST and not path.name.endswith(TEMPORARY)
    )
    hashes = {name: sha256(target / name) for name in files}
    write_json(target / MANIFEST, {"version": 1, "sha256": hashes})


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_manifest(path: Path) -> list[tuple[str, str]]:
    """(file, problem) for each file that differs from the manifest; empty without a manifest."""
    if not (path / MANIFEST).exists():
        return []
    problems = []
    for name, expected in read_json(path / MANIFEST).get("sha256", {}).items():
        if not (path / name).is_file():
            problems.append((name, f"listed in {MANIFEST} and missing."))
        elif sha256(path / name) != expected:
            told = f"its sha256 is not the one in {MANIFEST}; the file was changed."
            problems.append((name, told))
    return problems


def refuse_existing(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            f"{target}: exists and is not empty. Choose another directory or delete it."
        )
