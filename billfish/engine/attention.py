"""Attention over pages, with torch's own operators: right on every device, quick on a CPU.

K and V are written first, and then everything is read back from the cache, the tokens of this very
step too. So with kv8 and kv4 a token sees the same numbers however its prompt was cut, whatever
else is in the batch, and whether a page was filled now or by another request. Products and sums are
fp32 whatever the model's dtype: 16-bit softmax weights would differ between a chunk and a decode by
2^-9, enough to change a text. Knows nothing of RoPE, of layers' weights or of who owns a page.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from billfish.engine.kv.cache import Cache

# Decodes are read and attended to several at once, up to so many tokens: fewer calls, yet K and V
# stay in a core's caches. All are as long as the longest; what is added to one must be less than
# this share of it. At 8 texts of SmolLM2 a step of 42 ms is 34.
READ_TOKENS = 1024
MOST_ADDED = 1 / 3
# Queries under one mask: a long chunk's mask would be count x length, and half of it never used.
MASK_ROWS = 256


@dataclass(frozen=True)
class Batch:
    """One step's tokens of all sequences, laid end to end. Not to be changed once it is made."""

    starts: list[int]  # first flat token of each sequence's piece
    counts: list[int]  # tokens of each piece
    lengths: list[int]  # tokens of each sequence in the cache once this step's are written
    pages: list[Tensor]  # each sequence's pages, int64; those past its length are not read
    slots: Tensor  # (tokens,) int64, where each token's K and V go
    # What to read follows from a window and not from a layer: found by the first layer, kept.
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
    """Several queries of one sequence, the last of its keys."""

    rows: slice
    pages: Tensor
    keys: int


class _Decode(NamedTuple):
    """One query, and the pages of its keys: it sees `first` up to, not with, `behind`."""

    row: int
    pages: Tensor
    first: int
    behind: int


@dataclass(frozen=True)
class _Decodes:
    """One query each of several sequences, whose keys are padded to the same number."""

    rows: slice | Tensor
    texts: int
    pages: Tensor  # (texts * pages of each,)
    keys: int  # of each
    hidden: Tensor  # (texts, 1, 1, keys): -inf for keys that are not seen, else 0
    unseen: Tensor  # which of all keys those are


_Plan = list[_Chunk | _Decodes]


def _plan(batch: Batch, page_tokens: int, window: int | None) -> _Plan:
    """Whole pages; of a window only those it still reaches."""
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
        texts = sum(len(one.pages) > width * (1 - MOST_ADDED) for one in decodes)
        texts = min(texts, max(1, READ_TOKENS // (width * page_tokens)))
        plan.append(_padded(sorted(decodes[:texts], key=lambda one: one.row), width, page_tokens))
        decodes = decodes[texts:]
    return plan


def _padded(decodes: list[_Decode], width: int, page_tokens: int) -> _Decodes:
    device, keys = decodes[0].pages.device, width * page_tokens
    rows = [one.row for one in decodes]
    in_a_row = rows == list(range(rows[0], rows[0] + len(rows)))
    seen = torch.tensor([(one.first, one.behind) for one in decodes], device=device)
    place = torch.arange(keys, device=device)
    unseen = (place < seen[:, :1]) | (place >= seen[:, 1:])  # (texts, keys)
    hidden = torch.zeros(unseen.shape, device=device).masked_fill_(unseen, -torch.inf)
    pages = [torch.cat((p, p[-1:].expand(width - len(p)))) for _, p, *_ in decodes]
    return _Decodes(
        rows=slice(rows[0], rows[-1] + 1) if in_a_row else torch.tensor(rows, device=device),
        texts=len(rows),
        pages=torch.cat(pages),
        keys=keys,
        hidden=hidden[:, None, None],
        unseen=unseen.flatten().nonzero().flatten(),
    )


class PagedAttention:
    """Each token attends to its sequence up to itself; with window w to the last w, itself too."""

    def __init__(self, cache: Cache, scale: float, windows: tuple[int | None, ...]) -> None:
        assert all(window is None or window > 0 for window in windows), windows
        self.cache, self.scale, self.windows = cache, scale, windows

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
        # Heads of one K head side by side: no copy of K per head, as enable_gqa makes on a CPU.
        queries = self.cache.queries(layer, q).float()
        queries = queries.view(tokens, kv_heads, heads // kv_heads, head_dim)
        out = torch.empty_like(queries)
        window = self.windows[layer]
        for part in batch.plan(self.cache.page_tokens, window):
            if isinstance(part, _Chunk):
                keys, values = self.cache.read(layer, part.pages, part.keys)
                keys, values = keys.float().transpose(0, 1), values.float().transpose(0, 1)
                out[part.rows] = self._chunk(queries[part.rows], keys, values, window)
            else:
                out[part.rows] = self._decodes(layer, queries[part.rows], part)
        return out.view_as(q).to(q.dtype)

    def _decodes(self, layer: int, queries: Tensor, part: _Decodes) -> Tensor:
        def seen(read: Tensor) -> Tensor:  # (texts, kv_heads, keys, head_dim)
            # Slots behind a sequence's end may hold anything, NaN too. Weighing them by 0 would not
            # do: 0 * NaN is NaN.
            clear = read.index_fill_(0, part.unseen, 0).float()
            return clear.view(part.texts, part.keys, *clear.shape[1:]).transpose(1, 2)

        keys, values = map(seen, self.cache.read(layer, part.pages, part.texts * part.keys))
        # The heads of a group are its rows: (texts, kv_heads, group, head_dim).
        return scaled_dot_product_attention(
            queries, keys, values, attn_mask=part.hidden, scale=self.scale
        )

    def _chunk(
        self,
        queries: Tensor,  # (count, kv_heads, group, head_dim) fp32: the last `count` tokens
        keys: Tensor,  # (kv_heads, length, head_dim) fp32
        values: Tensor,  # the same
        window: int | None,
    ) -> Tensor:  # like queries
        count, _, group, _ = queries.shape
        before = keys.shape[1] - count
        q = queries.permute(1, 2, 0, 3)  # K heads are the batch, and a group shares its K and V
        keys, values = (x[:, None].expand(-1, group, -1, -1) for x in (keys, values))
        if before == 0 and (window is None or window >= count):
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
                scaled_dot_product_attention(
                    q[:, :, row:end],
                    keys[:, :, first : before + end],
                    values[:, :, first : before + end],
                    attn_mask=mask,
                    scale=self.scale,
                )
            )
        return torch.cat(parts, 2).permute(2, 0, 1, 3)
