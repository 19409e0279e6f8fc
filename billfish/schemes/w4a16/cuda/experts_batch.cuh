// w4a16_experts_batch: the products of all experts of a layer with many tokens each, in one launch,
// sm_90a.
//
// x has a row for each pair of a token and one of its experts, sorted by expert (route in
// kernels/experts.cuh). An item is up to kTokens rows of one expert; a tile is an item x 128 kBands
// outputs. How many there are only the items say: blocks divide them here, whole tiles first, the
// last ones along k, so that all end together however tokens are spread. Rows behind an item's own,
// of another expert, are multiplied and not stored. Warps and sums are w4a16_batch's.
#pragma once

#include "billfish/decoded.cuh"

namespace billfish {

// Tiles are split where SMs would else idle for longer than a reduction takes, in stages (5.4 us of
// 0.8 us each with 32 tokens, 9.4 of 1.5 with 128), and never into stripes of fewer than four.
constexpr int kMeetingStages = 6, kLeastStripe = 4;

#if __CUDA_ARCH_FEAT_SM90_ALL

// A block's tiles. Those of one item follow each other: they share x, and with the next item of the
// same expert weights, in L2.
struct ItemWalk : Walk {
    const u32* items;
    int n_tiles, expert, row, end, n_tile;
    BILLFISH_DEVICE ItemWalk(const u32* items, int n_tiles, int k_tiles)
        : Walk(k_tiles, 0, load_global_4(items) * n_tiles), items(items), n_tiles(n_tiles) {
        const int blocks = gridDim.x, rounds = (tiles + blocks - 1) / blocks;
        whole = max(0, rounds - 2) * blocks;  // stripes are one to two tiles long
        if ((rounds * blocks - tiles) * k_tiles <= kMeetingStages * blocks ||
            (tiles - whole) * k_tiles < kLeastStripe * blocks)
            whole = tiles;
    }
    BILLFISH_DEVICE bool next() {
        if (!Walk::next()) return false;
        const int item = tile / n_tiles;
        const uint4 v = load_global_16(items + 4 * (1 + item));
        expert = v.x, row = v.y, end = v.z, n_tile = tile - item * n_tiles;
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
                    const u32* items, u16* out, float* __restrict__ workspace,
                    u32* __restrict__ locks, int n, int n_tiles, int k_tiles, int stages,
                    bool known, bool gated) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    using Stage = DecodedStage<kGroup, kAsymmetric, kTokens, kTeams * kBands>;
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

    ItemWalk walk(items, n_tiles, k_tiles);
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
                const unsigned char* from =
                    records + (row * k_tiles + walk.first) * Stage::kRecordBytes;
#pragma unroll 1
                for (int i = 0; i < walk.count; ++i, from += Stage::kRecordBytes) {
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
                for (int i = walk.first; i < walk.first + walk.count; ++i) {
                    const u32 to = places.ring() + slot.index * Stage::kBytes;
                    barrier_wait(places.empty(slot.index), slot.parity);
#pragma unroll
                    for (int line = 0; line < 2; ++line)  // zeros past the last row and input
                        copy_tensor(to + line * kTokens * kXLine, x, (i * 2 + line) * (kXLine / 2),
                                    walk.row, places.full(slot.index));
                    slot.next(stages);
                }
            }
        }
        return;
    }
    take_registers<two_fit(kTokens, kBands) ? 104 : 232>();

    const int thread = threadIdx.x - kTeamThreads, lane = thread % 32;
    Slot slot(0);
    if (known) dependency_wait();  // the previous kernel may still read `out`
#pragma unroll 1
    while (walk.next()) {
        float acc[kBands][kTokens / 2] = {};
        multiply_tile<T, kGroup, kAsymmetric, kTokens, kBands>(acc, slot, walk.count, stages,
                                                               places, thread);
        MeetingPlace<kBands * kTokens / 2> here(workspace, locks, blockIdx.x, thread);
        if (walk.first > 0) {
            here.leave(&acc[0][0], lane);
            continue;
        }
        const int others = walk.others();
        if (others > 0) here.collect(&acc[0][0], others, lane);
        // From the thread's index again, as in w4a16_batch.
        const int mine = thread_index() / 32 - 4;
        const int row_0 = (walk.n_tile * kTeams + mine / 4) * kBands * kRecordN + mine % 4 * 16;
        const u32 turn = places.ring() + stages * Stage::kBytes + thread / 32 * kTurnBytes;
#pragma unroll
        for (int band = 0; band < kBands; ++band)
            store_results<T, kTokens>(acc[band], nullptr, out, walk.end, n, walk.row,
                                      row_0 + band * kRecordN, gated, turn, lane);
    }
#endif
}

}  // namespace billfish
