"""The KV cache of all layers in pages: kv16, kv8 and kv4 as peers, and COMET's kv4 by channel.

Slot s is place s % page_tokens of page s // page_tokens. No two tokens share a byte: a write never
reads what is there, so pages may be shared, freed and filled again without being cleared.
`read` is the oracle of a format: attention of any implementation must equal attention over the
numbers that `read` returns, with queries as `queries` returns them.
Knows nothing of sequences, of who owns a page (pages.py) and of attention.

    one token of one layer:   K head 0 | K head 1 | ... | V head 0 | V head 1 | ...
    kv4, one head:            byte j = code[j] | code[j + head_dim/2] << 4
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from billfish.engine.kv.codes import (
    INTEGERS,
    code_bytes,
    encode,
    encode_tokens,
    largest,
    pack,
    unpack,
)
from billfish.engine.kv.rotation import Rotation
from billfish.errors import UserError


@dataclass(frozen=True)
class Room:
    """What a cache has room for."""

    layers: int
    pages: int
    page_tokens: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of the model: K and V come in it, and are read back in it
    device: torch.device

    def zeros(self, width: int, dtype: torch.dtype) -> Tensor:
        """(layers, pages, page_tokens, K and V, kv_heads, width)"""
        shape = (self.layers, self.pages, self.page_tokens, 2, self.kv_heads, width)
        return torch.zeros(shape, dtype=dtype, device=self.device)


class Cache(Protocol):
    """`write` changes the named slots of one layer and nothing else; `read` changes nothing."""

    name: ClassVar[str]  # = the command line's value
    page_tokens: int

    def __init__(self, room: Room) -> None: ...

    def write(
        self,
        layer: int,
        slots: Tensor,  # (tokens,) int64, each at most once
        k: Tensor,  # (tokens, kv_heads, head_dim)
        v: Tensor,  # the same
    ) -> None: ...

    def read(
        self,
        layer: int,
        pages: Tensor,  # (n,) int64, in the order of the sequence
        count: int,  # at most n * page_tokens
    ) -> tuple[Tensor, Tensor]:
        """The first `count` tokens of these pages: k and v, (count, kv_heads, head_dim), dtype;
        copies, which the caller may overwrite."""
        ...

    def queries(self, layer: int, q: Tensor) -> Tensor:
        """(tokens, heads, head_dim): queries as they must multiply the keys that `read` returns."""
        ...

    def lacking(self, layer: int, q: Tensor) -> Tensor | None:
        """(tokens, heads) fp32: what these products lack, the same for all keys of a query. Softmax
        does not see it, but for sinks. None: nothing."""
        ...

    def nbytes(self) -> int: ...

    @staticmethod
    def bytes_a_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Of K and V together, all layers: to size a cache before it exists."""
        ...


class Kv16:
    """K and V uncoded, in the model's dtype (of fp32 models 32 bits, in spite of its name).

    Token-major inside a page: what `read` gathers is (tokens, ...) without a second copy.
    """

    name: ClassVar[str] = "kv16"

    def __init__(self, room: Room) -> None:
        self.page_tokens = room.page_tokens
        self.numbers = room.zeros(room.head_dim, room.dtype)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        _put(self.numbers[layer], slots, torch.stack((k, v), 1).to(self.numbers.dtype))

    def read(self, layer: int, pages: Tensor, count: int) -> tuple[Tensor, Tensor]:
        k, v = _gather(self.numbers[layer], pages, count).unbind(1)
        return k, v

    def queries(self, layer: int, q: Tensor) -> Tensor:
        return q

    def lacking(self, layer: int, q: Tensor) -> Tensor | None:
        return None

    def nbytes(self) -> int:
        return self.numbers.nbytes

    @staticmethod
    def bytes_a_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return layers * 2 * kv_heads * head_dim * dtype.itemsize


class _PerToken:
    """Asymmetric codes with a step and a minimum (low) per token and head, computed on write.

    Step and low are in the model's dtype, not always in fp16: bf16 numbers may exceed 65504, where
    an fp16 low is inf, and low is one of the token's own numbers, exact in their dtype, so that
    equal numbers come back bit for bit. The price is bf16's step, up to 2^-7 (0.8 %) too wide. The
    step is rounded up, not to nearest: the grid then always reaches the maximum, also in fp16's
    subnormals, and no error exceeds half the stored step.

    A NaN makes its own token and head NaN when read, as in kv16, and no other. An infinity is
    clamped to the largest number.
    """

    bits: ClassVar[int]

    def __init__(self, room: Room) -> None:
        if room.dtype not in INTEGERS:
            raise UserError(f"K and V of {room.dtype}: coded caches hold fp16, bf16 or fp32.")
        self.page_tokens, self.dtype = room.page_tokens, room.dtype
        self.codes = room.zeros(code_bytes(self.bits, room.head_dim), torch.uint8)
        self.grids = room.zeros(2, room.dtype)  # (step, low) side by side: one gather

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        numbers, feedback = torch.stack((k, v), 1), self._feedback(layer)
        codes, step, low = encode_tokens(numbers, self.bits, self.dtype, feedback)
        _put(self.codes[layer], slots, pack(codes, self.bits))
        _put(self.grids[layer], slots, torch.cat((step, low), -1))

    def _feedback(self, layer: int) -> Tensor | None:  # as encode takes it
        return None

    def read(self, layer: int, pages: Tensor, count: int) -> tuple[Tensor, Tensor]:
        codes = unpack(_gather(self.codes[layer], pages, count), self.bits)
        step, low = _gather(self.grids[layer], pages, count).float().chunk(2, -1)
        k, v = codes.mul_(step).add_(low).to(self.dtype).unbind(1)
        return k, v

    def queries(self, layer: int, q: Tensor) -> Tensor:
        return q

    def lacking(self, layer: int, q: Tensor) -> Tensor | None:
        return None

    def nbytes(self) -> int:
        return self.codes.nbytes + self.grids.nbytes


class Kv8(_PerToken):
    name: ClassVar[str] = "kv8"
    bits: ClassVar[int] = 8

    @staticmethod
    def bytes_a_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return layers * 2 * kv_heads * (code_bytes(8, head_dim) + 2 * dtype.itemsize)


class Kv4Plain(_PerToken):
    """At head_dim 128 and 16-bit numbers 68 bytes a head instead of 256: 3.8 times the tokens."""

    name: ClassVar[str] = "kv4-plain"
    bits: ClassVar[int] = 4

    @staticmethod
    def bytes_a_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return layers * 2 * kv_heads * (code_bytes(4, head_dim) + 2 * dtype.itemsize)


class Kv4(Kv4Plain):
    """K is rotated before it is coded (rotation.py) and coded with error feedback; `read` returns
    it rotated, and `queries` rotates queries to match. V is not rotated. Without a rotation, which
    whoever makes the cache sets, it is Kv4Plain."""

    name: ClassVar[str] = "kv4"
    rotation: Rotation | None = None

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        k = k if self.rotation is None else self.rotation.keys(layer, k)
        super().write(layer, slots, k, v)

    def _feedback(self, layer: int) -> Tensor | None:
        return None if self.rotation is None else self.rotation.feedback[layer]

    def queries(self, layer: int, q: Tensor) -> Tensor:
        return q if self.rotation is None else self.rotation.queries(layer, q)

    def lacking(self, layer: int, q: Tensor) -> Tensor | None:
        return None if self.rotation is None else self.rotation.lacking(layer, q)


@dataclass(frozen=True)
class ChannelRange:
    """Smallest and largest number of each channel over a calibration text.

    `update` changes the tensors in place. Numbers that are not finite are left out.
    """

    low: Tensor  # (layers, 2, kv_heads, head_dim) fp32, K then V; +inf where nothing was seen
    high: Tensor  # the same; -inf where nothing was seen

    def __post_init__(self) -> None:
        if self.low.dim() != 4 or self.low.shape[1] != 2 or self.low.shape != self.high.shape:
            raise UserError(
                f"Ranges of K and V: low is {tuple(self.low.shape)}, high {tuple(self.high.shape)};"
                " both must be (layers, 2, kv_heads, head_dim). Calibrate again."
            )

    @classmethod
    def empty(
        cls, layers: int, kv_heads: int, head_dim: int, device: torch.device | str = "cpu"
    ) -> "ChannelRange":
        low = torch.full((layers, 2, kv_heads, head_dim), torch.inf, device=device)
        return cls(low, -low)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "ChannelRange":
        missing = {"kv_low", "kv_high"} - tensors.keys()
        if missing:
            raise UserError(f"Ranges of K and V: {sorted(missing)} missing. Calibrate again.")
        return cls(tensors["kv_low"].float(), tensors["kv_high"].float())

    def tensors(self) -> dict[str, Tensor]:
        """As safetensors takes them."""
        return {"kv_low": self.low, "kv_high": self.high}

    def update(
        self,
        layer: int,
        k: Tensor,  # (tokens, kv_heads, head_dim), as the cache will get it: after RoPE
        v: Tensor,
    ) -> None:
        if k.shape[0] == 0:
            return
        numbers = torch.stack((k, v), 1).to(self.low.device, torch.float32)
        finite = numbers.isfinite()
        low, high = self.low[layer], self.high[layer]
        torch.minimum(low, numbers.where(finite, torch.inf).amin(0), out=low)
        torch.maximum(high, numbers.where(finite, -torch.inf).amax(0), out=high)


class Kv4Channels:
    """COMET 3.2: 4-bit codes with a step per channel, from a calibration.

    Nothing is stored per token but codes: 64 bytes a head at head_dim 128. A kernel could fold the
    steps of K into q and those of V into the output. Numbers outside the calibrated range are
    clamped; a NaN has no code and reads as the channel's minimum. Whoever makes the cache sets the
    ranges.
    """

    name: ClassVar[str] = "kv4-channel"

    def __init__(self, room: Room) -> None:
        self.page_tokens, self.dtype = room.page_tokens, room.dtype
        self.codes = room.zeros(code_bytes(4, room.head_dim), torch.uint8)
        shape = (room.layers, 2, room.kv_heads, room.head_dim)
        self.low = torch.zeros(shape, device=room.device)
        self.step = torch.zeros_like(self.low)

    def set_ranges(self, ranges: ChannelRange) -> None:
        if ranges.low.shape != self.low.shape:
            raise UserError(
                f"Ranges of K and V are {tuple(ranges.low.shape)}, this model's are "
                f"{tuple(self.low.shape)}: they were calibrated with another model. Calibrate with "
                "this one."
            )
        seen = (ranges.low <= ranges.high).flatten(1).all(1)
        if not seen.all():
            missing = (~seen).nonzero().flatten().tolist()
            raise UserError(
                f"Ranges of K and V: layers {missing} have channels without a finite number. "
                "Calibrate with text that runs through the whole model."
            )
        limit = largest(self.dtype)  # ranges calibrated in fp32 may be run in fp16
        self.low = ranges.low.to(self.low).clamp(-limit, limit)
        self.step = (ranges.high.to(self.low).clamp(-limit, limit) - self.low) / 15

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        numbers = torch.stack((k, v), 1).float()
        codes = encode(numbers, self.step[layer], self.low[layer], 4)
        _put(self.codes[layer], slots, pack(codes, 4))

    def read(self, layer: int, pages: Tensor, count: int) -> tuple[Tensor, Tensor]:
        codes = unpack(_gather(self.codes[layer], pages, count), 4)
        k, v = codes.mul_(self.step[layer]).add_(self.low[layer]).to(self.dtype).unbind(1)
        return k, v

    def queries(self, layer: int, q: Tensor) -> Tensor:
        return q

    def lacking(self, layer: int, q: Tensor) -> Tensor | None:
        return None

    def nbytes(self) -> int:
        """Pages, and the two fp32 tensors that all of them share."""
        return self.codes.nbytes + self.low.nbytes + self.step.nbytes

    @staticmethod
    def bytes_a_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return layers * 2 * kv_heads * code_bytes(4, head_dim)


FORMATS: dict[str, type[Cache]] = {Kv16.name: Kv16, Kv8.name: Kv8, Kv4.name: Kv4}
CALIBRATED: dict[str, type[Cache]] = {Kv4Channels.name: Kv4Channels}  # useless without ranges


def _put(pages: Tensor, slots: Tensor, numbers: Tensor) -> None:
    """Into (pages, page_tokens, ...) at slots, whole tokens."""
    pages.flatten(0, 1).index_copy_(0, slots, numbers)


def _gather(stored: Tensor, pages: Tensor, count: int) -> Tensor:
    """(pages, page_tokens, ...) -> (count, ...). index_select copies a page as one row: 4 times as
    fast as stored[pages] on a CPU."""
    needed = -(-count // stored.shape[1])
    assert needed <= len(pages), f"{count} tokens in {len(pages)} pages of {stored.shape[1]}"
    return stored.index_select(0, pages[:needed]).flatten(0, 1)[:count]
