"""Chooses what runs m tokens of one w4a16_24 layer on sm_80 to sm_89.

Up to 64 tokens take one launch of w4a16_24_stripe, 16 where scales have another dtype than x; up to
eight times as many are split into slices. Beyond, weights are decoded panel by panel for PyTorch's
matrix product. All of it is one torch operator, for torch.compile and CUDA graphs.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from billfish.errors import UserError
from billfish.kernels.striped import Run, launcher
from billfish.schemes.w4a16_24.cuda.arrange import SCALE_DTYPES, N, Shape
from billfish.schemes.w4a16_24.cuda.instances import TYPES
from billfish.schemes.w4a16_24.cuda.stripe import panel_kernel, stripe_kernel, tokens_of

PANEL_THREADS, PANEL_SMEM = 256, 64 * 288  # panel.cuh
# A slice reads 3.1 bits a weight and multiplies at the sparse rate; decoded weights are written and
# read in 16 bits and multiplied at the dense rate, half of it. Twice as many as w4a16 has:
# estimated, not measured.
MOST_SLICES = 8
PANEL_WEIGHTS = 2**25  # of a panel: 64 MB, about the size of L2

Path = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]  # x, records, bias, out


class StripePlan:
    """Everything about one layer's launches on one device that is the same in every call."""

    def __init__(self, index: int, shape: Shape, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        kind = (dtype, shape.scale_dtype, shape.record_group)
        self.panel = panel_kernel(*kind).load(index)
        sizes = (shape.n, shape.k, shape.k_tiles, shape.record_bytes)
        self.few: dict[int, Run] = {}
        for tokens in tokens_of(dtype, shape.scale_dtype):
            self.few[tokens] = launcher(stripe_kernel(*kind, tokens).load(index), tokens, *sizes)
        self.most = max(self.few)
        self.paths: dict[int, Path] = {}

    def path(self, m: int) -> Path:
        """The function that runs m tokens, cached for each m."""
        found = self.paths.get(m)
        if found is None:
            found = self.paths[m] = self._path(m)
        return found

    def _path(self, m: int) -> Path:
        if m <= self.most:
            return self._one(m)
        return self._slices(m) if m <= self.most * MOST_SLICES else self._panels

    def _one(self, m: int) -> Path:
        """One launch for all rows; x is made aligned and contiguous."""
        kernel = self.few[min(tokens for tokens in self.few if tokens >= m)]
        padding = -self.shape.k % 8

        def run(x: Tensor, records: Tensor, bias: Tensor | None, out: Tensor) -> None:
            if padding:
                x = pad(x, (0, padding))
            if not x.is_contiguous():
                x = x.contiguous()
            if x.data_ptr() % 16:
                x = x.clone()
            kernel(x, records, bias, out, m)

        return run

    def _slices(self, m: int) -> Path:
        sizes = [min(self.most, m - start) for start in range(0, m, self.most)]
        calls = [self._one(rows) for rows in sizes]

        def run(x: Tensor, records: Tensor, bias: Tensor | None, out: Tensor) -> None:
            xs, outs = torch.split(x.reshape(m, -1), sizes), torch.split(out.view(m, -1), sizes)
            for call, some, made in zip(calls, xs, outs, strict=True):
                call(some, records, bias, made)

        return run

    def decoded(self, records: Tensor, start: int, end: int) -> Tensor:
        """Decoded weights of bands [start, end): (rows, k)."""
        k, rows = self.shape.k, min(end * N, self.shape.n) - start * N
        out = torch.empty(rows, k, dtype=self.dtype, device=records.device)
        arguments = (records[start].data_ptr(), out.data_ptr(), rows, k)
        self.panel.launch((self.shape.k_tiles, end - start), PANEL_THREADS, arguments, PANEL_SMEM)
        return out

    def _panels(self, x: Tensor, records: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Decode a panel of weights at a time and multiply it with PyTorch."""
        shape = self.shape
        rows, outs = x.reshape(-1, shape.k), out.view(-1, shape.n)
        step = max(1, PANEL_WEIGHTS // (shape.k * N))
        for start in range(0, shape.bands, step):
            weight = self.decoded(records, start, min(start + step, shape.bands))
            outs[:, start * N : start * N + len(weight)] = rows @ weight.T
        if bias is not None:
            out.add_(bias)


@cache
def stripe_plan(index: int, shape: Shape, dtype: torch.dtype) -> StripePlan:
    return StripePlan(index, shape, dtype)


def multiply(x: Tensor, records: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
    """x (..., k) -> (..., n) in x's dtype. Allocates the result and, for decoded weights, a
    panel."""
    if x.dtype not in TYPES:
        raise UserError(
            f"activations are {x.dtype}; CUDA kernels take float16 and bfloat16. Load the model "
            "with one of these dtypes."
        )
    if x.shape[-1] != shape.k:
        raise ValueError(f"activations have {x.shape[-1]} columns, the layer takes {shape.k}")
    if x.device != records.device:
        raise ValueError(f"activations are on {x.device}, the layer on {records.device}")
    out = x.new_empty((*x.shape[:-1], shape.n))
    m = x.numel() // shape.k
    if m:
        if bias is not None:
            bias = bias.to(x.device, x.dtype).contiguous()
        stripe_plan(x.get_device(), shape, x.dtype).path(m)(x, records, bias, out)
    return out


def linear(
    x: Tensor,
    records: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    groups: int,
    record_group: int,
    scale_type: int,
) -> Tensor:
    """`scale_type`: index in SCALE_DTYPES."""
    return multiply(x, records, bias, Shape(n, k, groups, record_group, SCALE_DTYPES[scale_type]))


# The operator that torch.compile and dispatch modes see; eager calls need none.
_library = torch.library.Library("billfish", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "w4a16_24_stripe(Tensor x, Tensor records, Tensor? bias, int n, int k, int groups, "
    "int record_group, int scale_type) -> Tensor"
)
_library.impl("w4a16_24_stripe", linear, "CUDA")  # type: ignore[no-untyped-call]
operator = torch.ops.billfish.w4a16_24_stripe.default


@torch.library.register_fake("billfish::w4a16_24_stripe", lib=_library)  # type: ignore[untyped-decorator]
def _fake(
    x: Tensor,
    records: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    groups: int,
    record_group: int,
    scale_type: int,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)
