// w2416_stripe: y (m, n) = x (m, k) W^T for m <= 16 in one launch, sm_80 to sm_89.
//
// Stripes over tiles of 128 outputs (stripes.cuh, MARLIN 3.4). A tile's slices are its records
// along k, those of 2 bits (256 inputs) and then those of 4 bits (128 inputs); a stripe may begin
// with any. A stage of the cp.async ring is one or two slices of one kind and their activations,
// gathered into the order of the records. stripe.py has the same arithmetic.
//
//     warps 0-7    copy, and multiply: two a record, warps 4-7 the second slice of a stage
//     warps 8, 9   outliers of each stage, from x in shared memory, into fp32 sums there
//
// A tile's outliers are added to its sums once a stripe, before the stripes are added.
#pragma once

#include "billfish/outliers.cuh"
#include "billfish/stripes.cuh"

namespace billfish {

constexpr int kTileBands = 2, kStageSlices = 2;
constexpr int kMathThreads = 256, kAllThreads = kMathThreads + 32 * kListWarps;
constexpr int kOwners = 128;  // threads that hold a tile's final sums: those of the first slice

// Shared memory: [stages: [records: band, slice][x: slice, token]][sums of outliers].
struct MixedRing {
    int x, bytes;  // of a stage: byte offset of x; all
    u32 begin, end;
    BILLFISH_DEVICE MixedRing(const MixedLayer& layer, int rows, int stages, u32 begin)
        : x((kTileBands * kStageSlices * max(kTwoBytes, layer.four_bytes()) + 127) / 128 * 128),
          bytes(x + kStageSlices * rows * kTwoK * 2), begin(begin), end(begin + stages * bytes) {}
    BILLFISH_DEVICE u32 after(u32 stage) const {
        return stage + bytes == end ? begin : stage + bytes;
    }
};

// Slices of the stage that begins with `slice`, `left` before the stripe ends.
BILLFISH_DEVICE int slices_of(const MixedLayer& layer, int slice, int left) {
    const int same = (slice < layer.two ? layer.two : layer.two + layer.four) - slice;
    return min(kStageSlices, min(same, left));
}

// Copies stage after stage, 16 bytes a thread and instruction, across the ends of tiles. Half of
// the threads gather x for each slice. Columns are known one stage ahead: they come from memory.
struct MixedCopier {
    static constexpr int kCopies = 3;  // of a thread, for a band: 8 sets of scales are the most
    static_assert(kStageSlices * (kFourScales + 8 * kFourSetBytes + kFourMarkBytes) <=
                  kCopies * kMathThreads * 16, "both kinds of record");
    const MixedLayer& layer;
    const MixedRing& ring;
    const int* columns;
    const u16* x;
    u64 policy;
    u32 to;
    int tile, slice, left, bands, m, k, column;

    BILLFISH_DEVICE MixedCopier(const MixedLayer& layer, const MixedRing& ring, const int* columns,
                                const u16* x, u32 begin, u32 end, int bands, int m, int k)
        : layer(layer), ring(ring), columns(columns), x(x), policy(evict_first_policy()),
          to(ring.begin), tile(begin / (layer.two + layer.four)),
          slice(begin - tile * (layer.two + layer.four)), left(end - begin), bands(bands), m(m),
          k(k) {
        find();
    }

    BILLFISH_DEVICE void find() {
        const int sub = threadIdx.x / (kMathThreads / kStageSlices), mine = slice + sub;
        const bool two = slice < layer.two;
        const int group = two ? mine * 16 + threadIdx.x % 32 / 2
                              : layer.two * 16 + (mine - layer.two) * 8 + threadIdx.x % 16 / 2;
        column = sub < slices_of(layer, slice, left) ? columns[group] : -1;
    }

    // One group of cp.async, empty after the last stage: wait_copies counts groups.
    BILLFISH_DEVICE void next() {
        if (left > 0) {
            const bool two = slice < layer.two;
            const int slices = slices_of(layer, slice, left);
            const int record = two ? kTwoBytes : layer.four_bytes();
            copy_records(two, record, slices);
            copy_x(two, slices);
            slice += slices, left -= slices;
            if (slice == layer.two + layer.four) slice = 0, ++tile;
            to = ring.after(to);
            find();
        }
        commit_copies();
    }

    // A band's records of a stage are one run of bytes. Weights are read once: evict first, so that
    // x stays in L2 (MARLIN 3.4).
    BILLFISH_DEVICE void copy_records(bool two, int record, int slices) const {
        const int first = tile * kTileBands, bytes = slices * record;
        const int place = two ? slice * record
                              : layer.two * kTwoBytes + (slice - layer.two) * record;
#pragma unroll
        for (int band = 0; band < kTileBands; ++band) {
            if (first + band >= bands) break;
            const unsigned char* from = layer.band(first + band) + place;
            const u32 here = to + band * kStageSlices * record;
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                const int at = (i * kMathThreads + threadIdx.x) * 16;
                if (at < bytes) copy_async_16(here + at, from + at, policy);
            }
        }
    }

    BILLFISH_DEVICE void copy_x(bool two, int slices) const {
        constexpr int kThreads = kMathThreads / kStageSlices;
        const int sub = threadIdx.x / kThreads, thread = threadIdx.x % kThreads;
        if (sub >= slices) return;
        const u32 here = to + ring.x + (ring.bytes - ring.x) / kStageSlices / (two ? 1 : 2) * sub;
        if (two)
            gather_x<kTwoK, kThreads>(here, x, column, k, m, thread);
        else
            gather_x<kRecordK, kThreads>(here, x, column, k, m, thread);
    }
};

// Waits for the oldest stage of a full ring.
BILLFISH_DEVICE void wait_stage(int stages) {
    if (stages == 2) wait_copies<0>();
    if (stages == 3) wait_copies<1>();
    if (stages == 4) wait_copies<2>();
}

template <class T, int kTokens>
using SpreadOutliers = Outliers<T, kTokens, kTileBands, true>;

// What warps 8 and 9 do: as many __syncthreads as the others.
template <class T, int kTokens>
BILLFISH_DEVICE void add_lists(const MixedLayer& layer, const MixedRing& ring, u32 unit, u32 end,
                               int bands, int m) {
    using Lists = SpreadOutliers<T, kTokens>;
    constexpr int kBytes = Lists::kRegions * Lists::kRegionBytes;
    const int warp = (threadIdx.x - kMathThreads) / 32, lane = threadIdx.x % 32;
    const int k_tiles = layer.two + layer.four;
    const u32 sums = ring.end + warp * kBytes;
    const float zeros[4] = {};
    for (int i = lane * 16; i < kBytes; i += 32 * 16) store_smem_16(sums + i, zeros);
    u32 stage = ring.begin;
    while (unit < end) {
        const int tile = unit / k_tiles, first = unit - tile * k_tiles;
        const int last = min(k_tiles, first + static_cast<int>(end - unit));
        const int have = min(kTileBands, bands - tile * kTileBands);
        // Places are known two stages ahead, entries one: both come from memory.
        int ahead = first;
        const auto find = [&](Lists& lists) {
            const int slices = slices_of(layer, ahead, last - ahead);
            lists.find(have, ahead, 0, slices);
            ahead += slices;
        };
        Lists here(layer, tile * kTileBands, warp, lane), next = here, later = here;
        find(here);
        find(next);
        here.fetch();
        for (int slice = first; slice < last;) {
            next.fetch();
            find(later);
            __syncthreads();
            here.add(stage + ring.x, (slice < layer.two ? kTwoK : kRecordK) * 2, sums, m);
            slice += slices_of(layer, slice, last - slice);
            stage = ring.after(stage);
            here.take(next), next.take(later);
        }
        unit += last - first;
        __syncthreads();  // sums are complete; they are zeros again at the next stage's
    }
}

// `records` and `columns`: outliers.cuh. `x` is (m, k), `out` (m, n). kZero and kStep: mixed.cuh.
// blockDim.x is kAllThreads. `stages` is 2 to 4.
template <class T, int kZero, int kStep, int kTokens>
__global__ void __launch_bounds__(kAllThreads, 1)
w2416_stripe(const unsigned char* __restrict__ records, const int* __restrict__ columns,
             const u16* __restrict__ x, const u16* __restrict__ bias, u16* __restrict__ out,
             float* workspace, u32* locks, int m, int n, int k, int tiles_2, int tiles_4, int sets,
             int band_words, int stages) {
    constexpr int kBlocks = kTokens / 8;
    extern __shared__ __align__(128) unsigned char smem[];
    const MixedLayer layer{records, tiles_2, tiles_4, sets, band_words};
    const int rows = x_rows(kTokens, m), k_tiles = tiles_2 + tiles_4;
    const MixedRing ring(layer, rows, stages, smem_address(smem));
    const int bands = (n + kRecordN - 1) / kRecordN;
    const Stripes stripes((bands + kTileBands - 1) / kTileBands * k_tiles, gridDim.x);
    if (blockIdx.x >= stripes.count) return;
    const u32 stripe = stripes.count - 1 - blockIdx.x;
    const u32 begin = stripes.begin(stripe), end = stripes.begin(stripe + 1);
    if (threadIdx.x >= kMathThreads) {
        add_lists<T, kTokens>(layer, ring, begin, end, bands, m);
        return;
    }

    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int sub = thread / kOwners, within = warp % 4, band = within / 2;
    const int record = band * kStageSlices + sub;
    const u32 x_at = ring.begin + ring.x;
    const TwoPlaces two(ring.begin + record * kTwoBytes, x_at + sub * rows * kTwoK * 2, thread,
                        rows);
    const FourPlaces four(ring.begin + record * layer.four_bytes(),
                          x_at + sub * rows * kRecordK * 2, thread, rows);
    const u32 marks =
        ring.begin + record * layer.four_bytes() + kFourScales + sets * kFourSetBytes;

    MixedCopier copier(layer, ring, columns, x, begin, end, bands, m, k);
#pragma unroll 1
    for (int i = 0; i < stages - 1; ++i) copier.next();

    u32 stage = ring.begin;
    for (u32 at = begin; at < end;) {
        const u32 tile = at / k_tiles, tile_end = (tile + 1) * k_tiles;
        const int last = min(tile_end, end) - tile * k_tiles;
        const int first_band = tile * kTileBands, have = min(kTileBands, bands - first_band);
        const int unit = *layer.lists(first_band + min(band, have - 1));  // log2 of it
        const int plus = unit + Scaled<T>::kPlusFour, lower = plus + Scaled<T>::kLower;
        float acc[2][kBlocks][4] = {};
        u32 used = stage;
        for (int slice = at - tile * k_tiles; slice < last;) {
            const int slices = slices_of(layer, slice, last - slice);
            // One barrier a stage: all threads' copies of this stage are visible, and nobody still
            // reads the previous stage, which the next copies overwrite.
            wait_stage(stages);
            __syncthreads();
            copier.next();
            const u32 by = stage - ring.begin;
            const bool works = band < have && sub < slices;
            if (works && slice < tiles_2) {
                multiply_two<T, kZero, kStep, kTokens>(
                    two, by, power<T>(unit + Scaled<T>::kPlus), acc, [](float) {});
            } else if (works) {
                const u32 lean = power<T>(plus / 2);
                const u32 more =
                    power<T>(plus - plus / 2) & 0xffff | power<T>(lower - plus / 2) << 16;
                multiply_four<T, kTokens>(four, marks, by, lean, more, acc, [](float) {});
            }
            slice += slices;
            used = stage, stage = ring.after(stage);
        }
        at = tile * k_tiles + last;

        const auto sync = [] { sync_some<1, kMathThreads>(); };
        __syncthreads();  // outliers' sums are complete
        // Through the stage just used: nothing is copied into it before the next stage's barrier.
        add_odd_slices<kOwners>(acc, used, thread, sub, sync);
        if (sub == 0) {
            const float real = __uint_as_float(127 - unit << 23);  // 1 / unit
#pragma unroll
            for (int i = 0; i < 4 * kBlocks; ++i) {  // row q + 8 (i % 4), eight tokens
                const u32 row = within * 32 + i % 4 * 8 + lane / 4;
                const u32 pair = i / 4 * 4 + lane % 4;
                const u32 place = ring.end + row * kTokens * 4 +
                                  (pair * 8 ^ SpreadOutliers<T, kTokens>::spread(row));
                const uint2 more = load_smem_8(place);
                store_smem_8(place, 0, 0);
                float(&sum)[4] = acc[i % 4 / 2][i / 4];
                float &a = sum[i % 2 * 2], &b = sum[i % 2 * 2 + 1];
                a = fmaf(a, real, __uint_as_float(more.x));
                b = fmaf(b, real, __uint_as_float(more.y));
            }
        }
        const Turn<kOwners, kBlocks> turn(stripes, stripe, tile_end, k_tiles, workspace, locks,
                                          thread);
        turn.add(acc, thread, sub, sync);
        if (!turn.last()) {
            turn.pass_on(acc, thread, sub, sync);
            continue;
        }
        turn.end(thread);
        if (sub == 0)
            store_tile<T>(acc, bias, out, first_band * kRecordN + within * 32, lane, m, n,
                          [](float sum, bool) { return sum; });
    }
}

}  // namespace billfish
