"""Paged attention with torch's operators: correct on every device, fast on a CPU.

K and V are written first, and then everything is read back from the cache, this step's tokens
included. So with kv8 and kv4 a token sees the same numbers however its prompt was chunked, whatever
else is in the batch, and whoever filled a page. Products and sums are fp32 whatever the model's
dtype: 16-bit softmax weights would differ between a prefill chunk and a decode by 2^-9, enough to
change a text. Knows nothing of RoPE, of weights or of who owns a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from billfish.engine.kv.cache import Cache
from billfish.engine.sinks import masked_attention

# Decodes are batched up to READ_TOKENS tokens: fewer calls, while K and V stay in a core's caches.
# A batch is padded to its longest sequence, each by less than this share of the longest. With 8
# sequences of SmolLM2 a step takes 34 ms instead of 42.
READ_TOKENS = 1024
MOST_PADDING = 1 / 3
# Queries under one mask: a whole chunk's mask would be count x length, half of it unused.
MASK_ROWS = 256


@dataclass(frozen=True)
class Batch:
    """One step's tokens of all sequences, end to end. Immutable."""

    starts: list[int]  # first flat token of each sequence's piece
    counts: list[int]  # tokens of each piece
    lengths: list[int]  # tokens of each sequence in the cache once this step's are written
    pages: list[Tensor]  # each sequence's pages, int64; those past its length are not read
    slots: Tensor  # (tokens,) int64, where each token's K and V go
    # What to read depends on the window, not on the layer: planned by the first layer that has it.
    _plans: dict[tuple[int, int | None], "_Plan"] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        sizes = {len(self.starts), len(self.counts), len(self.lengths), len(self.pages)}
        assert len(sizes) == 1, f"starts, counts, lengths and pages differ in length: {sizes}"
        behind = 0
        for start, count, length in zip(self.starts, self.counts, self.lengths, strict=True):
            assert 0 < count <= length, f"{count} tokens of a sequence of {length}"
            assert start == behind, f"a piece starts at {start}, the one before ends at {behind}"
            behind += count
        assert behind == len(self.slots), f"{behind} tokens, {len(self.slots)} slots"

    def plan(self, page_tokens: int, window: int | None) -> "_Plan":
        key = page_tokens, window
        if key not in self._plans:
            self._plans[key] = _plan(self, page_tokens, window)
        return self._plans[key]


@dataclass(frozen=True)
class _Chunk:
    """A prefill chunk: the queries of the last tokens of one sequence."""

    rows: slice
    pages: Tensor
    keys: int


class _Decode(NamedTuple):
    """One query, and the pages of its keys, of which it sees [first, behind)."""

    row: int
    pages: Tensor
    first: int
    behind: int


@dataclass(frozen=True)
class _Decodes:
    """One query each of several sequences, padded to the same number of keys."""

    rows: slice | Tensor
    sequences: int
    pages: Tensor  # (sequences * pages of each,)
    keys: int  # of each
    hidden: Tensor  # (sequences, 1, 1, keys): the mask, -inf for keys that are not seen, else 0
    unseen: Tensor  # indices of those among all keys


_Plan = list[_Chunk | _Decodes]


def _plan(batch: Batch, page_tokens: int, window: int | None) -> _Plan:
    """Whole pages; with a sliding window only those that it reaches."""
    plan: _Plan = []
    decodes: list[_Decode] = []
    for i, (count, length) in enumerate(zip(batch.counts, batch.lengths, strict=True)):
        oldest = 0 if window is None else max(0, length - count - window + 1)
        first, behind = oldest // page_tokens, -(-length // page_tokens)
        assert behind <= len(batch.pages[i]), f"{length} tokens in {len(batch.pages[i])} pages"
        start, pages, before = batch.starts[i], batch.pages[i][first:behind], first * page_tokens
        if count == 1:
            decodes.append(_Decode(start, pages, oldest - before, length - before))
        else:
            plan.append(_Chunk(slice(start, start + count), pages, length - before))
    decodes.sort(key=lambda one: -len(one.pages))
    while decodes:
        width = len(decodes[0].pages)
        sequences = sum(len(one.pages) > width * (1 - MOST_PADDING) for one in decodes)
        sequences = min(sequences, max(1, READ_TOKENS // (width * page_tokens)))
        plan.append(
            _padded(sorted(decodes[:sequences], key=lambda one: one.row), width, page_tokens)
        )
        decodes = decodes[sequences:]
    return plan


def _padded(decodes: list[_Decode], width: int, page_tokens: int) -> _Decodes:
    device, keys = decodes[0].pages.device, width * page_tokens
    rows = [one.row for one in decodes]
    in_a_row = rows == list(range(rows[0], rows[0] + len(rows)))
    seen = torch.tensor([(one.first, one.behind) for one in decodes], device=device)
    place = torch.arange(keys, device=device)
    unseen = (place < seen[:, :1]) | (place >= seen[:, 1:])  # (sequences, keys)
    hidden = torch.zeros(unseen.shape, device=device).masked_fill_(unseen, -torch.inf)
    pages = [torch.cat((p, p[-1:].expand(width - len(p)))) for _, p, *_ in decodes]
    return _Decodes(
        rows=slice(rows[0], rows[-1] + 1) if in_a_row else torch.tensor(rows, device=device),
        sequences=len(rows),
        pages=torch.cat(pages),
        keys=keys,
        hidden=hidden[:, None, None],
        unseen=unseen.flatten().nonzero().flatten(),
    )


class PagedAttention:
    """Causal attention; with window w each token attends to the last w, itself included."""

    def __init__(
        self,
        cache: Cache,
        scale: float,
        windows: tuple[int | None, ...],
        sinks: Sequence[Tensor | None] = (),  # of each layer, (kv_heads, heads of each) fp32
    ) -> None:
        assert all(window is None or window > 0 for window in windows), windows
        self.cache, self.scale, self.windows = cache, scale, windows
        self.sinks = sinks or [None] * len(windows)

    def __call__(
        self,
        layer: int,
        q: Tensor,  # (tokens, heads, head_dim)
        k: Tensor,  # (tokens, kv_heads, head_dim)
        v: Tensor,  # the same
        batch: Batch,
    ) -> Tensor:  # like q
        """Writes k and v to the cache at batch.slots; every other slot stays as it is."""
        self.cache.write(layer, batch.slots, k, v)
        tokens, heads, head_dim = q.shape
        kv_heads = k.shape[1]
        # Query heads grouped by KV head: no copy of K per head, as enable_gqa makes on a CPU.
        queries = self.cache.queries(layer, q).float()
        queries = queries.view(tokens, kv_heads, heads // kv_heads, head_dim)
        sinks, out = self._sinks(layer, q), torch.empty_like(queries)
        for part in batch.plan(self.cache.page_tokens, self.windows[layer]):
            mine = None if sinks is None else sinks[part.rows]
            if isinstance(part, _Chunk):
                keys, values = self.cache.read(layer, part.pages, part.keys)
                keys, values = keys.float().transpose(0, 1), values.float().transpose(0, 1)
                out[part.rows] = self._chunk(layer, queries[part.rows], keys, values, mine)
            else:
                out[part.rows] = self._decodes(layer, queries[part.rows], part, mine)
        return out.view_as(q).to(q.dtype)

    def _sinks(self, layer: int, q: Tensor) -> Tensor | None:
        """(tokens, kv_heads, heads of each): sinks for the scores that the cache's keys give."""
        sinks = self.sinks[layer]
        if sinks is None:
            return None
        each, lacking = sinks.expand(len(q), -1, -1), self.cache.lacking(layer, q)
        return each if lacking is None else each - self.scale * lacking.view_as(each)

    def _decodes(self, layer: int, queries: Tensor, part: _Decodes, sinks: Tensor | None) -> Tensor:
        def seen(read: Tensor) -> Tensor:  # (sequences, kv_heads, keys, head_dim)
            # Slots past a sequence's end may hold anything, and a weight of 0 is not enough: 0 *
            # NaN is NaN.
            clear = read.index_fill_(0, part.unseen, 0).float()
            return clear.view(part.sequences, part.keys, *clear.shape[1:]).transpose(1, 2)

        keys, values = map(seen, self.cache.read(layer, part.pages, part.sequences * part.keys))
        # The heads of a group are its rows: (sequences, kv_heads, group, head_dim).
        return masked_attention(queries, keys, values, part.hidden, self.scale, sinks)

    def _chunk(
        self,
        layer: int,
        queries: Tensor,  # (count, kv_heads, group, head_dim) fp32: the last `count` tokens
        keys: Tensor,  # (kv_heads, length, head_dim) fp32
        values: Tensor,  # the same
        sinks: Tensor | None,  # (count, kv_heads, group)
    ) -> Tensor:  # like queries
        count, _, group, _ = queries.shape
        before, window = keys.shape[1] - count, self.windows[layer]
        q = queries.permute(1, 2, 0, 3)  # KV heads are the batch, and a group shares its K and V
        keys, values = (x[:, None].expand(-1, group, -1, -1) for x in (keys, values))
        if before == 0 and (window is None or window >= count) and sinks is None:
            out = scaled_dot_product_attention(q, keys, values, is_causal=True, scale=self.scale)
            return out.permute(2, 0, 1, 3)
        parts = []
        for row in range(0, count, MASK_ROWS):
            end = min(row + MASK_ROWS, count)
            first = 0 if window is None else max(0, before + row - window + 1)
            here = torch.arange(before + row, before + end, device=q.device)[:, None]
            there = torch.arange(first, before + end, device=q.device)
            mask = there <= here
            if window is not None:
                mask &= there > here - window
            parts.append(
                masked_attention(
                    q[:, :, row:end],
                    keys[:, :, first : before + end],
                    values[:, :, first : before + end],
                    mask,
                    self.scale,
                    None if sinks is None else sinks[row:end].permute(1, 2, 0),
                )
            )
        return torch.cat(parts, 2).permute(2, 0, 1, 3)
