// Records of 2-bit and of 4-bit weights of one matrix, scales applied as they are decoded, and a
// warp's product with half of one (schemes/w2416/cuda/arrange.py writes them).
//
//     64 outputs x 256 inputs of 2 bits, 4992 B: a lane owns whole groups of 16 inputs
//       4096 B   codes        [k64 (4)][half (2)][lane (32)][brick (2)][row r, row r + 8]
//        512 B   scale codes  [half][lane][k64][brick]   rows r and r + 8, 4 bits each
//        256 B   zeros        the same, 2 bits each
//        128 B   bases        [half][lane % 4][k64][brick]   16 bits, for 16 outputs
//     64 outputs x 128 inputs of 4 bits: record.cuh's words, then
//        128 B   scales       [half][quad (8)][row q, q + 8, q + 16, q + 24], for each part of k
//         16 B   bit i: k16 step i begins a part of k, that of the next scales
//
// Lane 4 r + c decodes inputs 16 c to 16 c + 15 of each 64: its A fragments of four k16 steps. The
// steps' order of inputs is not the matrix', but x is read alike, and a group's scale is computed
// by one lane and used for 16 weights. Scales and zeros of rows r and r + 8 are computed as a pair.
//
// A decoded weight is unit * weight, rounded to T; `unit` is a power of two for 64 outputs (lean).
#pragma once

#include "billfish/record.cuh"

namespace billfish {

constexpr int kTwoK = 256, kTwoBytes = 4992;
constexpr int kTwoScales = 4096, kTwoZeros = 4608, kTwoBases = 4864;  // byte offsets
constexpr int kFourScales = 4096, kFourSetBytes = 128, kFourMarkBytes = 16;

// Activations of a slice in shared memory: [token][input], 16-byte chunks of each 128 bytes XORed
// with the token as record.cuh has them. Up to 8 tokens only those that there are have room; lanes
// of others read the last one's.
constexpr BILLFISH_DEVICE int x_rows(int tokens, int m) { return tokens > 8 ? tokens : m; }
template <int kInputs>
BILLFISH_DEVICE u32 x_place(u32 token, u32 byte) {
    return token * kInputs * 2 + (byte ^ token % 8 * 16);
}

// kInputs of x for each of m tokens, gathered by kThreads threads, a chunk of 8 each at a time.
// `column` is where the group of this thread's chunk begins in x, -1: zeros.
template <int kInputs, int kThreads>
BILLFISH_DEVICE void gather_x(u32 to, const u16* x, int column, int k, int m, int thread) {
    constexpr int kLanes = kInputs / 8, kAbreast = kThreads / kLanes;
    const int chunk = thread % kLanes;
    const u32 bytes = column < 0 ? 0 : 16;
    const u16* from = x + (column < 0 ? 0 : column + chunk % 2 * 8) + thread / kLanes * k;
#pragma unroll 4
    for (int token = thread / kLanes; token < m; token += kAbreast, from += kAbreast * k)
        copy_async_16(to + x_place<kInputs>(token, chunk * 16), from, bytes);
}

// 2^e as a number of T, twice.
template <class T>
BILLFISH_DEVICE u32 power(int e);
template <>
BILLFISH_DEVICE u32 power<Half>(int e) { return (e + 15 << 10) * 0x00010001u; }
template <>
BILLFISH_DEVICE u32 power<Bfloat>(int e) { return (e + 127 << 7) * 0x00010001u; }

// Codes are subnormal numbers: code << i is code * kTiny * 2^i, and one multiplication and addition
// makes a weight of it. A word of 2-bit codes has inputs 2 p and 2 p + 1 at bits 2 p of its halves.
template <class T>
struct Scaled;

template <>
struct Scaled<Half> {  // kTiny is 2^-24
    static constexpr u32 kCode = 0x64006400u, kBack = 0xe800e800u;   // 1024 + code; -2048
    static constexpr u32 kSixteen = 0x4c004c00u, kZeroBit = 6;       // 16 + (zero << 6)
    static constexpr u32 kQuarter = 0x34003400u;
    static constexpr int kUnits = 16;          // of kTiny that a zero of 1/16 has: 2^-16 times it
    static constexpr int kPlus = 12;           // a base times 2^kPlus unit is the scale of pair 0
    static constexpr u32 kEights = 0x80808008u;                      // -8 kTiny, and for code << 4
    static constexpr int kPlusFour = 24, kLower = -4;
    static BILLFISH_DEVICE u32 base(u32 words) { return words >> 1 & 0x7ff87ff8u; }
    // Pair p, times kTiny * 2^4, 2^6 or 2^8.
    static constexpr BILLFISH_DEVICE int place(int p) { return p < 2 ? p : (p - 2) % 3; }
    static BILLFISH_DEVICE u32 pair(u32 word, int p) {
        const u32 moved = p < 2 ? word << 4 : p < 5 ? word : word >> 6;
        return moved & 0x00300030u << 2 * place(p);
    }
    // Register i of the fragment in a word of 4-bit codes, lower rows times 2^4.
    static BILLFISH_DEVICE u32 four(u32 word, int i) {
        return (i < 2 ? word : word >> 8) & (i % 2 ? 0x00f000f0u : 0x000f000fu);
    }
};

template <>
struct Scaled<Bfloat> {  // kTiny is 2^-133
    static constexpr u32 kCode = 0x43004300u, kBack = 0xc380c380u;   // 128 + code; -256
    static constexpr u32 kSixteen = 0x41804180u, kZeroBit = 3;
    static constexpr u32 kQuarter = 0x3e803e80u;
    static constexpr int kUnits = 1;           // 2^-129 times it
    static constexpr int kPlus = 125;
    static constexpr u32 kEights = 0x80088008u;
    static constexpr int kPlusFour = 133, kLower = 0;
    // Five bits of exponent where T has eight, less by 112.
    static BILLFISH_DEVICE u32 base(u32 words) {
        return Bfloat::mul(words >> 4 & 0x0fff0fffu, 0x77807780u);
    }
    static constexpr BILLFISH_DEVICE int place(int p) { return p % 3; }
    static BILLFISH_DEVICE u32 pair(u32 word, int p) {
        return word >> p / 3 * 6 & 0x00030003u << 2 * place(p);
    }
    static BILLFISH_DEVICE u32 four(u32 word, int i) { return word >> 4 * i & 0x000f000fu; }
};

BILLFISH_DEVICE u32 half_of(u32 pair, int upper) {
    return upper ? upper_twice(pair) : lower_twice(pair);
}

BILLFISH_DEVICE u32 shifted(u32 word, int right) {
    return right < 0 ? word << -right : word >> right;
}

// A lane's group of 16 inputs of 2 bits in rows r and r + 8: scales for the three places of a pair,
// and minus the weights of the zeros. `codes` at bit `code_at` and `zeros` at `zero_at` have those
// of row r, and 16 bits on those of row r + 8; `offset` and `base` are for 16 outputs, twice.
template <class T, int kZero, int kStep>
struct TwoGroup {
    using D = Scaled<T>;
    u32 scale[3], zero;
    TwoGroup() = default;
    BILLFISH_DEVICE TwoGroup(u32 codes, int code_at, u32 zeros, int zero_at, u32 offset, u32 base) {
        constexpr u32 kMinusStep = (0x8000u | kStep * D::kUnits) * 0x00010001u;
        constexpr u32 kRest = (16 * kStep - kZero) * D::kUnits * 0x00010001u;  // 0 = 16 - 16
        static_assert(kStep > 0 && 16 * kStep > kZero, "zeros");
        static_assert(16 * kStep * D::kUnits < 2048, "subnormal");
        // Second-order scales: (code + offset) * base, exact before its one rounding.
        const u32 code = and_or(codes >> code_at, 0x000f000fu, D::kCode);
        scale[0] = T::mul(T::add(code, offset), base);
        scale[1] = T::mul(scale[0], D::kQuarter);
        scale[2] = T::mul(scale[1], D::kQuarter);
        constexpr u32 kField = 0x00030003u << D::kZeroBit;
        const u32 level =
            and_or(shifted(zeros, zero_at - static_cast<int>(D::kZeroBit)), kField, D::kSixteen);
        zero = T::mul(T::fma(level, kMinusStep, kRest), scale[2]);
    }
    // Of a k16 step of four; `word` has the codes of rows r and r + 8.
    BILLFISH_DEVICE void fragment(const u32 (&word)[2], int step, u32 (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // row r or r + 8, pair 2 step or 2 step + 1
            const int lower = i % 2, p = step * 2 + i / 2;
            a[i] = T::fma(D::pair(word[lower], p), half_of(scale[D::place(p)], lower),
                          half_of(zero, lower));
        }
    }
};

// The offset of a base, minus what code + kCode has too much, and the base times `lean`.
template <class T>
BILLFISH_DEVICE u32 offset_of(u32 bases) {
    return T::add(and_or(bases, 0x000f000fu, Scaled<T>::kCode), Scaled<T>::kBack);
}
template <class T>
BILLFISH_DEVICE u32 base_of(u32 bases, u32 lean) { return T::mul(Scaled<T>::base(bases), lean); }

// Rows r and r + 8 of 4 bits: their scales times `lean` and `more`, minus the weights of code 8.
template <class T>
struct FourGroup {
    using D = Scaled<T>;
    u32 scale, zero;
    BILLFISH_DEVICE void set(u32 bits, u32 lean, u32 more) {
        scale = T::mul(T::mul(bits, lean), more);
        zero = T::mul(scale, D::kEights);
    }
    BILLFISH_DEVICE void fragment(u32 word, u32 (&a)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[i] = T::fma(D::four(word, i), half_of(scale, i % 2), half_of(zero, i % 2));
    }
};

// Addresses of a lane's operands of a record, computed once a pass. A warp takes half `warp % 2`.
struct TwoPlaces {
    u32 words, x;
    BILLFISH_DEVICE TwoPlaces(u32 record, u32 x, u32 thread, int rows)
        : words(record + thread % 64 * 16),
          x(x + x_place<kTwoK>(min(thread % 32 / 4, rows - 1u), thread % 4 * 32)) {}
    BILLFISH_DEVICE u32 codes(u32 thread) const { return words + kTwoScales - thread % 64 * 8; }
    BILLFISH_DEVICE u32 zeros(u32 thread) const { return words + kTwoZeros - thread % 64 * 12; }
    BILLFISH_DEVICE u32 bases(u32 thread) const {
        return words + kTwoBases - thread % 64 * 16 + thread % 64 / 32 * 64 + thread % 4 * 16;
    }
};

// acc (32 outputs x kTokens) += unit * weights (32 outputs x 256 inputs of 2 bits) * x^T. `by` is
// the distance from places to this record. `lean` is power(kPlus + log2 unit). Zeros are (kZero +
// kStep * code) / 16. The order of all sums is the same for every kTokens.
template <class T, int kZero, int kStep, int kTokens>
BILLFISH_DEVICE void multiply_two(const TwoPlaces& places, u32 by, u32 lean,
                                  float (&acc)[2][kTokens / 8][4]) {
    const u32 thread = kTokens > 8 ? thread_index() : threadIdx.x;  // kept, it costs registers
    const uint2 codes = load_smem_8(places.codes(thread) + by);
    const u32 zeros = load_smem_4(places.zeros(thread) + by);
    const uint4 bases = load_smem_16(places.bases(thread) + by);
    const u32 bases_of[4] = {bases.x, bases.y, bases.z, bases.w};
    const u32 words = places.words + by, mine = places.x + by;
#pragma unroll
    for (int k64 = 0; k64 < 4; ++k64) {
        // limits what ptxas hoists; without it, it spills
        if (kTokens > 8 && k64 > 0) __syncwarp();
        const uint4 v = load_smem_16(words + k64 * 1024);
        const u32 word[2][2] = {{v.x, v.y}, {v.z, v.w}};
        const u32 offset = offset_of<T>(bases_of[k64]), base = base_of<T>(bases_of[k64], lean);
        const auto group = [&](int brick) {
            const int i = k64 * 2 + brick;
            return TwoGroup<T, kZero, kStep>(i < 4 ? codes.x : codes.y, i % 4 * 4, zeros, 2 * i,
                                             half_of(offset, brick), half_of(base, brick));
        };
        const TwoGroup<T, kZero, kStep> groups[2] = {group(0), group(1)};
        u32 b[kTokens / 8][4];
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int block = 0; block < kTokens / 8; ++block) {
                if (step % 2) continue;
                const u32 at = (step ? mine ^ 16 : mine) + k64 * 128 + block * 8 * kTwoK * 2;
                const uint4 x8 = load_smem_16(at);
                b[block][0] = x8.x, b[block][1] = x8.y, b[block][2] = x8.z, b[block][3] = x8.w;
            }
#pragma unroll
            for (int brick = 0; brick < 2; ++brick) {
                u32 a[4];
                groups[brick].fragment(word[brick], step, a);
#pragma unroll
                for (int block = 0; block < kTokens / 8; ++block)
                    T::mma(acc[brick][block], a, b[block][step % 2 * 2],
                           b[block][step % 2 * 2 + 1]);
            }
        }
    }
}

struct FourPlaces {
    u32 words, scales, x;
    BILLFISH_DEVICE FourPlaces(u32 record, u32 x, u32 thread, int rows)
        : words(record + thread % 64 / 32 * 2 * kBrickBytes + thread % 32 * 16),
          scales(record + kFourScales + thread % 64 / 4 * 8),
          x(x + x_place<kRecordK>(min(thread % 8, rows - 1u), thread % 32 / 8 * 16)) {}
    // The B fragments of k16 steps 2 k32 and 2 k32 + 1 of tokens 8 block to 8 block + 7.
    BILLFISH_DEVICE void load_x(u32 (&b)[4], u32 by, int block, int k32) const {
        const u32 mine = x + by;
        load_matrices(b, (k32 % 2 ? mine ^ 64 : mine) + k32 / 2 * 128 + block * 8 * kRecordK * 2);
    }
};

// The same with 32 outputs x 128 inputs of 4 bits, codes 0 to 15 for -8 to 7. `lean` times `more`
// is power(kPlusFour + log2 unit), and 2^kLower times that for rows r + 8. kParts: the record has
// several parts of k (`marks`).
template <class T, bool kParts, int kTokens>
BILLFISH_DEVICE void multiply_parts(const FourPlaces& places, u32 by, u32 marks, u32 lean, u32 more,
                                    float (&acc)[2][kTokens / 8][4]) {
    u32 scales = places.scales + by;
    FourGroup<T> groups[2];  // [brick]
    const auto next_part = [&] {
        const uint2 bits = load_smem_8(scales);
        scales += kFourSetBytes;
        groups[0].set(bits.x, lean, more), groups[1].set(bits.y, lean, more);
    };
    next_part();
#pragma unroll
    for (int k64 = 0; k64 < 2; ++k64) {
        u32 word[2][4];
#pragma unroll
        for (int brick = 0; brick < 2; ++brick) {
            const uint4 v = load_smem_16(places.words + by + (k64 * 4 + brick) * kBrickBytes);
            word[brick][0] = v.x, word[brick][1] = v.y, word[brick][2] = v.z, word[brick][3] = v.w;
        }
#pragma unroll
        for (int k32 = 0; k32 < 2; ++k32) {
            u32 b[kTokens / 8][4];
#pragma unroll
            for (int block = 0; block < kTokens / 8; ++block)
                places.load_x(b[block], by, block, k64 * 2 + k32);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int step = k64 * 4 + k32 * 2 + j;
                if (kParts && step > 0 && marks >> step & 1) next_part();
#pragma unroll
                for (int brick = 0; brick < 2; ++brick) {
                    u32 a[4];
                    groups[brick].fragment(word[brick][k32 * 2 + j], a);
#pragma unroll
                    for (int block = 0; block < kTokens / 8; ++block)
                        T::mma(acc[brick][block], a, b[block][2 * j], b[block][2 * j + 1]);
                }
            }
        }
    }
}

// `by` is the distance from places and marks to this record.
template <class T, int kTokens>
BILLFISH_DEVICE void multiply_four(const FourPlaces& places, u32 marks, u32 by, u32 lean, u32 more,
                                   float (&acc)[2][kTokens / 8][4]) {
    const u32 parts = load_smem_4(marks + by);
    if (parts == 0)
        multiply_parts<T, false, kTokens>(places, by, parts, lean, more, acc);
    else
        multiply_parts<T, true, kTokens>(places, by, parts, lean, more, acc);
}

}  // namespace billfish
