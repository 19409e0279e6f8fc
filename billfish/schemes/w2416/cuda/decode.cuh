// w2416_decode: y (m, n) = x (m, k) W^T for m <= 16 at the speed of memory, sm_90.
//
// One launch: of each pass first the 2-bit inputs, then the 4-bit inputs, in records (mixed.cuh),
// each with its outliers (outliers.cuh). Clusters, stages and sums are share.cuh's.
//
//     warp 0       producer: bulk copies of records and lists, a lane for each of a stage's four,
//                  `stages` deep; the first are issued before the previous kernel has ended (PDL),
//                  since weights do not depend on it
//     warp 1       producer: activations of each stage, once the previous kernel has ended,
//                  gathered into the order of the records: groups of 16 inputs, 32 bytes each
//     warps 2-9    consumers: 32 outputs x 256 (2 bits) or 128 (4 bits) inputs at a time
//
// The other block's sums of a pass may come once all warps here have read those of the pass before
// (`unread`). Two blocks fit on an SM.
#pragma once

#include "billfish/outliers.cuh"
#include "billfish/share.cuh"

namespace billfish {

constexpr int kFirstMixedWarp = 2;
constexpr int kMixedThreads = 32 * (kFirstMixedWarp + kMathWarps);
static_assert(kFirstMixedWarp % 2 == 0, "TwoPlaces, FourPlaces");
constexpr int kMostSets = 8;  // of scales in a record of 4 bits: it has 8 groups of inputs

// One stage of the ring: four records of one, two or four bands, their lists of outliers, and their
// activations.
template <int kBands>
struct MixedStage {
    static constexpr int kSlices = 4 / kBands;
    static constexpr int kMostFour = kFourScales + kMostSets * kFourSetBytes + kFourMarkBytes;
    static constexpr int kLists = (4 * kMostFour + 127) / 128 * 128;  // byte offset
    static constexpr BILLFISH_DEVICE int x(int list_bytes) { return kLists + 4 * list_bytes; }
    static_assert(kTwoBytes <= kMostFour && kTwoK == 2 * kRecordK, "both kinds of record fit");
};

// Shared memory: [barriers, 256 B][stages][sums][spread outliers]. tile.py counts the same.
constexpr int kMixedBarrierBytes = 256;

// `x` is (m, k), `out` (m, n). `gated`: of every 32 rows the first 16 are gates and the others
// their ups, and `out` is (m, n / 2). kZero and kStep: mixed.cuh. No record's list of outliers has
// more than `list_bytes`.
template <class T, int kZero, int kStep, int kTokens, int kBands>
__global__ void __launch_bounds__(kMixedThreads, 2)
w2416_decode(const unsigned char* __restrict__ records, const int* __restrict__ columns,
             const u16* __restrict__ x, const u16* __restrict__ bias, u16* __restrict__ out, int m,
             int n, int k, int tiles_2, int tiles_4, int sets, int band_words, int list_bytes,
             int stages, int stage_bytes, bool gated) {
#if __CUDA_ARCH__ >= 900
    using Stage = MixedStage<kBands>;
    using Exchange = Sums<kTokens, kBands>;
    using Me = Worker<kBands * 2, kFirstMixedWarp>;
    constexpr int kSlices = Stage::kSlices, kBlocks = kTokens / 8;

    extern __shared__ __align__(128) unsigned char smem[];
    const u32 base = smem_address(smem);
    const u32 full = base, empty = base + 64, reduced = base + 128, unread = base + 136;
    const u32 word = base + 144;  // where a block's word lands that it may be sent sums
    const u32 ring = base + kMixedBarrierBytes, sums = ring + stages * stage_bytes;
    const int rows = x_rows(kTokens, m);  // of x in shared memory
    const MixedLayer layer{records, tiles_2, tiles_4, sets, band_words};

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(full + 8 * i, 4 + 32);  // four lanes' bulk copies, each lane's copies of x
            barrier_init(empty + 8 * i, kMathWarps);
        }
        barrier_init(reduced, 1);
        barrier_init(unread, 1 + kMathWarps);
        barrier_init_fence();
    }
    __syncthreads();
    cluster_arrive();

    const PairedShare two(n, tiles_2), four(n, tiles_4);
    const int passes = two.passes(kBands);
    Slot slot;
    if (warp < kFirstMixedWarp) {
        slot.parity = 1;  // the first round finds every slot empty
        if (warp == 0) {
            if (lane < 4) {
                const u64 policy = evict_first_policy();
                const int sub = lane % kSlices;
                for (int pass = 0; pass < passes; ++pass) {
                    const int begin = two.before(pass, passes);
                    const int have = two.before(pass + 1, passes) - begin;
                    const int band = two.first_band + begin + lane / kSlices;
#pragma unroll 1
                    for (int kind = 0; kind < 2; ++kind) {
                        const int record = kind ? layer.four_bytes() : kTwoBytes;
                        const int first = kind ? four.k_begin : two.k_begin;
                        const int span = lane / kSlices < have ? kind ? four.span : two.span : 0;
                        const unsigned char* from =
                            layer.band(band) + kind * tiles_2 * kTwoBytes + first * record;
                        const u32* edges = layer.edges(band) + kind * tiles_2 + first;
                        u32 set = 0, end = 0;  // known a stage ahead: they come from memory
                        if (sub < span) set = edges[sub], end = edges[sub + 1];
                        for (int slice = sub; slice - sub < (kind ? four.span : two.span);
                             slice += kSlices) {
                            const u32 here = set, bytes = (end - set) * kSetBytes;
                            if (slice + kSlices < span)
                                set = edges[slice + kSlices], end = edges[slice + kSlices + 1];
                            const u32 to = ring + slot.index * stage_bytes;
                            const u32 barrier = full + 8 * slot.index;
                            barrier_wait(empty + 8 * slot.index, slot.parity);
                            if (slice < span) {
                                barrier_arrive_expect(barrier, record + bytes);
                                copy_bulk(to + lane * record, from + slice * record, record,
                                          barrier, policy);
                                copy_bulk(to + Stage::kLists + lane * list_bytes,
                                          layer.list(band, here), bytes, barrier, policy);
                            } else {
                                barrier_arrive(barrier);
                            }
                            slot.advance(stages);
                        }
                    }
                }
                if (passes == 0 && lane == 0) linger(two.most_bands * (two.span + four.span));
            }
            __syncwarp();
        } else {
            const int stages_2 = (two.span + kSlices - 1) / kSlices;
            const int all = stages_2 + (four.span + kSlices - 1) / kSlices;
            int column[kSlices];  // known a stage ahead, the first before the previous kernel ends
            const auto look_up = [&](int stage) {
                const bool kind = stage >= stages_2;
                const int groups = kind ? 8 : 16, span = kind ? four.span : two.span;
                const int slice = (stage - kind * stages_2) * kSlices;
                const int first = kind ? tiles_2 * 16 + four.k_begin * 8 : two.k_begin * 16;
#pragma unroll
                for (int sub = 0; sub < kSlices; ++sub)
                    column[sub] =
                        slice + sub < span
                            ? columns[first + (slice + sub) * groups + lane / 2 % groups]
                            : -1;
            };
            if (passes > 0) look_up(0);
            dependency_wait();
            for (int stage = 0, left = passes * all; left > 0; --left) {
                barrier_wait(empty + 8 * slot.index, slot.parity);
                const u32 to = ring + slot.index * stage_bytes + Stage::x(list_bytes);
#pragma unroll
                for (int sub = 0; sub < kSlices; ++sub) {
                    const u32 here = to + sub * rows * (stage < stages_2 ? kTwoK : kRecordK) * 2;
                    if (stage < stages_2)
                        gather_x<kTwoK, 32>(here, x, column[sub], k, m, lane);
                    else
                        gather_x<kRecordK, 32>(here, x, column[sub], k, m, lane);
                }
                barrier_arrive_after_copies(full + 8 * slot.index);
                slot.advance(stages);
                stage = stage + 1 < all ? stage + 1 : 0;
                look_up(stage);
            }
        }
        cluster_wait();
        return;
    }

    const auto log_unit = [&](int pass) {
        const int begin = two.before(pass, passes), end = two.before(pass + 1, passes);
        return static_cast<int>(*layer.head(two.first_band + min(begin + Me().band, end - 1)));
    };
    const u32 spread = sums + Exchange::kBytes + Me().index * kSpreadBytes;
    clear_spread(spread, lane);
    int next_unit = passes > 0 ? log_unit(0) : 0;  // known a pass ahead: it comes from memory
    cluster_wait();  // the other block's barriers must exist before the first remote store
    dependency_wait();
    for (int pass = 0; pass < passes; ++pass) {
        float acc[2][kBlocks][4] = {};
        const int begin = two.before(pass, passes), have = two.before(pass + 1, passes) - begin;
        const int unit = next_unit;
        if (pass + 1 < passes) next_unit = log_unit(pass + 1);
        const auto run = [&](int span, auto multiply) {
            const int works = Me().band < have ? span - Me().sub : 0;
            for (int slice = 0; slice < span; slice += kSlices) {
                barrier_wait(full + 8 * slot.index, slot.parity);
                if (slice < works) multiply(slot.index * stage_bytes);
                __syncwarp();
                float seen = 0;  // it depends on every byte read
#pragma unroll
                for (int block = 0; block < kBlocks; ++block)
                    seen += acc[0][block][0] + acc[1][block][0];
                barrier_arrive_after(empty + 8 * slot.index, seen, thread_index() % 32 == 0);
                slot.advance(stages);
            }
        };
        const Unit<T> scale(unit);
        const int place = Me().band * kSlices + Me().sub;  // of a record in a stage
        // Lists of outliers lie like records; a set has 64 bytes for each half of a record.
        const u32 lists =
            ring + Stage::kLists + place * list_bytes + Me().within % 2 * (kSetBytes / 2);
        {
            const u32 x_at = ring + Stage::x(list_bytes) + Me().sub * rows * kTwoK * 2;
            // thread_index(): from threadIdx they would be computed again in every round
            const TwoPlaces places(ring + place * kTwoBytes, x_at, thread_index(), rows);
            const u32 lean = power<T>(unit + Scaled<T>::kPlus);
            const SetPlaces<kTwoK> sets_at(lists, x_at, rows, spread, thread_index() % 32);
            run(two.span, [&](u32 by) {
                multiply_two<T, kZero, kStep, kTokens>(places, by, lean, acc);
                multiply_outliers<T, kTokens>(sets_at, by, thread_index() % 32, scale, acc);
            });
        }
        {
            const u32 record = ring + place * layer.four_bytes();
            const u32 x_at = ring + Stage::x(list_bytes) + Me().sub * rows * kRecordK * 2;
            const FourPlaces places(record, x_at, thread_index(), rows);
            const u32 marks = record + kFourScales + sets * kFourSetBytes;
            const int plus = unit + Scaled<T>::kPlusFour, lower = plus + Scaled<T>::kLower;
            const u32 lean = power<T>(plus / 2);
            const u32 more = power<T>(plus - plus / 2) & 0xffff | power<T>(lower - plus / 2) << 16;
            const SetPlaces<kRecordK> sets_at(lists, x_at, rows, spread, thread_index() % 32);
            run(four.span, [&](u32 by) {
                multiply_four<T, kTokens>(places, marks, by, lean, more, acc);
                multiply_outliers<T, kTokens>(sets_at, by, thread_index() % 32, scale, acc);
            });
        }

        const Me me;
        const int rank = cluster_rank(), owned = have * (kRecordN / kCluster);  // rows of a block
        const float real = __uint_as_float(127 - unit << 23);  // 1 / unit
        if (me.index == 0 && me.lane == 0)
            barrier_arrive_expect(reduced, Exchange::expected(owned, m));
        if (pass > 0) barrier_wait(unread, pass - 1 & 1);
        if (me.band < have)
            Exchange::send(acc, sums, reduced, me, rank, owned, m,
                           [&](float sum, bool) { return sum * real; });
        const int first = (two.first_band + begin) * kRecordN + rank * owned;
        barrier_wait(reduced, pass & 1);
        const float seen =
            Exchange::template store<T, 16>(sums, bias, out, me, m, n, first, owned, gated);
        if (pass + 1 == passes) break;
        __syncwarp();
        if (me.lane == 0) {
            if (me.index == 0) barrier_arrive_expect(unread, kMathWarps * 8);
            barrier_arrive_after(unread, seen, true);
            store_remote(in_block(word, 1 - rank), seen, seen, in_block(unread, 1 - rank));
        }
    }
#endif
}

}  // namespace billfish
