"""What runs a step's pieces through the model: with torch's operators on any device, or gpu.py."""

from collections.abc import Sequence as Many
from typing import Protocol

import torch
from torch import Tensor

from billfish.engine.attention import Batch, PagedAttention
from billfish.engine.cache import Cache
from billfish.engine.scheduler import Piece
from billfish.models.decoder import Decoder


class Runner(Protocol):
    decoder: Decoder
    # Whether a call returns before its work is done, so that there is time for something else.
    asynchronous: bool

    def hidden(self, pieces: Many[Piece]) -> Tensor:
        """(tokens, hidden) of all pieces, one after the other; K and V of them are in pages."""
        ...

    def decode(self, pieces: Many[Piece]) -> Tensor:
        """The same where each is one token: logits (pieces, vocabulary), until the next call."""
        ...


class TorchRunner:
    asynchronous = False

    def __init__(self, decoder: Decoder, cache: Cache) -> None:
        self.decoder, self.page_tokens = decoder, cache.page_tokens
        self.attention = PagedAttention(cache, decoder.shape.scale, decoder.shape.windows)

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
            tokens += sequence.part(piece.start, end)
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
    def decode(self, pieces: Many[Piece]) -> Tensor:
        return self.decoder.logits(self.hidden(pieces))
