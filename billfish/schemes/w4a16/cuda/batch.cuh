// w4a16_batch: y (m, n) = x (m, k) W^T for many tokens (batch.py, takes_few) on wgmma, sm_90a.
//
// Weights are wgmma's A operand, from registers: a lane's 16 bytes of a record are its own
// fragments here, too (QUICK), so that one record serves every m. x is the B operand, in shared
// memory. Weights are decoded once a tile: (code - zero point) * scale, rounded once; of more than
// 4 bits, each of their two planes.
//
//     tile         64 kOwnTeams kBands outputs x kTokens tokens; a band is 64, the n of a record
//     block        takes whole tiles, then its stripe of those that are split along k (MARLIN 3.4)
//     warps 0, 1   producers: bulk copies of records, `stages` deep, issued before the previous
//                  kernel has ended (PDL), and TMA copies of x once it has. Both run ahead across
//                  the ends of tiles
//     warps 4-     consumers: two or three warpgroups, kBands bands each. While the tensor cores
//                  multiply 64 inputs of a band, the weights of the next 64 are decoded
//     split-K      the block with a tile's first inputs adds the other blocks' sums in the order of
//                  k, or a cluster of two that shares a tile does: the same bits in every run
#pragma once

#include "billfish/decoded.cuh"
#include "billfish/results.cuh"

namespace billfish {

// Registers of a thread that multiplies, and of one that copies. Three warpgroups have 160 at most:
// enough for 160 tokens.
struct BatchRegisters {
    int multiply, copy;
    constexpr BILLFISH_DEVICE BatchRegisters(int tokens, int bands, int teams)
        : multiply(teams > 2 ? 160 : two_fit(tokens, bands) ? 104 : 232),
          copy(multiply == 232 ? 40 : 32) {}
};

// `records` is (bands, k tiles) records, `x` maps (m, k) in boxes of 64 inputs x kTokens tokens,
// `out` is (m, n): m_tiles x n_tiles tiles, of which the first `whole` are not split; or each is
// split over a cluster of two blocks (`splits` 2); or blocks are `twins`, which n_tiles counts once
// (tiles.cuh). The next kernel may start `early` where every SM has a block, or room for one only;
// else once all is fetched, because its blocks would crowd on the free SMs and then wait for each
// other (8192 x 8192, 64 tokens, whole tiles: 58 us instead of 38).
// `gated`: of every 16 rows the first 8 are gates and the others their ups (gated.py), and `out` is
// (m, n / 2).
template <class T, int kGroup, bool kAsymmetric, int kTokens, int kBands, int kOwnTeams>
__global__ void __launch_bounds__((1 + kOwnTeams) * kTeamThreads,
                                  kOwnTeams == 2 && two_fit(kTokens, kBands) ? 2 : 1)
w4a16_batch(const unsigned char* __restrict__ records, const __grid_constant__ TensorMap x,
            const u16* __restrict__ bias, u16* __restrict__ out, float* __restrict__ workspace,
            u32* __restrict__ locks, int m, int n, int m_tiles, int n_tiles, int k_tiles,
            int x_tiles, int whole, int splits, bool twins, int stages, bool early, bool gated) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    using Stage = DecodedStage<kGroup, kAsymmetric, kTokens, kOwnTeams * kBands>;
    constexpr int kRows = kOwnTeams * kBands * kRecordN, kThreads = kOwnTeams * kTeamThreads;
    constexpr BatchRegisters kRegisters(kTokens, kBands, kOwnTeams);
    static_assert(kMostBatchStages * 16 <= kBatchBarrierBytes, "barriers");

    extern __shared__ __align__(1024) unsigned char smem[];
    const BatchPlaces places{smem_address(smem)};
    if (early) launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(places.full(i), 1);            // and the bytes of the copies
            barrier_init(places.empty(i), 4 * kOwnTeams << twins);  // warps that multiply
        }
        barrier_init(places.met(), 1);  // and the bytes of the other block's sums
        barrier_init_fence();
    }
    __syncthreads();
    if (twins) cluster_arrive(), cluster_wait();  // both have barriers

    ClusterWalkOf<true> walk(k_tiles, whole, m_tiles * n_tiles, splits, twins);
    if (threadIdx.x < kTeamThreads) {
        give_registers<kRegisters.copy>();
        if (threadIdx.x == 0) {
            copy_records<Stage, kOwnTeams * kBands>(records, (n + kRecordN - 1) / kRecordN, m_tiles,
                                                    n_tiles, walk, stages, places, twins);
        } else if (threadIdx.x == 32) {
            prefetch_map(x);
            dependency_wait();
            copy_x<kTokens>(x, m_tiles, n_tiles, walk, stages, Stage::kBytes, places,
                            x_tiles, twins);
            if (!early) launch_dependents();  // the first call of a block counts
        }
        __syncwarp();
        if (twins || splits > 1) cluster_arrive(), cluster_wait();
        return;
    }
    take_registers<kRegisters.multiply>();

    const int thread = threadIdx.x - kTeamThreads, lane = thread % 32;
    Slot slot(0);
    dependency_wait();  // rather than polling a barrier until x arrives
#pragma unroll 1
    while (walk.next()) {
        float acc[kBands][kTokens / 2] = {};
        multiply_tile<T, kGroup, kAsymmetric, kTokens, kBands, kOwnTeams>(
            acc, slot, walk.count, stages, places, thread, twins);
        const TilePlaceOf<true> place(walk.tile, m_tiles, n_tiles);
        const int token_0 = place.m_tile * kTokens;
        // From the thread's index again: kept over the main loop it would cost registers and spill.
        const int team = thread_index() / kTeamThreads - 1;
        const int row_0 = own_tile(place.n_tile, twins) * kRows + team * kBands * kRecordN;
        const u32 turn = places.ring() + stages * Stage::kBytes +
                         team * result_buffers(kTokens) * kResultBytes;
        int first = 0, last = kTokens / 16;  // 16s of the tokens that are stored here
        if (splits > 1) {
            const Halves<kBands, kTokens, kThreads> halves(blockIdx.x % 2);
            halves.add(acc, places.ring(), places.met(), thread);
            first = halves.first, last = halves.last;
        } else {
            MeetingPlace<kBands * kTokens / 2, float, kThreads> here(
                workspace, locks, walk.own() + (twins ? blockIdx.x % 2 * walk.all() : 0), thread);
            if (walk.first > 0) {
                here.leave(&acc[0][0], lane);
                continue;
            }
            const int others = walk.others();
            if (others > 0) here.collect(&acc[0][0], others, lane);
        }
#pragma unroll
        for (int band = 0; band < kBands; ++band)
            store_tile<T, kTokens>(acc[band], first, last, bias, out, m, n, token_0,
                                   row_0 + band * kRecordN, gated, turn, 1 + team,
                                   thread_index());
    }
    if (twins) cluster_arrive(), cluster_wait();  // a block stays until nothing more comes from it
#endif
}

}  // namespace billfish
