// 4-bit codes -> numbers in the A fragment of mma.m16n8k16, by masks alone (MARLIN 3.4).
//
// A word of a record (formats/layout.py, brick) is a lane's whole fragment of one k16 step:
//
//     bits 31..28 27..24 23..20 19..16 | 15..12 11..8  7..4   3..0
//           a3     a2     a1     a0    |  a3     a2     a1     a0      a0: row r,     k, k + 1
//             odd k (upper half)       |     even k (lower half)       a1: row r + 8, k, k + 1
//                                                                      a2: row r,     k + 8, k + 9
//                                                                      a3: row r + 8, k + 8, k + 9
//
// Zero point and scale are not applied here. The tensor cores multiply the raw numbers
//
//     raw(code) = unit * (offset + code)            sum raw x = unit * (sum code x + offset sum x)
//
// exactly, and sum x comes from one more product, with a fragment of raw(1) - raw(0). Zero point
// and scale are applied to the fp32 sums once a group: 5 (fp16) or 7 (bf16) instructions for 8
// weights instead of 9 or 11 with a subtraction for each pair. Nothing is rounded before the sums,
// and scales may have any size.
#pragma once

#include "billfish/mma.cuh"

namespace billfish {

template <class T>
struct Raw;

// n is the subnormal n * 2^-24, n << 4 is n * 2^-20: rows r and r + 8 differ by a power of two. The
// tensor cores take subnormals as they are (checked on the card).
template <>
struct Raw<Half> {
    static constexpr float kOffset = 0, kUpper = 16777216.0f, kLower = 1048576.0f;  // 1 / unit
    static constexpr u32 kOneUpper = 0x00010001u, kOneLower = 0x00100010u;
    static constexpr u32 kOnes = 0x3c003c00u;  // 1.0, twice
    template <bool kSpare = true>
    static BILLFISH_DEVICE void fragment(u32 word, u32 (&a)[4]) {
        const u32 shifted = word >> 8;
        a[0] = word & 0x000f000fu;
        a[1] = word & 0x00f000f0u;
        a[2] = shifted & 0x000f000fu;
        a[3] = shifted & 0x00f000f0u;
    }
    // One instruction fewer, four: the lower rows are 16 times theirs plus the upper row, which is
    // taken off their sums.
    static constexpr bool kNested = true;
    static BILLFISH_DEVICE void nested(u32 word, u32 (&a)[4]) {
        const u32 others = pick_bytes(word, 0, 0x4341);  // bytes 1 and 3
        a[0] = word & 0x000f000fu;
        a[1] = word & 0x00ff00ffu;
        a[2] = others & 0x000f000fu;
        a[3] = others;
    }
};

// bf16 has fp32's exponents: products of subnormals would be subnormal, too. 0x4300 | n is 128 + n.
// With a register to spare for the constant (kSpare) it is 7 instructions, else 11.
template <>
struct Raw<Bfloat> {
    static constexpr float kOffset = 128, kUpper = 1, kLower = 1;
    static constexpr u32 kOneUpper = 0x3f803f80u, kOneLower = 0x3f803f80u;
    static constexpr u32 kOnes = 0x3f803f80u;
    template <bool kSpare = true>
    static BILLFISH_DEVICE void fragment(u32 word, u32 (&a)[4]) {
        constexpr u32 kMask = 0x000f000fu, k128 = 0x43004300u;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[i] = kSpare ? and_or(word >> 4 * i, kMask, k128) : (word >> 4 * i & kMask) | k128;
    }
    static constexpr bool kNested = false;
    static BILLFISH_DEVICE void nested(u32 word, u32 (&a)[4]) { fragment(word, a); }
};

// The raw number of a zero point, 0 to 15, as fp32: exact, without a slow conversion.
template <class T>
BILLFISH_DEVICE float raw_zero(u32 zero) {
    constexpr float kMagic = 8388608.0f;  // 2^23, 0x4b000000: the last bit is worth 1
    return __uint_as_float(0x4b000000u | zero) - (kMagic - Raw<T>::kOffset);
}

// The same in the unit of the upper or lower rows' sums.
template <class T>
BILLFISH_DEVICE float raw_unit(u32 zero, bool lower) {
    return raw_zero<T>(zero) / (lower ? Raw<T>::kLower : Raw<T>::kUpper);
}

// Decoded weights, (code - zero) * scale rounded once: 13 (fp16) or 15 (bf16) instructions for 8.
// `scale` and `zero` of rows r and r + 8, both halves alike.
template <class T>
struct Exact;

template <>
struct Exact<Half> {
    // 0x6400 | n is 1024 + n and 0x6400 | n << 4 is 1024 + 16 n: minus 1024 + zero, or divided by
    // 16 minus 64 + zero, exactly code - zero.
    static BILLFISH_DEVICE u32 zero(u32 zero, bool lower) {
        return lower ? 0xd400u | zero << 4 : 0xe400u | zero;
    }
    static BILLFISH_DEVICE void fragment(u32 word, const u32 (&scale)[2], const u32 (&zero)[2],
                                         u32 (&a)[4]) {
        constexpr u32 k1024 = 0x64006400u, kSixteenth = 0x2c002c00u;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const u32 w = word >> 4 * i;
            const u32 upper = Half::add(and_or(w, 0x000f000fu, k1024), zero[0]);
            const u32 lower = Half::fma(and_or(w, 0x00f000f0u, k1024), kSixteenth, zero[1]);
            a[i] = Half::mul(upper, scale[0]);
            a[i + 1] = Half::mul(lower, scale[1]);
        }
    }
};

template <>
struct Exact<Bfloat> {
    static BILLFISH_DEVICE u32 zero(u32 zero, bool) { return 0xc300u | zero; }  // -(128 + zero)
    static BILLFISH_DEVICE void fragment(u32 word, const u32 (&scale)[2], const u32 (&zero)[2],
                                         u32 (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 raw = and_or(word >> 4 * i, 0x000f000fu, 0x43004300u);
            a[i] = Bfloat::mul(Bfloat::add(raw, zero[i % 2]), scale[i % 2]);
        }
    }
};

}  // namespace billfish
