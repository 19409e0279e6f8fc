// w4a16_panel: records -> decoded weights (rows, k) in the activations' type, each rounded once.
//
// For products of many tokens by a library's GEMM; and the simplest reader of a record.
#pragma once

#include "billfish/record.cuh"

namespace billfish {

constexpr int kPanelThreads = kRecordN * kRecordK / 32;  // 16 bytes of words each

// Block (k tile, band); `out` begins at the panel's first band and has `rows` x `k` numbers. Planes
// follow one another along k tiles: plane p adds its part, 16 (high) and 1 (low) times the scale.
template <class T, class S, int kGroup, bool kAsymmetric, int kPlanes>
__global__ void __launch_bounds__(kPanelThreads)
w4a16_panel(const unsigned char* __restrict__ records, u16* __restrict__ out, int rows, int k) {
    using R = Record<kGroup, kAsymmetric>;
    const int k_tiles = gridDim.x;
    const int brick = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int k64 = brick / 4, n16 = brick % 4, quad = lane / 4, pair = lane % 4;
    float value[2][16] = {};  // [row r, row r + 8][k16 step][k, k + 1, k + 8, k + 9]
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
        const unsigned char* record =
            records + ((blockIdx.y * kPlanes + plane) * static_cast<u64>(k_tiles) + blockIdx.x) *
                          R::kBytes;
        const uint4 words = reinterpret_cast<const uint4*>(record)[threadIdx.x];
        const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const int group = (k64 * 64 + step / 2 * 32) / kGroup;
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {
                const int place = (group * 2 + n16 / 2) * 32 + quad * 4 + n16 % 2 * 2 + lower;
                const float scale =
                    S::to_float(reinterpret_cast<const u16*>(record + R::kScales)[place]);
                int zero = 8;
                if constexpr (kAsymmetric)
                    zero = record[R::kZeros + place / 2] >> (place % 2 * 4) & 15;
#pragma unroll
                for (int i = 0; i < 4; ++i) {  // nibble: even k below, odd k above; k + 8 two on
                    const int shift = i % 2 * 16 + i / 2 * 8 + lower * 4;
                    const int code = word[step] >> shift & 15;
                    value[lower][step * 4 + i] += static_cast<float>(code - zero) * scale;
                }
            }
        }
    }
    // Through shared memory, so that stores are coalesced along a row.
    constexpr int kStride = kRecordK + 8;  // numbers; a quad's rows lie in different banks
    __shared__ __align__(16) u16 tile[kRecordN * kStride];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const int lower = i / 8, step = i / 2 % 4, right = i % 2;
        const float* pair_of = value[lower] + step * 4 + right * 2;
        const u32 bits = T::from_float(pair_of[0]) | T::from_float(pair_of[1]) << 16;
        const int row = n16 * 16 + lower * 8 + quad;
        const int column = k64 * 64 + step * 16 + right * 8 + pair * 2;
        *reinterpret_cast<u32*>(tile + row * kStride + column) = bits;
    }
    __syncthreads();
    for (int item = threadIdx.x; item < kRecordN * kRecordK / 8; item += kPanelThreads) {
        const int row = item / 16, column = item % 16 * 8;
        const int n = blockIdx.y * kRecordN + row, first = blockIdx.x * kRecordK + column;
        if (n >= rows) continue;
        const u16* from = tile + row * kStride + column;
        u16* to = out + static_cast<u64>(n) * k + first;
        if (k % 8 == 0) {
            if (first < k) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        } else {
            for (int i = 0; i < 8; ++i)
                if (first + i < k) to[i] = from[i];
        }
    }
}

}  // namespace billfish
