// w4ax_quant: x (m, k) of 16 bits -> bytes in the order in which the products read them, and what
// they need of each token. With a = max |x| of a token, which follows from that token alone:
//
//     scale  a / 127, or NaN where x has an Inf or a NaN
//     byte   x * (127 / a), to the nearest, of two as near to the even one; 0 where a is 0 or no
//            finite number
#pragma once

#include "billfish/mma.cuh"
#include "billfish/warp.cuh"

namespace billfish {

constexpr int kQuantThreads = 256;
constexpr int kQuantWarps = kQuantThreads / 32;

// The largest of all threads' numbers, or their sum. `room`: 8 bytes a warp, used once.
template <bool kMost>
BILLFISH_DEVICE float over_block(float v, u32 room) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    v = kMost ? max_over(v) : sum_over(v);
    if (lane == 0) store_smem_8(room + warp * 8, v, 0.0f);
    __syncthreads();
    v = lane < kQuantWarps ? load_smem_float(room + lane * 8) : 0.0f;
    return kMost ? max_over(v) : sum_over(v);
}

// 16 inputs; k is a multiple of 8.
BILLFISH_DEVICE void load_inputs(const u16* row, int chunk, int k, u32 (&v)[8]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int at = chunk * 16 + half * 8;
        const uint4 some = at < k ? load_global_bits_16(row + at) : uint4{0, 0, 0, 0};
        v[half * 4] = some.x, v[half * 4 + 1] = some.y;
        v[half * 4 + 2] = some.z, v[half * 4 + 3] = some.w;
    }
}

// A block a token. Of each 16 inputs, byte 4 t + b is input 2 t + 8 (b & 1) + (b >> 1): then the
// words of a record, which are in the order of 16-bit fragments, are fragments of bytes, too.
// `tokens` gets {scale, 128 times the sum of the bytes}: the products' weights are 128 too large.
template <class T>
__global__ void __launch_bounds__(kQuantThreads)
w4ax_quant(const u16* x, uint4* bytes, uint2* tokens, int k) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(16) unsigned char smem[];
    launch_dependents();
    dependency_wait();
    const u32 room = smem_address(smem);
    const int chunks = (k + 15) / 16;
    const u16* row = x + static_cast<u64>(blockIdx.x) * k;
    u32 v[8], most = 0;  // magnitudes as bits: Inf and NaN are the largest
    for (int chunk = threadIdx.x; chunk < chunks; chunk += kQuantThreads) {
        load_inputs(row, chunk, k, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) most = max(most, max(v[i] & 0x7fff, v[i] >> 16 & 0x7fff));
    }
    const float largest = over_block<true>(static_cast<float>(most), room);
    const float a = T::to_float(static_cast<u32>(largest));
    const bool finite = a - a == 0.0f;
    const float inverse = finite && a > 0.0f ? 127.0f / a : 0.0f;
    int total = 0;
    for (int chunk = threadIdx.x; chunk < chunks; chunk += kQuantThreads) {  // from L1
        load_inputs(row, chunk, k, v);
        u32 word[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const u32 bits = v[i % 2 * 4 + i / 4] >> i / 2 % 2 * 16 & 0xffff;
            const int byte = max(-127, min(127, __float2int_rn(T::to_float(bits) * inverse)));
            word[i / 4] |= (static_cast<u32>(byte) & 255) << i % 4 * 8;
            total += byte;
        }
        bytes[static_cast<u64>(blockIdx.x) * chunks + chunk] = {word[0], word[1], word[2], word[3]};
    }
    // at most 127 * 2^17 < 2^24: exact
    const float sum = over_block<false>(static_cast<float>(total), room + 8 * kQuantWarps);
    if (threadIdx.x == 0)
        tokens[blockIdx.x] = {float_bits(finite ? a / 127.0f : a - a),
                              static_cast<u32>(static_cast<int>(sum)) * 128};
#endif
}

}  // namespace billfish
