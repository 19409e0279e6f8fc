"""Products of one w4ax layer on one GPU: up to 16 tokens w4ax_decode, w4ax_batch beyond. x is
rounded before (rounding.py); both are one torch operator for torch.compile and dispatch modes.

Sums are integers, so that neither m nor the tile configuration changes a bit of the result.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from billfish.kernels import tensor_map, tiles, workspace
from billfish.kernels.clusters import CLUSTER, MOST_TOKENS
from billfish.kernels.device import gpu
from billfish.kernels.launch import Loaded
from billfish.schemes.w4ax.cuda import tile
from billfish.schemes.w4ax.cuda.arrange import Shape
from billfish.schemes.w4ax.cuda.inputs import Inputs, Rounded, row_bytes
from billfish.schemes.w4ax.cuda.instances import INSTANCES, batch_kernel, decode_kernel
from billfish.schemes.w4ax.cuda.rounding import rounded

RUN = 8  # gates, then ups: a thread has rows r and r + 8
# x in bytes; of a tile's tokens and outputs what the epilogue needs, for two tiles (batch.cuh).
HELD = tiles.Held(1, token=32, output=8)
# Fitted to 325 timings of 4096 x 4096, 6144 and 28672 and of 14336 x 4096 with 32 to 512 tokens on
# an H200 (docs/LOG.md, 2026-11-18): what the model chooses is within 2 % of the best. Clusters of 4
# and 8 CTAs were never the best: they start later.
COSTS = tiles.Costs(
    {
        (32, 1): 0.24,
        (64, 1): 0.24,
        (64, 2): 0.48,
        (128, 1): 0.33,
        (128, 2): 0.58,
        (256, 1): 0.56,
    },
    together=2.0,
    busy=0.26,
    tile_us=0.47,
    meeting_us=(5.6, 0.55),
    cluster_us=1.5,
    clusters=(2,),
)
assert set(COSTS.stage_us) == set(INSTANCES)

Product = Callable[[Rounded, Tensor, Tensor, Tensor | None, Tensor], None]
"""x, records, bases, bias, out"""


class Plan:
    """Everything about one layer's products on one device that is the same in every call."""

    def __init__(self, index: int, shape: Shape, dtype: torch.dtype) -> None:
        self.shape, self.gpu = shape, gpu(index)
        kind = (dtype, shape.record_group, shape.asymmetric)
        self.few = dict[int, Loaded]()
        for m in (8, MOST_TOKENS):
            bands = tile.pick_tile(m, shape.n, shape.k, shape.record_bytes, self.gpu).bands
            self.few[m] = decode_kernel(*kind, m, bands).load(index)
        self.batches = {
            instance: batch_kernel(*kind, *instance).load(index) for instance in INSTANCES
        }
        self.products: dict[tuple[int, bool], Product] = {}

    def product(self, m: int, gated: bool) -> Product:
        """The function that runs m tokens, cached for each m; `gated`: it stores silu(gate) *
        up."""
        found = self.products.get((m, gated))
        if found is None:
            few = m <= MOST_TOKENS
            found = self.decode(m, gated) if few else self.batch(m, gated, self.pick(m))
            self.products[m, gated] = found
        return found

    def pick(self, m: int) -> tiles.Launch:
        shape = self.shape
        sizes = (m, shape.n, shape.k_tiles, shape.record_bytes, self.gpu, COSTS, HELD)
        found = tiles.cheapest(*sizes)
        assert found is not None, "one always fits in a Hopper SM"
        return found

    def decode(self, m: int, gated: bool) -> Product:
        shape = self.shape
        how = tile.pick_tile(m, shape.n, shape.k, shape.record_bytes, self.gpu)
        kernel, columns = self.few[how.tokens], row_bytes(shape.k) // 2

        def run(
            x: Rounded, records: Tensor, bases: Tensor, bias: Tensor | None, out: Tensor
        ) -> None:
            arguments = (
                records.data_ptr(),
                tensor_map.of_rows(x.bytes.data_ptr(), m, columns, how.tokens),
                x.tokens.data_ptr(),
                bases.data_ptr(),
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
        kernel, columns = self.batches[cut.tokens, cut.bands], row_bytes(shape.k) // 2
        sizes = (m, shape.n, how.m_tiles, how.n_tiles, shape.k_tiles, how.whole, cut.splits)

        def run(
            x: Rounded, records: Tensor, bases: Tensor, bias: Tensor | None, out: Tensor
        ) -> None:
            sums = locks = 0
            if how.sums:
                left = workspace.of_stream(index, how.sums, how.flags)
                sums, locks = left[0].data_ptr(), left[1].data_ptr()
            arguments = (
                records.data_ptr(),
                tensor_map.of_rows(x.bytes.data_ptr(), m, columns, cut.tokens),
                x.tokens.data_ptr(),
                bases.data_ptr(),
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


@cache
def plan(index: int, shape: Shape, dtype: torch.dtype) -> Plan:
    return Plan(index, shape, dtype)


def multiply(
    x: Rounded,
    records: Tensor,
    bases: Tensor,
    bias: Tensor | None,
    shape: Shape,
    gated: bool = False,
) -> Tensor:
    """(..., n) in x's dtype. `gated`: (..., n / 2), silu(gate) * up of rows interleaved by RUN,
    without bias."""
    m = len(x.bytes)
    if x.bytes.shape[1] != row_bytes(shape.k):
        raise ValueError(f"activations have {x.bytes.shape[1]} columns, the layer takes {shape.k}")
    if x.bytes.device != records.device:
        raise ValueError(f"activations are on {x.bytes.device}, the layer on {records.device}")
    n = shape.n // 2 if gated else shape.n
    out = torch.empty((*x.lead, n), dtype=x.dtype, device=records.device)
    if m:
        if bias is not None:
            bias = bias.to(records.device, x.dtype).contiguous()
        found = plan(records.get_device(), shape, x.dtype)
        found.product(m, gated)(x, records, bases, bias, out)
    return out


def linear(
    x: Tensor,
    records: Tensor,
    bases: Tensor,
    bias: Tensor | None,
    k: int,
    groups: int,
    record_group: int,
    asymmetric: bool,
    order: Tensor | None,
    bits: Tensor | None,
    rotated: bool,
    gated: bool = False,
) -> Tensor:
    """x (..., k) rounded, then multiplied. `order`, `bits`, `rotated`: of Inputs; no bits: a8."""
    inputs = None if bits is None else Inputs(order, bits, rotated)
    shape = Shape(len(bases), k, groups, record_group, asymmetric)
    return multiply(rounded(x, k, inputs, records.device), records, bases, bias, shape, gated)


# The operator that torch.compile and dispatch modes see; eager calls need none.
_library = torch.library.Library("billfish", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "w4ax_linear(Tensor x, Tensor records, Tensor bases, Tensor? bias, int k, int groups, "
    "int record_group, bool asymmetric, Tensor? order, Tensor? bits, bool rotated, "
    "bool gated=False) -> Tensor"
)
_library.impl("w4ax_linear", linear, "CUDA")  # type: ignore[no-untyped-call]
operator = torch.ops.billfish.w4ax_linear.default


@torch.library.register_fake("billfish::w4ax_linear", lib=_library)  # type: ignore[untyped-decorator]
def _fake(
    x: Tensor,
    records: Tensor,
    bases: Tensor,
    bias: Tensor | None,
    k: int,
    groups: int,
    record_group: int,
    asymmetric: bool,
    order: Tensor | None,
    bits: Tensor | None,
    rotated: bool,
    gated: bool = False,
) -> Tensor:
    n = len(bases)
    return x.new_empty(*x.shape[:-1], n // 2 if gated else n)
