// w4a16_decode: y (m, n) = x (m, k) W^T for m <= 16 at the speed of memory, sm_90.
//
// A cluster takes tiles of kBands x 64 outputs, one after the other; its blocks share a tile's
// inputs (MARLIN's stripes, cut so that a stripe never leaves its cluster: the reduction needs no
// lock and no workspace, only shared memory of the neighbours).
//
//     cluster c:   tile c, c + clusters, ...        block r of s:  records of k in [r, r + 1) / s
//
//     warp 0       bulk copies of records, `stages` deep; those of the first stages are under way
//                  before the previous kernel has ended (PDL): weights do not depend on it
//     warp 1       the activations of each stage, once the previous kernel has ended
//     warps 2-9    32 outputs x 128 inputs each a stage; with 2 bands every other stage
//     at the end   partial sums go to the block that owns the outputs (st.async), which adds them
//                  in the order of k: the same bits in every run, for every m, beside any other row
#pragma once

#include "billfish/record.cuh"

namespace billfish {

constexpr int kMathWarps = 8;
constexpr int kDecodeThreads = 32 * (kMathWarps + 2);

template <int kGroup, bool kAsymmetric, int kTokens, int kBands>
struct DecodeStage {
    static constexpr int kRecordBytes = Record<kGroup, kAsymmetric>::kBytes;
    static constexpr int kCopyBytes = 2 * kRecordBytes;
    static constexpr int kX = kBands * kRecordBytes;  // byte offset of the activations
    static constexpr int kBytes = kX + kTokens * kXRowBytes;
};

// Shared memory: [barriers, 256 B][stages][2 x partial sums]. schemes/w4a16/tile.py counts the same.
constexpr int kBarrierBytes = 256;

// `records` is (pairs of bands, k tiles, 2) records, `x` (m, x_stride) with x_k valid columns a row, `out` (m,
// n). Columns of x repeat every x_k / 128 tiles: wide codes are two planes of nibbles along k.
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, int kBands>
__global__ void __launch_bounds__(kDecodeThreads, 2)
w4a16_decode(const unsigned char* __restrict__ records, const u16* __restrict__ x,
             const u16* __restrict__ bias, u16* __restrict__ out, int m, int n, int x_k,
             int k_tiles, int stages) {
#if __CUDA_ARCH__ >= 900
    using Stage = DecodeStage<kGroup, kAsymmetric, kTokens, kBands>;
    constexpr int kTileN = kBands * kRecordN;
    constexpr int kWarpsN = kBands * 2;              // warps that share a stage
    constexpr int kStripes = kMathWarps / kWarpsN;   // stages that are worked on at a time
    constexpr int kBlocks = kTokens / 8;
    static_assert(kMathWarps % kWarpsN == 0, "a stage is shared by 4 or 8 warps");

    extern __shared__ __align__(128) unsigned char smem[];
    const u32 base = smem_address(smem);
    const u32 full = base, empty = base + 64, summed = base + 128;  // 8 + 8 + 2 barriers
    const u32 ring = base + kBarrierBytes, sums = ring + stages * Stage::kBytes;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = cluster_rank(), size = cluster_size();
    const int bands = (n + kRecordN - 1) / kRecordN;
    const int tiles = (bands + kBands - 1) / kBands;
    const int k_begin = k_tiles * rank / size, k_end = k_tiles * (rank + 1) / size;

    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(full + 8 * i, 1 + 32);  // the bulk copy, and each lane's part of x
            barrier_init(empty + 8 * i, kWarpsN);
        }
        barrier_init(summed, 1);
        barrier_init(summed + 8, 1);
        barrier_init_fence();
    }
    __syncthreads();
    cluster_arrive();  // waited for before the first store into a neighbour

    // One warp could do both, but then its some 200 instructions a stage, each waiting for the one
    // before, are what limits the kernel (2 x slower; LOG 2026-11-15).
    const int span = k_end - k_begin;
    const int mine = (tiles - cluster_index() + cluster_count() - 1) / cluster_count();
    const int total = mine * span;
    if (warp == 0) {
        if (lane == 0) {
            const u64 policy = evict_first_policy();
            const u64 row = static_cast<u64>(k_tiles) * Stage::kCopyBytes;  // of two bands
            const unsigned char* from = records + cluster_index() * (kBands / 2) * row +
                                        static_cast<u64>(k_begin) * Stage::kCopyBytes;
            const u64 next = cluster_count() * (kBands / 2) * row - span * Stage::kCopyBytes;
            const int copies = (n + 2 * kRecordN - 1) / (2 * kRecordN);  // pairs of bands in all
            int tile = cluster_index(), left = span, slot = 0;
            u32 parity = 1;  // the first round finds every slot empty
            for (int i = 0; i < total; ++i) {
                barrier_wait(empty + 8 * slot, parity);
                const u32 to = ring + slot * Stage::kBytes, barrier = full + 8 * slot;
                // The last tile of four bands may have only two.
                const bool both = kBands == 4 && tile * 2 + 1 < copies;
                barrier_arrive_expect(barrier, both ? 2 * Stage::kCopyBytes : Stage::kCopyBytes);
                copy_bulk(to, from, Stage::kCopyBytes, barrier, policy);
                if (both) copy_bulk(to + Stage::kCopyBytes, from + row, Stage::kCopyBytes, barrier, policy);
                from += Stage::kCopyBytes;
                if (--left == 0) left = span, from += next, tile += cluster_count();
                if (++slot == stages) slot = 0, parity ^= 1;
            }
        }
        __syncwarp();
        cluster_wait();
        return;
    }
    if (warp == 1) {
        // Lanes 0-15 copy even tokens, 16-31 odd ones: a lane's chunk and XOR never change, and a
        // stage is one addition and one copy for every two tokens. An odd m copies one row twice.
        const int chunk = lane % 16, x_tiles = (x_k + kRecordK - 1) / kRecordK;
        const u32 to = ring + Stage::kX + x_smem_offset(lane / 16, chunk);
        const u16* from[kTokens / 2];
#pragma unroll
        for (int pass = 0; pass < kTokens / 2; ++pass)
            from[pass] = x + static_cast<u64>(min(2 * pass + lane / 16, m - 1)) * x_k + chunk * 8;
        int k_tile = k_begin, slot = 0;
        u32 parity = 1;
        dependency_wait();
        for (int i = 0; i < total; ++i) {
            const int column = (k_tile >= x_tiles ? k_tile - x_tiles : k_tile) * kRecordK;
            const u32 bytes = column + chunk * 8 < x_k ? 16 : 0;
            const u32 here = to + slot * Stage::kBytes;
            barrier_wait(empty + 8 * slot, parity);
#pragma unroll
            for (int pass = 0; pass < kTokens / 2; ++pass) {
                if (2 * pass < m)
                    copy_async_16(here + pass * 2 * kXRowBytes, from[pass] + column, bytes);
            }
            barrier_arrive_after_copies(full + 8 * slot);
            if (++k_tile == k_end) k_tile = k_begin;
            if (++slot == stages) slot = 0, parity ^= 1;
        }
        cluster_wait();
        return;
    }

    const int worker = warp - 2, stripe = worker / kWarpsN, within = worker % kWarpsN;
    const int band = within / 2, half = within % 2;
    const int rows = kTileN / size;                        // outputs this block owns of a tile
    const int pairs = (m + 1) / 2;                         // of tokens
    const u32 sums_bytes = kStripes * kTileN * kTokens * 4;  // size x kStripes parts of `rows`
    dependency_wait();  // without x there is nothing to do, and waiting here polls nothing
    bool met = false;
    int slot = 0, turn = 0, round = 0;
    u32 parity = 0;
    for (int tile = cluster_index(); tile < tiles; tile += cluster_count(), ++round) {
        float acc[2][kBlocks][4] = {};
        for (int k_tile = k_begin; k_tile < k_end; ++k_tile) {
            if (turn == stripe) {
                barrier_wait(full + 8 * slot, parity);
                const u32 stage = ring + slot * Stage::kBytes;
                multiply<T, S, kGroup, kAsymmetric, kTokens>(
                    stage + band * Stage::kRecordBytes, stage + Stage::kX, lane, half, acc);
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + 8 * slot);
            }
            if (++turn == kStripes) turn = 0;
            if (++slot == stages) slot = 0, parity ^= 1;
        }

        const u32 buffer = sums + (round & 1) * sums_bytes, barrier = summed + (round & 1) * 8;
        if (!met) cluster_wait(), met = true;
        if (threadIdx.x == 64) barrier_arrive_expect(barrier, size * kStripes * rows * pairs * 8);
        const int part = rank * kStripes + stripe;
#pragma unroll
        for (int brick = 0; brick < 2; ++brick) {
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {
                const int row = within * 32 + brick * 16 + lower * 8 + lane / 4;
                const int owner = row / rows;
                const u32 to = in_block(
                    buffer + ((part * rows + row % rows) * kTokens + lane % 4 * 2) * 4, owner);
                const u32 signal = in_block(barrier, owner);
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    if (block * 8 + lane % 4 * 2 < m)
                        store_remote(to + block * 32, finish<T>(acc[brick][block][lower * 2], lower),
                                     finish<T>(acc[brick][block][lower * 2 + 1], lower), signal);
                }
            }
        }
        barrier_wait_cluster(barrier, round >> 1 & 1);
        for (int item = threadIdx.x - 64; item < rows * kTokens; item += 32 * kMathWarps) {
            const int token = item % kTokens, row = item / kTokens;
            const int output = tile * kTileN + rank * rows + row;
            if (token >= m || output >= n) continue;
            float total = 0;
            for (int i = 0; i < size * kStripes; ++i)
                total += load_smem_float(buffer + ((i * rows + row) * kTokens + token) * 4);
            if (bias != nullptr) total += T::to_float(bias[output]);
            out[static_cast<u64>(token) * n + output] = T::from_float(total);
        }
    }
    if (!met) cluster_wait();
#endif
}

}  // namespace billfish
