// A layer of 2-bit and 4-bit records with outliers, and the product with a record's outliers.
#pragma once

#include "billfish/mixed.cuh"

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
    u32 first, second;
    BILLFISH_DEVICE explicit Unit(int e) : first(power<T>(e / 2)), second(power<T>(e - e / 2)) {}
};

// acc (32 outputs x kTokens) += unit * outliers * x^T on the tensor cores: a set's 16 columns of x
// are a k16 step in which every input has one output. Lane 4 r + c has entries 4 c to 4 c + 3 and
// keeps those of rows r, r + 8, r + 16 and r + 24. `list` is the half's first set in shared memory,
// `x` token 0's line, of kInputs.
template <class T, int kTokens, int kInputs>
BILLFISH_DEVICE void multiply_outliers(u32 list, u32 x, int rows, u32 lane, Unit<T> unit,
                                       float (&acc)[2][kTokens / 8][4]) {
    if (load_smem_4(list) & kEmpty) return;  // mostly of 4 bits: the quantizer gives them none
    const u32 token = min(lane / 4, rows - 1u), line = x + token * kInputs * 2;
#pragma unroll 1
    for (u32 at = list + lane % 4 * 16;; at += kSetBytes) {
        const uint4 v = load_smem_16(at);
        const u32 one[4] = {v.x, v.y, v.z, v.w};
        u32 mine[4], b[kTokens / 8][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // byte t is 255 if it is of row r + 8 t
            mine[i] = (1u << (one[i] / 256 - lane / 4) % 32 & 0x01010101u) * 255;
#pragma unroll
            for (int block = 0; block < kTokens / 8; ++block)
                b[block][i] = load_smem_2(line + block * 8 * kInputs * 2 +
                                          (one[i] % 256 * 2 ^ token * 16));
        }
        u32 value[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            value[i] = T::mul(T::mul(pick_bytes(one[2 * i], one[2 * i + 1], 0x7632), unit.first),
                              unit.second);
#pragma unroll
        for (int brick = 0; brick < 2; ++brick) {
            u32 a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // row r or r + 8 of the brick, entries 0, 1 or 2, 3
                const u32 t = brick * 2 + i % 2, first = i / 2 * 2;
                a[i] = value[i / 2] & pick_bytes(mine[first], mine[first + 1], t * 0x1111 + 0x4400);
            }
#pragma unroll
            for (int block = 0; block < kTokens / 8; ++block)
                T::mma(acc[brick][block], a, pick_bytes(b[block][0], b[block][1], 0x5410),
                       pick_bytes(b[block][2], b[block][3], 0x5410));
        }
        if (one[0] & kLast) break;
    }
}

}  // namespace billfish
