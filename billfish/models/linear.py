"""QuantLinear: the quantized linear module, for every scheme.

It starts with empty canonical tensors, so that any loader can fill it by name. `arrange` then hands
them to an op, which keeps the same bits in its own layout; state_dict() always returns canonical
tensors. It contains nothing specific to a scheme, a file format or a device.
"""

from typing import Any

import torch
from torch import Tensor, nn

from billfish.schemes.base import LinearOp, NormInput, Scheme
from billfish.schemes.registry import choose_op


class QuantLinear(nn.Module):
    """y = x W^T + b with W in few bits. Call `arrange` once after loading; otherwise the first
    forward does."""

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
        """Replace the canonical tensors; names and shapes must be those of scheme.tensors()."""
        self.op = None
        for name in self.names:
            setattr(self, name, tensors[name])

    def tensors(self) -> dict[str, Tensor]:
        """The canonical tensors, from the op if it holds them."""
        if self.op is not None:
            return self.op.canonical()
        return {name: getattr(self, name) for name in self.names}

    def arrange(self, op: str = "auto", batch_invariant: bool = False) -> None:
        """Choose an op and hand it the tensors; the canonical copies are freed."""
        self.asked, self.invariant = op, batch_invariant
        tensors = self.tensors()
        device = next(iter(tensors.values())).device
        n, k = self.out_features, self.in_features
        chosen = choose_op(self.scheme, n, k, device, op, batch_invariant)
        self.op = chosen(self.scheme, tensors)
        for name in self.names:
            setattr(self, name, None)

    def norm_input(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> NormInput:
        """As a LinearOp's."""
        return None if self.op is None else self.op.norm_input(hidden, delta, weight, eps)

    def forward(self, x: Any) -> Tensor:  # (..., k), or the result of op.prepare -> (..., n)
        if self.op is None:
            self.arrange()
        assert self.op is not None
        return self.op(x, self.bias)

    @property
    def weight(self) -> Tensor:
        """The decoded weight, fp32 (n, k), computed at every access: for code that reads
        `.weight`."""
        return self.scheme.dequantize(self.tensors())

    def nbytes(self) -> int:
        """Bytes that the weights take in memory in their current layout."""
        if self.op is not None:
            return self.op.nbytes()
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in self.tensors().items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self.op is not None:  # buffers must exist to be loaded
            self.set_tensors(self.op.canonical())
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantLinear":
        """For `.to(device or dtype)`: the op's layout is made for one device, so the canonical
        tensors are moved and arranged again."""
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
