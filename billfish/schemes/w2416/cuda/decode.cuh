// w2416_decode: y (m, n) = x (m, k) W^T for m <= 16 at the speed of memory, sm_90.
//
// One launch: of each pass first the 2-bit inputs, then the 4-bit inputs, in records (mixed.cuh),
// and beside them the outliers. Clusters, stages and sums are share.cuh's.
//
//     warp 0       producer: bulk copies of records, `stages` deep; the first are issued before the
//                  previous kernel has ended (PDL), since weights do not depend on it
//     warp 1       producer: activations of each stage, once the previous kernel has ended,
//                  gathered into the order of the records: groups of 16 inputs, 32 bytes each
//     warps 2, 3   outliers of each stage, from x in shared memory, into fp32 sums there
//     warps 4-11   consumers: 32 outputs x 256 (2 bits) or 128 (4 bits) inputs at a time
//
// Outliers' sums and the partial sums of other warps and blocks lie in the same memory, one after
// the other: sums of a pass are sent only when both blocks have read their outliers (`ready`). Two
// blocks fit on an SM.
#pragma once

#include "billfish/outliers.cuh"
#include "billfish/share.cuh"

namespace billfish {

constexpr int kFirstListWarp = 2;
constexpr int kFirstMixedWarp = kFirstListWarp + kListWarps;
constexpr int kMixedThreads = 32 * (kFirstMixedWarp + kMathWarps);
static_assert(kFirstMixedWarp % 2 == 0, "TwoPlaces, FourPlaces");
constexpr int kReaders = kListWarps + kMathWarps;  // warps that read a stage
constexpr int kMostSets = 8;  // of scales in a record of 4 bits: it has 8 groups of inputs

// One stage of the ring: four records and their activations, one, two or four bands.
template <int kTokens, int kBands>
struct MixedStage {
    static constexpr int kSlices = 4 / kBands;
    static constexpr int kMostFour = kFourScales + kMostSets * kFourSetBytes + kFourMarkBytes;
    static constexpr int kX = (4 * kMostFour + 127) / 128 * 128;  // byte offset
    static constexpr BILLFISH_DEVICE int bytes(int m) {
        return kX + kSlices * x_rows(kTokens, m) * kTwoK * 2;
    }
    static_assert(kTwoBytes <= kMostFour && kTwoK == 2 * kRecordK, "both kinds of record fit");
};

// Shared memory: [barriers, 256 B][stages][sums]. tile.py counts the same.
constexpr int kMixedBarrierBytes = 256;

// `x` is (m, k), `out` (m, n). `gated`: of every 32 rows the first 16 are gates and the others
// their ups, and `out` is (m, n / 2). kZero and kStep: mixed.cuh.
template <class T, int kZero, int kStep, int kTokens, int kBands>
__global__ void __launch_bounds__(kMixedThreads, 2)
w2416_decode(const unsigned char* __restrict__ records, const int* __restrict__ columns,
             const u16* __restrict__ x, const u16* __restrict__ bias, u16* __restrict__ out, int m,
             int n, int k, int tiles_2, int tiles_4, int sets, int band_words, int stages,
             int stage_bytes, bool gated) {
#if __CUDA_ARCH__ >= 900
    using Stage = MixedStage<kTokens, kBands>;
    using Exchange = Sums<kTokens, kBands>;
    using Me = Worker<kBands * 2, kFirstMixedWarp>;
    using Lists = Outliers<T, kTokens, kBands>;
    constexpr int kSlices = Stage::kSlices, kBlocks = kTokens / 8;
    constexpr u32 kStop = 1, kGo = 2;  // named barriers of the warps that read a stage

    extern __shared__ __align__(128) unsigned char smem[];
    const u32 base = smem_address(smem);
    const u32 full = base, empty = base + 64, reduced = base + 128, ready = base + 136;
    const u32 unread = base + 144;  // where a block's word lands that it may be sent sums
    const u32 ring = base + kMixedBarrierBytes, sums = ring + stages * stage_bytes;
    const int rows = x_rows(kTokens, m);  // of x in shared memory
    const MixedLayer layer{records, tiles_2, tiles_4, sets, band_words};

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(full + 8 * i, 1 + 32);  // the bulk copy, and each lane's copies of x
            barrier_init(empty + 8 * i, kReaders);
        }
        barrier_init(reduced, 1);
        barrier_init(ready, 1 + kMathWarps);
        barrier_init_fence();
    }
    __syncthreads();
    cluster_arrive();

    if (warp < kFirstListWarp) {
        const PairedShare two(n, tiles_2), four(n, tiles_4);
        const int passes = two.passes(kBands);
        Slot slot;
        slot.parity = 1;  // the first round finds every slot empty
        if (warp == 0) {
            if (lane == 0) {
                const u64 policy = evict_first_policy();
                for (int pass = 0; pass < passes; ++pass) {
                    const int begin = two.before(pass, passes);
                    const int have = two.before(pass + 1, passes) - begin;
#pragma unroll 1
                    for (int kind = 0; kind < 2; ++kind) {
                        const int record = kind ? layer.four_bytes() : kTwoBytes;
                        const int span = kind ? four.span : two.span;
                        const unsigned char* from =
                            layer.band(two.first_band + begin) +
                            (kind ? tiles_2 * kTwoBytes + four.k_begin * record
                                  : two.k_begin * record);
                        for (int slice = 0; slice < span; slice += kSlices) {
                            const u32 bytes = min(kSlices, span - slice) * record;
                            const u32 to = ring + slot.index * stage_bytes;
                            const u32 barrier = full + 8 * slot.index;
                            barrier_wait(empty + 8 * slot.index, slot.parity);
                            barrier_arrive_expect(barrier, have * bytes);
#pragma unroll
                            for (int band = 0; band < kBands; ++band) {
                                if (band < have)
                                    copy_bulk(to + band * kSlices * record,
                                              from + static_cast<u64>(band) * band_words * 4, bytes,
                                              barrier, policy);
                            }
                            from += kSlices * record;
                            slot.advance(stages);
                        }
                    }
                }
                if (passes == 0) linger(two.most_bands * (two.span + four.span));
            }
            __syncwarp();
        } else {
            dependency_wait();
            for (int pass = 0; pass < passes; ++pass) {
#pragma unroll 1
                for (int kind = 0; kind < 2; ++kind) {
                    const int groups = kind ? 8 : 16, span = kind ? four.span : two.span;
                    const int* table = columns + (kind ? tiles_2 * 16 + four.k_begin * groups
                                                       : two.k_begin * groups);
                    for (int slice = 0; slice < span; slice += kSlices) {
                        int column[kSlices];
#pragma unroll
                        for (int sub = 0; sub < kSlices; ++sub)
                            column[sub] = slice + sub < span
                                              ? table[(slice + sub) * groups + lane / 2 % groups]
                                              : -1;
                        barrier_wait(empty + 8 * slot.index, slot.parity);
                        const u32 to = ring + slot.index * stage_bytes + Stage::kX;
#pragma unroll
                        for (int sub = 0; sub < kSlices; ++sub) {
                            const u32 here = to + sub * rows * groups * 32;
                            if (kind)
                                gather_x<kRecordK, 32>(here, x, column[sub], k, m, lane);
                            else
                                gather_x<kTwoK, 32>(here, x, column[sub], k, m, lane);
                        }
                        barrier_arrive_after_copies(full + 8 * slot.index);
                        slot.advance(stages);
                    }
                }
            }
        }
        cluster_wait();
        return;
    }

    Slot slot;
    if (warp < kFirstMixedWarp) {
        const PairedShare two(n, tiles_2), four(n, tiles_4);
        const int passes = two.passes(kBands), own = warp - kFirstListWarp;
        const int few = (two.span + kSlices - 1) / kSlices;  // stages of 2 bits
        const int all = few + (four.span + kSlices - 1) / kSlices;
        cluster_wait();
        for (int pass = 0; pass < passes; ++pass) {
            const int begin = two.before(pass, passes);
            const int have = two.before(pass + 1, passes) - begin;
            const int band = two.first_band + begin;
            const auto find = [&](Lists& lists, int stage) {
                if (stage < few)
                    lists.find(have, two.k_begin, stage * kSlices, two.span);
                else
                    lists.find(have, tiles_2 + four.k_begin, (stage - few) * kSlices, four.span);
            };
            constexpr int kSumsBytes = Lists::kRegions * Lists::kRegionBytes;
            const u32 mine = sums + own * kSumsBytes;
            const float zeros[4] = {};
            for (int i = lane * 16; i < kSumsBytes; i += 32 * 16) store_smem_16(mine + i, zeros);
            __syncwarp();
            // Places are known two stages ahead, entries one: both come from memory.
            Lists here(layer, band, own, lane), next = here, later = here;
            find(here, 0);
            find(next, 1);
            here.fetch();
            if (pass == 0) dependency_wait();  // rather than polling a barrier until x arrives
            for (int stage = 0; stage < all; ++stage) {
                next.fetch();
                find(later, stage + 2);
                barrier_wait(full + 8 * slot.index, slot.parity);
                const u32 at = ring + slot.index * stage_bytes + Stage::kX;
                const float seen =
                    here.add(at, (stage < few ? kTwoK : kRecordK) * 2, mine, m);
                __syncwarp();
                barrier_arrive_after(empty + 8 * slot.index, seen, lane == 0);
                slot.advance(stages);
                here.take(next), next.take(later);
            }
            sync_some<kStop, 32 * kReaders>();
            if (pass + 1 < passes) sync_some<kGo, 32 * kReaders>();
        }
        return;
    }

    cluster_wait();  // the other block's barriers must exist before the first remote store
    for (int pass = 0; pass < PairedShare(n, tiles_2).passes(kBands); ++pass) {
        float acc[2][kBlocks][4] = {};
        const auto unit = [&] {  // log2 of it; read again: kept, it would cost a register
            const PairedShare share(n, tiles_2);
            const int passes = share.passes(kBands), begin = share.before(pass, passes);
            const int band = min(Me().band, share.before(pass + 1, passes) - begin - 1);
            return static_cast<int>(*layer.lists(share.first_band + begin + band));
        };
        const auto run = [&](int tiles, auto multiply) {
            int rounds, mine;  // stages, and those in which this warp has work
            {
                const PairedShare share(n, tiles);
                const Me me;
                const int passes = share.passes(kBands);
                const int have = share.before(pass + 1, passes) - share.before(pass, passes);
                rounds = (share.span + kSlices - 1) / kSlices;
                mine = me.band < have ? (share.span - me.sub + kSlices - 1) / kSlices : 0;
            }
            for (; rounds > 0; --rounds, --mine) {
                const auto release = [&](float seen) {
                    __syncwarp();
                    barrier_arrive_after(empty + 8 * slot.index, seen, thread_index() % 32 == 0);
                };
                barrier_wait(full + 8 * slot.index, slot.parity);
                if (mine > 0)
                    multiply(slot.index * stage_bytes, release);
                else
                    release(0);
                slot.advance(stages);
            }
        };
        {
            const Me me;
            // thread_index(): from threadIdx they would be computed again in every round
            const TwoPlaces places(ring + (me.band * kSlices + me.sub) * kTwoBytes,
                                   ring + Stage::kX + me.sub * rows * kTwoK * 2, thread_index(),
                                   rows);
            const u32 lean = power<T>(unit() + Scaled<T>::kPlus);
            if (pass == 0) dependency_wait();
            run(tiles_2, [&](u32 by, auto release) {
                multiply_two<T, kZero, kStep, kTokens>(places, by, lean, acc, release);
            });
        }
        {
            const Me me;
            const u32 record = ring + (me.band * kSlices + me.sub) * layer.four_bytes();
            const FourPlaces places(record, ring + Stage::kX + me.sub * rows * kRecordK * 2,
                                    thread_index(), rows);
            const u32 marks = record + kFourScales + sets * kFourSetBytes;
            const int plus = unit() + Scaled<T>::kPlusFour, lower = plus + Scaled<T>::kLower;
            const u32 lean = power<T>(plus / 2);
            const u32 more = power<T>(plus - plus / 2) & 0xffff | power<T>(lower - plus / 2) << 16;
            run(tiles_4, [&](u32 by, auto release) {
                multiply_four<T, kTokens>(places, marks, by, lean, more, acc, release);
            });
        }

        const PairedShare share(n, tiles_2);
        const Me me;
        const int passes = share.passes(kBands);
        const int have = share.before(pass + 1, passes) - share.before(pass, passes);
        const int rank = cluster_rank(), owned = have * (kRecordN / kCluster);  // rows of a block
        const float real = __uint_as_float(127 - unit() << 23);  // 1 / unit
        sync_some<kStop, 32 * kReaders>();
        float seen = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // row q + 8 i
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                float(&sum)[4] = acc[i / 2][block];
                uint2 more = {0, 0};  // of one band: both list warps have sums for all its rows
                const int row = (kBands == 1 ? me.sub * kRecordN : 0) + me.within * 32 + i * 8;
                if (me.sub < (kBands == 1 ? kListWarps : 1) && me.band < have)
                    more = load_smem_8(sums + Lists::place(row + thread_index() % 32 / 4,
                                                           block * 4 + thread_index() % 4));
                float &a = sum[i % 2 * 2], &b = sum[i % 2 * 2 + 1];
                a = fmaf(a, real, __uint_as_float(more.x));
                b = fmaf(b, real, __uint_as_float(more.y));
                seen += a + b;
            }
        }
        __syncwarp();
        if (me.lane == 0) {
            if (me.index == 0) {
                barrier_arrive_expect(reduced, Exchange::expected(owned, m));
                barrier_arrive_expect(ready, kMathWarps * 8);
            }
            barrier_arrive_after(ready, seen, true);
            store_remote(in_block(unread, 1 - rank), seen, seen, in_block(ready, 1 - rank));
        }
        barrier_wait(ready, pass & 1);
        if (me.band < have)
            Exchange::send(acc, sums, reduced, me, rank, owned, m,
                           [](float sum, bool) { return sum; });
        const int first = (share.first_band + share.before(pass, passes)) * kRecordN + rank * owned;
        barrier_wait(reduced, pass & 1);
        Exchange::template store<T, 16>(sums, bias, out, me, m, n, first, owned, gated);
        if (pass + 1 < passes) sync_some<kGo, 32 * kReaders>();
    }
#endif
}

}  // namespace billfish
