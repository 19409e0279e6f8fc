"""The tensor manifest: which tensor of the source became what, a file beside the weights.

    quantized   the tensors of a packed linear stand for it, or of many where the source fuses them
    kept        a parameter of the model, in the checkpoint's type and under its name; one that the
                source fuses (biases of experts) as a tensor for each linear
    decoded     a parameter of the model that the source stores in fewer bits (MXFP4), of which
                several tensors may hold it: in the checkpoint's type, a tensor for each linear
    copied      no part of the model: byte for byte as in the source (drafts for speculative
                decoding, heads of training, rotary tables that transformers does not read)

Every tensor of the source is one of them. `quantize` writes the file, `verify` compares it with the
shards, loading accepts tensors that no module reads if they are `copied` there.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from billfish.checkpoints.config import read_json
from billfish.checkpoints.header import Entry
from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.write import write_json
from billfish.errors import UserError

TENSORS = "billfish_tensors.json"
VERSION = 1
HOW = QUANTIZED, KEPT, DECODED, COPIED = "quantized", "kept", "decoded", "copied"


@dataclass(frozen=True)
class Placed:
    """Where one tensor of the source went."""

    how: str
    dtype: str  # in the source
    shape: tuple[int, ...]
    names: tuple[str, ...]  # of the tensors that stand for it

    def fields(self) -> dict[str, Any]:
        return {"how": self.how, "dtype": self.dtype, "shape": self.shape, "names": self.names}


def place(entry: Entry, how: str, names: Iterable[str]) -> Placed:
    return Placed(how, dtype_name(entry.dtype), entry.shape, tuple(names))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_tensors(folder: Path, placed: Mapping[str, Placed], shards: Iterable[Path]) -> None:
    """Raises if the shards are not what the manifest says: nothing of the source is lost."""
    lost = differences(placed, Checkpoint.of_files(list(map(str, shards))).entries)
    if lost:
        raise UserError(
            f"{folder}: {lost[0][0]} {lost[0][1]} The shards are not those of this job. Start over "
            "with --fresh; if that does not help, it is a fault of Billfish."
        )
    fields = {name: placed[name].fields() for name in sorted(placed)}
    write_json(folder / TENSORS, {"version": VERSION, "tensors": fields})


def read_tensors(folder: Path) -> dict[str, Placed] | None:
    """Tensor of the source -> what became of it; None if the file is not there."""
    file = folder / TENSORS
    if not file.exists():
        return None
    content = read_json(file)
    if content.get("version") != VERSION:
        raise UserError(
            f"{file}: version {content.get('version')!r}; this Billfish reads {VERSION}. "
            "Update it: pip install -U billfish."
        )
    tensors = content.get("tensors")
    if not isinstance(tensors, dict):
        raise UserError(f"{file}: names no tensors. Copy it again.")
    return {name: _placed(file, name, fields) for name, fields in tensors.items()}


def _placed(file: Path, name: str, fields: Any) -> Placed:
    try:
        how, names = fields["how"], tuple(fields["names"])
        shape = tuple(fields["shape"])
        sound = how in HOW and all(isinstance(x, str) for x in names)
        if sound and all(type(size) is int for size in shape) and names:
            return Placed(how, str(fields["dtype"]), shape, names)
    except (KeyError, TypeError):
        pass
    raise UserError(
        f"{file}: says of {name!r} {str(fields)[:80]}; expected how ({', '.join(HOW)}), dtype, "
        "shape and names. Copy it again."
    )


def copied(folder: Path) -> frozenset[str]:
    """Tensors of a checkpoint that its manifest calls no part of the model."""
    placed = read_tensors(folder) or {}
    return frozenset(name for name, each in placed.items() if each.how == COPIED)


def counts(placed: Mapping[str, Placed]) -> dict[str, int]:
    found = Counter(each.how for each in placed.values())
    return {how: found[how] for how in HOW}


def _same_size(shape: tuple[int, ...], each: Placed) -> bool:
    """Whether a tensor is what is left of `each`; several share its numbers evenly (experts that
    the source fuses)."""
    if len(each.names) == 1:
        return shape == each.shape
    return prod(shape) * len(each.names) == prod(each.shape)


def differences(
    placed: Mapping[str, Placed], entries: Mapping[str, Entry]
) -> list[tuple[str, str]]:
    """(tensor, problem) wherever a checkpoint is not what its manifest says."""
    problems = []
    expected: set[str] = set()
    for source, each in placed.items():
        for name in each.names:
            expected.add(name)
            if name not in entries:
                problems.append((name, f"missing: {TENSORS} says {source} became it."))
            elif each.how in (KEPT, COPIED) and not _same_size(entries[name].shape, each):
                told = f"has shape {entries[name].shape}, {TENSORS} says {each.shape}"
                told += f" for {len(each.names)} tensors of a size" if each.names[1:] else ""
                problems.append((name, f"{told}."))
            elif each.how == COPIED and dtype_name(entries[name].dtype) != each.dtype:
                told = f"is {dtype_name(entries[name].dtype)}, {TENSORS} says {each.dtype}."
                problems.append((name, told))
    for name in sorted(entries.keys() - expected):
        problems.append((name, f"is in the files, and {TENSORS} does not say where it is from."))
    return problems
