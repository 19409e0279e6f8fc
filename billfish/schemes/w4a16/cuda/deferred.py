"""Launches of w4a16_deferred: w4a16_decode after a deferred norm, or before one
(kernels/deferred.py)."""

from collections.abc import Callable

import numpy
import torch
from torch import Tensor

from billfish.kernels import norm
from billfish.kernels.clusters import MOST_TOKENS
from billfish.kernels.deferred import SCALE_BYTES, Norm, Stream
from billfish.kernels.device import gpu
from billfish.schemes.w4a16.cuda import arrange, tile
from billfish.schemes.w4a16.cuda.instances import Kind, deferred_kernel, runs_norms

# x, records, bias, out, gated; the stream that x is of; the one that results are added to, and its
# next norm
Launch = Callable[
    [Tensor, Tensor, Tensor | None, Tensor, bool, Stream | None, tuple[Stream, Norm] | None], None
]


def launches(index: int, n: int, k: int, kind: Kind, dtype: torch.dtype) -> dict[int, Launch]:
    """By the most tokens that they take; empty where the kernel does not take the layer."""
    if not runs_norms(kind, dtype, gpu(index).arch) or k % norm.CHUNK:
        return {}
    # With groups of 32 16 tokens would spill.
    sizes = [tokens for tokens in tile.TOKENS if tokens < MOST_TOKENS or kind.group > 32]
    return {tokens: _launch(index, tokens, n, k, kind, dtype) for tokens in sizes}


def _launch(index: int, tokens: int, n: int, k: int, kind: Kind, dtype: torch.dtype) -> Launch:
    how = tile.pick_tile(tokens, n, k, kind.record_bytes, gpu(index), SCALE_BYTES)
    kernel = deferred_kernel(kind, dtype, tokens, how.bands, how.cluster).load(index)
    k_tiles, threads = -(-k // arrange.K), tile.threads(how.bands)

    def run(
        x: Tensor,
        records: Tensor,
        bias: Tensor | None,
        out: Tensor,
        gated: bool,
        after: Stream | None,
        before: tuple[Stream, Norm] | None,
    ) -> None:
        last = None if after is None else after.norm
        to, following = before or (None, None)
        arguments = (
            records.data_ptr(),
            x.data_ptr(),
            0 if after is None else after.squares.data_ptr(),
            numpy.float32(last.eps if last else 0),
            numpy.float32(last.unit if last else 1),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            0 if to is None else to.hidden.data_ptr(),
            0 if following is None else following.weight.data_ptr(),
            0 if to is None else to.squares.data_ptr(),
            len(x),
            n,
            k,
            k_tiles,
            how.stages,
            gated,
        )
        kernel.launch(how.blocks, threads, arguments, how.asked, how.cluster, True)

    return run
