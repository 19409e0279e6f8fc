// A layer of 2-bit and 4-bit records with outliers, and the warps that add them.
#pragma once

#include "billfish/mixed.cuh"
#include "billfish/warp.cuh"

namespace billfish {

// A layer's records: of each band those of 2 bits, those of 4 bits, and outliers: `kHead` words, of
// which the first is log2 of the band's unit; where the list of each record begins, in groups of 8,
// and their end; the groups. Rows of a group are distinct. An outlier is value << 16 | kThere |
// row << 8 | column of the record. columns[i] is the column of x with which group i of 16 inputs of
// the records begins, -1 for none.
constexpr int kHead = 8, kListGroup = 8;
constexpr u32 kThere = 0x8000;

struct MixedLayer {
    const unsigned char* records;
    const int* columns;
    int n, k, two, four, sets, band_words;  // tiles along k of either kind; words of a band
    BILLFISH_DEVICE int four_bytes() const {
        return kFourScales + sets * kFourSetBytes + kFourMarkBytes;
    }
    BILLFISH_DEVICE const unsigned char* band(int index) const {
        return records + static_cast<u64>(index) * band_words * 4;
    }
    BILLFISH_DEVICE const u32* lists(int index) const {
        return reinterpret_cast<const u32*>(band(index) + two * kTwoBytes + four * four_bytes());
    }
    BILLFISH_DEVICE int list_words() const { return (two + four + kListGroup) / 8 * 8; }
};

constexpr int kListWarps = 2;

// The lists of one stage that a list warp adds, kMine records of its own bands. Two warps never
// have the same outputs.
template <class T, int kTokens, int kBands>
struct Outliers {
    static constexpr int kSlices = 4 / kBands, kOwn = kBands > 1 ? kBands / kListWarps : 1;
    static constexpr int kMine = kOwn * kSlices;
    static constexpr int kLanes = kTokens / 2, kAbreast = 32 / kLanes;  // lanes of an outlier
    u32 edges = 0;          // lanes 2 i and 2 i + 1: groups of record i
    u32 entries[kMine];     // the first 32 of each

    // Where the lists are of the records that begin at slice `slice` of `span` of a segment, whose
    // first tile is `tile`.
    BILLFISH_DEVICE void find(const MixedLayer& layer, int first_band, int have, int warp, int lane,
                              int tile, int slice, int span) {
        const int i = lane / 2, band = warp * kOwn + i / kSlices, sub = i % kSlices;
        const bool there = i < kMine && band < have && slice + sub < span;
        edges = there ? layer.lists(first_band + band)[kHead + tile + slice + sub + lane % 2] : 0;
    }
    BILLFISH_DEVICE const u32* list(const MixedLayer& layer, int first_band, int warp, int i) const {
        return layer.lists(first_band + warp * kOwn + i / kSlices) + kHead + layer.list_words();
    }
    BILLFISH_DEVICE void fetch(const MixedLayer& layer, int first_band, int warp, int lane) {
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const u32 begin = shuffle(edges, 2 * i), end = shuffle(edges, 2 * i + 1);
            const u32 at = begin * kListGroup + lane;
            entries[i] = at < end * kListGroup ? list(layer, first_band, warp, i)[at] : 0;
        }
    }
    // Adds outlier * x to sums; returns a number that depends on all of x that it has read. `x_step`
    // is the bytes of x of a slice.
    BILLFISH_DEVICE float add(const MixedLayer& layer, int first_band, int warp, int lane, u32 x,
                              int x_step, u32 sums, int m) const {
        const int token = lane % kLanes * 2;
        float seen = 0;
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const u32 begin = shuffle(edges, 2 * i), end = shuffle(edges, 2 * i + 1);
            const u32 slice = x + i % kSlices * x_step + token * kXLine;
            const u32 rows = sums + (warp * kOwn + i / kSlices) * kRecordN * kTokens * 4 + token * 4;
            u32 some = entries[i];
#pragma unroll 1
            for (u32 group = begin; group < end; group += 4) {
                const u32 at = (group + 4) * kListGroup + lane;
                const u32 next = at < end * kListGroup ? list(layer, first_band, warp, i)[at] : 0;
#pragma unroll 1
                for (u32 first = 0; first < 32 && group + first / 8 < end; first += kAbreast) {
                    const u32 one = shuffle(some, first + lane / kLanes);
                    if (one & kThere && token < m) {
                        const u32 column = one & 255, row = one >> 8 & 63;
                        const u32 from = slice + column / 64 * kTokens * kXLine +
                                         (column % 64 * 2 ^ token % 8 * 16);
                        const float a = T::to_float(load_smem_2(from));
                        const float b = T::to_float(load_smem_2((from + kXLine) ^ 16));
                        const float value = T::to_float(one >> 16);
                        const u32 to = rows + row * kTokens * 4;
                        const uint2 old = load_smem_8(to);
                        store_smem_8(to, fmaf(value, a, __uint_as_float(old.x)),
                                     fmaf(value, b, __uint_as_float(old.y)));
                        seen += a + b;
                    }
                    __syncwarp();  // the next group may have the same rows
                }
                some = next;
            }
        }
        return seen;
    }
};

}  // namespace billfish
