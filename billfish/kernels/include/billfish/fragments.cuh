// A lane's A fragments of wgmma, of 128 inputs of a record in shared memory: of half a record of 2
// bits, or of one of 4 bits (mixed.cuh). All is loaded when a stage begins: the scales of 64 inputs
// are computed while the tensor cores multiply those before. An address is the record's and a
// lane's offset, which is computed once.
#pragma once

#include "billfish/mixed.cuh"
#include "billfish/warp.cuh"

namespace billfish {

// Half of the codes, then all that is behind the codes.
constexpr int kTwoHalf = kTwoScales / 2, kTwoMore = kTwoBytes - kTwoScales;

BILLFISH_DEVICE u32 rotated(u32 word, u32 right) {
    return word >> right % 32 | word << (0 - right) % 32;
}

// Offsets in a half of a record of 2 bits; `warp` has outputs 16 warp to 16 warp + 15.
struct TwoLane {
    u32 words, zeros, bases, shift;  // the last is twice the brick
    BILLFISH_DEVICE TwoLane(u32 warp, u32 lane)
        : words(kept((warp / 2 * 32 + lane) * 16 + warp % 2 * 8, lane)),
          zeros(kept((warp / 2 * 32 + lane) * 4, lane)),
          bases(kept(warp / 2 * 64 + lane % 4 * 16 + warp % 2 * 2, lane)),
          shift(kept(warp % 2 * 2, 0)) {}
};

template <class T, int kZero, int kStep>
struct TwoFragments {
    static constexpr bool kTwo = true;
    uint2 words[2];  // [k64]
    u32 codes, zeros, bases[2], lean;
    TwoGroup<T, kZero, kStep> group;
    BILLFISH_DEVICE TwoFragments(const TwoLane& at, u32 record, u32 half, u32 lean) : lean(lean) {
        const u32 behind = record + kTwoHalf - kTwoScales;
        words[0] = load_smem_8(record + at.words);
        codes = load_smem_4(behind + kTwoScales + at.zeros * 2 + half * 4);
        zeros = load_smem_4(behind + kTwoZeros + at.zeros);
        bases[0] = load_smem_2(behind + kTwoBases + at.bases + half * 8);
        bases[1] = load_smem_2(behind + kTwoBases + at.bases + half * 8 + 4);
        words[1] = load_smem_8(record + at.words + 1024);
        codes >>= at.shift * 2;
        zeros = rotated(zeros, half * 8 + at.shift - Scaled<T>::kZeroBit);
    }
    BILLFISH_DEVICE void open(int k64) {
        const u32 base = bases[k64] * 0x00010001u;
        group = {codes, k64 * 8, zeros, k64 * 4 + static_cast<int>(Scaled<T>::kZeroBit),
                 offset_of<T>(base), base_of<T>(base, lean)};
    }
    // k16 steps `first` to first + kSteps - 1 of the 64 inputs that were opened.
    template <int kSteps>
    BILLFISH_DEVICE void make(int k64, int first, u32 (&a)[kSteps][4]) const {
        const u32 both[2] = {words[k64].x, words[k64].y};
#pragma unroll
        for (int i = 0; i < kSteps; ++i) group.fragment(both, first + i, a[i]);
    }
};

struct FourLane {
    u32 words, scales;
    BILLFISH_DEVICE FourLane(u32 warp, u32 lane)
        : words(kept(warp * kBrickBytes + lane * 16, lane)),
          scales(kept((warp / 2 * 8 + lane / 4) * 8 + warp % 2 * 4, lane)) {}
};

template <class T>
struct FourFragments {
    static constexpr bool kTwo = false;
    uint4 words[2];
    u32 scales, marks, lean, more;
    FourGroup<T> group;
    BILLFISH_DEVICE FourFragments(const FourLane& at, u32 record, int sets, u32 lean, u32 more)
        : scales(record + kFourScales + at.scales), lean(lean), more(more) {
        marks = load_smem_4(record + kFourScales + sets * kFourSetBytes);
        const u32 bits = load_smem_4(scales);
        words[0] = load_smem_16(record + at.words);
        words[1] = load_smem_16(record + at.words + 4 * kBrickBytes);
        group.set(bits, lean, more);
    }
    BILLFISH_DEVICE void open(int) {}
    template <int kSteps>
    BILLFISH_DEVICE void make(int k64, int first, u32 (&a)[kSteps][4]) {
        const u32 word[4] = {words[k64].x, words[k64].y, words[k64].z, words[k64].w};
        const u32 begin = marks >> k64 * 4 + first;  // bit i: step first + i begins a part of k
        if (begin % (1 << kSteps) == 0) {            // in most records none does
#pragma unroll
            for (int i = 0; i < kSteps; ++i) group.fragment(word[first + i], a[i]);
            return;
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            if (k64 + first + i > 0 && begin >> i & 1)
                group.set(load_smem_4(scales += kFourSetBytes), lean, more);
            group.fragment(word[first + i], a[i]);
        }
    }
};

}  // namespace billfish
