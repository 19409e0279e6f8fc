"""QuantLinear: the one quantized module, for every scheme.

It is born holding empty canonical tensors (so that any loader can fill it by name), then `arrange`
hands them to an op, which keeps its own order of the same bits; state_dict() always speaks
canonical. It knows no scheme, no file and no device beyond its own.
"""

from typing import Any

import torch
from torch import Tensor, nn

from billfish.schemes.base import LinearOp, Scheme
from billfish.schemes.registry import choose_op


class QuantLinear(nn.Module):
    """y = x W^T + b with W in few bits. Call `arrange` once after loading; forward does it if
    nobody has."""

    def __init__(
        self,
        scheme: Scheme,
        n: int,
        k: int,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.scheme, self.out_features, self.in_features = scheme, n, k
        self.op: LinearOp | None = None
        self.asked, self.invariant = "auto", False
        specs = scheme.tensors(n, k, dtype)
        self.names = tuple(specs)
        for name, spec in specs.items():
            self.register_buffer(name, spec.empty(device or "cpu"))
        self.bias = (
            nn.Parameter(torch.empty(n, dtype=dtype, device=device), requires_grad=False)
            if bias
            else None
        )

    def set_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Replace the canonical tensors; shapes and names must be those of the scheme."""
        self.op = None
        for name in self.names:
            setattr(self, name, tensors[name])

    def tensors(self) -> dict[str, Tensor]:
        """The canonical tensors, wherever they are now."""
        if self.op is not None:
            return self.op.canonical()
        return {name: getattr(self, name) for name in self.names}

    def arrange(self, op: str = "auto", batch_invariant: bool = False) -> None:
        """Choose the op and give it the tensors; the canonical copies are dropped."""
        self.asked, self.invariant = op, batch_invariant
        tensors = self.tensors()
        device = next(iter(tensors.values())).device
        n, k = self.out_features, self.in_features
        chosen = choose_op(self.scheme, n, k, device, op, batch_invariant)
        self.op = chosen(self.scheme, tensors)
        for name in self.names:
            setattr(self, name, None)

    def forward(self, x: Any) -> Tensor:  # (..., k), or what the op takes -> (..., n)
        if self.op is None:
            self.arrange()
        assert self.op is not None
        return self.op(x, self.bias)

    @property
    def weight(self) -> Tensor:
        """Decoded on demand, fp32 (n, k): for inspection and for code that peeks at `.weight`."""
        return self.scheme.dequantize(self.tensors())

    def nbytes(self) -> int:
        """Bytes of the weights in memory as they are now."""
        if self.op is not None:
            return self.op.nbytes()
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in self.tensors().items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if (
            self.op is not None
        ):  # loading over an arranged layer starts from canonical tensors again
            self.set_tensors(self.op.canonical())
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantLinear":
        """`.to(device or dtype)`: the op's words belong to one device, so it is arranged anew
        there."""
        arranged = self.op is not None
        if arranged:
            self.set_tensors(self.tensors())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if arranged:
            self.arrange(self.asked, self.invariant)
        return self

    def extra_repr(self) -> str:
        op = self.op.name if self.op else "not arranged"
        return f"k={self.in_features}, n={self.out_features}, {self.scheme}, op={op}"
