// w4a16_batch: y (m, n) = x (m, k) W^T for m > 16 on the tensor cores of sm_90a.
//
// Weights are the left operand of wgmma and come from registers: a lane's 16 bytes of a record are
// its own fragments there, too (QUICK), so a record serves every m. x is the right operand and
// lies in shared memory as the tensor cores want it. Weights are decoded once a tile, exactly:
// integers minus zero points, times the scale, rounded once.
//
//     cluster      a tile of 128 kBands outputs x kTokens tokens; its blocks share the inputs
//     warps 0-3    bulk copies of records, `stages` deep and begun before the previous kernel has
//                  ended (PDL); x 16 bytes a thread (cp.async), once it has
//     warps 4-11   two warpgroups, kBands bands of 64 outputs each: while the tensor cores multiply
//                  64 inputs of a band, the next ones' weights are decoded
//     at the end   blocks add their neighbours' sums in the order of k: the same bits in every run
#pragma once

#include "billfish/record.cuh"
#include "billfish/wgmma.cuh"

namespace billfish {

constexpr int kTeamThreads = 128;  // of a warpgroup
constexpr int kTeams = 2;          // that multiply
constexpr int kBatchThreads = (1 + kTeams) * kTeamThreads;

// Two blocks on an SM: one of them may belong to the next kernel and fetch its weights.
constexpr BILLFISH_DEVICE bool two_fit(int tokens, int bands) { return tokens * bands <= 64; }

// One stage of the ring: 128 inputs. x first: the swizzle wants multiples of 1024 bytes.
template <int kGroup, bool kAsymmetric, int kTokens, int kBands>
struct BatchStage {
    static constexpr int kRecordBytes = Record<kGroup, kAsymmetric>::kBytes;
    static constexpr int kRecords = x_bytes(kTokens);  // byte offset
    static constexpr int kBytes = (kRecords + kTeams * kBands * kRecordBytes + 1023) / 1024 * 1024;
};

// Shared memory: [barriers, 1 KB][stages]; sums take the place of stages in the end.
constexpr int kBatchBarrierBytes = 1024, kMostBatchStages = 8;

// Scale and zero point of a lane's two outputs of 16, r and r + 8, each twice in a register.
struct Grain {
    u32 scale[2], zero[2];
    template <class T, class S, class R>
    static BILLFISH_DEVICE Grain load(u32 record, int group, int warp, int lane) {
        const int place = warp / 2 * 8 + lane / 4, right = warp % 2;
        const u32 bits = load_smem_4(record + R::kScales + group * 128 + place * 8 + right * 4);
        u32 zeros = 0x88;
        if (R::kZeros < R::kBytes)
            zeros = load_smem_2(record + R::kZeros + group * 32 + place * 2) >> right * 8;
        Grain grain;
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            grain.scale[lower] = convert<T, S>(lower ? bits >> 16 : bits & 0xffff) * 0x00010001u;
            grain.zero[lower] = Exact<T>::zero(zeros >> 4 * lower & 15, lower) * 0x00010001u;
        }
        return grain;
    }
};

#if __CUDA_ARCH_FEAT_SM90_ALL

// Copies of one block: inputs [first, first + count) of tiles of 128, records of `bands` bands, x
// of tokens from `token` on.
template <class Stage, int kTokens>
BILLFISH_DEVICE void copy_stages(const unsigned char* records, const u16* x, int m, int x_k,
                                 int k_tiles, int bands, int first, int count, int token,
                                 bool once, int stages, u32 ring, u32 full, u32 empty) {
    const int thread = threadIdx.x, chunk = thread % 16, row = thread / 16;
    const u64 policy = once ? evict_first_policy() : keep_policy();
    const u64 band_bytes = static_cast<u64>(k_tiles) * Stage::kRecordBytes;
    const auto copy_records = [&](int tile, int slot) {
        barrier_arrive_expect(full + 8 * slot, bands * Stage::kRecordBytes);
        const unsigned char* from = records + static_cast<u64>(tile) * Stage::kRecordBytes;
        const u32 to = ring + slot * Stage::kBytes + Stage::kRecords;
#pragma unroll 1
        for (int band = 0; band < bands; ++band, from += band_bytes)
            copy_bulk(to + band * Stage::kRecordBytes, from, Stage::kRecordBytes, full + 8 * slot,
                      policy);
    };
    if (thread == 0) {
        for (int i = 0; i < min(stages, count); ++i) copy_records(first + i, i);
    }
    dependency_wait();
    const int x_tiles = (x_k + kRecordK - 1) / kRecordK;
    const int have = m - token - row;  // tokens of this thread: 0, 8, 16, ... below it
    const u16* source = x + static_cast<u64>(token + row) * x_k + chunk * 8;
    const u32 to = ring + x_smem_offset<kTokens>(row, chunk);
    int slot = 0;
    u32 parity = 1;  // the first round finds every slot empty
    for (int i = 0; i < count; ++i) {
        barrier_wait(empty + 8 * slot, parity);
        if (thread == 0 && i >= stages) copy_records(first + i, slot);
        const int tile = first + i;  // planes of a code follow one another: x repeats
        const int column = (tile >= x_tiles ? tile - x_tiles : tile) * kRecordK;
        const u16* from = source + column;
        const bool inside = column + chunk * 8 < x_k;
#pragma unroll 4
        for (int j = 0; j < kTokens; j += 8) {  // zeros for tokens and inputs that are not there
            copy_async_16(to + slot * Stage::kBytes + j * kXLine, from,
                          inside && j < have ? 16u : 0u);
            from += 8 * x_k;
        }
        barrier_arrive_after_copies(full + 8 * slot);
        if (++slot == stages) slot = 0, parity ^= 1;
    }
}

#endif

// `records` is (bands, k tiles) records, `x` (m, x_k), `out` (m, n). Columns of x repeat after its
// last tile: codes of more than 4 bits are two planes of nibbles along k. Clusters count tiles of
// tokens first: neighbours then share weights in L2. Where the grid fills the GPU the next kernel
// may start `early`; else only at the end: its blocks would crowd on the SMs that are free, and
// wait for each other afterwards (8192 x 8192, 16 tokens: 24.5 us instead of 15.4).
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, int kBands>
__global__ void __launch_bounds__(kBatchThreads, two_fit(kTokens, kBands) ? 2 : 1)
w4a16_batch(const unsigned char* __restrict__ records, const u16* __restrict__ x,
            const u16* __restrict__ bias, u16* __restrict__ out, int m, int n, int x_k, int k_tiles,
            int stages, bool early) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    using Stage = BatchStage<kGroup, kAsymmetric, kTokens, kBands>;
    using R = Record<kGroup, kAsymmetric>;
    constexpr int kRows = kTeams * kBands * kRecordN;
    static_assert(kMostBatchStages * 16 + 8 <= kBatchBarrierBytes, "barriers");

    extern __shared__ __align__(1024) unsigned char smem[];
    const u32 base = smem_address(smem);
    const u32 full = base, empty = base + 8 * kMostBatchStages;
    const u32 reduced = base + 16 * kMostBatchStages, ring = base + kBatchBarrierBytes;
    if (early) launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(full + 8 * i, 1 + kTeamThreads);  // the bulk copy, each thread's x
            barrier_init(empty + 8 * i, 4 * kTeams);       // warps that multiply
        }
        barrier_init(reduced, 1);
        barrier_init_fence();
    }
    __syncthreads();

    const int blocks = cluster_blocks(), rank = cluster_rank();
    const int m_tiles = (m + kTokens - 1) / kTokens;
    const int n_tile = cluster_index() / m_tiles, m_tile = cluster_index() % m_tiles;
    const int first = k_tiles * rank / blocks, count = k_tiles * (rank + 1) / blocks - first;
    if (threadIdx.x < kTeamThreads) {
        give_registers<two_fit(kTokens, kBands) ? 24 : 40>();
        const int band = n_tile * kTeams * kBands, all = (n + kRecordN - 1) / kRecordN;
        copy_stages<Stage, kTokens>(
            records + static_cast<u64>(band) * k_tiles * Stage::kRecordBytes, x, m, x_k, k_tiles,
            min(kTeams * kBands, all - band), first, count, m_tile * kTokens, m_tiles == 1, stages,
            ring, full, empty);
        if (!early) launch_dependents();
        if (blocks > 1) {  // all threads of a cluster meet twice: below
            cluster_arrive(), cluster_wait();
            cluster_arrive(), cluster_wait();
        }
        return;
    }
    take_registers<two_fit(kTokens, kBands) ? 104 : 232>();

    const int thread = threadIdx.x - kTeamThreads, team = thread / kTeamThreads;
    const int warp = thread / 32 % 4, lane = thread % 32;
    float acc[kBands][kTokens / 2];  // set by the first products, since count > 0
    {
        u32 a[2][4][4];  // fragments of 64 inputs: in flight, and the next ones
        int slot = 0;
        u32 parity = 0;
        for (int i = 0; i < count; ++i) {
            const u32 stage = ring + slot * Stage::kBytes;
            const u32 used = empty + 8 * (slot == 0 ? stages - 1 : slot - 1);
            const u64 x_at = x_descriptor(stage);
            Grain grain[kBands];
            barrier_wait(full + 8 * slot, parity);
            fence_for_wgmma();
#pragma unroll
            for (int unit = 0; unit < 2 * kBands; ++unit) {
                const int k64 = unit / kBands, band = unit % kBands;
                const u32 record =
                    stage + Stage::kRecords + (team * kBands + band) * Stage::kRecordBytes;
                const uint4 v = load_smem_16(record + (k64 * 4 + warp) * kBrickBytes + lane * 16);
                const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    const int k = k64 * 64 + step * 16;
                    if (k % kGroup == 0)
                        grain[band] = Grain::load<T, S, R>(record, k / kGroup, warp, lane);
                    Exact<T>::fragment(words[step], grain[band].scale, grain[band].zero,
                                       a[unit % 2][step]);
                }
                wgmma_fence();
#pragma unroll
                for (int step = 0; step < 4; ++step)  // 32 bytes on
                    wgmma(T(), acc[band], a[unit % 2][step],
                          x_at + (k64 * kTokens * kXLine + step * 32) / 16,
                          k64 > 0 || step > 0 || i > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (unit == 0 && i > 0 && lane == 0) barrier_arrive(used);
            }
            if (++slot == stages) slot = 0, parity ^= 1;
        }
        wgmma_wait<0>();
    }
    if (!early) launch_dependents();

    // Sums by token in place of the ring, once nobody of the block reads it. 4 numbers more a token
    // put the lanes of a store into different banks.
    constexpr int kStride = kRows + 4, kSumsBytes = kTokens * kStride * 4;
    constexpr int kThreads = kTeams * kTeamThreads;
    sync_some<1, kThreads>();
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
        const int row = (team * kBands + band) * kRecordN + warp * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) {
            const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
            store_smem_4(ring + (token * kStride + row + i / 2 % 2 * 8) * 4, acc[band][i]);
        }
    }
    // MARLIN 3.4: blocks of a cluster own as many tokens each, and get the others' sums of them by
    // bulk copies: [block][token][output], behind their own sums of all tokens.
    const int owned = kTokens / blocks, part = owned * kStride * 4;
    if (blocks > 1) {
        fence_for_wgmma();  // bulk copies read shared memory as tensor cores do
        sync_some<1, kThreads>();
        cluster_arrive(), cluster_wait();  // nobody's ring is in use
        if (thread == 0) {
            barrier_arrive_expect(reduced, (blocks - 1) * part);
            for (int i = 0; i < blocks; ++i) {
                if (i != rank)
                    copy_bulk_to_block(in_block(ring + kSumsBytes + rank * part, i),
                                       ring + i * part, part, in_block(reduced, i));
            }
        }
        barrier_wait(reduced, 0);
        cluster_arrive();  // this block has its sums
    } else {
        sync_some<1, kThreads>();
    }
    const int token_0 = m_tile * kTokens + rank * owned, row_0 = n_tile * kRows;
    for (int item = thread; item < owned * (kRows / 8); item += kThreads) {
        const int token = item / (kRows / 8), row = item % (kRows / 8) * 8;
        if (token_0 + token >= m || row_0 + row >= n) continue;
        float sum[8] = {};
        for (int block = 0; block < blocks; ++block) {
            const u32 sums = ring + block * part + (block == rank ? 0 : kSumsBytes);
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                const uint4 v = load_smem_16(sums + (token * kStride + row + i) * 4);
                sum[i] += __uint_as_float(v.x), sum[i + 1] += __uint_as_float(v.y);
                sum[i + 2] += __uint_as_float(v.z), sum[i + 3] += __uint_as_float(v.w);
            }
        }
        u16 bits[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (bias != nullptr && row_0 + row + i < n)
                sum[i] += T::to_float(bias[row_0 + row + i]);
            bits[i] = T::from_float(sum[i]);
        }
        u16* to = out + static_cast<u64>(token_0 + token) * n + row_0 + row;
        if (n % 8 == 0) {
            uint4 v;
            v.x = bits[0] | bits[1] << 16, v.y = bits[2] | bits[3] << 16;
            v.z = bits[4] | bits[5] << 16, v.w = bits[6] | bits[7] << 16;
            *reinterpret_cast<uint4*>(to) = v;
        } else {
            for (int i = 0; i < 8 && row_0 + row + i < n; ++i) to[i] = bits[i];
        }
    }
    if (blocks > 1) cluster_wait();  // what this block sent has been read
#endif
}

}  // namespace billfish
