// w2416_batch: y (m, n) = x (m, k) W^T for m > 16 on the tensor cores of sm_90a.
//
// Tiles, ring and reduction are tiles.cuh's, as w4a16_batch has them: weights are decoded to
// wgmma's A fragments in registers. x comes in the order of the records (order.cuh).
//
//     stage        128 inputs: half a record of 2 bits, or one of 4 bits, and its list of outliers,
//                  which has at most list_bytes
//     warps 0, 1   producers: bulk copies of records and lists, a thread for each band; TMA copies
//                  of x
//     warps 4-11   consumers: two warpgroups, kBands bands each. While the tensor cores multiply 64
//                  inputs of a band, the next 64 are decoded, and outliers are added to them: at
//                  0.1 % a warp finds one in 16 outputs x 64 inputs
//
// Decoded weights are unit * weight in T, as in decode.cuh; sums are divided at the end.
#pragma once

#include "billfish/outliers.cuh"
#include "billfish/tiles.cuh"

namespace billfish {

constexpr int kTwoHalf = kTwoScales / 2, kTwoMore = kTwoBytes - kTwoScales;

// What a band has in a stage: its record, and the record's list. batch.py counts the same.
struct BandPlace {
    int list, bytes;  // offset of the list; of all
    constexpr BILLFISH_DEVICE BandPlace(int four_bytes, int list_bytes)
        : list(four_bytes > kTwoHalf + kTwoMore ? four_bytes : kTwoHalf + kTwoMore),
          bytes(list + list_bytes) {}
};

// Registers of a producer and of a consumer: with these nothing is spilled but a few numbers of a
// tile, outside the loops over k, and two buffers of fragments remain (with fewer ptxas waits for
// every product).
constexpr BILLFISH_DEVICE int copy_registers(int bands) {
    return bands == 2 ? 40 : 48;
}
constexpr BILLFISH_DEVICE int math_registers(int tokens, int bands) {
    return two_fit(tokens, bands) ? 96 : bands == 2 ? 232 : 224;
}

#if __CUDA_ARCH_FEAT_SM90_ALL

struct TwoBits {
    static constexpr bool kTwo = true;
};
struct FourBits {
    static constexpr bool kTwo = false;
};

// Producer of one band's records and lists of outliers, a thread for each band; the first sets the
// bytes of x, too, that a stage's barrier expects. Stages are numbered along k: first those of 2
// bits, two a record.
template <int kTokens, int kBands>
BILLFISH_DEVICE void copy_band(const MixedLayer& layer, int bands, int m_tiles, int n_tiles,
                               Walk walk, int stages, int stage_bytes, BandPlace at,
                               BatchPlaces places) {
    const int mine = threadIdx.x;
    const u64 policy = m_tiles == 1 ? evict_first_policy() : keep_policy();
    Slot slot(1);  // the first round finds every slot empty
#pragma unroll 1
    while (walk.next()) {
        const int band = TilePlace(walk.tile, m_tiles, n_tiles).n_tile * kTeams * kBands + mine;
#pragma unroll 1
        for (int i = walk.first; i < walk.first + walk.count; ++i) {
            const bool two = i < 2 * layer.two;
            const u32 full = places.full(slot.index);
            const u32 to = places.ring() + slot.index * stage_bytes + x_bytes(kTokens) +
                           mine * at.bytes;
            u32 bytes = mine == 0 ? x_bytes(kTokens) : 0;
            barrier_wait(places.empty(slot.index), slot.parity);
            if (band < bands) {
                const unsigned char* from = layer.band(band);
                if (two) {
                    from += i / 2 * kTwoBytes, bytes += kTwoHalf + kTwoMore;
                    copy_bulk(to, from + i % 2 * kTwoHalf, kTwoHalf, full, policy);
                    copy_bulk(to + kTwoHalf, from + kTwoScales, kTwoMore, full, policy);
                } else {
                    const int size = layer.four_bytes();
                    from += layer.two * kTwoBytes + (i - 2 * layer.two) * size, bytes += size;
                    copy_bulk(to, from, size, full, policy);
                }
                const u32* edge = layer.edges(band) + (two ? i / 2 : i - layer.two);
                const u32 set = edge[0], some = (edge[1] - set) * kSetBytes;  // mostly from L1
                copy_bulk(to + at.list, layer.list(band, set), some, full, policy);
                bytes += some;
            }
            barrier_arrive_expect(full, bytes);
            slot.next(stages);
        }
    }
}

// Two sets of a list of outliers in shared memory: every lane holds an entry.
struct Held {
    u32 one = kEmpty, last = kLast;  // `last`: the list has no more
    BILLFISH_DEVICE void load(u32 list, int lane) {  // of 32 outputs
        one = load_smem_4(list + lane % 16 * 4);
        last = one & kLast;
        if (last) {
            one = lane < 16 ? one : kEmpty;
        } else {
            const u32 second = load_smem_4(list + kSetBytes + lane % 16 * 4);
            last = second & kLast;
            one = lane < 16 ? one : second;
        }
    }
};

// Adds the outliers of a list that are among a warp's 16 outputs and 64 inputs (`key`, bits of an
// entry) to its fragments of k16 steps `first` to first + kSteps - 1. `scale` is the unit.
template <class T, bool kTwo, int kSteps>
BILLFISH_DEVICE void add_outliers(Held held, u32 list, u32 key, int first, float scale, int lane,
                                  u32 (&a)[kSteps][4]) {
    // the bit of a column that tells the later two steps from the first two
    constexpr u32 kStepBit = kSteps == 4 ? 0 : kTwo ? 8 : 32;
    constexpr u32 kPlace = kEmpty | 0x30c0 | kStepBit;
    key |= first ? kStepBit : 0;
    for (;;) {
#pragma unroll 1
        for (u32 mine = ballot((held.one & kPlace) == key); mine; mine &= mine - 1) {
            const u32 entry = shuffle(held.one, 31 - __clz(mine & 0 - mine));
            const u32 column = entry % 64, inside = column % 16;
            const u32 owner = entry / 256 % 8 * 4 + (kTwo ? column / 16 : inside / 2 % 4);
            const u32 step = (kTwo ? inside / 4 : column / 16) % kSteps;
            const u32 which = (kTwo ? inside / 2 % 2 : inside / 8) * 2 + entry / 2048 % 2;
            const u32 value = T::from_float(T::to_float(entry >> 16) * scale);
            const u32 more = lane == owner ? value << column % 2 * 16 : 0;
#pragma unroll
            for (u32 i = 0; i < kSteps; ++i) {
                if (step != i) continue;
#pragma unroll
                for (u32 j = 0; j < 4; ++j) a[i][j] = T::add(a[i][j], which == j ? more : 0);
            }
        }
        if (held.last) break;  // up to 0.2 % of outliers few lists have more than two sets
        list += 2 * kSetBytes;
        held.load(list, lane);
    }
}

// Epilogue of gated tiles: two neighbouring warps have 16 gates and their ups. A warp's results are
// transposed as in store_results, and the warp of the gates stores silu(gate) * up.
template <class T, int kTokens>
BILLFISH_DEVICE void store_gated(const float (&acc)[kTokens / 2], const u16* bias, u16* out, int m,
                                 int n, int token_0, int row_0, u32 turn, int pair, bool ups,
                                 int lane) {
    float add[2] = {0.0f, 0.0f};
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
        const int row = row_0 + lane / 4 + lower * 8;
        if (bias != nullptr && row < n) add[lower] = T::to_float(bias[row]);
    }
    const u32 to = turn + (lane / 16 * 8 + lane % 8) * kTurnLine + lane / 8 % 2 * 16;
    const u32 from = turn + lane / 2 * kTurnLine + lane % 2 * 16;
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) {
        u32 both[4];  // [tokens 0-7, 8-15][outputs 0-7, 8-15]
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int e = i * 8 + j / 2 * 4 + j % 2 * 2;
            both[j] = T::pack(acc[e] + add[j % 2], acc[e + 1] + add[j % 2]);
        }
        store_matrices_turned(to, both);
        sync_pair<64>(1 + pair);
        const int token = token_0 + i * 16 + lane / 2;
        if (!ups && token < m && row_0 < n) {
            const uint4 gate = load_smem_16(from), up = load_smem_16(from + kTurnBytes);
            u16* place = out + static_cast<u64>(token) * (n / 2) + row_0 / 2 + lane % 2 * 8;
            *reinterpret_cast<uint4*>(place) = {swiglu<T>(gate.x, up.x), swiglu<T>(gate.y, up.y),
                                                swiglu<T>(gate.z, up.z), swiglu<T>(gate.w, up.w)};
        }
        sync_pair<64>(1 + pair);
    }
}

#endif

// `x` maps (m, 128 * stages along k) in boxes of 64 inputs x kTokens tokens; `gated`: of every 32
// rows the first 16 are gates and the others their ups, and `out` is (m, n / 2), n a multiple of
// 32. `early` and the rest as in w4a16's batch.cuh.
template <class T, int kZero, int kStep, int kTokens, int kBands>
__global__ void __launch_bounds__(kBatchThreads, two_fit(kTokens, kBands) ? 2 : 1)
w2416_batch(const unsigned char* __restrict__ records, const __grid_constant__ TensorMap x,
            const u16* __restrict__ bias, u16* __restrict__ out, float* __restrict__ workspace,
            u32* __restrict__ locks, int m, int n, int m_tiles, int n_tiles, int tiles_2,
            int tiles_4, int sets, int band_words, int list_bytes, int whole, int stages,
            int stage_bytes, bool early, bool gated) {
#if __CUDA_ARCH_FEAT_SM90_ALL
    // k16 steps that are decoded at a time: with four and two blocks on an SM, registers would not
    // do for products in flight.
    constexpr int kSteps = two_fit(kTokens, kBands) ? 2 : 4;
    static_assert(kMostBatchStages * 16 <= kBatchBarrierBytes, "barriers");

    extern __shared__ __align__(1024) unsigned char smem[];
    const BatchPlaces places{smem_address(smem)};
    const MixedLayer layer{records, tiles_2, tiles_4, sets, band_words};
    const BandPlace at(layer.four_bytes(), list_bytes);
    const int bands = (n + kRecordN - 1) / kRecordN;
    if (early) launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(places.full(i), kTeams * kBands);  // and the bytes of the copies
            barrier_init(places.empty(i), 4 * kTeams);      // warps that multiply
        }
        barrier_init_fence();
    }
    __syncthreads();

    Walk walk(2 * tiles_2 + tiles_4, whole, m_tiles * n_tiles);
    if (threadIdx.x < kTeamThreads) {
        give_registers<copy_registers(kBands)>();
        if (threadIdx.x < kTeams * kBands) {
            copy_band<kTokens, kBands>(layer, bands, m_tiles, n_tiles, walk, stages, stage_bytes,
                                       at, places);
        } else if (threadIdx.x == 32) {
            dependency_wait();
            copy_x<kTokens>(x, m_tiles, n_tiles, walk, stages, stage_bytes, places);
            if (!early) launch_dependents();  // the first call of a block counts
        }
        return;
    }
    take_registers<math_registers(kTokens, kBands)>();

    const int thread = threadIdx.x - kTeamThreads, team = thread / kTeamThreads;
    const int warp = thread / 32 % 4, lane = thread % 32;
    Slot slot(0);
#pragma unroll 1
    while (walk.next()) {
        const TilePlace place(walk.tile, m_tiles, n_tiles);
        const int first_band = place.n_tile * kTeams * kBands + team * kBands;
        int unit[kBands];  // log2 of it
#pragma unroll
        for (int band = 0; band < kBands; ++band)
            unit[band] = static_cast<int>(*layer.head(min(first_band + band, bands - 1)));
        float acc[kBands][kTokens / 2] = {};
        const int list = at.list + warp / 2 * (kSetBytes / 2);  // of this warp's 32 outputs
        // `count` stages of one kind. `load` has what the fragments of 64 inputs need, and makes
        // them.
        const auto run = [&](int count, auto kind, auto load) {
            constexpr bool kTwo = decltype(kind)::kTwo;
            u32 a[2][kSteps][4];  // two buffers: in flight, and being decoded
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                const u32 stage = places.ring() + slot.index * stage_bytes;
                const u64 x_at = x_descriptor(stage);
                const int half = kTwo ? (walk.first + i) % 2 : 0;  // of a record of 2 bits
                barrier_wait(places.full(slot.index), slot.parity);
                const u32 first_record = stage + x_bytes(kTokens) + team * kBands * at.bytes;
                Held held[kBands];
#pragma unroll
                for (int band = 0; band < kBands; ++band)
                    if (first_band + band < bands)
                        held[band].load(first_record + band * at.bytes + list, lane);
#pragma unroll
                for (int step = 0; step < 2 * kBands; ++step) {
                    const int k64 = step / kBands, band = step % kBands;
                    const u32 record = first_record + band * at.bytes;
                    auto fragment = load(record, half, band, k64);
#pragma unroll
                    for (int first = 0; first < 4; first += kSteps) {
                        u32(&now)[kSteps][4] = a[(step * 4 + first) / kSteps % 2];
#pragma unroll
                        for (int k16 = 0; k16 < kSteps; ++k16) fragment(first + k16, now[k16]);
                        add_outliers<T, kTwo>(held[band], record + list,
                                              warp << 12 | (half * 2 + k64) << 6, first,
                                              __uint_as_float(127 + unit[band] << 23), lane, now);
                        wgmma_fence();
#pragma unroll
                        for (int k16 = 0; k16 < kSteps; ++k16)  // 32 bytes on
                            wgmma(T(), acc[band], now[k16],
                                  x_at + (k64 * kTokens * kXLine + (first + k16) * 32) / 16);
                        wgmma_commit();
                        wgmma_wait<1>();
                        if (step + first == 0 && i > 0 && lane == 0)  // the slot before was read
                            barrier_arrive(
                                places.empty((slot.index == 0 ? stages : slot.index) - 1));
                    }
                }
                slot.next(stages);
            }
            wgmma_wait<0>();
            if (count > 0 && lane == 0)
                barrier_arrive(places.empty((slot.index == 0 ? stages : slot.index) - 1));
        };
        const int of_two = max(0, min(walk.count, 2 * tiles_2 - walk.first));
        u32 lean[kBands], more[kBands];
#pragma unroll
        for (int band = 0; band < kBands; ++band)
            lean[band] = power<T>(unit[band] + Scaled<T>::kPlus);
        run(of_two, TwoBits(), [&](u32 record, int half, int band, int k64) {
            const u32 mine = warp / 2 * 32 + lane, brick = warp % 2;
            const u32 behind = record + kTwoHalf - kTwoScales;  // half of the codes are here
            const uint2 v = load_smem_8(record + k64 * 1024 + mine * 16 + brick * 8);
            const u32 codes = load_smem_4(behind + kTwoScales + mine * 8 + half * 4) >> brick * 4;
            const u32 zeros = load_smem_4(behind + kTwoZeros + mine * 4) >> (half * 4 + brick) * 2;
            const u32 base = 0x00010001u * load_smem_2(behind + kTwoBases + warp / 2 * 64 +
                                                       lane % 4 * 16 + half * 8 + k64 * 4 +
                                                       brick * 2);
            const TwoGroup<T, kZero, kStep> group(codes, k64 * 8, zeros, k64 * 4,
                                                  offset_of<T>(base),
                                                  base_of<T>(base, lean[band]));
            return [=](int k16, u32(&a)[4]) {
                const u32 words[2] = {v.x, v.y};
                group.fragment(words, k16, a);
            };
        });
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
            const int plus = unit[band] + Scaled<T>::kPlusFour, lower = plus + Scaled<T>::kLower;
            lean[band] = power<T>(plus / 2);
            more[band] =
                power<T>(plus - plus / 2) & 0xffff | power<T>(lower - plus / 2) << 16;
        }
        run(walk.count - of_two, FourBits(), [&](u32 record, int, int band, int k64) {
            const uint4 v = load_smem_16(record + (k64 * 4 + warp) * kBrickBytes + lane * 16);
            const u32 scales = record + kFourScales;
            const u32 marks = load_smem_4(scales + sets * kFourSetBytes);
            const u32 mine = scales + (warp / 2 * 8 + lane / 4) * 8 + warp % 2 * 4;
            FourGroup<T> group;
            return [=, &lean, &more](int k16, u32(&a)[4]) mutable {
                const int step = k64 * 4 + k16;
                if (k16 == 0 || marks >> step & 1) {  // a part of k begins
                    const int set = __popc(marks & (2u << step) - 1);
                    group.set(load_smem_4(mine + set * kFourSetBytes), lean[band], more[band]);
                }
                group.fragment(k16 == 0 ? v.x : k16 == 1 ? v.y : k16 == 2 ? v.z : v.w, a);
            };
        });

        MeetingPlace<kBands * kTokens / 2> here(workspace, locks, blockIdx.x, thread);
        if (walk.first > 0) {
            here.leave(&acc[0][0], lane);
            continue;
        }
        int others = 0;
        for (int have = walk.count; have < walk.k_tiles; ++others)  // the last may go on elsewhere
            have += walk.stripe(others + 2) - walk.stripe(others + 1);
        if (others > 0) here.collect(&acc[0][0], others, lane);
        const u32 turn = places.ring() + stages * stage_bytes + thread / 32 * kTurnBytes;
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
            const float real = __uint_as_float(127 - unit[band] << 23);  // 1 / unit
#pragma unroll
            for (int i = 0; i < kTokens / 2; ++i) acc[band][i] *= real;
            const int token = place.m_tile * kTokens;
            const int row = (first_band + band) * kRecordN + warp * 16;
            if (gated)
                store_gated<T, kTokens>(acc[band], bias, out, m, n, token, row, turn,
                                        thread / 64, warp % 2, lane);
            else
                store_results<T, kTokens>(acc[band], bias, out, m, n, token, row, false, turn,
                                          lane);
        }
    }
#endif
}

}  // namespace billfish
