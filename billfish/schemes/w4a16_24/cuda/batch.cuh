// w4a16_24_batch: y (m, n) = x (m, k) W^T for m > 16 with 2:4 sparse 4-bit weights, on the sparse
// tensor cores of sm_90a.
//
// Weights are wgmma's A operand, from registers: a lane's 16 bytes of a record are its fragments of
// 128 inputs, of which 64 were kept, and 8 bytes say which (sparse.cuh). They are decoded once a
// tile: (code - 8) * scale, rounded once. x is the B operand, in shared memory, all of its inputs.
// Tiles, ring, split-K: as w4a16_batch (tiles.cuh).
#pragma once

#include "billfish/sparse.cuh"
#include "billfish/tiles.cuh"

namespace billfish {

// One stage of the ring: 128 inputs. x first: the swizzle needs an alignment of 1024 bytes.
template <int kGroup, int kTokens, int kBands>
struct SparseStage {
    static constexpr int kRecordBytes = SparseRecord<kGroup>::kBytes;
    static constexpr int kRecords = x_bytes(kTokens);  // byte offset
    static constexpr int kBytes = (kRecords + kTeams * kBands * kRecordBytes + 1023) / 1024 * 1024;
};

#if __CUDA_ARCH_FEAT_SM90_ALL

// A lane's fragments of the 32 inputs of a step, decoded; `bits` are the scales of its two outputs.
template <class T>
BILLFISH_DEVICE void decode_step(u32 word, u32 bits, u32 (&a)[4]) {
    const u32 scale[2] = {lower_twice(bits), upper_twice(bits)};
    const u32 zero[2] = {Exact<T>::zero(8, false) * 0x00010001u,
                         Exact<T>::zero(8, true) * 0x00010001u};
    Exact<T>::fragment(word, scale, zero, a);
}

#endif

// `records` is (bands, k tiles) records, `x` maps (m, k) in boxes of 64 inputs x kTokens tokens,
// `out` is (m, n): m_tiles x n_tiles tiles, of which the first `whole` are not split; or each is
// split over a cluster of `splits` blocks. `early` and `gated`: as w4a16_batch.
template <class T, int kGroup, int kTokens, int kBands>
__global__ void __launch_bounds__(kBatchThreads, two_fit(kTokens, kBands) ? 2 : 1)
w4a16_24_batch(const unsigned char* __restrict__ records, const __grid_constant__ TensorMap x,
               const u16* __restrict__ bias, u16* __restrict__ out, float* __restrict__ workspace,
               u32* __restrict__ locks, int m, int n, int m_tiles, int n_tiles, int k_tiles,
               int whole, int splits, int stages, bool early, bool gated) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    using Stage = SparseStage<kGroup, kTokens, kBands>;
    using R = SparseRecord<kGroup>;
    constexpr int kRows = kTeams * kBands * kRecordN;
    static_assert(kMostBatchStages * 16 <= kBatchBarrierBytes, "barriers");

    extern __shared__ __align__(1024) unsigned char smem[];
    const BatchPlaces places{kept(smem_address(smem), 0)};
    if (early) launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(places.full(i), 1);            // and the bytes of the copies
            barrier_init(places.empty(i), 4 * kTeams);  // warps that multiply
        }
        barrier_init_fence();
    }
    __syncthreads();

    const int bands = (n + kRecordN - 1) / kRecordN;
    ClusterWalk walk(k_tiles, whole, m_tiles * n_tiles, splits);
    if (threadIdx.x < kTeamThreads) {
        give_registers<two_fit(kTokens, kBands) ? 32 : 40>();
        if (threadIdx.x == 0) {
            copy_records<Stage, kTeams * kBands>(records, bands, m_tiles, n_tiles, walk, stages,
                                                 places);
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
    const u32 turn = places.ring() + stages * Stage::kBytes + thread / 32 * kTurnBytes;
    const u32 words_at = kept(warp * kBrickBytes + lane * 16, lane);  // in a record
    const u32 scales_at = kept(R::kScales + (warp / 2 * 8 + lane / 4) * 8 + warp % 2 * 4, lane);
    ReadSlot slot{places.ring(), places.full(0), 0};
    const bool never = stages < 0;
#pragma unroll 1
    while (walk.next()) {
        const TilePlace place(walk.tile, m_tiles, n_tiles);
        const int token_0 = place.m_tile * kTokens;
        const int row_0 = place.n_tile * kRows + team * kBands * kRecordN + warp * 16;
        // A band past the last output is the last one again: its own memory holds no metadata.
        const int last = min(kTeams * kBands, bands - place.n_tile * kTeams * kBands) - 1;
        u32 records_at[kBands];
#pragma unroll
        for (int band = 0; band < kBands; ++band)
            records_at[band] =
                kept(Stage::kRecords + min(team * kBands + band, last) * Stage::kRecordBytes, 0);
        float acc[kBands][kTokens / 2] = {};
        {
            // Of 64 inputs: fragments and metadata, in flight and being decoded. A product reads
            // its metadata when it begins, not when it is issued, and ptxas does not know: loaded
            // for the next product, it changed one that still waited (256 tokens: 2 to 7 % off). So
            // no product is in flight where the loop turns, and stores that never happen keep the
            // registers until products have ended.
            u32 a[2][2][4], marks[2];
            uint4 words = {};
            u32 bits = 0;
            const auto prepare = [&](int unit) {
                const int k64 = unit % 2;
                const u32 record = slot.stage + records_at[unit / 2];
                if (k64 == 0) words = load_smem_16(record + words_at);
                marks[k64] = load_smem_4(record + R::kMetadata + words_at / 2 + k64 * 4);
                const u32 both[2] = {k64 ? words.z : words.x, k64 ? words.w : words.y};
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    const int k = k64 * 64 + step * 32;
                    if (k % kGroup == 0)
                        bits = load_smem_4(record + scales_at + k / kGroup * 128);
                    decode_step<T>(both[step], bits, a[k64][step]);
                }
            };
            barrier_wait(slot.full, slot.parity);
            prepare(0);
            for (int i = 0; i < walk.count; ++i) {
                const u64 x_at = x_descriptor(slot.stage);
                const u32 read = slot.empty();
#pragma unroll
                for (int unit = 0; unit < 2 * kBands; ++unit) {
                    const int k64 = unit % 2;
                    wgmma_fence();
#pragma unroll
                    for (int step = 0; step < 2; ++step)  // 64 bytes on
                        wgmma_sparse(T(), acc[unit / 2], a[k64][step],
                                     x_further(x_at, k64 * kTokens * kXLine + step * 64),
                                     marks[k64], step);
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (unit > 0 && never) store_smem_4(turn, marks[1 - k64]);
                    if (unit + 1 < 2 * kBands) prepare(unit + 1);
                }
                slot.next(places, stages, Stage::kBytes);
                if (i + 1 < walk.count) {
                    barrier_wait(slot.full, slot.parity);
                    prepare(0);
                }
                wgmma_wait<0>();
                if (never) store_smem_4(turn, marks[1]);
                if (lane == 0) barrier_arrive(read);
            }
        }
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
        const int others = walk.others();
        if (others > 0) here.collect(&acc[0][0], others, lane);
#pragma unroll
        for (int band = 0; band < kBands; ++band)
            store_results<T, kTokens>(acc[band], bias, out, m, n, token_0,
                                      row_0 + band * kRecordN, gated, turn, lane);
    }
#endif
}

}  // namespace billfish
