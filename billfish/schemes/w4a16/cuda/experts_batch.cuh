// w4a16_experts_batch: the products of all experts of a layer with many tokens each, in one launch,
// sm_90a.
//
// x has a row for each pair of a token and one of its experts, sorted by expert (route in
// kernels/experts.cuh). An item is up to kTokens rows of one expert; a tile is an item x 128 kBands
// outputs. Blocks take every gridDim.x-th tile, whole: there are many. Rows behind an item's own,
// of another expert, are multiplied and not stored. Warps are w4a16_batch's.
#pragma once

#include "billfish/decoded.cuh"

namespace billfish {

#if __CUDA_ARCH_FEAT_SM90_ALL

// A block's tiles. Those of one item follow each other: they share x, and with the next item of the
// same expert weights, in L2.
struct ItemWalk {
    const u32* items;
    int n_tiles, tile, tiles;
    int expert, first, end, n_tile;
    BILLFISH_DEVICE ItemWalk(const u32* items, int n_tiles)
        : items(items), n_tiles(n_tiles), tile(blockIdx.x), tiles(load_global_4(items) * n_tiles) {}
    BILLFISH_DEVICE bool next() {
        if (tile >= tiles) return false;
        const int item = tile / n_tiles;
        const uint4 v = load_global_16(items + 4 * (1 + item));
        expert = v.x, first = v.y, end = v.z, n_tile = tile - item * n_tiles;
        tile += gridDim.x;
        return true;
    }
};

#endif

// `records` is (experts, bands, k tiles) records, `x` maps (pairs, k) in boxes of 64 inputs x
// kTokens rows, `items` is route's, `out` is (pairs, n). `known`: the items were there before the
// previous kernel began, so that weights are fetched before that has ended. `gated`: of every 16
// rows the first 8 are gates and the others their ups (gated.py), and `out` is (pairs, n / 2).
template <class T, int kGroup, bool kAsymmetric, int kTokens, int kBands>
__global__ void __launch_bounds__(kBatchThreads, two_fit(kTokens, kBands) ? 2 : 1)
w4a16_experts_batch(const unsigned char* __restrict__ records, const __grid_constant__ TensorMap x,
                    const u32* items, u16* out, int n, int n_tiles, int k_tiles, int stages,
                    bool known, bool gated) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    using Stage = DecodedStage<kGroup, kAsymmetric, kTokens, kBands>;
    extern __shared__ __align__(1024) unsigned char smem[];
    const BatchPlaces places{smem_address(smem)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(places.full(i), 1);            // and the bytes of the copies
            barrier_init(places.empty(i), 4 * kTeams);  // warps that multiply
        }
        barrier_init_fence();
    }
    if (!known) dependency_wait();
    launch_dependents();
    __syncthreads();

    ItemWalk walk(items, n_tiles);
    if (threadIdx.x < kTeamThreads) {
        give_registers<two_fit(kTokens, kBands) ? 32 : 40>();
        Slot slot(1);  // the first round finds every slot empty
        if (threadIdx.x == 0) {
            const u64 policy = keep_policy();
            const int bands = (n + kRecordN - 1) / kRecordN;
#pragma unroll 1
            while (walk.next()) {
                const int band = walk.n_tile * kTeams * kBands;
                const int here = min(kTeams * kBands, bands - band);
                const u64 row = static_cast<u64>(walk.expert) * bands + band;
                const unsigned char* from = records + row * k_tiles * Stage::kRecordBytes;
#pragma unroll 1
                for (int i = 0; i < k_tiles; ++i, from += Stage::kRecordBytes) {
                    const u32 full = places.full(slot.index);
                    barrier_wait(places.empty(slot.index), slot.parity);
                    barrier_arrive_expect(full, Stage::kRecords + here * Stage::kRecordBytes);
                    const u32 to = places.ring() + slot.index * Stage::kBytes + Stage::kRecords;
#pragma unroll 1
                    for (int j = 0; j < here; ++j)
                        copy_bulk(to + j * Stage::kRecordBytes,
                                  from + static_cast<u64>(j * k_tiles) * Stage::kRecordBytes,
                                  Stage::kRecordBytes, full, policy);
                    slot.next(stages);
                }
            }
        } else if (threadIdx.x == 32) {
            dependency_wait();
#pragma unroll 1
            while (walk.next()) {
#pragma unroll 1
                for (int i = 0; i < k_tiles; ++i) {
                    const u32 to = places.ring() + slot.index * Stage::kBytes;
                    barrier_wait(places.empty(slot.index), slot.parity);
#pragma unroll
                    for (int line = 0; line < 2; ++line)  // zeros past the last row and input
                        copy_tensor(to + line * kTokens * kXLine, x, (i * 2 + line) * (kXLine / 2),
                                    walk.first, places.full(slot.index));
                    slot.next(stages);
                }
            }
        }
        return;
    }
    take_registers<two_fit(kTokens, kBands) ? 104 : 232>();

    const int thread = threadIdx.x - kTeamThreads, team = thread / kTeamThreads;
    const int warp = thread / 32 % 4, lane = thread % 32;
    const u32 turn = places.ring() + stages * Stage::kBytes + thread / 32 * kTurnBytes;
    Slot slot(0);
    if (known) dependency_wait();  // the previous kernel may still read `out`
#pragma unroll 1
    while (walk.next()) {
        float acc[kBands][kTokens / 2] = {};
        multiply_tile<T, kGroup, kAsymmetric, kTokens, kBands>(acc, slot, k_tiles, stages, places,
                                                               thread);
        const int row = (walk.n_tile * kTeams + team) * kBands * kRecordN + warp * 16;
#pragma unroll
        for (int band = 0; band < kBands; ++band)
            store_results<T, kTokens>(acc[band], nullptr, out, walk.end, n, walk.first,
                                      row + band * kRecordN, gated, turn, lane);
    }
#endif
}

}  // namespace billfish
