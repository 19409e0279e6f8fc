"""Split-KV decode attention: into how many chunks each sequence's pages are split.

Chunks fill the GPU when sequences are few and long, and cost time when they are combined. The best
number depends on the whole batch, and so do the last bits of a sequence's result, as with the GEMM
kernels; with `batch_invariant` it follows from the sequence's own length.

The time model is fitted to timings of 2026-11-15 (H200, head_dim 128; docs/LOG.md); in the batches
that were swept, 1 to 64 sequences, it finds the fastest size or one within 16 % of its time.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int32]
MOST = 32  # chunks of a sequence: more cost more to combine than they save
EACH = 8  # pages of an invariant chunk
BLOCKS = {"kv16": 2, "kv8": 3, "kv4": 3}  # of an SM, as in attend_stage.cuh: kBlocks
# Microseconds of a block: for a page, alone on an SM and with the most blocks; for a chunk that is
# one of several, more the fewer pages it has; for combining chunks, and for each of them.
PAGE_ALONE = {"kv16": 1.77, "kv8": 1.1, "kv4": 0.6}
PAGE_SHARED = {"kv16": 1.87, "kv8": 1.58, "kv4": 0.88}
PART, PART_SHORT, ADD, ADD_EACH = 0.5, 12.0, 1.0, 0.3


@functools.cache
def sizes_of(pages: int) -> Numbers:
    """Of chunks, in pages, that cut so many pages into 1 to MOST; rising."""
    return np.unique(-(-pages // np.arange(1, min(pages, MOST) + 1, dtype=np.int32)))


@dataclass(frozen=True)
class Chunking:
    kv: str
    kv_heads: int
    sms: int
    invariant: bool = False

    @property
    def blocks(self) -> int:
        """That the GPU runs at once."""
        return self.sms * BLOCKS[self.kv]

    def chunks(self, pages: Numbers) -> Numbers:
        """How many of each sequence; 0 of one without pages."""
        if self.invariant:
            return np.minimum(-(-pages // EACH), MOST)
        sizes, total = sizes_of(int(pages.max(initial=1))), max(int(pages.sum()), 1)
        counts = -(-pages // sizes[:, None])
        most, blocks, places = self.most_chunks(len(pages)), self.blocks, BLOCKS[self.kv]
        alone, more = PAGE_ALONE[self.kv], PAGE_SHARED[self.kv] - PAGE_ALONE[self.kv]
        numbers = sizes.tolist(), counts.sum(1).tolist(), counts.max(1, initial=0).tolist()
        times = []
        # A number at a time: for these few sizes an operation on arrays takes as long as ten.
        for size, chunks, several in zip(*numbers, strict=True):
            # Unsplit sequences are always allowed, also a long one among many short ones.
            if chunks > most and size < sizes[-1]:
                times.append(math.inf)
                continue
            items = max(chunks, 1) * self.kv_heads
            rounds = -(-items // blocks)
            mean = total / max(chunks, 1)
            others = min(-(-items // self.sms), places) - 1  # on an SM
            page = alone + more * others / (places - 1)
            time = max(rounds * mean, size) * page
            if several > 1:
                time += rounds * (PART + PART_SHORT / mean) + ADD + ADD_EACH * several
            times.append(time)
        found: Numbers = counts[times.index(min(times))]
        return found

    def most_chunks(self, sequences: int) -> int:
        """Of all sequences together: what tables and workspace have room for."""
        if self.invariant:
            return sequences * MOST
        return max(4 * self.blocks // self.kv_heads, sequences)
