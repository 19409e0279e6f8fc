// w4ax_stripe_quant: x (m, k) of 16 bits -> what w4ax_stripe reads, sm_80. The rule is
// activations.py's, in fp32; a block a token.
//
// Input j is x[order[j]], or x[j] without an order. The first `fours` blocks of kBlock inputs get 4
// bits, multiplied by a Hadamard matrix before (kRotated). 128 inputs have a line of 128 bytes, a
// block of them its part of it:
//
//     8 bits   bytes in the order of w4ax_quant
//     4 bits   of each 32 inputs, two words of such bytes in the nibbles of one: then two words
//              of a record become two fragments (stripe.cuh); behind them {scale q, -8 sums, sum}
//
// 4-bit blocks of 32 are stored as bytes, q times as large: their product has no tensor core.
#pragma once

#include "billfish/mma.cuh"
#include "billfish/warp.cuh"

namespace billfish {

constexpr int kMostQuantWarps = 32;
constexpr float kTop = 127.0f, kUp = 127.0f / 112.0f;  // 112 = 7 * 16: the most of 4 bits

// A thread's eight inputs of 32, as pairs 2 t + {0, 8, 16, 24}: two words of bytes in the order of
// w4ax_quant. Neighbours in a pair are bit 0 of the input's number, threads bits 1, 2 and from 5
// on, pairs bits 3 and 4.
struct QuantEight {
    float z[8];  // [pair][neighbour]

    template <class T>
    BILLFISH_DEVICE void load(const u16* row, const int* order, int eighth, int k) {
        const int first = eighth / 4 * 32 + eighth % 4 * 2;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = first + i * 8;
            u32 two = 0;  // k is a multiple of 8
            if (at < k && order == nullptr) {
                two = load_global_bits_4(row + at);
            } else if (at < k) {
                const u32 low = row[order[at]], high = row[order[at + 1]];
                two = low | high << 16;
            }
            z[i * 2] = T::to_float(two & 0xffff), z[i * 2 + 1] = T::to_float(two >> 16);
        }
    }

    // Butterflies over inputs that differ in one bit, the lowest first: the order decides the bits.
    template <int kBlock>
    BILLFISH_DEVICE void rotate(int lane) {
        within<1>();
        across<1>(lane), across<2>(lane);
        within<2>(), within<4>();
        if (kBlock >= 64) across<4>(lane);
        if (kBlock >= 128) across<8>(lane);
        constexpr float kNorm = kBlock == 128  ? 0.08838834764831845f
                                : kBlock == 64 ? 0.125f
                                               : 0.17677669529663687f;  // 1 / sqrt(kBlock)
#pragma unroll
        for (int i = 0; i < 8; ++i) z[i] = __fmul_rn(z[i], kNorm);
    }
    template <int kStep>
    BILLFISH_DEVICE void within() {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i & kStep) continue;
            const float a = z[i], b = z[i + kStep];
            z[i] = a + b, z[i + kStep] = a - b;
        }
    }
    template <int kMask>
    BILLFISH_DEVICE void across(int lane) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float other = shuffle_xor(z[i], kMask);
            z[i] = lane & kMask ? other - z[i] : z[i] + other;
        }
    }

    // As bits, in which Inf and NaN are the largest.
    BILLFISH_DEVICE u32 largest() const {
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) most = max(most, float_bits(z[i]) & 0x7fffffffu);
        return most;
    }

    // Whole numbers, a byte each, and their sum; 0 for NaN.
    BILLFISH_DEVICE int round(float inverse, int low, int high, int times, u32 (&word)[2]) const {
        int total = 0;
        word[0] = word[1] = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // byte b of a word: neighbour b / 2 of pair b % 2
            const float v = z[(i / 4 * 2 + i % 2) * 2 + i / 2 % 2];
            const int whole = max(low, min(high, __float2int_rn(__fmul_rn(v, inverse)))) * times;
            word[i / 4] |= (static_cast<u32>(whole) & 255) << i % 4 * 8;
            total += whole;
        }
        return total;
    }
};

// The largest number of kLanes neighbours, or the sum.
template <int kLanes, bool kMost>
BILLFISH_DEVICE u32 over_lanes(u32 v) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) {
        const u32 other = shuffle_xor(v, mask);
        v = kMost ? max(v, other) : v + other;
    }
    return v;
}

// The same of the block's threads; `room`: a word for each warp, used once.
template <bool kMost>
BILLFISH_DEVICE u32 over_threads(u32 v, u32 room) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    v = kMost ? max_over_warp(v) : sum_over_warp(v);
    if (lane == 0) store_smem_4(room + warp * 4, v);
    __syncthreads();
    v = lane < blockDim.x / 32 ? load_smem_4(room + lane * 4) : 0;
    return kMost ? max_over_warp(v) : sum_over_warp(v);
}

// `lines` is (m, k tiles * 128 bytes), `tokens` gets {scale, 128 times the sum of the bytes}: the
// weights that bytes are multiplied with are 128 too large. blockDim.x: whole warps; dynamic
// shared memory: two words for each of kMostQuantWarps.
template <class T, int kBlock, bool kRotated>
__global__ void __launch_bounds__(32 * kMostQuantWarps, 1)
w4ax_stripe_quant(const u16* __restrict__ x, const int* __restrict__ order, unsigned char* lines,
                  uint2* tokens, int k, int k_tiles, int fours, float reach) {
    constexpr int kLanes = kBlock / 8;  // threads of a block of inputs
    extern __shared__ __align__(16) unsigned char smem[];
    const u32 room = smem_address(smem);
    const int thread = threadIdx.x, lane = thread % 32, threads = blockDim.x;
    const int eighths = k_tiles * 16, rounds = (eighths + 31) / 32 * 32;
    const u16* row = x + static_cast<u64>(blockIdx.x) * k;
    QuantEight mine;
    u32 most = 0, largest = 0;  // of this block of inputs
    bool four = false;
    const auto get = [&](int i) {
        four = i / kLanes < fours;
        mine.load<T>(row, order, i, k);  // zeros behind the last
        if constexpr (kRotated) {
            const QuantEight plain = mine;
            mine.rotate<kBlock>(lane);
            if (!four) mine = plain;
        }
        largest = over_lanes<kLanes, true>(mine.largest());
    };
    for (int i = thread; i < rounds; i += threads) {
        get(i);
        const float v = __uint_as_float(largest);
        most = max(most, four ? float_bits(__fmul_rn(v, kUp)) & 0x7fffffffu : largest);
    }
    most = over_threads<true>(most, room);
    const float a = __uint_as_float(most);
    const bool finite = a - a == 0.0f;
    const float inverse = finite && a > 0.0f ? kTop / a : 0.0f;

    unsigned char* const line = lines + static_cast<u64>(blockIdx.x) * k_tiles * 128;
    u32 total = 0;
    for (int i = thread; i < rounds; i += threads) {
        if (rounds > threads) get(i);  // else it is still here
        const float least = ceilf(__fmul_rn(__fmul_rn(__uint_as_float(largest), inverse), reach));
        const float q = four ? fminf(fmaxf(least, 1.0f), 16.0f) : 1.0f;  // 1 where it is NaN
        const bool nibbles = four && kBlock > 32;
        const int times = nibbles ? 1 : static_cast<int>(q);
        u32 word[2];
        const int sum =
            mine.round(inverse / q, four ? -8 : -127, four ? 7 : 127, times, word);
        const u32 of_block = over_lanes<kLanes, false>(static_cast<u32>(sum));
        if (i >= eighths) continue;
        if (!nibbles) {
            total += sum;
            unsigned char* const to = line + i / 4 * 32 + i % 4 * 4;
            *reinterpret_cast<u32*>(to) = word[0];
            *reinterpret_cast<u32*>(to + 16) = word[1];
            continue;
        }
        unsigned char* const to = line + i / kLanes * kBlock;
        *reinterpret_cast<u32*>(to + i % kLanes * 4) =
            (word[0] & 0x0f0f0f0fu) | (word[1] << 4 & 0xf0f0f0f0u);
        if (i % kLanes == 0)
            *reinterpret_cast<uint4*>(to + kBlock / 2) = {static_cast<u32>(q), 0u - 8 * of_block,
                                                          of_block, 0};
    }
    total = over_threads<false>(total, room + kMostQuantWarps * 4);
    if (thread == 0) tokens[blockIdx.x] = {float_bits(finite ? a / kTop : a - a), total * 128};
}

}  // namespace billfish
