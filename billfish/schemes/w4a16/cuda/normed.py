"""Products that norm their input: residual sum and RMS norm of a few tokens in w4a16_normed's own
launch, where every CTA norms what it multiplies while its weights arrive."""

from collections.abc import Callable
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from billfish.kernels import clusters, norm
from billfish.kernels.device import gpu
from billfish.schemes.w4a16.cuda import arrange, tile
from billfish.schemes.w4a16.cuda.instances import Kind, normed_kernel, runs_norms


class Normed(NamedTuple):
    """The input of such a product: the RMS norm of hidden + delta, times weight."""

    hidden: Tensor  # (m, k)
    delta: Tensor | None
    weight: Tensor
    eps: float
    summed: Tensor  # hidden + delta, once the product has run; without delta hidden itself


Launch = Callable[[Normed, Tensor, Tensor | None, Tensor, bool], None]  # records, bias, out, gated


def launches(index: int, n: int, k: int, kind: Kind, dtype: torch.dtype) -> dict[int, Launch]:
    """By the number of tokens; empty where the kernel does not take the layer."""
    card, k_tiles = gpu(index), -(-k // arrange.K)
    if not runs_norms(kind, dtype, card.arch) or norm.refuses(k) or k > norm.NORMED_WIDTH:
        return {}
    sizes = (n, k_tiles, kind.record_bytes, card)
    tiles = {m: tile.pick_normed(m, *sizes) for m in range(1, norm.MOST_NORMED + 1)}
    return {m: _launch(index, how, m, n, k, kind, dtype) for m, how in tiles.items() if how}


def _launch(
    index: int, how: clusters.Tile, m: int, n: int, k: int, kind: Kind, dtype: torch.dtype
) -> Launch:
    kernel = normed_kernel(kind, dtype, how.bands, how.cluster).load(index)
    normers, k_tiles = norm.threads(k), -(-k // arrange.K)
    threads = tile.threads(how.bands)

    def run(x: Normed, records: Tensor, bias: Tensor | None, out: Tensor, gated: bool) -> None:
        arguments = (
            records.data_ptr(),
            x.hidden.data_ptr(),
            0 if x.delta is None else x.delta.data_ptr(),
            x.weight.data_ptr(),
            x.summed.data_ptr(),
            normers,
            numpy.float32(x.eps),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            m,
            n,
            k,
            k_tiles,
            how.stages,
            gated,
        )
        kernel.launch(how.blocks, threads, arguments, how.asked, how.cluster, True)

    return run
