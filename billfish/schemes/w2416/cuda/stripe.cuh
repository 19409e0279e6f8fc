// w2416_stripe: y (m, n) = x (m, k) W^T for m <= 16 in one launch, sm_80 to sm_89.
//
// Stripes over tiles of 128 outputs (stripes.cuh, MARLIN 3.4). A tile's slices are its records
// along k, those of 2 bits (256 inputs) and then those of 4 bits (128 inputs); a stripe may begin
// with any. A stage of the cp.async ring is one or two slices of one kind. stripe.py has the same
// arithmetic.
//
//     warps 0-7    copy records, and multiply: two a record, warps 4-7 the second slice of a stage
//     warps 8, 9   copy activations, one slice each, gathered into the order of the records; and
//                  records' outliers, which the other warps multiply, too (outliers.cuh)
#pragma once

#include "billfish/outliers.cuh"
#include "billfish/stripes.cuh"

namespace billfish {

constexpr int kTileBands = 2, kStageSlices = 2;
constexpr int kMathThreads = 256, kAllThreads = kMathThreads + 32 * kStageSlices;
constexpr int kOwners = 128;  // threads that hold a tile's final sums: those of the first slice

// Shared memory: stages of [records: band, slice][their lists of outliers][x: slice, token]; spread
// outliers of eight warps.
struct MixedRing {
    int lists, list_bytes, x, bytes;  // of a stage: byte offset of lists; of a list, of x; all
    u32 begin, end;
    BILLFISH_DEVICE MixedRing(const MixedLayer& layer, int list_bytes, int rows, int stages,
                              u32 begin)
        : lists((kTileBands * kStageSlices * max(kTwoBytes, layer.four_bytes()) + 127) / 128 * 128),
          list_bytes(list_bytes), x(lists + kTileBands * kStageSlices * list_bytes),
          bytes(x + kStageSlices * rows * kTwoK * 2), begin(begin), end(begin + stages * bytes) {}
};

// The stages of a stripe, one after the other, across the ends of tiles.
struct StageWalk {
    const MixedLayer& layer;
    const MixedRing& ring;
    u32 stage;
    int tile, slice, left;  // of the stage's first unit; units of the stripe from there on
    BILLFISH_DEVICE StageWalk(const MixedLayer& layer, const MixedRing& ring, u32 begin, u32 end)
        : layer(layer), ring(ring), stage(ring.begin), tile(begin / (layer.two + layer.four)),
          slice(begin - tile * (layer.two + layer.four)), left(end - begin) {}
    BILLFISH_DEVICE bool two() const { return slice < layer.two; }
    BILLFISH_DEVICE bool in(int one) const { return left > 0 && tile == one; }
    BILLFISH_DEVICE int slices() const {
        const int same = (two() ? layer.two : layer.two + layer.four) - slice;
        return min(kStageSlices, min(same, left));
    }
    BILLFISH_DEVICE void next() {
        const int done = slices();
        slice += done, left -= done;
        if (slice == layer.two + layer.four) slice = 0, ++tile;
        stage = stage + ring.bytes == ring.end ? ring.begin : stage + ring.bytes;
    }
};

// Copies the records of stage after stage, 16 bytes a thread and instruction: a band's records of a
// stage are one run of bytes. Evict first, as they are read once: x stays in L2 (MARLIN 3.4).
struct RecordCopier {
    static constexpr int kCopies = 3;  // of a thread, for a band: 8 sets of scales are the most
    static_assert(kStageSlices * (kFourScales + 8 * kFourSetBytes + kFourMarkBytes) <=
                  kCopies * kMathThreads * 16, "both kinds of record");
    StageWalk at;
    int bands;
    u64 policy;
    BILLFISH_DEVICE RecordCopier(const StageWalk& at, int bands)
        : at(at), bands(bands), policy(evict_first_policy()) {}

    // One group of cp.async, empty after the last stage: wait_copies counts groups.
    BILLFISH_DEVICE void next() {
        if (at.left > 0) {
            const MixedLayer& layer = at.layer;
            const int record = at.two() ? kTwoBytes : layer.four_bytes();
            const int place = at.two() ? at.slice * record
                                       : layer.two * kTwoBytes + (at.slice - layer.two) * record;
            const int bytes = at.slices() * record, first = at.tile * kTileBands;
#pragma unroll
            for (int band = 0; band < kTileBands; ++band) {
                if (first + band >= bands) break;
                const unsigned char* from = layer.band(first + band) + place;
                const u32 to = at.stage + band * kStageSlices * record;
#pragma unroll
                for (int i = 0; i < kCopies; ++i) {
                    const int byte = (i * kMathThreads + threadIdx.x) * 16;
                    if (byte < bytes) copy_async_16(to + byte, from + byte, policy);
                }
            }
            at.next();
        }
        commit_copies();
    }
};

// The same with activations and outliers: warp `sub` takes those of one slice. Where they are is
// known one stage ahead, as it comes from memory.
struct XCopier {
    StageWalk at;
    const int* columns;
    const u16* x;
    int m, k, rows, sub, lane, bands, column;
    u32 set[kTileBands], end[kTileBands];
    BILLFISH_DEVICE XCopier(const StageWalk& at, const int* columns, const u16* x, int m, int k,
                            int rows, int sub, int lane, int bands)
        : at(at), columns(columns), x(x), m(m), k(k), rows(rows), sub(sub), lane(lane),
          bands(bands) {
        find();
    }

    BILLFISH_DEVICE void find() {
        const int mine = at.slice + sub, two = at.layer.two;
        const int group = at.two() ? mine * 16 + lane / 2  // of 16 inputs
                                   : two * 16 + (mine - two) * 8 + lane % 16 / 2;
        const bool there = at.left > 0 && sub < at.slices();
        column = there ? columns[group] : -1;
#pragma unroll
        for (int i = 0; i < kTileBands; ++i) {
            const int band = at.tile * kTileBands + i;
            set[i] = end[i] = 0;
            if (!there || band >= bands) continue;
            set[i] = at.layer.edges(band)[mine], end[i] = at.layer.edges(band)[mine + 1];
        }
    }
    BILLFISH_DEVICE void next() {
        if (at.left > 0) {
            const u32 to = at.stage + at.ring.x;
            if (sub < at.slices()) {
                if (at.two())
                    gather_x<kTwoK, 32>(to + sub * rows * kTwoK * 2, x, column, k, m, lane);
                else
                    gather_x<kRecordK, 32>(to + sub * rows * kRecordK * 2, x, column, k, m, lane);
            }
#pragma unroll
            for (int i = 0; i < kTileBands; ++i) {
                const unsigned char* from = at.layer.list(at.tile * kTileBands + i, set[i]);
                const u32 list =
                    at.stage + at.ring.lists + (i * kStageSlices + sub) * at.ring.list_bytes;
                for (u32 byte = lane * 16; byte < (end[i] - set[i]) * kSetBytes; byte += 32 * 16)
                    copy_async_16(list + byte, from + byte);
            }
            at.next();
            find();
        }
        commit_copies();
    }
};

// Waits for this thread's copies of the oldest stage of a full ring, and for everybody: then nobody
// still reads the stage before, into which the next copies go.
BILLFISH_DEVICE void enter_stage(int stages) {
    if (stages == 2) wait_copies<0>();
    if (stages == 3) wait_copies<1>();
    if (stages == 4) wait_copies<2>();
    __syncthreads();
}

// `records` and `columns`: outliers.cuh. `x` is (m, k), `out` (m, n). kZero and kStep: mixed.cuh.
// blockDim.x is kAllThreads. `stages` is 2 to 4. No record's list of outliers has more than
// `list_bytes`.
template <class T, int kZero, int kStep, int kTokens>
__global__ void __launch_bounds__(kAllThreads, 1)
w2416_stripe(const unsigned char* __restrict__ records, const int* __restrict__ columns,
             const u16* __restrict__ x, const u16* __restrict__ bias, u16* __restrict__ out,
             float* workspace, u32* locks, int m, int n, int k, int tiles_2, int tiles_4, int sets,
             int band_words, int list_bytes, int stages) {
    constexpr int kBlocks = kTokens / 8;
    extern __shared__ __align__(128) unsigned char smem[];
    const MixedLayer layer{records, tiles_2, tiles_4, sets, band_words};
    const int rows = x_rows(kTokens, m), k_tiles = tiles_2 + tiles_4;
    const MixedRing ring(layer, list_bytes, rows, stages, smem_address(smem));
    const int bands = (n + kRecordN - 1) / kRecordN;
    const Stripes stripes((bands + kTileBands - 1) / kTileBands * k_tiles, gridDim.x);
    if (blockIdx.x >= stripes.count) return;
    const u32 stripe = stripes.count - 1 - blockIdx.x;
    StageWalk now(layer, ring, stripes.begin(stripe), stripes.begin(stripe + 1));

    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (thread >= kMathThreads) {
        XCopier copier(now, columns, x, m, k, rows, warp - kMathThreads / 32, lane, bands);
#pragma unroll 1
        for (int i = 0; i < stages - 1; ++i) copier.next();
        for (; now.left > 0; now.next()) {
            enter_stage(stages);
            copier.next();
        }
        return;
    }
    RecordCopier copier(now, bands);
#pragma unroll 1
    for (int i = 0; i < stages - 1; ++i) copier.next();

    const int sub = thread / kOwners, within = warp % 4, band = within / 2;
    const int record = band * kStageSlices + sub;
    const u32 x_at = ring.begin + ring.x;
    const u32 lists = ring.begin + ring.lists + record * list_bytes + within % 2 * (kSetBytes / 2);
    const TwoPlaces two(ring.begin + record * kTwoBytes, x_at + sub * rows * kTwoK * 2, thread,
                        rows);
    const FourPlaces four(ring.begin + record * layer.four_bytes(),
                          x_at + sub * rows * kRecordK * 2, thread, rows);
    const u32 marks =
        ring.begin + record * layer.four_bytes() + kFourScales + sets * kFourSetBytes;
    const u32 spread = ring.end + warp * kSpreadBytes;
    clear_spread(spread, lane);

    while (now.left > 0) {
        const int tile = now.tile, first_band = tile * kTileBands;
        const int have = min(kTileBands, bands - first_band);
        const int unit = *layer.head(first_band + min(band, have - 1));  // log2 of it
        const int plus = unit + Scaled<T>::kPlusFour, lower = plus + Scaled<T>::kLower;
        float acc[2][kBlocks][4] = {};
        u32 used = now.stage;
        for (; now.in(tile); now.next()) {
            enter_stage(stages);
            copier.next();
            const bool works = band < have && sub < now.slices();
            const u32 by = now.stage - ring.begin;
            if (works && now.two()) {
                multiply_two<T, kZero, kStep, kTokens>(
                    two, by, power<T>(unit + Scaled<T>::kPlus), acc);
                const u32 line = x_at + sub * rows * kTwoK * 2;
                multiply_outliers<T, kTokens>(SetPlaces<kTwoK>(lists, line, rows, spread, lane),
                                              by, lane, Unit<T>(unit), acc);
            } else if (works) {
                const u32 lean = power<T>(plus / 2);
                const u32 more =
                    power<T>(plus - plus / 2) & 0xffff | power<T>(lower - plus / 2) << 16;
                multiply_four<T, kTokens>(four, marks, by, lean, more, acc);
                const u32 line = x_at + sub * rows * kRecordK * 2;
                multiply_outliers<T, kTokens>(SetPlaces<kRecordK>(lists, line, rows, spread, lane),
                                              by, lane, Unit<T>(unit), acc);
            }
            used = now.stage;
        }

        const auto sync = [] { sync_some<1, kMathThreads>(); };
        sync();
        // Through the stage just used: nothing is copied into it before the next stage begins.
        add_odd_slices<kOwners>(acc, used, thread, sub, sync);
        const float real = __uint_as_float(127 - unit << 23);  // 1 / unit
#pragma unroll
        for (int i = 0; i < 8 * kBlocks; ++i) acc[i / 4 % 2][i / 8][i % 4] *= real;
        const Turn<kOwners, kBlocks> turn(stripes, stripe, (tile + 1) * k_tiles, k_tiles, workspace,
                                          locks, thread);
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
