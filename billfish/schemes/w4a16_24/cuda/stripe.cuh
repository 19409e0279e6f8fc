// w4a16_24_stripe: y (m, n) = x (m, k) W^T for m <= 64 in one launch, sm_80 to sm_89.
//
// Sparse-MARLIN: w4a16_stripe's ring, warps and stripes (striped.cuh), with records of 3.125 bits a
// weight (groups of 128) and sparse tensor cores (sparse.cuh). kernels/striped.py has the same
// arithmetic.
#pragma once

#include "billfish/sparse.cuh"
#include "billfish/striped.cuh"

namespace billfish {

// acc (32 outputs, the `half` of a record, x kTokens) += weights (32 outputs x 128 inputs) * x^T
// with weights scaled and rounded to x's type in registers, for more tokens than multiply_sparse:
// 13 (fp16) or 15 (bf16) instructions for 8 kept weights, none a sum but the product itself.
template <class T, class S, int kGroup, int kTokens>
BILLFISH_DEVICE void multiply_sparse_decoded(u32 record, u32 x, int half, int lane,
                                             float (&acc)[2][kTokens / 8][4]) {
    using R = SparseRecord<kGroup>;
    const auto places = LanePlaces<kTokens>::template of<R>(record, x, lane, half);
    const SparseLane mine[2] = {SparseLane::load<R>(record, half * 2, lane),
                                SparseLane::load<R>(record, half * 2 + 1, lane)};
    const u32 zero[2] = {Exact<T>::zero(8, false) * 0x00010001u,
                         Exact<T>::zero(8, true) * 0x00010001u};
    u32 scale[2][2];  // [n16][row r, row r + 8], each twice in a register
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const int k = step * 32;
        if (k % kGroup == 0) {
            const u32 at = record + R::kScales + half * 64 + lane / 4 * 8;
            const uint2 bits = load_smem_8(at + k / kGroup * 128);
#pragma unroll
            for (int n16 = 0; n16 < 2; ++n16) {
                const u32 two = n16 ? bits.y : bits.x;
                const u32 both = convert<T, S>(two & 0xffff) | convert<T, S>(two >> 16) << 16;
                scale[n16][0] = lower_twice(both), scale[n16][1] = upper_twice(both);
            }
        }
        u32 a[2][4];
#pragma unroll
        for (int n16 = 0; n16 < 2; ++n16)
            Exact<T>::fragment(mine[n16].words[step], scale[n16], zero, a[n16]);
#pragma unroll
        for (int block = 0; block < kTokens / 8; ++block) {
            u32 b[4];
            places.load_x(b, block, step);
#pragma unroll
            for (int n16 = 0; n16 < 2; ++n16)
                T::mma_sparse(acc[n16][block], a[n16], b, mine[n16].places[step / 2], step % 2);
        }
    }
}

template <class T, class S, int kGroup>
struct SparseStripeFormat {
    using Type = T;
    static constexpr int kRecordBytes = SparseRecord<kGroup>::kBytes;

    struct Places {  // lane and half are read again: kept, they would cost registers
        u32 record, x;
        BILLFISH_DEVICE void move(u32 by) { record += by, x += by; }
    };
    template <int kTokens>
    static BILLFISH_DEVICE Places places(u32 record, u32 x, int, int) {
        return {record, x};
    }
    // Up to 16 tokens whole numbers, and scales once a group; the two are as in w4a16.
    template <int kTokens>
    static BILLFISH_DEVICE void multiply(const Places& at, float (&acc)[2][kTokens / 8][4]) {
        const int thread = thread_index(), half = thread / 32 % 2, lane = thread % 32;
        if constexpr (kTokens <= 16)
            multiply_sparse<T, S, kGroup, kTokens>(at.record, at.x, half, lane, acc);
        else
            multiply_sparse_decoded<T, S, kGroup, kTokens>(at.record, at.x, half, lane, acc);
    }
    template <int kTokens>
    static BILLFISH_DEVICE float finish(float sum, bool) {
        return sum;
    }
};

// As stripe_product.
template <class T, class S, int kGroup, int kTokens, int kBands>
__global__ void __launch_bounds__(kStripeThreads, 1)
w4a16_24_stripe(const unsigned char* __restrict__ records, const u16* __restrict__ x,
                const u16* __restrict__ bias, u16* __restrict__ out, float* workspace, u32* locks,
                int m, int n, int x_k, int k_tiles) {
    stripe_product<SparseStripeFormat<T, S, kGroup>, kTokens, kBands>(
        records, x, bias, out, workspace, locks, m, n, x_k, k_tiles);
}

}  // namespace billfish
