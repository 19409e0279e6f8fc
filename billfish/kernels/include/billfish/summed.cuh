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

// Sums of a slice of 128 inputs: fp32 [group][token].
template <int kGroup, int kTokens>
constexpr BILLFISH_DEVICE int sums_bytes() { return kRecordK / kGroup * kTokens * 4; }

// Of 8 tokens, number 8 block and on: tokens are the left operand, rows 0-7 their first 64 inputs
// and rows 8-15 the others, so that one product sums 32. The same order for every kTokens.
template <class T, int kGroup, int kTokens>
BILLFISH_DEVICE void sum_tokens(u32 x, u32 sums, int block, int lane) {
    constexpr int kParts = kGroup == 32 ? 2 : 1;  // of 64 inputs
    const int matrix = lane / 8;
    const u32 from = x + x_smem_offset<kTokens>(block * 8 + lane % 8, matrix % 2 * 8 + matrix / 2);
    float sum[kParts][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
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
            store_smem_float(to + (half * kParts + part) * kTokens * 4, sum[part][half * 2]);
    }
}

// acc (32 outputs x kTokens) += weights (32 outputs x 128 inputs) * x^T, as multiply() in
// record.cuh, with the slice's sums at `sums`; `summed` waits until they are there.
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, class Summed, class Release>
BILLFISH_DEVICE void multiply_summed(const LanePlaces<kTokens>& places, u32 sums,
                                     float (&acc)[2][kTokens / 8][4], Summed summed,
                                     Release release) {
    using R = Record<kGroup, kAsymmetric>;
    constexpr int kSteps = kGroup / 16, kBlocks = kTokens / 8;
    float part[2][kBlocks][4];
    // Not unrolled where a group ends within 64 inputs, as in multiply().
#pragma unroll kGroup == 128 ? 2 : 1
    for (int k64 = 0; k64 < 2; ++k64) {
        u32 word[2][4];
#pragma unroll
        for (int brick = 0; brick < 2; ++brick) {
            const uint4 v = load_smem_16(places.words + (k64 * 4 + brick) * kBrickBytes);
            word[brick][0] = v.x, word[brick][1] = v.y, word[brick][2] = v.z, word[brick][3] = v.w;
        }
#pragma unroll
        for (int k32 = 0; k32 < 2; ++k32) {
            u32 b[kBlocks][4];
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
                places.load_x(b[block], block, k64 * 2 + k32);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int step = k64 * 4 + k32 * 2 + j;
                const bool first = kGroup == 128 ? step == 0 : (k32 * 2 + j) % kSteps == 0;
                u32 a[2][4];
                Raw<T>::nested(word[0][k32 * 2 + j], a[0]);
                Raw<T>::nested(word[1][k32 * 2 + j], a[1]);
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    const u32 b0 = b[block][2 * j], b1 = b[block][2 * j + 1];
#pragma unroll
                    for (int brick = 0; brick < 2; ++brick) {
                        if (first)
                            T::mma_first(part[brick][block], a[brick], b0, b1);
                        else
                            T::mma(part[brick][block], a[brick], b0, b1);
                    }
                }
            }
            if (!(kGroup == 32 || (kGroup == 64 ? k32 == 1 : k64 == 1 && k32 == 1))) continue;
            const int group = (k64 * 4 + k32 * 2) / kSteps;
            const uint2 bits = load_smem_8(places.of_quad(R::kScales, 64) + group * 128);
            u32 zeros = 0x8888u;
            if (kAsymmetric) zeros = load_smem_2(places.of_quad(R::kZeros, 16) + group * 32);
            if (kGroup == 128 || (k64 == 0 && k32 == (kGroup == 64))) summed();
            const u32 from = sums + group * kTokens * 4 + thread_index() % 4 * 8;
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                const uint2 v = load_smem_8(from + block * 32);
                const float total[2] = {__uint_as_float(v.x), __uint_as_float(v.y)};
#pragma unroll
                for (int brick = 0; brick < 2; ++brick) {
                    float(&sum)[4] = part[brick][block];
                    const u32 half = brick ? bits.y : bits.x;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const bool lower = i / 2;
                        const float scale = S::to_float(lower ? half >> 16 : half & 0xffff);
                        const float zero =
                            raw_unit<T>(zeros >> (8 * brick + 4 * lower) & 15, lower);
                        float raw = sum[i];
                        if (Raw<T>::kNested && lower) raw -= sum[i - 2];
                        acc[brick][block][i] =
                            fmaf(scale, fmaf(-zero, total[i % 2], raw), acc[brick][block][i]);
                    }
                }
            }
        }
    }
    release(acc[0][kBlocks - 1][0] + acc[1][kBlocks - 1][0]);
}

}  // namespace billfish
