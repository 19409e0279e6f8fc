"""Calibration activations between two blocks: held in memory, and saved so that a stopped job can
resume.

    hidden-0000i.safetensors   inputs of block i
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from billfish.checkpoints.write import write_shard


@dataclass
class Activations:
    quantized: list[Tensor]  # (batch, length, hidden) each: outputs of the quantized blocks
    # Outputs of the original blocks; only methods with `follows_original` (GPTQ) keep them.
    original: list[Tensor] = field(default_factory=list)

    def copy(self) -> "Activations":
        """New lists of the same tensors; the tensors themselves are never modified in place."""
        return Activations([*self.quantized], [*self.original])

    def save(self, folder: Path, index: int) -> None:
        parts = {"quantized": self.quantized, "original": self.original}
        tensors = {f"{part}.{i}": t for part, states in parts.items() for i, t in enumerate(states)}
        write_shard(folder / f"hidden-{index:05d}.safetensors", tensors)

    @staticmethod
    def saved(folder: Path) -> dict[int, Path]:
        """Index of the block whose inputs a file holds -> the file."""
        found = folder.glob("hidden-*.safetensors")
        return {int(path.stem.removeprefix("hidden-")): path for path in found}

    @staticmethod
    def load(folder: Path, index: int, device: torch.device) -> "Activations":
        tensors = load_file(Activations.saved(folder)[index], device=str(device))
        parts: dict[str, list[Tensor]] = {"quantized": [], "original": []}
        for name in sorted(tensors, key=lambda name: int(name.rpartition(".")[2])):
            parts[name.partition(".")[0]].append(tensors[name])
        return Activations(parts["quantized"], parts["original"])
