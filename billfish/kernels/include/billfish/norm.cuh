// RMS norm of a token by one block, for kernels that store it or go on with it. Rounded where
// transformers rounds. The order of sums follows from the width alone (kernels/norm.py has the
// threads), and no multiply-add is left to the compiler: the same bits in every kernel and batch.
#pragma once

#include "billfish/mma.cuh"
#include "billfish/warp.cuh"

namespace billfish {

constexpr int kNormThreads = 1024;  // at most

// Chunks of 8 numbers, of which thread t has t and t + blockDim.x: up to 16384 wide.
template <class T>
struct NormRow {
    static constexpr int kChunks = 2;
    int chunks;  // of a row
    u32 x[kChunks][4] = {}, w[kChunks][4] = {};

    // May come before dependency_wait: no kernel writes weights.
    BILLFISH_DEVICE NormRow(const u16* __restrict__ weight, int width) : chunks(width / 8) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const int at = threadIdx.x + i * blockDim.x;
            if (at >= chunks) continue;
            const uint4 v = reinterpret_cast<const uint4*>(weight)[at];
            w[i][0] = v.x, w[i][1] = v.y, w[i][2] = v.z, w[i][3] = v.w;
        }
    }

    // hidden += delta, unless that is null, in place; this thread's part of the sum of squares.
    // No __restrict__: the compiler would take data for constant that the previous kernel writes,
    // and read it through a cache that need not see those stores.
    BILLFISH_DEVICE float add(u16* hidden, const u16* delta, u64 token) {
        uint4* const mine = reinterpret_cast<uint4*>(hidden) + token * chunks;
        const uint4* const more = reinterpret_cast<const uint4*>(delta) + token * chunks;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const int at = threadIdx.x + i * blockDim.x;
            if (at >= chunks) continue;
            const uint4 v = mine[at];
            x[i][0] = v.x, x[i][1] = v.y, x[i][2] = v.z, x[i][3] = v.w;
            if (delta != nullptr) {
                const uint4 d = more[at];
                const u32 added[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) x[i][j] = T::add(x[i][j], added[j]);
                mine[at] = {x[i][0], x[i][1], x[i][2], x[i][3]};
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float a = T::to_float(x[i][j]), b = T::to_float(x[i][j] >> 16);
                sum = __fadd_rn(sum, __fmaf_rn(a, a, __fmul_rn(b, b)));
            }
        }
        return sum;
    }

    // Calls store(chunk, its 8 numbers); `sum` is that of all threads.
    template <class Store>
    BILLFISH_DEVICE void finish(float sum, float eps, Store store) const {
        const float scale = rsqrt_fast(sum / static_cast<float>(chunks * 8) + eps);
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const int at = threadIdx.x + i * blockDim.x;
            if (at >= chunks) continue;
            u32 y[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                y[j] = T::mul(w[i][j], T::pack(T::to_float(x[i][j]) * scale,
                                               T::to_float(x[i][j] >> 16) * scale));
            store(at, uint4{y[0], y[1], y[2], y[3]});
        }
    }
};

}  // namespace billfish
