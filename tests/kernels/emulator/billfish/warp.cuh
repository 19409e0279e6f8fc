// The wrappers of kernels/include/billfish/warp.cuh on a CPU.
#pragma once

#include "billfish/ptx.cuh"

namespace billfish {

inline u32 shuffle(u32 v, int lane) {
    Warp& warp = current->warp();
    warp.rows[current->thread % 32] = v;
    meet(warp.gate, 32);
    const u32 got = warp.rows[lane & 31];
    meet(warp.gate, 32);
    return got;
}
inline u32 bits_of(float v) { u32 b; memcpy(&b, &v, 4); return b; }
inline float shuffle(float v, int lane) { return __uint_as_float(shuffle(bits_of(v), lane)); }
inline u32 shuffle_xor(u32 v, int mask) { return shuffle(v, (current->thread % 32) ^ mask); }
inline float shuffle_xor(float v, int mask) { return shuffle(v, (current->thread % 32) ^ mask); }
inline u32 kept(u32 number, u32 lane) { return shuffle(number, lane); }
inline u32 ballot(bool yes) {
    u32 all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= (shuffle((u32)yes, lane) & 1) << lane;
    return all;
}
inline bool any(bool yes) { return ballot(yes) != 0; }
inline u32 alike(u32 v) {
    u32 all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= (u32)(shuffle(v, lane) == v) << lane;
    return all;
}
inline u32 sum_up_to(u32 v, int lane) {
    u32 sum = 0;
    for (int i = 0; i < 32; ++i) { const u32 other = shuffle(v, i); if (i <= lane) sum += other; }
    return sum;
}
inline uint4 load_table_16(const uint4* p) { return *p; }
inline u32 float_bits(float v) { return bits_of(v); }
inline uint4 load_global_bits_16(const void* p) { uint4 v; memcpy(&v, p, 16); return v; }
inline u32 load_global_bits_4(const void* p) { u32 v; memcpy(&v, p, 4); return v; }
template <int kSpan = 32, int kStep = 1>
inline float sum_over(float v) {
    for (int mask = kSpan / 2; mask >= kStep; mask /= 2) v += shuffle_xor(v, mask);
    return v;
}
template <int kSpan = 32, int kStep = 1>
inline float max_over(float v) {
    for (int mask = kSpan / 2; mask >= kStep; mask /= 2) v = fmaxf(v, shuffle_xor(v, mask));
    return v;
}
template <int kSpan = 32, int kStep = 1>
inline float min_over(float v) {
    for (int mask = kSpan / 2; mask >= kStep; mask /= 2) v = fminf(v, shuffle_xor(v, mask));
    return v;
}
inline u32 max_over_warp(u32 v) {
    for (int mask = 16; mask; mask /= 2) v = max(v, shuffle_xor(v, mask));
    return v;
}
inline u32 sum_over_warp(u32 v) {
    for (int mask = 16; mask; mask /= 2) v += shuffle_xor(v, mask);
    return v;
}
inline u32 turn_matrix(u32 v) {
    const int lane = current->thread % 32;
    u32 got = 0;
    for (int j = 0; j < 2; ++j) {  // element (row lane / 4, column lane % 4 * 2 + j) of the turned one
        const int row = lane % 4 * 2 + j, column = lane / 4;
        const u32 word = shuffle(v, row * 4 + column / 2);
        got |= (word >> column % 2 * 16 & 0xffff) << 16 * j;
    }
    return got;
}
inline float exp2_fast(float x) { return exp2f(x); }
inline float log2_fast(float x) { return log2f(x); }
inline float reciprocal_fast(float x) { return 1 / x; }
inline float rsqrt_fast(float x) { return 1 / sqrtf(x); }
inline u32 add_release(u32* p, u32 v) { yield(); const u32 before = *p; *p += v; return before; }
inline void fence_gpu() { yield(); }
inline void add_shared(u32* p, u32 v) { *p += v; }
inline void add_shared(u64* p, u64 v) { *p += v; }
inline int __clz(u32 v) { return v ? __builtin_clz(v) : 32; }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline void store_smem_bits_16(u32 a, uint4 v) { write(smem_at(a, 16), &v, 16); }
inline float4 load_smem_floats(u32 a) { return read<float4>(a); }

}  // namespace billfish
