// RMS norm of a token by one block, for kernels that store it or go on with it; and of a few tokens
// by every block of a product that takes them. Rounded where transformers rounds. The order of sums
// follows from the width alone (kernels/norm.py has the threads), and no multiply-add is left to
// the compiler: the same bits in every kernel and batch.
#pragma once

#include "billfish/mma.cuh"
#include "billfish/warp.cuh"

namespace billfish {

constexpr int kNormThreads = 1024;  // at most
constexpr int kNormWarps = kNormThreads / 32;

// -- a chunk: 8 numbers

template <class T>
BILLFISH_DEVICE uint4 add_chunks(uint4 a, uint4 b) {
    return {T::add(a.x, b.x), T::add(a.y, b.y), T::add(a.z, b.z), T::add(a.w, b.w)};
}

// `sum` and the squares of a chunk.
template <class T>
BILLFISH_DEVICE float add_squares(float sum, uint4 chunk) {
    const u32 x[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float a = T::to_float(x[j]), b = T::to_float(x[j] >> 16);
        sum = __fadd_rn(sum, __fmaf_rn(a, a, __fmul_rn(b, b)));
    }
    return sum;
}

// What a row's numbers are multiplied by; `sum` is that of all its squares.
BILLFISH_DEVICE float norm_scale(float sum, int width, float eps) {
    return rsqrt_fast(sum / static_cast<float>(width) + eps);
}

template <class T>
BILLFISH_DEVICE uint4 norm_chunk(uint4 x, uint4 weight, float scale) {
    const auto one = [&](u32 v, u32 w) {
        return T::mul(w, T::pack(T::to_float(v) * scale, T::to_float(v >> 16) * scale));
    };
    return {one(x.x, weight.x), one(x.y, weight.y), one(x.z, weight.z), one(x.w, weight.w)};
}

// -- a row by a block

// Thread t has chunks t and t + blockDim.x: up to 16384 wide.
template <class T>
struct NormRow {
    static constexpr int kChunks = 2;
    int chunks;  // of a row
    uint4 x[kChunks] = {}, w[kChunks] = {};

    // May come before dependency_wait: no kernel writes weights.
    BILLFISH_DEVICE NormRow(const u16* __restrict__ weight, int width) : chunks(width / 8) {
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const int at = threadIdx.x + i * blockDim.x;
            if (at < chunks) w[i] = reinterpret_cast<const uint4*>(weight)[at];
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
            x[i] = mine[at];
            if (delta != nullptr) {
                x[i] = add_chunks<T>(x[i], more[at]);
                mine[at] = x[i];
            }
            sum = add_squares<T>(sum, x[i]);
        }
        return sum;
    }

    // Calls store(chunk, its 8 numbers); `sum` is that of all threads.
    template <class Store>
    BILLFISH_DEVICE void finish(float sum, float eps, Store store) const {
        const float scale = norm_scale(sum, chunks * 8, eps);
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const int at = threadIdx.x + i * blockDim.x;
            if (at < chunks) store(at, norm_chunk<T>(x[i], w[i], scale));
        }
    }
};

#if __CUDA_ARCH__ >= 900

// -- a few rows by every block of a launch

// Every block reads the whole rows, and the launches of the norms are saved: with an 8B model's
// shapes a step of one token takes 0.07 ms less, one of four 0.035 more (LOG 2026-11-19).
constexpr int kMostNormed = 2;
constexpr int kNormSums = kMostNormed * kNormWarps * 4;  // bytes: a number a warp

// What is normed: hidden (m, width) + delta, which may be null. The sum goes to another place,
// since other blocks may still read hidden.
struct Residual {
    const u16 *hidden, *delta, *weight;
    u16* summed;  // of row i stored by block i
    int threads;  // of NormRow's block, each with one chunk at most
    float eps;
};

// sum_over of several numbers, whose shuffles overlap.
template <int kCount>
BILLFISH_DEVICE void sum_each(float (&v)[kCount]) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) v[i] += shuffle_xor(v[i], mask);
    }
}

// Chunks [first, first + count) of the normed rows, to shared memory at `rows`, `row_bytes` apart,
// and zeros behind a row's last chunk. By kWarps warps, of which this is thread `thread`, with the
// bits of NormRow: warp w does what warps w, w + kWarps ... of its block do. At most kOwn chunks of
// a row are one thread's. `sums` has kNormSums bytes; `sync` is a barrier of the warps.
template <class T, int kWarps, int kOwn, class Sync>
BILLFISH_DEVICE void norm_rows(const Residual& given, int thread, int m, int width, int first,
                               int count, u32 sums, u32 rows, int row_bytes, Sync sync) {
    constexpr int kThreads = 32 * kWarps, kTogether = 4;  // loads in flight: x and delta of each
    const int chunks = width / 8, lane = thread % 32, warps = given.threads / 32;
    const int steps = (given.threads + kThreads - 1) / kThreads;
    uint4 w[kOwn] = {};
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int at = thread + i * kThreads;
        if (at < count && first + at < chunks)
            w[i] = reinterpret_cast<const uint4*>(given.weight)[first + at];
    }
    dependency_wait();
    for (int next = 0, step = 0; next < m;) {
        uint4 x[kTogether] = {}, more[kTogether] = {};
        int row[kTogether], at[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            row[i] = next, at[i] = step * kThreads + thread;
            if (++step == steps) step = 0, ++next;
            if (row[i] >= m || at[i] >= chunks) continue;
            const int from = row[i] * chunks + at[i];
            x[i] = reinterpret_cast<const uint4*>(given.hidden)[from];
            if (given.delta != nullptr) more[i] = reinterpret_cast<const uint4*>(given.delta)[from];
        }
        float sum[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            if (given.delta != nullptr) x[i] = add_chunks<T>(x[i], more[i]);
            sum[i] = add_squares<T>(0, x[i]);
        }
        sum_each(sum);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            if (row[i] >= m) continue;
            if (lane == 0) store_smem_float(sums + (row[i] * kNormWarps + at[i] / 32) * 4, sum[i]);
            if (at[i] >= chunks) continue;
            if (at[i] >= first && at[i] < first + count)
                store_smem_bits_16(rows + row[i] * row_bytes + (at[i] - first) * 16, x[i]);
            if (given.delta != nullptr && row[i] == blockIdx.x)
                reinterpret_cast<uint4*>(given.summed)[row[i] * chunks + at[i]] = x[i];
        }
    }
    __syncwarp();  // barriers are of converged warps
    sync();
    float sum[kMostNormed];
#pragma unroll
    for (int row = 0; row < kMostNormed; ++row) {
        const u32 from = sums + (row * kNormWarps + lane) * 4;
        sum[row] = row < m && lane < warps ? load_smem_float(from) : 0.0f;
    }
    sum_each(sum);
    float mine = sum[0];  // a row a lane: one division
#pragma unroll
    for (int row = 1; row < kMostNormed; ++row) mine = lane == row ? sum[row] : mine;
    const float scale = norm_scale(mine, width, given.eps);
#pragma unroll
    for (int row = 0; row < kMostNormed; ++row) sum[row] = shuffle(scale, row);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const int at = thread + i * kThreads;
        if (at >= count) break;
        uint4 x[kMostNormed];
#pragma unroll
        for (int row = 0; row < kMostNormed; ++row)
            if (row < m) x[row] = load_smem_16(rows + row * row_bytes + at * 16);
#pragma unroll
        for (int row = 0; row < kMostNormed; ++row) {
            if (row >= m) continue;
            const uint4 y = norm_chunk<T>(x[row], w[i], sum[row]);
            store_smem_bits_16(rows + row * row_bytes + at * 16,
                               first + at < chunks ? y : uint4{0, 0, 0, 0});
        }
    }
    __syncwarp();
}

#endif

}  // namespace billfish
