// Warp shuffles and reductions, the approximate functions of the special function unit, atomics.
#pragma once

#include "billfish/ptx.cuh"

namespace billfish {

// The value of lane `lane ^ mask`; all 32 lanes take part.
BILLFISH_DEVICE u32 shuffle_xor(u32 v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
BILLFISH_DEVICE float shuffle_xor(float v, int mask) { return __shfl_xor_sync(~0u, v, mask); }

// The value of one lane.
BILLFISH_DEVICE u32 shuffle(u32 v, int lane) { return __shfl_sync(~0u, v, lane); }
BILLFISH_DEVICE float shuffle(float v, int lane) { return __shfl_sync(~0u, v, lane); }

// A number of a lane (or of a warp: lane 0's) such that ptxas does not know what it was computed
// from: it would compute it again in every stage.
BILLFISH_DEVICE u32 kept(u32 number, u32 lane) { return shuffle(number, lane); }

// A bit for each lane whose `yes` is true.
BILLFISH_DEVICE u32 ballot(bool yes) { return __ballot_sync(~0u, yes); }
BILLFISH_DEVICE bool any(bool yes) { return __any_sync(~0u, yes); }

// A bit for each lane with the same number.
BILLFISH_DEVICE u32 alike(u32 v) { return __match_any_sync(~0u, v); }

// The sum of the numbers of lanes 0 to `lane`, which is this one.
BILLFISH_DEVICE u32 sum_up_to(u32 v, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 before = __shfl_up_sync(~0u, v, step);
        if (lane >= step) v += before;
    }
    return v;
}

BILLFISH_DEVICE u32 float_bits(float v) { return __float_as_uint(v); }

// What an earlier kernel may just have written: not through the read-only path.
BILLFISH_DEVICE uint4 load_global_bits_16(const void* pointer) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer) : "memory");
    return v;
}

BILLFISH_DEVICE u32 load_global_bits_4(const void* pointer) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(pointer) : "memory");
    return v;
}

// 16 bytes that were written before this kernel was launched: through the read-only path.
BILLFISH_DEVICE uint4 load_table_16(const uint4* pointer) { return __ldg(pointer); }

// Butterfly over lanes that differ in the bits kStep .. kSpan / 2; all of them get the result.
template <int kSpan = 32, int kStep = 1>
BILLFISH_DEVICE float sum_over(float v) {
#pragma unroll
    for (int mask = kSpan / 2; mask >= kStep; mask /= 2) v += shuffle_xor(v, mask);
    return v;
}
template <int kSpan = 32, int kStep = 1>
BILLFISH_DEVICE float max_over(float v) {
#pragma unroll
    for (int mask = kSpan / 2; mask >= kStep; mask /= 2) v = fmaxf(v, shuffle_xor(v, mask));
    return v;
}
template <int kSpan = 32, int kStep = 1>
BILLFISH_DEVICE float min_over(float v) {
#pragma unroll
    for (int mask = kSpan / 2; mask >= kStep; mask /= 2) v = fminf(v, shuffle_xor(v, mask));
    return v;
}

// Of all 32 lanes, in one instruction: whole numbers alone.
BILLFISH_DEVICE u32 max_over_warp(u32 v) {
    u32 most;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(v));
    return most;
}
BILLFISH_DEVICE u32 sum_over_warp(u32 v) {
    u32 sum;
    asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(v));
    return sum;
}

// Transposes an 8 x 8 matrix of 16-bit numbers, lane l holding two neighbours of row l / 4: sums of
// one product become the B fragment of the next.
BILLFISH_DEVICE u32 turn_matrix(u32 v) {
    u32 turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(v));
    return turned;
}

// 2^x, 2 units in the last place; exactly 0 for -inf.
BILLFISH_DEVICE float exp2_fast(float x) {
    float v;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
    return v;
}
// log2 x, absolute error 2^-22; -inf for 0.
BILLFISH_DEVICE float log2_fast(float x) {
    float v;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
    return v;
}
BILLFISH_DEVICE float reciprocal_fast(float x) {
    float v;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
    return v;
}
BILLFISH_DEVICE float rsqrt_fast(float x) {
    float v;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
    return v;
}

// Adds and returns the old value, with release semantics. The acquire side is a fence_gpu after the
// result has been read: acq_rel in one instruction would wait for the result at once.
BILLFISH_DEVICE u32 add_release(u32* pointer, u32 value) {
    u32 before;
    asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(pointer), "r"(value) : "memory");
    return before;
}
BILLFISH_DEVICE void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

BILLFISH_DEVICE void add_shared(u32* pointer, u32 value) { atomicAdd(pointer, value); }
BILLFISH_DEVICE void add_shared(u64* pointer, u64 value) { atomicAdd(pointer, value); }

BILLFISH_DEVICE void store_smem_bits_16(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w) : "memory");
}
BILLFISH_DEVICE float4 load_smem_floats(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
    return v;
}

}  // namespace billfish
