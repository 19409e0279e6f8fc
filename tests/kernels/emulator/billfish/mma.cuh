// mma.m16n8k16 over the 32 fibers of a warp, and the 16-bit types, on a CPU.
#pragma once

#include "../half.h"
#include "billfish/ptx.cuh"

namespace billfish {

// PTX's fragments, element by element: row or column of what a lane holds.
inline int a_row(int lane, int e) { return lane / 4 + 8 * (e / 2 % 2); }
inline int a_col(int lane, int e) { return lane % 4 * 2 + e % 2 + 8 * (e / 4); }
inline int b_row(int lane, int e) { return lane % 4 * 2 + e % 2 + 8 * (e / 2); }

template <class T>
inline void product(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, bool zero) {
    Warp& warp = current->warp();
    const int lane = current->thread % 32;
    for (int e = 0; e < 8; ++e)
        warp.a[a_row(lane, e)][a_col(lane, e)] = T::to_float(a[e / 2] >> (e % 2 * 16) & 0xffff);
    const u32 b[2] = {b0, b1};
    for (int e = 0; e < 4; ++e)
        warp.b[b_row(lane, e)][lane / 4] = T::to_float(b[e / 2] >> (e % 2 * 16) & 0xffff);
    meet(warp.gate, 32);
    for (int i = 0; i < 4; ++i) {
        double sum = zero ? 0 : d[i];
        for (int k = 0; k < 16; ++k)
            sum += (double)warp.a[lane / 4 + i / 2 * 8][k] * warp.b[k][lane % 4 * 2 + i % 2];
        d[i] = (float)sum;
    }
    meet(warp.gate, 32);
}

// Of a 2:4 sparse row (0 to 15) of A the sum over 32 inputs: `kept` its 16 numbers, b the dense inputs of a
// column. Two numbers of four inputs each; where they lie stands in the metadata of lanes 4 (row % 8) + 2 odd (the
// selector) and the next, of 16 inputs each: 4 bits for each four, the lower half of the word for rows 0 to 7.
template <class B>
inline double sparse_sum(const float* kept, const u32* meta, int row, bool odd, const B& b) {
    double sum = 0;
    for (int four = 0; four < 8; ++four) {
        const u32 word = meta[row % 8 * 4 + odd * 2 + four / 4];
        const u32 low = word >> (row / 8 * 16 + four % 4 * 4) & 3, high = word >> (row / 8 * 16 + four % 4 * 4 + 2) & 3;
        demand(low < high, "ordered metadata");
        sum += (double)kept[2 * four] * b(4 * four + low) + (double)kept[2 * four + 1] * b(4 * four + high);
    }
    return sum;
}

// mma.sp.m16n8k32: A's registers as those of 16 dense inputs, B's inputs 8 i + 2 (lane % 4) and the next in b[i].
template <class T>
inline void sparse_product(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4], u32 meta, bool odd) {
    Warp& warp = current->warp();
    const int lane = current->thread % 32;
    for (int e = 0; e < 8; ++e) {
        warp.a[a_row(lane, e)][a_col(lane, e)] = T::to_float(a[e / 2] >> (e % 2 * 16) & 0xffff);
        warp.sparse_b[e / 2 * 8 + lane % 4 * 2 + e % 2][lane / 4] = T::to_float(b[e / 2] >> (e % 2 * 16) & 0xffff);
    }
    warp.meta[lane] = meta;
    meet(warp.gate, 32);
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        d[i] = (float)(d[i] + sparse_sum(warp.a[row], warp.meta, row, odd, [&](int k) { return warp.sparse_b[k][column]; }));
    }
    meet(warp.gate, 32);
}

// a b + c for both halves, rounded once.
template <class T>
inline u32 each(u32 a, u32 b, u32 c) {
    u32 v = 0;
    for (int i = 0; i < 32; i += 16) {
        const double product = (double)T::to_float(a >> i & 0xffff) * T::to_float(b >> i & 0xffff);
        v |= (u32)T::from_float(product + T::to_float(c >> i & 0xffff)) << i;
    }
    return v;
}

struct Half {
    static float to_float(u32 bits) { return half_to_float(bits); }
    static u16 from_float(float v) { return float_to_half(v); }
    static u32 pack(float low, float high) { return from_float(low) | (u32)from_float(high) << 16; }
    static u32 add(u32 a, u32 b) { return each<Half>(a, 0x3c003c00u, b); }
    static u32 mul(u32 a, u32 b) { return each<Half>(a, b, 0); }
    static u32 fma(u32 a, u32 b, u32 c) { return each<Half>(a, b, c); }
    static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { product<Half>(d, a, b0, b1, false); }
    static void mma_first(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { product<Half>(d, a, b0, b1, true); }
    static void mma_sparse(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4], u32 meta, bool odd) {
        sparse_product<Half>(d, a, b, meta, odd);
    }
};

struct Bfloat {
    static float to_float(u32 bits) { return __uint_as_float(bits << 16); }
    static u16 from_float(float v) {
        u32 bits;
        memcpy(&bits, &v, 4);
        if (v != v) return 0x7fff;
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
    static u32 pack(float low, float high) { return from_float(low) | (u32)from_float(high) << 16; }
    static u32 add(u32 a, u32 b) { return each<Bfloat>(a, 0x3f803f80u, b); }
    static u32 mul(u32 a, u32 b) { return each<Bfloat>(a, b, 0); }
    static u32 fma(u32 a, u32 b, u32 c) { return each<Bfloat>(a, b, c); }
    static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { product<Bfloat>(d, a, b0, b1, false); }
    static void mma_first(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { product<Bfloat>(d, a, b0, b1, true); }
    static void mma_sparse(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4], u32 meta, bool odd) {
        sparse_product<Bfloat>(d, a, b, meta, odd);
    }
};

template <class T, class S>
inline u32 convert(u32 bits) { return T::from_float(S::to_float(bits)); }

// PTX's m16n8k32 of bytes: four neighbours along k in a register.
inline void mma_bytes(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    Warp& warp = current->warp();
    const int lane = current->thread % 32;
    const u32 b[2] = {b0, b1};
    for (int e = 0; e < 16; ++e)
        warp.bytes_a[lane / 4 + e / 4 % 2 * 8][e / 8 * 16 + lane % 4 * 4 + e % 4] = a[e / 4] >> e % 4 * 8 & 255;
    for (int e = 0; e < 8; ++e)
        warp.bytes_b[e / 4 * 16 + lane % 4 * 4 + e % 4][lane / 4] = (signed char)(b[e / 4] >> e % 4 * 8);
    meet(warp.gate, 32);
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 32; ++k)
            d[i] += (u32)(warp.bytes_a[lane / 4 + i / 2 * 8][k] * warp.bytes_b[k][lane % 4 * 2 + i % 2]);
    meet(warp.gate, 32);
}

// PTX's m16n8k64 of 4 bits: eight neighbours along k in a register.
inline void mma_nibbles(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    Warp& warp = current->warp();
    const int lane = current->thread % 32;
    const u32 b[2] = {b0, b1};
    for (int e = 0; e < 32; ++e)
        warp.nibbles_a[lane / 4 + e / 8 % 2 * 8][e / 16 * 32 + lane % 4 * 8 + e % 8] = a[e / 8] >> e % 8 * 4 & 15;
    for (int e = 0; e < 16; ++e)
        warp.nibbles_b[e / 8 * 32 + lane % 4 * 8 + e % 8][lane / 4] = ((int)(b[e / 8] >> e % 8 * 4 & 15) ^ 8) - 8;
    meet(warp.gate, 32);
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 64; ++k)
            d[i] += (u32)(warp.nibbles_a[lane / 4 + i / 2 * 8][k] * warp.nibbles_b[k][lane % 4 * 2 + i % 2]);
    meet(warp.gate, 32);
}

}  // namespace billfish
