// w4a16_24_panel: records -> decoded weights (rows, k) in the activations' type, each rounded once,
// with zeros where none was kept.
//
// For products of many tokens by a library's GEMM; and the simplest reader of a record.
#pragma once

#include "billfish/sparse.cuh"

namespace billfish {

constexpr int kPanelThreads = kRecordN * kRecordK / 32;  // 8 bytes of words each
constexpr int kPanelLine = (kRecordK + 16) * 2;  // bytes; a quad's rows lie in different banks
constexpr int kPanelBytes = kRecordN * kPanelLine;

// Block (k tile, band), kPanelBytes of dynamic shared memory; `out` begins at the panel's first
// band and has `rows` x `k` numbers.
template <class T, class S, int kGroup>
__global__ void __launch_bounds__(kPanelThreads)
w4a16_24_panel(const unsigned char* __restrict__ records, u16* __restrict__ out, int rows, int k) {
    using R = SparseRecord<kGroup>;
    extern __shared__ __align__(128) unsigned char smem[];
    const u32 tile = smem_address(smem);
    const int n16 = threadIdx.x / 64, k64 = threadIdx.x / 32 % 2, lane = threadIdx.x % 32;
    const int quad = lane / 4, pair = lane % 4;
    const unsigned char* record =
        records + (blockIdx.y * static_cast<u64>(gridDim.x) + blockIdx.x) * R::kBytes;
    const uint2 words = reinterpret_cast<const uint2*>(record)[(n16 * 32 + lane) * 2 + k64];
    const u32* metadata = reinterpret_cast<const u32*>(record + R::kMetadata);
    const u16* scales = reinterpret_cast<const u16*>(record + R::kScales);
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // fours of this lane's two outputs, two in each step of 32
        const int step = i / 4, lower = i / 2 % 2, right = i % 2;
        const int group = (k64 * 64 + step * 32) / kGroup;
        const float scale = S::to_float(
            scales[(group * 2 + n16 / 2) * 32 + quad * 4 + n16 % 2 * 2 + lower]);
        // nibbles: the first kept of a four in the lower half of a word, the other in the upper
        const u32 codes = (step ? words.y : words.x) >> (right * 8 + lower * 4);
        const u32 places = metadata[(n16 * 32 + quad * 4 + step * 2 + right) * 2 + k64] >>
                           (lower * 16 + pair * 4);
        u64 four = 0;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int code = codes >> j * 16 & 15, place = places >> j * 2 & 3;
            const u64 bits = T::from_float(static_cast<float>(code - 8) * scale);
            four |= bits << place * 16;
        }
        const int row = n16 * 16 + lower * 8 + quad;
        const int column = k64 * 64 + step * 32 + right * 16 + pair * 4;
        const u32 to = tile + row * kPanelLine + column * 2;
        store_smem_4(to, four), store_smem_4(to + 4, four >> 32);
    }
    __syncthreads();
    // Through shared memory, so that stores are coalesced along a row.
    for (int item = threadIdx.x; item < kRecordN * kRecordK / 8; item += kPanelThreads) {
        const int row = item / 16, column = item % 16 * 8;
        const int n = blockIdx.y * kRecordN + row, first = blockIdx.x * kRecordK + column;
        if (n >= rows) continue;
        const u32 from = tile + row * kPanelLine + column * 2;
        u16* to = out + static_cast<u64>(n) * k + first;
        if (k % 8 == 0) {
            if (first < k) *reinterpret_cast<uint4*>(to) = load_smem_16(from);
        } else {
            for (int i = 0; i < 8; ++i)
                if (first + i < k) to[i] = load_smem_2(from + i * 2);
        }
    }
}

}  // namespace billfish
