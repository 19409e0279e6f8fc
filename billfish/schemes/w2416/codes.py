"""The solution of a w2416 weight, as solvers leave it and as training changes it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from billfish.formats.layout import pack_stream
from billfish.schemes.base import Solved, Tensors
from billfish.schemes.w2416.scheme import (
    W2416,
    pack_bands,
    pack_base,
    round_base,
    spread,
    unpack_bands,
    unpack_base,
)
from billfish.schemes.w2416.shares import BAND
from billfish.solvers import straight

DECODED = 2**22  # weights


@dataclass(frozen=True)
class Mixed(Solved):
    scheme: W2416
    stored: Tensors

    @property
    def decoded(self) -> Tensor:
        """Some rows at a time: `dequantize` holds several fp32 copies of what it decodes."""
        n, k = self.scheme.size(self.stored)
        weight = torch.empty(n, k, device=self.stored["weight_packed"].device)
        size = max(1, DECODED // (BAND * k)) * BAND
        for start in range(0, n, size):
            end = min(start + size, n)
            some = self.scheme.shard(self.stored, 0, start, end)
            weight[start:end] = self.scheme.dequantize(some)
        return weight

    def rows(self, start: int, end: int) -> "Mixed":
        cut = slice(start, end)
        return Mixed(
            None if self.energy is None else self.energy[cut],
            self.note,
            None if self.target is None else self.target[cut],
            self.scheme,
            self.scheme.shard(self.stored, 0, start, end),
        )

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.stored)

    def trainable(self) -> "TrainableMixed":
        target = self.decoded if self.target is None else self.target
        return TrainableMixed(self.scheme, self.stored, target, self.note)


class TrainableMixed:
    """Codes, scales and outliers in training, or, without a target, second-order and 4-bit scales
    alone. Zeros stay as the solver chose them. Implements Trainable of solvers/training.py.

    Positions of 2-bit weights are codes before rounding: their grid has no point at zero.
    """

    # A 2-bit scale has 16 values, 3 % and more apart, and changes only in the middle between two.
    # Held-out error of SmolLM2's second block with 1, 4 and 8: 0.0101, 0.0099, 0.0098; perplexity
    # on WikiText-2 valid with 4 and 8 the same.
    scale_rate = 4.0
    rounding = None

    def __init__(
        self, scheme: W2416, tensors: Tensors, target: Tensor | None, note: str | None = None
    ) -> None:
        self.scheme, self.tensors, self.note = scheme, dict(tensors), note
        self.dtype = tensors["weight_scale_4"].dtype
        self.shape = scheme.size(tensors)
        self.order = scheme.order(tensors)
        self.places = torch.argsort(self.order)
        self.base, self.offset = unpack_base(tensors["scale_base"])
        self.code = unpack_bands(tensors["scale_code"], 4).float()
        self.zero = scheme.zeros_2(tensors)[..., None]
        self.start_2 = scheme.codes_2(tensors).float()
        self.start_4 = scheme.codes_4(tensors).float() - 8
        self.scale_4 = tensors["weight_scale_4"].float()[..., None]
        self.index = scheme.outlier_index(tensors).flatten()
        self.value = tensors["outlier_value"].float().flatten()
        self.change_4 = torch.zeros_like(self.scale_4)
        self.position_2: Tensor | None = None
        if target is None:
            self.change = torch.zeros_like(self.base)
            return
        scale = scheme.scales_2(tensors)[..., None]
        self.change = torch.zeros_like(scale)
        n, _ = self.shape
        ordered = target[:, self.order]
        two, four = torch.split(ordered, [self.start_2[0].numel(), self.start_4[0].numel()], 1)
        self.position_2 = straight.start(
            two.view(self.start_2.shape) + self.zero * scale, self.start_2, scale
        )
        self.position_4 = straight.start(four.view(self.start_4.shape), self.start_4, self.scale_4)
        # The step of an outlier's value is that of its group.
        steps = torch.zeros(self.shape, device=target.device)
        steps[:, self.order[: two.shape[1]]] = scale.expand(self.start_2.shape).reshape(n, -1)
        self.step = steps.view(-1)[self.index]
        self.move = torch.zeros_like(self.value)

    @property
    def codes(self) -> list[Tensor]:
        if self.position_2 is None:
            return []
        return [t for t in (self.position_2, self.position_4, self.move) if t.numel()]

    @property
    def scales(self) -> list[Tensor]:
        return [t for t in (self.change, self.change_4) if t.numel()]

    def weight(self, dtype: torch.dtype) -> Tensor:
        _, scale = self._scales_2()
        scale_4 = straight.changed_scale(self.scale_4, self.change_4, self.dtype)
        if self.position_2 is None:
            two, four = self.start_2 * scale, self.start_4 * scale_4
        else:
            none, eight = torch.zeros_like(scale), torch.full_like(scale_4, 8.0)
            two = straight.rounded(self.position_2, scale, none, 4, torch.float32)
            four = straight.rounded(self.position_4, scale_4, eight, 16, torch.float32)
        n = self.shape[0]
        both = torch.cat([(two - self.zero * scale).view(n, -1), four.view(n, -1)], 1)
        weight = straight.reordered(both, self.places, self.order)
        added = torch.zeros_like(weight).view(-1).scatter(0, self.index, self._values())
        return (weight + added.view(weight.shape)).to(dtype)

    @torch.no_grad()
    def settle(self) -> Mixed:
        return Mixed(None, self.note, None, self.scheme, {**self.tensors, **self.changed()})

    @torch.no_grad()
    def changed(self) -> dict[str, Tensor]:
        code, scale = self._scales_2()
        scale_4 = straight.changed_scale(self.scale_4, self.change_4, self.dtype)
        made = {"weight_scale_4": scale_4[..., 0].to(self.dtype)}
        if self.position_2 is None:
            made["scale_base"] = pack_base(self._base(), self.offset)
            return made
        n, none = self.shape[0], torch.zeros_like(scale)
        two = straight.whole_steps(self.position_2, none, 4)
        eight = torch.full_like(scale_4, 8.0)
        four = straight.whole_steps(self.position_4, eight, 16) + 8
        made["scale_code"] = pack_bands(code, 4, torch.int64)
        made["weight_packed"] = pack_stream(two.to(torch.uint8).view(n, -1), 2)
        made["weight_packed_4"] = pack_stream(four.to(torch.uint8).view(n, -1), 4)
        shape = self.tensors["outlier_value"].shape
        made["outlier_value"] = self._values().view(shape).to(self.dtype)
        return made

    def _base(self) -> Tensor:
        """Second-order scales as they would be stored now."""
        exact = self.base * (1 + self.change)
        return straight.through(round_base(exact.detach()), exact)

    def _scales_2(self) -> tuple[Tensor, Tensor]:
        """Codes of the scales, (n, g), and the scales, (n, g, 1)."""
        offset = spread(self.offset)
        if self.position_2 is None:
            return self.code, ((self.code + offset) * spread(self._base()))[..., None]
        base = spread(self.base)
        start = (self.code + offset) * base
        exact = start * (1 + self.change[..., 0])
        code = (exact.detach() / base - offset).round_().clamp_(0, 15)
        return code, straight.through((code + offset) * base, exact)[..., None]

    def _values(self) -> Tensor:
        if self.position_2 is None:
            return self.value
        exact = self.value + self.move * self.step
        return straight.through(exact.detach().to(self.dtype).float(), exact)
