"""Short prompts as decodes: every token of a small step is a row of its own.

K and V of a step are stored before attention reads them, so a prompt's token i may be a row that
reads the i + 1 tokens up to itself, as a decode does. A step of few tokens then replays the graph
of a batch of as many rows: kernel by kernel the host would need several times as long for it as the
GPU.
"""

from collections.abc import Sequence as Many

from billfish.engine.scheduler import Piece

MOST_ROWS = 256  # of a step with prompts
# Tokens that the rows of a step read together, each its own. A chunk far inside a long text is read
# by all of its rows, and FlashAttention reads it once.
MOST_READ = 2**16


def can_be_rows(pieces: Many[Piece]) -> bool:
    """Whether these are few enough tokens, which do not read too much."""
    if sum(piece.count for piece in pieces) > MOST_ROWS:
        return False
    # Decodes read what they read in any case.
    chunks = (piece for piece in pieces if piece.count > 1)
    return sum(piece.count * (piece.start + piece.count) for piece in chunks) <= MOST_READ
