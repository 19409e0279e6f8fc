"""Writing checkpoints so that no crash can leave half a file, and verifying them.

A file appears under its name only when it is complete and on disk: temporary name, fsync, rename,
fsync of the directory. The index comes after all shards and the sha256 manifest last, so a
directory with a manifest is whole. docs/FORMAT.md is the contract.
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

from billfish.checkpoints.read import INDEX, Checkpoint, read_header, read_json
from billfish.errors import UserError
from billfish.formats.spec import first_nonfinite

MANIFEST = "billfish_manifest.json"
TEMPORARY = ".partial"
# Everything a tokenizer or generation needs travels along; weights and pickles do not.
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
    """`write` fills a temporary file, which then takes the name `path`. A failure leaves
    nothing."""
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
    """Sorted by name: the same tensors give the same bytes whatever order they were made in."""
    contiguous = {name: tensors[name].contiguous() for name in sorted(tensors)}

    def write(temporary: Path) -> None:
        try:
            save_file(contiguous, temporary, metadata={"format": "pt"})
        except Exception as error:  # safetensors wraps the errno in a text of its own
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
    """Tokenizer, chat template and generation config, as they are."""
    names = [name for name in COPIED if (source / name).is_file()]
    for name in names:
        write_atomically(target / name, lambda path, name=name: _copy(source / name, path))  # type: ignore[misc]
    return names


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def finish(target: Path, shards: Iterable[str]) -> None:
    """The index, then the manifest: after this the directory is a checkpoint."""
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
    """(file, what is wrong with it) where files and manifest differ; no manifest, no complaint."""
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


__all__ = [
    "MANIFEST",
    "TEMPORARY",
    "Checkpoint",
    "check_manifest",
    "copy_companions",
    "finish",
    "first_nonfinite",
    "refuse_existing",
    "shard_name",
    "write_atomically",
    "write_json",
    "write_shard",
]
