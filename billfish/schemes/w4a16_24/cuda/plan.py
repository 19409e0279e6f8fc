"""Products of one w4a16_24 layer on one GPU: w4a16_24_decode up to 16 tokens, else w4a16_24_batch.

Where scales have another type than x, weights in x's type would be rounded twice: w4a16_24_decode,
which scales sums, then takes every 16 tokens in turn. All of it is one torch operator, for
torch.compile and dispatch modes.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from billfish.errors import UserError
from billfish.kernels import tensor_map, tiles, workspace
from billfish.kernels.clusters import CLUSTER, MOST_TOKENS
from billfish.kernels.device import gpu
from billfish.kernels.launch import Loaded
from billfish.schemes.w4a16_24.cuda import tile
from billfish.schemes.w4a16_24.cuda.arrange import SCALE_DTYPES, Shape
from billfish.schemes.w4a16_24.cuda.instances import INSTANCES, TYPES, batch_kernel, decode_kernel

RUN = 8  # gates, then ups: a thread has rows r and r + 8
# A stage's clocks from a loop of wgmma.sp with decoding alone at 1.6 GHz, and a tenth more, except
# (128, 1), where measured times asked for 0.48; all else as fitted to w4ax_batch, which has the
# same tiles and reductions. Of 33 products of four layers on an H200, 25 get the fastest
# configuration or lose at most 1 % to it (docs/LOG.md, 2026-11-18).
COSTS = tiles.Costs(
    {
        (32, 1): 0.24,
        (64, 1): 0.32,
        (64, 2): 0.63,
        (128, 1): 0.48,
        (128, 2): 0.87,
        (256, 1): 0.80,
    },
    together=2.0,
    busy=0.26,
    tile_us=0.47,
    meeting_us=(5.6, 0.55),
    cluster_us=1.5,
    clusters=(2,),
)
assert set(COSTS.stage_us) == set(INSTANCES)

Product = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]  # x, records, bias, out


class Plan:
    """Everything about one layer's products on one device that is the same in every call."""

    def __init__(self, index: int, shape: Shape, dtype: torch.dtype) -> None:
        self.shape, self.gpu = shape, gpu(index)
        self.columns = shape.k + -shape.k % 8  # of x: TMA takes rows of multiples of 16 bytes
        self.few = dict[int, Loaded]()
        for m in (8, MOST_TOKENS):
            bands = tile.pick_tile(m, shape.n, shape.k, shape.record_bytes, self.gpu).bands
            kind = (dtype, shape.scale_dtype, shape.record_group)
            self.few[m] = decode_kernel(*kind, m, bands).load(index)
        self.batches = dict[tiles.Instance, Loaded]()
        if dtype == shape.scale_dtype:
            for instance in INSTANCES:
                kernel = batch_kernel(dtype, shape.record_group, *instance)
                self.batches[instance] = kernel.load(index)
        self.products: dict[tuple[int, bool], Product] = {}

    def product(self, m: int, gated: bool) -> Product:
        """The function that runs m tokens, cached for each m; `gated`: it stores silu(gate) *
        up."""
        found = self.products.get((m, gated))
        if found is None:
            found = self.products[m, gated] = self._product(m, gated)
        return found

    def _product(self, m: int, gated: bool) -> Product:
        if m <= MOST_TOKENS:
            return self.decode(m, gated)
        if self.batches:
            return self.batch(m, gated, self.pick(m))
        return self._slices(m, gated)

    def pick(self, m: int) -> tiles.Launch:
        shape = self.shape
        found = tiles.cheapest(m, shape.n, shape.k_tiles, shape.record_bytes, self.gpu, COSTS)
        assert found is not None, "one always fits in a Hopper SM"
        return found

    def decode(self, m: int, gated: bool) -> Product:
        shape = self.shape
        how = tile.pick_tile(m, shape.n, shape.k, shape.record_bytes, self.gpu)
        kernel, columns = self.few[how.tokens], self.columns

        def run(x: Tensor, records: Tensor, bias: Tensor | None, out: Tensor) -> None:
            x = self._rows(x)
            arguments = (
                records.data_ptr(),
                tensor_map.of_rows(x.data_ptr(), m, columns, how.tokens),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                m,
                shape.n,
                shape.k_tiles,
                how.stages,
                gated,
            )
            kernel.launch(how.blocks, tile.THREADS, arguments, how.asked, CLUSTER, True)

        return run

    def batch(self, m: int, gated: bool, how: tiles.Launch) -> Product:
        shape, index, cut = self.shape, self.gpu.index, how.cut
        kernel, columns = self.batches[cut.tokens, cut.bands], self.columns
        sizes = (m, shape.n, how.m_tiles, how.n_tiles, shape.k_tiles, how.whole, cut.splits)

        def run(x: Tensor, records: Tensor, bias: Tensor | None, out: Tensor) -> None:
            x = self._rows(x)
            sums = locks = 0
            if how.sums:
                left = workspace.of_stream(index, how.sums, how.flags)
                sums, locks = left[0].data_ptr(), left[1].data_ptr()
            arguments = (
                records.data_ptr(),
                tensor_map.of_rows(x.data_ptr(), m, columns, cut.tokens),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                sums,
                locks,
                *sizes,
                how.stages,
                how.early,
                gated,
            )
            kernel.launch(how.blocks, tiles.THREADS, arguments, how.asked, cut.splits, True)

        return run

    def _slices(self, m: int, gated: bool) -> Product:
        """A launch for every 16 tokens."""
        sizes = [min(MOST_TOKENS, m - start) for start in range(0, m, MOST_TOKENS)]
        calls = [self.product(size, gated) for size in sizes]

        def run(x: Tensor, records: Tensor, bias: Tensor | None, out: Tensor) -> None:
            xs, outs = torch.split(x.reshape(m, -1), sizes), torch.split(out.view(m, -1), sizes)
            for call, some, made in zip(calls, xs, outs, strict=True):
                call(some, records, bias, made)

        return run

    def _rows(self, x: Tensor) -> Tensor:
        """x as TMA takes it: contiguous and aligned, rows of multiples of 16 bytes."""
        if self.columns != self.shape.k:
            return pad(x, (0, self.columns - self.shape.k)).contiguous()
        x = x.contiguous()
        return x.clone() if x.data_ptr() % 16 else x


@cache
def plan(index: int, shape: Shape, dtype: torch.dtype) -> Plan:
    return Plan(index, shape, dtype)


def multiply(
    x: Tensor, records: Tensor, bias: Tensor | None, shape: Shape, gated: bool = False
) -> Tensor:
    """x (..., k) -> (..., n) in x's dtype. `gated`: (..., n / 2), silu(gate) * up of rows
    interleaved by RUN, without bias."""
    dtype = x.dtype
    if dtype not in TYPES:
        raise UserError(
            f"activations are {dtype}; CUDA kernels take float16 and bfloat16. Load the model with "
            "one of these dtypes."
        )
    if x.shape[-1] != shape.k:
        raise ValueError(f"activations have {x.shape[-1]} columns, the layer takes {shape.k}")
    if x.device != records.device:
        raise ValueError(f"activations are on {x.device}, the layer on {records.device}")
    out = x.new_empty((*x.shape[:-1], shape.n // 2 if gated else shape.n))
    m = x.numel() // shape.k
    if m:
        if bias is not None:
            bias = bias.to(x.device, dtype).contiguous()
        plan(records.get_device(), shape, dtype).product(m, gated)(x, records, bias, out)
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
    gated: bool = False,
) -> Tensor:
    """`scale_type`: index in SCALE_DTYPES."""
    shape = Shape(n, k, groups, record_group, SCALE_DTYPES[scale_type])
    return multiply(x, records, bias, shape, gated)


# The operator that torch.compile and dispatch modes see; eager calls need none.
_library = torch.library.Library("billfish", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "w4a16_24_linear(Tensor x, Tensor records, Tensor? bias, int n, int k, int groups, "
    "int record_group, int scale_type, bool gated=False) -> Tensor"
)
_library.impl("w4a16_24_linear", linear, "CUDA")  # type: ignore[no-untyped-call]
operator = torch.ops.billfish.w4a16_24_linear.default


@torch.library.register_fake("billfish::w4a16_24_linear", lib=_library)  # type: ignore[untyped-decorator]
def _fake(
    x: Tensor,
    records: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    groups: int,
    record_group: int,
    scale_type: int,
    gated: bool = False,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], n // 2 if gated else n)
