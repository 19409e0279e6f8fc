// The main loop of a tile on wgmma whose weights, the A operand, are decoded from records in
// registers: (code - zero point) * scale, rounded once. x is the B operand, in shared memory.
#pragma once

#include "billfish/record.cuh"
#include "billfish/tiles.cuh"

namespace billfish {

// One stage of the ring: 128 inputs. x first: the swizzle needs an alignment of 1024 bytes.
template <int kGroup, bool kAsymmetric, int kTokens, int kTileBands>
struct DecodedStage {
    static constexpr int kRecordBytes = Record<kGroup, kAsymmetric>::kBytes;
    static constexpr int kRecords = x_bytes(kTokens);  // byte offset
    static constexpr int kBytes = (kRecords + kTileBands * kRecordBytes + 1023) / 1024 * 1024;
};

#if __CUDA_ARCH_FEAT_SM90_ALL

// Scale and zero point of a lane's two outputs of 16, r and r + 8, in both halves of a register.
struct Grain {
    u32 scale[2], zero[2];
    template <class T, class R>
    static BILLFISH_DEVICE Grain load(u32 record, int group, int warp, int lane) {
        const int place = warp / 2 * 8 + lane / 4, right = warp % 2;
        const u32 bits = load_smem_4(record + R::kScales + group * 128 + place * 8 + right * 4);
        u32 zeros = 0x88;
        if (R::kZeros < R::kBytes)
            zeros = load_smem_2(record + R::kZeros + group * 32 + place * 2) >> right * 8;
        Grain grain;
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            grain.scale[lower] = (lower ? bits >> 16 : bits & 0xffff) * 0x00010001u;
            grain.zero[lower] = Exact<T>::zero(zeros >> 4 * lower & 15, lower) * 0x00010001u;
        }
        return grain;
    }
};

// acc += a team's kBands x 64 outputs of `count` stages, from `slot` on; frees their slots. While
// the tensor cores multiply 64 inputs of a band, the weights of the next 64 are decoded.
template <class T, int kGroup, bool kAsymmetric, int kTokens, int kBands, int kOwnTeams = kTeams>
BILLFISH_DEVICE void multiply_tile(float (&acc)[kBands][kTokens / 2], Slot& slot, int count,
                                   int stages, BatchPlaces places, int thread,
                                   bool twins = false) {
    using Stage = DecodedStage<kGroup, kAsymmetric, kTokens, kOwnTeams * kBands>;
    using R = Record<kGroup, kAsymmetric>;
    const int team = thread / kTeamThreads, warp = thread / 32 % 4, lane = thread % 32;
    // From a barrier here to that of block `lane`: twins fetch for each other. Made beforehand, as
    // with mapa between products ptxas runs these one by one.
    const u32 there = twins ? in_block(places.base, lane % 2) - places.base : 0;
    u32 a[2][4][4];  // fragments of 64 inputs, two buffers: in flight, and being decoded
    for (int i = 0; i < count; ++i) {
        // The same in all lanes, which ptxas only sees so: else it moves every descriptor to
        // uniform registers anew, 16 cycles each (8192 x 57344, 32 tokens: 104 -> 89 us).
        const u32 stage = kept(places.ring() + slot.index * Stage::kBytes, 0);
        const u64 x_at = x_descriptor(stage);
        Grain grain[kBands];
        uint4 words[kBands][2];
        barrier_wait(places.full(slot.index), slot.parity);
#pragma unroll
        for (int unit = 0; unit < 2 * kBands; ++unit)
            words[unit / 2][unit % 2] = load_smem_16(
                stage + Stage::kRecords + (team * kBands + unit / 2) * Stage::kRecordBytes +
                (unit % 2 * 4 + warp) * kBrickBytes + lane * 16);
#pragma unroll
        for (int unit = 0; unit < 2 * kBands; ++unit) {
            const int k64 = unit / kBands, band = unit % kBands;
            const u32 record =
                stage + Stage::kRecords + (team * kBands + band) * Stage::kRecordBytes;
            const uint4 v = words[band][k64];
            const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                const int k = k64 * 64 + step * 16;
                if (k % kGroup == 0)
                    grain[band] = Grain::load<T, R>(record, k / kGroup, warp, lane);
                Exact<T>::fragment(word[step], grain[band].scale, grain[band].zero,
                                   a[unit % 2][step]);
            }
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step)  // 32 bytes on
                wgmma(T(), acc[band], a[unit % 2][step],
                      x_further(x_at, k64 * kTokens * kXLine + step * 32));
            wgmma_commit();
            wgmma_wait<1>();
            if (unit == 0 && i > 0 && lane <= twins)  // the slot before has been read
                barrier_arrive_in(there +
                                  places.empty((slot.index == 0 ? stages : slot.index) - 1));
        }
        slot.next(stages);
    }
    wgmma_wait<0>();
    if (lane <= twins)
        barrier_arrive_in(there + places.empty((slot.index == 0 ? stages : slot.index) - 1));
}

#endif

}  // namespace billfish
