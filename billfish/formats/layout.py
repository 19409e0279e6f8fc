"""Codes <-> words: where every bit of every code lies, as data.

A layout splits the (n, k) code matrix into tiles, packs a tile's codes in `order` into one
little-endian bit stream of 32-bit words, and arranges the tiles' words as a matrix. Packing and
unpacking read the same table, so that they are inverse by construction. It does not know what a
code means.

    placement "n kw"   row = n tile,  column = (k tile, word)   compressed-tensors weight_packed
              "kw n"   row = (k tile, word),  column = n tile   GPTQ qweight
              "k nw"   row = k tile,  column = (n tile, word)   AWQ qweight, GPTQ qzeros, Marlin B
              "nw k"   row = (n tile, word),  column = k tile   compressed-tensors zero points
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from billfish.formats import fragment

WORD_BITS = 32


@dataclass(frozen=True)
class Layout:
    name: str
    bits: int
    tile: tuple[int, int]  # (n, k) codes in one tile
    placement: str
    order: tuple[int, ...] | None = (
        None  # stream position -> index in the row-major tile; None: as is
    )

    def __post_init__(self) -> None:
        count = self.tile[0] * self.tile[1]
        assert count * self.bits % WORD_BITS == 0, (self.name, self.tile, self.bits)
        assert sorted(self.placement.replace(" ", "")) == ["k", "n", "w"], self.placement
        if self.order is not None:
            assert sorted(self.order) == list(range(count)), f"{self.name}: order is no permutation"

    @property
    def words_per_tile(self) -> int:
        return self.tile[0] * self.tile[1] * self.bits // WORD_BITS

    def shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape of the word matrix of an (n, k) code matrix.

        Padded to whole tiles; where a tile is a plain run of codes, only to a whole word.
        """
        rows, columns = self._padded_shape(n, k)
        if self.order is None and 1 in self.tile:
            count = max(n if self.tile[1] == 1 else 0, k if self.tile[0] == 1 else 0)
            used = math.ceil(count * self.bits / WORD_BITS)
            return (used, columns) if "w" in self.placement.split()[0] else (rows, used)
        return rows, columns

    def _padded_shape(self, n: int, k: int) -> tuple[int, int]:
        sizes = {
            "n": math.ceil(n / self.tile[0]),
            "k": math.ceil(k / self.tile[1]),
            "w": self.words_per_tile,
        }
        rows, columns = (math.prod(sizes[axis] for axis in side) for side in self.placement.split())
        return rows, columns

    def pack(self, codes: Tensor) -> Tensor:  # (n, k) any integer dtype -> int32 words
        n, k = codes.shape
        tile_n, tile_k = self.tile
        codes = torch.nn.functional.pad(codes, (0, -k % tile_k, 0, -n % tile_n))
        tiles = codes.reshape(-1, tile_n, codes.shape[1] // tile_k, tile_k).transpose(1, 2)
        stream = tiles.reshape(*tiles.shape[:2], -1)  # (n tiles, k tiles, codes)
        if self.order is not None:
            stream = stream[..., torch.tensor(self.order, device=codes.device)]
        words = pack_stream(stream, self.bits)
        rows, columns = self.shape(n, k)
        placed = words.permute(self._axes()).reshape(self._padded_shape(n, k))
        return placed[:rows, :columns].contiguous()

    def unpack(self, words: Tensor, n: int, k: int) -> Tensor:  # -> (n, k) uint8
        rows, columns = self.shape(n, k)
        assert tuple(words.shape) == (rows, columns), (self.name, words.shape, (rows, columns))
        padded = self._padded_shape(n, k)
        words = torch.nn.functional.pad(words, (0, padded[1] - columns, 0, padded[0] - rows))
        tile_n, tile_k = self.tile
        sizes = (math.ceil(n / tile_n), math.ceil(k / tile_k), self.words_per_tile)
        axes = self._axes()
        inverse = [axes.index(axis) for axis in range(3)]
        words = words.reshape([sizes[axis] for axis in axes]).permute(inverse)
        stream = unpack_stream(words, self.bits)
        if self.order is not None:
            back = torch.empty(len(self.order), dtype=torch.long)
            back[torch.tensor(self.order)] = torch.arange(len(self.order))
            stream = stream[..., back.to(words.device)]
        tiles = stream.reshape(sizes[0], sizes[1], tile_n, tile_k).transpose(1, 2)
        return tiles.reshape(sizes[0] * tile_n, sizes[1] * tile_k)[:n, :k].contiguous()

    def _axes(self) -> list[int]:
        return ["nkw".index(axis) for axis in self.placement.replace(" ", "")]


def pack_stream(codes: Tensor, bits: int) -> Tensor:  # (..., c) -> (..., c * bits / 32) int32
    """Code i occupies bits [i * bits, (i + 1) * bits) of the stream; odd widths straddle words."""
    count = codes.shape[-1]
    words = torch.zeros(
        *codes.shape[:-1], count * bits // WORD_BITS, dtype=torch.int64, device=codes.device
    )
    wide = codes.to(torch.int64)
    period = WORD_BITS // math.gcd(WORD_BITS, bits)  # codes after which the pattern repeats
    span = period * bits // WORD_BITS
    for i in range(period):
        word, shift = divmod(i * bits, WORD_BITS)
        words[..., word::span] |= (wide[..., i::period] << shift) & 0xFFFFFFFF
        if shift + bits > WORD_BITS:
            words[..., word + 1 :: span] |= wide[..., i::period] >> (WORD_BITS - shift)
    return ((words ^ 0x80000000) - 0x80000000).to(torch.int32)  # wrap to signed


def unpack_stream(
    words: Tensor, bits: int
) -> Tensor:  # (..., w) int32 -> (..., w * 32 / bits) uint8
    count = words.shape[-1] * WORD_BITS // bits
    codes = torch.empty(*words.shape[:-1], count, dtype=torch.uint8, device=words.device)
    wide = words.to(torch.int64) & 0xFFFFFFFF
    period = WORD_BITS // math.gcd(WORD_BITS, bits)
    span = period * bits // WORD_BITS
    for i in range(period):
        word, shift = divmod(i * bits, WORD_BITS)
        value = wide[..., word::span] >> shift
        if shift + bits > WORD_BITS:
            value = value | (wide[..., word + 1 :: span] << (WORD_BITS - shift))
        codes[..., i::period] = (value & (2**bits - 1)).to(torch.uint8)
    return codes


def _stream_tile(bits: int) -> int:
    """Fewest codes that fill whole words."""
    return WORD_BITS // math.gcd(WORD_BITS, bits)


def compressed_tensors(bits: int) -> Layout:
    """pack-quantized weight_packed: rows of n, codes along k."""
    return Layout("compressed-tensors", bits, (1, _stream_tile(bits)), "n kw")


def compressed_tensors_zeros(bits: int) -> Layout:
    """pack-quantized weight_zero_point: the (n, g) zeros packed along n."""
    return Layout("compressed-tensors zeros", bits, (_stream_tile(bits), 1), "nw k")


def gptq(bits: int) -> Layout:
    return Layout("gptq", bits, (1, _stream_tile(bits)), "kw n")


def gptq_zeros(bits: int) -> Layout:
    return Layout("gptq zeros", bits, (_stream_tile(bits), 1), "k nw")


def awq() -> Layout:
    """AWQ gemm, weights and zeros alike: eight consecutive n in one word, even ones first."""
    return Layout("awq", 4, (8, 1), "k nw", order=NIBBLE_INTERLEAVE)


# MARLIN 3.4 and AWQ: with this order a word, shifted by 4 * i and masked, yields codes 2i and 2i +
# 1 in the two halves of a register.
NIBBLE_INTERLEAVE = (0, 2, 4, 6, 1, 3, 5, 7)


def marlin() -> Layout:
    """Original Marlin `B`, int32 (k / 16, 2 n). One tile is 16 of k by 64 of n, lane after lane:

    a lane's 32 codes = 4 words, word j belongs to n16 block j
    a word's 8 codes  = the B fragments of that block's two n8 halves, interleaved
    """
    order = []
    for lane in range(fragment.LANES):
        for block in range(4):
            for slot in NIBBLE_INTERLEAVE:
                half, element = divmod(slot, fragment.B_ELEMENTS)
                k, n = fragment.b_fragment(lane, element)
                n += fragment.N * (2 * block + half)
                order.append(n * fragment.K + k)
    return Layout("marlin", 4, (64, fragment.K), "k nw", order=tuple(order))


def marlin_scale_order(grouped: bool) -> tuple[int, ...]:
    """Stored position -> column in each run of 64 (grouped) or 32 (per-channel) columns of `s`.

    Grouped scales multiply B fragments: a quad's eight columns, one of each n8 block, lie together.
    Per-channel scales multiply C fragments in the epilogue: a lane's pairs of four n8 blocks do.
    """
    if grouped:
        quads = range(0, fragment.LANES, 4)  # every lane of a quad has the same column
        columns = [fragment.b_fragment(lane, 0)[1] for lane in quads]
        return tuple(fragment.N * block + column for column in columns for block in range(8))
    pairs = [[fragment.c_fragment(lane, element)[1] for element in (0, 1)] for lane in range(4)]
    return tuple(
        fragment.N * block + column for pair in pairs for block in range(4) for column in pair
    )


BRICK_N, BRICK_K = 64, 128


@cache
def brick() -> Layout:
    """Words of the CUDA kernels of w4a16: a lane's 16 bytes are its own A fragments (QUICK 3).

    One tile is 64 of n by 128 of k: [k64 (2)][n16 (4)][lane (32)][k16 step (4)] words of 8 codes,
    even inputs in the lower half, so that one mask yields the pair of a register.
    """
    order = []
    for k64 in range(2):
        for n16 in range(4):
            for lane in range(fragment.LANES):
                for step in range(4):
                    for odd in range(2):
                        for register in range(4):
                            row, column = fragment.a_fragment(lane, 2 * register + odd)
                            k = 64 * k64 + 16 * step + column
                            order.append((16 * n16 + row) * BRICK_K + k)
    return Layout("brick", 4, (BRICK_N, BRICK_K), "n kw", order=tuple(order))


@cache
def brick_places() -> Layout:
    """Places of the 2:4 weights whose codes are half a brick, 64 of n by 64 that were kept of 128.

    One tile is [n16 (4)][lane (32)][k64 (2)] words, each the metadata of mma.sp and wgmma.sp for
    two steps of 32 inputs. Lane 4 g + 2 s + p holds those of step s, inputs 16 p to 16 p + 15: of
    row g in the lower half, of row g + 8 in the upper one.
    """
    kept = BRICK_K // 2
    order: list[int] = []
    for n16 in range(4):
        for lane in range(fragment.LANES):
            quad, (step, part) = lane // 4, divmod(lane % 4, 2)
            for k64 in range(2):
                for row in (quad, quad + 8):
                    first = (16 * n16 + row) * kept + 32 * k64 + 16 * step + 8 * part
                    order += range(first, first + 8)
    return Layout("brick places", 2, (BRICK_N, kept), "n kw", order=tuple(order))
