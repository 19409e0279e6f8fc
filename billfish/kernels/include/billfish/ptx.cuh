// PTX instructions, one wrapper each, and when to use it. No asm outside this folder.
// Raw addresses only: shared memory as a 32-bit address, global memory as a pointer.
#pragma once

namespace billfish {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define BILLFISH_DEVICE __device__ __forceinline__

// -- addresses

// The 32-bit address that all shared-memory instructions below take.
BILLFISH_DEVICE u32 smem_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// threadIdx.x, read again: kept over a long loop it would cost a register.
BILLFISH_DEVICE u32 thread_index() {
    u32 v;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
    return v;
}

// v, from a register: the compiler cannot compute it again instead.
BILLFISH_DEVICE u32 kept(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}

// -- bits

// a & mask | bits in one instruction. With two immediates ptxas needs two, since a LOP3 takes one;
// here it keeps `bits` in a register.
BILLFISH_DEVICE u32 and_or(u32 a, u32 mask, u32 bits) {
    u32 v;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(a), "r"(mask), "r"(bits));
    return v;
}

// Both halves the lower one, or the upper one. As an operand of half2 arithmetic it costs nothing:
// ptxas makes a modifier of it (.H0_H0).
BILLFISH_DEVICE u32 lower_twice(u32 v) {
    u32 d;
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n mov.b32 %0, {l, l};\n}" : "=r"(d) : "r"(v));
    return d;
}
BILLFISH_DEVICE u32 upper_twice(u32 v) {
    u32 d;
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n mov.b32 %0, {h, h};\n}" : "=r"(d) : "r"(v));
    return d;
}

// Bytes of a (0 to 3) and b (4 to 7), a digit of `which` for each.
BILLFISH_DEVICE u32 pick_bytes(u32 a, u32 b, u32 which) { return __byte_perm(a, b, which); }

// -- shared memory

// 16 bytes a thread; no bank conflicts where eight neighbours touch 128 distinct bytes.
BILLFISH_DEVICE uint4 load_smem_16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

BILLFISH_DEVICE uint2 load_smem_8(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}

BILLFISH_DEVICE u32 load_smem_4(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

BILLFISH_DEVICE u32 load_smem_2(u32 address) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
    return v;
}
BILLFISH_DEVICE u32 load_smem_1(u32 address) {
    u16 v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=h"(v) : "r"(address));
    return v;
}

// Four 8 x 8 matrices of 16-bit numbers: lane l gives the address of row l % 8 of matrix l / 8 (16
// bytes) and gets, of each, two neighbours of row l / 4. Two are a B fragment of mma.m16n8k16.
BILLFISH_DEVICE void load_matrices(u32 (&v)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address));
}

BILLFISH_DEVICE float load_smem_float(u32 address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
    return v;
}

BILLFISH_DEVICE void store_smem_2(u32 address, u32 v) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<u16>(v)) : "memory");
}
BILLFISH_DEVICE void store_smem_4(u32 address, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
BILLFISH_DEVICE void store_smem_float(u32 address, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
BILLFISH_DEVICE void store_smem_8(u32 address, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

BILLFISH_DEVICE void store_smem_16(u32 address, const float (&v)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(v[0]), "f"(v[1]),
                 "f"(v[2]), "f"(v[3]) : "memory");
}

BILLFISH_DEVICE void store_smem_16(u32 address, const u32 (&v)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v[0]), "r"(v[1]),
                 "r"(v[2]), "r"(v[3]) : "memory");
}

// Adds; neither reads nor waits.
BILLFISH_DEVICE void add_smem_4(u32 address, u32 v) {
    asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// The reverse, each matrix transposed: lane l gives the address of column l % 8 of matrix l / 8 (16
// bytes) and holds, of each, two neighbours of row l / 4.
BILLFISH_DEVICE void store_matrices_turned(u32 address, const u32 (&v)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
#endif
}

// -- threads of a block

// Synchronises kThreads threads of the block, whole warps; barrier 0 is __syncthreads'.
template <int kBarrier, int kThreads>
BILLFISH_DEVICE void sync_some() {
    asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// The same with a barrier that is a variable.
template <int kThreads>
BILLFISH_DEVICE void sync_pair(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// -- asynchronous copies, sm_80: 16 bytes a thread (MARLIN 3.4)

// For weights that are read once, so that activations stay in L2 (MARLIN 3.4).
BILLFISH_DEVICE u64 evict_first_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// For weights that other blocks read, too.
BILLFISH_DEVICE u64 keep_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Copies 16 bytes, not through L1; with `bytes` < 16 the rest is zero (tails of k).
BILLFISH_DEVICE void copy_async_16(u32 to, const void* from, u32 bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
}

// The same with a cache policy, which sm_90 ignores (bulk copies have policies there): ptxas 13.0
// emits an illegal instruction for a policy with a uniform part of the shared-memory address.
BILLFISH_DEVICE void copy_async_16(u32 to, const void* from, u64 policy) {
#if __CUDA_ARCH__ < 900
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(from), "l"(policy) : "memory");
#else
    copy_async_16(to, from, 16u);
#endif
}

// Closes a group of copies; groups complete in order.
BILLFISH_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's newest groups are in flight.
template <int kPending>
BILLFISH_DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// -- split-K workspaces in global memory

BILLFISH_DEVICE u32 load_acquire(const u32* pointer) {
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(pointer) : "memory");
    return v;
}

// Not through L1, which does not see other SMs' stores.
BILLFISH_DEVICE u32 load_global_4(const u32* pointer) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(pointer) : "memory");
    return v;
}
BILLFISH_DEVICE uint2 load_global_8(const u16* pointer) {
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];"
                 : "=r"(v.x), "=r"(v.y) : "l"(pointer) : "memory");
    return v;
}
BILLFISH_DEVICE float4 load_global_16(const float* pointer) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(pointer) : "memory");
    return v;
}
BILLFISH_DEVICE uint4 load_global_16(const u32* pointer) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer) : "memory");
    return v;
}

BILLFISH_DEVICE void store_global_16(float* pointer, float a, float b, float c, float d) {
    *reinterpret_cast<float4*>(pointer) = make_float4(a, b, c, d);
}
BILLFISH_DEVICE void store_global_16(u32* pointer, u32 a, u32 b, u32 c, u32 d) {
    *reinterpret_cast<uint4*>(pointer) = make_uint4(a, b, c, d);
}

BILLFISH_DEVICE void store_release(u32* pointer, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

#if __CUDA_ARCH__ >= 900

// -- mbarriers, sm_90

BILLFISH_DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster.
BILLFISH_DEVICE void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Only after this thread's loads have been used: see barrier_arrive_after.
BILLFISH_DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// If `mine`, arrives once `seen` is there, a number that depends on all that this thread's warp has
// read. A plain arrive may overtake earlier loads from shared memory (ptxas reorders them), and the
// bulk copy that it permits then changed what they read (LOG 2026-11-15). Whatever the comparison
// yields there is one arrival; the data dependency is what counts.
BILLFISH_DEVICE void barrier_arrive_after(u32 barrier, float seen, bool mine) {
    asm volatile(
        "{\n .reg .pred p, q, r;\n"
        " setp.ne.u32 r, %2, 0;\n"
        " setp.eq.and.f32 p|q, %1, %1, r;\n"
        " @p mbarrier.arrive.shared.b64 _, [%0];\n"
        " @q mbarrier.arrive.shared.b64 _, [%0];\n}"
        ::"r"(barrier), "f"(seen), "r"(static_cast<u32>(mine)) : "memory");
}

// Arrives, and adds the bytes that copies must bring before the phase completes.
BILLFISH_DEVICE void barrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Arrives once all cp.async of this thread so far are complete; barrier_init must count it.
BILLFISH_DEVICE void barrier_arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

BILLFISH_DEVICE bool barrier_try_wait(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}

BILLFISH_DEVICE void barrier_wait(u32 barrier, u32 parity) {
    while (!barrier_try_wait(barrier, parity)) {}
}

// -- bulk copies, sm_90: one thread, kilobytes, completion on an mbarrier

// `bytes` and both addresses are multiples of 16.
BILLFISH_DEVICE void copy_bulk(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// This thread's stores to shared memory come before bulk copies that the block issues later: the
// two take different ways there.
BILLFISH_DEVICE void fence_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// CUtensorMap: a tensor in global memory and the boxes it is copied in, as the driver encodes them.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// A map is fetched when it is first used, unless it was asked for before.
BILLFISH_DEVICE void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The box at `column`, `row`; zeros outside the tensor.
BILLFISH_DEVICE void copy_tensor(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The same into both blocks of a cluster of two, to the same places; each block's barrier counts
// the bytes that it gets.
BILLFISH_DEVICE void copy_tensor_twice(u32 to, const TensorMap& map, int column, int row,
                                       u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(&map), "r"(column),
        "r"(row), "r"(barrier), "h"(static_cast<u16>(3)) : "memory");
}

// -- thread-block clusters, sm_90

BILLFISH_DEVICE u32 cluster_rank() {
    u32 v;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
    return v;
}

BILLFISH_DEVICE u32 cluster_index() {
    u32 v;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(v));
    return v;
}

BILLFISH_DEVICE u32 cluster_count() {
    u32 v;
    asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(v));
    return v;
}

// Relaxed: enough for mbarriers, which have a fence of their own; release costs a membar.gpu.
BILLFISH_DEVICE void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// What this thread has stored in shared memory is then visible to whoever has waited.
BILLFISH_DEVICE void cluster_arrive_release() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

BILLFISH_DEVICE void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same address in the shared memory of block `rank` of this cluster.
BILLFISH_DEVICE u32 in_block(u32 address, u32 rank) {
    u32 v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(v) : "r"(address), "r"(rank));
    return v;
}

// At a barrier of any block of the cluster, an address of in_block or this block's own.
BILLFISH_DEVICE void barrier_arrive_in(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier)
                 : "memory");
}

// From any block of the cluster, at an address of in_block.
BILLFISH_DEVICE uint4 load_cluster_16(u32 address) {
    uint4 v;
    asm volatile("ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

// Stores 8 bytes in another block's shared memory and counts them on its barrier: needs no fence.
BILLFISH_DEVICE void store_remote(u32 to, float a, float b, u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];"
        ::"r"(to), "f"(a), "f"(b), "r"(barrier) : "memory");
}

// The same of 16 bytes.
BILLFISH_DEVICE void store_remote(u32 to, float a, float b, float c, float d, u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4},"
        " [%5];" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier) : "memory");
}

// -- time

BILLFISH_DEVICE u64 nanoseconds() {
    u64 v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
    return v;
}

BILLFISH_DEVICE void sleep_nanoseconds(u32 about) {
    asm volatile("nanosleep.u32 %0;" ::"r"(about));
}

// -- programmatic dependent launch, sm_90

// Lets the next kernel of the stream start; its dependency_wait still waits for this one's end.
BILLFISH_DEVICE void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Returns when all earlier kernels have ended and their stores are visible. Not needed for weights.
BILLFISH_DEVICE void dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

#endif

}  // namespace billfish
