// The elementwise kernels of a layer: residual add with RMS norm, and SwiGLU; and the embedding.
//
// Rounded where transformers rounds, so that a model's numbers are the same with and without these
// kernels. Launched early (PDL): whatever was written before the step is read before the wait.
#pragma once

#include "billfish/norm.cuh"

namespace billfish {

// Pointers to what the previous kernel may still write have no __restrict__ (norm.cuh).

constexpr int kSwigluThreads = 128;  // 14 blocks for one token of 14336: on as many SMs

// hidden (tokens, width) += delta, unless that is null; out = its RMS norm. One block a token.
template <class T>
__global__ void __launch_bounds__(kNormThreads)
rms_norm(u16* hidden, const u16* delta, const u16* __restrict__ weight, u16* out, int width,
         float eps) {
#if __CUDA_ARCH__ >= 900
    launch_dependents();
#endif
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    NormRow<T> row(weight, width);
#if __CUDA_ARCH__ >= 900
    dependency_wait();
#endif
    __shared__ float sums[kNormWarps];
    float sum = sum_over(row.add(hidden, delta, blockIdx.x));
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    sum = sum_over(lane < blockDim.x / 32 ? sums[lane] : 0.0f);
    uint4* const stored = reinterpret_cast<uint4*>(out) + static_cast<u64>(blockIdx.x) * row.chunks;
    row.finish(sum, eps, [&](int chunk, uint4 y) { stored[chunk] = y; });
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
