"""Outliers of w2416 by record, as its CUDA kernels read them, and back.

Of each band of 64 outputs: which set the list of each record begins with, and where the last one
ends; then the sets. A set is 16 entries for outputs 0 to 31 of the record and 16 for 32 to 63: the
columns of one step of the tensor cores. An entry is value << 16 | row << 8 | column in the record;
EMPTY fills sets up, LAST marks all entries of a record's last set. Every record has a set.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from billfish.schemes.base import Tensors
from billfish.schemes.w2416.shares import BAND, GROUP

LAST, EMPTY = 0x8000, 0x4000
ENTRIES = 16  # of a set, for each half of a record
SET_WORDS = 2 * ENTRIES
ALIGNED = 8  # words
ROWS, HALF, TWO_GROUPS, FOUR_GROUPS = 64, 32, 16, 8  # of a record


class Layer(Protocol):
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def bands(self) -> int: ...
    @property
    def tiles_2(self) -> int: ...
    @property
    def tiles(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


def edge_words(tiles: int) -> int:
    return (tiles + ALIGNED) // ALIGNED * ALIGNED


def pack(shape: Layer, columns: Tensor, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
    """(bands, words) int32: edges and sets; and the order of canonical lists, if not sorted."""
    place = tensors["outlier_place"].long() & 0xFFFF
    value = tensors["outlier_value"].view(torch.int16).long() & 0xFFFF
    device, part = place.device, shape.k // shape.parts
    order, ranks = torch.argsort(place, dim=-1, stable=True), None
    if not torch.equal(order, torch.arange(place.shape[-1], device=device).expand_as(order)):
        ranks = order.to(torch.int16)
    place, value = place.gather(-1, order), value.gather(-1, order)
    row = torch.arange(len(place), device=device)[:, None, None] * BAND + place // part
    column = torch.arange(shape.parts, device=device)[:, None] * part + place % part
    row, column, value = row.flatten(), column.flatten(), value.flatten()

    tile, inside = _place(shape, columns, column)
    band, row = row // ROWS, row % ROWS
    entry, of = value << 16 | row << 8 | inside, (band * shape.tiles + tile) * 2 + row // HALF
    order = torch.argsort(of, stable=True)
    entry, of = entry[order], of[order]
    record, index = of // 2, _index_in_run(of)

    counts = torch.bincount(of, minlength=shape.bands * shape.tiles * 2).view(-1, 2).amax(1)
    sets = (-(-counts // ENTRIES)).clamp(min=1).view(shape.bands, shape.tiles)
    edges = pad(sets.cumsum(1), (1, 0))
    start, most = edge_words(shape.tiles), int(edges[:, -1].max())
    lists = torch.zeros(shape.bands, start + most * SET_WORDS, dtype=torch.long, device=device)
    lists[:, : shape.tiles + 1] = edges
    filled = lists[:, start:].view(shape.bands, most, SET_WORDS)
    filled[:] = EMPTY
    band, tile = record // shape.tiles, record % shape.tiles
    filled[band, edges[band, tile] + index // ENTRIES, of % 2 * ENTRIES + index % ENTRIES] = entry
    last = edges[:, 1:] - 1
    filled[torch.arange(shape.bands, device=device)[:, None], last] |= LAST
    return ((lists ^ 0x80000000) - 0x80000000).to(torch.int32), ranks


def longest(lists: Tensor, tiles: int) -> int:
    """Sets of the longest list."""
    return int(lists[:, : tiles + 1].diff().max())


def unpack(shape: Layer, columns: Tensor, lists: Tensor, ranks: Tensor | None) -> dict[str, Tensor]:
    """The canonical lists."""
    start, part = edge_words(shape.tiles), shape.k // shape.parts
    edges, entries = lists[:, : shape.tiles + 1].long(), lists[:, start:].long()
    index = torch.arange(entries.shape[1], device=entries.device)
    there = (index < edges[:, -1:] * SET_WORDS) & (entries & EMPTY == 0)
    band, word = there.nonzero(as_tuple=True)
    entry = entries[band, word]
    # the last record whose list begins at or before this entry's set
    tile = (edges[band] <= word[:, None] // SET_WORDS).sum(1) - 1
    inside, row = entry & 0xFF, band * ROWS + (entry >> 8 & 63)
    group = tile * TWO_GROUPS + inside // GROUP
    skipped = (tile - shape.tiles_2).clamp(min=0) * (TWO_GROUPS - FOUR_GROUPS)
    column = columns.long()[group - skipped] + inside % GROUP
    of = row // BAND * shape.parts + column // part
    place = row % BAND * part + column % part
    order = torch.argsort(of * BAND * part + place, stable=True)
    size = (shape.n // BAND, shape.parts, -1) if len(order) else (shape.n // BAND, shape.parts, 0)
    place, value = place[order].view(size), (entry >> 16 & 0xFFFF)[order].view(size)
    if ranks is not None:
        back = ranks.long() & 0xFFFF
        place = torch.empty_like(place).scatter_(-1, back, place)
        value = torch.empty_like(value).scatter_(-1, back, value)
    return {
        "outlier_place": _signed(place),
        "outlier_value": _signed(value).view(shape.dtype),
    }


def _signed(bits: Tensor) -> Tensor:
    return ((bits ^ 0x8000) - 0x8000).to(torch.int16)


def _place(shape: Layer, columns: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """Of columns of x: the record along k, and the column in it."""
    at = torch.zeros(shape.k // GROUP, dtype=torch.long, device=columns.device)
    there = (columns >= 0).nonzero()[:, 0]
    at[columns[there].long() // GROUP] = there
    group, edge = at[column // GROUP], shape.tiles_2 * TWO_GROUPS
    two, inside = group < edge, column % GROUP
    tile = torch.where(two, group // TWO_GROUPS, shape.tiles_2 + (group - edge) // FOUR_GROUPS)
    first = torch.where(two, group % TWO_GROUPS, (group - edge) % FOUR_GROUPS)
    return tile, first * GROUP + inside


def _index_in_run(sorted_keys: Tensor) -> Tensor:
    """How many equal keys are before each."""
    _, counts = torch.unique_consecutive(sorted_keys, return_counts=True)
    begins = counts.cumsum(0) - counts
    index = torch.arange(len(sorted_keys), device=sorted_keys.device)
    found: Tensor = index - begins.repeat_interleave(counts)
    return found
