"""Launches of w2416_stripe on one GPU; its sizes as pure functions (kernels/stripes.py has the
partition)."""

from collections.abc import Callable

from torch import Tensor

from billfish.kernels import workspace
from billfish.kernels.clusters import MOST_TOKENS, STAGE_RECORDS, tokens_of
from billfish.kernels.device import Gpu
from billfish.kernels.stripes import MOST_STAGES, Stripes
from billfish.schemes.w2416.cuda.arrange import TWO_K, TWO_WORDS, N, Shape
from billfish.schemes.w2416.cuda.instances import stripe_kernel
from billfish.schemes.w2416.cuda.tile import FEWEST_STAGES, SPREAD_BYTES, list_bytes

THREADS = 320  # eight warps that copy records and multiply, two that gather activations
BANDS = 2  # of a tile: MARLIN's 128 outputs


def partition(shape: Shape, sms: int) -> Stripes:
    """The same for every m: a row's sums do not depend on it."""
    return Stripes(shape.n, shape.tiles, BANDS, sms)


def stage_bytes(m: int, shape: Shape) -> int:
    """Four records, their outliers, and activations of their two slices. Up to 8 tokens only those
    that there are have room."""
    records = -(-STAGE_RECORDS * max(TWO_WORDS, shape.four_words) * 4 // 128) * 128
    records += STAGE_RECORDS * list_bytes(shape.longest)
    return records + STAGE_RECORDS // BANDS * (m if m <= 8 else MOST_TOKENS) * TWO_K * 2


def sums(m: int) -> int:
    """fp32 elements of a CTA's partial sums of one tile, in global memory."""
    return BANDS * N * tokens_of(m)


def stages(m: int, shape: Shape, gpu: Gpu) -> int:
    """4, as MARLIN has; where a CTA has 99 KB (sm_86, sm_89), 3 from 5 tokens on, 2 from 9 on."""
    return min(MOST_STAGES, (gpu.smem_per_block - SPREAD_BYTES) // stage_bytes(m, shape))


def smem_bytes(m: int, shape: Shape, gpu: Gpu) -> int:
    return stages(m, shape, gpu) * stage_bytes(m, shape) + SPREAD_BYTES


class Launcher:
    """Everything about one layer's launches that is the same in every call."""

    def __init__(self, gpu: Gpu, shape: Shape) -> None:
        self.gpu, self.shape, self.partition = gpu, shape, partition(shape, gpu.sms)
        self.kernels = {
            tokens: stripe_kernel(shape.dtype, tokens).load(gpu.index) for tokens in (8, 16)
        }

    def of(self, m: int) -> Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], None] | None:
        """The launch of m tokens, up to 16: x, records, columns, bias, out. None if lists of
        outliers are too long for shared memory."""
        gpu, shape, blocks = self.gpu, self.shape, self.partition.blocks
        kernel, smem = self.kernels[tokens_of(m)], smem_bytes(m, shape, gpu)
        sizes = (m, shape.n, shape.k, shape.tiles_2, shape.tiles_4, shape.sets)
        depth = stages(m, shape, gpu)
        if stages(MOST_TOKENS, shape, gpu) < FEWEST_STAGES:  # for all m or none
            return None

        def run(
            x: Tensor, records: Tensor, columns: Tensor, bias: Tensor | None, out: Tensor
        ) -> None:
            # as many as the largest launch of this GPU needs, so that all share one workspace
            most = gpu.sms * sums(MOST_TOKENS)
            partial, locks = workspace.of_stream(gpu.index, most, gpu.sms)
            arguments = (
                records.data_ptr(),
                columns.data_ptr(),
                x.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                partial.data_ptr(),
                locks.data_ptr(),
                *sizes,
                records.shape[1],
                list_bytes(shape.longest),
                depth,
            )
            kernel.launch(blocks, THREADS, arguments, smem)

        return run
