// w4a16_decode: y (m, n) = x (m, k) W^T for m <= 16 at the speed of memory, sm_90. Clusters, stages
// and sums are share.cuh's: MARLIN's stripes, chosen so that a stripe never leaves its cluster. The
// split-K reduction then needs no locks and no workspace, only distributed shared memory.
//
//     warp 0       producer: bulk copies of records, `stages` deep; the first are issued before the
//                  previous kernel has ended (PDL), since weights do not depend on it
//     warp 1       producer: activations of each stage, once the previous kernel has ended
//     warps 2, 3   sums of a stage's activations (summed.cuh), while others multiply; these two are
//                  not there where a block has one band
//     8 warps      consumers: 32 outputs x 128 inputs at a time
//
// w4a16_normed gets a few tokens before their RMS norm. While weights arrive, the eight warps norm
// the inputs of their block into shared memory, where warp 1 finds them.
//
// Two blocks fit on an SM: one that computes, and one of the next kernel that prefetches weights.
#pragma once

#include "billfish/norm.cuh"
#include "billfish/share.cuh"
#include "billfish/summed.cuh"
#include "billfish/teams.cuh"
#include "billfish/wgmma.cuh"

namespace billfish {

constexpr int kCopyWarps = 2, kSumWarps = 2;

// A stage of one band has four slices of x, whose sums would be used twice each: 16 tokens of
// 14336 x 4096 took 17.6 us for 14.9. Its math warps make them (record.cuh).
constexpr BILLFISH_DEVICE bool sums_apart(int bands) { return bands > 1; }

constexpr BILLFISH_DEVICE int first_math_warp(int bands) {
    return kCopyWarps + (sums_apart(bands) ? kSumWarps : 0);
}
constexpr BILLFISH_DEVICE int decode_threads(int bands) {
    return 32 * (first_math_warp(bands) + kMathWarps);
}

// With sums apart 16 tokens, and four bands, need 90 registers where 80 would let two blocks on an
// SM: the four other warps give some of theirs. Only Hopper's code can.
#if __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kMovesRegisters = true;
#else
constexpr bool kMovesRegisters = false;
#endif
constexpr BILLFISH_DEVICE bool moves_registers(int tokens, int bands) {
    return kMovesRegisters && sums_apart(bands) && (tokens == 16 || bands == 4);
}
constexpr BILLFISH_DEVICE int blocks_of_sm(int tokens, int bands) {
    return tokens == 16 && sums_apart(bands) && !kMovesRegisters ? 1 : 2;
}

// One stage of the ring: four records, of one, two or four bands, x and its sums. There is one
// round of barriers for 16 KB: with 8 KB, 28672 x 8192 took 35.5 us instead of 30.1. Of one band 16
// tokens of x are as large as the records; there it is two of them, for more stages than two.
template <int kGroup, bool kAsymmetric, int kTokens, int kBands>
struct DecodeStage {
    static constexpr int kSlices = kBands == 1 && kTokens == 16 ? 2 : 4 / kBands;  // of 128 inputs
    static constexpr int kRecordBytes = Record<kGroup, kAsymmetric>::kBytes;
    static constexpr int kX = kBands * kSlices * kRecordBytes;  // byte offset
    static constexpr int kSums = kX + kSlices * x_bytes(kTokens);
    static constexpr bool kSummed = sums_apart(kBands);
    static constexpr int kSumsBytes = kSummed ? sums_bytes<kGroup, kTokens>() : 0;  // of a slice
    static constexpr int kBytes = (kSums + kSlices * kSumsBytes + 127) / 128 * 128;
    static_assert(kX % 128 == 0 && kBytes % 128 == 0, "LanePlaces");
};

// Shared memory: [barriers, 384 B][stages][partial sums, two buffers]; where x is normed, sums of
// its squares and its rows come before the stages. tile.py counts the same.
constexpr int kBarrierBytes = 384;

#if __CUDA_ARCH__ >= 900

// Of a normed token: the inputs of a block, of the one that has more.
constexpr BILLFISH_DEVICE int normed_bytes(int k_tiles) {
    return (k_tiles + 1) / kCluster * kRecordK * 2;
}

// Addresses in shared memory.
struct Ring {
    u32 stages_at, full, empty, summed, reduced, freed;
    int stages;
};

// What the eight math warps do in a block of one band. Two teams take the stages by turns
// (teams.cuh); a warp has half of one or two records.
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, bool kNormed>
BILLFISH_DEVICE void multiply_one(const Ring& ring, const u16* __restrict__ bias,
                                  u16* __restrict__ out, int m, int n, int k_tiles, bool gated) {
    using Stage = DecodeStage<kGroup, kAsymmetric, kTokens, 1>;
    using Exchange = Sums<kTokens, 1>;
    using Me = Worker<2, first_math_warp(1)>;  // sub: team, and one of two slices
    constexpr int kSlices = Stage::kSlices, kBlocks = blocks_of(kTokens);
    constexpr int kNext = 2 * Stage::kRecordBytes, kNextX = 2 * x_bytes(kTokens);
    LanePlaces<kTokens> places;
    {
        const Me me;
        places = LanePlaces<kTokens>::template of<Record<kGroup, kAsymmetric>>(
            ring.stages_at + me.sub % 2 * Stage::kRecordBytes,
            ring.stages_at + Stage::kX + me.sub % 2 * x_bytes(kTokens), me.lane, me.within);
        places.move(me.sub / 2 * Stage::kBytes);
    }
    TeamSlot slot(Me().sub / 2);
    cluster_wait();     // the other block's barriers must exist before the first remote store
    if (!kNormed) dependency_wait();  // rather than polling a barrier until x arrives
    if (Share(n, k_tiles).bands == 0) return;
    float acc[2][kBlocks][4] = {};
    int left = Share(n, k_tiles).span - Me().sub / 2 * kSlices;  // slices
    for (; left > 0; left -= kTeams * kSlices) {
        barrier_wait(ring.full + Me().sub / 2 * kTeamBarriers + 8 * slot.index, slot.parity());
        const int mine = left - Me().sub % 2;
        if (mine > 0) multiply<T, S, kGroup, kAsymmetric, kTokens>(places, acc, [](float) {});
        if (kSlices > 2 && mine > 2) {
            LanePlaces<kTokens> second{places.words + kNext, places.x + kNextX};
            multiply<T, S, kGroup, kAsymmetric, kTokens>(second, acc, [](float) {});
        }
        __syncwarp();
        barrier_arrive_after(ring.empty + 8 * slot.index,
                             acc[0][kBlocks - 1][0] + acc[1][kBlocks - 1][0],
                             thread_index() % 32 == 0);
        places.move(slot.advance(ring.stages) ? (kTeams - ring.stages) * Stage::kBytes
                                                   : kTeams * Stage::kBytes);
    }
    const Share share(n, k_tiles);
    const Me me;
    const int rank = cluster_rank(), rows = kRecordN / kCluster;  // that a block owns
    const u32 buffer = ring.stages_at + ring.stages * Stage::kBytes;
    if (me.index == 0 && me.lane == 0)
        barrier_arrive_expect(ring.reduced, Exchange::expected(rows, m));
    Exchange::send(acc, buffer, ring.reduced, me, rank, rows, m,
                   [](float sum, bool lower) { return finish<T>(sum, lower); });
    barrier_wait(ring.reduced, 0);
    Exchange::template store<T, 8>(buffer, bias, out, me, m, n,
                                   share.first_band * kRecordN + rank * rows, rows, gated);
}

template <int kPair, int kBricks>
struct Bricks {
    static constexpr int kAt = kPair, kCount = kBricks;
};

// The same in a block of several bands, with sums of x made apart: two teams take the stages by
// turns (teams.cuh). With a barrier for each half record, 16 tokens of 8192 x 57344 took 71 us.
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, int kBands, bool kNormed>
BILLFISH_DEVICE void multiply_teams(const Ring& ring, const u16* __restrict__ bias,
                                    u16* __restrict__ out, int m, int n, int k_tiles, bool gated) {
    using Stage = DecodeStage<kGroup, kAsymmetric, kTokens, kBands>;
    using Exchange = TeamSums<kTokens, kBands>;
    using Me = Mate<first_math_warp(kBands)>;
    constexpr int kSlices = Stage::kSlices, kBlocks = blocks_of(kTokens);
    // A warp has two pairs of bricks in a stage: of bands 0, 1 and 2, 3, or of two slices.
    constexpr int kStride = kSlices * Stage::kRecordBytes;  // from band to band
    constexpr int kNext = kSlices == 1 ? 2 * kStride : Stage::kRecordBytes;  // from pair to pair
    constexpr int kNextX = kSlices == 1 ? 0 : x_bytes(kTokens);
    constexpr int kNextSums = kSlices == 1 ? 0 : Stage::kSumsBytes;
    constexpr int kSecond = kSlices == 1 ? 2 : 0;  // first band of the second pair
    // Both pairs of a slice at once, where sums of few tokens leave registers.
    constexpr bool kAtOnce = kMovesRegisters && kSlices == 1 && kTokens <= 8;

    BrickPlaces<kTokens> places(ring.stages_at, ring.stages_at + Stage::kX,
                                ring.stages_at + Stage::kSums, Me().brick, Me().lane);
    TeamSlot slot(Me().team);
    places.move(slot.index * Stage::kBytes);
    cluster_wait();     // the other block's barriers must exist before the first remote store
    if (!kNormed) dependency_wait();  // rather than polling a barrier until x arrives
    const auto finished = [](float sum, bool lower) { return finish<T>(sum, lower); };
    for (int pass = 0; pass < Share(n, k_tiles).passes(kBands); ++pass) {
        float acc[kBands][kBlocks][4] = {};
        int rounds, have;  // stages of this team, bands
        int span;
        {
            const Share share(n, k_tiles);
            const int passes = share.passes(kBands), all = (share.span + kSlices - 1) / kSlices;
            have = share.before(pass + 1, passes) - share.before(pass, passes);
            rounds = (all + 1 - ((Me().team ^ pass & all) & 1)) / kTeams;
            span = share.span - (Me().team ^ pass & all) % kTeams * kSlices;
        }
        for (; rounds > 0; --rounds) {
            const u32 own = Me().team * kTeamBarriers + 8 * slot.index;
            barrier_wait(ring.full + own, slot.parity());
            const auto pair = [&](auto which, auto summed) {
                constexpr int kAt = decltype(which)::kAt, kCount = decltype(which)::kCount;
                multiply_bricks<T, S, kGroup, kAsymmetric, kTokens, kStride, kAt * kSecond, kCount,
                                kBands>(places, kAt * kNext, kAt * kNextX, kAt * kNextSums, acc,
                                        summed);
            };
            const auto wait = [&] { barrier_wait(ring.summed + own, slot.parity()); };
            if constexpr (kAtOnce) {
                if (have == 4)
                    pair(Bricks<0, 4>{}, wait);
                else if (have == 3)
                    pair(Bricks<0, 3>{}, wait);
            }
            if (have == 2 || have > 2 && !kAtOnce)
                pair(Bricks<0, 2>{}, wait);
            else if (have == 1)
                pair(Bricks<0, 1>{}, wait);
            if constexpr (!kAtOnce) {
                const bool second = kSlices > 1 ? span > 1 : have > 2;
                if (second && have % 2 == 0)
                    pair(Bricks<1, 2>{}, [] {});
                else if (second)
                    pair(Bricks<1, 1>{}, [] {});
            }
            span -= kTeams * kSlices;
            float seen = 0;
#pragma unroll
            for (int band = 0; band < kBands; ++band) seen += acc[band][kBlocks - 1][0];
            __syncwarp();
            barrier_arrive_after(ring.empty + 8 * slot.index, seen, thread_index() % 32 == 0);
            places.move(slot.advance(ring.stages) ? (kTeams - ring.stages) * Stage::kBytes
                                                       : kTeams * Stage::kBytes);
        }
        // `freed`: the other block's warps have read the sums of the pass before, and this one's
        // have met since.
        const Share share(n, k_tiles);
        const Me me;
        const int passes = share.passes(kBands), rank = cluster_rank();
        const u32 buffer = ring.stages_at + ring.stages * Stage::kBytes;
        have = share.before(pass + 1, passes) - share.before(pass, passes);
        if (pass > 0) barrier_wait(ring.freed, (pass - 1) & 1);
        if (me.team == 0 && me.brick == 0 && me.lane == 0)
            barrier_arrive_expect(ring.reduced, Exchange::expected(have, m));
        Exchange::send(acc, buffer, ring.reduced, me, rank, have, m, finished);
        barrier_wait(ring.reduced, pass & 1);
        const int first = (share.first_band + share.before(pass, passes)) * kRecordN;
        Exchange::template store<T>(acc, buffer, bias, out, me, rank, have, m, n, first, gated,
                                    finished);
        if (pass + 1 < passes) {
            __syncwarp();
            if (me.lane == 0) barrier_arrive_in(in_block(ring.freed, rank ^ 1));
            sync_some<1, 32 * kMathWarps>();
        }
    }
}

// Both kernels. `x` is (m, x_k) or, kNormed, the norm of `given`.
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, int kBands, bool kNormed>
BILLFISH_DEVICE void decode(const unsigned char* __restrict__ records, const u16* __restrict__ x,
                            const Residual& given, const u16* __restrict__ bias,
                            u16* __restrict__ out, int m, int n, int x_k, int k_tiles, int stages,
                            bool gated) {
    using Stage = DecodeStage<kGroup, kAsymmetric, kTokens, kBands>;
    constexpr int kFirstMathWarp = first_math_warp(kBands);
    constexpr int kSlices = Stage::kSlices, kBlocks = blocks_of(kTokens);

    extern __shared__ __align__(128) unsigned char smem[];
    const u32 base = smem_address(smem);
    const u32 full = base, summed = base + 128;  // of one team, then of the other
    const u32 empty = base + 256, reduced = base + 320, freed = reduced + 8;
    const u32 squares = base + kBarrierBytes, normed = squares + kNormSums;
    const u32 ring = kNormed ? normed + m * normed_bytes(k_tiles) : base + kBarrierBytes;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            for (int team = 0; team < kTeams; ++team) {  // the bulk copy, and each lane's of x
                barrier_init(full + team * kTeamBarriers + 8 * i, 1 + 32);
                barrier_init(summed + team * kTeamBarriers + 8 * i, kSumWarps);
            }
            barrier_init(empty + 8 * i, kTeamWarps + Stage::kSummed * kSumWarps);
        }
        barrier_init(reduced, 1);
        barrier_init(freed, kMathWarps);
        barrier_init_fence();
    }
    __syncthreads();
    cluster_arrive();

    if (warp < kFirstMathWarp) {
#if __CUDA_ARCH_FEAT_SM90_ALL
        if constexpr (moves_registers(kTokens, kBands)) give_registers<32>();
#endif
        const Share share(n, k_tiles);
        const int passes = share.passes(kBands), span = share.span;
        Slot slot;
        u32 turn = 0;  // whose stage it is: 0, or the other team's kTeamBarriers
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
                        const u32 barrier = full + turn + 8 * slot.index;
                        barrier_wait(empty + 8 * slot.index, slot.parity);
                        barrier_arrive_expect(barrier, have * bytes);
#pragma unroll
                        for (int band = 0; band < kBands; ++band) {
                            if (band < have)
                                copy_bulk(to + band * kSlices * Stage::kRecordBytes,
                                          from + band * band_bytes, bytes, barrier, policy);
                        }
                        from += kSlices * Stage::kRecordBytes;
                        slot.advance(stages), turn ^= kTeamBarriers;
                    }
                }
                if (passes == 0) linger(share.most_bands * span);
            }
        } else if (warp >= kCopyWarps) {
            constexpr int kItems = kSlices * kBlocks;  // of 8 tokens of a slice
            dependency_wait();
            TeamSlot slot(0);
            for (int left = passes * ((span + kSlices - 1) / kSlices); left > 0; --left) {
                const u32 stage = ring + slot.index * Stage::kBytes;
                const u32 own = full + turn + 8 * slot.index;
                barrier_wait(own, slot.parity());
#pragma unroll
                for (int item = 0; item < kItems; item += kSumWarps) {
                    const int mine = item + warp - kCopyWarps, sub = mine / kBlocks;
                    if (kItems % kSumWarps && mine >= kItems) break;
                    sum_tokens<T, kGroup, kTokens>(
                        stage + Stage::kX + sub * x_bytes(kTokens),
                        stage + Stage::kSums + sub * Stage::kSumsBytes, mine % kBlocks, lane);
                }
                __syncwarp();
                if (lane == 0) {
                    barrier_arrive(own + (summed - full));
                    barrier_arrive((own & ~kTeamBarriers) + (empty - full));
                }
                slot.advance(stages, 1), turn ^= kTeamBarriers;
            }
        } else {
            // Lanes 0-15 copy even tokens, 16-31 odd ones. An odd m copies one row twice.
            const int chunk = lane % 16, x_tiles = (x_k + kRecordK - 1) / kRecordK;
            const u32 to = ring + Stage::kX + x_smem_offset<kTokens>(lane / 16, chunk);
            slot.parity = 1;
            if (kNormed)
                sync_some<2, 32 * (1 + kMathWarps)>();
            else
                dependency_wait();
            for (int pass = 0; pass < passes; ++pass) {
                for (int slice = 0; slice < span; slice += kSlices) {
                    barrier_wait(empty + 8 * slot.index, slot.parity);
#pragma unroll
                    for (int sub = 0; sub < kSlices; ++sub) {
                        const int tile = share.k_begin + slice + sub;
                        const int column = (tile >= x_tiles ? tile - x_tiles : tile) * kRecordK;
                        const u32 bytes = column + chunk * 8 < x_k ? 16 : 0;
                        const int own = min(slice + sub, span - 1) * kRecordK * 2;
                        const u32 here = to + slot.index * Stage::kBytes + sub * x_bytes(kTokens);
#pragma unroll
                        for (int pair = 0; pair < kTokens / 2; ++pair) {
                            if (2 * pair >= m) continue;
                            const int token = min(2 * pair + lane / 16, m - 1);
                            const u32 there = (here ^ pair % 4 * 32) + pair * 2 * kXLine;
                            if constexpr (kNormed)
                                store_smem_bits_16(
                                    there, load_smem_16(normed + token * normed_bytes(k_tiles) +
                                                        chunk * 16 + own));
                            else
                                copy_async_16(there, x + (token * x_k + chunk * 8 + column), bytes);
                        }
                    }
                    if constexpr (kNormed)
                        barrier_arrive(full + turn + 8 * slot.index);
                    else
                        barrier_arrive_after_copies(full + turn + 8 * slot.index);
                    slot.advance(stages), turn ^= kTeamBarriers;
                }
            }
        }
        __syncwarp();
        cluster_wait();
        return;
    }

#if __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (moves_registers(kTokens, kBands)) take_registers<104>();
#endif
    if constexpr (kNormed) {
        constexpr int kOwn = kNormThreads / kCluster / (32 * kMathWarps);
        const Share share(n, k_tiles);
        norm_rows<T, kMathWarps, kOwn>(given, threadIdx.x - 32 * kFirstMathWarp, m, x_k,
                                       share.k_begin * (kRecordK / 8), share.span * (kRecordK / 8),
                                       squares, normed, normed_bytes(k_tiles),
                                       [] { sync_some<1, 32 * kMathWarps>(); });
        sync_some<2, 32 * (1 + kMathWarps)>();  // warp 1 waits for it
    }
    if constexpr (Stage::kSummed)
        multiply_teams<T, S, kGroup, kAsymmetric, kTokens, kBands, kNormed>(
            Ring{ring, full, empty, summed, reduced, freed, stages}, bias, out, m, n, k_tiles, gated);
    else
        multiply_one<T, S, kGroup, kAsymmetric, kTokens, kNormed>(
            Ring{ring, full, empty, summed, reduced, freed, stages}, bias, out, m, n, k_tiles, gated);
}

#endif

// `records` is (bands, k tiles) records, `x` (m, x_k), `out` (m, n). Columns of x repeat after its
// last tile: codes of more than 4 bits are two planes of nibbles along k. `gated`: of every 16 rows
// the first 8 are gates and the others their ups (gated.py), and `out` is (m, n / 2).
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, int kBands>
__global__ void __launch_bounds__(decode_threads(kBands), blocks_of_sm(kTokens, kBands))
w4a16_decode(const unsigned char* __restrict__ records, const u16* __restrict__ x,
             const u16* __restrict__ bias, u16* __restrict__ out, int m, int n, int x_k,
             int k_tiles, int stages, bool gated) {
#if __CUDA_ARCH__ >= 900
    decode<T, S, kGroup, kAsymmetric, kTokens, kBands, false>(records, x, Residual{}, bias, out, m,
                                                              n, x_k, k_tiles, stages, gated);
#endif
}

// The same of x = the RMS norm of hidden (m, k) + delta, unless that is null, with the bits of
// rms_norm (engine/cuda/small.cuh); `summed` gets the sum. One plane, k a multiple of 8 up to 8192,
// `threads` of kernels/norm.py, m up to kMostNormed, and as many blocks.
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, int kBands>
__global__ void __launch_bounds__(decode_threads(kBands), 2)
w4a16_normed(const unsigned char* __restrict__ records, const u16* hidden, const u16* delta,
             const u16* weight, u16* summed, int threads, float eps,
             const u16* __restrict__ bias, u16* __restrict__ out, int m, int n, int k, int k_tiles,
             int stages, bool gated) {
#if __CUDA_ARCH__ >= 900
    const Residual given{hidden, delta, weight, summed, threads, eps};
    decode<T, S, kGroup, kAsymmetric, kTokens, kBands, true>(records, nullptr, given, bias, out, m,
                                                             n, k, k_tiles, stages, gated);
#endif
}

}  // namespace billfish
