// w4a16_batch: y (m, n) = x (m, k) W^T for m > 16 on the tensor cores of sm_90a.
//
// Weights are wgmma's A operand, from registers: a lane's 16 bytes of a record are its own
// fragments here, too (QUICK), so that one record serves every m. x is the B operand, in shared
// memory. Weights are decoded once a tile: (code - zero point) * scale, rounded once.
//
//     tile         128 kBands outputs x kTokens tokens; a band is 64 outputs, the n of a record
//     block        takes whole tiles, then its stripe of those that are split along k (MARLIN 3.4)
//     warps 0, 1   producers: bulk copies of records, `stages` deep, issued before the previous
//                  kernel has ended (PDL), and TMA copies of x once it has. Both run ahead across
//                  the ends of tiles
//     warps 4-11   consumers: two warpgroups, kBands bands each. While the tensor cores multiply 64
//                  inputs of a band, the weights of the next 64 are decoded
//     split-K      the block with a tile's first inputs adds the other blocks' sums in the order of
//                  k, or a cluster that shares a tile does: the same bits in every run
#pragma once

#include "billfish/record.cuh"
#include "billfish/tiles.cuh"

namespace billfish {

// One stage of the ring: 128 inputs. x first: the swizzle needs an alignment of 1024 bytes.
template <int kGroup, bool kAsymmetric, int kTokens, int kBands>
struct BatchStage {
    static constexpr int kRecordBytes = Record<kGroup, kAsymmetric>::kBytes;
    static constexpr int kRecords = x_bytes(kTokens);  // byte offset
    static constexpr int kBytes = (kRecords + kTeams * kBands * kRecordBytes + 1023) / 1024 * 1024;
};

// Scale and zero point of a lane's two outputs of 16, r and r + 8, in both halves of a register.
struct Grain {
    u32 scale[2], zero[2];
    template <class T, class R>
    static BILLFISH_DEVICE Grain load(u32 record, int group, int warp, int lane) {
        const int place = warp / 2 * 8 + lane / 4, right = warp % 2;
        const u32 bits = load_smem_4(record + R::kScales + group * 128 + place * 8 + right * 4);
        u32 zeros = 0x88;
        if (R::kZeros < R::kBytes)
            zeros = load_smem_2(record + R::kZeros + group * 32 + place * 2) >> right * 8;
        Grain grain;
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            grain.scale[lower] = (lower ? bits >> 16 : bits & 0xffff) * 0x00010001u;
            grain.zero[lower] = Exact<T>::zero(zeros >> 4 * lower & 15, lower) * 0x00010001u;
        }
        return grain;
    }
};

// `records` is (bands, k tiles) records, `x` maps (m, k) in boxes of 64 inputs x kTokens tokens,
// `out` is (m, n): m_tiles x n_tiles tiles, of which the first `whole` are not split; or each is
// split over a cluster of `splits` blocks. The next
// kernel may start `early` where every SM has a block, or room for one only; else once all is
// fetched, because its blocks would crowd on the free SMs and then wait for each other (8192 x
// 8192, 64 tokens, whole tiles: 58 us instead of 38). `gated`: of every 16 rows the first 8 are
// gates and the others their ups (gated.py), and `out` is (m, n / 2).
template <class T, int kGroup, bool kAsymmetric, int kTokens, int kBands>
__global__ void __launch_bounds__(kBatchThreads, two_fit(kTokens, kBands) ? 2 : 1)
w4a16_batch(const unsigned char* __restrict__ records, const __grid_constant__ TensorMap x,
            const u16* __restrict__ bias, u16* __restrict__ out, float* __restrict__ workspace,
            u32* __restrict__ locks, int m, int n, int m_tiles, int n_tiles, int k_tiles, int whole,
            int splits, int stages, bool early, bool gated) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    using Stage = BatchStage<kGroup, kAsymmetric, kTokens, kBands>;
    using R = Record<kGroup, kAsymmetric>;
    constexpr int kRows = kTeams * kBands * kRecordN;
    static_assert(kMostBatchStages * 16 <= kBatchBarrierBytes, "barriers");

    extern __shared__ __align__(1024) unsigned char smem[];
    const BatchPlaces places{smem_address(smem)};
    if (early) launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(places.full(i), 1);            // and the bytes of the copies
            barrier_init(places.empty(i), 4 * kTeams);  // warps that multiply
        }
        barrier_init_fence();
    }
    __syncthreads();

    ClusterWalk walk(k_tiles, whole, m_tiles * n_tiles, splits);
    if (threadIdx.x < kTeamThreads) {
        give_registers<two_fit(kTokens, kBands) ? 32 : 40>();
        if (threadIdx.x == 0) {
            copy_records<Stage, kBands>(records, (n + kRecordN - 1) / kRecordN, m_tiles, n_tiles,
                                        walk, stages, places);
        } else if (threadIdx.x == 32) {
            dependency_wait();
            copy_x<kTokens>(x, m_tiles, n_tiles, walk, stages, Stage::kBytes, places);
            if (!early) launch_dependents();  // the first call of a block counts
        }
        __syncwarp();
        for (int i = 0; splits > 1 && i < 2; ++i) cluster_arrive(), cluster_wait();
        return;
    }
    take_registers<two_fit(kTokens, kBands) ? 104 : 232>();

    const int thread = threadIdx.x - kTeamThreads, team = thread / kTeamThreads;
    const int warp = thread / 32 % 4, lane = thread % 32;
    Slot slot(0);
#pragma unroll 1
    while (walk.next()) {
        float acc[kBands][kTokens / 2] = {};
        {
            u32 a[2][4][4];  // fragments of 64 inputs, two buffers: in flight, and being decoded
            for (int i = 0; i < walk.count; ++i) {
                // The same in all lanes, which ptxas only sees so: else it moves every descriptor to
                // uniform registers anew, 16 cycles each (8192 x 57344, 32 tokens: 104 -> 89 us).
                const u32 stage = kept(places.ring() + slot.index * Stage::kBytes, 0);
                const u64 x_at = x_descriptor(stage);
                Grain grain[kBands];
                uint4 words[kBands][2];
                barrier_wait(places.full(slot.index), slot.parity);
#pragma unroll
                for (int unit = 0; unit < 2 * kBands; ++unit)
                    words[unit / 2][unit % 2] = load_smem_16(
                        stage + Stage::kRecords + (team * kBands + unit / 2) * Stage::kRecordBytes +
                        (unit % 2 * 4 + warp) * kBrickBytes + lane * 16);
#pragma unroll
                for (int unit = 0; unit < 2 * kBands; ++unit) {
                    const int k64 = unit / kBands, band = unit % kBands;
                    const u32 record =
                        stage + Stage::kRecords + (team * kBands + band) * Stage::kRecordBytes;
                    const uint4 v = words[band][k64];
                    const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int step = 0; step < 4; ++step) {
                        const int k = k64 * 64 + step * 16;
                        if (k % kGroup == 0)
                            grain[band] = Grain::load<T, R>(record, k / kGroup, warp, lane);
                        Exact<T>::fragment(word[step], grain[band].scale, grain[band].zero,
                                           a[unit % 2][step]);
                    }
                    wgmma_fence();
#pragma unroll
                    for (int step = 0; step < 4; ++step)  // 32 bytes on
                        wgmma(T(), acc[band], a[unit % 2][step],
                              x_further(x_at, k64 * kTokens * kXLine + step * 32));
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (unit == 0 && i > 0 && lane == 0)  // the slot before has been read
                        barrier_arrive(places.empty((slot.index == 0 ? stages : slot.index) - 1));
                }
                slot.next(stages);
            }
            wgmma_wait<0>();
            if (lane == 0)
                barrier_arrive(places.empty((slot.index == 0 ? stages : slot.index) - 1));
        }
        const TilePlace place(walk.tile, m_tiles, n_tiles);
        const int token_0 = place.m_tile * kTokens;
        // From the thread's index again: kept over the main loop it would cost registers, and spill.
        const int mine = thread_index() / 32 - 4;
        const int row_0 = place.n_tile * kRows + mine / 4 * kBands * kRecordN + mine % 4 * 16;
        const u32 turn = places.ring() + stages * Stage::kBytes + thread / 32 * kTurnBytes;
        if (splits > 1) {
            const ClusterPlace<kBands * kTokens / 2, float> here(places.ring(), thread);
            sync_some<1, kTeams * kTeamThreads>();  // the ring has been read
            here.leave(&acc[0][0]);
            cluster_arrive_release();
            cluster_wait();
            const int rank = blockIdx.x % splits, parts = kTokens / 16;
#pragma unroll 1
            for (int part = parts * rank / splits; part < parts * (rank + 1) / splits; ++part) {
#pragma unroll
                for (int band = 0; band < kBands; ++band) {
                    float sums[8];
                    here.collect(sums, (band * parts + part) * 8, splits);
                    store_results<T, 16>(sums, bias, out, m, n, token_0 + part * 16,
                                         row_0 + band * kRecordN, gated, turn, lane);
                }
            }
            cluster_arrive();  // a block stays until all have read its sums
            cluster_wait();
            return;
        }
        MeetingPlace<kBands * kTokens / 2> here(workspace, locks, blockIdx.x, thread);
        if (walk.first > 0) {
            here.leave(&acc[0][0], lane);
            continue;
        }
        int others = 0;
        for (int have = walk.count; have < k_tiles; ++others)  // the last may go on elsewhere
            have += walk.stripe(others + 2) - walk.stripe(others + 1);
        if (others > 0) here.collect(&acc[0][0], others, lane);
#pragma unroll
        for (int band = 0; band < kBands; ++band)
            store_results<T, kTokens>(acc[band], bias, out, m, n, token_0,
                                      row_0 + band * kRecordN, gated, turn, lane);
    }
#endif
}

}  // namespace billfish
