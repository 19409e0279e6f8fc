"""How w4a16_stripe is cut up: stripe.cuh's arithmetic as pure functions, tested without a GPU.

A unit is one slice (128 inputs) of one tile (`bands` bands of 64 outputs), counted down one tile
after the other; a stripe is one block's run of units. stripe.cuh draws it and says why a tile is
summed from its last stripe to its first. Nothing here depends on the number of tokens but memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from billfish.formats.layout import BRICK_K, BRICK_N

THREADS = 256
STAGE_RECORDS = 4  # two of the eight warps work on each
MOST_STAGES = 4  # MARLIN 3.4
MOST_SMEM = 99 * 1024  # of a block on sm_86 and sm_89
BANDS = {8: 2, 16: 2, 32: 2, 64: 4}  # of a tile, by tokens: MARLIN's 128 and 256 outputs


@dataclass(frozen=True)
class Part:
    """What one stripe does of one tile."""

    tile: int
    begin: int  # slices
    end: int
    first: int  # the stripe with the tile's first slice: the tile's place in workspace and locks
    turn: int  # adds its sums when the lock says so; 0 waits for nobody
    writes: bool  # the output, as the last in turn; others write the workspace


@dataclass(frozen=True)
class Stripes:
    n: int
    k_tiles: int  # slices of a tile, of all planes
    bands: int  # of a tile: 2 or 4
    sms: int

    def __post_init__(self) -> None:
        assert self.bands in (2, 4), self.bands
        assert min(self.n, self.k_tiles, self.sms) >= 1, self
        assert (self.units + 1) * self.blocks < 2**32, "the kernel counts in 32 bits"

    @property
    def tiles(self) -> int:
        return -(-self.n // (self.bands * BRICK_N))

    @property
    def units(self) -> int:
        return self.tiles * self.k_tiles

    @property
    def blocks(self) -> int:
        """The grid: one block an SM, but no stripe shorter than the pipeline is deep.

        A tile's stripes take turns, each some microseconds (estimated, not measured): 32 stripes
        of one slice would wait longer than 8 of four.
        """
        return min(self.sms, max(self.tiles, self.units // MOST_STAGES))

    def begin(self, stripe: int) -> int:
        """Its first unit; its end is the next one's."""
        return self.units * stripe // self.blocks

    def owner(self, unit: int) -> int:
        """The last stripe that begins at or before it."""
        return ((unit + 1) * self.blocks - 1) // self.units

    def stripe_of_block(self, block: int) -> int:
        """From the last to the first: a block waits only for those that started before it."""
        return self.blocks - 1 - block

    def parts(self, stripe: int) -> Iterator[Part]:
        """In the order in which the stripe does them."""
        unit, end = self.begin(stripe), self.begin(stripe + 1)
        while unit < end:
            tile = unit // self.k_tiles
            tile_begin, tile_end = tile * self.k_tiles, (tile + 1) * self.k_tiles
            stop = min(tile_end, end)
            first, last = self.owner(tile_begin), self.owner(tile_end - 1)
            yield Part(
                tile, unit - tile_begin, stop - tile_begin, first, last - stripe, stripe == first
            )
            unit = stop

    def workspace_bytes(self, tokens: int) -> int:
        """fp32 sums of one tile for each block: a stripe is the first of at most one cut tile."""
        return self.blocks * self.bands * BRICK_N * tokens * 4

    @property
    def lock_bytes(self) -> int:
        """32 bits for each block, zero before the first launch; every launch leaves zeros."""
        return self.blocks * 4


def stage_bytes(tokens: int, bands: int, record_bytes: int) -> int:
    """Four records, and the activations of their one or two slices."""
    return STAGE_RECORDS * record_bytes + STAGE_RECORDS // bands * tokens * BRICK_K * 2


def stages(tokens: int, bands: int, record_bytes: int) -> int:
    return min(MOST_STAGES, MOST_SMEM // stage_bytes(tokens, bands, record_bytes))


def smem_bytes(tokens: int, bands: int, record_bytes: int) -> int:
    """Dynamic shared memory of a block."""
    return stages(tokens, bands, record_bytes) * stage_bytes(tokens, bands, record_bytes)
