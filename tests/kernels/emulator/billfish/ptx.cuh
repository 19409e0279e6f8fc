// The wrappers of kernels/include/billfish/ptx.cuh on a CPU: the emulator's half of the bargain.
// Every thread is a fiber; copies, remote stores and arrivals land when the scheduler likes.
#pragma once

#include "../machine.h"

namespace billfish {

extern unsigned char smem[];

#ifdef STATIC_SMEM
inline u32 smem_address(const void* p) { return static_address(p); }
#else
inline u32 smem_address(const void*) { return kSmemBase; }
#endif

inline uint4 load_smem_16(u32 a) { return read<uint4>(a); }
inline uint2 load_smem_8(u32 a) { return read<uint2>(a); }
inline u32 load_smem_4(u32 a) { return read<u32>(a); }
inline u32 load_smem_2(u32 a) { return read<u16>(a); }
inline u32 load_smem_1(u32 a) { return read<unsigned char>(a); }
inline void load_matrices(u32 (&v)[4], u32 a) {
    Warp& warp = current->warp();
    const int lane = current->thread % 32;
    warp.rows[lane] = a;
    meet(warp.gate, 32);
    for (int i = 0; i < 4; ++i) {
        const u32 row = warp.rows[8 * i + lane / 4];
        demand(row % 16 == 0, "ldmatrix");
        v[i] = read<u32>(row + lane % 4 * 4);
    }
    meet(warp.gate, 32);
}
inline void store_matrices_turned(u32 a, const u32 (&v)[4]) {
    Warp& warp = current->warp();
    const int lane = current->thread % 32;
    warp.rows[lane] = a;
    meet(warp.gate, 32);
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 2; ++j) {
            const u16 one = v[i] >> 16 * j;
            const u32 line = warp.rows[8 * i + lane % 4 * 2 + j];
            demand(line % 16 == 0, "stmatrix");
            write(smem_at(line + lane / 4 * 2, 2), &one, 2);
        }
    meet(warp.gate, 32);
}
inline float load_smem_float(u32 a) { return read<float>(a); }
inline void store_smem_2(u32 to, u32 v) {
    const u16 lower = v;
    write(smem_at(to, 2), &lower, 2);
}
inline void store_smem_4(u32 to, u32 v) { write(smem_at(to, 4), &v, 4); }
inline void add_smem_4(u32 to, u32 v) { store_smem_4(to, read<u32>(to) + v); }
inline void store_smem_float(u32 to, float v) { write(smem_at(to, 4), &v, 4); }
inline void store_smem_8(u32 to, float a, float b) {
    const float v[2] = {a, b};
    write(smem_at(to, 8), v, 8);
}
template <class V>
inline void store_smem_16(u32 a, const V (&v)[4]) { write(smem_at(a, 16), v, 16); }

template <int kBarrier, int kThreads>
inline void sync_some() { meet(current->block->named[kBarrier], kThreads); }
template <int kThreads>
inline void sync_pair(int barrier) { meet(current->block->named[barrier], kThreads); }

inline u64 evict_first_policy() { return 7; }
inline u64 keep_policy() { return 7; }
inline void copy_async_16(u32 to, const void* from, u32 bytes = 16) { begin_copy(to, from, bytes); }
inline void copy_async_16(u32 to, const void* from, u64 policy) {
    demand(policy == 7, "a policy that is none");
    begin_copy(to, from, 16);
}
inline void commit_copies() { commit_group(); }
template <int kPending>
inline void wait_copies() { wait_groups(kPending); }

inline u32 load_acquire(const u32* p) { yield(); return *p; }
inline u32 load_global_4(const u32* p) { return *p; }
inline uint2 load_global_8(const u16* p) { return *(const uint2*)p; }
inline float4 load_global_16(const float* p) { return {p[0], p[1], p[2], p[3]}; }
inline uint4 load_global_16(const u32* p) { return {p[0], p[1], p[2], p[3]}; }
template <class V>
inline void store_global_16(V* p, V a, V b, V c, V d) { p[0] = a, p[1] = b, p[2] = c, p[3] = d; }
inline void store_release(u32* p, u32 v) { *p = v; yield(); }

inline void barrier_init(u32 b, u32 arrivals) { barrier_at(b) = Barrier{(int)arrivals, (int)arrivals}; }
inline void barrier_init_fence() {}
inline void fence_copies() {}
inline u32 thread_index() { return threadIdx.x; }
inline u32 kept(u32 v) { return v; }
inline u32 lower_twice(u32 v) { return (v & 0xffff) * 0x10001u; }
inline u32 upper_twice(u32 v) { return (v >> 16) * 0x10001u; }
inline u32 pick_bytes(u32 a, u32 b, u32 which) {
    const unsigned long long both = (unsigned long long)b << 32 | a;
    u32 made = 0;
    for (int i = 0; i < 4; ++i) made |= (u32)(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
    return made;
}
inline u32 and_or(u32 a, u32 mask, u32 bits) { return (a & mask) | bits; }

inline void barrier_arrive(u32 b) { barrier_at(b).arrive(); }
inline void barrier_arrive_after(u32 b, float, bool mine) {
    if (mine) barrier_at(b).arrive();
}
inline void barrier_arrive_expect(u32 b, u32 bytes) { barrier_at(b).arrive(bytes); }
inline void barrier_arrive_after_copies(u32 b) { arrive_after_copies(barrier_at(b)); }
inline bool barrier_try_wait(u32 b, u32 parity) { return barrier_at(b).done(parity); }
inline void barrier_wait(u32 b, u32 parity) {
    const Barrier& barrier = barrier_at(b);
    while (!barrier.done(parity)) wait_for_change(barrier.phase);
}
inline void copy_bulk(u32 to, const void* from, u32 bytes, u32 b, u64 policy) {
    demand(policy == 7 && bytes % 16 == 0 && to % 16 == 0 && (u64)from % 16 == 0, "bulk copy");
    begin_bulk(to, from, bytes, barrier_at(b));
}

inline u32 in_block(u32 a, u32 rank) { return (a & 0xffffff) | (rank + 1) << 24; }

struct TensorMap {  // rows of `columns` 16-bit numbers, boxes of 64 columns, swizzle of 128 bytes
    const u16* first;
    int rows, columns, box;
};
inline void prefetch_map(const TensorMap&) {}
inline void copy_tensor(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
    demand(to % 1024 == 0, "tensor copy");
    begin_tensor(to, map.first, map.rows, map.columns, map.box, column, row, barrier_at(barrier));
}

inline void copy_tensor_twice(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
    for (u32 rank = 0; rank < 2; ++rank)
        begin_tensor(in_block(to, rank), map.first, map.rows, map.columns, map.box, column, row,
                     barrier_at(in_block(barrier, rank)));
}
inline void barrier_arrive_in(u32 b) { barrier_at(b).arrive(); }

inline u32 cluster_rank() { return blockIdx.x % cluster_size; }
inline u32 cluster_index() { return blockIdx.x / cluster_size; }
inline u32 cluster_count() { return gridDim.x / cluster_size; }
inline void cluster_arrive() { arrive_in_cluster(); }
inline void cluster_arrive_release() { arrive_in_cluster(); }
inline void cluster_wait() { wait_for_cluster(); }
inline uint4 load_cluster_16(u32 address) { return read<uint4>(address); }
inline void store_remote(u32 to, float a, float b, u32 barrier) {
    begin_remote(to, a, b, barrier_at(barrier));
}
inline void store_remote(u32 to, float a, float b, float c, float d, u32 barrier) {
    begin_remote(to, a, b, barrier_at(barrier));
    begin_remote(to + 8, c, d, barrier_at(barrier));
}

inline u64 nanoseconds() { static u64 now = 0; return now += 100; }
inline void sleep_nanoseconds(u32) { yield(); }
inline void launch_dependents() {}
inline void dependency_wait() {
    yield();
    all_written();
}

}  // namespace billfish
