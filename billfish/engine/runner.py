"""Runs a step's pieces through the model: torch's operators on any device, or cuda/runner.py."""

import itertools
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from billfish.engine.attention import Batch, PagedAttention
from billfish.engine.kv.cache import Cache
from billfish.engine.scheduler import Piece
from billfish.models.decoder import Decoder

Rules = list[NDArray[np.int32]]  # Chooser.rule of each row


@dataclass(frozen=True)
class Decoded:
    """The result of a step, a row for each piece that samples; perhaps still in flight."""

    logits: Tensor  # (rows, vocabulary), valid until the runner's next call
    # With rules: (rows, 2) int32 in host memory, the next token and the bits of the largest logit,
    # once `landed` has happened. Valid until the next call but one.
    found: Tensor | None = None
    landed: torch.Event | None = None

    def drawn(self) -> tuple[list[int], list[float]]:
        """Each row's next token and its largest logit; waits for them."""
        assert self.found is not None and self.landed is not None
        self.landed.synchronize()
        return self.found[:, 0].tolist(), self.found[:, 1].view(torch.float32).tolist()


class Runner(Protocol):
    decoder: Decoder
    # Whether a call returns before its work is done. A step may then sample by rules, and take
    # placeholders for tokens: -1 - i is the token that the last step with rules drew for row i.
    asynchronous: bool

    def hidden(self, pieces: Many[Piece]) -> Tensor:
        """(tokens, hidden) of all pieces, end to end; writes their K and V into pages."""
        ...

    def run(self, pieces: Many[Piece], rules: Rules | None = None) -> Decoded:
        """Logits of the pieces that sample; with rules, also their next tokens."""
        ...


class TorchRunner:
    asynchronous = False

    def __init__(self, decoder: Decoder, cache: Cache) -> None:
        self.decoder, self.page_tokens = decoder, cache.page_tokens
        shape = decoder.shape
        sinks = [decoder.sinks(layer) for layer in range(shape.layers)]
        self.attention = PagedAttention(cache, shape.scale, shape.windows, sinks)

    def tokens(self, piece: Piece) -> list[int]:
        return piece.sequence.part(piece.start, piece.start + piece.count)

    @torch.inference_mode()
    def hidden(self, pieces: Many[Piece]) -> Tensor:
        device, size = self.decoder.device, self.page_tokens
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts: list[int] = []
        for piece in pieces:
            sequence, end = piece.sequence, piece.start + piece.count
            starts.append(len(tokens))
            tokens += self.tokens(piece)
            positions += range(piece.start, end)
            slots += [sequence.pages[i // size] * size + i % size for i in range(piece.start, end)]
        batch = Batch(
            starts=starts,
            counts=[piece.count for piece in pieces],
            lengths=[piece.start + piece.count for piece in pieces],
            pages=[torch.tensor(piece.sequence.pages, device=device) for piece in pieces],
            slots=torch.tensor(slots, device=device),
        )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attention(layer, q, k, v, batch)

        return self.decoder.forward(
            torch.tensor(tokens, device=device), torch.tensor(positions, device=device), attend
        )

    @torch.inference_mode()
    def run(self, pieces: Many[Piece], rules: Rules | None = None) -> Decoded:
        assert rules is None
        return Decoded(self.decoder.logits(self.hidden(pieces)[last_rows(pieces)]))


def last_rows(pieces: Many[Piece]) -> list[int]:
    """Rows of `hidden` from which tokens are sampled: the last of each piece that samples."""
    ends = itertools.accumulate(piece.count for piece in pieces)
    return [end - 1 for end, piece in zip(ends, pieces, strict=True) if piece.samples]
