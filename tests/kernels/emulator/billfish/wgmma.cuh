// wgmma over the 128 fibers of a warpgroup, at once: what may be touched meanwhile is not judged here.
#pragma once

#include "billfish/mma.cuh"

namespace billfish {

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
inline void wgmma_wait() {}
template <int kRegisters>
inline void give_registers() {}
template <int kRegisters>
inline void take_registers() {}

inline u64 x_descriptor(u32 address) {
    demand(address % 1024 == 0, "swizzle of 128 bytes");
    return address >> 4;
}

// PTX's canonical layout: 8 tokens in 1024 bytes, bits 4-6 of an address XORed with bits 7-9.
inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

template <class T, int kSums>
inline void wgmma(T, float (&d)[kSums], const u32 (&a)[4], u64 b) {
    Group& group = current->block->groups[current->thread / 128];
    const int lane = current->thread % 32, row = current->thread % 128 / 32 * 16 + lane / 4;
    for (int e = 0; e < 8; ++e)
        group.a[row + e / 2 % 2 * 8][a_col(lane, e)] = T::to_float(a[e / 2] >> (e % 2 * 16) & 0xffff);
    for (int i = current->thread % 128; i < kSums * 2 * 16; i += 128) {  // tokens x k
        const u32 at = ((u32)b << 4) + i / 16 * 128 + i % 16 * 2;
        group.b[i / 16][i % 16] = T::to_float(read<u16>(swizzled(at)));
    }
    meet(group.gate, 128);
    for (int i = 0; i < kSums; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        double sum = d[i];
        for (int k = 0; k < 16; ++k)
            sum += (double)group.a[row + i / 2 % 2 * 8][k] * group.b[token][k];
        d[i] = (float)sum;
    }
    meet(group.gate, 128);
}

// 2:4 sparse, 32 inputs: a warp's fragment and metadata as mma.sp's.
template <class T, int kSums>
inline void wgmma_sparse(T, float (&d)[kSums], const u32 (&a)[4], u64 b, u32 meta, bool odd) {
    Group& group = current->block->groups[current->thread / 128];
    const int lane = current->thread % 32, warp = current->thread % 128 / 32, row = warp * 16 + lane / 4;
    for (int e = 0; e < 8; ++e)
        group.a[row + e / 2 % 2 * 8][a_col(lane, e)] = T::to_float(a[e / 2] >> (e % 2 * 16) & 0xffff);
    group.meta[warp][lane] = meta;
    for (int i = current->thread % 128; i < kSums * 2 * 32; i += 128) {  // tokens x k
        const u32 at = ((u32)b << 4) + i / 32 * 128 + i % 32 * 2;
        group.sparse_b[i / 32][i % 32] = T::to_float(read<u16>(swizzled(at)));
    }
    meet(group.gate, 128);
    for (int i = 0; i < kSums; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, lower = i / 2 % 2 * 8;
        d[i] = (float)(d[i] + sparse_sum(group.a[row + lower], group.meta[warp], lane / 4 + lower, odd,
                                         [&](int k) { return group.sparse_b[token][k]; }));
    }
    meet(group.gate, 128);
}

// Bytes, PTX's fragment for k = 32: four neighbours of a row in a register, the next 16 in a[2] and a[3].
template <int kSums>
inline void wgmma_bytes(u32 (&d)[kSums], const u32 (&a)[4], u64 b) {
    Group& group = current->block->groups[current->thread / 128];
    const int lane = current->thread % 32, row = current->thread % 128 / 32 * 16 + lane / 4;
    for (int e = 0; e < 16; ++e)
        group.bytes_a[row + e / 4 % 2 * 8][e / 8 * 16 + lane % 4 * 4 + e % 4] = a[e / 4] >> e % 4 * 8 & 255;
    for (int i = current->thread % 128; i < kSums * 2 * 32; i += 128)  // tokens x k
        group.bytes_b[i / 32][i % 32] = read<signed char>(swizzled(((u32)b << 4) + i / 32 * 128 + i % 32));
    meet(group.gate, 128);
    for (int i = 0; i < kSums; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        for (int k = 0; k < 32; ++k)
            d[i] += (u32)(group.bytes_a[row + i / 2 % 2 * 8][k] * group.bytes_b[token][k]);
    }
    meet(group.gate, 128);
}

}  // namespace billfish
