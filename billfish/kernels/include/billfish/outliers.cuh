// A layer of 2-bit and 4-bit records with outliers, and the product with a record's outliers.
#pragma once

#include "billfish/mixed.cuh"
#include "billfish/warp.cuh"

namespace billfish {

// A layer's records: of each band those of 2 bits, those of 4 bits, and outliers: `kHead` words, of
// which the first is log2 of the band's unit; which set the list of each record begins with, and
// where the last one ends; the sets. A set is 16 entries for outputs 0 to 31 of the record and 16
// for the others. An entry is value << 16 | row << 8 | column of the record; kEmpty fills sets up,
// kLast marks all entries of a record's last set. Every record has a set. Beside them, columns[i]
// is the column of x with which group i of 16 inputs of the records begins, -1 for none.
constexpr int kHead = 8, kSetBytes = 128;
constexpr u32 kLast = 0x8000, kEmpty = 0x4000;

struct MixedLayer {
    const unsigned char* records;
    int two, four, sets, band_words;  // tiles along k of either kind; words of a band
    BILLFISH_DEVICE int four_bytes() const {
        return kFourScales + sets * kFourSetBytes + kFourMarkBytes;
    }
    BILLFISH_DEVICE const unsigned char* band(int index) const {
        return records + static_cast<u64>(index) * band_words * 4;
    }
    BILLFISH_DEVICE const u32* head(int index) const {
        return reinterpret_cast<const u32*>(band(index) + two * kTwoBytes + four * four_bytes());
    }
    BILLFISH_DEVICE const u32* edges(int index) const { return head(index) + kHead; }
    BILLFISH_DEVICE const unsigned char* list(int index, u32 set) const {
        return reinterpret_cast<const unsigned char*>(edges(index) + (two + four + 8) / 8 * 8) +
               set * kSetBytes;
    }
};

// 2^e as two factors of T, either of which it can hold where it cannot hold 2^e.
template <class T>
struct Unit {
    u32 both;  // one a half; kept: it would be computed again for every set
    BILLFISH_DEVICE explicit Unit(int e)
        : both(kept(power<T>(e / 2) & 0xffff | power<T>(e - e / 2) << 16)) {}
};

constexpr int kSpreadBytes = 32 * 32;  // a warp's, zeros: 32 outputs x 16 entries of a set

BILLFISH_DEVICE void clear_spread(u32 spread, u32 lane) {
    const float zeros[4] = {};
    for (u32 byte = lane * 16; byte < kSpreadBytes; byte += 32 * 16)
        store_smem_16(spread + byte, zeros);
    __syncwarp();
}

// Addresses of a lane's operands, computed once a pass: `list` is the half's first set in shared
// memory, `x` token 0's line, of kInputs.
template <int kInputs>
struct SetPlaces {
    u32 entry, pairs, to, from, line, flip;
    BILLFISH_DEVICE SetPlaces(u32 list, u32 x, int rows, u32 spread, u32 lane) {
        const u32 token = min(lane / 4, rows - 1u);
        entry = kept(list + lane % 16 * 4), pairs = kept(list + lane % 4 * 8);
        to = kept(spread + lane % 16 * 2), from = kept(spread + lane % 16 * 32 + lane / 16 * 16);
        line = kept(x + token * kInputs * 2), flip = token * 16;
    }
};

// acc (32 outputs x kTokens) += unit * outliers * x^T on the tensor cores: a set's 16 columns of x
// are a k16 step in which every input has one output. Lane i puts entry i into its output's line of
// `spread`, from where all take the A fragments. `by` is the distance from places to this stage.
template <class T, int kTokens, int kInputs>
BILLFISH_DEVICE void multiply_outliers(const SetPlaces<kInputs>& places, u32 by, u32 lane,
                                       Unit<T> unit, float (&acc)[2][kTokens / 8][4]) {
    const u32 line = places.line + by;
    u32 mine = load_smem_4(places.entry + by);
    if (!billfish::any(!(mine & kEmpty))) return;  // of 4 bits: the quantizer gives them none
#pragma unroll 1
    for (u32 at = by;;) {
        const u32 to = places.to + mine / 256 % 32 * 32;
        const u32 value =
            T::mul(T::mul(mine >> 16, lower_twice(unit.both)), upper_twice(unit.both));
        if (lane < 16) store_smem_2(to, value);
        u32 b[kTokens / 8][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // columns 2 c and 2 c + 1 of the set, eight on
            const uint2 two = load_smem_8(places.pairs + at + i * 32);
#pragma unroll
            for (int block = 0; block < kTokens / 8; ++block) {
                const u32 from = line + block * 8 * kInputs * 2;
                const u32 even = load_smem_2(from + (two.x % 256 * 2 ^ places.flip));
                const u32 odd = load_smem_2(from + (two.y % 256 * 2 ^ places.flip));
                b[block][i] = pick_bytes(even, odd, 0x5410);
            }
        }
        __syncwarp();
        u32 a[2][4];
#pragma unroll
        for (int brick = 0; brick < 2; ++brick)
            load_matrices(a[brick], places.from + brick * 16 * 32);
        __syncwarp();
        if (lane < 16) store_smem_2(to, 0);
#pragma unroll
        for (int brick = 0; brick < 2; ++brick)
#pragma unroll
            for (int block = 0; block < kTokens / 8; ++block)
                T::mma(acc[brick][block], a[brick], b[block][0], b[block][1]);
        if (mine & kLast) break;
        at += kSetBytes;
        mine = load_smem_4(places.entry + at);
    }
}

}  // namespace billfish
