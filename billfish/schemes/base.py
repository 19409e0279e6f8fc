"""The interface of the four peers: what a scheme stores, how it is chosen and run.

A Scheme is a frozen dataclass of its parameters. A LinearOp is one way to run it on one kind of
device; it takes canonical tensors (those of the checkpoint), arranges them once, and can give them
back unchanged. Nothing here knows a scheme by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from billfish.errors import UserError
from billfish.formats.spec import TensorSpec

Tensors = Mapping[str, Tensor]


class Scheme(Protocol):
    name: ClassVar[str]  # = folder = CLI value

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> dict[str, TensorSpec]:
        """What one (n, k) linear stores when the model runs in `dtype`, before data exists."""

    def dequantize(self, tensors: Tensors) -> Tensor:
        """The oracle: fp32 (n, k), columns in Hugging Face order."""

    def ops(self) -> tuple[type["LinearOp"], ...]:
        """Fastest first; the reference last."""


class LinearOp(Protocol):
    name: ClassVar[str]

    @staticmethod
    def refuses(scheme: Any, n: int, k: int, device: torch.device) -> str | None:
        """Why this op cannot run such a layer there, in a sentence a user can act on."""

    def __init__(self, scheme: Any, tensors: Tensors) -> None:
        """Arranges, once. `tensors` may be freed afterwards."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """(..., k) -> (..., n), in x's dtype; `bias` is (n,)."""

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


def choose(
    scheme: Scheme, n: int, k: int, device: torch.device, op: str = "auto"
) -> type[LinearOp]:
    """The op that will run one layer; called once per layer at load, never per call.

    `auto` takes the first op that does not refuse, but never the reference: nothing drops to a slow
    path in silence. Nor one that says `by_name`: it computes something less than the scheme says.
    """
    ops = scheme.ops()
    if op != "auto":
        by_name = {candidate.name: candidate for candidate in ops}
        if op not in by_name:
            raise UserError(
                f"op {op!r} of scheme {scheme.name}: known are auto, {', '.join(by_name)}."
            )
        reason = by_name[op].refuses(scheme, n, k, device)
        if reason:
            raise UserError(f"op {op!r} cannot run a {n} x {k} layer on {device}: {reason}")
        return by_name[op]
    refusals = []
    for candidate in ops[:-1]:
        reason = candidate.refuses(scheme, n, k, device)
        if reason is None and not getattr(candidate, "by_name", False):
            return candidate
        reason = reason or f'runs only by name, op="{candidate.name}".'
        refusals.append(f"  {candidate.name}: {reason}")
    raise UserError(
        f"no fast op of scheme {scheme.name} runs a {n} x {k} layer on {device}:\n"
        + "\n".join(refusals)
        + f'\nop="{ops[-1].name}" runs it anywhere, slowly.'
    )
