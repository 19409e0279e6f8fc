"""The packed linears of one layer of another engine, and the slice of them that one rank runs.

Engines merge linears that share an input (q, k and v; gate and up) and split layers over ranks. A
Layer takes the tensors of its linears whole, as the checkpoint stores them and in any order, cuts
each linear by Scheme.shard as soon as its tensors are complete, and becomes one Product. It refuses
cuts before any tensor is read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from billfish.checkpoints.own import Own
from billfish.errors import UserError
from billfish.formats.spec import TensorSpec
from billfish.schemes.base import LinearOp, Scheme
from billfish.schemes.dialect import Dialect, refuse_unknown
from billfish.schemes.registry import choose_op

Range = tuple[int, int]


@dataclass(frozen=True)
class Slices:
    """What one of `ranks` ranks has of a linear: ranges of its outputs, one of its inputs."""

    n: int
    k: int
    rows: tuple[Range, ...]
    columns: Range
    ranks: int = 1

    @classmethod
    def of_outputs(
        cls, k: int, sizes: Sequence[int], replicas: Sequence[int], rank: int, ranks: int
    ) -> "Slices":
        """Outputs split over ranks, each of several parts (q, k, v of a fused linear) by itself.
        `sizes`: of the parts on one rank; `replicas`: ranks that share a slice of a part."""
        wholes = [size * ranks // shared for size, shared in zip(sizes, replicas, strict=True)]
        starts = [0, *accumulate(wholes)]
        rows: list[Range] = []
        for start, size, shared in zip(starts, sizes, replicas, strict=False):
            begin = start + rank // shared * size
            if rows and rows[-1][1] == begin:  # one rank, or one part: a single range
                begin = rows.pop()[0]
            rows.append((begin, start + (rank // shared + 1) * size))
        return cls(starts[-1], k, tuple(rows), (0, k), ranks)

    @classmethod
    def of_inputs(cls, n: int, k: int, rank: int, ranks: int) -> "Slices":
        """Inputs split over ranks, whose results are then added."""
        size = k // ranks
        return cls(n, k, ((0, n),), (rank * size, (rank + 1) * size), ranks)

    def refusal(self, scheme: Scheme) -> str | None:
        """Why the scheme cannot be cut like this; or None."""
        for dim, size, ranges in ((0, self.n, self.rows), (1, self.k, (self.columns,))):
            for at in sorted({at for each in ranges for at in each} - {0, size}):
                if reason := scheme.refuses_cut(dim, at, size):
                    return reason
        return None

    def of(self, scheme: Scheme, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Canonical tensors of each range of outputs."""
        whole = dict(tensors)
        if self.columns != (0, self.k):
            whole = scheme.shard(whole, 1, *self.columns)
        if self.rows == ((0, self.n),):
            return [whole]
        return [scheme.shard(whole, 0, *rows) for rows in self.rows]


@dataclass
class Stored:
    """One linear of the checkpoint, its tensors as they arrive, and this rank's slices of it."""

    module: str
    dialect: Dialect
    scheme: Scheme
    slices: Slices
    dtype: torch.dtype  # of the model
    waiting: dict[str, Tensor] = field(default_factory=dict)
    cut: list[dict[str, Tensor]] | None = None

    def __post_init__(self) -> None:
        self.refuse_cut(self.scheme)

    def refuse_cut(self, scheme: Scheme) -> None:
        if reason := self.slices.refusal(scheme):
            n, k, ranks = self.slices.n, self.slices.k, self.slices.ranks
            raise UserError(
                f"{self.module}: this {n} x {k} linear cannot be split over {ranks} ranks: "
                f"{reason}. Use a smaller tensor parallel size, or quantize with smaller groups."
            )

    def rehearse(self, small: Mapping[str, Tensor]) -> None:
        """Cut stored tensors of which the large ones are on the meta device: raises a UserError if
        the others, an order of inputs, say, forbid what the scheme of the config allows."""
        try:
            scheme = self.dialect.resolve_scheme(self.scheme, small)
            if isinstance(self.dialect, Own):  # stored tensors are canonical
                self.slices.of(scheme, small)
        except UserError as error:
            raise UserError(f"{self.module}: {error}", error.part) from None
        self.refuse_cut(scheme)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return self.dialect.stored(self.scheme, self.slices.n, self.slices.k, self.dtype)

    def take(self, name: str, tensor: Tensor) -> None:
        """A tensor of the file. The last one frees all: only slices stay in memory."""
        self.waiting[name] = tensor
        if set(self.specs) <= set(self.waiting):
            self.finish()

    def finish(self) -> list[dict[str, Tensor]]:
        """Canonical tensors of the slices; raises a UserError if a tensor is missing or wrong."""
        if self.cut is None:
            dialect, slices = self.dialect, self.slices
            try:
                refuse_unknown(dialect, self.scheme, self.waiting)
                if dialect.words in self.waiting:
                    self.scheme = dialect.resolve_scheme(self.scheme, self.waiting)
                whole = dialect.to_canonical(self.scheme, self.waiting, slices.n, slices.k)
                self.cut = slices.of(self.scheme, whole)
            except UserError as error:
                raise UserError(f"{self.module}: {error}", error.part) from None
            self.waiting = {}
        return self.cut


class Product:
    """y = x W^T + b, of all linears of a layer side by side."""

    def __init__(self, ops: Sequence[LinearOp], sizes: Sequence[int]) -> None:
        kind = type(ops[0])
        alike = len(ops) > 1 and all(type(op) is kind for op in ops)
        whole = kind.join(ops) if alike else None
        self.ops = list(ops) if whole is None else [whole]
        self.sizes = list(sizes)
        takes = {op.takes for op in ops}
        self.shares = takes != {"x"} and len(takes) == 1  # x is prepared once for all ops

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if len(self.ops) == 1:
            return self.ops[0](x, bias)
        taken = self.ops[0].prepare(x) if self.shares else x
        biases = [None] * len(self.ops) if bias is None else torch.split(bias, self.sizes)
        return torch.cat([op(taken, b) for op, b in zip(self.ops, biases, strict=True)], -1)


class Layer:
    """The linears that an engine runs as one layer, in the order of their outputs."""

    def __init__(self, linears: Sequence[Stored]) -> None:
        self.linears = list(linears)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Names of the tensors that it takes; shapes and dtypes are those of its last linear."""
        return {name: spec for linear in self.linears for name, spec in linear.specs.items()}

    def take(self, index: int, name: str, tensor: Tensor) -> None:
        self.linears[index].take(name, tensor)

    def product(self, device: torch.device) -> Product:
        """The product on this device; the tensors are given up."""
        ops: list[LinearOp] = []
        sizes: list[int] = []
        for linear in self.linears:
            scheme = linear.scheme
            for tensors in linear.finish():
                n, k = scheme.size(tensors)
                # CPU kernels take scales of any dtype, GPU kernels those of the activations'.
                cast = linear.dtype if device.type != "cpu" else None
                placed = {
                    name: tensor.to(device, cast if tensor.is_floating_point() else None)
                    for name, tensor in tensors.items()
                }
                try:
                    ops.append(choose_op(scheme, n, k, device)(scheme, placed))
                except UserError as error:
                    raise UserError(f"{linear.module}: {error}") from None
                sizes.append(n)
            linear.cut = None
        return Product(ops, sizes)
