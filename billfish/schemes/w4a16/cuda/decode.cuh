// w4a16_decode: y (m, n) = x (m, k) W^T for m <= 16 at the speed of memory, sm_90. Clusters, stages
// and sums are share.cuh's: MARLIN's stripes, chosen so that a stripe never leaves its cluster. The
// split-K reduction then needs no locks and no workspace, only distributed shared memory.
//
//     warp 0       producer: bulk copies of records, `stages` deep; the first are issued before the
//                  previous kernel has ended (PDL), since weights do not depend on it
//     warp 1       producer: activations of each stage, once the previous kernel has ended
//     warps 2-9    consumers: 32 outputs x 128 inputs at a time
//     warp 10      sums of x, which zero points need, where four bands share them (kSummed)
//
// Two blocks fit on an SM: one that computes, and one of the next kernel that prefetches weights.
#pragma once

#include "billfish/share.cuh"

namespace billfish {

constexpr int kFirstMathWarp = 2;
constexpr int kSumWarp = kFirstMathWarp + kMathWarps;

// Whether one warp sums x for all: of 16 tokens a third of each warp's products (8192 x 57344: 92 us
// become 70). With fewer bands a stage has more of x than one warp sums in time (4096 x 4096: 6.9 us
// become 8.7), and with smaller groups registers do not suffice for one more warp.
constexpr BILLFISH_DEVICE bool sums_apart(int group, int tokens, int bands) {
    return tokens == 16 && bands == 4 && group == 128;
}
constexpr BILLFISH_DEVICE int decode_threads(int group, int tokens, int bands) {
    return 32 * (kSumWarp + sums_apart(group, tokens, bands));
}

// One stage of the ring: four records, of one, two or four bands; x; its sums. There is one round of
// barriers for 16 KB: with 8 KB, 28672 x 8192 took 35.5 us instead of 30.1.
template <int kGroup, bool kAsymmetric, int kTokens, int kBands>
struct DecodeStage {
    static constexpr bool kSummed = sums_apart(kGroup, kTokens, kBands);
    static constexpr int kSlices = 4 / kBands;  // of 128 inputs
    static constexpr int kRecordBytes = Record<kGroup, kAsymmetric>::kBytes;
    static constexpr int kX = 4 * kRecordBytes;  // byte offsets
    static constexpr int kSums = kX + kSlices * x_bytes(kTokens);
    static constexpr int kBytes = kSums + (kSummed ? kRecordK / kGroup * kTokens * 8 : 0);
    static_assert(kX % 128 == 0 && kBytes % 128 == 0, "LanePlaces");
};

// Shared memory: [barriers, 256 B][stages][partial sums, two buffers]. tile.py counts the same.
constexpr int kBarrierBytes = 256;

// `records` is (bands, k tiles) records, `x` (m, x_k), `out` (m, n). Columns of x repeat after its
// last tile: codes of more than 4 bits are two planes of nibbles along k. `gated`: of every 16 rows
// the first 8 are gates and the others their ups (gated.py), and `out` is (m, n / 2).
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, int kBands>
__global__ void __launch_bounds__(decode_threads(kGroup, kTokens, kBands), 2)
w4a16_decode(const unsigned char* __restrict__ records, const u16* __restrict__ x,
             const u16* __restrict__ bias, u16* __restrict__ out, int m, int n, int x_k,
             int k_tiles, int stages, bool gated) {
#if __CUDA_ARCH__ >= 900
    using Stage = DecodeStage<kGroup, kAsymmetric, kTokens, kBands>;
    using Exchange = Sums<kTokens, kBands>;
    using Me = Worker<kBands * 2, kFirstMathWarp>;
    constexpr int kSlices = Stage::kSlices, kBlocks = kTokens / 8;
    static_assert(kSlices == 1 || !Stage::kSummed, "one slice's sums");

    extern __shared__ __align__(128) unsigned char smem[];
    const u32 base = smem_address(smem);
    const u32 full = base, empty = base + 64, reduced = base + 128, x_full = base + 192;
    const u32 ring = base + kBarrierBytes;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            // The bulk copy, and each lane's copies of x or the warp that sums it.
            barrier_init(full + 8 * i, 1 + (Stage::kSummed ? 1 : 32));
            barrier_init(x_full + 8 * i, 32);
            barrier_init(empty + 8 * i, kMathWarps);
        }
        barrier_init(reduced, 1);
        barrier_init(reduced + 8, 1);
        barrier_init_fence();
    }
    __syncthreads();
    cluster_arrive();

    if (warp < kFirstMathWarp || warp == kSumWarp) {
        const Share share(n, k_tiles);
        const int passes = share.passes(kBands), span = share.span;
        Slot slot;
        if (warp == 0) {
            if (lane == 0) {
                const u64 policy = evict_first_policy();
                const u64 band_bytes = static_cast<u64>(k_tiles) * Stage::kRecordBytes;
                slot.parity = 1;  // the first round finds every slot empty
                for (int pass = 0; pass < passes; ++pass) {
                    const int begin = share.before(pass, passes);
                    const int have = share.before(pass + 1, passes) - begin;
                    const unsigned char* from =
                        records + (share.first_band + begin) * band_bytes +
                        static_cast<u64>(share.k_begin) * Stage::kRecordBytes;
                    for (int slice = 0; slice < span; slice += kSlices) {
                        const u32 bytes = min(kSlices, span - slice) * Stage::kRecordBytes;
                        const u32 to = ring + slot.index * Stage::kBytes;
                        const u32 barrier = full + 8 * slot.index;
                        barrier_wait(empty + 8 * slot.index, slot.parity);
                        barrier_arrive_expect(barrier, have * bytes);
#pragma unroll
                        for (int band = 0; band < kBands; ++band) {
                            if (band < have)
                                copy_bulk(to + band * kSlices * Stage::kRecordBytes,
                                          from + band * band_bytes, bytes, barrier, policy);
                        }
                        from += kSlices * Stage::kRecordBytes;
                        slot.advance(stages);
                    }
                }
                if (passes == 0) linger(share.most_bands * span);
            }
        } else if (warp == 1) {
            // Lanes 0-15 copy even tokens, 16-31 odd ones: a slice is one addition, one XOR and one
            // copy for every two tokens. An odd m copies one row twice.
            const int chunk = lane % 16, x_tiles = (x_k + kRecordK - 1) / kRecordK;
            const u32 to = ring + Stage::kX + x_smem_offset<kTokens>(lane / 16, chunk);
            int from[kTokens / 2];
#pragma unroll
            for (int pair = 0; pair < kTokens / 2; ++pair)
                from[pair] = min(2 * pair + lane / 16, m - 1) * x_k + chunk * 8;
            slot.parity = 1;
            dependency_wait();
            for (int pass = 0; pass < passes; ++pass) {
                for (int slice = 0; slice < span; slice += kSlices) {
                    barrier_wait(empty + 8 * slot.index, slot.parity);
#pragma unroll
                    for (int sub = 0; sub < kSlices; ++sub) {
                        const int tile = share.k_begin + slice + sub;
                        const int column = (tile >= x_tiles ? tile - x_tiles : tile) * kRecordK;
                        const u32 bytes = column + chunk * 8 < x_k ? 16 : 0;
                        const u32 here = to + slot.index * Stage::kBytes + sub * x_bytes(kTokens);
#pragma unroll
                        for (int pair = 0; pair < kTokens / 2; ++pair) {
                            if (2 * pair < m)
                                copy_async_16((here ^ pair % 4 * 32) + pair * 2 * kXLine,
                                              x + (from[pair] + column), bytes);
                        }
                    }
                    barrier_arrive_after_copies((Stage::kSummed ? x_full : full) + 8 * slot.index);
                    slot.advance(stages);
                }
            }
        } else if constexpr (Stage::kSummed) {
            for (int i = 0; i < passes * span; ++i) {  // a slice is a stage
                const u32 stage = ring + slot.index * Stage::kBytes;
                barrier_wait(x_full + 8 * slot.index, slot.parity);
                sum_x<T, kGroup>(stage + Stage::kX, stage + Stage::kSums, lane);
                __syncwarp();
                if (lane == 0) barrier_arrive(full + 8 * slot.index);
                slot.advance(stages);
            }
        }
        __syncwarp();
        cluster_wait();
        return;
    }

    LanePlaces<kTokens> places;
    {
        const Me me;
        places = LanePlaces<kTokens>::template of<Record<kGroup, kAsymmetric>>(
            ring + (me.band * kSlices + me.sub) * Stage::kRecordBytes,
            ring + Stage::kX + me.sub * x_bytes(kTokens), me.lane, me.within % 2);
    }
    Slot slot;
    cluster_wait();     // the other block's barriers must exist before the first remote store
    dependency_wait();  // rather than polling a barrier until x arrives
    for (int pass = 0; pass < Share(n, k_tiles).passes(kBands); ++pass) {
        float acc[2][kBlocks][4] = {};
        int rounds, mine;  // stages, and those in which this warp has work
        {
            const Share share(n, k_tiles);
            const Me me;
            const int passes = share.passes(kBands);
            const int have = share.before(pass + 1, passes) - share.before(pass, passes);
            rounds = (share.span + kSlices - 1) / kSlices;
            mine = me.band < have ? (share.span - me.sub + kSlices - 1) / kSlices : 0;
        }
        for (; rounds > 0; --rounds, --mine) {
            const auto release = [&](float seen) {
                __syncwarp();
                barrier_arrive_after(empty + 8 * slot.index, seen, thread_index() % 32 == 0);
            };
            barrier_wait(full + 8 * slot.index, slot.parity);
            if (mine <= 0)
                release(0);
            else if constexpr (Stage::kSummed)
                multiply<T, S, kGroup, kAsymmetric, kTokens>(
                    places, acc, release,
                    ring + slot.index * Stage::kBytes + Stage::kSums + thread_index() % 4 * 16);
            else
                multiply<T, S, kGroup, kAsymmetric, kTokens>(places, acc, release);
            places.move(slot.advance(stages) ? (1 - stages) * Stage::kBytes : Stage::kBytes);
        }

        // With two buffers a block can be one pass ahead: all its warps have read a buffer before
        // any sends sums of the next pass, and whoever writes that buffer again has sums of the
        // next pass from both blocks (tests/kernels/test_decode_protocol.py).
        const Share share(n, k_tiles);
        const Me me;
        const int passes = share.passes(kBands), begin = share.before(pass, passes);
        const int have = share.before(pass + 1, passes) - begin;
        const int rank = cluster_rank(), rows = have * (kRecordN / kCluster);  // that a block owns
        const u32 buffer = ring + stages * Stage::kBytes + (pass & 1) * Exchange::kBytes;
        const u32 barrier = reduced + (pass & 1) * 8;
        if (me.index == 0 && me.lane == 0)
            barrier_arrive_expect(barrier, Exchange::expected(rows, m));
        if (me.band < have)
            Exchange::send(acc, buffer, barrier, me, rank, rows, m,
                           [](float sum, bool lower) { return finish<T>(sum, lower); });
        const int first = (share.first_band + begin) * kRecordN + rank * rows;
        barrier_wait(barrier, pass >> 1 & 1);
        Exchange::template store<T, 8>(buffer, bias, out, me, m, n, first, rows, gated);
        if (pass + 1 < passes) sync_some<1, 32 * kMathWarps>();
    }
#endif
}

}  // namespace billfish
