// w4a16_decode: y (m, n) = x (m, k) W^T for m <= 16 at the speed of memory, sm_90. Clusters, stages
// and sums are share.cuh's: MARLIN's stripes, chosen so that a stripe never leaves its cluster. The
// split-K reduction then needs no locks and no workspace, only distributed shared memory.
//
//     warp 0       producer: bulk copies of records, `stages` deep; the first are issued before the
//                  previous kernel has ended (PDL), since weights do not depend on it
//     warp 1       producer: activations of each stage, once the previous kernel has ended
//     warps 2, 3   sums of a stage's activations (summed.cuh), while others multiply; not there
//                  where a block has one band
//     8 warps      consumers: two teams that take stages by turns (team_loops.cuh)
//
// w4a16_normed gets a few tokens before their RMS norm. While weights arrive, the eight warps norm
// the inputs of their block into shared memory, where warp 1 finds them.
//
// Two blocks fit on an SM: one that computes, and one of the next kernel that prefetches weights.
#pragma once

#include "billfish/norm.cuh"
#include "billfish/team_loops.cuh"
#include "billfish/wgmma.cuh"

namespace billfish {

// Shared memory: [barriers, 384 B][stages][partial sums]; where x is normed, sums of its squares
// and its rows come before the stages. tile.py counts the same.
constexpr int kBarrierBytes = 384;

#if __CUDA_ARCH__ >= 900

// Of a normed token: the inputs of a block, of the one that has more.
template <int kCtas>
constexpr BILLFISH_DEVICE int normed_bytes(int k_tiles) {
    return (k_tiles + kCtas - 1) / kCtas * kRecordK * 2;
}

// Both kernels. `x` is (m, x_k) or, kNormed, the norm of `given`.
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, int kBands, int kCtas,
          bool kNormed>
BILLFISH_DEVICE void decode(const unsigned char* __restrict__ records, const u16* __restrict__ x,
                            const Residual& given, const u16* __restrict__ bias,
                            u16* __restrict__ out, int m, int n, int x_k, int k_tiles, int stages,
                            bool gated) {
    using Stage = DecodeStage<kGroup, kAsymmetric, kTokens, kBands>;
    using Share = ShareOf<kCtas>;
    constexpr int kFirstMathWarp = first_math_warp(kBands);
    constexpr int kSlices = Stage::kSlices, kBlocks = blocks_of(kTokens);

    extern __shared__ __align__(128) unsigned char smem[];
    const u32 base = smem_address(smem);
    const u32 full = base, summed = base + 128;  // of one team, then of the other
    const u32 empty = base + 256, reduced = base + 320, freed = reduced + 8, ready = freed + 8;
    const u32 squares = base + kBarrierBytes, normed = squares + kNormSums;
    const u32 ring = kNormed ? normed + m * normed_bytes<kCtas>(k_tiles) : base + kBarrierBytes;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            for (int team = 0; team < kTeams; ++team) {  // the bulk copy, and each lane's of x
                barrier_init(full + team * kTeamBarriers + 8 * i, 1 + 32);
                barrier_init(summed + team * kTeamBarriers + 8 * i, 32);
            }
            barrier_init(empty + 8 * i, kTeamWarps + Stage::kSummed);
        }
        barrier_init(reduced, 1);
        barrier_init(freed, kMathWarps);
        barrier_init(ready, 32 * kMathWarps);
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
            const int team = warp - kCopyWarps;  // whose stages it sums
            dependency_wait();
            TeamSlot slot(team);
            for (int left = passes * ((span + kSlices - 1) / kSlices) - team; left > 0;
                 left -= kTeams) {
                const u32 stage = ring + slot.index() * Stage::kBytes;
                const u32 own = full + team * kTeamBarriers + 8 * slot.index();
                barrier_wait(own, slot.parity(stages));
#pragma unroll 1
                for (int item = 0; item < kSlices * kBlocks; ++item) {  // 8 tokens of a slice
                    const int sub = item / kBlocks;
                    sum_tokens<T, kGroup, kTokens>(
                        stage + Stage::kX + sub * x_bytes(kTokens),
                        stage + Stage::kSums + sub * Stage::kSumsBytes, item % kBlocks, lane);
                }
                barrier_arrive(own + (summed - full));
                __syncwarp();
                if (lane == 0) barrier_arrive((own & ~kTeamBarriers) + (empty - full));
                slot.advance(stages);
            }
        } else {
            // Lanes 0-15 copy even tokens, 16-31 odd ones. An odd m copies one row twice.
            const int chunk = lane % 16, x_tiles = (x_k + kRecordK - 1) / kRecordK;
            const u32 to = ring + Stage::kX + x_smem_offset<kTokens>(lane / 16, chunk);
            slot.parity = 1;
            if (kNormed)
                barrier_wait(ready, 0);
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
                                    there, load_smem_16(normed + chunk * 16 + own +
                                                        token * normed_bytes<kCtas>(k_tiles)));
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
        constexpr int kThreads = 32 * kMathWarps;
        constexpr int kOwn = (kNormThreads / kCtas + kThreads - 1) / kThreads;
        const Share share(n, k_tiles);
        norm_rows<T, kMathWarps, kOwn>(given, threadIdx.x - 32 * kFirstMathWarp, m, x_k,
                                       share.k_begin * (kRecordK / 8), share.span * (kRecordK / 8),
                                       squares, normed, normed_bytes<kCtas>(k_tiles),
                                       [] { sync_some<1, kThreads>(); });
        barrier_arrive(ready);
    }
    const Ring places{ring, full, empty, summed, reduced, freed, stages};
    if constexpr (Stage::kSummed)
        multiply_teams<T, S, kGroup, kAsymmetric, kTokens, kBands, kCtas, kNormed>(
            places, bias, out, m, n, k_tiles, gated);
    else
        multiply_one<T, S, kGroup, kAsymmetric, kTokens, kNormed>(places, bias, out, m, n, k_tiles,
                                                                  gated);
}

#endif

// `records` is (bands, k tiles) records, `x` (m, x_k), `out` (m, n). Columns of x repeat after its
// last tile: codes of more than 4 bits are two planes of nibbles along k. `gated`: of every 16 rows
// the first 8 are gates and the others their ups (gated.py), and `out` is (m, n / 2).
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, int kBands,
          int kCtas = kCluster>
__global__ void __launch_bounds__(decode_threads(kBands), blocks_of_sm(kTokens, kBands))
w4a16_decode(const unsigned char* __restrict__ records, const u16* __restrict__ x,
             const u16* __restrict__ bias, u16* __restrict__ out, int m, int n, int x_k,
             int k_tiles, int stages, bool gated) {
#if __CUDA_ARCH__ >= 900
    decode<T, S, kGroup, kAsymmetric, kTokens, kBands, kCtas, false>(
        records, x, Residual{}, bias, out, m, n, x_k, k_tiles, stages, gated);
#endif
}

// The same of 16 tokens and one band. There it would take 91 registers of a thread. A quarter of an
// SM has 16384: with 88, three warps of a block and three of the next kernel's, of 80, fit there
// together, and that one starts before this has ended. A step of 16 sequences of 8B takes 0.5 to
// 1.8 % less. Smaller groups would spill, and so would the code for Blackwell.
template <class T, class S, int kGroup, bool kAsymmetric>
__global__ void __maxnreg__(kMovesRegisters ? 88 : 96)
w4a16_decode_beside(const unsigned char* __restrict__ records, const u16* __restrict__ x,
                    const u16* __restrict__ bias, u16* __restrict__ out, int m, int n, int x_k,
                    int k_tiles, int stages, bool gated) {
#if __CUDA_ARCH__ >= 900
    decode<T, S, kGroup, kAsymmetric, 16, 1, kCluster, false>(
        records, x, Residual{}, bias, out, m, n, x_k, k_tiles, stages, gated);
#endif
}

// The same of x = the RMS norm of hidden (m, k) + delta, unless that is null, with the bits of
// rms_norm (engine/cuda/small.cuh); `summed` gets the sum. One plane, k a multiple of 8 up to 8192,
// `threads` of kernels/norm.py, m up to kMostNormed, and as many blocks.
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, int kBands,
          int kCtas = kCluster>
__global__ void __launch_bounds__(decode_threads(kBands), 2)
w4a16_normed(const unsigned char* __restrict__ records, const u16* hidden, const u16* delta,
             const u16* weight, u16* summed, int threads, float eps,
             const u16* __restrict__ bias, u16* __restrict__ out, int m, int n, int k, int k_tiles,
             int stages, bool gated) {
#if __CUDA_ARCH__ >= 900
    const Residual given{hidden, delta, weight, summed, threads, eps};
    decode<T, S, kGroup, kAsymmetric, kTokens, kBands, kCtas, true>(
        records, nullptr, given, bias, out, m, n, k, k_tiles, stages, gated);
#endif
}

}  // namespace billfish
