// w4a16_stripe: y (m, n) = x (m, k) W^T for m <= 64 in one launch, sm_80 to sm_89.
//
// MARLIN 3.4: a ring of cp.async stages, warps that split the inputs where a tile is narrow, and
// stripes of equal length over tiles of outputs with a split-K reduction through global memory. It
// differs from MARLIN in two points: partial sums are fp32 in a workspace (there fp16, in the
// output), and the next tile's copies go on during the reduction.
//
// Beside the operands, for gridDim.x blocks: workspace, fp32 [blocks][kBands * 64 * kTokens], and
// locks, u32 [blocks], zero before and after every launch. Launches that may run side by side must
// not share them. No programmatic dependent launch: the kernel never waits for the one before.
// stripe.py has the same arithmetic.
#pragma once

#include "billfish/record.cuh"

namespace billfish {

constexpr int kStripeThreads = 256;
constexpr int kStageRecords = 4;      // two of the 8 warps work on each
constexpr int kMostSmem = 99 * 1024;  // what a block of sm_86 and sm_89 can ask for

// Shared memory is a ring of stages: [records: slice, band][x: slice, token]. MARLIN's pipeline is
// 4 deep. Two slices of 16 tokens with groups of 32 or 64 have 3, as four would need up to 106 KB;
// 32 and 64 tokens have 3, or 2 where groups are small.
template <int kGroup, bool kAsymmetric, int kTokens, int kBands>
struct StripeStage {
    static_assert(kBands == 2 || kBands == 4, "128 or 256 outputs");
    static_assert(kTokens == 8 || kTokens % 16 == 0, "StageCopier");
    static constexpr int kSlices = kStageRecords / kBands;  // that are worked on at a time
    static constexpr int kRecordBytes = Record<kGroup, kAsymmetric>::kBytes;
    static constexpr int kX = kStageRecords * kRecordBytes;  // byte offset
    static constexpr int kBytes = kX + kSlices * x_bytes(kTokens);
    static constexpr int kFit = kMostSmem / kBytes, kStages = kFit < 4 ? kFit : 4;
    static_assert(kStages >= 2, "one to copy, one to use");
    static_assert(kStages * kBytes <= kMostSmem, "fits on sm_86");
    static_assert(kX % 128 == 0 && kBytes % 128 == 0, "LanePlaces");
};

// MARLIN 3.4's striped partitioning. A unit is one slice (128 inputs) of one tile (kBands bands of
// 64 outputs). Units are numbered down one tile after the other, and every stripe, one block's
// work, has the same number of them give or take one: no SM is idle, and a tile is split only where
// one stripe ends and the next begins.
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

// Copies stage after stage, 16 bytes a thread and instruction, across the ends of tiles.
template <int kGroup, bool kAsymmetric, int kTokens, int kBands>
struct StageCopier {
    using Stage = StripeStage<kGroup, kAsymmetric, kTokens, kBands>;
    static constexpr int kTail = Stage::kRecordBytes / 16 - kStripeThreads;  // scales and zeros
    static_assert(kTail > 0 && kStageRecords * kTail <= kStripeThreads, "a thread each");
    static constexpr int kXChunks = Stage::kSlices * x_bytes(kTokens) / 16;

    const unsigned char* from;  // the stage's first record, and this thread's 16 bytes in it
    const u16* x;               // this thread's chunk of column 0
    u64 policy;
    u32 to, ring, x_offset, tail_from, tail_to, band_bytes;
    int left, slice, bands, k_tiles, x_tiles, x_columns, row, m, x_k;

    BILLFISH_DEVICE StageCopier(const unsigned char* records, const u16* x, u32 ring, u32 begin,
                                u32 end, int bands_all, int k_tiles, int m, int x_k)
        : x(x + threadIdx.x % 16 * 8), policy(evict_first_policy()), to(ring), ring(ring),
          left(end - begin), k_tiles(k_tiles), m(m), x_k(x_k) {
        const int tile = begin / k_tiles, thread = threadIdx.x;
        slice = begin - tile * k_tiles;
        bands = bands_all - tile * kBands;  // from this tile on
        band_bytes = k_tiles * Stage::kRecordBytes;
        from = records + static_cast<u64>(tile * kBands) * band_bytes +
               static_cast<u64>(slice) * Stage::kRecordBytes + thread * 16;
        const int record = thread / kTail;  // whose tail this thread copies, if below kStageRecords
        const u32 part = (kStripeThreads + thread % kTail) * 16;
        tail_from = record % kBands * band_bytes + record / kBands * Stage::kRecordBytes + part -
                    thread * 16;
        tail_to = record * Stage::kRecordBytes + part;
        x_tiles = (x_k + kRecordK - 1) / kRecordK;
        x_columns = x_k - thread % 16 * 8;  // columns below it are real
        row = thread / 16;                  // slice * kTokens + token
        x_offset = Stage::kX + row / kTokens * x_bytes(kTokens) +
                   x_smem_offset<kTokens>(row % kTokens, thread % 16);
    }

    // One group of cp.async, empty after the last stage: wait_copies counts groups.
    BILLFISH_DEVICE void next() {
        if (left > 0) {
            const int slices = min(Stage::kSlices, min(k_tiles - slice, left));
            copy_records(slices);
            copy_x(slices);
            left -= slices;
            slice += slices;
            from += slices * Stage::kRecordBytes;
            if (slice == k_tiles) {  // from the end of a tile's first band to the next tile's
                slice = 0, bands -= kBands;
                from += static_cast<u64>(kBands - 1) * band_bytes;
            }
            to += Stage::kBytes;
            if (to == ring + Stage::kStages * Stage::kBytes) to = ring;
        }
        commit_copies();
    }

    BILLFISH_DEVICE bool has(int record, int slices) const {
        return record % kBands < bands && record / kBands < slices;
    }

    // Weights are read once: evict first, so that x stays in L2 (MARLIN 3.4).
    BILLFISH_DEVICE void copy_records(int slices) const {
#pragma unroll
        for (int record = 0; record < kStageRecords; ++record) {
            if (has(record, slices))
                copy_async_16(to + record * Stage::kRecordBytes + threadIdx.x * 16,
                              from + record % kBands * band_bytes +
                                  record / kBands * Stage::kRecordBytes,
                              policy);
        }
        if (threadIdx.x < kStageRecords * kTail && has(threadIdx.x / kTail, slices))
            copy_async_16(to + tail_to, from + tail_from, policy);
    }

    // Zeros past the end of k, where records are padded, and past the last token.
    BILLFISH_DEVICE void copy_x(int slices) const {
#pragma unroll
        for (int i = 0; i * kStripeThreads < kXChunks; ++i) {
            const int mine = row + i * 16, sub = mine / kTokens, token = mine % kTokens;
            const int tile = slice + sub;  // planes of codes follow one another: x repeats
            const int column = (tile >= x_tiles ? tile - x_tiles : tile) * kRecordK;
            const bool real = token < m && column < x_columns;
            const int on = i * 16 / kTokens * x_bytes(kTokens) + i * 16 % kTokens * kXLine;
            if (sub < slices)  // never more rows than kSlices * kTokens
                copy_async_16(to + x_offset + on,
                              real ? x + (token * x_k + column) : x, real ? 16u : 0u);
        }
    }
};

// `records` is (bands, k tiles) records, `x` (m, x_k), `out` (m, n). Columns of x repeat after its
// last tile: codes of more than 4 bits are two planes of nibbles along k. Rows of x begin at
// multiples of 16 bytes. blockDim.x is kStripeThreads, dynamic shared memory kStages * kBytes.
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, int kBands>
__global__ void __launch_bounds__(kStripeThreads, 1)
w4a16_stripe(const unsigned char* __restrict__ records, const u16* __restrict__ x,
             const u16* __restrict__ bias, u16* __restrict__ out, float* workspace, u32* locks,
             int m, int n, int x_k, int k_tiles) {
    using Stage = StripeStage<kGroup, kAsymmetric, kTokens, kBands>;
    constexpr int kBlocks = kTokens / 8;
    constexpr int kOwners = kBands * 2 * 32;  // threads that hold a tile's final sums
    constexpr int kQuads = 2 * kBlocks;       // of sums that a thread holds

    extern __shared__ __align__(128) unsigned char smem[];
    const u32 ring = smem_address(smem);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int bands = (n + kRecordN - 1) / kRecordN;
    const Stripes stripes((bands + kBands - 1) / kBands * k_tiles, gridDim.x);
    if (blockIdx.x >= stripes.count) return;
    const u32 stripe = stripes.count - 1 - blockIdx.x;
    const u32 end = stripes.begin(stripe + 1);

    // MARLIN 3.4's warp layout: where a tile is narrow, warps split its inputs, too.
    const int record = warp / 2, band = record % kBands, sub = record / kBands;
    auto places = LanePlaces<kTokens>::template of<Record<kGroup, kAsymmetric>>(
        ring + record * Stage::kRecordBytes, ring + Stage::kX + sub * x_bytes(kTokens), lane,
        warp % 2);

    StageCopier<kGroup, kAsymmetric, kTokens, kBands> copier(
        records, x, ring, stripes.begin(stripe), end, bands, k_tiles, m, x_k);
#pragma unroll
    for (int i = 0; i < Stage::kStages - 1; ++i) copier.next();

    u32 stage = ring;
    for (u32 unit = stripes.begin(stripe); unit < end;) {
        const u32 tile = unit / k_tiles, tile_end = (tile + 1) * k_tiles;
        const int span = min(tile_end, end) - unit;  // slices of this tile
        const bool has_band = static_cast<int>(tile) * kBands + band < bands;
        float acc[2][kBlocks][4] = {};
        u32 used = stage;
        for (int slice = 0; slice < span; slice += Stage::kSlices) {
            // One barrier a stage: all threads' copies of this stage are visible, and nobody still
            // reads the previous stage, which the next copies overwrite.
            wait_copies<Stage::kStages - 2>();
            __syncthreads();
            copier.next();
            if (has_band && slice + sub < span) {
                if constexpr (kTokens <= 16)
                    multiply<T, S, kGroup, kAsymmetric, kTokens>(places, acc, [](float) {});
                else
                    multiply_decoded<T, S, kGroup, kAsymmetric, kTokens>(places, acc);
            }
            used = stage;
            stage += Stage::kBytes;
            if (stage == ring + Stage::kStages * Stage::kBytes) stage = ring;
            places.move(stage - used);
        }
        unit += span;

        // Adds the odd slices' sums to the even ones' through the stage just used, into which
        // nothing is copied before the next stage's barrier.
        if constexpr (Stage::kSlices == 2) {
            static_assert(kOwners * kQuads * 16 <= Stage::kBytes, "sums fit in a stage");
            __syncthreads();
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
                if (sub == 1)
                    store_smem_16(used + (i * kOwners + thread - kOwners) * 16,
                                  acc[i / kBlocks][i % kBlocks]);
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
                float(&sum)[4] = acc[i / kBlocks][i % kBlocks];
                if (sub == 1) continue;
                const uint4 odd = load_smem_16(used + (i * kOwners + thread) * 16);
                sum[0] += __uint_as_float(odd.x), sum[1] += __uint_as_float(odd.y);
                sum[2] += __uint_as_float(odd.z), sum[3] += __uint_as_float(odd.w);
            }
        }

        // Bottom up: the lock counts the stripes that have added their part, the last one first.
        // Release and acquire by one thread, with a __syncthreads on their inner side, order the
        // sums of all threads (both are cumulative). A thread adds the sums of the same thread.
        const u32 first = stripes.owner(tile_end - k_tiles);
        const u32 turn = stripes.owner(tile_end - 1) - stripe;
        float4* sums = reinterpret_cast<float4*>(workspace) + first * (kQuads * kOwners) + thread;
        if (turn > 0) {
            if (thread == 0) {
                while (load_acquire(locks + first) != turn) {}
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
                float(&sum)[4] = acc[i / kBlocks][i % kBlocks];
                if (sub > 0) continue;
                const float4 below = sums[i * kOwners];
                sum[0] += below.x, sum[1] += below.y, sum[2] += below.z, sum[3] += below.w;
            }
        }
        if (stripe != first) {
#pragma unroll
            for (int i = 0; i < kQuads; ++i) {
                const float(&sum)[4] = acc[i / kBlocks][i % kBlocks];
                if (sub == 0) sums[i * kOwners] = make_float4(sum[0], sum[1], sum[2], sum[3]);
            }
            __syncthreads();
            if (thread == 0) store_release(locks + first, turn + 1);
            continue;
        }
        if (turn > 0 && thread == 0) locks[first] = 0;  // for the next launch

        // A warp stores runs of 16 bytes. Longer ones through shared memory would cost a barrier;
        // an output has 32 bytes beside 2 KB of weights where k is 4096.
        if (sub > 0) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int brick = i / 2, lower = i % 2;
            const int row =
                (tile * kBands * 2 + warp) * 32 + brick * 16 + lower * 8 + lane / 4;
            if (row >= n) continue;
            const float add = bias == nullptr ? 0.0f : T::to_float(bias[row]);
#pragma unroll
            for (int j = 0; j < 2 * kBlocks; ++j) {
                const int token = j / 2 * 8 + lane % 4 * 2 + j % 2;
                float sum = acc[brick][j / 2][lower * 2 + j % 2];
                if (kTokens <= 16) sum = finish<T>(sum, lower);
                sum += add;
                if (token < m) out[static_cast<u64>(token) * n + row] = T::from_float(sum);
            }
        }
    }
}

}  // namespace billfish
