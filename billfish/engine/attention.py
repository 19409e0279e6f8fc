"""Attention over pages, with torch's own operators: right on every device, quick on a CPU.

K and V are written first, and then everything is read back from the cache, the tokens of this very
step too. So with kv8 and kv4 a token sees the same numbers however its prompt was cut, whatever
else is in the batch, and whether a page was filled now or by another request. Products and sums are
fp32 whatever the model's dtype: 16-bit softmax weights would differ between a chunk and a decode by
2^-9, enough to change a text. Knows nothing of RoPE, of layers' weights or of who owns a page.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from billfish.engine.cache import Cache

# Tokens read at once, of several sequences: fewer calls, yet K and V stay in a core's caches.
READ_TOKENS = 1024
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
    _reads: dict[tuple[int, int | None], list["_Read"]] = field(
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

    def reads(self, page_tokens: int, window: int | None) -> list["_Read"]:
        key = page_tokens, window
        if key not in self._reads:
            self._reads[key] = _plan(self, page_tokens, window)
        return self._reads[key]


@dataclass(frozen=True)
class _Piece:
    """One sequence's queries, and where its keys lie in what was read.

    first <------------- keys -------------> first + keys
                       ^ the first query's    ^ behind the last query's
    """

    start: int  # in q
    count: int
    first: int  # in the read
    keys: int


@dataclass(frozen=True)
class _Read:
    """Pages of several sequences, one after the other, and the pieces that attend to them."""

    pages: Tensor
    tokens: int
    pieces: list[_Piece]


def _plan(batch: Batch, page_tokens: int, window: int | None) -> list[_Read]:
    """Whole pages, so that sequences can be joined; of a window only those it still reaches."""
    reads: list[_Read] = []
    pages: list[Tensor] = []
    pieces: list[_Piece] = []
    tokens = 0
    for i, (count, length) in enumerate(zip(batch.counts, batch.lengths, strict=True)):
        oldest = 0 if window is None else max(0, length - count - window + 1)
        first_page, behind = oldest // page_tokens, -(-length // page_tokens)
        size = (behind - first_page) * page_tokens
        if pieces and tokens + size > READ_TOKENS:
            reads.append(_Read(torch.cat(pages), tokens, pieces))
            pages, pieces, tokens = [], [], 0
        assert behind <= len(batch.pages[i]), f"{length} tokens in {len(batch.pages[i])} pages"
        pages.append(batch.pages[i][first_page:behind])
        pieces.append(_Piece(batch.starts[i], count, tokens, length - first_page * page_tokens))
        tokens += size
    if pieces:
        reads.append(_Read(torch.cat(pages), tokens, pieces))
    return reads


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
        for read in batch.reads(self.cache.page_tokens, window):
            # Slots behind a sequence's end may hold anything, NaN too: they are read as part of its
            # last page, and cut off here. Weighing them by 0 would not do: 0 * NaN is NaN.
            keys, values = self.cache.read(layer, read.pages, read.tokens)
            keys, values = keys.float().transpose(0, 1), values.float().transpose(0, 1)
            for piece in read.pieces:
                rows = slice(piece.start, piece.start + piece.count)
                behind = piece.first + piece.keys
                if piece.count == 1:
                    first = piece.first if window is None else max(piece.first, behind - window)
                    # The heads of a group are its rows: (1, kv_heads, group, head_dim).
                    out[rows] = scaled_dot_product_attention(
                        queries[rows],
                        keys[None, :, first:behind],
                        values[None, :, first:behind],
                        scale=self.scale,
                    )
                else:
                    mine = slice(piece.first, behind)
                    out[rows] = self._chunk(queries[rows], keys[:, mine], values[:, mine], window)
        return out.view_as(q).to(q.dtype)

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
