// A layer of 2-bit and 4-bit records with outliers, and the warps that add them.
#pragma once

#include "billfish/mixed.cuh"
#include "billfish/warp.cuh"

namespace billfish {

// A layer's records: of each band those of 2 bits, those of 4 bits, and outliers: `kHead` words, of
// which the first is log2 of the band's unit; where the list of each record begins, in groups of 8,
// and their end; the groups. Rows of a group are distinct. An outlier is value << 16 | kThere |
// row << 8 | column of the record. Beside them, columns[i] is the column of x with which group i of
// 16 inputs of the records begins, -1 for none.
constexpr int kHead = 8, kListGroup = 8;
constexpr u32 kThere = 0x8000;

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
    BILLFISH_DEVICE int list_words() const { return (two + four + kListGroup) / 8 * 8; }
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
    static constexpr int kLanes = kTokens / 2, kAbreast = 32 / kLanes;  // lanes of an outlier
    const MixedLayer& layer;
    int first_band, warp, lane;
    u32 edges = 0, entries[kMine];  // lanes 2 i and 2 i + 1: groups of list i; the first 32 of each

    BILLFISH_DEVICE Outliers(const MixedLayer& layer, int first_band, int warp, int lane)
        : layer(layer), first_band(first_band), warp(warp), lane(lane) {}

    // Record i of this warp: of which band, and which slice. As records lie in a stage.
    BILLFISH_DEVICE int band(int i) const { return (warp * kMine + i) / kSlices; }
    BILLFISH_DEVICE int slice(int i) const { return (warp * kMine + i) % kSlices; }
    BILLFISH_DEVICE const u32* list(int i) const {
        return layer.lists(first_band + band(i)) + kHead + layer.list_words();
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
            const u32 begin = shuffle(edges, 2 * i), end = shuffle(edges, 2 * i + 1);
            const u32 at = begin * kListGroup + lane;
            entries[i] = at < end * kListGroup ? list(i)[at] : 0;
        }
    }

    BILLFISH_DEVICE void take(const Outliers& other) {
        edges = other.edges;
#pragma unroll
        for (int i = 0; i < kMine; ++i) entries[i] = other.entries[i];
    }

    // A lane's outlier and the inputs that it multiplies, of two tokens.
    struct Term {
        u32 one;
        float a = 0, b = 0;
        BILLFISH_DEVICE Term(u32 one, bool there, u32 x, int token) : one(there ? one : 0) {
            if (!there) return;
            const u32 column = one & 255;
            const u32 from = x + (column / 64 * kTokens + token) * kXLine +
                             (column % 64 * 2 ^ token % 8 * 16);
            a = T::to_float(load_smem_2(from));
            b = T::to_float(load_smem_2((from + kXLine) ^ 16));
        }
    };

    // Adds outlier * x to sums; returns a number that depends on all of x that it has read.
    // `x_step` is the bytes of x of a slice. Inputs are read one step ahead.
    BILLFISH_DEVICE float add(u32 x, int x_step, u32 sums, int m) const {
        const int token = lane % kLanes * 2;
        float seen = 0;
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const u32 begin = shuffle(edges, 2 * i), end = shuffle(edges, 2 * i + 1);
            const u32 rows = sums + (kRegions > 1 ? i : 0) * kRegionBytes + token * 4;
            u32 some = entries[i];
            const auto term = [&](u32 first) {
                const u32 one = shuffle(some, (first + lane / kLanes) % 32);
                return Term(one, one & kThere && token < m, x + slice(i) * x_step, token);
            };
#pragma unroll 1
            for (u32 group = begin; group < end; group += 4) {
                const u32 at = (group + 4) * kListGroup + lane;
                const u32 more = at < end * kListGroup ? list(i)[at] : 0;
                const u32 count = min(32u, (end - group) * kListGroup);
                Term now = term(0);
#pragma unroll 1
                for (u32 first = 0; first < count; first += kAbreast) {
                    const Term next = term(first + kAbreast);
                    if (now.one) {
                        const float value = T::to_float(now.one >> 16);
                        const u32 to = rows + (now.one >> 8 & 63) * kTokens * 4;
                        const uint2 old = load_smem_8(to);
                        store_smem_8(to, fmaf(value, now.a, __uint_as_float(old.x)),
                                     fmaf(value, now.b, __uint_as_float(old.y)));
                    }
                    __syncwarp();  // the next group may have the same rows
                    seen += now.a + now.b;
                    now = next;
                }
                seen += now.a + now.b;
                some = more;
            }
        }
        return seen;
    }
};

}  // namespace billfish
