// w4ax_quant: x (m, k) of 16 bits -> bytes in the order in which the products read them, and what
// they need of each token. With a = max |x| of a token, which follows from that token alone:
//
//     scale  a / 127, or NaN where x has an Inf or a NaN
//     byte   x * (127 / a), to the nearest, of two as near to the even one; 0 where a is 0 or no
//            finite number
//
// kMixed, fmpq: x in the layer's own order, 4-bit blocks turned by a Hadamard matrix; their bytes
// are 4-bit numbers times a whole number of the block (activations.py has the rule).
// w4ax_norm: the same of the RMS norm of a residual sum.
#pragma once

#include "billfish/norm.cuh"

namespace billfish {

constexpr int kQuantThreads = 1024;  // at most; a block a token
// Shared memory: [a word for each warp, for three sums over the block][x, where it is gathered].
constexpr int kQuantWarps = kQuantThreads / 32;
constexpr int kQuantRoom = 3 * kQuantWarps * 4;
constexpr int kUnit = 16;  // stored inputs that a thread rounds at once
constexpr float kWiden = 127.0f / 112;  // of a 4-bit block, whose largest byte is 7 * 16

// How a layer rounds its inputs; of a8 only k counts.
struct Rounding {
    const u16* order;           // of each stored input, the input it is; null: the same
    const unsigned char* bits;  // of each block, 4 or 8
    int k, lanes;               // `lanes` of 16 stored inputs are a block: 2, 4 or 8
    float turn, reach;          // 1 / sqrt(inputs of a block), 0: not turned; REACH
};

// What is known of 16 stored inputs before x is: read before the previous kernel has ended.
template <bool kMixed>
struct Places {
    u32 from[8];  // two inputs each
    bool few = false;
    BILLFISH_DEVICE void load(const Rounding& how, int unit, bool real) {
        if (!kMixed || !real) return;
        few = how.bits[unit / how.lanes] == 4;
        if (how.order == nullptr) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4* some = reinterpret_cast<const uint4*>(how.order) + unit * 2 + half;
            const uint4 v = load_table_16(some);
            from[half * 4] = v.x, from[half * 4 + 1] = v.y;
            from[half * 4 + 2] = v.z, from[half * 4 + 3] = v.w;
        }
    }
};

// `over` of all threads' words; `room`: a word for each warp, used once.
template <class Over>
BILLFISH_DEVICE u32 over_block(u32 v, u32 room, Over over) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    v = over(v);
    if (lane == 0) store_smem_4(room + warp * 4, v);
    __syncthreads();
    return over(lane < blockDim.x / 32 ? load_smem_4(room + lane * 4) : 0);
}

// 16 numbers of each of `lanes` threads times the normalised Hadamard matrix, where `few`.
BILLFISH_DEVICE void turn_block(float (&z)[kUnit], const Rounding& how, bool few) {
    if (!any(few)) return;
    if (few) {
#pragma unroll
        for (int step = 1; step < kUnit; step *= 2)
#pragma unroll
            for (int i = 0; i < kUnit; ++i)
                if ((i & step) == 0) {
                    const float a = z[i], b = z[i + step];
                    z[i] = a + b, z[i + step] = a - b;
                }
    }
    for (int step = 1; step < how.lanes; step *= 2) {
        const bool second = threadIdx.x & step;
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            const float other = shuffle_xor(z[i], step);
            if (few) z[i] = second ? other - z[i] : z[i] + other;
        }
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i) z[i] = few ? z[i] * how.turn : z[i];
}

// 16 stored inputs, zeros past the last, and the bits of their largest magnitude, or of their
// block's: as bits, Inf and NaN are the largest. `load` gives 8 neighbours of x.
template <class T, bool kMixed, class Load>
BILLFISH_DEVICE u32 fetch(float (&z)[kUnit], const Rounding& how, const Places<kMixed>& places,
                          u32 row, int unit, bool real, Load load) {
    u32 v[8] = {};
    if (kMixed && real && how.order != nullptr) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            v[i] = load_smem_2(row + 2 * (places.from[i] & 0xffff)) |
                   load_smem_2(row + 2 * (places.from[i] >> 16)) << 16;
    } else if (real) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = unit * kUnit + half * 8;
            const uint4 some = at < how.k ? load(at) : uint4{0, 0, 0, 0};
            v[half * 4] = some.x, v[half * 4 + 1] = some.y;
            v[half * 4 + 2] = some.z, v[half * 4 + 3] = some.w;
        }
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i) z[i] = T::to_float(v[i / 2] >> i % 2 * 16 & 0xffff);
    if (kMixed && how.turn != 0.0f) turn_block(z, how, places.few);
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) most = max(most, float_bits(z[i]) & 0x7fffffff);
    if (kMixed && any(places.few))
        for (int step = 1; step < how.lanes; step *= 2) most = max(most, shuffle_xor(most, step));
    return most;
}

// A token's bytes, and {scale, 128 times their sum}: the products' weights are 128 too large. Of
// each 16 inputs, byte 4 t + b is input 2 t + 8 (b & 1) + (b >> 1): then the words of a record,
// which are in the order of 16-bit fragments, are fragments of bytes, too.
template <class T, bool kMixed, class Load>
BILLFISH_DEVICE void round_token(const Rounding& how, Places<kMixed> places, u32 room, u32 row,
                                 uint4* bytes, uint2* token, Load load) {
    const int units = (how.k + kUnit - 1) / kUnit, threads = blockDim.x;
    const bool once = units <= threads;  // then numbers stay in registers
    float z[kUnit];
    u32 most = 0, largest = 0;
    for (int first = 0; first < units; first += threads) {
        const int unit = first + threadIdx.x;
        if (first > 0) places.load(how, unit, unit < units);
        most = fetch<T>(z, how, places, row, unit, unit < units, load);
        const bool widen = kMixed && places.few;
        largest = max(largest, widen ? float_bits(__uint_as_float(most) * kWiden) : most);
    }
    largest = over_block(largest, room, [](u32 v) { return max_over_warp(v); });
    const float a = __uint_as_float(largest);
    const bool finite = a - a == 0.0f;
    const float inverse = finite && a > 0.0f ? 127.0f / a : 0.0f;
    u32 total = 0;
    for (int first = 0; first < units; first += threads) {
        const int unit = first + threadIdx.x;
        if (!once) {
            places.load(how, unit, unit < units);
            most = fetch<T>(z, how, places, row, unit, unit < units, load);
        }
        int low = -127, high = 127, times = 1;
        float step = inverse;
        if (kMixed && places.few) {
            times = __float2int_ru(__uint_as_float(most) * inverse * how.reach);
            times = max(1, min(16, times)), low = -8, high = 7;
            step = inverse / static_cast<float>(times);
        }
        u32 word[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
            const int steps = __float2int_rn(z[i / 4 * 2 + i % 2 * 8 + i / 2 % 2] * step);
            const int byte = max(low, min(high, steps)) * times;
            word[i / 4] |= (static_cast<u32>(byte) & 255) << i % 4 * 8;
            total += byte;
        }
        if (unit < units) bytes[unit] = {word[0], word[1], word[2], word[3]};
    }
    total = over_block(total, room + kQuantWarps * 4, [](u32 v) { return sum_over_warp(v); });
    if (threadIdx.x == 0) *token = {float_bits(finite ? a / 127.0f : a - a), total * 128};
}

// `bytes` is (m, chunks of 16 inputs), k a multiple of 8, of 32 where kMixed.
template <class T, bool kMixed>
__global__ void __launch_bounds__(kQuantThreads)
w4ax_quant(const u16* x, uint4* bytes, uint2* tokens, const u16* __restrict__ order,
           const unsigned char* __restrict__ bits, int k, int lanes, float turn, float reach) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(16) unsigned char smem[];
    const Rounding how{order, bits, k, lanes, turn, reach};
    const int units = (k + kUnit - 1) / kUnit;
    const u32 room = smem_address(smem), row = room + kQuantRoom;
    launch_dependents();
    Places<kMixed> places;
    places.load(how, threadIdx.x, threadIdx.x < units);
    dependency_wait();
    const u16* given = x + static_cast<u64>(blockIdx.x) * k;
    if (kMixed && order != nullptr) {
        for (int chunk = threadIdx.x; chunk < k / 8; chunk += blockDim.x)
            store_smem_bits_16(row + chunk * 16, load_global_bits_16(given + chunk * 8));
        __syncthreads();
    }
    round_token<T>(how, places, room, row, bytes + static_cast<u64>(blockIdx.x) * units,
                   tokens + blockIdx.x, [&](int at) { return load_global_bits_16(given + at); });
#endif
}

// hidden (m, k) += delta, unless that is null, in place; then w4ax_quant of its RMS norm, whose
// 16-bit numbers are those that rms_norm (engine/cuda/small.cuh) stores.
template <class T, bool kMixed>
__global__ void __launch_bounds__(kQuantThreads)
w4ax_norm(u16* hidden, const u16* delta, const u16* __restrict__ weight, uint4* bytes,
          uint2* tokens, const u16* __restrict__ order, const unsigned char* __restrict__ bits,
          int k, int lanes, float turn, float reach, float eps) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(16) unsigned char smem[];
    const Rounding how{order, bits, k, lanes, turn, reach};
    const int units = (k + kUnit - 1) / kUnit;
    const u32 room = smem_address(smem), row = room + kQuantRoom;
    launch_dependents();
    Places<kMixed> places;
    places.load(how, threadIdx.x, threadIdx.x < units);
    NormRow<T> normed(weight, k);
    dependency_wait();
    const u32 sum = over_block(float_bits(normed.add(hidden, delta, blockIdx.x)),
                               room + 2 * kQuantWarps * 4, [](u32 v) {
                                   return float_bits(sum_over(__uint_as_float(v)));
                               });
    normed.finish(__uint_as_float(sum), eps,
                  [&](int chunk, uint4 y) { store_smem_bits_16(row + chunk * 16, y); });
    __syncthreads();
    round_token<T>(how, places, room, row, bytes + static_cast<u64>(blockIdx.x) * units,
                   tokens + blockIdx.x, [&](int at) { return load_smem_16(row + at * 2); });
#endif
}

}  // namespace billfish
