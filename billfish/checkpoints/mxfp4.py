"""MXFP4 in files: the experts of gpt-oss as it is published, shown as if they were stored in bf16.

A tensor X, (experts, inputs, outputs), is stored as bytes X_blocks (experts, outputs, blocks, 16)
and X_scales (experts, outputs, blocks). Of the OCP's Microscaling Formats 1.0: a block is 32
numbers of 4 bits (e2m1), two a byte, the low half first, and one scale, 2^(byte - 127); the byte
255 is NaN. A number has two significant bits, so bf16 holds it exactly.
"""

import re
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from billfish.checkpoints.header import Entry
from billfish.checkpoints.read import Checkpoint
from billfish.errors import UserError

METHOD = "mxfp4"  # quant_method in config.json
MODEL_TYPES = ("gpt_oss",)
HALF = re.compile(
    r"((?:model\.)?layers\.\d+\.mlp\.experts\.(?:gate_up_proj|down_proj))_(blocks|scales)"
)
BLOCK = 32  # numbers that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODES = torch.tensor([*E2M1, *(-number for number in E2M1)], dtype=torch.bfloat16)
# Byte -> its two numbers, and byte -> scale; e2m1 times a scale below 2^126 is finite in bf16.
PAIRS = torch.stack((CODES.repeat(16), CODES.repeat_interleave(16)), -1)
SCALES = torch.ldexp(torch.ones(256), torch.arange(256) - 127).bfloat16()
SCALES[255] = torch.nan


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that experts are stored this way."""
    told = config.get("quantization_config")
    named = isinstance(told, dict) and told.get("quant_method") == METHOD
    return named and config.get("model_type") in MODEL_TYPES


def numbers(name: str, entry: Entry) -> int:
    """Parameters of the model that a tensor in the files holds: two in each byte of blocks."""
    half = HALF.fullmatch(name)
    each = 1 if half is None else 2 if half[2] == "blocks" else 0
    return each * prod(entry.shape)


def is_scales(name: str) -> bool:
    half = HALF.fullmatch(name)
    return half is not None and half[2] == "scales"


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """(..., blocks, 16) and (..., blocks) bytes -> (..., inputs) bf16."""
    values = PAIRS[blocks.int()].flatten(-2)
    return values.mul_(SCALES[scales.int()][..., None]).flatten(-2)


def problems(entries: Mapping[str, Entry]) -> list[tuple[str, str]]:
    """Names of tensors that are not as above, and a sentence about each."""
    found = []
    halves = {name: half for name in entries if (half := HALF.fullmatch(name))}
    for name, half in halves.items():
        stem, part = half.groups()
        other = f"{stem}_{'scales' if part == 'blocks' else 'blocks'}"
        if other not in entries:
            found.append((other, f"missing: {name} is there without it, and MXFP4 needs both."))
        elif stem in entries and part == "blocks":
            found.append((name, f"is in the files, and so is {stem}: which counts is not said."))
        elif entries[name].dtype != torch.uint8:
            found.append((name, f"holds {entries[name].dtype}; MXFP4's {part} are bytes (uint8)."))
        elif part == "blocks":
            shape, scales = entries[name].shape, entries[other].shape
            if len(shape) != 4 or 2 * shape[-1] != BLOCK or shape[:-1] != scales:
                rule = "(experts, outputs, blocks, 16), and scales the same without the 16"
                found.append((name, f"has shape {shape}, its scales {scales}; expected {rule}."))
    return found


def decoded(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries as of a checkpoint in bf16, but for `nbytes`, which stay those in the files. The
    entries must be without `problems`."""
    found = {}
    for name, entry in entries.items():
        half = HALF.fullmatch(name)
        if half is None:
            found[name] = entry
        elif half[2] == "blocks":
            experts, outputs, blocks, _ = entry.shape
            size = entry.nbytes + entries[f"{half[1]}_scales"].nbytes
            shape = experts, blocks * BLOCK, outputs
            found[half[1]] = Entry(entry.file, torch.bfloat16, shape, size)
    return found


class Decoded(Checkpoint):
    """A view of a checkpoint in MXFP4 in which experts are bf16; `row` decodes one of them."""

    def __init__(self, source: Checkpoint) -> None:
        for name, told in problems(source.entries)[:1]:
            place = source.path / source.entries[name].file if name in source else source.path
            raise UserError(f"{place}: {name!r} {told} Copy the checkpoint again.")
        self.path, self.source = source.path, source
        self.entries = decoded(source.entries)
        self.config = {k: v for k, v in source.config.items() if k != "quantization_config"}

    @property
    def held(self) -> dict[str, Entry]:
        return self.source.held

    def sources(self, name: str) -> tuple[str, ...]:
        packed = name in self and name not in self.source
        return (f"{name}_blocks", f"{name}_scales") if packed else (name,)

    def tensor(self, name: str) -> Tensor:
        if name in self.source:
            return self.source.tensor(name)
        return torch.stack([self.row(name, i) for i in range(self.entries[name].shape[0])])

    def row(self, name: str, index: int) -> Tensor:
        if name in self.source:
            return self.source.row(name, index)
        blocks, scales = (self.source.row(part, index) for part in self.sources(name))
        return decode(blocks, scales).T
