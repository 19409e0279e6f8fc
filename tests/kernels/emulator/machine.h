// A GPU of fibers: blocks, warps, shared memory with bounds, mbarriers, and memory that takes its time.
// A thread runs until it waits; who goes on, and which copy lands next, is drawn by lot.
#pragma once

// What is not a template is in machine.cpp, and this file is precompiled: every program is compiled anew, and
// was in two thirds of its time this.
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define BILLFISH_DEVICE inline
#define __CUDA_ARCH__ 900
#define __CUDA_ARCH_FEAT_SM90_ALL 1
#define __global__
#define __shared__
#define __grid_constant__
#define __align__(x)
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __syncthreads() meet(current->block->everybody, (int)current->block->threads)
#define __syncwarp() meet(current->warp().gate, 32)

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Dim { u32 x, y; };
inline thread_local Dim threadIdx, blockIdx, blockDim, gridDim;
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
inline float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline int __float2int_rn(float v) {  // saturates; NaN is 0
    if (v != v) return 0;
    return v >= 0x1p31f ? 0x7fffffff : v <= -0x1p31f ? -0x7fffffff - 1 : (int)lrintf(v);
}
inline int __float2int_ru(float v) { return __float2int_rn(ceilf(v)); }

inline void demand(bool right, const char* what) {
    if (!right) { printf("%s\n", what); exit(1); }
}

constexpr u32 kSmemBase = 1024;
inline u32 cluster_size = 2;

struct Lot {  // SplitMix64
    u64 state = 1;
    void seed(u64 seed) { state = seed; }
    u32 operator()() {
        u64 v = state += 0x9e3779b97f4a7c15;
        v = (v ^ v >> 30) * 0xbf58476d1ce4e5b9;
        v = (v ^ v >> 27) * 0x94d049bb133111eb;
        return (v ^ v >> 31) >> 32;
    }
};
inline Lot lot;

struct Gate { int here = 0, generation = 0; };

struct Barrier {
    int arrivals = 0, missing = 0;
    long bytes = 0;
    int phase = 0;
    void arrive(long expect = 0) {
        demand(missing > 0, "more arrivals than the barrier was made for");
        --missing;
        complete(-expect);
    }
    void complete(long count) {
        bytes += count;
        if (missing == 0 && bytes == 0) missing = arrivals, ++phase;
    }
    bool done(u32 parity) const { return (u32)phase % 2 != parity; }
};

struct Warp {
    float a[16][16], b[16][8];
    int bytes_a[16][32], bytes_b[32][8];
    int nibbles_a[16][64], nibbles_b[64][8];
    float sparse_b[32][8];
    u32 meta[32];
    u32 rows[32];
    Gate gate;
};

struct Group {  // of four warps, for wgmma
    float a[64][16], b[256][16];
    int bytes_a[64][32], bytes_b[256][32];
    float sparse_b[256][32];
    u32 meta[4][32];
    Gate gate;
};

struct Block {
    u32 threads = 0, ended = 0;
    std::vector<unsigned char> smem;
    std::vector<Barrier> barriers;  // one for every 8 bytes of shared memory
    Gate everybody, named[16];
    std::vector<Warp> warps;
    std::vector<Group> groups;
};

// The first switch to a fiber is ucontext's, all others are jumps: swapcontext asks the kernel for the
// signal mask each time.
struct Fiber {
    static constexpr u32 kStack = 1 << 16;
    ucontext_t start;
    jmp_buf context;
    char* stack = (char*)malloc(kStack);  // not cleared: few of its pages are ever touched
    Block* block;
    u32 thread, index;
    bool begun = false, done = false;
    int cluster_rounds = 0;
    const int* watched = nullptr;  // what it waits for while this is `seen`
    int seen = 0;
    std::vector<std::vector<std::function<void()>>> groups{1};  // cp.async, by commit
    ~Fiber() { free(stack); }
    Warp& warp() { return block->warps[thread / 32]; }
    void prepare(void (*body)()) {
        begun = done = false, watched = nullptr;
        getcontext(&start);
        start.uc_stack.ss_sp = stack, start.uc_stack.ss_size = kStack, start.uc_link = nullptr;
        makecontext(&start, body, 0);
    }
};

inline Fiber* current;
extern std::vector<Block> blocks;
// A copy lands every 4 turns, or, drawn for each launch, every 4 to 128: slow memory shows waits that
// are satisfied too soon, and takes its time.
inline bool memory_varies = false;
extern std::vector<int> cluster_arrivals;
inline jmp_buf scheduler;

inline void yield() {
    if (!_setjmp(current->context)) _longjmp(scheduler, 1);
}
// As `while (number is what it was) yield()`, without a switch a turn: nine turns of ten were of fibers that wait.
inline void wait_for_change(const int& number) {
    current->watched = &number, current->seen = number;
    yield();
}
inline void enter(Fiber& fiber) {  // until it yields
    if (fiber.watched && *fiber.watched == fiber.seen) return;
    current = &fiber, fiber.watched = nullptr;
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.context, 1);
    fiber.begun = true;
    setcontext(&fiber.start);
}

inline void meet(Gate& gate, int threads) {
    const int generation = gate.generation;
    if (++gate.here == threads) gate.here = 0, ++gate.generation;
    while (gate.generation == generation) wait_for_change(gate.generation);
}

inline Block& block_of(u32& address) {
    if (address >> 24 == 0) return *current->block;
    Block& found = blocks[blockIdx.x / cluster_size * cluster_size + (address >> 24) - 1];
    address &= 0xffffff;
    demand(found.ended < found.threads, "a neighbour that has ended");
    return found;
}

#ifdef STATIC_SMEM  // arrays of the library itself: addresses are distances from this one
alignas(16) inline unsigned char static_smem[16];
inline u32 static_address(const void* p) {
    return kSmemBase + (u32)((const unsigned char*)p - static_smem);
}
inline unsigned char* smem_at(u32 address, u32 bytes) {
    demand(address % (bytes > 16 ? 16 : bytes) == 0, "alignment");
    return static_smem + (int)(address - kSmemBase);
}
#else
inline unsigned char* smem_at(u32 address, u32 bytes) {
    Block& block = block_of(address);
    demand(address % (bytes > 16 ? 16 : bytes) == 0, "alignment");
    demand(address >= kSmemBase && address + bytes <= kSmemBase + block.smem.size(), "outside");
    return block.smem.data() + address - kSmemBase;
}
#endif

inline Barrier& barrier_at(u32 address) {
    Block& block = block_of(address);
    const u32 index = (address - kSmemBase) / 8;
    demand(address % 8 == 0 && index < block.barriers.size(), "barrier alignment");
    return block.barriers[index];
}

template <class V>
inline V read(u32 address) {
    V v;
    memcpy(&v, smem_at(address, sizeof v), sizeof v);
    return v;
}

inline void write(unsigned char* to, const void* from, u32 bytes) { memcpy(to, from, bytes); }

inline const char *source_begin[4], *source_end[4];
// machine.cpp:
void begin_copy(u32 to, const void* from, u32 bytes);
void commit_group();
void wait_groups(int pending);
void arrive_after_copies(Barrier& barrier);
void begin_bulk(u32 to, const void* from, u32 bytes, Barrier& barrier);
void begin_tensor(u32 to, const u16* from, int rows, int columns, int box, int column, int row, Barrier& barrier);
void begin_remote(u32 to, float a, float b, Barrier& barrier);

inline void arrive_in_cluster() { ++cluster_arrivals[blockIdx.x / cluster_size]; }
inline void wait_for_cluster() {  // for as many rounds as this thread has arrived
    const u32 index = blockIdx.x / cluster_size, all = cluster_size * current->block->threads;
    demand(cluster_size > 1, "ptxas makes a __syncthreads of the wait of a cluster of one");
    const int round = ++current->cluster_rounds;
    while (cluster_arrivals[index] < (int)(all * round)) wait_for_change(cluster_arrivals[index]);
}

// Runs `body` as every thread of a grid.
void launch(u32 grid_x, u32 grid_y, u32 threads, u32 smem_bytes, const std::function<void()>& body);
// The same, one block after the other; false where somebody waits for ever.
bool launch_in_turn(u32 grid_x, u32 grid_y, u32 threads, u32 smem_bytes, const std::function<void()>& body);
// The next input: length, then bytes; on a multiple of 16.
std::vector<unsigned char> take();

// What the kernel before writes: NaN until a thread waits for that kernel to end.
inline std::vector<std::pair<std::vector<unsigned char>*, std::vector<unsigned char>>> unwritten;
inline void not_yet(std::vector<unsigned char>& bytes) {
    unwritten.emplace_back(&bytes, bytes);
    std::fill(bytes.begin(), bytes.end(), 0xff);
}
inline void all_written() {
    for (auto& [place, bytes] : unwritten) memcpy(place->data(), bytes.data(), bytes.size());
    unwritten.clear();
}
