"""Short prompts as decodes: every token of a small step is a row of its own.

K and V of a step are stored before attention reads them, so a prompt's token i may be a row that
reads the i + 1 tokens up to itself, as a decode does. A step of few tokens then replays the graph
of a batch of as many rows: kernel by kernel the host would need several times as long for it as the
GPU.
"""

from collections.abc import Sequence as Many

import numpy as np

from billfish.engine.runner import Rules, last_rows
from billfish.engine.sampling import RULE
from billfish.engine.scheduler import Piece

MOST_ROWS = 256  # of a step with prompts
# Tokens that the rows of a step read together, each its own. A chunk far inside a long text is read
# by all of its rows, and FlashAttention reads it once.
MOST_READ = 2**16


def as_rows(pieces: Many[Piece]) -> list[Piece] | None:
    """A piece for every token; None if they are too many, or would read too much."""
    if sum(piece.count for piece in pieces) > MOST_ROWS:
        return None
    # Decodes read what they read in any case.
    chunks = (piece for piece in pieces if piece.count > 1)
    if sum(piece.count * (piece.start + piece.count) for piece in chunks) > MOST_READ:
        return None
    return [
        Piece(piece.sequence, at, 1, False)
        for piece in pieces
        for at in range(piece.start, piece.start + piece.count)
    ]


def rules_of_rows(rules: Rules, pieces: Many[Piece]) -> Rules:
    """Rules of the pieces that sample -> of all rows; other rows draw what nobody reads."""
    spread = [np.zeros(RULE, np.int32)] * sum(piece.count for piece in pieces)
    for row, rule in zip(last_rows(pieces), rules, strict=True):
        spread[row] = rule
    return spread
