"""The calibration activations between two blocks: in memory, and on disk for a job that is stopped.

hidden-0000i.safetensors   what enters block i
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from billfish.checkpoints.write import write_shard


@dataclass
class Hidden:
    quantized: list[Tensor]  # (batch, length, hidden) each: behind the quantized blocks
    original: list[Tensor] = field(default_factory=list)  # behind the original ones; only GPTQ asks

    def copy(self) -> "Hidden":
        """The same tensors, which nobody changes, in lists of its own."""
        return Hidden([*self.quantized], [*self.original])

    def save(self, folder: Path, index: int) -> None:
        parts = {"quantized": self.quantized, "original": self.original}
        tensors = {f"{part}.{i}": t for part, states in parts.items() for i, t in enumerate(states)}
        write_shard(folder / f"hidden-{index:05d}.safetensors", tensors)

    @staticmethod
    def saved(folder: Path) -> dict[int, Path]:
        """Files, by the block that they enter."""
        found = folder.glob("hidden-*.safetensors")
        return {int(path.stem.removeprefix("hidden-")): path for path in found}

    @staticmethod
    def load(folder: Path, index: int, device: torch.device) -> "Hidden":
        tensors = load_file(Hidden.saved(folder)[index], device=str(device))
        parts: dict[str, list[Tensor]] = {"quantized": [], "original": []}
        for name in sorted(tensors, key=lambda name: int(name.rpartition(".")[2])):
            parts[name.partition(".")[0]].append(tensors[name])
        return Hidden(parts["quantized"], parts["original"])
