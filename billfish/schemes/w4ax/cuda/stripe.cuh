// w4ax_stripe: y (m, n) = x (m, k) W^T with 4-bit weights and activations of 4 and 8 bits, on the
// int4 and int8 tensor cores of sm_80 to sm_89: COMET 4's W4Ax kernel.
//
// Inputs come in halves of a record (64): the first `fours` are of 4 bits, the others of 8. Of 8
// bits, weights become bytes (bytes.cuh). Of 4 bits, two words of a record become two fragments by
// four instructions. Codes are unsigned: sums begin with -8 times the sum of x, which takes the
// middle of symmetric codes off, or another zero is taken off after them. The sums of a group,
// whose block of x has one scale, times both whole scales are added to the same integers as those
// of bytes. So sums are exact, in any order the same.
//
// Stripes of equal cost over tiles of outputs and tokens, and a ring of cp.async stages:
// stripes.cuh and MARLIN 3.4. stripe.py has the same arithmetic.
#pragma once

#include "billfish/bytes.cuh"
#include "billfish/gate.cuh"
#include "billfish/stripes.cuh"

namespace billfish {

// Shared memory is a ring of stages: [records: slice, band][x: slice, token]. x has a line of 128
// bytes a token, swizzled as record.cuh's; stripe_quant.cuh says what is in it.
template <int kGroup, bool kAsymmetric, int kTokens, int kBands>
struct AxStripeStage {
    static_assert(kBands == 2 || kBands == 4, "128 or 256 outputs");
    static constexpr int kSlices = kStageRecords / kBands;  // that are worked on at a time
    static constexpr int kRecordBytes = AxRecord<kGroup, kAsymmetric>::kBytes;
    static constexpr int kX = kStageRecords * kRecordBytes;  // byte offset
    static constexpr int kBytes = kX + kSlices * kTokens * kXLine;
    static constexpr int kStages = ring_stages(kBytes);
    static_assert(kStages >= 3 && kStages * kBytes <= kMostSmem, "fits on sm_86");
    static_assert(kX % 128 == 0 && kBytes % 128 == 0, "lines of x");
};

// Which chunk of 16 bytes has a 4-bit block's scale and sum; those behind it are not read.
template <int kGroup>
constexpr BILLFISH_DEVICE int scale_chunk(int group) { return group * (kGroup / 16) + kGroup / 32; }

// Copies stage after stage, 16 bytes a thread and instruction, across the ends of tiles.
template <int kGroup, bool kAsymmetric, int kTokens, int kBands>
struct AxCopier {
    using Stage = AxStripeStage<kGroup, kAsymmetric, kTokens, kBands>;
    static constexpr int kRows = kStripeThreads / 8;  // of x at once, 8 chunks each

    StageRecords<Stage::kRecordBytes, kBands> records;
    const unsigned char *from, *x;  // this thread's 16 bytes of the stage's records, of a token
    u32 to, ring, x_offset;
    int left, slice, bands, m_tile, m_tiles, k_tiles, m, fours;

    BILLFISH_DEVICE AxCopier(const unsigned char* all, const unsigned char* x, u32 ring, u32 begin,
                             u32 end, int bands_all, int m_tiles, int k_tiles, int m, int fours)
        : records(m_tiles == 1 ? evict_first_policy() : keep_policy(), k_tiles),
          x(x + threadIdx.x % 8 * 16), to(ring), ring(ring), left(end - begin), m_tiles(m_tiles),
          k_tiles(k_tiles), m(m), fours(fours) {
        const int tile = begin / k_tiles, n_tile = tile / m_tiles, thread = threadIdx.x;
        m_tile = tile - n_tile * m_tiles;
        slice = begin - tile * k_tiles;
        bands = bands_all - n_tile * kBands;  // from this tile on
        from = all + static_cast<u64>(n_tile * kBands) * records.band_bytes +
               static_cast<u64>(slice) * Stage::kRecordBytes + records.offset();
        const int row = thread / 8;  // slice * kTokens + token
        x_offset = Stage::kX + row * kXLine + ((thread ^ row) % 8 << 4);
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
            if (slice == k_tiles) {  // the same records again, or the next tile's
                slice = 0;
                from -= records.band_bytes;
                if (++m_tile == m_tiles) {
                    m_tile = 0, bands -= kBands;
                    from += static_cast<u64>(kBands) * records.band_bytes;
                }
            }
            to += Stage::kBytes;
            if (to == ring + Stage::kStages * Stage::kBytes) to = ring;
        }
        commit_copies();
    }

    // Zeros past the last token.
    BILLFISH_DEVICE void copy_x(int slices) const {
        const int chunk = threadIdx.x % 8, half = chunk / 4;
        const bool spare = kGroup >= 64 && chunk > scale_chunk<kGroup>(kGroup == 64 ? half : 0);
#pragma unroll
        for (int i = 0; i * kRows < Stage::kSlices * kTokens; ++i) {
            const int row = threadIdx.x / 8 + i * kRows, sub = row / kTokens;
            const int token = m_tile * kTokens + row % kTokens;
            if (sub >= slices || (spare && (slice + sub) * 2 + half < fours)) continue;
            const u64 at = (static_cast<u64>(token) * k_tiles + slice + sub) * kXLine;
            copy_async_16(to + x_offset + i * kRows * kXLine, token < m ? x + at : x,
                          token < m ? 16u : 0u);
        }
    }
};

// acc (32 outputs x kTokens) += weights (32 outputs x a group of 4-bit inputs) * x^T. `words_at`
// and `x_at` as in multiply_bytes, `x`: the first token's line.
template <int kTokens, int kGroup, bool kAsymmetric>
BILLFISH_DEVICE void multiply_nibbles(u32 words_at, u32 x_at, u32 x, int group, int lane,
                                      const AxScales<kGroup, kAsymmetric> (&scales)[2],
                                      u32 (&acc)[2][kTokens / 8][4]) {
    constexpr int kSteps = kGroup / 64;
    constexpr u32 kEven = 0x0f0f0f0fu;
    u32 a[2][kSteps][4];
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
        const int brick = i % 2, step = i / 2;
        // Codes of rows r and r + 8 take turns in a word.
        const uint4 v =
            load_smem_16(words_at + ((group * kSteps + step) * 4 + brick) * kBrickBytes);
        u32(&fragment)[4] = a[brick][step];
        fragment[0] = (v.x & kEven) | (v.y << 4 & ~kEven);
        fragment[1] = (v.x >> 4 & kEven) | (v.y & ~kEven);
        fragment[2] = (v.z & kEven) | (v.w << 4 & ~kEven);
        fragment[3] = (v.z >> 4 & kEven) | (v.w & ~kEven);
    }
    const int chunk = scale_chunk<kGroup>(group);
#pragma unroll
    for (int block = 0; block < kTokens / 8; ++block) {
        u32 b[4];
        load_matrices(b, (x_at ^ group * kGroup) + block * 8 * kXLine);
        uint4 token[2];  // scale of the block, -8 times its sum, its sum
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = lane % 4 * 2 + i;
            token[i] = load_smem_16(x + (block * 8 + row) * kXLine + ((chunk ^ row) << 4));
        }
#pragma unroll
        for (int brick = 0; brick < 2; ++brick) {
            u32 part[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) part[i] = kAsymmetric ? 0 : token[i % 2].y;
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
                mma_nibbles(part, a[brick][step], b[step * 2], b[step * 2 + 1]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 q = scales[brick].of(group, i / 2);
                u32& sum = acc[brick][block][i];
                if constexpr (kAsymmetric) {  // - zero q
                    const u32 minus = scales[brick].more.of(group, i / 2) - 128;
                    sum += (part[i] * q + minus * token[i % 2].z) * token[i % 2].x;
                } else {
                    sum += part[i] * (q * token[i % 2].x);
                }
            }
        }
    }
}

// acc (32 outputs x kTokens) += weights (32 outputs, the `half` of a record, x 128 inputs) * x^T;
// `fours`: halves of the inputs, from here on, of 4 bits.
template <int kGroup, bool kAsymmetric, int kTokens>
BILLFISH_DEVICE void multiply_mixed(u32 record, u32 x, int half, int lane, int fours,
                                    u32 (&acc)[2][kTokens / 8][4]) {
    AxScales<kGroup, kAsymmetric> scales[2];
    AxGrain grain[2];
#pragma unroll
    for (int brick = 0; brick < 2; ++brick) scales[brick].load(record, half * 2 + brick, lane);
    const u32 words_at = record + half * 2 * kBrickBytes + lane * 16;
    const u32 x_at = x + lane % 8 * kXLine + ((lane / 8 ^ lane % 8) << 4);
    if constexpr (kGroup == 128) {
        if (fours > 0) {
            multiply_nibbles<kTokens>(words_at, x_at, x, 0, lane, scales, acc);
            return;
        }
    }
#pragma unroll
    for (int k64 = 0; k64 < 2; ++k64) {
        if constexpr (kGroup == 64) {
            if (k64 < fours) {
                multiply_nibbles<kTokens>(words_at, x_at, x, k64, lane, scales, acc);
                continue;
            }
        }
        multiply_bytes<kTokens>(words_at, x_at, k64, scales, grain, acc);
    }
}

// Epilogue of a warp: outputs `first` and on of tokens `token_0` and on. Gated: a thread has gates
// r and their ups, rows r + 8.
template <class T, int kTokens>
BILLFISH_DEVICE void store_scaled(const u32 (&acc)[2][kTokens / 8][4], const uint2* tokens,
                                  const float* bases, const u16* bias, u16* out, int m, int n,
                                  int token_0, int first, bool gated, int lane) {
    float base[4], add[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = first + i * 8 + lane / 4;
        base[i] = row < n ? bases[row] : 0.0f;
        add[i] = bias != nullptr && row < n ? T::to_float(bias[row]) : 0.0f;
    }
#pragma unroll
    for (int block = 0; block < kTokens / 8; ++block) {
        const int token = token_0 + block * 8 + lane % 4 * 2;  // and the next
        if (token >= m) continue;
        const uint4 two = load_global_bits_16(tokens + token);
        u32 y[4];  // of outputs r, r + 8, ...: both tokens'
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32(&sum)[4] = acc[i / 2][block];
            y[i] = T::pack(scaled(sum[i % 2 * 2], two.x, two.y, base[i]) + add[i],
                           scaled(sum[i % 2 * 2 + 1], two.z, two.w, base[i]) + add[i]);
        }
        if (gated) y[0] = swiglu<T>(y[0], y[1]), y[1] = swiglu<T>(y[2], y[3]);
        const int width = gated ? n / 2 : n;
        u16* const place = out + static_cast<u64>(token) * width + (gated ? first / 2 : first);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = i * 8 + lane / 4;
            if (first + (gated ? 2 * i * 8 : row) >= n || (gated && i >= 2)) continue;
            place[row] = y[i];
            if (token + 1 < m) place[width + row] = y[i] >> 16;
        }
    }
}

// `records` is (bands, k tiles) records, `x` (m, k tiles * 128 bytes) and `tokens` as
// w4ax_stripe_quant writes them, `bases` (n), `out` (m, n): tiles of kTokens tokens and kBands
// bands, those of the same bands one after the other. The first `fours` halves of 64 inputs have 4
// bits; one of 8 bits costs `heavy` times as much. `gated`: of every 16 rows the first 8 are gates
// and the others their ups, and `out` is (m, n / 2). blockDim.x is kStripeThreads, dynamic shared
// memory kStages * kBytes.
template <class T, int kGroup, bool kAsymmetric, int kTokens, int kBands>
__global__ void __launch_bounds__(kStripeThreads, 1)
w4ax_stripe(const unsigned char* __restrict__ records, const unsigned char* __restrict__ x,
            const uint2* tokens, const float* __restrict__ bases, const u16* __restrict__ bias,
            u16* __restrict__ out, u32* workspace, u32* locks, int m, int n, int k_tiles,
            int fours, int heavy, bool gated) {
    using Stage = AxStripeStage<kGroup, kAsymmetric, kTokens, kBands>;
    constexpr int kBlocks = kTokens / 8;
    constexpr int kOwners = kBands * 2 * 32;  // threads that hold a tile's final sums

    extern __shared__ __align__(128) unsigned char smem[];
    const u32 ring = smem_address(smem);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int bands = (n + kRecordN - 1) / kRecordN, m_tiles = (m + kTokens - 1) / kTokens;
    const CostStripes stripes((bands + kBands - 1) / kBands * m_tiles, k_tiles, fours, heavy,
                              gridDim.x);
    if (blockIdx.x >= stripes.count) return;
    const u32 stripe = stripes.count - 1 - blockIdx.x;
    const u32 begin = stripes.begin(stripe), end = stripes.begin(stripe + 1);

    // MARLIN 3.4's warp layout: where a tile is narrow, warps split its inputs, too.
    const int record = warp / 2, band = record % kBands, sub = record / kBands;
    AxCopier<kGroup, kAsymmetric, kTokens, kBands> copier(records, x, ring, begin, end, bands,
                                                          m_tiles, k_tiles, m, fours);
#pragma unroll
    for (int i = 0; i < Stage::kStages - 1; ++i) copier.next();

    u32 stage = ring;
    for (u32 unit = begin; unit < end;) {
        const u32 tile = unit / k_tiles, tile_end = (tile + 1) * k_tiles;
        const int n_tile = tile / m_tiles, m_tile = tile - n_tile * m_tiles;
        const int span = min(tile_end, end) - unit;                   // slices of this tile
        const int left = fours - (unit - tile * k_tiles + sub) * 2;  // of 4 bits from here on
        const bool has_band = n_tile * kBands + band < bands;
        u32 acc[2][kBlocks][4] = {};
        u32 used = stage;
        for (int slice = 0; slice < span; slice += Stage::kSlices) {
            // One barrier a stage: all threads' copies of this stage are visible, and nobody still
            // reads the previous stage, which the next copies overwrite.
            wait_copies<Stage::kStages - 2>();
            __syncthreads();
            copier.next();
            if (has_band && slice + sub < span)
                multiply_mixed<kGroup, kAsymmetric, kTokens>(
                    stage + record * Stage::kRecordBytes,
                    stage + Stage::kX + sub * kTokens * kXLine, warp % 2, lane, left - slice * 2,
                    acc);
            used = stage;
            stage += Stage::kBytes;
            if (stage == ring + Stage::kStages * Stage::kBytes) stage = ring;
        }
        unit += span;

        // Through the stage just used: nothing is copied into it before the next stage's barrier.
        const auto sync = [] { __syncthreads(); };
        if constexpr (Stage::kSlices == 2) {
            static_assert(kOwners * 2 * kBlocks * 16 <= Stage::kBytes, "sums fit in a stage");
            __syncthreads();
            add_odd_slices<kOwners>(acc, used, thread, sub, sync);
        }
        const Turn<kOwners, kBlocks, u32> turn(stripes, stripe, tile_end, k_tiles, workspace,
                                               locks, thread);
        turn.add(acc, thread, sub, sync);
        if (!turn.last()) {
            turn.pass_on(acc, thread, sub, sync);
            continue;
        }
        turn.end(thread);
        if (sub == 0)
            store_scaled<T, kTokens>(acc, tokens, bases, bias, out, m, n, m_tile * kTokens,
                                     (n_tile * kBands * 2 + warp) * 32, gated, lane);
    }
}

}  // namespace billfish
