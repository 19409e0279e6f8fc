"""Experts in files: one linear per expert, `...experts.3.gate_proj.weight`, is the form that every
command works on and that `quantize` writes.

Mixtral and Qwen are stored so. gpt-oss and Granite store all experts of a layer in one tensor;
`unfused` shows such a checkpoint as if it had a linear per expert, and `fused` gives transformers
the shapes back.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import conversion_mapping
from transformers.core_model_loading import WeightConverter

from billfish.checkpoints.header import Entry
from billfish.checkpoints.mxfp4 import Decoded, is_mxfp4
from billfish.checkpoints.read import Checkpoint
from billfish.checkpoints.tensors import DECODED, KEPT, Placed, place

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # keys of config.json
FUSED = re.compile(  # in the model's own blocks; those of a draft (mtp.*) are copied as they are
    r"((?:model\.)?layers\.\d+\.\w+\.experts)\.(gate_up_proj|down_proj)(_bias)?"
    r"|((?:model\.)?layers\.\d+\.block_sparse_moe)\.(input|output)_linear\.weight"  # Granite
)
SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.(weight|bias)$")
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
PART_OF = {leaf: part for part, leaves in PARTS.items() for leaf in leaves}
GRANITE = {"input": "gate_up_proj", "output": "down_proj"}
# Sizes and numbers in files may be as large as one likes.
MOST_EXPERTS, MOST_MISSING = 2**16, 64  # of a layer; that are named
Shape = tuple[int, ...]
rules_of: Any = conversion_mapping.get_checkpoint_conversion_mapping


@dataclass(frozen=True)
class Layout:
    """How transformers, and files alike, hold all experts of a layer in one tensor. Biases are
    (experts, outputs)."""

    transposed: bool = False  # (experts, inputs, outputs), not (experts, outputs, inputs)
    turns: bool = False  # gates and ups take turns; else all gates come first

    @classmethod
    def of(cls, model_type: Any) -> "Layout":
        return LAYOUTS.get(model_type, cls())

    def outputs(self, leaf: str, all_of_them: int) -> slice:
        """Which outputs of the fused tensor are a linear's."""
        leaves = PARTS[PART_OF[leaf]]
        place, several = leaves.index(leaf), len(leaves)
        if self.turns:
            return slice(place, None, several)
        size = all_of_them // several
        return slice(place * size, (place + 1) * size)


LAYOUTS = {"gpt_oss": Layout(transposed=True, turns=True)}


class Unfused(Checkpoint):
    """A view of a checkpoint with fused experts in which each expert has its own tensors; one
    expert is read at a time."""

    def __init__(self, source: Checkpoint) -> None:
        self.path, self.config, self.source = source.path, source.config, source
        self.layout = Layout.of(source.config.get("model_type"))
        self.entries: dict[str, Entry] = {}
        self._places: dict[str, tuple[str, int, slice]] = {}  # fused tensor, expert, outputs
        for name, entry in source.entries.items():
            found = FUSED.fullmatch(name)
            fits = found is not None and len(entry.shape) == (2 if found[3] else 3)
            if found is None or not fits or not entry.nbytes or entry.shape[0] > MOST_EXPERTS:
                self.entries[name] = entry  # not the model's, which `match` will say
                continue
            prefix, part, bias = found[1], found[2], found[3]
            if found[4]:
                prefix, part = f"{found[4]}.experts", GRANITE[found[5]]
            count, one, *other = entry.shape
            outputs, *inputs = reversed((one, *other)) if self.layout.transposed else (one, *other)
            several = len(PARTS[part])
            for expert in range(count):
                for leaf in PARTS[part]:
                    single = f"{prefix}.{expert}.{leaf}.{'bias' if bias else 'weight'}"
                    shape, size = (outputs // several, *inputs), entry.nbytes // (count * several)
                    self.entries[single] = replace(entry, shape=shape, nbytes=size)
                    self._places[single] = name, expert, self.layout.outputs(leaf, outputs)

    @property
    def held(self) -> dict[str, Entry]:
        return self.source.held

    def sources(self, name: str) -> tuple[str, ...]:
        return self.source.sources(self._places[name][0] if name in self._places else name)

    def tensor(self, name: str) -> Tensor:
        if name not in self._places:
            return self.source.tensor(name)
        fused, expert, outputs = self._places[name]
        one = self.source.row(fused, expert)
        if one.ndim == 2 and self.layout.transposed:
            one = one.T
        return one[outputs].clone(memory_format=torch.contiguous_format)


def unfused(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a linear per expert; itself if it has them, or has no experts."""
    if is_mxfp4(checkpoint.config):
        checkpoint = Decoded(checkpoint)
    whole = any(
        FUSED.fullmatch(name) and len(e.shape) == 3 for name, e in checkpoint.entries.items()
    )
    if whole and not fusing_rules(checkpoint.config.get("model_type")):
        return Unfused(checkpoint)
    return checkpoint


def fusing_rules(model_type: Any) -> list[Any]:
    """The rules by which transformers merges tensors of single experts of a model type."""
    return [rule for rule in rules_of(model_type) or () if is_fusing(rule)]


def is_fusing(rule: Any) -> bool:
    targets = ("experts.gate_up_proj", "experts.down_proj")
    return (
        isinstance(rule, WeightConverter)
        and rule.target_patterns[0].endswith(targets)
        and all(".experts.*." in source for source in rule.source_patterns)
    )


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
    """The shapes with experts fused as transformers' class has them; unchanged where it fuses them
    itself. The experts must be those that `unequal` accepts."""
    if fusing_rules(model_type):
        return dict(shapes)
    made: dict[str, Shape] = {}
    counts: dict[str, int] = {}
    for name in shapes:
        if found := SINGLE.fullmatch(name):
            counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
    transposed = Layout.of(model_type).transposed
    for name, shape in shapes.items():
        found = SINGLE.fullmatch(name)
        if found is None or found[3] not in PART_OF or not shape:
            made[name] = shape
            continue
        part = PART_OF[found[3]]
        size = (len(PARTS[part]) * shape[0], *shape[1:])
        whole = f"{found[1]}.{part}{'_bias' if found[4] == 'bias' else ''}"
        made[whole] = (counts[found[1]], *(reversed(size) if transposed else size))
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
        for expert in islice((i for i in range(count) if i not in held), MOST_MISSING):
            said = (
                f"missing: the layer has {count} experts, and the files hold {len(held)} of them."
            )
            problems.append((f"{prefix}.{expert}.{leaf}.{kind}", said))
        for expert in sorted(i for i in held if i >= count):
            said = f"is in the files, and config.json says {count} experts."
            problems.append((f"{prefix}.{expert}.{leaf}.{kind}", said))
        usual = max(held.values(), key=[*held.values()].count)
        for expert, shape in sorted(held.items()):
            if shape and usual and shape != usual:
                said = f"has shape {shape}, and other experts of the layer have {usual}."
                problems.append((f"{prefix}.{expert}.{leaf}.{kind}", said))
    return problems
