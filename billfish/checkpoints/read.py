"""Opens a Hugging Face checkpoint directory and reads its tensors one at a time.

All commands use this reader. It validates config.json, the index and all headers when it opens the
directory (config.py, header.py), so that a missing, truncated or hostile file is an error at once
and not after hours. It refuses pickles and remote code. Quantization is not known here.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from billfish.checkpoints.config import CONFIG, read_config, read_json, walk
from billfish.checkpoints.header import Entry, read_header
from billfish.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# shards of a distributed checkpoint
PARTS = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
# Config keys that count modules: building a module takes memory however small its tensors.
COUNTS = re.compile(r"(^|_)(n|num|encoder|decoder)_(\w+_)?(layer|expert|block|group|stage)s?$")


class Checkpoint:
    """An opened directory: `entries` of all tensors, which are read on demand."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = read_config(self.path)
        self.entries: dict[str, Entry] = {}
        self._open(self._files())
        check_counts(self.path / CONFIG, self.config, self.entries)

    @classmethod
    def of_files(cls, files: Sequence[str]) -> "Checkpoint":
        """A checkpoint of given shards in one directory, without config.json and index."""
        made = cls.__new__(cls)
        made.path, made.config, made.entries = Path(files[0]).parent, {}, {}
        made._open({Path(file).name: [] for file in files})
        return made

    def _open(self, files: dict[str, list[str]]) -> None:
        for file, names in files.items():
            header = read_header(self.path / file)
            for name in names:
                if name not in header:
                    raise UserError(
                        f"{self.path / file}: the index says it holds {name!r}, it does not. "
                        "The checkpoint is incomplete: download or copy it again."
                    )
            for name in header:
                if name in self.entries:
                    raise UserError(
                        f"{self.path / file}: holds {name!r}, and so does "
                        f"{self.entries[name].file}: which of the two counts is not said."
                    )
            self.entries |= header

    def _files(self) -> dict[str, list[str]]:
        """Shard -> names of tensors that the index lists for it."""
        parts = next((p.name for p in self.path.iterdir() if PARTS.fullmatch(p.name)), None)
        if parts:
            raise UserError(f"{self.path / parts}: part of a distributed checkpoint; refused.")
        index, single = self.path / INDEX, self.path / SINGLE
        if index.exists() and single.exists():
            raise UserError(
                f"{self.path}: has {SINGLE} and {INDEX}; readers differ in which they take. "
                "Remove the one that is not meant."
            )
        if index.exists():
            return read_index(index)
        if single.exists():
            return {SINGLE: []}
        pickles = [p.name for end in ("*.bin", "*.pt*") for p in sorted(self.path.glob(end))]
        found = f" It has {', '.join(pickles[:3])}: pickles can run code and are refused; "
        raise UserError(
            f"{self.path}: neither {SINGLE} nor {INDEX} is there."
            + (
                found + "save the model again with save_pretrained (safetensors)."
                if pickles
                else ""
            )
        )

    def tensor(self, name: str) -> Tensor:
        entry = self.entries[name]
        with safe_open(self.path / entry.file, framework="pt") as shard:
            tensor: Tensor = shard.get_tensor(name)
        return tensor

    def row(self, name: str, index: int) -> Tensor:
        """`tensor(name)[index]`, of which nothing else is read."""
        with safe_open(self.path / self.entries[name].file, framework="pt") as shard:
            found: Tensor = shard.get_slice(name)[index]
        return found

    @property
    def held(self) -> dict[str, Entry]:
        """The tensors in the files; views of a checkpoint (mxfp4.py, experts.py) show others as its
        `entries`."""
        return self.entries

    def sources(self, name: str) -> tuple[str, ...]:
        """The tensors in the files that a tensor of a view is made of."""
        return (name,)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())


def read_index(index: Path) -> dict[str, list[str]]:
    """Shard -> names of its tensors; raises unless shards are safetensors files in this
    directory."""
    content = read_json(index, once=True)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: its weight_map names no tensor. Copy it again.")
    if not isinstance(content.get("metadata"), dict):
        raise UserError(f"{index}: has no metadata, which transformers needs. Copy it again.")
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        plain = isinstance(file, str) and Path(file).name == file and len(file) <= 255
        if not plain or not file.isprintable():
            raise UserError(
                f"{index}: {name!r} is said to be in {file!r}, which is no name of a file in this "
                "directory; refused."
            )
        if not file.endswith(".safetensors"):
            raise UserError(f"{index}: {name!r} is said to be in {file}, which is no safetensors.")
        files.setdefault(file, []).append(name)
    return files


def check_counts(file: Path, config: dict[str, Any], entries: dict[str, Entry]) -> None:
    """Raise if the config asks for more modules than there are tensors, or rows in a tensor (fused
    experts). Called before a model is built, as building would take unbounded memory."""
    most = max([len(entries), *(size for entry in entries.values() for size in entry.shape)])
    for where, key, value in walk(config):
        if not COUNTS.search(key) or type(value) is not int:
            continue
        if value > (len(entries) if "layer" in key else most):
            raise UserError(
                f"{file}: {where} is {value}, and the files hold {len(entries)} tensors with "
                f"{most} rows at most. They do not belong together."
            )


def stored_dtype(path: Path | str) -> torch.dtype:
    """The dtype that config.json names, else that of the first floating-point tensor."""
    config = read_config(Path(path))
    told = config.get("dtype") or config.get("torch_dtype")
    named = getattr(torch, str(told).removeprefix("torch."), None)
    if isinstance(named, torch.dtype):
        return named
    held = (entry.dtype for entry in Checkpoint(path).entries.values())
    return next((dtype for dtype in held if dtype.is_floating_point), torch.float32)


def resolve(model: str) -> Path:
    """Path of a local directory, or of a hub model downloaded by huggingface_hub or in its
    cache."""
    path = Path(model).expanduser()
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{model}: no such directory here, and the hub does not give it "
            f"({type(error).__name__}). Check the path, the name or the network."
        ) from None
