"""Experts in files: one linear per expert, `...experts.3.gate_proj.weight`, is the form that every
command works on and that `quantize` writes.

Mixtral and Qwen are stored so. gpt-oss stores all experts of a layer in one tensor; `unfused` shows
such a checkpoint as if it had a linear per expert, and `fused` gives transformers the shapes back.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from billfish.checkpoints.header import Entry
from billfish.checkpoints.mxfp4 import Decoded, is_mxfp4
from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.tensors import DECODED, KEPT, Placed, place

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # keys of config.json
# Model types whose files hold (experts, inputs, outputs) of a layer in one tensor, gates and ups of
# gate_up_proj taking turns, and biases (experts, outputs).
FUSED_TYPES = ("gpt_oss",)
FUSED = re.compile(r"((?:model\.)?layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?$")
SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.(weight|bias)$")
# Part of a fused tensor -> the linears in it: name, first output, step to the next.
PARTS = {
    "gate_up_proj": (("gate_proj", 0, 2), ("up_proj", 1, 2)),
    "down_proj": (("down_proj", 0, 1),),
}
Shape = tuple[int, ...]


class Unfused(Checkpoint):
    """A view of a checkpoint with fused experts in which each expert has its own tensors; one
    expert is read at a time."""

    def __init__(self, source: Checkpoint) -> None:
        self.path, self.config, self.source = source.path, source.config, source
        self.entries: dict[str, Entry] = {}
        self._places: dict[str, tuple[str, int, int, int]] = {}  # fused tensor, expert, first, step
        for name, entry in source.entries.items():
            found = FUSED.fullmatch(name)
            if found is None or len(entry.shape) != (2 if found[3] else 3):  # not the model's
                self.entries[name] = entry
                continue
            prefix, part, bias = found.groups()
            for expert in range(entry.shape[0]):
                for leaf, first, step in PARTS[part]:
                    single = f"{prefix}.{expert}.{leaf}.{'bias' if bias else 'weight'}"
                    outputs = entry.shape[-1] // step
                    shape = (outputs,) if bias else (outputs, entry.shape[1])
                    size = entry.nbytes // (entry.shape[0] * step)
                    self.entries[single] = replace(entry, shape=shape, nbytes=size)
                    self._places[single] = name, expert, first, step

    @property
    def held(self) -> dict[str, Entry]:
        return self.source.held

    def sources(self, name: str) -> tuple[str, ...]:
        return self.source.sources(self._places[name][0] if name in self._places else name)

    def tensor(self, name: str) -> Tensor:
        if name not in self._places:
            return self.source.tensor(name)
        fused, expert, first, step = self._places[name]
        one = self.source.row(fused, expert)  # (outputs,) or (inputs, outputs)
        return one[..., first::step].T.contiguous() if one.ndim == 2 else one[first::step].clone()


def unfused(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a linear per expert; itself if it has them, or has no experts."""
    if is_mxfp4(checkpoint.config):
        checkpoint = Decoded(checkpoint)
    if checkpoint.config.get("model_type") in FUSED_TYPES:
        return Unfused(checkpoint)
    return checkpoint


def by_source(checkpoint: Checkpoint, placed: Mapping[str, Placed]) -> dict[str, Placed]:
    """What became of each tensor in the files, from what became of those that `checkpoint` shows:
    all that the parts of a fused tensor became."""
    names: dict[str, list[str]] = {}
    found = {}
    for name, each in placed.items():
        for source in checkpoint.sources(name):
            entry = checkpoint.held.get(source)
            names.setdefault(source, []).extend(each.names)
            if entry is None:  # a packed head that is tied in the files
                found[source] = each
                continue
            packed = entry.dtype != checkpoint.entries[name].dtype
            how = DECODED if packed and each.how == KEPT else each.how
            found[source] = place(entry, how, names[source])
    return found


def fused(shapes: Mapping[str, Shape], model_type: Any) -> dict[str, Shape]:
    """The shapes with experts fused as transformers' class of a model type in FUSED_TYPES has them;
    unchanged for others. The experts must be those that `unequal` accepts."""
    if model_type not in FUSED_TYPES:
        return dict(shapes)
    made: dict[str, Shape] = {}
    counts: dict[str, int] = {}
    for name in shapes:
        if found := SINGLE.fullmatch(name):
            counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
    parts = {leaf: (part, step) for part, some in PARTS.items() for leaf, _, step in some}
    for name, shape in shapes.items():
        found = SINGLE.fullmatch(name)
        if found is None or found[3] not in parts or not shape:
            made[name] = shape
            continue
        part, step = parts[found[3]]
        size = (*reversed(shape[1:]), step * shape[0])
        made[f"{found[1]}.{part}{'_bias' if found[4] == 'bias' else ''}"] = (
            counts[found[1]],
            *size,
        )
    return made


def unequal(shapes: Mapping[str, Shape], config: Any) -> list[tuple[str, str]]:
    """Experts that are missing, too many or of another shape than their siblings: names of tensors,
    and a sentence about each. `config` is transformers'."""
    told = next((n for key in COUNTS if isinstance(n := getattr(config, key, None), int)), None)
    layers: dict[tuple[str, str, str], dict[int, Shape]] = {}
    for name, shape in shapes.items():
        if found := SINGLE.fullmatch(name):
            prefix, expert, leaf, kind = found.groups()
            layers.setdefault((prefix, leaf, kind), {})[int(expert)] = shape
    problems = []
    for (prefix, leaf, kind), held in layers.items():
        count = max(*held, 0) + 1 if told is None else told
        for expert in sorted({*range(count)} - {*held}):
            said = (
                f"missing: the layer has {count} experts, and the files hold {len(held)} of them."
            )
            problems.append((f"{prefix}.{expert}.{leaf}.{kind}", said))
        for expert in sorted({*held} - {*range(count)}):
            said = f"is in the files, and config.json says {count} experts."
            problems.append((f"{prefix}.{expert}.{leaf}.{kind}", said))
        usual = max(held.values(), key=[*held.values()].count)
        for expert, shape in sorted(held.items()):
            if shape and usual and shape != usual:
                said = f"has shape {shape}, and other experts of the layer have {usual}."
                problems.append((f"{prefix}.{expert}.{leaf}.{kind}", said))
    return problems
