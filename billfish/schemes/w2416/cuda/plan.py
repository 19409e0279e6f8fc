"""Chooses what runs m tokens of one w2416 layer on one GPU.

Up to 16 tokens take one memory-bound launch (w2416_decode on Hopper, w2416_stripe from sm_80 on).
More run on w2416_batch, Hopper's wgmma kernel; before Hopper, up to 64 take a launch for every 16.
Beyond, or where lists of outliers are too long for shared memory, weights are decoded panel by
panel for PyTorch's matrix product. All of it is one torch operator, for torch.compile and CUDA
graphs.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import silu

from billfish.errors import UserError
from billfish.kernels.clusters import CLUSTER, MOST_TOKENS
from billfish.kernels.device import gpu
from billfish.kernels.launch import Loaded
from billfish.schemes.gated import apart
from billfish.schemes.w2416.cuda import batch, stripe, tile
from billfish.schemes.w2416.cuda.arrange import N, Shape
from billfish.schemes.w2416.cuda.instances import TYPES, decode_kernel, panel_kernel

RUN = 16  # gates, then ups: a band of 16 outputs shares second-order scales
PANEL_THREADS, PANEL_SMEM = 256, 64 * 258 * 4  # panel.cuh
# Each slice reads the weights again; decoded weights are written and read in 16 bits, 11 times as
# many bytes as packed ones read once.
MOST_SLICES = 4
PANEL_WEIGHTS = 2**25  # of a panel: 64 MB, about the size of L2

# x, records, columns, bias, out
Path = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], None]


class Plan:
    """Everything about one layer's launches on one device that is the same in every call."""

    def __init__(self, index: int, shape: Shape, striped: bool = False) -> None:
        self.shape = shape
        self.panel = panel_kernel(shape.dtype).load(index)
        self.gpu, self.few = gpu(index), dict[int, Loaded]()
        self.stripes = stripe.Launcher(self.gpu, shape) if striped else None
        for m in () if striped else (8, MOST_TOKENS):
            how = tile.pick_tile(m, shape.n, shape.k, shape.longest, self.gpu)
            self.few[how.tokens] = decode_kernel(shape.dtype, m, how.bands).load(index)
        self.batches = None if striped else batch.Launcher(self.gpu, shape)
        self.paths: dict[tuple[int, bool], Path] = {}

    def _decode(self, m: int, gated: bool) -> Path | None:
        shape = self.shape
        if not tile.fits(shape.n, shape.k, shape.longest, self.gpu):
            return None
        how = tile.pick_tile(m, shape.n, shape.k, shape.longest, self.gpu)
        kernel, stage = self.few[how.tokens], tile.stage_bytes(m, how.bands, shape.longest)
        sizes = (m, shape.n, shape.k, shape.tiles_2, shape.tiles_4, shape.sets)
        room = tile.list_bytes(shape.longest)

        def run(
            x: Tensor,
            records: Tensor,
            columns: Tensor,
            bias: Tensor | None,
            out: Tensor,
        ) -> None:
            arguments = (
                records.data_ptr(),
                columns.data_ptr(),
                x.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                *sizes,
                records.shape[1],
                room,
                how.stages,
                stage,
                gated,
            )
            kernel.launch(how.blocks, tile.THREADS, arguments, how.asked, CLUSTER, True)

        return run

    def decoded(self, records: Tensor, columns: Tensor, start: int, end: int) -> Tensor:
        """Decoded weights of bands [start, end): (rows, k)."""
        shape, rows = self.shape, min(end * N, self.shape.n) - start * N
        out = torch.empty(rows, shape.k, dtype=shape.dtype, device=records.device)
        arguments = (
            records[start].data_ptr(),
            columns.data_ptr(),
            out.data_ptr(),
            rows,
            shape.k,
            shape.tiles_2,
            shape.tiles_4,
            shape.sets,
            records.shape[1],
        )
        self.panel.launch((shape.tiles, end - start), PANEL_THREADS, arguments, PANEL_SMEM)
        return out

    def path(self, m: int, gated: bool) -> Path:
        """The function that runs m tokens, cached for each m; `gated`: it stores silu(gate) *
        up."""
        found = self.paths.get((m, gated))
        if found is None:
            found = self.paths[m, gated] = self._path(m, gated)
        return found

    def _path(self, m: int, gated: bool) -> Path:
        found: Path | None = None
        if m <= MOST_TOKENS:
            found = self.stripes.of(m) if self.stripes else self._decode(m, gated)
        elif self.batches:
            found = self.batches.of(m, gated)
        elif m <= MOST_TOKENS * MOST_SLICES:
            found = self._slices(m)
        if found is not None:
            return self._aligned(found)
        return self._gated_panels if gated else self._panels

    @staticmethod
    def _aligned(kernel: Path) -> Path:
        def run(
            x: Tensor, records: Tensor, columns: Tensor, bias: Tensor | None, out: Tensor
        ) -> None:
            if not x.is_contiguous():
                x = x.contiguous()
            if x.data_ptr() % 16:
                x = x.clone()
            kernel(x, records, columns, bias, out)

        return run

    def _slices(self, m: int) -> Path | None:
        sizes = [min(MOST_TOKENS, m - start) for start in range(0, m, MOST_TOKENS)]
        assert self.stripes is not None
        calls = [call for rows in sizes if (call := self.stripes.of(rows)) is not None]
        if len(calls) < len(sizes):
            return None

        def run(
            x: Tensor, records: Tensor, columns: Tensor, bias: Tensor | None, out: Tensor
        ) -> None:
            xs, outs = torch.split(x.reshape(m, -1), sizes), torch.split(out.view(m, -1), sizes)
            for call, some, made in zip(calls, xs, outs, strict=True):
                call(some, records, columns, bias, made)

        return run

    def _panels(
        self, x: Tensor, records: Tensor, columns: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        """Decode a panel of weights at a time and multiply it with PyTorch."""
        shape = self.shape
        rows, outs = x.reshape(-1, shape.k), out.view(-1, shape.n)
        step = max(1, PANEL_WEIGHTS // (shape.k * N))
        for start in range(0, shape.bands, step):
            weight = self.decoded(records, columns, start, min(start + step, shape.bands))
            outs[:, start * N : start * N + len(weight)] = rows @ weight.T
        if bias is not None:
            out.add_(bias)

    def _gated_panels(
        self, x: Tensor, records: Tensor, columns: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        both = x.new_empty((*x.shape[:-1], self.shape.n))
        self._panels(x, records, columns, bias, both)
        gate, up = apart(both, RUN).chunk(2, -1)
        torch.mul(silu(gate), up, out=out)


@cache
def plan(index: int, shape: Shape, striped: bool = False) -> Plan:
    return Plan(index, shape, striped)


def linear(
    x: Tensor,
    records: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    n: int,
    parts: int,
    two: int,
    four: int,
    longest: int,
    half: bool,
    gated: bool = False,
    striped: bool = False,
) -> Tensor:
    """x (..., k) -> (..., n) in x's dtype. `half`: scales are fp16, and not bf16; x must be the
    same. `gated`: (..., n / 2), silu(gate) * up of rows interleaved by RUN, without bias.
    `striped`: by w2416_stripe, which has no gate."""
    dtype = torch.float16 if half else torch.bfloat16
    if x.dtype not in TYPES:
        raise UserError(f"activations are {x.dtype}; CUDA kernels take float16 and bfloat16.")
    if x.dtype != dtype:
        raise UserError(
            f"activations are {x.dtype}, scales of this layer {dtype}: on a GPU a w2416 layer "
            "takes activations of its scales' type. Load the model in that dtype."
        )
    shape = Shape(n, parts * (two + four) * 16, parts, two, four, dtype, longest)
    if x.shape[-1] != shape.k:
        raise ValueError(f"activations have {x.shape[-1]} columns, the layer takes {shape.k}")
    if x.device != records.device:
        raise ValueError(f"activations are on {x.device}, the layer on {records.device}")
    out = x.new_empty((*x.shape[:-1], n // 2 if gated else n))
    m = x.numel() // shape.k
    if m:
        if bias is not None:
            bias = bias.to(x.device, dtype).contiguous()
        plan(x.get_device(), shape, striped).path(m, gated)(x, records, columns, bias, out)
    return out


# The operator that torch.compile and dispatch modes see; eager calls use `linear` directly.
_library = torch.library.Library("billfish", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "w2416_linear(Tensor x, Tensor records, Tensor columns, Tensor? bias, int n, int parts, "
    "int two, int four, int longest, bool half, bool gated=False, bool striped=False) -> Tensor"
)
_library.impl("w2416_linear", linear, "CUDA")  # type: ignore[no-untyped-call]
operator = torch.ops.billfish.w2416_linear.default


@torch.library.register_fake("billfish::w2416_linear", lib=_library)  # type: ignore[untyped-decorator]
def _fake(
    x: Tensor,
    records: Tensor,
    columns: Tensor,
    bias: Tensor | None,
    n: int,
    parts: int,
    two: int,
    four: int,
    longest: int,
    half: bool,
    gated: bool = False,
    striped: bool = False,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], n // 2 if gated else n)
