// w2416_panel: records -> decoded weights (rows, k) in the activations' type, columns in x's order,
// each rounded once, outliers added before. For products of many tokens by a library's GEMM; and
// the simplest reader of records.
#pragma once

#include "billfish/outliers.cuh"

namespace billfish {

constexpr int kPanelThreads = 256, kPanelStride = kTwoK + 2;  // floats of a row of the tile
constexpr int kPanelBytes = kRecordN * kPanelStride * 4;

// (row, column of the record) in shared memory; two neighbours are stored at once.
BILLFISH_DEVICE u32 panel_place(u32 tile, int row, int column) {
    return tile + (row * kPanelStride + column) * 4;
}

// Block (tile along k, band) of a MixedLayer; `records` begins at the panel's first band, `out` has
// `rows` x `k` numbers.
template <class T, int kZero, int kStep>
__global__ void __launch_bounds__(kPanelThreads)
w2416_panel(const unsigned char* __restrict__ records, const int* __restrict__ columns,
            u16* __restrict__ out, int rows, int k, int tiles_2, int tiles_4, int sets,
            int band_words) {
    extern __shared__ __align__(128) unsigned char smem[];
    const u32 tile = smem_address(smem);
    const int index = blockIdx.x, thread = threadIdx.x;
    const bool two = index < tiles_2;
    const MixedLayer layer{records, tiles_2, tiles_4, sets, band_words};
    const unsigned char* record =
        layer.band(blockIdx.y) +
        (two ? index * kTwoBytes : tiles_2 * kTwoBytes + (index - tiles_2) * layer.four_bytes());
    const u32* words = reinterpret_cast<const u32*>(record);
    const u16* scales = reinterpret_cast<const u16*>(record + kFourScales);
    const u32 marks = words[(kFourScales + sets * kFourSetBytes) / 4 * !two];
    for (int i = thread; i < 1024; i += kPanelThreads) {
        const u32 word = words[i];
        if (two) {
            const int k64 = i / 256, half = i / 128 % 2, lane = i / 4 % 32;
            const int brick = i / 2 % 2, lower = i % 2, block = k64 * 2 + brick;
            const u32 codes = words[kTwoScales / 4 + half * 64 + lane * 2 + block / 4];
            const u32 zeros = words[kTwoZeros / 4 + half * 32 + lane];
            const u32 base = reinterpret_cast<const u16*>(
                record + kTwoBases)[half * 32 + lane % 4 * 8 + block];
            const int code = codes >> (block % 4 * 4 + lower * 16) & 15;
            const int zero = zeros >> (block * 2 + lower * 16) & 3;
            const float scale = static_cast<float>(code + static_cast<int>(base & 15)) *
                                (Half::to_float(base >> 4 << 3) * 0.00390625f);
            const int row = half * 32 + brick * 16 + lower * 8 + lane / 4;
            for (int p = 0; p < 8; ++p) {
                float weight[2];
                for (int odd = 0; odd < 2; ++odd) {
                    const int level = (word >> (p * 2 + odd * 16) & 3) * 16 - kZero - kStep * zero;
                    weight[odd] = static_cast<float>(level) * 0.0625f * scale;
                }
                const int column = k64 * 64 + lane % 4 * 16 + p * 2;
                store_smem_8(panel_place(tile, row, column), weight[0], weight[1]);
            }
        } else {
            const int k64 = i / 512, n16 = i / 128 % 4, lane = i / 4 % 32, step = k64 * 4 + i % 4;
            int set = 0;
            for (int j = 1; j <= step; ++j) set += marks >> j & 1;
            for (int a = 0; a < 4; ++a) {  // row r, r + 8; the same, eight inputs on
                const int place = (set * 2 + n16 / 2) * 32 + lane / 4 * 4 + n16 % 2 * 2 + a % 2;
                const float scale = T::to_float(scales[place]);
                const int even = word >> a * 4 & 15, odd = word >> (a * 4 + 16) & 15;
                const int row = n16 * 16 + a % 2 * 8 + lane / 4;
                const int column = step * 16 + a / 2 * 8 + lane % 4 * 2;
                store_smem_8(panel_place(tile, row, column), static_cast<float>(even - 8) * scale,
                             static_cast<float>(odd - 8) * scale);
            }
        }
    }
    __syncthreads();
    if (thread < kRecordN) {  // one thread a row: outliers of equal places are added in order
        const u32 half = thread / 32 * 16;
        const u32* list = reinterpret_cast<const u32*>(
            layer.list(blockIdx.y, layer.edges(blockIdx.y)[index]));
        for (u32 i = 0, last = 0; !last || i % 16; ++i) {
            const u32 one = list[i / 16 * 32 + half + i % 16], column = one & 255;
            last = one & kLast;
            if (one & kEmpty || (one >> 8 & 63) != thread) continue;
            const u32 at = panel_place(tile, thread, column & ~1u);
            const uint2 old = load_smem_8(at);
            float pair[2] = {__uint_as_float(old.x), __uint_as_float(old.y)};
            pair[column % 2] += T::to_float(one >> 16);
            store_smem_8(at, pair[0], pair[1]);
        }
    }
    __syncthreads();
    const int groups = two ? kTwoK / 16 : kRecordK / 16;
    const int* table = columns + (two ? index * 16 : tiles_2 * 16 + (index - tiles_2) * 8);
    for (int item = thread; item < kRecordN * groups * 2; item += kPanelThreads) {
        const int row = item / (groups * 2), chunk = item % (groups * 2);
        const int n = blockIdx.y * kRecordN + row, column = table[chunk / 2];
        if (n >= rows || column < 0) continue;
        u32 packed[4];
        for (int j = 0; j < 4; ++j) {
            const uint2 v = load_smem_8(panel_place(tile, row, chunk * 8 + j * 2));
            packed[j] = T::pack(__uint_as_float(v.x), __uint_as_float(v.y));
        }
        u16* to = out + static_cast<u64>(n) * k + column + chunk % 2 * 8;
        *reinterpret_cast<uint4*>(to) = uint4{packed[0], packed[1], packed[2], packed[3]};
    }
}

}  // namespace billfish
