// w4a16_experts: the products of all experts of a layer with few tokens each, in one launch, sm_90.
//
// w4a16_decode's main loop over other work: items (an expert and up to kTokens of its tokens) x
// bands of 64 outputs lie end to end, and every cluster gets the same share of them (routing.cuh).
//
//     cluster c of C:  [c, c + 1) / C of all items' bands, in passes of up to four of one item, or
//                      one such pass, where there are no more
//     block r of 2:    inputs [r, r + 1) / 2 of each pass, in slices of 128
//
//     prologue         every block sorts the pairs that concern it
//     warp 0           producer: bulk copies of records, `stages` deep
//     warp 1           producer: the item's rows of x, gathered
//     warps 2-9        consumers: 32 outputs x 128 inputs at a time; reduction as in share.cuh
//
// A row's sums are added in the order of k, in the same way for every batch.
#pragma once

#include "billfish/routing.cuh"
#include "billfish/share.cuh"

namespace billfish {

constexpr int kExpertsFirstMathWarp = 2;
constexpr int kExpertsThreads = 32 * (kExpertsFirstMathWarp + kMathWarps);
constexpr int kExpertsBands = 4;  // of a pass: a stage has one slice of four records

template <int kGroup, bool kAsymmetric, int kTokens>
struct ExpertsStage {
    static constexpr int kRecordBytes = Record<kGroup, kAsymmetric>::kBytes;
    static constexpr int kX = kExpertsBands * kRecordBytes;  // byte offset
    static constexpr int kBytes = kX + x_bytes(kTokens);
    static_assert(kX % 128 == 0 && kBytes % 128 == 0, "LanePlaces");
};

#if __CUDA_ARCH__ >= 900

// Shared memory: [barriers, 256 B][partial sums, two buffers][routing][stages]. experts_tile.py
// counts the same.
constexpr int kExpertsBarrierBytes = 256;

// Bands [band, band + have) of an own item.
struct ItemPass {
    int item, band, have;
    BILLFISH_DEVICE ItemPass(int at, const ItemSpan& span, int bands) {
        const int all = at / bands;
        item = all - span.begin / bands, band = at - all * bands;
        have = min(kExpertsBands, min(bands - band, span.end - at));
    }
};

// Of this block. Recomputed wherever it is needed, as in share.cuh.
BILLFISH_DEVICE int slices(int k_tiles) {
    const int rank = cluster_rank();
    return k_tiles * (rank + 1) / kCluster - k_tiles * rank / kCluster;
}

BILLFISH_DEVICE int at_of(u32 where) { return where & ~(3u << 30); }

#endif

// `records` is (experts, bands, k tiles) records, `index` the expert of each of `pairs` pairs
// (int64), `x` has a row for every `each` pairs, `out` (pairs, n) one for each. `known`: the index
// was there before the previous kernel began, so that weights are fetched before that has ended;
// kernels here let the next one start once they have waited themselves. `own`: items of a cluster
// at most. `gated`: of every 16 rows the first 8 are gates and the others their ups (gated.py), and
// `out` is (pairs, n / 2).
template <class T, int kGroup, bool kAsymmetric, int kTokens>
__global__ void __launch_bounds__(kExpertsThreads, 2)
w4a16_experts(const unsigned char* __restrict__ records, const u16* x, const u32* index, u16* out,
              int pairs, int each, int experts, int n, int bands, int x_k, int k_tiles, int stages,
              int own, int table_bytes, bool known, bool gated) {
#if __CUDA_ARCH__ >= 900
    using Stage = ExpertsStage<kGroup, kAsymmetric, kTokens>;
    using Reduced = Sums<kTokens, kExpertsBands>;
    using Me = Worker<2 * kExpertsBands, kExpertsFirstMathWarp>;

    extern __shared__ __align__(128) unsigned char smem[];
    const u32 base = smem_address(smem);
    const u32 full = base, empty = base + 64, reduced = base + 128;
    const u32 sums = base + kExpertsBarrierBytes;
    const Routing<kTokens> routing{sums + 2 * Reduced::kBytes, experts, own};
    const u32 ring = routing.base + table_bytes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(full + 8 * i, 1 + 32);  // the bulk copy, and each lane's copies of x
            barrier_init(empty + 8 * i, kMathWarps);
        }
        barrier_init(reduced, 1);
        barrier_init(reduced + 8, 1);
        barrier_init_fence();
    }
    routing.template clear<kExpertsThreads>(pairs);
    if (!known) dependency_wait();
    launch_dependents();
    routing.template make<kExpertsThreads, kExpertsBands>(index, pairs, bands);
    cluster_arrive();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) {
        if (lane == 0) {
            const int k_begin = k_tiles * cluster_rank() / kCluster, rounds = slices(k_tiles);
            const ItemSpan span = routing.span();
            const u64 policy = evict_first_policy();
            const u64 band_bytes = static_cast<u64>(k_tiles) * Stage::kRecordBytes;
            Slot slot;
            slot.parity = 1;  // the first round finds every slot empty
            for (int at = span.begin; at < span.end;) {
                const ItemPass pass(at, span, bands);
                const u64 band = static_cast<u64>(routing.expert(pass.item)) * bands + pass.band;
                const unsigned char* from =
                    records + band * band_bytes + static_cast<u64>(k_begin) * Stage::kRecordBytes;
                for (int i = 0; i < rounds; ++i, from += Stage::kRecordBytes) {
                    const u32 to = ring + slot.index * Stage::kBytes;
                    const u32 barrier = full + 8 * slot.index;
                    barrier_wait(empty + 8 * slot.index, slot.parity);
                    barrier_arrive_expect(barrier, pass.have * Stage::kRecordBytes);
#pragma unroll
                    for (int band = 0; band < kExpertsBands; ++band) {
                        if (band < pass.have)
                            copy_bulk(to + band * Stage::kRecordBytes, from + band * band_bytes,
                                      Stage::kRecordBytes, barrier, policy);
                    }
                    slot.advance(stages);
                }
                at += pass.have;
            }
            if (span.begin == span.end) linger(span.most * rounds);
        }
        __syncwarp();
        cluster_wait();
        return;
    }
    if (warp == 1) {
        // Lanes 0-15 copy even tokens, 16-31 odd ones, as in w4a16_decode.
        const ItemSpan span = routing.span();
        const int k_begin = k_tiles * cluster_rank() / kCluster, rounds = slices(k_tiles);
        const int chunk = lane % 16;
        const u32 to = ring + Stage::kX + x_smem_offset<kTokens>(lane / 16, chunk);
        Slot slot;
        slot.parity = 1;
        dependency_wait();
        for (int at = span.begin; at < span.end;) {
            const ItemPass pass(at, span, bands);
            const int m = routing.tokens(pass.item);
            const u16* from[kTokens / 2];
#pragma unroll
            for (int two = 0; two < kTokens / 2; ++two) {
                const int pair = routing.pair(pass.item, min(2 * two + lane / 16, m - 1));
                from[two] = x + static_cast<u64>(pair / each) * x_k + chunk * 8;
            }
            for (int i = k_begin; i < k_begin + rounds; ++i) {
                const u32 bytes = i * kRecordK + chunk * 8 < x_k ? 16 : 0;
                const u32 here = to + slot.index * Stage::kBytes;
                barrier_wait(empty + 8 * slot.index, slot.parity);
#pragma unroll
                for (int two = 0; two < kTokens / 2; ++two) {
                    if (2 * two < m)
                        copy_async_16((here ^ two % 4 * 32) + two * 2 * kXLine,
                                      from[two] + (bytes ? i * kRecordK : 0), bytes);
                }
                barrier_arrive_after_copies(full + 8 * slot.index);
                slot.advance(stages);
            }
            at += pass.have;
        }
        cluster_wait();
        return;
    }

    LanePlaces<kTokens> places;
    {
        const Me me;
        places = LanePlaces<kTokens>::template of<Record<kGroup, kAsymmetric>>(
            ring + me.band * Stage::kRecordBytes, ring + Stage::kX, me.lane, me.within % 2);
    }
    Slot slot;
    cluster_wait();     // the other block's barriers must exist before the first remote store
    dependency_wait();  // rather than polling a barrier until x arrives
    // The band, and in the upper two bits the pass's number: one register for both.
    u32 where = routing.span().begin;
    while (at_of(where) < routing.span().end) {
        float acc[2][kTokens / 8][4] = {};
        const auto stage = [&](auto read) {
            barrier_wait(full + 8 * slot.index, slot.parity);
            read([&](float seen) {
                __syncwarp();
                barrier_arrive_after(empty + 8 * slot.index, seen, thread_index() % 32 == 0);
            });
            places.move(slot.advance(stages) ? (1 - stages) * Stage::kBytes : Stage::kBytes);
        };
        int rounds = slices(k_tiles);  // in two loops: a flag in one of them spills
        if (Me().band < ItemPass(at_of(where), routing.span(), bands).have)
            for (; rounds > 0; --rounds)
                stage([&](auto release) {
                    multiply<T, T, kGroup, kAsymmetric, kTokens>(places, acc, release);
                });
        for (; rounds > 0; --rounds) stage([](auto release) { release(0); });
        // Two buffers of sums, as in w4a16_decode: a block can be one pass ahead.
        const ItemPass pass(at_of(where), routing.span(), bands);
        const Me me;
        const int rank = cluster_rank();
        const int m = routing.tokens(pass.item), rows = pass.have * (kRecordN / kCluster);
        const u32 buffer = sums + (where >> 30 & 1) * Reduced::kBytes;
        const u32 barrier = reduced + (where >> 30 & 1) * 8;
        if (me.index == 0 && me.lane == 0)
            barrier_arrive_expect(barrier, Reduced::expected(rows, m));
        if (me.band < pass.have)
            Reduced::send(acc, buffer, barrier, me, rank, rows, m,
                          [](float sum, int lower) { return finish<T>(sum, lower); });
        const int first = pass.band * kRecordN + rank * rows;
        barrier_wait(barrier, where >> 31);
        Reduced::template store_at<float, T, 8>(
            buffer, nullptr, out, me, m, n, first, rows, gated, [](float sum, int) { return sum; },
            [&](int token) { return routing.pair(pass.item, token); });
        where += pass.have + (1u << 30);
        sync_some<1, 32 * kMathWarps>();
    }
#endif
}

}  // namespace billfish
