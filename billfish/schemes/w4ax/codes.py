"""The solution of a w4ax weight, as solvers leave it and as training changes it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from billfish.formats.grid import Grid
from billfish.schemes.base import Solved
from billfish.schemes.w4ax.activations import hadamard, rotated_by, round_blocks, round_tokens
from billfish.schemes.w4ax.scheme import W4AX
from billfish.schemes.w4ax.search import largest_q
from billfish.solvers import straight


@dataclass(frozen=True)
class Inputs:
    """fmpq: which input each stored column reads, and the bits of each block of columns."""

    order: Tensor  # (k,) int64
    bits: Tensor  # (k / block,) uint8
    back: Tensor = field(init=False)  # (k,) int64: the column of each input
    matrix: Tensor = field(init=False)  # of Hadamard, for a block

    def __post_init__(self) -> None:
        one = torch.eye(len(self.order) // len(self.bits), device=self.order.device)
        object.__setattr__(self, "back", self.order.argsort())
        object.__setattr__(self, "matrix", hadamard(one))


def rounded_input(scheme: W4AX, inputs: Inputs | None, x: Tensor) -> Tensor:
    """Activations as ops round them, but for ties, with the gradient of x. Rotated by a product:
    butterflies are seven passes over x."""
    given = x.detach()
    if inputs is None:
        x8, scale = round_tokens(given)
        return straight.through((x8 * scale).to(x.dtype), x)
    matrix, bits, z = inputs.matrix, inputs.bits, given[..., inputs.order]
    with torch.autocast(x.device.type, enabled=False):
        x8, scale = round_blocks(rotated_by(matrix, z, bits) if scheme.rotation else z, bits, False)
        z = x8 * scale
        z = rotated_by(matrix, z, bits) if scheme.rotation else z
    return straight.through(z[..., inputs.back].to(x.dtype), x)


@dataclass(frozen=True)
class WholeScaled(Solved):
    """`target` is in stored order, as the codes are."""

    scheme: W4AX
    codes: Tensor  # (n, k) uint8
    q: Tensor  # (n, g) uint8: 1 to 16
    zero: Tensor  # (n, g) uint8: 0 to 15
    base: Tensor  # (n, 1) in the stored dtype
    inputs: Inputs | None = None  # of fmpq

    @property
    def stored(self) -> Tensor:
        """(n, k) fp32: the weights in stored order."""
        steps = self.codes.float().view(*self.q.shape, -1) - self.zero.float()[..., None]
        return steps.mul_(self.q.float()[..., None]).view(self.codes.shape) * self.base.float()

    @property
    def decoded(self) -> Tensor:
        if self.inputs is None:
            return self.stored
        return self.scheme.given_order(self.stored, self.inputs.order, self.inputs.bits)

    @property
    def rounding(self) -> Callable[[Tensor], Tensor]:
        return partial(rounded_input, self.scheme, self.inputs)

    def rows(self, start: int, end: int) -> "WholeScaled":
        cut = slice(start, end)
        return replace(
            self,
            energy=None if self.energy is None else self.energy[cut],
            target=None if self.target is None else self.target[cut],
            codes=self.codes[cut],
            q=self.q[cut],
            zero=self.zero[cut],
            base=self.base[cut],
        )

    def tensors(self) -> dict[str, Tensor]:
        inputs = () if self.inputs is None else (self.inputs.order, self.inputs.bits)
        return self.scheme.pack(self.codes, self.q, self.base, self.zero, *inputs)

    def trainable(self) -> "TrainableWhole":
        return TrainableWhole(self, self.stored if self.target is None else self.target)


class TrainableWhole:
    """Codes, q, zeros and bases in training, or, without a target, bases alone.

    Implements Trainable of solvers/training.py.
    """

    scale_rate = 1.0

    def __init__(self, solved: WholeScaled, target: Tensor | None) -> None:
        self.solved = replace(solved, energy=None, target=None)
        self.grid, self.inputs = Grid(4, solved.scheme.symmetric), solved.inputs
        self.start = solved.codes.view(*solved.q.shape, -1)  # (n, g, size)
        self.q, self.zero = solved.q.float()[..., None], solved.zero.float()[..., None]  # (n, g, 1)
        self.base = solved.base.float()[..., None]  # (n, 1, 1)
        self.change, self.change_q = torch.zeros_like(self.base), torch.zeros_like(self.q)
        self.position: Tensor | None = None
        if target is not None:
            self.move = torch.zeros_like(self.zero)
            steps = self.start.float() - self.zero
            self.position = straight.start(target.view(steps.shape), steps, self.q * self.base)

    @property
    def rounding(self) -> Callable[[Tensor], Tensor]:
        return self.solved.rounding

    @property
    def codes(self) -> list[Tensor]:
        if self.position is None:
            return []
        return [self.position] if self.grid.symmetric else [self.position, self.move]

    @property
    def scales(self) -> list[Tensor]:
        return [self.change] if self.position is None else [self.change, self.change_q]

    def weight(self, dtype: torch.dtype) -> Tensor:
        q, zero, base = self._stored()
        made = torch.float32 if self.inputs is not None else dtype
        if self.position is None:
            decoded = ((self.start.float() - zero) * q * base).to(made)
        else:
            decoded = straight.rounded(self.position, q * base, zero, self.grid.levels, made)
        decoded = decoded.view(len(decoded), -1)
        if self.inputs is None:
            return decoded
        if self.solved.scheme.rotation:
            decoded = rotated_by(self.inputs.matrix, decoded, self.inputs.bits)
        return straight.reordered(decoded, self.inputs.back, self.inputs.order).to(dtype)

    @torch.no_grad()
    def settle(self) -> WholeScaled:
        q, zero, base = self._stored()
        codes = self.start
        if self.position is not None:
            steps = straight.whole_steps(self.position, zero, self.grid.levels)
            codes = (steps + zero).to(torch.uint8)
        return replace(
            self.solved,
            codes=codes.view(len(codes), -1),
            q=q[..., 0].round().to(torch.uint8),
            zero=zero[..., 0].round().to(torch.uint8),
            base=base[..., 0].to(self.solved.base.dtype),
        )

    @torch.no_grad()
    def changed(self) -> dict[str, Tensor]:
        if self.position is not None:
            return self.settle().tensors()
        return {"weight_scale": self._stored()[2][..., 0].to(self.solved.base.dtype)}

    def _stored(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, zero and base as the checkpoint would hold them now."""
        base = straight.changed_scale(self.base, self.change, self.solved.base.dtype)
        if self.position is None:
            return self.q, self.zero, base
        zero = self.zero
        if not self.grid.symmetric:
            zero = straight.moved_zero(zero, self.move, self.grid)
        exact = self.q * (1 + self.change_q)
        whole = torch.minimum(exact.detach().round().clamp(min=1), largest_q(zero.detach().round()))
        return straight.through(whole, exact), zero, base
