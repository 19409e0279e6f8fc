// A layer of 2-bit and 4-bit records with outliers, and the warps that add them.
#pragma once

#include "billfish/mixed.cuh"
#include "billfish/warp.cuh"

namespace billfish {

// A layer's records: of each band those of 2 bits, those of 4 bits, and outliers: `kHead` words, of
// which the first is log2 of the band's unit; where the list of each record begins, and their end;
// the entries. An outlier is value << 16 | row << 8 | column of the record, and kAgain where rows
// begin again: entries from one such to the next have distinct rows. Beside them, columns[i] is the
// column of x with which group i of 16 inputs of the records begins, -1 for none.
constexpr int kHead = 8;
constexpr u32 kAgain = 0x8000;

struct MixedLayer {
    const unsigned char* records;
    int two, four, sets, band_words;  // tiles along k of either kind; words of a band
    BILLFISH_DEVICE int four_bytes() const {
        return kFourScales + sets * kFourSetBytes + kFourMarkBytes;
    }
    BILLFISH_DEVICE const unsigned char* band(int index) const {
        return records + static_cast<u64>(index) * band_words * 4;
    }
    BILLFISH_DEVICE const u32* lists(int index) const {
        return reinterpret_cast<const u32*>(band(index) + two * kTwoBytes + four * four_bytes());
    }
    BILLFISH_DEVICE int edge_words() const { return (two + four + 8) / 8 * 8; }
};

constexpr int kListWarps = 2;

// The lists of one stage that a list warp adds: of two of its four records. Each warp has sums of
// its own, of 64 outputs or twice 64: two warps never add to the same, and one adds in a fixed
// order.
template <class T, int kTokens, int kBands>
struct Outliers {
    static constexpr int kSlices = 4 / kBands, kMine = 4 / kListWarps;
    static constexpr int kRegions = kBands == 4 ? kMine : 1;  // of 64 outputs
    static constexpr int kRegionBytes = kRecordN * kTokens * 4;
    const MixedLayer& layer;
    int first_band, warp, lane;
    u32 edges = 0, entries[kMine];  // lanes 2 i and 2 i + 1: ends of list i; the first 32 of each

    BILLFISH_DEVICE Outliers(const MixedLayer& layer, int first_band, int warp, int lane)
        : layer(layer), first_band(first_band), warp(warp), lane(lane) {}

    // Record i of this warp: of which band, and which slice. As records lie in a stage.
    BILLFISH_DEVICE int band(int i) const { return (warp * kMine + i) / kSlices; }
    BILLFISH_DEVICE int slice(int i) const { return (warp * kMine + i) % kSlices; }
    BILLFISH_DEVICE const u32* list(int i) const {
        return layer.lists(first_band + band(i)) + kHead + layer.edge_words();
    }

    // Where the lists of the records from slice `first` of `span` on are; `tile` is slice 0.
    BILLFISH_DEVICE void find(int have, int tile, int first, int span) {
        const int i = lane / 2, at = first + slice(i);
        const bool there = i < kMine && band(i) < have && at < span;
        edges = there ? layer.lists(first_band + band(i))[kHead + tile + at + lane % 2] : 0;
    }
    BILLFISH_DEVICE void fetch() {
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const u32 at = shuffle(edges, 2 * i) + lane, end = shuffle(edges, 2 * i + 1);
            entries[i] = at < end ? list(i)[at] : 0;
        }
    }

    BILLFISH_DEVICE void take(const Outliers& other) {
        edges = other.edges;
#pragma unroll
        for (int i = 0; i < kMine; ++i) entries[i] = other.entries[i];
    }

    // Adds outlier * x to sums, an outlier a lane; returns a number that depends on all of x that
    // it has read. `x_line` is the bytes of x of a token in a slice.
    BILLFISH_DEVICE float add(u32 x, int x_line, u32 sums, int m) const {
        float seen = 0;
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const u32 begin = shuffle(edges, 2 * i), end = shuffle(edges, 2 * i + 1);
            u32 one = entries[i];
#pragma unroll 1
            for (u32 at = begin; at < end; at += 32) {
                const u32 next = at + 32 + lane < end ? list(i)[at + 32 + lane] : 0;
                const u32 count = min(end - at, 32u);
                const u32 from = x + slice(i) * x_rows(kTokens, m) * x_line;
                const u32 to = sums + (kRegions > 1 ? i : 0) * kRegionBytes +
                               (one >> 8 & 63) * kTokens * 4;
                u32 again = ballot(one & kAgain) & ~1u;
#pragma unroll 1
                for (u32 first = 0, last; first < count; first = last) {
                    again &= first ? again - 1 : again;  // without the one at `first`
                    last = again ? 31 - __clz(again & 0 - again) : count;
                    if (lane >= first && lane < last)
                        seen += add_one(one, from, x_line, to, m);
                    __syncwarp();  // the rows from `last` on may be the same
                }
                one = next;
            }
        }
        return seen;
    }

    // `x` is token 0's line. The second token of a pair may not be there: what is read instead
    // changes only sums that nobody stores. Eight tokens are loaded before one is stored: they do
    // not wait for each other. And rows do not meet in two banks: 16 sums are 64 bytes, so pairs of
    // a row change places (spread).
    static BILLFISH_DEVICE float add_one(u32 one, u32 x, int x_line, u32 to, int m) {
        const float value = T::to_float(one >> 16);
        const u32 place = (one & 255) * 2, moved = spread(one >> 8 & 63);
        float seen = 0;
#pragma unroll
        for (int first = 0; first < kTokens; first += 8) {
            float a[4], b[4];
            uint2 old[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (first + 2 * i >= m) break;
                const u32 from = x + (first + 2 * i) * x_line + (place ^ 32 * i);
                a[i] = T::to_float(load_smem_2(from));
                b[i] = T::to_float(load_smem_2((from + x_line) ^ 16));
                old[i] = load_smem_8(to + (first * 4 + i * 8 ^ moved));
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (first + 2 * i >= m) break;
                store_smem_8(to + (first * 4 + i * 8 ^ moved),
                             fmaf(value, a[i], __uint_as_float(old[i].x)),
                             fmaf(value, b[i], __uint_as_float(old[i].y)));
                seen += a[i] + b[i];
            }
        }
        return seen;
    }
    // Where a row's sums of tokens 2 pair and 2 pair + 1 are.
    static BILLFISH_DEVICE u32 place(u32 row, u32 pair) {
        return row * kTokens * 4 + (pair * 8 ^ spread(row));
    }
    static BILLFISH_DEVICE u32 spread(u32 row) {
        constexpr u32 kPairs = kTokens / 2, kRows = 16 / kPairs;  // of 128 bytes, all banks
        return row / kRows % kPairs * 8;
    }
};

}  // namespace billfish
