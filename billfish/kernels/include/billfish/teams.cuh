// Eight math warps as two teams of four that take a ring's stages by turns, sm_90. A warp of a team
// has the same 16 of every band's 64 outputs, so that all have as much to do whatever the number of
// bands, and waits for a barrier once in two stages.
#pragma once

#include "billfish/share.cuh"

namespace billfish {

constexpr int kTeams = 2, kTeamWarps = kMathWarps / kTeams;
constexpr int kTeamBarriers = 64;  // bytes

#if __CUDA_ARCH__ >= 900

// A team's stage, of any number of stages, and the parity its barriers are waited for. A barrier
// that a team waits for is its alone, `kTeamBarriers` behind the other's: with an odd number of
// stages both teams have each stage by turns.
struct TeamSlot {
    u32 state;  // a byte: the stage; above it, how often it wrapped around. One register.
    explicit BILLFISH_DEVICE TeamSlot(int team) : state(team) {}
    BILLFISH_DEVICE u32 index() const { return state & 255; }
    BILLFISH_DEVICE u32 parity(int stages) const { return state >> 8 + stages % 2 & 1; }
    BILLFISH_DEVICE bool advance(int stages) {  // true: it wrapped around
        state += kTeams;
        if (index() < stages) return false;
        state = kept(state + 256) - stages;  // not + (256 - stages), one more register
        return true;
    }
};

// A math warp: outputs [16 brick, 16 brick + 16) of each band. Recomputed like Share.
template <int kFirstMathWarp>
struct Mate {
    int lane, brick, team;
    BILLFISH_DEVICE Mate() {
        const int thread = thread_index() - 32 * kFirstMathWarp;
        lane = thread % 32, brick = thread / 32 % kTeamWarps, team = thread / (32 * kTeamWarps);
    }
};

// The sums of a pass of `have` bands. Of the same 16 outputs each team of each of a cluster's kCtas
// blocks has a warp with sums. One of these keeps its own and is sent the others'; blocks own equal
// numbers of 16 outputs. `buffer` holds [warp that sends][row][token].
template <int kTokens, int kBands, int kCtas>
struct TeamSums {
    static constexpr int kParts = kCtas * kTeams - 1;

    static constexpr BILLFISH_DEVICE int owned(int have) {  // rows of a block, or fewer of the last
        return (have * kTeamWarps + kCtas - 1) / kCtas * 16;
    }

    static BILLFISH_DEVICE u32 expected(int have, int m, int rank) {  // bytes that a block is sent
        const int rows = min(owned(have), max(0, have * kRecordN - rank * owned(have)));
        return kParts * rows * ((m + 1) / 2) * 8;
    }

    // Where the sums of a brick go: the block, the row there, and which part. 0 is what is kept.
    struct Place {
        int owner, row, part;
        template <class Me>
        BILLFISH_DEVICE Place(const Me& me, int band, int have, int rank) {
            const int first = (band * kTeamWarps + me.brick) * 16;
            owner = first / owned(have), row = first - owner * owned(have) + me.lane / 4;
            const int away = rank >= owner ? rank - owner : rank - owner + kCtas;
            part = away * kTeams + (me.team ^ band % kTeams);
        }
    };

    template <class Me, class Finish>
    static BILLFISH_DEVICE void send(const float (&acc)[kBands][blocks_of(kTokens)][4], u32 buffer,
                                     u32 barrier, const Me& me, int rank, int have, int m,
                                     Finish finish) {
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
            const Place place(me, band, have, rank);
            if (band >= have || place.part == 0) continue;
            const int first = (place.part - 1) * owned(have) + place.row;
            const u32 signal = in_block(barrier, place.owner);
            const u32 to = in_block(buffer + (first * kTokens + me.lane % 4 * 2) * 4, place.owner);
#pragma unroll
            for (int lower = 0; lower < 2; ++lower) {
#pragma unroll
                for (int block = 0; block < blocks_of(kTokens); ++block) {
                    const float(&sum)[4] = acc[band][block];
                    if (block * 8 + me.lane % 4 * 2 < m)
                        store_remote(to + (lower * 8 * kTokens + block * 8) * 4,
                                     finish(sum[lower * 2], lower),
                                     finish(sum[lower * 2 + 1], lower), signal);
                }
            }
        }
    }

    // Adds what was sent to what this warp kept and stores it; `first` is the pass's first output.
    // `gated`: of every 16 rows the first 8 are gates and the others their ups, n / 2 results.
    template <class T, class Me, class Finish>
    static BILLFISH_DEVICE void store(const float (&acc)[kBands][blocks_of(kTokens)][4], u32 buffer,
                                      const u16* bias, u16* out, const Me& me, int rank, int have,
                                      int m, int n, int first, bool gated, Finish finish) {
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
            const Place place(me, band, have, rank);
            if (band >= have || place.part != 0) continue;
            const int output = first + band * kRecordN + me.brick * 16 + me.lane / 4;
#pragma unroll
            for (int block = 0; block < blocks_of(kTokens); ++block) {
                const int token = block * 8 + me.lane % 4 * 2;
                if (token >= m) continue;
                float sum[2][2];  // [upper or lower row][token]
#pragma unroll
                for (int lower = 0; lower < 2; ++lower) {
                    const u32 from = buffer + ((place.row + lower * 8) * kTokens + token) * 4;
                    const u32 next = owned(have) * kTokens * 4;
                    uint2 part[kParts];
#pragma unroll
                    for (int i = 0; i < kParts; ++i) part[i] = load_smem_8(from + i * next);
                    sum[lower][0] = finish(acc[band][block][lower * 2], lower);
                    sum[lower][1] = finish(acc[band][block][lower * 2 + 1], lower);
#pragma unroll
                    for (int i = 0; i < kParts; ++i) {
                        sum[lower][0] += __uint_as_float(part[i].x);
                        sum[lower][1] += __uint_as_float(part[i].y);
                    }
                }
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    if (token + odd >= m) continue;
                    const u64 row = static_cast<u64>(token + odd) * n;
                    if (gated) {
                        if (output + 8 < n)
                            out[(row + output & ~15ull) / 2 + me.lane / 4] =
                                swiglu<T>(T::from_float(sum[0][odd]), T::from_float(sum[1][odd]));
                        continue;
                    }
#pragma unroll
                    for (int lower = 0; lower < 2; ++lower) {
                        const int at = output + lower * 8;
                        if (at >= n) continue;
                        float total = sum[lower][odd];
                        if (bias != nullptr) total += T::to_float(bias[at]);
                        out[row + at] = T::from_float(total);
                    }
                }
            }
        }
    }
};

#endif

}  // namespace billfish
