// A product of few tokens on clusters of two blocks, or of four (teams.cuh), sm_90: what each block
// computes, the ring that its warps share, and how partial sums are added. Main loops are their
// kernels' own.
//
//     cluster c of C:  bands of 64 outputs [c, c + 1) / C, in passes of at most kBands
//     block r of 2:    inputs [r, r + 1) / 2 of each pass
//     a stage          four records, kBands bands of 4 / kBands slices of inputs; each of eight
//                      math warps takes half a record
//
// Partial sums go to the block that owns the outputs (st.async), which adds them in the order of k:
// the same bits in every run, for every m and batch.
#pragma once

#include "billfish/gate.cuh"
#include "billfish/record.cuh"

namespace billfish {

constexpr int kMathWarps = 8;
constexpr int kCluster = 2;  // the only size that reaches every SM: GPCs have odd numbers of pairs

// A slot of the ring and the parity its barriers are waited for. A warp must not skip a stage:
// copies arrive out of order, and parity does not tell the next round from the previous one.
struct Slot {
    int index = 0;
    u32 parity = 0;
    BILLFISH_DEVICE bool advance(int stages) {  // true: it wrapped around
        if (++index != stages) return false;
        index = 0, parity ^= 1;
        return true;
    }
};

#if __CUDA_ARCH__ >= 900

// A block's share of the work, of clusters of kCtas. Recomputed wherever it is needed: kept, it
// would cost the inner loop registers, and special registers are cheap to read.
template <int kCtas>
struct ShareOf {
    int rank, first_band, bands, most_bands, k_begin, span;
    BILLFISH_DEVICE ShareOf(int n, int k_tiles) {
        const u32 total = (n + kRecordN - 1) / kRecordN;
        const u32 index = cluster_index(), count = cluster_count();
        rank = cluster_rank();
        first_band = total * index / count;  // some 10^5 bands x 10^2 clusters
        bands = total * (index + 1) / count - first_band;
        most_bands = (total + count - 1) / count;
        k_begin = k_tiles * rank / kCtas;
        span = k_tiles * (rank + 1) / kCtas - k_begin;
    }
    BILLFISH_DEVICE int passes(int most) const { return (bands + most - 1) / most; }
    // Bands before pass `pass` of `passes`, as even as possible.
    BILLFISH_DEVICE int before(int pass, int passes) const { return bands * pass / passes; }
};
using Share = ShareOf<kCluster>;

// Where an SM gets two clusters, they are c and c + C / 2: the two divide what is an SM's part of
// the outputs. By their own indices both may have more than others (448 bands: 8 bands on one SM, 6
// on another; here 7 and 6).
struct PairedShare : Share {
    BILLFISH_DEVICE PairedShare(int n, int k_tiles) : Share(n, k_tiles) {
        const u32 total = (n + kRecordN - 1) / kRecordN;
        const u32 pairs = cluster_count() / 2, index = cluster_index();
        if (cluster_count() % 2) return;  // as many SMs: one cluster each
        const u32 pair = index % pairs, odd = index >= pairs;
        const int begin = total * pair / pairs, both = total * (pair + 1) / pairs - begin;
        first_band = begin + (odd ? both / 2 : 0);
        bands = odd ? both - both / 2 : both / 2;
    }
};

// A math warp: slice `sub` of a stage, the `within`-th 32 outputs. Recomputed like Share. kTurned:
// where a stage has three bands of four, the warps without work are on other quarters of the SM in
// one half of the clusters than in the other, of which an SM has one each (8192 x 57344: -1 %).
template <int kWarpsN, int kFirstMathWarp, bool kTurned = false>
struct Worker {
    int lane, index, sub, within, band;
    BILLFISH_DEVICE Worker() {
        const int thread = thread_index() - 32 * kFirstMathWarp;
        lane = thread % 32, index = thread / 32;
        if (kTurned && cluster_index() >= cluster_count() / 2) index = (index + 2) % kMathWarps;
        sub = index / kWarpsN, within = index % kWarpsN, band = within / 2;
    }
};

// A block without work stays about as long as the others need: an SM with both slots free would get
// two blocks of a later kernel, which then waits for that SM (9.4 us became 13.3 for 14336 x 4096,
// 64 bands on 66 clusters). A record takes 128 ns of an SM's bandwidth.
BILLFISH_DEVICE void linger(int records) {
    dependency_wait();
    for (const u64 begin = nanoseconds(); nanoseconds() - begin < 100u * records;)
        sleep_nanoseconds(200);
}

BILLFISH_DEVICE void load_sum(u32 address, float& v) { v = load_smem_float(address); }
BILLFISH_DEVICE void load_sum(u32 address, u32& v) { v = load_smem_4(address); }

// The sums of a pass, reduced once a tile (MARLIN 3.4): `rows` of its outputs belong to this block,
// as many to the other one. `buffer` holds [block and slice][two tokens][row][token]: lanes read
// neighbouring rows from different banks ([row][token]: 16 tokens of 4096 outputs, 1.1 us more).
template <int kTokens, int kBands>
struct Sums {
    static constexpr int kSlices = 4 / kBands, kParts = kCluster * kSlices;
    static constexpr int kBytes = kSlices * kBands * kRecordN * kTokens * 4;

    static BILLFISH_DEVICE u32 expected(int rows, int m) {  // bytes that a block is sent
        return kParts * rows * ((m + 1) / 2) * 8;
    }

    // A warp's sums to their owners; `finish(sum, lower)` is what is sent, of integers the bits.
    template <class V, class Worker, class Finish>
    static BILLFISH_DEVICE void send(const V (&acc)[2][blocks_of(kTokens)][4], u32 buffer,
                                     u32 barrier, const Worker& me, int rank, int rows, int m,
                                     Finish finish) {
#pragma unroll
        for (int brick = 0; brick < 2; ++brick) {
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {
                const int row = me.within * 32 + brick * 16 + lower * 8 + me.lane / 4;
                const int owner = row >= rows, part = rank * kSlices + me.sub;
                const int place =
                    (part * (kTokens / 2) + me.lane % 4) * rows + row - owner * rows;
                const u32 to = in_block(buffer + place * 8, owner);
                const u32 signal = in_block(barrier, owner);
#pragma unroll
                for (int block = 0; block < blocks_of(kTokens); ++block) {
                    const V(&sum)[4] = acc[brick][block];
                    if (block * 8 + me.lane % 4 * 2 < m)
                        store_remote(to + block * 4 * rows * 8, finish(sum[lower * 2], lower),
                                     finish(sum[lower * 2 + 1], lower), signal);
                }
            }
        }
    }

    template <class T, int kRun, class Worker>
    static BILLFISH_DEVICE float store(u32 buffer, const u16* bias, u16* out, const Worker& me,
                                      int m, int n, int first, int rows, bool gated) {
        return store_as<float, T, kRun>(buffer, bias, out, me, m, n, first, rows, gated,
                                        [](float sum, int) { return sum; });
    }

    template <class V, class T, int kRun, class Worker, class Value>
    static BILLFISH_DEVICE float store_as(u32 buffer, const u16* bias, u16* out, const Worker& me,
                                         int m, int n, int first, int rows, bool gated,
                                         Value value) {
        return store_at<V, T, kRun>(buffer, bias, out, me, m, n, first, rows, gated, value,
                                    [](int token) { return token; });
    }

    // Adds the parts of this block's rows, output `first` and on, as numbers of type V, and stores
    // `value(sum, token)` of each, of a token in row `place(token)` of `out`. A warp has the same
    // row of every token. `gated`: of every 2 kRun rows the first kRun are gates and the others
    // their ups, n / 2 results. The number returned depends on all that was read.
    template <class V, class T, int kRun, class Worker, class Value, class Place>
    static BILLFISH_DEVICE float store_at(u32 buffer, const u16* bias, u16* out, const Worker& me,
                                         int m, int n, int first, int rows, bool gated, Value value,
                                         Place place) {
        float seen = 0;
        for (int item = me.index; item < m * kBands; item += kMathWarps) {
            const int token = item / kBands, row = item % kBands * 32 + me.lane;
            if (row >= rows) continue;  // all lanes: rows are a multiple of 32
            const u32 from = buffer + (token / 2 * rows + row) * 8 + token % 2 * 4;
            V part[kParts], sum = 0;
#pragma unroll
            for (int i = 0; i < kParts; ++i)
                load_sum(from + i * (kTokens / 2) * rows * 8, part[i]);
#pragma unroll
            for (int i = 0; i < kParts; ++i) sum += part[i];
            float total = value(sum, token);
            seen += total;
            if (gated) {  // n is a multiple of 2 kRun; n / 2 would cost a register, and spill
                const float up = shuffle_xor(total, kRun);
                const u32 y = swiglu<T>(T::from_float(total), T::from_float(up));
                constexpr u64 kPair = 2 * kRun - 1;
                if (me.lane % (2 * kRun) < kRun && first + row < n)
                    out[(static_cast<u64>(place(token)) * n + first + row & ~kPair) / 2 +
                        row % kRun] = y;
                continue;
            }
            if (first + row >= n) continue;
            if (bias != nullptr) total += T::to_float(bias[first + row]);
            out[static_cast<u64>(place(token)) * n + first + row] = T::from_float(total);
        }
        return seen;
    }
};

#endif

}  // namespace billfish
