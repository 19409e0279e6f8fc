// MARLIN 3.4's striped partition (stream-K) for products of few tokens, sm_80: what each block
// computes, how sums of a tile are added, and how they are stored. Main loops are their kernels'
// own; kernels/stripes.py has the same arithmetic.
//
// Beside the operands, for gridDim.x blocks: workspace, 32 bits [blocks][outputs * tokens of a
// tile], and locks, u32 [blocks], zero before and after every launch. Launches that may run side by
// side must not share them.
#pragma once

#include "billfish/mma.cuh"

namespace billfish {

// Of kernels whose warps all copy and multiply.
constexpr int kStripeThreads = 256;
constexpr int kStageRecords = 4;      // two of the 8 warps work on each
constexpr int kMostSmem = 99 * 1024;  // what a block of sm_86 and sm_89 can ask for

// MARLIN's pipeline is 4 deep, where so many stages fit.
constexpr BILLFISH_DEVICE int ring_stages(int stage_bytes) {
    return kMostSmem / stage_bytes < 4 ? kMostSmem / stage_bytes : 4;
}

// MARLIN 3.4's striped partitioning. A unit is one slice (the inputs of one record) of one tile
// (some bands of 64 outputs). Units are numbered down one tile after the other, and every stripe,
// one block's work, has the same number of them give or take one: no SM is idle, and a tile is
// split only where one stripe ends and the next begins.
//
//     slice    tile 0   tile 1   tile 2      4 stripes of 18 units: [0, 4) [4, 9) [9, 13) [13, 18)
//       0        0        1        2
//       1        0        1        3         Stripe 1 does the end of tile 0 first and the
//       2        0        1        3         beginning of tile 1 last. Hence sums go bottom up:
//       3        0        2        3
//       4        1        2        3             tile 0 = stripe 1's part + stripe 0's part
//       5        1        2        3             tile 1 = stripe 2's part + stripe 1's part
//
// Top down, stripe 2 would begin by waiting for the end of stripe 1's work, stripe 3 for that of
// stripe 2, and the GPU would work one stripe at a time. Bottom up a stripe waits only after its
// last unit, and only for stripes of higher number, which do their part of the tile first (one in
// the middle of a tile has no other part). So there is no cycle. Blocks take stripes from the last
// to the first: a block waits for blocks of lower index, which start before it, also where the grid
// is larger than what fits on the GPU.
//
// The order of a tile's sums follows from (n, k, number of blocks) alone: the same bits in every
// run, for every m and batch. A stripe is the first of at most one split tile, whose sums and lock
// have that stripe's index, so that one workspace serves layers of any size.
//
// Products stay below 2^32: 10^6 units (the largest vocabularies) x 10^2 blocks.
struct Stripes {
    u32 units, count;
    BILLFISH_DEVICE Stripes(u32 units, u32 blocks) : units(units), count(min(units, blocks)) {}
    BILLFISH_DEVICE u32 begin(u32 stripe) const { return units * stripe / count; }
    BILLFISH_DEVICE u32 owner(u32 unit) const { return ((unit + 1) * count - 1) / units; }
};

// The same where slices do not cost the same and sums are exact, so that any partition is right: of
// a tile's halves of slices (64 inputs) the first `light` cost 1, the others `heavy` (COMET 4.4's
// remapping). A stripe begins with the slice in which its share of the cost begins.
struct CostStripes {
    u32 k_tiles, light, heavy, cost, count;  // cost of a tile
    u64 total;
    BILLFISH_DEVICE CostStripes(u32 tiles, u32 k_tiles, u32 light, u32 heavy, u32 blocks)
        : k_tiles(k_tiles), light(light), heavy(heavy),
          cost(light + (2 * k_tiles - light) * heavy), count(min(tiles * k_tiles, blocks)),
          total(static_cast<u64>(tiles) * cost) {}
    BILLFISH_DEVICE u32 begin(u32 stripe) const {
        const u64 at = total * stripe / count;
        const u32 tile = at / cost, rest = at - static_cast<u64>(tile) * cost;
        const u32 half = rest < light ? rest : light + (rest - light) / heavy;
        return tile * k_tiles + half / 2;
    }
    BILLFISH_DEVICE u32 owner(u32 unit) const {
        const u32 tile = unit / k_tiles, end = (unit - tile * k_tiles + 1) * 2;
        const u64 before = end <= light ? end : light + (end - light) * heavy;
        return ((static_cast<u64>(tile) * cost + before) * count - 1) / total;
    }
};

// Records of a stage, [slice][band]: 64 threads copy one, 16 bytes a thread and instruction.
// Weights are read once: evict first, so that x stays in L2 (MARLIN 3.4).
template <int kRecordBytes, int kBands>
struct StageRecords {
    static constexpr int kThreads = kStripeThreads / kStageRecords;  // of a record
    static constexpr int kChunks = kRecordBytes / 16;
    u64 policy;
    u32 band_bytes;

    BILLFISH_DEVICE StageRecords(u64 policy, int k_tiles)
        : policy(policy), band_bytes(k_tiles * kRecordBytes) {}
    // This thread's first 16 bytes, from the stage's first record on.
    BILLFISH_DEVICE u32 offset() const {
        const u32 record = threadIdx.x / kThreads;
        return record % kBands * band_bytes + record / kBands * kRecordBytes +
               threadIdx.x % kThreads * 16;
    }
    // `from`: the stage's first record, and this thread's offset.
    BILLFISH_DEVICE void copy(u32 to, const unsigned char* from, int bands, int slices) const {
        const int record = threadIdx.x / kThreads, chunk = threadIdx.x % kThreads;
        if (record % kBands >= bands || record / kBands >= slices) return;
#pragma unroll
        for (int i = 0; i < kChunks; i += kThreads) {
            if (i + kThreads <= kChunks || i + chunk < kChunks)
                copy_async_16(to + record * kRecordBytes + (i + chunk) * 16, from + i * 16, policy);
        }
    }
};

// Below, acc is a warp's sums of 32 outputs, [brick][8 tokens][mma's four]. kOwners threads hold a
// tile; where warps split its inputs, too, as many have `sub` 1. `sync` is a barrier of them. V:
// float, or u32.

// Adds the sums of `sub` 1 to those of `sub` 0 through shared memory at `room`, which nobody may
// still read.
BILLFISH_DEVICE void add_bits(float& sum, u32 bits) { sum += __uint_as_float(bits); }
BILLFISH_DEVICE void add_bits(u32& sum, u32 bits) { sum += bits; }

template <int kOwners, int kBlocks, class V, class Sync>
BILLFISH_DEVICE void add_odd_slices(V (&acc)[2][kBlocks][4], u32 room, int thread, int sub,
                                    Sync sync) {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
        if (sub == 1)
            store_smem_16(room + (i * kOwners + thread - kOwners) * 16,
                          acc[i / kBlocks][i % kBlocks]);
    }
    sync();
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
        V(&sum)[4] = acc[i / kBlocks][i % kBlocks];
        if (sub == 1) continue;
        const uint4 odd = load_smem_16(room + (i * kOwners + thread) * 16);
        add_bits(sum[0], odd.x), add_bits(sum[1], odd.y);
        add_bits(sum[2], odd.z), add_bits(sum[3], odd.w);
    }
}

// A stripe's turn to add its part of the tile that ends before unit `end`, bottom up: the lock
// counts the stripes that have added theirs, the last one first. Then it passes the sums on, or, if
// it has the tile's first unit, keeps them.
//
// Release and acquire by one thread, with a barrier on their inner side, order the sums of all
// threads (both are cumulative). A thread of `sub` 0 adds the sums of the same thread.
template <int kOwners, int kBlocks, class V = float>
struct Turn {
    static constexpr int kQuads = 2 * kBlocks;
    u32 first, turn, stripe;  // the stripe with the first unit; those that add before; this one
    u32* locks;
    V* sums;

    template <class Partition>
    BILLFISH_DEVICE Turn(const Partition& stripes, u32 stripe, u32 end, int k_tiles, V* workspace,
                         u32* locks, int thread)
        : first(stripes.owner(end - k_tiles)), turn(stripes.owner(end - 1) - stripe),
          stripe(stripe), locks(locks),
          sums(workspace + (first * (kQuads * kOwners) + thread) * 4) {}

    template <class Sync>
    BILLFISH_DEVICE void add(V (&acc)[2][kBlocks][4], int thread, int sub, Sync sync) const {
        if (turn == 0) return;
        if (thread == 0) {
            while (load_acquire(locks + first) != turn) {}
        }
        sync();
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            V(&sum)[4] = acc[i / kBlocks][i % kBlocks];
            if (sub > 0) continue;
            const auto below = load_global_16(sums + i * kOwners * 4);
            sum[0] += below.x, sum[1] += below.y, sum[2] += below.z, sum[3] += below.w;
        }
    }

    BILLFISH_DEVICE bool last() const { return stripe == first; }

    template <class Sync>
    BILLFISH_DEVICE void pass_on(const V (&acc)[2][kBlocks][4], int thread, int sub,
                                 Sync sync) const {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const V(&sum)[4] = acc[i / kBlocks][i % kBlocks];
            if (sub == 0)
                store_global_16(sums + i * kOwners * 4, sum[0], sum[1], sum[2], sum[3]);
        }
        sync();
        if (thread == 0) store_release(locks + first, turn + 1);
    }

    BILLFISH_DEVICE void end(int thread) const {  // for the next launch
        if (turn > 0 && thread == 0) locks[first] = 0;
    }
};

// A warp's outputs `first` and on, `finish(sum, lower)` of each sum. It stores runs of 16 bytes.
// Longer ones through shared memory would cost a barrier; an output has 32 bytes beside 2 KB of
// weights where k is 4096.
template <class T, int kBlocks, class Finish>
BILLFISH_DEVICE void store_tile(const float (&acc)[2][kBlocks][4], const u16* bias, u16* out,
                                int first, int lane, int m, int n, Finish finish) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int brick = i / 2, lower = i % 2;
        const int row = first + brick * 16 + lower * 8 + lane / 4;
        if (row >= n) continue;
        const float add = bias == nullptr ? 0.0f : T::to_float(bias[row]);
#pragma unroll
        for (int j = 0; j < 2 * kBlocks; ++j) {
            const int token = j / 2 * 8 + lane % 4 * 2 + j % 2;
            const float sum = finish(acc[brick][j / 2][lower * 2 + j % 2], lower) + add;
            if (token < m) out[static_cast<u64>(token) * n + row] = T::from_float(sum);
        }
    }
}

}  // namespace billfish
