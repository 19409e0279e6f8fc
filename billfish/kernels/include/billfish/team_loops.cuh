// What the math warps of w4a16_decode do: stages of records, of x and of its sums become products,
// two teams at work (teams.cuh), and partial sums become results.
#pragma once

#include "billfish/summed.cuh"
#include "billfish/teams.cuh"

namespace billfish {

constexpr int kCopyWarps = 2, kSumWarps = kTeams;

// A stage of one band has four slices of x, whose sums would be used twice each: 16 tokens of
// 14336 x 4096 took 17.6 us for 14.9. Its math warps make them (record.cuh).
constexpr BILLFISH_DEVICE bool sums_apart(int bands) { return bands > 1; }

constexpr BILLFISH_DEVICE int first_math_warp(int bands) {
    return kCopyWarps + (sums_apart(bands) ? kSumWarps : 0);
}
constexpr BILLFISH_DEVICE int decode_threads(int bands) {
    return 32 * (first_math_warp(bands) + kMathWarps);
}

// With sums apart 16 tokens, and four bands, need 90 registers where 80 would let two blocks on an
// SM: the four other warps give some of theirs. Only Hopper's code can.
#if __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kMovesRegisters = true;
#else
constexpr bool kMovesRegisters = false;
#endif
constexpr BILLFISH_DEVICE bool moves_registers(int tokens, int bands) {
    return kMovesRegisters && sums_apart(bands) && (tokens == 16 || bands == 4);
}
constexpr BILLFISH_DEVICE int blocks_of_sm(int tokens, int bands) {
    return tokens == 16 && sums_apart(bands) && !kMovesRegisters ? 1 : 2;
}

// One stage of the ring: four records, of one, two or four bands, x and its sums. There is one
// round of barriers for 16 KB: with 8 KB, 28672 x 8192 took 35.5 us instead of 30.1. Of one band 16
// tokens of x are as large as the records; there it is two of them, for more stages than two.
template <int kGroup, bool kAsymmetric, int kTokens, int kBands>
struct DecodeStage {
    static constexpr int kSlices = kBands == 1 && kTokens == 16 ? 2 : 4 / kBands;  // of 128 inputs
    static constexpr int kRecordBytes = Record<kGroup, kAsymmetric>::kBytes;
    static constexpr int kX = (kBands * kSlices * kRecordBytes + 127) / 128 * 128;  // byte offset
    static constexpr int kSums = kX + kSlices * x_bytes(kTokens);
    static constexpr bool kSummed = sums_apart(kBands);
    static constexpr int kSumsBytes = kSummed ? sums_bytes<kGroup, kTokens>() : 0;  // of a slice
    static constexpr int kBytes = (kSums + kSlices * kSumsBytes + 127) / 128 * 128;
};

#if __CUDA_ARCH__ >= 900

// Addresses in shared memory.
struct Ring {
    u32 stages_at, full, empty, summed, reduced, freed;
    int stages;
};

// What the eight math warps do in a block of one band. Two teams take the stages by turns
// (teams.cuh); a warp has half of one or two records.
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, bool kNormed>
BILLFISH_DEVICE void multiply_one(const Ring& ring, const u16* __restrict__ bias,
                                  u16* __restrict__ out, int m, int n, int k_tiles, bool gated) {
    using Stage = DecodeStage<kGroup, kAsymmetric, kTokens, 1>;
    using Exchange = Sums<kTokens, 1>;
    using Me = Worker<2, first_math_warp(1)>;  // sub: team, and one of two slices
    constexpr int kSlices = Stage::kSlices, kBlocks = blocks_of(kTokens);
    constexpr int kNext = 2 * Stage::kRecordBytes, kNextX = 2 * x_bytes(kTokens);
    LanePlaces<kTokens> places;
    {
        const Me me;
        places = LanePlaces<kTokens>::template of<Record<kGroup, kAsymmetric>>(
            ring.stages_at + me.sub % 2 * Stage::kRecordBytes,
            ring.stages_at + Stage::kX + me.sub % 2 * x_bytes(kTokens), me.lane, me.within);
        places.move(me.sub / 2 * Stage::kBytes);
    }
    TeamSlot slot(Me().sub / 2);
    cluster_wait();     // the other block's barriers must exist before the first remote store
    if (!kNormed) dependency_wait();  // rather than polling a barrier until x arrives
    int left;  // slices, from this team's next stage on
    {
        const Share share(n, k_tiles);
        if (share.bands == 0) return;
        left = share.span - Me().sub / 2 * kSlices;
    }
    float acc[2][kBlocks][4] = {};
    for (; left > 0; left -= kTeams * kSlices) {
        barrier_wait(ring.full + Me().sub / 2 * kTeamBarriers + 8 * slot.index(),
                     slot.parity(ring.stages));
        const int mine = left - Me().sub % 2;
        if (mine > 0) multiply<T, S, kGroup, kAsymmetric, kTokens>(places, acc, [](float) {});
        if (kSlices > 2 && mine > 2) {
            LanePlaces<kTokens> second{places.words + kNext, places.x + kNextX};
            multiply<T, S, kGroup, kAsymmetric, kTokens>(second, acc, [](float) {});
        }
        __syncwarp();
        barrier_arrive_after(ring.empty + 8 * slot.index(),
                             acc[0][kBlocks - 1][0] + acc[1][kBlocks - 1][0],
                             thread_index() % 32 == 0);
        places.move(slot.advance(ring.stages) ? (kTeams - ring.stages) * Stage::kBytes
                                                   : kTeams * Stage::kBytes);
    }
    const Share share(n, k_tiles);
    const Me me;
    const int rank = cluster_rank(), rows = kRecordN / kCluster;  // that a block owns
    const u32 buffer = ring.stages_at + ring.stages * Stage::kBytes;
    if (me.index == 0 && me.lane == 0)
        barrier_arrive_expect(ring.reduced, Exchange::expected(rows, m));
    Exchange::send(acc, buffer, ring.reduced, me, rank, rows, m,
                   [](float sum, bool lower) { return finish<T>(sum, lower); });
    barrier_wait(ring.reduced, 0);
    Exchange::template store<T, 8>(buffer, bias, out, me, m, n,
                                   share.first_band * kRecordN + rank * rows, rows, gated);
}

template <int kPair, int kBricks>
struct Bricks {
    static constexpr int kAt = kPair, kCount = kBricks;
};

// The same in a block of several bands, with sums of x made apart: two teams take the stages by
// turns (teams.cuh). With a barrier for each half record, 16 tokens of 8192 x 57344 took 71 us.
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, int kBands, int kCtas,
          bool kNormed>
BILLFISH_DEVICE void multiply_teams(const Ring& ring, const u16* __restrict__ bias,
                                    u16* __restrict__ out, int m, int n, int k_tiles, bool gated) {
    using Stage = DecodeStage<kGroup, kAsymmetric, kTokens, kBands>;
    using Exchange = TeamSums<kTokens, kBands, kCtas>;
    using Share = ShareOf<kCtas>;
    using Me = Mate<first_math_warp(kBands)>;
    constexpr int kSlices = Stage::kSlices, kBlocks = blocks_of(kTokens);
    // A warp has two pairs of bricks in a stage: of bands 0, 1 and 2, 3, or of two slices.
    constexpr int kStride = kSlices * Stage::kRecordBytes;  // from band to band
    constexpr int kNext = kSlices == 1 ? 2 * kStride : Stage::kRecordBytes;  // from pair to pair
    constexpr int kNextX = kSlices == 1 ? 0 : x_bytes(kTokens);
    constexpr int kNextSums = kSlices == 1 ? 0 : Stage::kSumsBytes;
    constexpr int kSecond = kSlices == 1 ? 2 : 0;  // first band of the second pair
    // Both pairs of a slice at once, where sums of few tokens leave registers.
    constexpr bool kAtOnce = kMovesRegisters && kSlices == 1 && kTokens <= 8;

    BrickPlaces<kTokens> places(ring.stages_at, ring.stages_at + Stage::kX,
                                ring.stages_at + Stage::kSums, Me().brick, Me().lane);
    TeamSlot slot(Me().team);
    places.move(slot.index() * Stage::kBytes);
    cluster_wait();     // the other block's barriers must exist before the first remote store
    if (!kNormed) dependency_wait();  // rather than polling a barrier until x arrives
    const auto finished = [](float sum, bool lower) { return finish<T>(sum, lower); };
    for (int pass = 0; pass < Share(n, k_tiles).passes(kBands); ++pass) {
        float acc[kBands][kBlocks][4] = {};
        int have, left;  // bands; slices from this team's next stage on
        {
            const Share share(n, k_tiles);
            const int passes = share.passes(kBands), all = (share.span + kSlices - 1) / kSlices;
            have = share.before(pass + 1, passes) - share.before(pass, passes);
            // Turns go on from pass to pass: after an odd number of stages, with the other team.
            left = share.span - ((Me().team ^ pass * all) & 1) * kSlices;
        }
        for (; left > 0; left -= kTeams * kSlices) {
            const u32 own = Me().team * kTeamBarriers + 8 * slot.index();
            barrier_wait(ring.full + own, slot.parity(ring.stages));
            const auto pair = [&](auto which, auto summed) {
                constexpr int kAt = decltype(which)::kAt, kCount = decltype(which)::kCount;
                multiply_bricks<T, S, kGroup, kAsymmetric, kTokens, kStride, kAt * kSecond, kCount,
                                kBands>(places, kAt * kNext, kAt * kNextX, kAt * kNextSums, acc,
                                        summed);
            };
            const auto wait = [&] { barrier_wait(ring.summed + own, slot.parity(ring.stages)); };
            if constexpr (kAtOnce) {
                if (have == 4)
                    pair(Bricks<0, 4>{}, wait);
                else if (have == 3)
                    pair(Bricks<0, 3>{}, wait);
            }
            if (have == 2 || have > 2 && !kAtOnce)
                pair(Bricks<0, 2>{}, wait);
            else if (have == 1)
                pair(Bricks<0, 1>{}, wait);
            if constexpr (!kAtOnce) {
                const bool second = kSlices > 1 ? left > 1 : have > 2;
                if (second && have % 2 == 0)
                    pair(Bricks<1, 2>{}, [] {});
                else if (second)
                    pair(Bricks<1, 1>{}, [] {});
            }
            float seen = 0;
#pragma unroll
            for (int band = 0; band < kBands; ++band) seen += acc[band][kBlocks - 1][0];
            __syncwarp();
            barrier_arrive_after(ring.empty + 8 * slot.index(), seen, thread_index() % 32 == 0);
            places.move(slot.advance(ring.stages) ? (kTeams - ring.stages) * Stage::kBytes
                                                       : kTeams * Stage::kBytes);
        }
        // `freed`: the other block's warps have read the sums of the pass before, and this one's
        // have met since. They cannot get further ahead: of several passes each has two bands at
        // least, of which every warp sends one to the other block.
        const Share share(n, k_tiles);
        const Me me;
        const int passes = share.passes(kBands), rank = cluster_rank();
        const u32 buffer = ring.stages_at + ring.stages * Stage::kBytes;
        have = share.before(pass + 1, passes) - share.before(pass, passes);
        if (pass > 0) barrier_wait(ring.freed, (pass - 1) & 1);
        if (me.team == 0 && me.brick == 0 && me.lane == 0)
            barrier_arrive_expect(ring.reduced, Exchange::expected(have, m, rank));
        Exchange::send(acc, buffer, ring.reduced, me, rank, have, m, finished);
        barrier_wait(ring.reduced, pass & 1);
        const int first = (share.first_band + share.before(pass, passes)) * kRecordN;
        Exchange::template store<T>(acc, buffer, bias, out, me, rank, have, m, n, first, gated,
                                    finished);
        if (kCtas == kCluster && pass + 1 < passes) {  // larger clusters have one pass
            __syncwarp();
            if (me.lane == 0) barrier_arrive_in(in_block(ring.freed, rank ^ 1));
            sync_some<1, 32 * kMathWarps>();
        }
    }
}

#endif

}  // namespace billfish
