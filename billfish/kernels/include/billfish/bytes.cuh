// Weights of 4 bits as bytes for int8 tensor cores. A weight is (code - zero) q b: q a group's
// scale, 1 to 16, zero its zero point, 8 where weights are symmetric, and b its row's scale.
// (code - zero) q fits a byte, so that a row's sums are exact integers over all of k; b and the
// scale of the token come in the epilogue. Unsigned bytes, 128 too large:
//
//     code q + (128 - zero q) = (code - zero) q + 128    one multiply-add for four weights, no
//                                                         carries
//
// and 128 times the sum of a token's bytes is taken off in the end. Flipping the sign bits instead
// would be two of seven instructions for eight weights.
#pragma once

#include "billfish/record.cuh"
#include "billfish/warp.cuh"

namespace billfish {

// 64 outputs x 128 inputs (schemes/w4ax/cuda/arrange.py writes it): words in the order of w4a16's
// records, then group scales, a byte each: [n16 (4)][row q (8)][q, q + 8][group]; then, asymmetric
// only, bytes 128 - zero q in the same order.
template <int kGroup, bool kAsymmetric>
struct AxRecord {
    static_assert(kGroup == 32 || kGroup == 64 || kGroup == 128, "larger groups repeat scales");
    static constexpr int kGroups = kRecordK / kGroup;
    static constexpr int kScales = kRecordN * kRecordK / 2;  // byte offsets
    static constexpr int kPlus = kScales + kRecordN * kGroups;
    static constexpr int kBytes = kPlus + (kAsymmetric ? kRecordN * kGroups : 0);
    static_assert(kBytes % 16 == 0, "bulk copies move multiples of 16 bytes");
};

// A byte for each group of a lane's two outputs r and r + 8 of the n16-th 16.
template <int kGroup, int kOffset>
struct AxBytes {
    static constexpr int kGroups = kRecordK / kGroup;
    u32 bits[kGroups == 4 ? 2 : 1];
    BILLFISH_DEVICE void load(u32 record, int n16, int lane) {
        const u32 at = record + kOffset + (n16 * 8 + lane / 4) * 2 * kGroups;
        if constexpr (kGroups == 4) {
            const uint2 both = load_smem_8(at);
            bits[0] = both.x, bits[1] = both.y;
        } else {
            bits[0] = kGroups == 2 ? load_smem_4(at) : load_smem_2(at);
        }
    }
    // A byte; and the same four times.
    BILLFISH_DEVICE u32 of(int group, int lower) const {
        const int byte = lower * kGroups + group;
        return pick_bytes(bits[byte / 4], 0, 0x4440 | byte % 4);
    }
    BILLFISH_DEVICE u32 four_of(int group, int lower) const {
        const int byte = lower * kGroups + group;
        return pick_bytes(bits[byte / 4], 0, byte % 4 * 0x1111);
    }
};

// Group scales, and what AxGrain adds.
template <int kGroup, bool kAsymmetric>
struct AxScales : AxBytes<kGroup, AxRecord<kGroup, false>::kScales> {
    BILLFISH_DEVICE u32 plus(int, int, u32 times) const {
        return 0x80808080u - times * 0x08080808u;
    }
};
template <int kGroup>
struct AxScales<kGroup, true> : AxBytes<kGroup, AxRecord<kGroup, true>::kScales> {
    AxBytes<kGroup, AxRecord<kGroup, true>::kPlus> more;
    BILLFISH_DEVICE void load(u32 record, int n16, int lane) {
        AxBytes<kGroup, AxRecord<kGroup, true>::kScales>::load(record, n16, lane);
        more.load(record, n16, lane);
    }
    BILLFISH_DEVICE u32 plus(int group, int lower, u32) const { return more.four_of(group, lower); }
};

// Four codes, a byte each, -> four weights + 128.
struct AxGrain {
    u32 times[2], plus[2];  // of outputs r and r + 8
    template <class Scales>
    BILLFISH_DEVICE void set(const Scales& scales, int group) {
        times[0] = scales.of(group, 0), times[1] = scales.of(group, 1);
#pragma unroll
        for (int i = 0; i < 2; ++i) plus[i] = scales.plus(group, i, times[i]);
    }
    // A word of 16 inputs: half of a fragment of 32.
    BILLFISH_DEVICE void decode(u32 word, u32& upper, u32& lower) const {
        upper = (word & 0x0f0f0f0fu) * times[0] + plus[0];
        lower = (word >> 4 & 0x0f0f0f0fu) * times[1] + plus[1];
    }
};

// acc (32 outputs x kTokens) += weights (32 outputs x the k64-th 64 inputs of a record) * x^T, as
// bytes. `words_at`: of the warp's first 16 outputs and of this lane; `x_at`: chunk lane / 8
// of token lane % 8, a line of 128 bytes, swizzled.
template <int kTokens, int kGroup, bool kAsymmetric>
BILLFISH_DEVICE void multiply_bytes(u32 words_at, u32 x_at, int k64,
                                    const AxScales<kGroup, kAsymmetric> (&scales)[2],
                                    AxGrain (&grain)[2], u32 (&acc)[2][kTokens / 8][4]) {
    u32 b[kTokens / 8][4];  // of each 8 tokens, 16 inputs a register
#pragma unroll
    for (int block = 0; block < kTokens / 8; ++block)
        load_matrices(b[block], (x_at ^ k64 * 64) + block * 8 * kXLine);
#pragma unroll
    for (int brick = 0; brick < 2; ++brick) {
        const uint4 v = load_smem_16(words_at + (k64 * 4 + brick) * kBrickBytes);
        const u32 words[4] = {v.x, v.y, v.z, v.w};
        u32 a[2][4];
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const int k = k64 * 64 + step * 16, group = k / kGroup;
            if (k % kGroup == 0) grain[brick].set(scales[brick], group);
            u32(&fragment)[4] = a[step / 2];
            grain[brick].decode(words[step], fragment[step % 2 * 2], fragment[step % 2 * 2 + 1]);
        }
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int block = 0; block < kTokens / 8; ++block)
                mma_bytes(acc[brick][block], a[step], b[block][step * 2], b[block][step * 2 + 1]);
        }
    }
}

// y of a sum, with what w4ax_quant says of its token: {scale, 128 times the sum of its bytes}. No
// multiply-add with the bias that follows: every kernel gives the same bits.
BILLFISH_DEVICE float scaled(u32 sum, u32 scale, u32 excess, float base) {
    return __fmul_rn(static_cast<float>(static_cast<int>(sum - excess)),
                     __fmul_rn(__uint_as_float(scale), base));
}

}  // namespace billfish
