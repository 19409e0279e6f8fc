// One token's heads: RMS norm (Qwen3), RoPE, and K and V as a page of the cache has them.
// engine/cuda/pool.py describes the records and is the oracle of every byte.
//
// Lane l of a warp has channels 4l .. 4l + 3 of a head of Q or K; RoPE's partner is in another.
// 16-bit numbers are multiplied and added in fp32 and rounded where transformers rounds: ptxas may
// fuse mul.f16x2 and add.f16x2 into an fma, which rounds once.
#pragma once

#include "billfish/page.cuh"
#include "billfish/warp.cuh"

namespace billfish {

// -- norm and RoPE

// RoPE of both numbers of a word, rounded after each product and after the sum.
template <class T>
BILLFISH_DEVICE u32 rotate(u32 x, u32 cos, u32 y, u32 sin) {
    const u32 a = T::pack(T::to_float(x) * T::to_float(cos),
                          T::to_float(x >> 16) * T::to_float(cos >> 16));
    const u32 b = T::pack(T::to_float(y) * T::to_float(sin),
                          T::to_float(y >> 16) * T::to_float(sin >> 16));
    return T::pack(T::to_float(a) + T::to_float(b), T::to_float(a >> 16) + T::to_float(b >> 16));
}

// A lane's part of it: the first `rotary` / 8 lanes have the numbers of RoPE's first half, as many
// after them those of the second.
struct RopeLane {
    int angle, partner;  // whose cosines, by fours; the lane that has the other half
    u32 sign;            // of sines
    bool rotated;
    BILLFISH_DEVICE RopeLane(int l, int rotary) {
        const int half = rotary / 8;
        rotated = l < 2 * half;
        angle = l < half ? l : l - half;
        partner = !rotated ? l : l < half ? l + half : angle;
        sign = l < half ? 0x80008000u : 0;
    }
    template <class T>
    BILLFISH_DEVICE uint2 turn(uint2 v, uint2 cos, uint2 sin) const {
        const uint2 y = {shuffle(v.x, partner), shuffle(v.y, partner)};
        if (!rotated) return v;
        return {rotate<T>(v.x, cos.x, y.x, sin.x ^ sign), rotate<T>(v.y, cos.y, y.y, sin.y ^ sign)};
    }
};

template <class T>
BILLFISH_DEVICE void unpack(uint2 v, float (&x)[4]) {
    x[0] = T::to_float(v.x), x[1] = T::to_float(v.x >> 16);
    x[2] = T::to_float(v.y), x[3] = T::to_float(v.y >> 16);
}

// RMS norm of one head, four numbers a lane; rounded like rms_norm.
template <class T, int kLanes>
BILLFISH_DEVICE uint2 head_norm(uint2 v, uint2 weight, float eps) {
    float x[4];
    unpack<T>(v, x);
    const float sum = sum_over<kLanes>((x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3]));
    const float scale = rsqrt_fast(sum / (4 * kLanes) + eps);
    return {T::mul(weight.x, T::pack(x[0] * scale, x[1] * scale)),
            T::mul(weight.y, T::pack(x[2] * scale, x[3] * scale))};
}

// -- codes, as in kv/codes.py: low is the minimum, the step is rounded up, a NaN makes its head NaN

BILLFISH_DEVICE float clamped(float v, float limit) {  // NaN stays
    return v > limit ? limit : v < -limit ? -limit : v;
}

BILLFISH_DEVICE float not_a_number() { return __uint_as_float(0x7fc00000); }

// step | low << 16
template <class T, int kBits>
BILLFISH_DEVICE u32 grid_of(float lowest, float highest) {
    const u32 low_bits = T::from_float(lowest);
    const float wanted = (highest - T::to_float(low_bits)) / ((1 << kBits) - 1);
    u32 step_bits = T::from_float(wanted);
    step_bits += T::to_float(step_bits) < wanted;
    return step_bits | low_bits << 16;
}

// The code of (number - low) / step. fmaxf turns NaN, which 0 / 0 is, too, into 0.
template <int kBits>
BILLFISH_DEVICE float code_of(float steps) {
    return fminf(fmaxf(rintf(steps), 0), (1 << kBits) - 1);
}

// Codes of a head's numbers, four a lane; returns their grid.
template <class T, int kBits, int kLanes>
BILLFISH_DEVICE u32 encode(float (&x)[4], u32 (&codes)[4], float limit) {
    bool strange = false;
#pragma unroll
    for (float& v : x) {
        v = clamped(v, limit);
        strange |= v != v;
    }
    float lowest = min_over<kLanes>(fminf(fminf(x[0], x[1]), fminf(x[2], x[3])));
    const float highest = max_over<kLanes>(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])));
    if (ballot(strange)) lowest = not_a_number();
    const u32 grid = grid_of<T, kBits>(lowest, highest);
    const float step = T::to_float(grid & 0xffff), low = T::to_float(grid >> 16);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        codes[i] = static_cast<u32>(code_of<kBits>((x[i] - low) / step));
    return grid;
}

// -- where they go

// Which unit of F::kBits bits holds a number of token t: pool.places, of K or of V.
template <class F, int kHeadDim>
struct Places : PageRecord<F, kHeadDim> {
    static constexpr int kBits = F::kBits;
    static BILLFISH_DEVICE int k(int t, int channel) {
        const int chunk = t * kHeadDim + channel / 8 % 4 * (kHeadDim / 4) + channel / 32 * 8;
        const int i = channel % 8;
        if constexpr (kBits == 4) return chunk + i / 2 + i % 2 * 4;
        if constexpr (kBits == 8) return chunk + i / 4 * 4 + i % 4 / 2 + i % 2 * 2;
        return t * kHeadDim + (channel / 8 ^ t % 2 * 4) * 8 + i;
    }
    static BILLFISH_DEVICE int v(int t, int channel) {
        const int group = t / 8 * (8 * kHeadDim);
        const int lane = channel % 8 * 4 + t % 8 / 2, n = channel / 8, odd = t % 2;
        if constexpr (kBits == 4)
            return group + lane * (kHeadDim / 4) + n / 4 * 8 + odd * 4 + n % 4;
        if constexpr (kBits == 8)
            return group + n / 8 * 512 + lane * 16 + n / 2 % 4 * 4 + odd * 2 + n % 2;
        return group + n / 4 * 256 + lane * 8 + n % 4 * 2 + odd;
    }
};

// K, V and grids of a page: the record itself, or, At = u32, what a ring has of it in shared
// memory, as if the whole page were there.
template <class At>
struct Parts {
    At k, v, grids;
};

BILLFISH_DEVICE void put_2(unsigned char* to, u32 v) { *reinterpret_cast<u16*>(to) = v; }
BILLFISH_DEVICE void put_4(unsigned char* to, u32 v) { *reinterpret_cast<u32*>(to) = v; }
BILLFISH_DEVICE void put_8(unsigned char* to, uint2 v) { *reinterpret_cast<uint2*>(to) = v; }
BILLFISH_DEVICE void put_2(u32 to, u32 v) { store_smem_2(to, v); }
BILLFISH_DEVICE void put_4(u32 to, u32 v) { store_smem_4(to, v); }
BILLFISH_DEVICE void put_8(u32 to, uint2 v) { store_smem_4(to, v.x), store_smem_4(to + 4, v.y); }

// Token t's K, to each of `to`: lane l's numbers are channels 4l .. 4l + 3. Lanes past kHeadDim / 4
// repeat others.
template <class T, class R, int kLanes, class... At>
BILLFISH_DEVICE void store_k(int t, int lane, float (&x)[4], float limit, const Parts<At>&... to) {
    const int l = lane % kLanes, first = R::k(t, 4 * l);
    if constexpr (R::kBits == 16) {
        const uint2 bits = {T::pack(x[0], x[1]), T::pack(x[2], x[3])};
        if (lane < kLanes) (put_8(to.k + first * 2, bits), ...);
    } else {
        u32 code[4], word = 0;
        const u32 grid = encode<T, R::kBits, kLanes>(x, code, limit);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            word |= code[i] << R::k(t, 4 * l + i) % (32 / R::kBits) * R::kBits;
        if constexpr (R::kBits == 4) word |= shuffle_xor(word, 1);
        if (lane < kLanes) (put_4(to.k + first / (32 / R::kBits) * 4, word), ...);
        if (lane == 0) (put_4(to.grids + t * 8, grid), ...);
    }
}

// The channel of lane l's i-th number of V: l % 8 + 8 (l / 8 * 4 + i).
BILLFISH_DEVICE int channel_of_v(int l, int i) { return l % 8 + 8 * (l / 8 * 4 + i); }

template <class T, class R, int kLanes, class... At>
BILLFISH_DEVICE void store_v(int t, int lane, float (&x)[4], float limit, const Parts<At>&... to) {
    constexpr int kPer = 16 / R::kBits;  // codes in a token's halfword
    u32 code[4];
    if constexpr (R::kBits == 16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) code[i] = T::from_float(x[i]);
    } else {
        const u32 grid = encode<T, R::kBits, kLanes>(x, code, limit);
        if (lane == 0) (put_4(to.grids + t * 8 + 4, grid), ...);
    }
    if (lane >= kLanes) return;
#pragma unroll
    for (int i = 0; i < 4; i += kPer) {
        u32 half = 0;
#pragma unroll
        for (int j = 0; j < kPer; ++j) half |= code[i + j] << j * R::kBits;
        const int at = R::v(t, channel_of_v(lane, i)) / kPer * 2;
        (put_2(to.v + at, half), ...);
    }
}

}  // namespace billfish
