"""The interface of quantization schemes.

A Scheme is a frozen dataclass of its parameters. A LinearOp is one way to run it on one kind of
device: it takes the canonical tensors (those of the checkpoint), converts them once to its own
layout, and can return them unchanged. A Family is what one folder under schemes/ exports to the
registry. The rest of the package uses these interfaces and names no scheme.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.formats.spec import TensorSpec
from billfish.kernels.jit import Program

Tensors = Mapping[str, Tensor]
Shape = tuple[int, int]  # n, k
Options = Mapping[str, Any]  # parameters given by a user: bits, group_size, ...
NormInput = tuple[Any, Tensor] | None  # an op's input, and the residual sum that it is the norm of


class Scheme(Protocol):
    name: ClassVar[str]  # also its folder, its CLI value and its name in configs
    methods: ClassVar[tuple[str, ...]]  # names from solvers/methods.py that can quantize to it

    @classmethod
    def from_options(cls, options: Options) -> "Scheme | Fitting":
        """The scheme with these parameters, or a Fitting if one of them depends on the model.
        Raises a UserError for an unknown option or an invalid value."""

    @classmethod
    def examples(cls) -> list["Scheme"]:
        """Instances that cover all kinds of parameters, for the tests that run over all schemes."""

    def describe(self) -> str:
        """Its parameters in a few words, for tables: "4 bit g128 sym"."""

    # -- what is stored

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Canonical tensors of an (n, k) linear of a model in `dtype`: names, shapes and dtypes."""

    def size(self, tensors: Tensors) -> Shape:
        """(n, k) of a linear, from its canonical tensors."""

    def refuses(self, n: int, k: int) -> str | None:
        """Why an (n, k) linear cannot be quantized and stays in 16 bits, in a few words; or
        None."""

    def misfit(self, shapes: Sequence[Shape]) -> tuple[str, str]:
        """For a model with linears that it refuses: which parameter does not fit, and which
        would."""

    def check(self, tensors: Tensors) -> None:
        """Raise a UserError that names the tensor if their values cannot be a layer's; shapes and
        dtypes are those of `tensors`, floats are finite."""

    def refuses_cut(self, dim: int, at: int, size: int) -> str | None:
        """Why a layer with `size` outputs (dim 0) or inputs (dim 1) cannot be split for tensor
        parallelism before the one `at`; or None."""

    def shard(self, tensors: Tensors, dim: int, begin: int, end: int) -> dict[str, Tensor]:
        """Canonical tensors of outputs (dim 0) or inputs (dim 1) [begin, end). Raises a UserError
        with the reason from refuses_cut if the layer cannot be split there."""

    def random_tensors(
        self, n: int, k: int, dtype: torch.dtype, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Canonical tensors of random weights with a standard deviation of about STD, made on the
        generator's device, for benchmarks."""

    # -- what it means

    def dequantize(self, tensors: Tensors) -> Tensor:
        """The decoded weight, fp32 (n, k), columns in Hugging Face order: the oracle of all ops."""

    def reference(self, tensors: Tensors, x: Tensor) -> Tensor:
        """The product (..., k) -> (..., n) in fp64: the oracle of all ops. A scheme that quantizes
        activations quantizes them here as its kernels do."""


@runtime_checkable
class Fitting(Protocol):
    """A scheme with a parameter that depends on the model."""

    def fit(self, shapes: Sequence[Shape]) -> Scheme:
        """The scheme for a model with these linears."""


STD = 0.02  # of random weights: activations of 80 layers stay far below fp16's maximum


@dataclass(frozen=True)
class Solved(ABC):
    """Result of a solver for one weight, or for several stacked along n. Each scheme has a subclass
    that adds what it stores and implements `decoded`, `rows` and `tensors`."""

    energy: Tensor | None  # (n, 2): squared error and squared norm of each output
    note: str | None
    target: Tensor | None  # (n, k) fp32: what was rounded, where training starts

    @property
    def error(self) -> float | None:
        """Relative squared error of the layer's output on the calibration inputs; None without
        data."""
        if self.energy is None:
            return None
        lost, total = self.energy.double().sum(0).tolist()
        return float(lost / total) if total else 0.0

    @property
    @abstractmethod
    def decoded(self) -> Tensor:
        """(n, k) fp32: the quantized weights, computed when asked for."""

    @abstractmethod
    def rows(self, start: int, end: int) -> Self:
        """The result for rows [start, end): one linear of a stack."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The canonical tensors."""

    @property
    def rounding(self) -> Callable[[Tensor], Tensor] | None:
        """Activations -> as ops round them, with their gradient; None: they stay as they are."""
        return None

    def trainable(self) -> Any:
        """Its parameters for training, a Trainable of solvers/training.py; for schemes made by
        `finetune`."""
        raise NotImplementedError


class LinearOp(Protocol):
    name: ClassVar[str]
    # Never chosen by `auto`: it is less exact than the scheme.
    by_name: ClassVar[bool]
    batch_invariant: ClassVar[bool]  # a row's result does not depend on the batch it is in
    # Its tensor cores have twice the peak of dense 16-bit products: int8, or 2:4 sparse weights.
    doubled: ClassVar[bool]
    # Its input: "x", the activations in their own dtype; or a name for the result of `prepare`,
    # which linears that share an input can share, too (models/joined.py).
    takes: str

    @classmethod
    def refuses(cls, scheme: Any, n: int, k: int, device: torch.device) -> str | None:
        """Why this op cannot run an (n, k) layer there, as advice to the user; or None."""

    @classmethod
    def programs(cls, scheme: Any, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        """CUDA kernels that layers of this scheme in a model of `dtype` may need on `arch`."""

    @classmethod
    def stack_programs(cls, scheme: Any, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        """Those of `stack`."""

    def __init__(self, scheme: Any, tensors: Tensors) -> None:
        """Convert the tensors to the op's layout. The caller may free them afterwards."""

    @classmethod
    def tolerance(cls, scheme: Any, tensors: Tensors, x: Tensor) -> float:
        """For tests: the largest error of an output against `Scheme.reference`, besides rounding
        and summing in x's dtype."""

    def prepare(self, x: Tensor) -> Any:
        """Convert activations to its input; the result depends on `takes` and x alone."""

    def norm_input(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> NormInput:
        """The RMS norm of hidden (m, k) + delta as its input, with the bits of `prepare` after the
        engine's norm and without a launch of the norm's own; and the sum, either hidden itself or
        a tensor that is written when the input is first multiplied. None where it has no such
        kernel; then hidden is unchanged."""

    def __call__(self, x: Any, bias: Tensor | None = None) -> Tensor:
        """(..., k) -> (..., n) in x's dtype; `bias` is (n,). x may be a result of `prepare`."""

    def canonical(self) -> dict[str, Tensor]:
        """The canonical tensors that it was made from, bit for bit."""

    def nbytes(self) -> int:
        """Bytes that it takes in memory."""

    @classmethod
    def join(cls, ops: Sequence[Any]) -> "LinearOp | None":
        """One op for the concatenated outputs of several ops that share an input. Their tensors
        become views of the joined ones, so nothing is stored twice. None if they cannot be joined;
        then they are unchanged."""

    @classmethod
    def gate(cls, ops: Sequence[Any]) -> "GatedOp | None":
        """A gate and an up layer (or one fused layer, gates first) as one op that applies SwiGLU;
        None if there is no such kernel. The layers must use its `parts` as their ops from then
        on."""

    @classmethod
    def stack(cls, experts: Sequence[Sequence[Any]], dtype: torch.dtype) -> "ExpertsOp | None":
        """The gate, up and down layers of all experts as one op for activations of `dtype`; None if
        there is no such kernel. The layers must use its `parts` as their ops from then on."""


class ExpertsOp(Protocol):
    """Runs all experts of a layer without reading anything back from the device."""

    @property
    def parts(self) -> Sequence[Sequence[LinearOp]]:
        """For each expert the ops of the layers that it was made from."""

    def __call__(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """x (m, hidden), of each token its experts (m, several), int64, and their weights -> (m,
        hidden): the sum of down(silu(gate) * up) times its weight, in fp32, in the order of
        `index`."""

    def choose(
        self, logits: Tensor, several: int, normalized: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """A router's choice in one launch: logits (m, experts) -> the `several` largest of their
        softmax, and their weights in `dtype`, fp32 or that of the logits; `normalized`: which add
        up to 1."""


class GatedOp(Protocol):
    @property
    def parts(self) -> Sequence[LinearOp]:
        """The ops of the layers that it was made from."""

    def norm_input(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> NormInput:
        """As a LinearOp's."""

    def __call__(self, x: Any) -> Tensor:
        """(..., k) -> (..., n / 2): silu(gate) * up; gate and up are first rounded to x's dtype."""

    def both(self, x: Tensor) -> Tensor:
        """(..., k) -> (..., n): all gates, then all ups."""


class Op:
    """Defaults for ops."""

    by_name: ClassVar[bool] = False
    batch_invariant: ClassVar[bool] = False
    doubled: ClassVar[bool] = False
    takes: str = "x"

    @classmethod
    def programs(cls, scheme: Any, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        return ()

    @classmethod
    def stack_programs(cls, scheme: Any, dtype: torch.dtype, arch: str) -> tuple[Program, ...]:
        return ()

    @classmethod
    def tolerance(cls, scheme: Any, tensors: Tensors, x: Tensor) -> float:
        return 0.0

    def prepare(self, x: Tensor) -> Any:
        return x

    def norm_input(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> NormInput:
        """Not supported."""
        return None

    @classmethod
    def join(cls, ops: Sequence[Any]) -> Any:
        """Not supported."""
        return None

    @classmethod
    def gate(cls, ops: Sequence[Any]) -> Any:
        """Not supported."""
        return None

    @classmethod
    def stack(cls, experts: Sequence[Sequence[Any]], dtype: torch.dtype) -> Any:
        """Not supported."""
        return None


class Reference(Op):
    """Scheme.reference as an op: simple, slow, runs on any device."""

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
    """A scheme's entry in the registry, exported by its folder."""

    scheme: type[Any]  # a Scheme
    ops: tuple[type[Any], ...]  # LinearOps, fastest first; the reference last
    # Name of a module with quantize(scheme, weight, statistics, method, dtype) -> Solved; for awq
    # search_fold(...), for finetune trainable_scales(scheme, tensors) -> Trainable, for heads
    # quantize_rows(...), which takes the weight in portions (the default scheme's). A scheme that
    # rounds activations may have channel_factors(scheme, squares, share) -> Tensor | None and
    # channel_order(scheme, squares) -> Tensor | None, which are folded before its weights are
    # solved, and has input_rounding(scheme, tensors), Solved's rounding from canonical tensors. A
    # name, because the module imports solvers, which inference never does.
    quantizer: str
    # Public checkpoint formats (schemes/dialect.py) that can store it; Billfish writes the first.
    # If there is none it writes its own (checkpoints/own.py).
    dialects: tuple[type[Any], ...] = ()
    tuner: str | None = None  # module with search(): `billfish bench tune`


def check_cut(scheme: Any, tensors: Tensors, dim: int, begin: int, end: int) -> Shape:
    """The layer's size; raises a UserError if [begin, end) cannot be cut out of it."""
    size: Shape = scheme.size(tensors)
    for at in {begin, end} - {size[dim]}:
        if reason := scheme.refuses_cut(dim, at, size[dim]):
            raise UserError(f"a {size[0]} x {size[1]} layer cannot be cut at {at}: {reason}.")
    return size


def watched(x: Tensor) -> bool:
    """Whether torch.compile, a dispatch mode or autograd must see a torch operator."""
    return (
        torch.compiler.is_compiling()
        or x.requires_grad
        or type(x) is not Tensor
        or torch._C._len_torch_dispatch_stack() > 0
    )


def together(parts: Sequence[Tensor], dim: int = 0) -> tuple[Tensor, list[Tensor]]:
    """The concatenated parts, and each part as a view of them."""
    whole = torch.cat(list(parts), dim)
    return whole, list(torch.split(whole, [part.shape[dim] for part in parts], dim))


def bits_per_weight(scheme: Scheme, n: int, k: int, dtype: torch.dtype) -> float:
    """Bits on disk for each weight, including scales, zeros and whatever else is stored."""
    return sum(spec.nbytes for spec in scheme.tensors(n, k, dtype).values()) * 8 / (n * k)
