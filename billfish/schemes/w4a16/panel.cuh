// w4a16_panel: records -> decoded weights (rows, k) in the activations' type, each rounded once.
//
// What many tokens multiply with a library's matrix product; and the simplest reader of a record.
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
    float value[2][16] = {};  // [row r, row r + 8][k16 step, k in it]
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
                for (int i = 0; i < 4; ++i) {  // nibble: even k below, odd k above; k + 2 two on
                    const int shift = i % 2 * 16 + i / 2 * 8 + lower * 4;
                    const int code = word[step] >> shift & 15;
                    value[lower][step * 4 + i] += static_cast<float>(code - zero) * scale;
                }
            }
        }
    }
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
        const int row = blockIdx.y * kRecordN + n16 * 16 + lower * 8 + quad;
        if (row >= rows) continue;
#pragma unroll
        for (int k32 = 0; k32 < 2; ++k32) {
            const int column = blockIdx.x * kRecordK + k64 * 64 + k32 * 32 + pair * 8;
            u16* to = out + static_cast<u64>(row) * k + column;
            u16 bits[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) bits[i] = T::from_float(value[lower][k32 * 8 + i]);
            if (k % 8 == 0 && column < k) {
                uint4 v;
                v.x = bits[0] | bits[1] << 16, v.y = bits[2] | bits[3] << 16;
                v.z = bits[4] | bits[5] << 16, v.w = bits[6] | bits[7] << 16;
                *reinterpret_cast<uint4*>(to) = v;
            } else {
                for (int i = 0; i < 8; ++i)
                    if (column + i < k) to[i] = bits[i];
            }
        }
    }
}

}  // namespace billfish
