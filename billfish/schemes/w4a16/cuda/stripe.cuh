// w4a16_stripe: y (m, n) = x (m, k) W^T for m <= 64 in one launch, sm_80 to sm_89.
//
// MARLIN 3.4: a ring of cp.async stages, warps that split the inputs where a tile is narrow, and
// stripes of equal length over tiles of outputs with a split-K reduction through global memory
// (striped.cuh, stripes.cuh). It differs from MARLIN in two points: partial sums are fp32 in a
// workspace (there fp16, in the output), and the next tile's copies go on during the reduction. No
// programmatic dependent launch: the kernel never waits for the one before. kernels/striped.py has
// the same arithmetic.
#pragma once

#include "billfish/striped.cuh"

namespace billfish {

// Two slices of 16 tokens with groups of 32 or 64 have 3 stages, as four would need up to 106 KB;
// 32 and 64 tokens have 3, or 2 where groups are small.
template <class T, class S, int kGroup, bool kAsymmetric>
struct StripeFormat {
    using Type = T;
    static constexpr int kRecordBytes = Record<kGroup, kAsymmetric>::kBytes;

    template <int kTokens>
    static BILLFISH_DEVICE LanePlaces<kTokens> places(u32 record, u32 x, int lane, int half) {
        return LanePlaces<kTokens>::template of<Record<kGroup, kAsymmetric>>(record, x, lane, half);
    }
    template <int kTokens>
    static BILLFISH_DEVICE void multiply(const LanePlaces<kTokens>& places,
                                         float (&acc)[2][kTokens / 8][4]) {
        if constexpr (kTokens <= 16)
            billfish::multiply<T, S, kGroup, kAsymmetric, kTokens>(places, acc, [](float) {});
        else
            multiply_decoded<T, S, kGroup, kAsymmetric, kTokens>(places, acc);
    }
    template <int kTokens>
    static BILLFISH_DEVICE float finish(float sum, bool lower) {
        return kTokens <= 16 ? billfish::finish<T>(sum, lower) : sum;
    }
};

// Codes of more than 4 bits are two planes of nibbles along k: columns of x repeat.
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, int kBands>
__global__ void __launch_bounds__(kStripeThreads, 1)
w4a16_stripe(const unsigned char* __restrict__ records, const u16* __restrict__ x,
             const u16* __restrict__ bias, u16* __restrict__ out, float* workspace, u32* locks,
             int m, int n, int x_k, int k_tiles) {
    stripe_product<StripeFormat<T, S, kGroup, kAsymmetric>, kTokens, kBands>(
        records, x, bias, out, workspace, locks, m, n, x_k, k_tiles);
}

}  // namespace billfish
