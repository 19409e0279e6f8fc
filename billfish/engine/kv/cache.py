"""K and V of all layers in pages: kv16, kv8 and kv4 as peers, and COMET's kv4 by channel.

Slot s is place s % page_tokens of page s // page_tokens. Each token's bytes are its own: a write
never reads what is there, so pages may be shared, freed and filled again without being cleared.
`read` is the oracle of a format: whatever attends, attends to the numbers that it gives back, with
queries as `queries` gives them.
Knows nothing of sequences, of who owns a page (that is the pool) and of attention.

    one token of one layer:   K head 0 | K head 1 | ... | V head 0 | V head 1 | ...
    kv4, one head:            byte j = code[j] | code[j + head_dim/2] << 4

The grid is not formats/grid.py's: that one includes 0 and stores an integer zero, good for weights.
Here the zero is a token's own minimum, so that heads with a bias (Qwen2's K) lose no levels.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from billfish.engine.kv.rotation import Turn, blocks
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
        copies, which a caller may change."""
        ...

    def queries(self, layer: int, q: Tensor) -> Tensor:
        """(tokens, heads, head_dim): as they must be to meet the keys that `read` gives."""
        ...

    def nbytes(self) -> int: ...

    @staticmethod
    def bytes_a_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Of K and V together, all layers: a pool can be sized before it exists."""
        ...


class Kv16:
    """Numbers as they come, in the model's dtype (with fp32 models 32 bits, in spite of its name).

    Token-major inside a page: what `read` gathers is (tokens, ...) at once, with no second copy.
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

    def nbytes(self) -> int:
        return self.numbers.nbytes

    @staticmethod
    def bytes_a_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return layers * 2 * kv_heads * head_dim * dtype.itemsize


class _PerToken:
    """Asymmetric codes with a step and a minimum per token and head, found when it is written.

        number = code * step + low      step = (max - min) / (2^bits - 1), rounded up

    Step and low are in the model's dtype, not always in fp16. bf16 numbers may pass 65504, where an
    fp16 low is inf, and low is one of the token's own numbers: in their dtype it is exact, so that
    equal numbers come back bit for bit. The price is bf16's step: up to 2^-7 too wide, 0.8 %. The
    step is rounded up and not to nearest: the grid then always reaches the maximum, also in fp16's
    subnormals, and no number is off by more than half the stored step.

    A NaN makes its own token and head NaN when read, as in kv16: told, and told to no one else.
    An infinity is taken as the largest number.
    """

    bits: ClassVar[int]

    def __init__(self, room: Room) -> None:
        if room.dtype not in _BITS:
            raise UserError(f"K and V of {room.dtype}: coded caches hold fp16, bf16 or fp32.")
        self.page_tokens, self.dtype = room.page_tokens, room.dtype
        self.limit = _largest(room.dtype)
        self.codes = room.zeros(_code_bytes(self.bits, room.head_dim), torch.uint8)
        self.grids = room.zeros(2, room.dtype)  # (step, low) side by side: one gather

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        numbers = torch.stack((k, v), 1).float().clamp_(-self.limit, self.limit)  # NaN stays
        low, high = torch.aminmax(numbers, dim=-1, keepdim=True)
        low = low.to(self.dtype)
        step = _round_up((high - low.float()) / ((1 << self.bits) - 1), self.dtype)
        codes = _encode(numbers, step.float(), low.float(), self.bits, self._carry(layer))
        _put(self.codes[layer], slots, _pack(codes, self.bits))
        _put(self.grids[layer], slots, torch.cat((step, low), -1))

    def _carry(self, layer: int) -> Tensor | None:  # as _encode takes it
        return None

    def read(self, layer: int, pages: Tensor, count: int) -> tuple[Tensor, Tensor]:
        codes = _unpack(_gather(self.codes[layer], pages, count), self.bits)
        step, low = _gather(self.grids[layer], pages, count).float().chunk(2, -1)
        k, v = codes.mul_(step).add_(low).to(self.dtype).unbind(1)
        return k, v

    def queries(self, layer: int, q: Tensor) -> Tensor:
        return q

    def nbytes(self) -> int:
        return self.codes.nbytes + self.grids.nbytes


class Kv8(_PerToken):
    name: ClassVar[str] = "kv8"
    bits: ClassVar[int] = 8

    @staticmethod
    def bytes_a_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return layers * 2 * kv_heads * (_code_bytes(8, head_dim) + 2 * dtype.itemsize)


class Kv4Plain(_PerToken):
    """At head_dim 128 and 16-bit numbers 68 bytes a head instead of 256: 3.8 times the tokens."""

    name: ClassVar[str] = "kv4-plain"
    bits: ClassVar[int] = 4

    @staticmethod
    def bytes_a_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return layers * 2 * kv_heads * (_code_bytes(4, head_dim) + 2 * dtype.itemsize)


class Kv4(Kv4Plain):
    """K is turned before it is coded (turn.py), and `read` gives it as it is coded: queries are
    turned to meet it; what rounding does to some of its channels later ones make good in part. V is
    coded as it comes. Without a turn K comes as it is, too; whoever makes the cache sets one."""

    name: ClassVar[str] = "kv4"
    turn: Turn | None = None

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        super().write(layer, slots, k if self.turn is None else self.turn.keys(layer, k), v)

    def _carry(self, layer: int) -> Tensor | None:
        return None if self.turn is None else self.turn.carry[layer]

    def queries(self, layer: int, q: Tensor) -> Tensor:
        return q if self.turn is None else self.turn.queries(layer, q)


@dataclass(frozen=True)
class ChannelRange:
    """Smallest and largest number of each channel; a calibration run feeds it layer by layer.

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
    """COMET 3.2: 4-bit codes with a step per channel, known before the first token (calibrated).

    No step travels with a token: 64 bytes a head at head_dim 128. A kernel could fold the steps of
    K into q, and those of V into the output. What lies outside the calibrated range is clamped; a
    NaN has no code and reads as the channel's minimum. Whoever makes the cache sets the ranges.
    """

    name: ClassVar[str] = "kv4-channel"

    def __init__(self, room: Room) -> None:
        self.page_tokens, self.dtype = room.page_tokens, room.dtype
        self.codes = room.zeros(_code_bytes(4, room.head_dim), torch.uint8)
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
        limit = _largest(self.dtype)  # a model calibrated in fp32 may run in fp16
        self.low = ranges.low.to(self.low).clamp(-limit, limit)
        self.step = (ranges.high.to(self.low).clamp(-limit, limit) - self.low) / 15

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        numbers = torch.stack((k, v), 1).float()
        codes = _encode(numbers, self.step[layer], self.low[layer], 4)
        _put(self.codes[layer], slots, _pack(codes, 4))

    def read(self, layer: int, pages: Tensor, count: int) -> tuple[Tensor, Tensor]:
        codes = _unpack(_gather(self.codes[layer], pages, count), 4)
        k, v = codes.mul_(self.step[layer]).add_(self.low[layer]).to(self.dtype).unbind(1)
        return k, v

    def queries(self, layer: int, q: Tensor) -> Tensor:
        return q

    def nbytes(self) -> int:
        """Pages, and the two fp32 tensors that all of them share."""
        return self.codes.nbytes + self.low.nbytes + self.step.nbytes

    @staticmethod
    def bytes_a_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return layers * 2 * kv_heads * _code_bytes(4, head_dim)


FORMATS: dict[str, type[Cache]] = {Kv16.name: Kv16, Kv8.name: Kv8, Kv4.name: Kv4}
CALIBRATED: dict[str, type[Cache]] = {Kv4Channels.name: Kv4Channels}  # useless without ranges

# The integer of each dtype's width: adding 1 to its bits gives the next larger positive number.
_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


def _put(pages: Tensor, slots: Tensor, numbers: Tensor) -> None:
    """Into (pages, page_tokens, ...) at slots, whole tokens."""
    pages.flatten(0, 1).index_copy_(0, slots, numbers)


def _gather(stored: Tensor, pages: Tensor, count: int) -> Tensor:
    """(pages, page_tokens, ...) -> (count, ...). index_select copies a page as one row: 4 times as
    fast as stored[pages] on a CPU."""
    needed = -(-count // stored.shape[1])
    assert needed <= len(pages), f"{count} tokens in {len(pages)} pages of {stored.shape[1]}"
    return stored.index_select(0, pages[:needed]).flatten(0, 1)[:count]


def _largest(dtype: torch.dtype) -> float:
    """Numbers are clamped here: max - min stays finite in fp32, and max rounded up in dtype."""
    largest = min(torch.finfo(dtype).max * 31 / 32, torch.finfo(torch.float32).max / 4)
    return float(torch.tensor(largest).to(dtype))


def _round_up(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32, not negative -> the smallest number of `dtype` that is not less."""
    rounded = numbers.to(dtype)
    short = rounded.float() < numbers
    integer = _BITS[dtype]
    return (rounded.view(integer) + short.to(integer)).view(dtype)


def _encode(
    numbers: Tensor,  # (tokens, K and V, kv_heads, head_dim) fp32; used up
    step: Tensor,
    low: Tensor,
    bits: int,
    carry: Tensor | None = None,  # (kv_heads, head_dim, head_dim): Turn's, for K
) -> Tensor:
    """Nearest codes, uint8. With `carry` channels of K are coded block by block: the error of one,
    times its rows, is added to the later ones."""
    steps = numbers.sub_(low).div_(step)
    if carry is not None:
        keys = steps[:, 0]
        for now, later in blocks(keys.shape[-1]):
            error = keys[..., now] - _nearest(keys[..., now].clone(), bits)
            keys[..., later] += torch.einsum("thi,hij->thj", error, carry[:, now, later])
    return _nearest(steps, bits).to(torch.uint8)


def _nearest(steps: Tensor, bits: int) -> Tensor:
    """In place. NaN, and 0 / 0 of a step of 0, are code 0: NaN made uint8 would be any byte,
    another one on another machine."""
    return steps.round_().nan_to_num_(0.0).clamp_(0, (1 << bits) - 1)


def _code_bytes(bits: int, head_dim: int) -> int:
    if head_dim * bits % 8:
        raise UserError(
            f"head_dim={head_dim}: {bits}-bit codes lie two to a byte, so it must be even. "
            "Take kv8 or kv16 for this model."
        )
    return head_dim * bits // 8


def _pack(codes: Tensor, bits: int) -> Tensor:
    """(..., head_dim) uint8 -> (..., bytes). Halves and not neighbours: both are plain slices."""
    if bits == 8:
        return codes
    low, high = codes.chunk(2, -1)
    return low | (high << 4)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """(..., bytes) uint8 -> (..., head_dim) fp32, a new tensor."""
    if bits == 8:
        return words.float()
    half = words.shape[-1]
    codes = torch.empty((*words.shape[:-1], 2 * half), device=words.device)
    codes[..., :half] = words & 15
    codes[..., half:] = words >> 4
    return codes
