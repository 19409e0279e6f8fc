"""Reads the header of a safetensors file and checks every entry against the file.

Tensors must follow each other without gap or overlap, have the length of their shape and dtype, and
end with the file. Finally the safetensors library must be able to open it.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from billfish.checkpoints.config import parse, regular
from billfish.errors import UserError

MAX_HEADER = 100 * 2**20  # the safetensors format's own limit
MAX_SIZE = 2**63 - 1
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Entry:
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int


def read_header(path: Path) -> dict[str, Entry]:
    if not path.exists():
        raise UserError(f"{path}: this shard is named by the index and missing. Copy it again.")
    size = regular(path)
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, MAX_HEADER):
            raise UserError(f"{path}: truncated or not a safetensors file ({size} bytes).")
        raw = parse(path, file.read(length), once=True)
    if not isinstance(raw, dict):
        raise UserError(f"{path}: its safetensors header is damaged. Copy it again.")
    raw.pop("__metadata__", None)
    entries, places = {}, []
    for name, item in raw.items():
        entry, begin = _entry(path, name, item)
        entries[name] = entry
        places.append((begin, begin + entry.nbytes, name))
    end = 0
    for begin, stop, name in sorted(places):
        if begin != end:
            fault = "overlaps the tensor before it" if begin < end else "leaves a gap before it"
            raise UserError(
                f"{path}: {name!r} begins at byte {begin} and {fault}, which ends at {end}. "
                "The header is damaged: copy the file again."
            )
        end = stop
    if size != 8 + length + end:
        raise UserError(
            f"{path}: truncated: {size} bytes, its header asks for {8 + length + end}. "
            "Copy it again."
        )
    try:
        with safe_open(path, framework="pt"):
            return entries
    except Exception as error:  # for example broken metadata
        raise UserError(f"{path}: safetensors cannot open it ({error}). Copy it again.") from None


def _entry(path: Path, name: str, item: Any) -> tuple[Entry, int]:
    """One tensor of the header, and its first byte."""
    if not isinstance(item, dict) or not {"dtype", "shape", "data_offsets"} <= set(item):
        raise UserError(f"{path}: the header's entry for {name!r} is damaged.")
    kind, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise UserError(f"{path}: {name!r} has dtype {kind}, which is not supported.")
    if not _sizes(shape):
        raise UserError(f"{path}: {name!r} has shape {shape}; it must be a list of sizes.")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UserError(
            f"{path}: {name!r} has data_offsets {offsets}; expected where it begins and ends."
        )
    begin, stop = offsets
    nbytes = math.prod(shape) * DTYPES[kind].itemsize
    if stop - begin != nbytes:
        raise UserError(
            f"{path}: {name!r} has shape {shape} of {kind}, which is {nbytes} bytes, and "
            f"{stop - begin} in the file. The header is damaged: copy the file again."
        )
    return Entry(path.name, DTYPES[kind], tuple(shape), nbytes), begin


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= MAX_SIZE for n in value)
