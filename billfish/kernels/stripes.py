"""MARLIN's striped partition of a product (include/billfish/stripes.cuh) as pure functions, tested
without a GPU.

A unit is one slice (inputs of one record) of one tile (`bands` bands of 64 outputs); units are
numbered along k, tile after tile. A stripe is the contiguous run of units of one CTA. stripes.cuh
draws this and explains why a tile is summed from its last stripe to its first. The number of tokens
changes only the memory that is needed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from billfish.kernels.clusters import BAND

MOST_STAGES = 4  # MARLIN 3.4
# Of kernels whose warps all copy and multiply:
THREADS = 256
STAGE_RECORDS = 4  # two of the eight warps multiply each
MOST_SMEM = 99 * 1024  # of a CTA on sm_86 and sm_89


def ring_stages(stage_bytes: int) -> int:
    return min(MOST_STAGES, MOST_SMEM // stage_bytes)


@dataclass(frozen=True)
class Part:
    """The slices of one tile that one stripe computes."""

    tile: int
    begin: int  # first slice
    end: int
    first: int  # the stripe with the tile's first slice: index of the tile's workspace and lock
    turn: int  # adds its sums when the lock has this value; 0 does not wait
    writes: bool  # the last in turn writes the output, the others the workspace


@dataclass(frozen=True)
class Stripes:
    n: int
    k_tiles: int  # slices of a tile, all planes
    bands: int  # of a tile, 2 or 4
    sms: int

    def __post_init__(self) -> None:
        assert self.bands in (2, 4), self.bands
        assert min(self.n, self.k_tiles, self.sms) >= 1, self
        assert (self.units + 1) * self.blocks < 2**32, "the kernel counts in 32 bits"

    @property
    def tiles(self) -> int:
        return -(-self.n // (self.bands * BAND))

    @property
    def units(self) -> int:
        return self.tiles * self.k_tiles

    @property
    def blocks(self) -> int:
        """Grid size: one CTA for each SM, unless stripes became shorter than the pipeline.

        A tile's stripes add their sums in turn, which takes some microseconds each (estimated, not
        measured): 32 stripes of one slice would wait longer than 8 of four.
        """
        return min(self.sms, max(self.tiles, self.units // MOST_STAGES))

    def begin(self, stripe: int) -> int:
        """First unit of a stripe; it ends where the next one begins."""
        return self.units * stripe // self.blocks

    def owner(self, unit: int) -> int:
        """The stripe that computes a unit."""
        return ((unit + 1) * self.blocks - 1) // self.units

    def stripe_of_block(self, block: int) -> int:
        """CTAs take stripes from the last to the first, so a CTA waits only for CTAs started before
        it."""
        return self.blocks - 1 - block

    def parts(self, stripe: int) -> Iterator[Part]:
        """Parts of a stripe, in the order of computation."""
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
        """fp32 sums of one tile for each CTA: a stripe is the first of at most one split tile."""
        return self.blocks * self.bands * BAND * tokens * 4

    @property
    def lock_bytes(self) -> int:
        """32 bits for each CTA, zero before the first launch; every launch leaves zeros."""
        return self.blocks * 4


@dataclass(frozen=True)
class CostStripes(Stripes):
    """Stripes of equal cost, where sums are exact and any partition is right: of each tile's halves
    of slices the first `light` cost 1, the others `heavy`. Tiles of the same outputs and other
    tokens follow one another."""

    m_tiles: int
    light: int
    heavy: int

    def __post_init__(self) -> None:
        assert self.bands in (2, 4), self.bands
        assert min(self.n, self.k_tiles, self.sms, self.m_tiles, self.heavy) >= 1, self
        assert 0 <= self.light <= 2 * self.k_tiles, self
        assert self.units < 2**32, "the kernel counts units in 32 bits, costs in 64"

    @property
    def tiles(self) -> int:
        return super().tiles * self.m_tiles

    def cost(self, halves: int) -> int:
        """Of the first halves of slices of a tile."""
        return halves if halves <= self.light else self.light + (halves - self.light) * self.heavy

    @property
    def tile_cost(self) -> int:
        return self.cost(2 * self.k_tiles)

    def begin(self, stripe: int) -> int:
        at = self.tiles * self.tile_cost * stripe // self.blocks
        tile, rest = divmod(at, self.tile_cost)
        half = rest if rest < self.light else self.light + (rest - self.light) // self.heavy
        return tile * self.k_tiles + half // 2

    def owner(self, unit: int) -> int:
        tile, slice_ = divmod(unit, self.k_tiles)
        end = tile * self.tile_cost + self.cost(2 * slice_ + 2)
        return (end * self.blocks - 1) // (self.tiles * self.tile_cost)
