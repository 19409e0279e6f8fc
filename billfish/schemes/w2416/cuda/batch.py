"""Launches of w2416_batch, and of w2416_order before it, on one GPU; their sizes as pure functions
(kernels/tiles.py has the tile configurations)."""

from collections.abc import Callable

from torch import Tensor

from billfish.kernels import tensor_map, tiles, workspace
from billfish.kernels.device import Gpu
from billfish.schemes.w2416.cuda.arrange import FOUR_K, TWO_K, TWO_WORDS, Shape
from billfish.schemes.w2416.cuda.instances import batch_kernel, order_kernel
from billfish.schemes.w2416.cuda.tile import list_bytes

ORDER_THREADS = 256  # order.cuh
MOST_ROWS = 256  # of CTAs of w2416_order; each takes several tokens
# Timings of 8192 x 57344 at 32 to 1024 tokens. One CTA waits for its own instructions, so two on an
# SM take little longer than one.
COSTS = tiles.Costs(
    {(32, 1): 1.14, (64, 1): 1.46, (128, 1): 1.05, (128, 2): 2.09, (256, 1): 1.55}, 1.17
)
HALF_BYTES = TWO_WORDS * 4 - 2048  # half of a record of 2 bits has all its scales


def stages_along_k(shape: Shape) -> int:
    return shape.tiles_2 * (TWO_K // FOUR_K) + shape.tiles_4


def inputs(shape: Shape) -> int:
    """Columns of x in the order of the records."""
    return stages_along_k(shape) * FOUR_K


def band_bytes(shape: Shape) -> int:
    """A band's record in a stage, and its outliers."""
    return max(HALF_BYTES, shape.four_words * 4) + list_bytes(shape.longest)


class Launcher:
    """Everything about one layer's launches that is the same in every call."""

    def __init__(self, gpu: Gpu, shape: Shape) -> None:
        self.gpu, self.shape, self.order = gpu, shape, order_kernel().load(gpu.index)
        self.kernels = {
            instance: batch_kernel(shape.dtype, *instance).load(gpu.index)
            for instance in tiles.INSTANCES
        }

    def of(
        self, m: int, gated: bool, how: tiles.Launch | None = None
    ) -> Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], None] | None:
        """The launches of m tokens: x, records, columns, bias, out; with the tile configuration
        `how`, or the cheapest. None if lists of outliers are too long for shared memory."""
        shape, index, room = self.shape, self.gpu.index, band_bytes(self.shape)
        if how is None:
            how = tiles.cheapest(m, shape.n, stages_along_k(shape), room, self.gpu, COSTS)
        if how is None:
            return None
        chosen, order, width = how, self.order, inputs(shape)
        kernel = self.kernels[how.cut.tokens, how.cut.bands]
        grid = (-(-width // (8 * ORDER_THREADS)), min(m, MOST_ROWS))
        ordering = (m, shape.k, width, shape.tiles_2 * (TWO_K // 64))
        sizes = (m, shape.n, how.m_tiles, how.n_tiles, shape.tiles_2, shape.tiles_4, shape.sets)
        rest = (list_bytes(shape.longest), how.whole, how.stages, how.stage_bytes, how.early, gated)

        def run(
            x: Tensor, records: Tensor, columns: Tensor, bias: Tensor | None, out: Tensor
        ) -> None:
            ordered = x.new_empty(m, width)
            given = (x.data_ptr(), columns.data_ptr(), ordered.data_ptr(), *ordering)
            order.launch(grid, ORDER_THREADS, given, pdl=True)
            sums = locks = 0
            if chosen.sums:
                left = workspace.of_stream(index, chosen.sums, chosen.flags)
                sums, locks = left[0].data_ptr(), left[1].data_ptr()
            arguments = (
                records.data_ptr(),
                tensor_map.of_rows(ordered.data_ptr(), m, width, chosen.cut.tokens),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                sums,
                locks,
                *sizes,
                records.shape[1],
                *rest,
            )
            kernel.launch(chosen.blocks, tiles.THREADS, arguments, chosen.asked, pdl=True)

        return run
