"""Tile configuration of w2416_batch: a pure function of sizes, tested without a GPU."""

from billfish.kernels import tiles
from billfish.kernels.device import Gpu
from billfish.schemes.w2416.cuda.arrange import FOUR_K, TWO_K, TWO_WORDS, Shape

HALF_BYTES = TWO_WORDS * 4 - 2048  # half of a record of 2 bits has all its scales


def stages_along_k(shape: Shape) -> int:
    return shape.tiles_2 * (TWO_K // FOUR_K) + shape.tiles_4


def inputs(shape: Shape) -> int:
    """Columns of x in the order of the records."""
    return stages_along_k(shape) * FOUR_K


def list_words(shape: Shape) -> int:
    """Room for a list of outliers that is copied from a multiple of four entries on."""
    return (shape.longest + 6) // 4 * 4


def band_bytes(shape: Shape) -> int:
    """A band's record in a stage, its list, and where that begins and ends."""
    return max(HALF_BYTES, shape.four_words * 4) + 16 + list_words(shape) * 4


def pick(m: int, shape: Shape, gpu: Gpu) -> tiles.Launch | None:
    """None if lists of outliers are too long for shared memory."""
    return tiles.cheapest(m, shape.n, stages_along_k(shape), band_bytes(shape), gpu)
