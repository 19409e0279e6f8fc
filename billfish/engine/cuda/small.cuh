// The elementwise kernels of a layer: residual add with RMS norm, and SwiGLU; and the embedding.
//
// Rounded where transformers rounds, so that a model's numbers are the same with and without these
// kernels. Launched early (PDL): whatever was written before the step is read before the wait.
#pragma once

#include "billfish/mma.cuh"
#include "billfish/warp.cuh"

namespace billfish {

// Pointers to what the previous kernel may still write have no __restrict__: the compiler would
// take the data for constant and read it through a cache that need not see those stores.

constexpr int kNormThreads = 1024;  // at most
constexpr int kSwigluThreads = 128;  // 14 blocks for one token of 14336: on as many SMs

// hidden (tokens, width) += delta, unless that is null; out = its RMS norm. One block a token. The
// order of sums follows from the width alone: the same bits in every batch.
template <class T>
__global__ void __launch_bounds__(kNormThreads)
rms_norm(u16* hidden, const u16* delta, const u16* __restrict__ weight, u16* out, int width,
         float eps) {
    constexpr int kChunks = 2;  // of 8 numbers a thread: up to 16384 wide
#if __CUDA_ARCH__ >= 900
    launch_dependents();
#endif
    const int chunks = width / 8, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warps = blockDim.x / 32;
    const u64 row = static_cast<u64>(blockIdx.x) * chunks;
    uint4* const mine = reinterpret_cast<uint4*>(hidden) + row;
    const uint4* const more = reinterpret_cast<const uint4*>(delta) + row;
    u32 x[kChunks][4] = {}, w[kChunks][4] = {};
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
        const int at = threadIdx.x + i * blockDim.x;
        if (at >= chunks) continue;
        const uint4 v = reinterpret_cast<const uint4*>(weight)[at];
        w[i][0] = v.x, w[i][1] = v.y, w[i][2] = v.z, w[i][3] = v.w;
    }
#if __CUDA_ARCH__ >= 900
    dependency_wait();
#endif
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
            sum += a * a + b * b;
        }
    }
    __shared__ float sums[kNormThreads / 32];
    sum = sum_over(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = sum_over(lane < warps ? sums[lane] : 0.0f);
    const float scale = rsqrt_fast(sum / static_cast<float>(width) + eps);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
        const int at = threadIdx.x + i * blockDim.x;
        if (at >= chunks) continue;
        u32 y[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            y[j] = T::mul(w[i][j], T::pack(T::to_float(x[i][j]) * scale,
                                           T::to_float(x[i][j] >> 16) * scale));
        reinterpret_cast<uint4*>(out)[row + at] = {y[0], y[1], y[2], y[3]};
    }
}

// torch's own formula: the same bits as torch's.
BILLFISH_DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

// gate_up (tokens, 2 width), gates first -> out (tokens, width). Grid (parts of a row, tokens).
template <class T>
__global__ void __launch_bounds__(kSwigluThreads)
swiglu(const u16* gate_up, u16* out, int width) {
#if __CUDA_ARCH__ >= 900
    launch_dependents();
    dependency_wait();
#endif
    const int chunks = width / 8, at = blockIdx.x * kSwigluThreads + threadIdx.x;
    if (at >= chunks) return;
    const u64 token = blockIdx.y;
    const uint4* row = reinterpret_cast<const uint4*>(gate_up) + token * 2 * chunks;
    const uint4 g = row[at], u = row[chunks + at];
    const u32 gates[4] = {g.x, g.y, g.z, g.w}, ups[4] = {u.x, u.y, u.z, u.w};
    u32 y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const u32 opened = T::pack(silu(T::to_float(gates[j])), silu(T::to_float(gates[j] >> 16)));
        y[j] = T::mul(opened, ups[j]);
    }
    reinterpret_cast<uint4*>(out)[token * chunks + at] = {y[0], y[1], y[2], y[3]};
}

// out (tokens, width) = rows of the table. A negative token is not known to the host yet: -1 - i is
// the token that the previous decode drew for row i; `found` has pairs of (token, logit).
__global__ void __launch_bounds__(kNormThreads)
embed(const int* tokens, const int* found, const uint4* __restrict__ table, uint4* out,
      int chunks) {
#if __CUDA_ARCH__ >= 900
    launch_dependents();
    dependency_wait();
#endif
    const int given = tokens[blockIdx.x];
    const u64 token = given >= 0 ? given : found[2 * (-1 - given)];
    for (int i = threadIdx.x; i < chunks; i += blockDim.x)
        out[static_cast<u64>(blockIdx.x) * chunks + i] = table[token * chunks + i];
}

}  // namespace billfish
