// Sums of activations over groups of inputs, made once a stage by warps of their own; and a warp's
// product with half a record that takes them from there.
//
// Raw codes are multiplied without their zero points (dequant.cuh), which leaves
//
//     sum (code - zero) x = sum code x - zero * sum x        in each group
//
// A warp that multiplies can make sum x by one more product with ones (record.cuh, multiply), and
// then a third of its products are that. From data in shared memory one SM of an H200 takes 154
// clocks a record for up to 8 tokens and 213 for 16; without, 119 and 148 (LOG 2026-11-19). Memory
// brings a record in 215 to 240.
#pragma once

#include "billfish/record.cuh"

namespace billfish {

// Sums of a slice of 128 inputs: fp32 [group][token], of 8 tokens at least.
template <int kGroup, int kTokens>
constexpr BILLFISH_DEVICE int sums_bytes() {
    return kRecordK / kGroup * blocks_of(kTokens) * 32;
}

// Of 8 tokens, number 8 block and on: tokens are the left operand, rows 0-7 their first 64 inputs
// and rows 8-15 the others, so that one product sums 32. The same order for every kTokens.
template <class T, int kGroup, int kTokens>
BILLFISH_DEVICE void sum_tokens(u32 x, u32 sums, int block, int lane) {
    constexpr int kParts = kGroup == 32 ? 2 : 1;  // of 64 inputs
    const int matrix = lane / 8;
    const int token = lane % (kTokens < 8 ? kTokens : 8);
    const u32 from = x + x_smem_offset<kTokens>(block * 8 + token, matrix % 2 * 8 + matrix / 2);
    float sum[kParts][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        if (kParts == 2 && step == 2) __syncwarp();  // limits what ptxas hoists; without, it spills
        u32 a[4];
        load_matrices(a, from ^ step * 32);
        float(&d)[4] = sum[step * kParts / 4];
        if (step * kParts % 4 == 0)
            T::mma_first(d, a, Raw<T>::kOnes, Raw<T>::kOnes);
        else
            T::mma(d, a, Raw<T>::kOnes, Raw<T>::kOnes);
    }
    if (lane % 4) return;  // all columns are alike
    const u32 to = sums + (block * 8 + lane / 4) * 4;
    if (kGroup == 128) {
        store_smem_float(to, sum[0][0] + sum[0][2]);
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
            store_smem_float(to + (half * kParts + part) * blocks_of(kTokens) * 32,
                             sum[part][half * 2]);
    }
}

// Addresses of a team's warp (teams.cuh) in shared memory: of its brick in the first record of a
// stage, of that brick's scales and zeros, of x and its sums.
template <int kTokens>
struct BrickPlaces {
    u32 words, scales, zeros, x, sums;
    BILLFISH_DEVICE BrickPlaces(u32 record, u32 x, u32 sums, int brick, int lane)
        : words(record + brick * kBrickBytes + lane * 16),
          scales(record + brick / 2 * 64 + lane / 4 * 8 + brick % 2 * 4),
          zeros(record + brick / 2 * 16 + lane / 4 * 2 + brick % 2),
          x(x + x_smem_offset<kTokens>(lane % (kTokens < 8 ? kTokens : 8), lane / 8)),
          sums(sums + lane % 4 * 8) {}
    BILLFISH_DEVICE void move(u32 by) {
        words += by, scales += by, zeros += by, x += by, sums += by;
    }
};

// acc (kCount bricks x kTokens) += weights (16 outputs x 128 inputs each) * x^T: of records kStride
// bytes apart, the first `record` bytes behind `at`'s; sums of the tokens are there once `summed`
// returns.
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, int kStride, int kFirst,
          int kCount, int kBands, class Summed>
BILLFISH_DEVICE void multiply_bricks(const BrickPlaces<kTokens>& at, u32 record, u32 slice_x,
                                     u32 slice_sums, float (&acc)[kBands][blocks_of(kTokens)][4],
                                     Summed summed) {
    using R = Record<kGroup, kAsymmetric>;
    constexpr int kSteps = kGroup / 16, kBlocks = blocks_of(kTokens);
    constexpr bool kFew = kGroup == 32 && kTokens == 16;
    const u32 x = at.x + slice_x, words = at.words + record, scales = at.scales + record;
    float part[kCount][kBlocks][4];
    // Not unrolled where a group ends within 64 inputs, as in multiply().
#pragma unroll kGroup == 128 ? 2 : 1
    for (int k64 = 0; k64 < 2; ++k64) {
        u32 word[kCount][4];
#pragma unroll
        for (int k32 = 0; k32 < 2; ++k32) {
#pragma unroll
            for (int i = 0; i < kCount; ++i)
                load_words<kFew>(
                    words + i * kStride + k64 * 4 * kBrickBytes, k32, word[i]);
            u32 b[kBlocks][4];
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
                load_matrices(b[block], (k32 ? x ^ 64 : x) + (k64 * kTokens + block * 8) * kXLine);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int step = k64 * 4 + k32 * 2 + j;
                const bool first = kGroup == 128 ? step == 0 : (k32 * 2 + j) % kSteps == 0;
                u32 a[kCount][4];
#pragma unroll
                for (int i = 0; i < kCount; ++i) Raw<T>::nested(word[i][k32 * 2 + j], a[i]);
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    const u32 b0 = b[block][2 * j], b1 = b[block][2 * j + 1];
#pragma unroll
                    for (int i = 0; i < kCount; ++i) {
                        if (first)
                            T::mma_first(part[i][block], a[i], b0, b1);
                        else
                            T::mma(part[i][block], a[i], b0, b1);
                    }
                }
            }
            if (!(kGroup == 32 || (kGroup == 64 ? k32 == 1 : k64 == 1 && k32 == 1))) continue;
            if (kFew) __syncwarp();  // limits what ptxas hoists; without it, it spills
            const int group = (k64 * 4 + k32 * 2) / kSteps;
            if (kGroup == 128 || (k64 == 0 && k32 == (kGroup == 64))) summed();
            const u32 from = at.sums + slice_sums + group * kBlocks * 32;
            float total[kBlocks][2];
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                const uint2 v = load_smem_8(from + block * 32);
                total[block][0] = __uint_as_float(v.x), total[block][1] = __uint_as_float(v.y);
            }
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                const u32 bits = load_smem_4(scales + i * kStride + R::kScales + group * 128);
                u32 zeros = 0x88u;
                if (kAsymmetric)
                    zeros = load_smem_1(at.zeros + record + i * kStride + R::kZeros + group * 32);
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    float(&sum)[4] = part[i][block];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const bool lower = j / 2;
                        const float scale = S::to_float(lower ? bits >> 16 : bits & 0xffff);
                        const float zero = raw_unit<T>(zeros >> 4 * lower & 15, lower);
                        float raw = sum[j];
                        if (Raw<T>::kNested && lower) raw -= sum[j - 2];
                        float& to = acc[kFirst + i][block][j];
                        to = fmaf(scale, fmaf(-zero, total[block][j % 2], raw), to);
                    }
                }
            }
        }
    }
}

}  // namespace billfish
