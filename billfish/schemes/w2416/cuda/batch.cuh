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
//                  inputs of a band, the next 64 are decoded, and outliers are added to them
//
// Decoded weights are unit * weight in T, as in decode.cuh; sums are divided at the end.
#pragma once

#include "billfish/fragments.cuh"
#include "billfish/outliers.cuh"
#include "billfish/tiles.cuh"

namespace billfish {

// What a band has in a stage: its record, and the record's list. batch.py counts the same.
struct BandPlace {
    int list, bytes;  // offset of the list; of all
    constexpr BILLFISH_DEVICE BandPlace(int four_bytes, int list_bytes)
        : list(four_bytes > kTwoHalf + kTwoMore ? four_bytes : kTwoHalf + kTwoMore),
          bytes(list + list_bytes) {}
};

// Registers of a producer and of a consumer: (80 or 168) x 3 in all. Consumers of two blocks on an
// SM load two or three spilled offsets in a stage; two buffers of fragments remain (with fewer
// ptxas waits for every product).
constexpr BILLFISH_DEVICE int copy_registers(int tokens, int bands) {
    return two_fit(tokens, bands) ? 32 : 40;
}
constexpr BILLFISH_DEVICE int math_registers(int tokens, int bands) {
    return two_fit(tokens, bands) ? 104 : 232;
}

#if __CUDA_ARCH_FEAT_SM90_ALL

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

// Two sets of a list of outliers in shared memory, of 32 outputs: every lane holds an entry.
struct Held {
    u32 one = kEmpty, last = kLast;  // `last`: the list has no more
    BILLFISH_DEVICE void load(u32 list, u32 lane) {
        const u32 first = load_smem_4(list + lane % 16 * 4);
        last = first & kLast;
        if (lane < 16) one = first;
        if (last) return;
        const u32 second = load_smem_4(list + kSetBytes + lane % 16 * 4);
        last = second & kLast;
        if (lane >= 16) one = second;
    }
};

// Slots of a warp's outliers, and one that nobody reads; where its results are turned at the end of
// a tile.
constexpr u32 kNoSlot = 2 * 32 * 8;
static_assert(kNoSlot + 8 <= kTurnBytes, "slots");
BILLFISH_DEVICE u32 slot_of_lane(u32 lane) { return lane / 4 * 64 + lane % 4 * 8; }
BILLFISH_DEVICE void clear_slots(u32 slots, u32 lane) {
    const float none[4] = {};
    store_smem_16(slots + lane * 16, none);
    __syncwarp();
}

// A stage's outliers of a warp's 16 outputs, each at the lane that decodes its weight: one that
// holds an entry stores it in a slot of that lane, for each 64 inputs one slot of 8 bytes, the pair
// of numbers to add and a bit for the register of the fragments, of 16. At 0.13 % a warp has 2.7
// outliers in a stage; found by ballots and shuffled, they took 38 instructions each, one after the
// other. `crowded`: two for one slot, or a list of more than two sets.
template <class T, bool kTwo>
struct Routed {
    u32 to, which;
    uint2 got[2];  // [k64]
    bool here, crowded;

    static BILLFISH_DEVICE u32 slot_of(u32 entry) {  // [row r (8)][k64][lane % 4]
        const u32 quarter = kTwo ? entry >> 1 & 0x18 : entry << 2 & 0x18;
        return (entry >> 2 & 0x1c0) | (entry >> 1 & 0x20) | quarter;
    }
    static BILLFISH_DEVICE u32 register_of(u32 entry) {  // [step (4)][pair or 8 inputs on][r + 8]
        return ((kTwo ? entry : entry >> 2) & 14) | (entry >> 11 & 1);
    }
    // Seven to a byte: one instruction makes predicates of them.
    static constexpr BILLFISH_DEVICE u32 bit_of(u32 index) { return index + index * 37 / 256; }
    static BILLFISH_DEVICE u32 pair_of(u32 entry, float unit) {
        const float value = T::to_float(entry >> 16) * unit;
        return T::pack(value, value) & (entry & 1 ? 0xffff0000u : 0xffffu);
    }

    // `key` has the bits of a place that the stage's outliers of a warp share.
    BILLFISH_DEVICE void send(const Held& held, u32 slots, u32 key, float unit, u32 lane) {
        here = (held.one & (kEmpty | 0x3000 | (kTwo ? 0x80 : 0))) == key;
        to = slots + (here ? slot_of(held.one) : kNoSlot);
        which = 1u << bit_of(register_of(held.one)) | lane << 24;
        store_smem_8(to, __uint_as_float(pair_of(held.one, unit)), __uint_as_float(which));
    }
    // `mine` is this lane's slot. All are empty again afterwards.
    BILLFISH_DEVICE void receive(const Held& held, u32 mine) {
        __syncwarp();
        got[0] = load_smem_8(mine), got[1] = load_smem_8(mine + 32);
        crowded = any(here && load_smem_4(to + 4) != which) || !held.last;
        __syncwarp();
        store_smem_8(to, 0, 0);
        __syncwarp();
    }
    // Adds them to the fragments of k16 steps `first` to first + kSteps - 1.
    template <int kSteps>
    BILLFISH_DEVICE void add(u32 (&a)[kSteps][4], int k64, int first) const {
        const uint2 mine = got[k64];
#pragma unroll
        for (int i = 0; i < 4 * kSteps; ++i)
            if (mine.y >> bit_of(first * 4 + i) & 1)
                a[i / 4][i % 4] = T::add(a[i / 4][i % 4], mine.x);
    }
    // The same where it is crowded, one by one in the list's order; `key` has the 64 inputs, too.
    template <int kSteps>
    static BILLFISH_DEVICE void add_all(u32 list, u32 key, float unit, u32 lane,
                                        u32 (&a)[kSteps][4], int first) {
        for (;; list += 2 * kSetBytes) {
            Held held;  // loaded again: kept, it would cost registers
            held.load(list, lane);
#pragma unroll 1
            for (u32 mine = ballot((held.one & (kEmpty | 0x30c0)) == key); mine; mine &= mine - 1) {
                const u32 entry = shuffle(held.one, 31 - __clz(mine & 0 - mine));
                const bool owner = (slot_of(entry) & ~0x20u) == slot_of_lane(lane);
                const u32 index = owner ? register_of(entry) : 16, pair = pair_of(entry, unit);
#pragma unroll
                for (u32 i = 0; i < 4 * kSteps; ++i)
                    if (index == first * 4 + i) a[i / 4][i % 4] = T::add(a[i / 4][i % 4], pair);
            }
            if (held.last) break;
        }
    }
};

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
    // k16 steps that are decoded at a time: with four and 64 tokens, registers would not do for
    // products in flight
    constexpr int kSteps = kTokens == 64 ? 2 : 4;
    static_assert(kMostBatchStages * 16 <= kBatchBarrierBytes, "barriers");

    extern __shared__ __align__(1024) unsigned char smem[];
    const BatchPlaces places{shuffle(smem_address(smem), 0)};  // see kept
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
        give_registers<copy_registers(kTokens, kBands)>();
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

    const u32 thread = threadIdx.x - kTeamThreads, team = thread / kTeamThreads;
    const u32 warp = thread / 32 % 4, lane = thread % 32;
    const u32 turn = kept(places.ring() + stages * stage_bytes + thread / 32 * kTurnBytes, 0);
    const u32 first_record = kept(x_bytes(kTokens) + team * kBands * at.bytes, 0);
    const u32 list = kept(at.list + warp / 2 * (kSetBytes / 2), 0);  // of this warp's 32 outputs
    const u32 my_slot = kept(turn + slot_of_lane(lane), lane);
    ReadSlot slot{places.ring(), places.full(0), 0};
    const auto first_band = [=](int tile) {
        return static_cast<int>(TilePlace(tile, m_tiles, n_tiles).n_tile * kTeams + team) * kBands;
    };
#pragma unroll 1
    while (walk.next()) {
        clear_slots(turn, lane);
        int unit[kBands];  // log2 of it
#pragma unroll
        for (int band = 0; band < kBands; ++band)
            unit[band] = *layer.head(min(first_band(walk.tile) + band, bands - 1));
        float acc[kBands][kTokens / 2] = {};
        const int have = bands - first_band(walk.tile);  // a missing band has no list
        // `count` stages of one kind. `load` reads a record, and returns its fragments.
        const auto run = [&](int count, auto load) {
            constexpr bool kTwo = decltype(load(0, 0, 0))::kTwo;
            u32 a[2][kSteps][4];  // two buffers: in flight, and being decoded
            u32 before = 0;       // the barrier that waits for the stage before
            // of the places of a warp's outliers: 16 outputs, and half of a record of 2 bits
            u32 key = warp << 12 | (kTwo ? walk.first % 2 << 7 : 0);
#pragma unroll 1
            for (; count > 0; --count) {
                const u64 x_at = x_descriptor(shuffle(slot.stage, 0));
                barrier_wait(slot.full, slot.parity);
#pragma unroll
                for (int band = 0; band < kBands; ++band) {
                    const u32 record = slot.stage + first_record + band * at.bytes;
                    const float times = __uint_as_float(127 + unit[band] << 23);
                    Held held;
                    if (band < have) held.load(record + list, lane);
                    auto fragments = load(record, key >> 7 & 1, band);
                    Routed<T, kTwo> outliers;
                    // the quantizer gives groups of 4 bits none
                    const bool some = kTwo || any(!(held.one & kEmpty));
                    if (kTwo) outliers.send(held, turn, key, times, lane);
#pragma unroll
                    for (int k64 = 0; k64 < 2; ++k64) {
                        fragments.open(k64);
#pragma unroll
                        for (int first = 0; first < 4; first += kSteps) {
                            u32(&now)[kSteps][4] = a[(k64 * 4 + first) / kSteps % 2];
                            fragments.make(k64, first, now);
                            if (some && k64 + first == 0) {
                                if (!kTwo) outliers.send(held, turn, key, times, lane);
                                outliers.receive(held, my_slot);
                            }
                            if (some && outliers.crowded)
                                outliers.add_all(record + list, key | k64 << 6, times, lane,
                                                 now, first);
                            else if (some)
                                outliers.add(now, k64, first);
                            wgmma_fence();
#pragma unroll
                            for (int k16 = 0; k16 < kSteps; ++k16)  // 32 bytes on
                                wgmma(T(), acc[band], now[k16],
                                      x_at + (k64 * kTokens * kXLine + (first + k16) * 32) / 16);
                            wgmma_commit();
                            wgmma_wait<1>();
                            if (band + k64 + first == 0 && before && lane == 0)
                                barrier_arrive(before);
                        }
                    }
                }
                before = slot.empty();
                slot.next(places, stages, stage_bytes), key ^= kTwo ? 0x80 : 0;
            }
            wgmma_wait<0>();
            if (before && lane == 0) barrier_arrive(before);
        };
        const int of_two = max(0, min(walk.count, 2 * tiles_2 - walk.first));
        u32 lean[kBands], more[kBands];
#pragma unroll
        for (int band = 0; band < kBands; ++band)
            lean[band] = kept(power<T>(unit[band] + Scaled<T>::kPlus), 0);
        const TwoLane two_lane(warp, lane);
        run(of_two, [&](u32 record, int half, int band) {
            return TwoFragments<T, kZero, kStep>(two_lane, record, half, lean[band]);
        });
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
            const int plus = unit[band] + Scaled<T>::kPlusFour, lower = plus + Scaled<T>::kLower;
            lean[band] = power<T>(plus / 2);
            more[band] =
                power<T>(plus - plus / 2) & 0xffff | power<T>(lower - plus / 2) << 16;
        }
        const FourLane four_lane(warp, lane);
        run(walk.count - of_two, [&](u32 record, int, int band) {
            return FourFragments<T>(four_lane, record, sets, lean[band], more[band]);
        });

        MeetingPlace<kBands * kTokens / 2> here(workspace, locks, blockIdx.x, thread);
        if (walk.first > 0) {
            here.leave(&acc[0][0], lane);
            continue;
        }
        const int others = walk.others();
        if (others > 0) here.collect(&acc[0][0], others, lane);
        const int tile = kept(walk.tile, 0);  // its place is computed again: registers
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
            const float real = __uint_as_float(127 - unit[band] << 23);  // 1 / unit
#pragma unroll
            for (int i = 0; i < kTokens / 2; ++i) acc[band][i] *= real;
            const int token = TilePlace(tile, m_tiles, n_tiles).m_tile * kTokens;
            const int row = (first_band(tile) + band) * kRecordN + warp * 16;
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
