// A striped product (stripes.cuh) of 16-bit activations, y (m, n) = x (m, k) W^T for m <= 64: the
// ring of its cp.async stages and the main loop, for weights in records of any format.
//
// A format has:
//
//     Type, kRecordBytes                       of the activations; of a record
//     places<kTokens>(record, x, lane, half)   of a lane's operands; moved from stage to stage
//     multiply<kTokens>(places, acc)           a warp's product with half a record
//     finish<kTokens>(sum, lower)              what is done to a sum at the end
#pragma once

#include "billfish/record.cuh"
#include "billfish/stripes.cuh"

namespace billfish {

// Shared memory is a ring of stages: [records: slice, band][x: slice, token]. MARLIN's pipeline is
// 4 deep; ring_stages has fewer where stages are large.
template <int kRecord, int kTokens, int kBands>
struct StripeStage {
    static_assert(kBands == 2 || kBands == 4, "128 or 256 outputs");
    static_assert(kTokens == 8 || kTokens % 16 == 0, "StageCopier");
    static constexpr int kSlices = kStageRecords / kBands;  // that are worked on at a time
    static constexpr int kRecordBytes = kRecord;
    static constexpr int kX = kStageRecords * kRecordBytes;  // byte offset
    static constexpr int kBytes = kX + kSlices * x_bytes(kTokens);
    static constexpr int kStages = ring_stages(kBytes);
    static_assert(kStages >= 2, "one to copy, one to use");
    static_assert(kStages * kBytes <= kMostSmem, "fits on sm_86");
    static_assert(kX % 128 == 0 && kBytes % 128 == 0, "LanePlaces");
};

// Copies stage after stage, 16 bytes a thread and instruction, across the ends of tiles.
template <int kRecord, int kTokens, int kBands>
struct StageCopier {
    using Stage = StripeStage<kRecord, kTokens, kBands>;
    static constexpr int kXChunks = Stage::kSlices * x_bytes(kTokens) / 16;

    const unsigned char* from;  // this thread's first 16 bytes of the stage's records
    const u16* x;               // this thread's chunk of column 0
    StageRecords<Stage::kRecordBytes, kBands> records;
    u32 to, ring, x_offset;
    int left, slice, bands, k_tiles, x_tiles, x_columns, row, m, x_k;

    BILLFISH_DEVICE StageCopier(const unsigned char* all, const u16* x, u32 ring, u32 begin,
                                u32 end, int bands_all, int k_tiles, int m, int x_k)
        : x(x + threadIdx.x % 16 * 8), records(evict_first_policy(), k_tiles), to(ring), ring(ring),
          left(end - begin), k_tiles(k_tiles), m(m), x_k(x_k) {
        const int tile = begin / k_tiles, thread = threadIdx.x;
        slice = begin - tile * k_tiles;
        bands = bands_all - tile * kBands;  // from this tile on
        from = all + static_cast<u64>(tile * kBands) * records.band_bytes +
               static_cast<u64>(slice) * Stage::kRecordBytes + records.offset();
        x_tiles = (x_k + kRecordK - 1) / kRecordK;
        x_columns = x_k - thread % 16 * 8;  // columns below it are real
        row = thread / 16;                  // slice * kTokens + token
        x_offset = Stage::kX + row / kTokens * x_bytes(kTokens) +
                   x_smem_offset<kTokens>(row % kTokens, thread % 16);
    }

    // One group of cp.async, empty after the last stage: wait_copies counts groups.
    BILLFISH_DEVICE void next() {
        if (left > 0) {
            const int slices = min(Stage::kSlices, min(k_tiles - slice, left));
            records.copy(to, from, bands, slices);
            copy_x(slices);
            left -= slices;
            slice += slices;
            from += slices * Stage::kRecordBytes;
            if (slice == k_tiles) {  // from the end of a tile's first band to the next tile's
                slice = 0, bands -= kBands;
                from += static_cast<u64>(kBands - 1) * records.band_bytes;
            }
            to += Stage::kBytes;
            if (to == ring + Stage::kStages * Stage::kBytes) to = ring;
        }
        commit_copies();
    }

    // Zeros past the end of k, where records are padded, and past the last token.
    BILLFISH_DEVICE void copy_x(int slices) const {
#pragma unroll
        for (int i = 0; i * kStripeThreads < kXChunks; ++i) {
            const int mine = row + i * 16, sub = mine / kTokens, token = mine % kTokens;
            const int tile = slice + sub;  // planes of codes follow one another: x repeats
            const int column = (tile >= x_tiles ? tile - x_tiles : tile) * kRecordK;
            const bool real = token < m && column < x_columns;
            const int on = i * 16 / kTokens * x_bytes(kTokens) + i * 16 % kTokens * kXLine;
            if (sub < slices)  // never more rows than kSlices * kTokens
                copy_async_16(to + x_offset + on,
                              real ? x + (token * x_k + column) : x, real ? 16u : 0u);
        }
    }
};

// `records` is (bands, k tiles) records, `x` (m, x_k), `out` (m, n). Columns of x repeat after its
// last tile, for formats of two planes along k. Rows of x begin at multiples of 16 bytes.
// blockDim.x is kStripeThreads, dynamic shared memory kStages * kBytes.
template <class Format, int kTokens, int kBands>
BILLFISH_DEVICE void stripe_product(const unsigned char* __restrict__ records,
                                    const u16* __restrict__ x, const u16* __restrict__ bias,
                                    u16* __restrict__ out, float* workspace, u32* locks, int m,
                                    int n, int x_k, int k_tiles) {
    using Stage = StripeStage<Format::kRecordBytes, kTokens, kBands>;
    constexpr int kBlocks = kTokens / 8;
    constexpr int kOwners = kBands * 2 * 32;  // threads that hold a tile's final sums

    extern __shared__ __align__(128) unsigned char smem[];
    const u32 ring = smem_address(smem);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int bands = (n + kRecordN - 1) / kRecordN;
    const Stripes stripes((bands + kBands - 1) / kBands * k_tiles, gridDim.x);
    if (blockIdx.x >= stripes.count) return;
    const u32 stripe = stripes.count - 1 - blockIdx.x;
    const u32 end = stripes.begin(stripe + 1);

    // MARLIN 3.4's warp layout: where a tile is narrow, warps split its inputs, too.
    const int record = warp / 2, band = record % kBands, sub = record / kBands;
    auto places = Format::template places<kTokens>(ring + record * Stage::kRecordBytes,
                                                   ring + Stage::kX + sub * x_bytes(kTokens),
                                                   lane, warp % 2);

    StageCopier<Format::kRecordBytes, kTokens, kBands> copier(
        records, x, ring, stripes.begin(stripe), end, bands, k_tiles, m, x_k);
#pragma unroll
    for (int i = 0; i < Stage::kStages - 1; ++i) copier.next();

    u32 stage = ring;
    for (u32 unit = stripes.begin(stripe); unit < end;) {
        const u32 tile = unit / k_tiles, tile_end = (tile + 1) * k_tiles;
        const int span = min(tile_end, end) - unit;  // slices of this tile
        const bool has_band = static_cast<int>(tile) * kBands + band < bands;
        float acc[2][kBlocks][4] = {};
        u32 used = stage;
        for (int slice = 0; slice < span; slice += Stage::kSlices) {
            // One barrier a stage: all threads' copies of this stage are visible, and nobody still
            // reads the previous stage, which the next copies overwrite.
            wait_copies<Stage::kStages - 2>();
            __syncthreads();
            copier.next();
            if (has_band && slice + sub < span) Format::template multiply<kTokens>(places, acc);
            used = stage;
            stage += Stage::kBytes;
            if (stage == ring + Stage::kStages * Stage::kBytes) stage = ring;
            places.move(stage - used);
        }
        unit += span;

        // Through the stage just used: nothing is copied into it before the next stage's barrier.
        const auto sync = [] { __syncthreads(); };
        if constexpr (Stage::kSlices == 2) {
            static_assert(kOwners * 2 * kBlocks * 16 <= Stage::kBytes, "sums fit in a stage");
            __syncthreads();
            add_odd_slices<kOwners>(acc, used, thread, sub, sync);
        }
        const Turn<kOwners, kBlocks> turn(stripes, stripe, tile_end, k_tiles, workspace, locks,
                                          thread);
        turn.add(acc, thread, sub, sync);
        if (!turn.last()) {
            turn.pass_on(acc, thread, sub, sync);
            continue;
        }
        turn.end(thread);
        if (sub > 0) continue;
        store_tile<typename Format::Type>(
            acc, bias, out, (tile * kBands * 2 + warp) * 32, lane, m, n,
            [](float sum, bool lower) { return Format::template finish<kTokens>(sum, lower); });
    }
}

}  // namespace billfish
