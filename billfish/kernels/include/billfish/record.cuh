// A record: 64 outputs x 128 inputs of packed weights with scales and zero points, contiguous in
// memory (schemes/w4a16/cuda/arrange.py writes it); and a warp's product with half of one.
//
//     4096 B   words    [k64 (2)][n16 (4)][lane (32)][k16 step (4)]    a lane has 16 bytes
//      128 B   scales   [half (2)][quad (8)][row q, q + 8, q + 16, q + 24]    for each group
//       32 B   zeros    the same, 4 bits each; asymmetric only                for each group
//
// QUICK 3: words are in fragment order, so that decoded weights go from registers straight to the
// tensor cores; nothing is written back to shared memory, and no ldmatrix is needed.
#pragma once

#include "billfish/dequant.cuh"

namespace billfish {

constexpr int kRecordN = 64, kRecordK = 128;
constexpr int kBrickBytes = 512;  // 16 outputs x 64 inputs

template <int kGroup, bool kAsymmetric>
struct Record {
    static_assert(kGroup == 32 || kGroup == 64 || kGroup == 128, "larger groups repeat scales");
    static constexpr int kGroups = kRecordK / kGroup;
    static constexpr int kScales = kRecordN * kRecordK / 2;  // byte offsets
    static constexpr int kZeros = kScales + kGroups * kRecordN * 2;
    static constexpr int kBytes = kZeros + (kAsymmetric ? kGroups * kRecordN / 2 : 0);
    static_assert(kBytes % 16 == 0, "bulk copies move multiples of 16 bytes");
};

// Activations of 128 inputs in shared memory: [k64 (2)][token] lines of 128 bytes. The index of
// each 16-byte chunk is XORed with the token (MARLIN's XOR, which is TMA's 128-byte swizzle): the
// same inputs of eight tokens lie in different banks.
constexpr int kXLine = 128;

// Products have 8 tokens at least; of fewer in shared memory, rows are read several times.
constexpr BILLFISH_DEVICE int blocks_of(int tokens) { return (tokens + 7) / 8; }

constexpr BILLFISH_DEVICE int x_bytes(int tokens) { return 2 * tokens * kXLine; }

template <int kTokens>
BILLFISH_DEVICE u32 x_smem_offset(u32 token, u32 chunk) {  // chunk of 16
    return (chunk / 8 * kTokens + token) * kXLine + ((chunk ^ token) % 8 << 4);
}

// Addresses of a lane's operands in shared memory, computed once a kernel and moved from stage to
// stage. Activations begin on a multiple of 128 bytes.
template <int kTokens>
struct LanePlaces {
    u32 words, x;
    template <class R>
    static BILLFISH_DEVICE LanePlaces of(u32 record, u32 x, int lane, int half) {
        LanePlaces places;
        places.words = record + half * 2 * kBrickBytes + lane * 16;
        places.x = x + x_smem_offset<kTokens>(lane % (kTokens < 8 ? kTokens : 8), lane / 8);
        return places;
    }
    BILLFISH_DEVICE void move(u32 by) {  // to another stage of a ring
        words += by, x += by;
    }
    // Scales or zeros of a quad's four outputs; `bytes` for the eight quads of a half. Recomputed
    // for each group: kept, they would cost registers. Warp i has half i % 2.
    BILLFISH_DEVICE u32 of_quad(int offset, int bytes) const {
        const u32 thread = thread_index(), lane = thread % 32, half = thread / 32 % 2;
        const u32 record = words - half * 2 * kBrickBytes - lane * 16;
        return record + offset + half * bytes + lane / 4 * (bytes / 8);
    }
    // The B fragments of k16 steps 2 k32 and 2 k32 + 1 of tokens 8 block to 8 block + 7.
    BILLFISH_DEVICE void load_x(u32 (&b)[4], int block, int k32) const {
        const u32 mine = k32 % 2 ? x ^ 64 : x;  // chunk + 4, wherever the XOR has put it
        load_matrices(b, mine + (k32 / 2 * kTokens + block * 8) * kXLine);
    }
};

// A lane's words of 64 inputs of a brick: all with the first half of the inputs or, where registers
// are few, half of them with each.
template <bool kFew>
BILLFISH_DEVICE void load_words(u32 address, int k32, u32 (&word)[4]) {
    if (kFew) {
        const uint2 v = load_smem_8(address + k32 * 8);
        word[k32 * 2] = v.x, word[k32 * 2 + 1] = v.y;
    } else if (k32 == 0) {
        const uint4 v = load_smem_16(address);
        word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
    }
}

// acc (32 outputs x kTokens) += raw weights (32 outputs x 128 inputs) * x^T, scaled; finish() after
// all of k divides by the raw unit.
//
// A warp takes one half of the record's 64 outputs. Every warp sums x itself: one warp that did it
// for all, with a barrier, was slower (LOG 2026-11-15). The order of all sums is the same for every
// kTokens. `release` is called at the end with a number that depends on every byte read.
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, class Release>
BILLFISH_DEVICE void multiply(const LanePlaces<kTokens>& places,
                              float (&acc)[2][blocks_of(kTokens)][4], Release release) {
    constexpr int kSteps = kGroup / 16;
    constexpr int kBlocks = blocks_of(kTokens);
    constexpr u32 kOne[4] = {Raw<T>::kOneUpper, Raw<T>::kOneLower, Raw<T>::kOneUpper,
                             Raw<T>::kOneLower};
    constexpr bool kFew = kGroup == 32 && kTokens == 16;  // 96 registers: two blocks an SM
    float part[2][kBlocks][4], total[kBlocks][4];  // sums of raw weights times x, and of x
    // Not unrolled where a group ends within 64 inputs: both halves at once need more registers
    // than two blocks an SM leave.
#pragma unroll kGroup == 128 ? 2 : 1
    for (int k64 = 0; k64 < 2; ++k64) {
        u32 word[2][4];
#pragma unroll
        for (int k32 = 0; k32 < 2; ++k32) {
#pragma unroll
            for (int brick = 0; brick < 2; ++brick) {
                load_words<kFew>(places.words + (k64 * 4 + brick) * kBrickBytes, k32, word[brick]);
            }
            const int group = (k64 * 4 + k32 * 2) / kSteps;
            const bool last = kGroup == 32 || (kGroup == 64 ? k32 == 1 : k64 == 1 && k32 == 1);
            uint2 bits;
            u32 zeros = 0x8888u;
            if (last) {
                using R = Record<kGroup, kAsymmetric>;
                bits = load_smem_8(places.of_quad(R::kScales, 64) + group * 128);
                if (kAsymmetric) zeros = load_smem_2(places.of_quad(R::kZeros, 16) + group * 32);
            }
            u32 b[kBlocks][4];
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
                places.load_x(b[block], block, k64 * 2 + k32);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int step = k64 * 4 + k32 * 2 + j;
                const bool first = kGroup == 128 ? step == 0 : (k32 * 2 + j) % kSteps == 0;
                u32 a[2][4];
                Raw<T>::template fragment<!kFew>(word[0][k32 * 2 + j], a[0]);
                Raw<T>::template fragment<!kFew>(word[1][k32 * 2 + j], a[1]);
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    const u32 b0 = b[block][2 * j], b1 = b[block][2 * j + 1];
                    if (first) {
                        T::mma_first(total[block], kOne, b0, b1);
                        T::mma_first(part[0][block], a[0], b0, b1);
                        T::mma_first(part[1][block], a[1], b0, b1);
                    } else {
                        T::mma(total[block], kOne, b0, b1);
                        T::mma(part[0][block], a[0], b0, b1);
                        T::mma(part[1][block], a[1], b0, b1);
                    }
                }
            }
            if (!last) continue;
            if (kFew) __syncwarp();  // limits what ptxas hoists; without it, it spills
#pragma unroll
            for (int row = 0; row < 4; ++row) {  // q + 8 row: brick row / 2, upper or lower
                const u32 half = row / 2 ? bits.y : bits.x;
                const float scale = S::to_float(row % 2 ? half >> 16 : half & 0xffff);
                const float zero = raw_zero<T>(zeros >> (4 * row) & 15);
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
                    for (int i = row % 2 * 2; i < row % 2 * 2 + 2; ++i) {
                        const float sum = fmaf(-zero, total[block][i], part[row / 2][block][i]);
                        acc[row / 2][block][i] = fmaf(scale, sum, acc[row / 2][block][i]);
                    }
                }
            }
        }
    }
    release(acc[0][kBlocks - 1][0] + acc[1][kBlocks - 1][0]);
}

// The same with weights decoded in registers, for more tokens: more instructions a weight, none a
// sum but the product itself. Needs no finish().
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens>
BILLFISH_DEVICE void multiply_decoded(const LanePlaces<kTokens>& places,
                                      float (&acc)[2][kTokens / 8][4]) {
    using R = Record<kGroup, kAsymmetric>;
    u32 scale[2][2], zero[2][2];  // [brick][row r, row r + 8], each twice in a register
#pragma unroll
    for (int k64 = 0; k64 < 2; ++k64) {
        u32 word[2][4];
#pragma unroll
        for (int brick = 0; brick < 2; ++brick) {
            const uint4 v = load_smem_16(places.words + (k64 * 4 + brick) * kBrickBytes);
            word[brick][0] = v.x, word[brick][1] = v.y, word[brick][2] = v.z, word[brick][3] = v.w;
        }
#pragma unroll
        for (int k32 = 0; k32 < 2; ++k32) {
            const int k = k64 * 64 + k32 * 32;
            if (k % kGroup == 0) {
                const int group = k / kGroup;
                const uint2 bits = load_smem_8(places.of_quad(R::kScales, 64) + group * 128);
                u32 zeros = 0x8888u;
                if (kAsymmetric) zeros = load_smem_2(places.of_quad(R::kZeros, 16) + group * 32);
#pragma unroll
                for (int row = 0; row < 4; ++row) {
                    const u32 half = row / 2 ? bits.y : bits.x;
                    const u32 one = convert<T, S>(row % 2 ? half >> 16 : half & 0xffff);
                    scale[row / 2][row % 2] = one * 0x00010001u;
                    zero[row / 2][row % 2] =
                        Exact<T>::zero(zeros >> 4 * row & 15, row % 2) * 0x00010001u;
                }
            }
            u32 a[2][2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                Exact<T>::fragment(word[i % 2][k32 * 2 + i / 2], scale[i % 2], zero[i % 2],
                                   a[i / 2][i % 2]);
#pragma unroll
            for (int block = 0; block < kTokens / 8; ++block) {
                u32 b[4];
                places.load_x(b, block, k64 * 2 + k32);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    T::mma(acc[i % 2][block], a[i / 2][i % 2], b[i / 2 * 2], b[i / 2 * 2 + 1]);
            }
        }
    }
}

template <class T>
BILLFISH_DEVICE float finish(float sum, bool lower) {
    return sum * (lower ? Raw<T>::kLower : Raw<T>::kUpper);
}

}  // namespace billfish
