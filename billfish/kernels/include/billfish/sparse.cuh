// A record of 2:4 weights: 64 outputs x 128 inputs, of every four inputs of an output two, each 4
// bits, with places and scales, contiguous in memory (schemes/w4a16_24/cuda/arrange.py writes it);
// and a warp's product with half of one.
//
//     2048 B   words      [n16 (4)][lane (32)][k32 step (4)]    a lane has 16 bytes
//     1024 B   metadata   [n16 (4)][lane (32)][k64 (2)]         and 8 bytes
//      128 B   scales     [half (2)][quad (8)][row q, q + 8, q + 16, q + 24]    for each group
//
// A word is a lane's fragment of the 16 inputs kept of 32, in the order of dequant.cuh. The tensor
// cores take such a fragment, the metadata, and x as it is: half the products, x and sums as in
// record.cuh. Raw codes, 8 too large, are no way here: what they add to a sum, 8 times the kept
// inputs, differs between outputs. So 8 is taken off each code: 9 (fp16) or 11 (bf16) instructions
// for 8 kept weights.
#pragma once

#include "billfish/record.cuh"

namespace billfish {

template <int kGroup>
struct SparseRecord {
    static_assert(kGroup == 32 || kGroup == 64 || kGroup == 128, "larger groups repeat scales");
    static constexpr int kGroups = kRecordK / kGroup;
    static constexpr int kMetadata = kRecordN * kRecordK / 4;  // byte offsets
    static constexpr int kScales = kMetadata + kRecordN * kRecordK / 8;
    static constexpr int kBytes = kScales + kGroups * kRecordN * 2;
    static_assert(kBytes % 16 == 0, "bulk copies move multiples of 16 bytes");
};

// Code - 8, exactly, in the A fragment: dequant.cuh's Exact without scales.
template <class T>
struct Whole;

template <>
struct Whole<Half> {
    static BILLFISH_DEVICE void fragment(u32 word, u32 (&a)[4]) {
        constexpr u32 k1024 = 0x64006400u, kSixteenth = 0x2c002c00u;
        constexpr u32 kUpper = 0xe408e408u, kLower = 0xd480d480u;  // -(1024 + 8), -(64 + 8)
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const u32 w = word >> 4 * i;
            a[i] = Half::add(and_or(w, 0x000f000fu, k1024), kUpper);
            a[i + 1] = Half::fma(and_or(w, 0x00f000f0u, k1024), kSixteenth, kLower);
        }
    }
};

template <>
struct Whole<Bfloat> {
    static BILLFISH_DEVICE void fragment(u32 word, u32 (&a)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 raw = and_or(word >> 4 * i, 0x000f000fu, 0x43004300u);
            a[i] = Bfloat::add(raw, 0xc308c308u);  // -(128 + 8)
        }
    }
};

// A lane's words and metadata of 16 outputs, in shared memory; of all four steps of 32 inputs.
struct SparseLane {
    u32 words[4], places[2];
    template <class R>
    static BILLFISH_DEVICE SparseLane load(u32 record, int n16, int lane) {
        const u32 at = n16 * kBrickBytes + lane * 16;
        const uint4 v = load_smem_16(record + at);
        const uint2 p = load_smem_8(record + R::kMetadata + at / 2);
        return {{v.x, v.y, v.z, v.w}, {p.x, p.y}};
    }
    // The same for two steps: bank conflicts, but fewer registers.
    template <class R>
    BILLFISH_DEVICE void load_half(u32 record, int n16, int lane, int k64) {
        const uint2 v = load_smem_8(record + n16 * kBrickBytes + lane * 16 + k64 * 8);
        const u32 at = record + R::kMetadata + n16 * (kBrickBytes / 2) + lane * 8;
        words[2 * k64] = v.x, words[2 * k64 + 1] = v.y, places[k64] = load_smem_4(at + k64 * 4);
    }
};

// acc (32 outputs, the `half` of a record, x kTokens) += weights (32 outputs x 128 inputs) * x^T. x
// lies as in record.cuh. Products of whole numbers are summed in fp32 over a group and then scaled:
// nothing is rounded before the sums, and scales may have any size and type. The order of all sums
// is the same for every kTokens.
template <class T, class S, int kGroup, int kTokens>
BILLFISH_DEVICE void multiply_sparse(u32 record, u32 x, int half, int lane,
                                     float (&acc)[2][kTokens / 8][4]) {
    using R = SparseRecord<kGroup>;
    constexpr int kBlocks = kTokens / 8;
    constexpr bool kFew = kGroup == 32 && kTokens == 16;  // 96 registers: two blocks an SM
    const LanePlaces<kTokens> places = LanePlaces<kTokens>::template of<R>(record, x, lane, half);
    const u32 scales_at = record + R::kScales + half * 64 + lane / 4 * 8;
    SparseLane mine[2];
    float part[2][kBlocks][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const int k = step * 32;
        u32 a[2][4];
#pragma unroll
        for (int brick = 0; brick < 2; ++brick) {
            if (kFew && step % 2 == 0)
                mine[brick].template load_half<R>(record, half * 2 + brick, lane, step / 2);
            else if (step == 0)
                mine[brick] = SparseLane::load<R>(record, half * 2 + brick, lane);
            Whole<T>::fragment(mine[brick].words[step], a[brick]);
        }
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            u32 b[4];
            places.load_x(b, block, step);
#pragma unroll
            for (int brick = 0; brick < 2; ++brick) {
                if (k % kGroup == 0) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) part[brick][block][i] = 0;
                }
                T::mma_sparse(part[brick][block], a[brick], b, mine[brick].places[step / 2],
                              step % 2);
            }
        }
        if ((k + 32) % kGroup != 0) continue;
        if (kFew) __syncwarp();  // limits what ptxas hoists; without it, it spills
        const uint2 bits = load_smem_8(scales_at + k / kGroup * 128);
#pragma unroll
        for (int row = 0; row < 4; ++row) {  // q + 8 row: brick row / 2, upper or lower
            const u32 two = row / 2 ? bits.y : bits.x;
            const float scale = S::to_float(row % 2 ? two >> 16 : two & 0xffff);
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
                for (int i = row % 2 * 2; i < row % 2 * 2 + 2; ++i)
                    acc[row / 2][block][i] =
                        fmaf(scale, part[row / 2][block][i], acc[row / 2][block][i]);
            }
        }
    }
}

}  // namespace billfish
