// w4ax_batch: y (m, n) = x (m, k) W^T with 4-bit weights and 8-bit activations, on the int8 tensor
// cores of sm_90a.
//
// Weights are wgmma's A operand, from registers, as unsigned bytes (bytes.cuh); x is the B operand,
// 128 bytes a token and stage in shared memory. Sums are integers modulo 2^32 over all of k, in any
// order the same; scales come in the epilogue. Tiles, ring, split-K: as w4a16_batch (tiles.cuh).
#pragma once

#include "billfish/bytes.cuh"
#include "billfish/tiles.cuh"

namespace billfish {

// One stage of the ring: 128 inputs. x first: the swizzle needs an alignment of 1024 bytes.
template <int kGroup, bool kAsymmetric, int kTokens, int kBands>
struct AxStage {
    static constexpr int kRecordBytes = AxRecord<kGroup, kAsymmetric>::kBytes;
    static constexpr int kRecords = kTokens * kXLine;  // byte offset
    static constexpr int kBytes = (kRecords + kTeams * kBands * kRecordBytes + 1023) / 1024 * 1024;
};

#if __CUDA_ARCH_FEAT_SM90_ALL

// What a team's epilogue needs, in shared memory: its tile's tokens as w4ax_quant writes them, and
// the bases of its outputs. Copies are issued when the tile begins and arrive while it is
// multiplied: fetched in the epilogue, 16 tokens after 16, they took 5 us a tile. Two by turns: a
// thread may be at its next tile while others of the team still store this one.
template <int kTokens, int kBands>
struct Epilogue {
    static constexpr int kBases = kTokens * 8;  // byte offset
    static constexpr int kBytes = kBases + kBands * kRecordN * 4;
    u32 at;
    BILLFISH_DEVICE Epilogue(u32 base, int team, int turn)
        : at(base + (team * 2 + turn) * kBytes) {}
    BILLFISH_DEVICE u32 token(int i) const { return at + i * 8; }
    BILLFISH_DEVICE u32 base(int row) const { return at + kBases + row * 4; }
    // Zeros past the last token and output. `thread` of the team; 16 bytes each.
    BILLFISH_DEVICE void fetch(const uint2* tokens, const float* bases, int m, int n, int token_0,
                               int row_0, int thread) const {
        const int i = token_0 + thread * 2, row = row_0 + thread * 4;
        if (thread < kTokens / 2)
            copy_async_16(token(thread * 2), tokens + (i < m ? i : 0), i < m ? 16u : 0u);
        if (thread < kBands * kRecordN / 4)
            copy_async_16(base(thread * 4), bases + (row < n ? row : 0),
                          static_cast<u32>(max(0, min(4, n - row))) * 4);
        commit_copies();
    }
    BILLFISH_DEVICE void wait(int team) const {
        wait_copies<0>();
        sync_pair<kTeamThreads>(1 + team);
    }
};

// Epilogue, 16 tokens at a time: for all at once 256 tokens have too few registers. `acc` is
// that of tokens `token` and on of the tile, `base` those of the lane's two outputs.
template <class T, class Needs>
BILLFISH_DEVICE void scale_and_store(const u32* acc, const Needs& needs, const float (&base)[2],
                                     const u16* bias, u16* out, int m, int n, int token_0,
                                     int token, int row_0, bool gated, u32 turn, int lane) {
    float y[8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 two = load_smem_16(needs.token(token + i * 8 + lane % 4 * 2));
#pragma unroll
        for (int j = 0; j < 4; ++j)
            y[i * 4 + j] = scaled(acc[i * 4 + j], j % 2 ? two.z : two.x, j % 2 ? two.w : two.y,
                                  base[j / 2]);
    }
    store_results<T, 16>(y, bias, out, m, n, token_0 + token, row_0, gated, turn, lane);
}

#endif

// `records` is (bands, k tiles) records, `x` maps (m, bytes of a row) in boxes of 128 inputs x
// kTokens tokens, `tokens` as w4ax_quant writes it, `bases` is (n), `out` is (m, n): m_tiles x
// n_tiles tiles, of which the first `whole` are not split; or each is split over a cluster of
// `splits` blocks. `early` and `gated`: as w4a16_batch.
template <class T, int kGroup, bool kAsymmetric, int kTokens, int kBands>
__global__ void __launch_bounds__(kBatchThreads, two_fit(kTokens, kBands) ? 2 : 1)
w4ax_batch(const unsigned char* __restrict__ records, const __grid_constant__ TensorMap x,
           const uint2* tokens, const float* __restrict__ bases, const u16* __restrict__ bias,
           u16* __restrict__ out, u32* __restrict__ workspace, u32* __restrict__ locks, int m,
           int n, int m_tiles, int n_tiles, int k_tiles, int whole, int splits, int stages,
           bool early, bool gated) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    using Stage = AxStage<kGroup, kAsymmetric, kTokens, kBands>;
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
            copy_records<Stage, kTeams * kBands>(records, (n + kRecordN - 1) / kRecordN, m_tiles,
                                                 n_tiles, walk, stages, places);
        } else if (threadIdx.x == 32) {
            dependency_wait();
            copy_x<kTokens, 1>(x, m_tiles, n_tiles, walk, stages, Stage::kBytes, places);
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
    const u32 kept = places.ring() + stages * Stage::kBytes + 4 * kTeams * kTurnBytes;
    int by_turns = 0;
    Slot slot(0);
    dependency_wait();  // for x, too; makes w4ax_quant's stores visible to this thread
#pragma unroll 1
    while (walk.next()) {
        const TilePlace place(walk.tile, m_tiles, n_tiles);
        const int token_0 = place.m_tile * kTokens;
        const int row_0 = place.n_tile * kRows + team * kBands * kRecordN;
        const Epilogue<kTokens, kBands> needs(kept, team, by_turns);
        if (walk.first == 0 || splits > 1)
            needs.fetch(tokens, bases, m, n, token_0, row_0, thread % kTeamThreads);
        u32 acc[kBands][kTokens / 2] = {};
        {
            u32 a[2][2][4];  // fragments of 64 inputs, two buffers: in flight, and being decoded
            for (int i = 0; i < walk.count; ++i) {
                const u32 stage = places.ring() + slot.index * Stage::kBytes;
                const u64 x_at = x_descriptor(stage);
                AxScales<kGroup, kAsymmetric> scales[kBands];
                AxGrain grain[kBands];
                barrier_wait(places.full(slot.index), slot.parity);
#pragma unroll
                for (int unit = 0; unit < 2 * kBands; ++unit) {
                    const int k64 = unit / kBands, band = unit % kBands;
                    const u32 record =
                        stage + Stage::kRecords + (team * kBands + band) * Stage::kRecordBytes;
                    if (k64 == 0) scales[band].load(record, warp, lane);
                    const uint4 v =
                        load_smem_16(record + (k64 * 4 + warp) * kBrickBytes + lane * 16);
                    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int step = 0; step < 4; ++step) {
                        const int k = k64 * 64 + step * 16, group = k / kGroup;
                        if (k % kGroup == 0) grain[band].set(scales[band], group);
                        u32(&half)[4] = a[unit % 2][step / 2];
                        grain[band].decode(words[step], half[step % 2 * 2],
                                           half[step % 2 * 2 + 1]);
                    }
                    wgmma_fence();
#pragma unroll
                    for (int step = 0; step < 2; ++step)
                        wgmma_bytes(acc[band], a[unit % 2][step],
                                    x_at + (k64 * 64 + step * 32) / 16);
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
        const auto store = [&](const u32* sums, int band, int token) {
            const int row = band * kRecordN + warp * 16;
            const float base[2] = {load_smem_float(needs.base(row + lane / 4)),
                                   load_smem_float(needs.base(row + lane / 4 + 8))};
            scale_and_store<T>(sums, needs, base, bias, out, m, n, token_0, token, row_0 + row,
                               gated, turn, lane);
        };
        if (splits > 1) {
            const ClusterPlace<kBands * kTokens / 2> here(places.ring(), thread);
            sync_some<1 + kTeams, kTeams * kTeamThreads>();  // the ring has been read
            here.leave(&acc[0][0]);
            cluster_arrive_release();
            needs.wait(team);
            cluster_wait();
            const int rank = blockIdx.x % splits, parts = kTokens / 16;
#pragma unroll 1
            for (int part = parts * rank / splits; part < parts * (rank + 1) / splits; ++part) {
#pragma unroll
                for (int band = 0; band < kBands; ++band) {
                    u32 sums[8];
                    here.collect(sums, (band * parts + part) * 8, splits);
                    store(sums, band, part * 16);
                }
            }
            cluster_arrive();  // a block stays until all have read its sums
            cluster_wait();
            return;
        }
        MeetingPlace<kBands * kTokens / 2, u32> here(workspace, locks, blockIdx.x, thread);
        if (walk.first > 0) {
            here.leave(&acc[0][0], lane);
            continue;
        }
        const int others = walk.others();
        if (others > 0) here.collect(&acc[0][0], others, lane);
        needs.wait(team);
        by_turns ^= 1;
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
#pragma unroll
            for (int part = 0; part < kTokens / 16; ++part)
                store(&acc[band][part * 8], band, part * 16);
        }
    }
#endif
}

}  // namespace billfish
