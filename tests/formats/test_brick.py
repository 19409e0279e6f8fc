"""layout.brick() against the lane-by-lane model of the instruction, fed as the kernels feed it.

record.cuh and dequant.cuh say where a lane finds its words, which nibble is which register, and
where its activations lie. That is written down here a second time, with plain loops; only `pack` is
Billfish's.
"""

import random
import struct

import numpy as np
import pytest
import torch
from ptx_model import ldmatrix, mma_m16n8k16, owner_of_c

from billfish.formats import layout

N, K, TOKENS = 64, 128, 8
X_LINE = 128  # bytes of 64 activations in shared memory


def lanes_words(words, k64, n16):
    """[lane][step] of one brick: [k64][n16][lane][step], 16 bytes a lane."""
    memory = struct.pack("<1024I", *(word & 0xFFFFFFFF for word in words))
    start = (k64 * 4 + n16) * 512
    return [struct.unpack_from("<4I", memory, start + 16 * lane) for lane in range(32)]


def a_registers(word):
    """dequant.cuh's picture: a0 to a3 from below, even k in the lower half, odd k in the upper."""
    halves = word & 0xFFFF, word >> 16
    return [half >> 4 * register & 15 for register in range(4) for half in halves]


def x_smem_offset(token, chunk, tokens=TOKENS):
    return (chunk // 8 * tokens + token) * X_LINE + ((chunk ^ token) % 8 << 4)


def x_in_shared_memory(x):
    """Chunks of eight activations where the copying warp puts them; a list of 16-bit numbers."""
    memory = [None] * (TOKENS * X_LINE)
    for token in range(TOKENS):
        for chunk in range(16):
            place = x_smem_offset(token, chunk) // 2
            memory[place : place + 8] = x[token][8 * chunk : 8 * chunk + 8]
    assert None not in memory
    return memory


def load_x_address(lane, k32):
    mine = x_smem_offset(lane % 8, lane // 8)
    return (mine ^ 64 if k32 % 2 else mine) + k32 // 2 * TOKENS * X_LINE


def b_registers(memory, k32):
    """[step % 2][lane]: lane l names row l % 8 of matrix l // 8; two matrices are a B fragment."""
    places = [load_x_address(lane, k32) // 2 for lane in range(32)]
    rows = [memory[place : place + 8] for place in places]
    loaded = ldmatrix([rows[8 * i : 8 * i + 8] for i in range(4)])
    return [[lane[4 * j : 4 * j + 4] for lane in loaded] for j in range(2)]


def multiply(words, x):
    """(64, 8): what a kernel that runs over both k64 and all four steps gets."""
    memory = x_in_shared_memory(x)
    product = [[None] * TOKENS for _ in range(N)]
    for n16 in range(4):
        d = [[0] * 4 for _ in range(32)]
        for k64 in range(2):
            mine = lanes_words(words, k64, n16)
            for step in range(4):
                a = [a_registers(mine[lane][step]) for lane in range(32)]
                k32 = 2 * k64 + step // 2
                d = mma_m16n8k16(a, b_registers(memory, k32)[step % 2], d)
        for row in range(16):
            for token in range(TOKENS):
                lane, element = owner_of_c(row, token)
                product[16 * n16 + row][token] = d[lane][element]
    return product


def expected(codes, x):
    return [[sum(c * v for c, v in zip(row, token, strict=True)) for token in x] for row in codes]


@pytest.mark.parametrize("seed", range(3))
def test_product_of_a_brick(seed):
    source = random.Random(seed)
    codes = [[source.randint(0, 15) for _ in range(K)] for _ in range(N)]
    x = [[source.randint(-999, 999) for _ in range(K)] for _ in range(TOKENS)]
    words = layout.brick().pack(torch.tensor(codes))
    assert tuple(words.shape) == (1, 1024) and words.dtype == torch.int32
    assert multiply(words[0].tolist(), x) == expected(codes, x)


def test_tiles_lie_one_after_the_other_along_k():
    """(n tile, k tile): a band's records are neighbours, each as if it were alone."""
    codes = torch.randint(0, 16, (2 * N, 3 * K))
    words = layout.brick().pack(codes)
    assert tuple(words.shape) == (2, 3 * 1024)
    for i in range(2):
        for j in range(3):
            alone = layout.brick().pack(codes[i * N : (i + 1) * N, j * K : (j + 1) * K])
            assert torch.equal(words[i, j * 1024 : (j + 1) * 1024], alone[0]), (i, j)


def test_what_is_cut_off_is_code_zero():
    codes = torch.randint(0, 16, (37, 100))
    whole = torch.zeros(N, K, dtype=codes.dtype)
    whole[:37, :100] = codes
    words = layout.brick().pack(codes)
    assert torch.equal(words, layout.brick().pack(whole))
    assert torch.equal(layout.brick().unpack(words, 37, 100), codes.to(torch.uint8))


# -- banks of shared memory: 32 of 4 bytes; one phase is as many lanes as fill 128 bytes


def banks(addresses, size):
    """How often each bank is asked for a different word; lanes that share a word share the ask."""
    asked = {address + byte for address in addresses for byte in range(0, size, 4)}
    return [sum(address // 4 % 32 == bank for address in asked) for bank in range(32)]


def phases(addresses, size):
    together = 128 // size
    return [addresses[i : i + together] for i in range(0, 32, together)]


@pytest.mark.parametrize("k32", range(4))
def test_activations_meet_no_bank_twice(k32):
    addresses = [load_x_address(lane, k32) for lane in range(32)]
    assert addresses == [x_smem_offset(lane % 8, 4 * k32 + lane // 8) for lane in range(32)]
    for lanes in phases(addresses, 16):
        assert banks(lanes, 16) == [1] * 32
    plain = [lane % 8 * X_LINE + lane // 8 * 16 for lane in range(32)]
    assert max(banks(plain[:8], 16)) == 8  # without the XOR: what this test is able to see


@pytest.mark.parametrize("tokens", [8, 16])
def test_activations_are_copied_without_conflicts(tokens):
    """The copying warp: lanes 0-15 a token's chunks, 16-31 those of the next."""
    base = [x_smem_offset(lane // 16, lane % 16, tokens) for lane in range(32)]
    for pair in range(tokens // 2):
        addresses = [(place ^ pair % 4 * 32) + pair * 2 * X_LINE for place in base]
        assert addresses == [
            x_smem_offset(2 * pair + lane // 16, lane % 16, tokens) for lane in range(32)
        ]
        for lanes in phases(addresses, 16):
            assert banks(lanes, 16) == [1] * 32
    every = sorted(x_smem_offset(token, c, tokens) for token in range(tokens) for c in range(16))
    assert every == list(range(0, 2 * tokens * X_LINE, 16))  # each chunk has a place of its own


@pytest.mark.parametrize("half", range(2))
def test_words_scales_and_zeros_meet_no_bank_twice(half):
    words = [half * 2 * 512 + lane * 16 for lane in range(32)]
    for lanes in phases(words, 16):
        assert banks(lanes, 16) == [1] * 32
    scales = [(half * 8 + lane // 4) * 8 for lane in range(32)]
    for lanes in phases(scales, 8):  # the four lanes of a quad read the same eight bytes
        assert max(banks(lanes, 8)) == 1
    zeros = [address // 4 for address in scales]  # two bytes a quad: two quads share a word
    assert max(banks([zero // 4 * 4 for zero in zeros], 4)) == 1


# -- raw numbers of dequant.cuh


def half(bits):
    return np.array(bits, dtype=np.uint16).view(np.float16).astype(np.float64)


def bfloat(bits):
    bits = torch.tensor(bits, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).double().numpy()


CODES = np.arange(16)


def test_raw_numbers_of_half():
    """n is n * 2^-24 and n << 4 is n * 2^-20: units that 1 / kUpper and 1 / kLower undo."""
    assert (half(CODES) * 16777216 == CODES).all()
    assert (half(CODES << 4) * 1048576 == CODES).all()
    assert half([0x0001])[0] * 16777216 == 1 and half([0x0010])[0] * 1048576 == 1  # kOne


def test_raw_numbers_of_bfloat():
    assert (bfloat((0x4300 | CODES).tolist()) - 128 == CODES).all()
    assert bfloat([0x3F80])[0] == 1
    assert bfloat([0x4301])[0] - bfloat([0x4300])[0] == 1


@pytest.mark.parametrize("offset", [0, 128])
def test_zero_points_without_a_conversion(offset):
    """0x4b000000 | z is 2^23 + z, and the difference is exact in fp32."""
    bits = np.array(0x4B000000 | CODES, dtype=np.uint32).view(np.float32)
    assert (bits - np.float32(8388608 - offset) == CODES + offset).all()


def fragment_half(word):
    shifted = word >> 8
    return [word & 0x000F000F, word & 0x00F000F0, shifted & 0x000F000F, shifted & 0x00F000F0]


def fragment_bfloat(word):
    return [word >> 4 * i & 0x000F000F | 0x43004300 for i in range(4)]


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF, 0x76543210, 0x89ABCDEF, 0x80000001])
def test_masks_yield_the_picture(word):
    """Rows r + 8 (a1, a3) have the other unit in fp16."""
    units = (16777216, 1048576, 16777216, 1048576)
    for make, read, scale, offset in (
        (fragment_half, half, units, 0),
        (fragment_bfloat, bfloat, (1,) * 4, 128),
    ):
        registers = make(word)
        pairs = [read([register & 0xFFFF, register >> 16]) for register in registers]
        numbers = [
            value * s - offset for pair, s in zip(pairs, scale, strict=True) for value in pair
        ]
        assert numbers == a_registers(word)
