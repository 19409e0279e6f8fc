"""The solution of a w4a16 weight, as solvers leave it and as training changes it."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from billfish.schemes.base import Solved
from billfish.schemes.w4a16.scheme import W4A16
from billfish.solvers import straight


@dataclass(frozen=True)
class Codes(Solved):
    scheme: W4A16
    codes: Tensor  # (n, k) uint8
    scales: Tensor  # (n, g) in the stored dtype
    zeros: Tensor  # (n, g) uint8

    @property
    def decoded(self) -> Tensor:
        groups = self.codes.view(*self.scales.shape, -1)
        scale, zero = self.scales.float()[..., None], self.zeros.float()[..., None]
        return self.scheme.grid.decode(groups, scale, zero).view_as(self.codes)

    def rows(self, start: int, end: int) -> "Codes":
        cut = slice(start, end)
        energy = None if self.energy is None else self.energy[cut]
        return Codes(
            energy,
            self.note,
            None if self.target is None else self.target[cut],
            self.scheme,
            self.codes[cut],
            self.scales[cut],
            self.zeros[cut],
        )

    def tensors(self) -> dict[str, Tensor]:
        return self.scheme.pack(self.codes, self.scales, self.zeros)

    def trainable(self) -> "TrainableCodes":
        target = self.decoded if self.target is None else self.target
        return TrainableCodes(self.scheme, self.codes, self.scales, self.zeros, target, self.note)


@dataclass(frozen=True)
class PackedRows(Solved):
    """A solution that keeps its canonical tensors alone, on the CPU."""

    scheme: W4A16
    packed: dict[str, Tensor]

    @classmethod
    def of(cls, portions: Iterable[Codes]) -> "PackedRows":
        """Of rows one after another. Each portion but the last fills the words of its zeros, which
        are packed along n."""
        packed, energies = list[dict[str, Tensor]](), list[Tensor]()
        for part in portions:
            packed.append({name: tensor.cpu() for name, tensor in part.tensors().items()})
            energies += [] if part.energy is None else [part.energy.cpu()]
        whole = {name: torch.cat([each[name] for each in packed]) for name in packed[0]}
        sizes = whole["weight_shape"].view(-1, 2)
        whole["weight_shape"] = torch.stack((sizes[:, 0].sum(), sizes[0, 1]))
        energy = torch.cat(energies) if energies else None
        return cls(energy, part.note, None, part.scheme, whole)

    @property
    def decoded(self) -> Tensor:
        return self.scheme.dequantize(self.packed)

    def rows(self, start: int, end: int) -> "PackedRows":
        energy = None if self.energy is None else self.energy[start:end]
        tensors = self.scheme.shard(self.packed, 0, start, end)
        return PackedRows(energy, self.note, None, self.scheme, tensors)

    def tensors(self) -> dict[str, Tensor]:
        return self.packed


class TrainableCodes:
    """Codes, scales and zeros in training, or, without a target, scales alone.

    Implements Trainable of solvers/training.py.
    """

    scale_rate = 1.0
    rounding = None

    def __init__(
        self,
        scheme: W4A16,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor,
        target: Tensor | None,
        note: str | None = None,
    ) -> None:
        self.scheme, self.grid, self.note = scheme, scheme.grid, note
        self.start, self.dtype = codes.view(*scales.shape, -1), scales.dtype  # (n, g, size)
        self.scale, self.zero = scales.float()[..., None], zeros.float()[..., None]  # (n, g, 1)
        self.change = torch.zeros_like(self.scale)
        self.position: Tensor | None = None
        if target is not None:
            self.move = torch.zeros_like(self.zero)
            steps = self.start - self.zero
            self.position = straight.start(target.view(steps.shape), steps, self.scale)

    @property
    def codes(self) -> list[Tensor]:
        if self.position is None:
            return []
        return [self.position] if self.grid.symmetric else [self.position, self.move]

    @property
    def scales(self) -> list[Tensor]:
        return [self.change]

    def weight(self, dtype: torch.dtype) -> Tensor:
        scale, zero = self._stored()
        if self.position is None:
            decoded = self.grid.decode(self.start, scale, zero).to(dtype)
        else:
            decoded = straight.rounded(self.position, scale, zero, self.grid.levels, dtype)
        return decoded.view(len(decoded), -1)

    @torch.no_grad()
    def settle(self) -> Codes:
        scale, zero = self._stored()
        codes = self.start
        if self.position is not None:
            steps = straight.whole_steps(self.position, zero, self.grid.levels)
            codes = (steps + zero).to(torch.uint8)
        return Codes(
            None,
            self.note,
            None,
            self.scheme,
            codes.view(len(codes), -1),
            scale[..., 0].to(self.dtype),
            zero[..., 0].to(torch.uint8),
        )

    @torch.no_grad()
    def changed(self) -> dict[str, Tensor]:
        if self.position is not None:
            return self.settle().tensors()
        return {"weight_scale": self._stored()[0][..., 0].to(self.dtype)}

    def _stored(self) -> tuple[Tensor, Tensor]:
        """Scale and zero as the checkpoint would hold them now."""
        scale = straight.changed_scale(self.scale, self.change, self.dtype)
        if self.position is None or self.grid.symmetric:
            return scale, self.zero
        return scale, straight.moved_zero(self.zero, self.move, self.grid)
