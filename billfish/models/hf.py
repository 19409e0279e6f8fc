"""A Hugging Face checkpoint directory as named tensors, read one at a time.

Every shard's header is checked against the file's length when the directory is opened, so that a
missing or truncated shard is an error at the start and not after hours. Refuses pickles and remote
code. Knows nothing of quantization.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from billfish.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100 * 2**20  # the safetensors format's own limit
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


class Checkpoint:
    """An opened directory: what is in it by name, and the tensors on demand."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = read_config(self.path)
        self.entries: dict[str, Entry] = {}
        for file, names in self._files().items():
            header = read_header(self.path / file)
            for name in names if names is not None else header:
                if name not in header:
                    raise UserError(
                        f"{self.path / file}: the index says it holds {name!r}, it does not. "
                        "The checkpoint is incomplete: download or copy it again."
                    )
                self.entries[name] = header[name]

    def _files(self) -> dict[str, list[str] | None]:
        """Shard -> names the index expects there (None: all that is in it)."""
        index = self.path / INDEX
        if index.exists():
            files: dict[str, list[str] | None] = {}
            for name, file in read_json(index).get("weight_map", {}).items():
                if Path(file).name != file:
                    raise UserError(f"{index}: {file!r} leaves the directory; refused.")
                names = files.setdefault(file, [])
                assert names is not None
                names.append(name)
            return files
        if (self.path / SINGLE).exists():
            return {SINGLE: None}
        pickles = sorted(p.name for p in self.path.glob("*.bin")) + sorted(
            p.name for p in self.path.glob("*.pt*")
        )
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

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a local directory; remote code is refused."""
    if not path.is_dir():
        raise UserError(
            f"{path}: no such directory. Give a local Hugging Face checkpoint "
            "(config.json and *.safetensors)."
        )
    file = path / "config.json"
    if not file.exists():
        raise UserError(f"{path}: has no config.json, so it is not a Hugging Face checkpoint.")
    config = read_json(file)
    if config.get("auto_map"):
        raise UserError(
            f"{path}: its config.json asks for remote code "
            f"(auto_map: {', '.join(config['auto_map'])}); "
            "Billfish never runs code from a checkpoint. Use a model class that transformers ships."
        )
    return config


def stored_dtype(path: Path | str) -> torch.dtype:
    """Of a checkpoint's numbers: as its config.json says, else as the first of them are."""
    config = read_config(Path(path))
    told = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    if isinstance(told, torch.dtype):
        return told
    held = (entry.dtype for entry in Checkpoint(path).entries.values())
    return next((dtype for dtype in held if dtype.is_floating_point), torch.float32)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}).") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}.")
    return content


def read_header(path: Path) -> dict[str, Entry]:
    """The table of contents of one safetensors file, checked against the file's length."""
    if not path.exists():
        raise UserError(f"{path}: this shard is named by the index and missing. Copy it again.")
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, MAX_HEADER):
            raise UserError(f"{path}: truncated or not a safetensors file ({size} bytes).")
        try:
            raw = json.loads(file.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise UserError(f"{path}: its safetensors header is damaged.") from None
    raw.pop("__metadata__", None)
    entries, end = {}, 0
    for name, item in raw.items():
        if not isinstance(item, dict) or not {"dtype", "shape", "data_offsets"} <= set(item):
            raise UserError(f"{path}: the header's entry for {name!r} is damaged.")
        begin, stop = item["data_offsets"]
        if item["dtype"] not in DTYPES:
            raise UserError(f"{path}: {name!r} has dtype {item['dtype']}, which is not supported.")
        entries[name] = Entry(path.name, DTYPES[item["dtype"]], tuple(item["shape"]), stop - begin)
        end = max(end, stop)
    if size != 8 + length + end:
        raise UserError(
            f"{path}: truncated: {size} bytes, its header asks for {8 + length + end}. "
            "Copy it again."
        )
    return entries


def resolve(model: str) -> Path:
    """A local directory, or a hub id through huggingface_hub (network or its cache)."""
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
