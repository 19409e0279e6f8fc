"""The seam: what a scheme says of itself, what runs it, what a solver makes for it.

A Scheme is a frozen dataclass of its parameters. A LinearOp is one way to run it on one kind of
device; it takes canonical tensors (those of the checkpoint), arranges them once, and can give them
back unchanged. A Family is what one folder under schemes/ gives to the registry. Nothing here, and
nothing in the rooms below, knows a scheme by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from billfish.formats.spec import TensorSpec
from billfish.kernels.jit import Program

Tensors = Mapping[str, Tensor]
Shape = tuple[int, int]  # n, k
Options = Mapping[str, Any]  # what a user said of a scheme's parameters: bits, group_size, ...


class Scheme(Protocol):
    name: ClassVar[str]  # = folder = CLI value = name in a config
    methods: ClassVar[tuple[str, ...]]  # solvers (solvers/methods.py) that can make it

    @classmethod
    def from_options(cls, options: Options) -> "Scheme | Fitting":
        """The scheme that a user asks for; a Fitting where a parameter follows from the model.
        Raises a UserError for an option it does not have, or a value that it cannot take."""

    @classmethod
    def examples(cls) -> list["Scheme"]:
        """With parameters of every kind: what tests of all schemes run over."""

    def describe(self) -> str:
        """Its parameters in a few words, for tables: "4 bit g128 sym"."""

    # -- what is stored

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """What one (n, k) linear stores when the model runs in `dtype`, before data exists."""

    def size(self, tensors: Tensors) -> Shape:
        """(n, k) of a linear's canonical tensors."""

    def refuses(self, n: int, k: int) -> str | None:
        """Why such a linear stays in 16 bits, in a few words."""

    def misfit(self, shapes: Sequence[Shape]) -> tuple[str, str]:
        """Of a model with linears that it refuses: what does not fit, and what would."""

    def refuses_cut(self, dim: int, at: int) -> str | None:
        """Why shards of tensor parallelism cannot meet at output (dim 0) or input (dim 1) `at`."""

    def shard(self, tensors: Tensors, dim: int, begin: int, end: int) -> dict[str, Tensor]:
        """Canonical tensors of outputs (dim 0) or inputs (dim 1) [begin, end); a UserError with the
        sentence of refuses_cut where they cannot be cut there."""

    def random_tensors(
        self, n: int, k: int, dtype: torch.dtype, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Canonical tensors of random weights with a standard deviation of about STD, drawn on the
        generator's device: what benchmarks run."""

    # -- what it means

    def dequantize(self, tensors: Tensors) -> Tensor:
        """The oracle of the weights: fp32 (n, k), columns in Hugging Face order."""

    def reference(self, tensors: Tensors, x: Tensor) -> Tensor:
        """The oracle of the product: (..., k) -> (..., n) in fp64. Where a scheme rounds
        activations as well, this rounds them as its kernels do."""


@runtime_checkable
class Fitting(Protocol):
    """A scheme with a parameter that is left to the model."""

    def fit(self, shapes: Sequence[Shape]) -> Scheme:
        """The scheme for a model with these linears."""


STD = 0.02  # of random weights: what 80 layers add up stays far below what fp16 can hold


@dataclass(frozen=True)
class Solved:
    """What a solver made of a weight, or of several stacked along n. Schemes add what they store:
    `tensors` and `rows` are theirs."""

    decoded: Tensor  # (n, k) fp32: the weights that will run
    energy: Tensor | None  # (n, 2): squared output error and squared output of each row
    note: str | None

    @property
    def error(self) -> float | None:
        """Relative squared error of the layer's output on the calibration inputs; None: no data."""
        if self.energy is None:
            return None
        lost, total = self.energy.double().sum(0).tolist()
        return float(lost / total) if total else 0.0

    def rows(self, start: int, end: int) -> Self:
        """Those of one linear of a stack."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Canonical tensors."""
        raise NotImplementedError


class LinearOp(Protocol):
    name: ClassVar[str]
    by_name: ClassVar[bool]  # never by `auto`: it computes something less than the scheme says
    batch_invariant: ClassVar[bool]  # a row's bits depend on no other row, nor on their number
    # What it multiplies: "x", the activations in their own type; or a name of its own for what
    # `prepare` makes of them, which linears of one input share (models/joined.py).
    takes: ClassVar[str]

    @classmethod
    def refuses(cls, scheme: Any, n: int, k: int, device: torch.device) -> str | None:
        """Why this op cannot run such a layer there, in a sentence a user can act on."""

    @classmethod
    def programs(cls, scheme: Any, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        """CUDA kernels that layers of the scheme, in a model of `dtype`, can need on `arch`."""

    def __init__(self, scheme: Any, tensors: Tensors) -> None:
        """Arranges, once. `tensors` may be freed afterwards."""

    @classmethod
    def tolerance(cls, scheme: Any, tensors: Tensors, x: Tensor) -> float:
        """By how much an output may be off from `Scheme.reference`, beside what rounding the
        result and summing in x's type cost: for tests."""

    def prepare(self, x: Tensor) -> Any:
        """What it takes, made of activations. Ops with the same `takes` make the same of one x."""

    def __call__(self, x: Any, bias: Tensor | None = None) -> Tensor:
        """(..., k) -> (..., n), in x's dtype; `bias` is (n,). x may be what `prepare` made."""

    def canonical(self) -> dict[str, Tensor]:
        """The tensors it was made from, bit for bit."""

    def nbytes(self) -> int:
        """Bytes it keeps in memory."""

    @classmethod
    def join(cls, ops: Sequence[Any]) -> "LinearOp | None":
        """One op of this class for all the outputs of several, which take the same input: their
        words lie in it one after the other and become views, so nothing is stored twice. None
        where they do not fit together; then nothing has changed."""

    @classmethod
    def gate(cls, ops: Sequence[Any]) -> "GatedOp | None":
        """A gate and an up layer (or one that is both, gates first) as an op that applies SwiGLU;
        None where it has no kernel for it. The layers must run with its parts from then on."""


class GatedOp(Protocol):
    @property
    def parts(self) -> Sequence[LinearOp]:
        """An op for each layer that it was made of."""

    def __call__(self, x: Tensor) -> Tensor:
        """(..., k) -> (..., n / 2): silu(gate) * up, each rounded to x's dtype on its way."""

    def both(self, x: Tensor) -> Tensor:
        """(..., k) -> (..., n): all gates, then all ups."""


class Op:
    """What most ops have in common; a LinearOp overrides what it does otherwise."""

    by_name: ClassVar[bool] = False
    batch_invariant: ClassVar[bool] = False
    takes: ClassVar[str] = "x"

    @classmethod
    def programs(cls, scheme: Any, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        return ()

    @classmethod
    def tolerance(cls, scheme: Any, tensors: Tensors, x: Tensor) -> float:
        return 0.0

    def prepare(self, x: Tensor) -> Any:
        return x

    @classmethod
    def join(cls, ops: Sequence[Any]) -> Any:
        """Its layers stay single."""
        return None

    @classmethod
    def gate(cls, ops: Sequence[Any]) -> Any:
        """It has no such kernel."""
        return None


class Reference(Op):
    """The oracle as an op, for any scheme: obviously right, slow, runs anywhere."""

    name: ClassVar[str] = "reference"

    @classmethod
    def refuses(cls, scheme: Scheme, n: int, k: int, device: torch.device) -> str | None:
        return None

    def __init__(self, scheme: Scheme, tensors: Tensors) -> None:
        self.scheme, self.tensors = scheme, dict(tensors)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.scheme.reference(self.tensors, x)
        return (y if bias is None else y + bias.double()).to(x.dtype)

    def canonical(self) -> dict[str, Tensor]:
        return dict(self.tensors)

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Family:
    """A scheme as its folder gives it: one line of the registry."""

    scheme: type[Any]  # a Scheme
    ops: tuple[type[Any], ...]  # LinearOps, fastest first; the reference last
    # Module with quantize(scheme, weight, statistics, method, dtype) -> Solved and, for awq,
    # search_fold(...). By name: it brings the solvers, which nothing that serves a token imports.
    quantizer: str
    # Dialects (schemes/dialect.py): public formats that hold its numbers, the one that we write
    # first; none: our own.
    dialects: tuple[type[Any], ...] = ()
    tuner: str | None = None  # module with search(): `billfish bench tune`


def watched(x: Tensor) -> bool:
    """A compiler, a dispatch mode or autograd wants to see the operator."""
    return (
        torch.compiler.is_compiling()
        or x.requires_grad
        or type(x) is not Tensor
        or torch._C._len_torch_dispatch_stack() > 0
    )


def together(parts: Sequence[Tensor], dim: int = 0) -> tuple[Tensor, list[Tensor]]:
    """One tensor of all parts, and the parts as views of it."""
    whole = torch.cat(list(parts), dim)
    return whole, list(torch.split(whole, [part.shape[dim] for part in parts], dim))


def bits_per_weight(scheme: Scheme, n: int, k: int, dtype: torch.dtype) -> float:
    """True cost: codes, scales, zeros, whatever is stored, as bytes on disk."""
    return sum(spec.nbytes for spec in scheme.tensors(n, k, dtype).values()) * 8 / (n * k)
