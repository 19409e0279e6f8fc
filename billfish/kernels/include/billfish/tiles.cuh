// Tiles of outputs x tokens of a product on the tensor cores of sm_90a: how blocks share them,
// their ring of stages in shared memory, the reduction of those that are split along k, the
// epilogue. Schemes bring their records. kernels/tiles.py chooses sizes.
#pragma once

#include "billfish/gate.cuh"
#include "billfish/record.cuh"
#include "billfish/warp.cuh"
#include "billfish/wgmma.cuh"

namespace billfish {

constexpr int kTeamThreads = 128;  // a warpgroup
constexpr int kTeams = 2;          // warpgroups that multiply, where a kernel has no other number
constexpr int kBatchThreads = (1 + kTeams) * kTeamThreads;

// Whether two blocks fit on an SM: one may belong to the next kernel and prefetch its weights.
constexpr BILLFISH_DEVICE bool two_fit(int tokens, int bands) { return tokens <= 64 && bands == 1; }

// Shared memory: [barriers, 1 KB][stages][for each warp a buffer to transpose 16 x 16 results].
constexpr int kBatchBarrierBytes = 1024, kMostBatchStages = 8;

// Addresses within it.
struct BatchPlaces {
    u32 base;
    BILLFISH_DEVICE u32 full(int slot) const { return base + 8 * slot; }
    BILLFISH_DEVICE u32 empty(int slot) const { return base + 8 * kMostBatchStages + 8 * slot; }
    BILLFISH_DEVICE u32 met() const { return base + 16 * kMostBatchStages; }
    BILLFISH_DEVICE u32 ring() const { return base + kBatchBarrierBytes; }
};

constexpr int kTurnLine = 48, kTurnBytes = 16 * kTurnLine;  // padded by 16 bytes: no bank conflicts

// a / b, for 0 <= a, 0 < b < 2^24 and results up to 2^21, which the approximation misses by one at
// most: a division of integers takes some 200 clocks, and several stand between a tile's last
// product and its results. kQuick in w4a16_batch alone: other kernels would spill.
template <bool kQuick>
BILLFISH_DEVICE int quotient(int a, int b) {
    if (!kQuick) return a / b;
    const int q = static_cast<float>(a) * reciprocal_fast(static_cast<float>(b));
    const int rest = a - q * b;
    return q + (rest >= b) - (rest < 0);
}

// Tiles are ordered by up to kAbreast tiles of tokens first, then along the outputs: those that run
// at the same time share x and weights in L2.
constexpr int kAbreast = 8;

template <bool kQuick>
struct TilePlaceOf {
    int m_tile, n_tile;
    BILLFISH_DEVICE TilePlaceOf(int tile, int m_tiles, int n_tiles) {
        const int strip = quotient<kQuick>(tile, kAbreast * n_tiles);
        const int rest = tile - strip * kAbreast * n_tiles;
        const int rows = min(kAbreast, m_tiles - strip * kAbreast);
        n_tile = quotient<kQuick>(rest, rows), m_tile = strip * kAbreast + rest - n_tile * rows;
    }
};
using TilePlace = TilePlaceOf<false>;

// A block's work, part by part: inputs [first, first + count) of `tile`, in units of 128. First
// every gridDim.x-th of the whole tiles; then its stripe of the split tiles, which lie end to end
// and are cut anywhere. Stripes are numbered backwards: a block waits only for sums of the stripes
// after its own, whose blocks were started before it.
//
// Twins are a cluster of two blocks with tiles of neighbouring outputs and the same tokens and
// inputs, of which each fetches half for both. To Walk they are one block, their tiles one tile.
template <bool kQuick>
struct WalkOf {
    using Place = TilePlaceOf<kQuick>;
    int k_tiles, whole, tiles;
    bool twins;
    int part = -1, tile = 0, first = 0, count = 0;
    BILLFISH_DEVICE WalkOf(int k_tiles, int whole, int tiles, bool twins = false)
        : k_tiles(k_tiles), whole(whole), tiles(tiles), twins(twins) {}
    BILLFISH_DEVICE int all() const { return gridDim.x >> twins; }
    BILLFISH_DEVICE int own() const { return blockIdx.x >> twins; }
    // The first unit of the stripe `behind` stripes after this block's. The first stripes are one
    // unit longer where the division leaves a remainder.
    BILLFISH_DEVICE int stripe(int behind) const {
        const int blocks = all(), which = blocks - 1 - own() + behind;
        const int units = (tiles - whole) * k_tiles, each = quotient<kQuick>(units, blocks);
        return whole * k_tiles + each * which + min(which, units - each * blocks);
    }
    // Blocks that have the rest of this part's tile; the last may go on elsewhere.
    BILLFISH_DEVICE int others() const {
        int found = 0;
        for (int have = count; have < k_tiles; ++found)
            have += stripe(found + 2) - stripe(found + 1);
        return found;
    }
    BILLFISH_DEVICE int whole_parts() const {
        const int blocks = all(), index = own();
        return index < whole ? quotient<kQuick>(whole - index + blocks - 1, blocks) : 0;
    }
    BILLFISH_DEVICE bool next() {
        const int of_stripe = ++part - whole_parts();
        if (of_stripe < 0) {
            tile = own() + part * all(), first = 0, count = k_tiles;
            return true;
        }
        const int begin = stripe(0), end = stripe(1);
        tile = quotient<kQuick>(begin, k_tiles) + of_stripe;
        first = max(begin - tile * k_tiles, 0);
        count = min(k_tiles, end - tile * k_tiles) - first;
        return count > 0;
    }
};

// Or, in clusters of `splits` > 1 blocks: an equal share of the inputs of one tile.
template <bool kQuick>
struct ClusterWalkOf : WalkOf<kQuick> {
    using Base = WalkOf<kQuick>;
    int splits;
    BILLFISH_DEVICE ClusterWalkOf(int k_tiles, int whole, int tiles, int splits, bool twins = false)
        : Base(k_tiles, whole, tiles, twins), splits(splits) {}
    BILLFISH_DEVICE bool next() {
        if (splits == 1) return Base::next();
        Base::tile = blockIdx.x / splits;
        const int rank = blockIdx.x - Base::tile * splits;
        Base::first = Base::k_tiles * rank / splits;
        Base::count = Base::k_tiles * (rank + 1) / splits - Base::first;
        return ++Base::part == 0;
    }
};

using Walk = WalkOf<false>;
using ClusterWalk = ClusterWalkOf<false>;

// A block's tile of outputs, of twins that of each.
BILLFISH_DEVICE int own_tile(int n_tile, bool twins) {
    return twins ? 2 * n_tile + static_cast<int>(blockIdx.x % 2) : n_tile;
}

#if __CUDA_ARCH_FEAT_SM90_ALL

// A slot of the ring and the parity of its barriers.
struct Slot {
    int index = 0;
    u32 parity;
    BILLFISH_DEVICE explicit Slot(u32 parity) : parity(parity) {}
    BILLFISH_DEVICE void next(int stages) {
        if (++index == stages) index = 0, parity ^= 1;
    }
};

// A slot of the ring by its addresses: from its number they would be computed in every stage.
struct ReadSlot {
    u32 stage, full, parity;
    BILLFISH_DEVICE u32 empty() const { return full + 8 * kMostBatchStages; }
    BILLFISH_DEVICE void next(BatchPlaces places, int stages, int stage_bytes) {
        stage += stage_bytes, full += 8;
        if (full != places.full(stages)) return;
        stage = places.ring(), full = places.full(0), parity ^= 1;
    }
};

// Producer of the block's x, which is first in a stage; one thread. A line of a token is 128 bytes:
// the 128 inputs of a stage are two of 16-bit numbers, or one of bytes. After `x_tiles` stages x
// begins again: codes of more than 4 bits are two planes of nibbles along k.
template <int kTokens, int kLines = 2, class AnyWalk>
BILLFISH_DEVICE void copy_x(const TensorMap& x, int m_tiles, int n_tiles, AnyWalk walk, int stages,
                            int stage_bytes, BatchPlaces places, int x_tiles = 1 << 30,
                            bool twins = false) {
    Slot slot(1);
#pragma unroll 1
    while (walk.next()) {
        const int token = typename AnyWalk::Place(walk.tile, m_tiles, n_tiles).m_tile * kTokens;
#pragma unroll 1
        for (int i = walk.first; i < walk.first + walk.count; ++i) {
            const u32 to = places.ring() + slot.index * stage_bytes;
            const int tile = i < x_tiles ? i : i - x_tiles;
            barrier_wait(places.empty(slot.index), slot.parity);
#pragma unroll
            for (int line = 0; line < kLines; ++line) {  // zeros past the last token and input
                if (twins) {  // slots are empty when both have read them
                    if (line == blockIdx.x % 2)
                        copy_tensor_twice(to + line * kTokens * kXLine, x,
                                          (tile * kLines + line) * (kXLine / 2), token,
                                          places.full(slot.index));
                    continue;
                }
                copy_tensor(to + line * kTokens * kXLine, x, (tile * kLines + line) * (kXLine / 2),
                            token, places.full(slot.index));
            }
            slot.next(stages);
        }
    }
}

// Producer of the block's records, up to `stages` ahead; one thread. It sets the bytes that a
// stage's barrier expects, those of x included: x is first in a stage, records begin at kRecords.
template <class Stage, int kTileBands, class AnyWalk>
BILLFISH_DEVICE void copy_records(const unsigned char* records, int bands, int m_tiles, int n_tiles,
                                  AnyWalk walk, int stages, BatchPlaces places,
                                  bool twins = false) {
    const u64 policy = m_tiles == 1 ? evict_first_policy() : keep_policy();
    Slot slot(1);  // the first round finds every slot empty
#pragma unroll 1
    while (walk.next()) {
        const typename AnyWalk::Place place(walk.tile, m_tiles, n_tiles);
        const int tile = own_tile(place.n_tile, twins);
        const int band = tile * kTileBands;
        const int here = max(0, min(kTileBands, bands - band));  // of a last twin maybe none
        const unsigned char* from =
            records + (static_cast<u64>(band) * walk.k_tiles + walk.first) * Stage::kRecordBytes;
#pragma unroll 1
        for (int i = 0; i < walk.count; ++i, from += Stage::kRecordBytes) {
            const u32 full = places.full(slot.index);
            barrier_wait(places.empty(slot.index), slot.parity);
            barrier_arrive_expect(full, Stage::kRecords + here * Stage::kRecordBytes);
            const u32 to = places.ring() + slot.index * Stage::kBytes + Stage::kRecords;
#pragma unroll 1
            for (int j = 0; j < here; ++j)
                copy_bulk(to + j * Stage::kRecordBytes,
                          from + static_cast<u64>(j * walk.k_tiles) * Stage::kRecordBytes,
                          Stage::kRecordBytes, full, policy);
            slot.next(stages);
        }
    }
}

// Epilogue: a warp's 16 rows x kTokens results, transposed so that a token's outputs are
// contiguous. Gated: a thread has gates r and their ups, rows r + 8; 8 outputs remain, in the first
// half of a token's line. (n / 2 as a variable would live in a register over all tiles, and spill.)
template <class T, int kTokens>
BILLFISH_DEVICE void store_results(const float (&acc)[kTokens / 2], const u16* bias, u16* out,
                                   int m, int n, int token_0, int row_0, bool gated, u32 turn,
                                   int lane) {
    float add[2] = {0.0f, 0.0f};
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
        const int row = row_0 + lane / 4 + lower * 8;
        if (bias != nullptr && row < n) add[lower] = T::to_float(bias[row]);
    }
    const u32 to = turn + (lane / 16 * 8 + lane % 8) * kTurnLine + lane / 8 % 2 * 16;
    const u32 from = turn + lane / 2 * kTurnLine + lane % 2 * 16;
    const int row = row_0 + lane % 2 * 8;
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) {
        u32 pair[4];  // [tokens 0-7, 8-15][outputs 0-7, 8-15]
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int e = i * 8 + j / 2 * 4 + j % 2 * 2;
            pair[j] = T::pack(acc[e] + add[j % 2], acc[e + 1] + add[j % 2]);
        }
        if (gated) pair[0] = swiglu<T>(pair[0], pair[1]), pair[2] = swiglu<T>(pair[2], pair[3]);
        store_matrices_turned(to, pair);
        __syncwarp();
        const uint4 v = load_smem_16(from);
        __syncwarp();
        const int token = token_0 + i * 16 + lane / 2;
        if (token >= m || row >= n || (gated && lane % 2)) continue;
        u16* place = out + ((static_cast<u64>(token) * n + row) >> gated);
        if (n % 8 == 0) {
            *reinterpret_cast<uint4*>(place) = v;
        } else {
            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (row + j < n) place[j] = words[j / 2] >> j % 2 * 16;
        }
    }
}

// Split-K workspace: partial sums of tiles, of each block kSums / 4 x kThreads x 16 bytes, and a
// flag for each warp, which waits only for the same warp of another block. V: float, or u32.
template <int kSums, class V = float, int kThreads = kTeams * kTeamThreads>
struct MeetingPlace {
    static constexpr int kWarps = kThreads / 32;
    V* sums;
    u32* flags;
    BILLFISH_DEVICE MeetingPlace(V* workspace, u32* locks, u32 block, int thread)
        : sums(workspace + static_cast<u64>(block) * kSums * kThreads + thread * 4),
          flags(locks + block * kWarps + thread / 32) {}
    BILLFISH_DEVICE void leave(const V* acc, int lane) {
#pragma unroll
        for (int i = 0; i < kSums; i += 4)
            store_global_16(sums + i * kThreads, acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
        __syncwarp();
        if (lane == 0) store_release(flags, 1);
    }
    // Adds the sums of the `others` blocks before this one, the nearest first.
    BILLFISH_DEVICE void collect(V* acc, int others, int lane) {
        constexpr int kAtOnce = kSums <= 16 ? 4 : 1;
        for (int i = lane + 1; i <= others; i += 32)
            while (load_acquire(flags - i * kWarps) == 0) {}
        __syncwarp();
        const V* from = sums;
#pragma unroll kAtOnce
        for (int i = 0; i < others; ++i) {
            from -= kSums * kThreads;
#pragma unroll
            for (int j = 0; j < kSums; j += 4) {
                const auto v = load_global_16(from + j * kThreads);
                acc[j] += v.x, acc[j + 1] += v.y, acc[j + 2] += v.z, acc[j + 3] += v.w;
            }
        }
        __syncwarp();
        for (int i = lane + 1; i <= others; i += 32) flags[-i * kWarps] = 0;
    }
};

template <class V>
BILLFISH_DEVICE V from_bits(u32 bits);
template <>
BILLFISH_DEVICE u32 from_bits<u32>(u32 bits) { return bits; }
template <>
BILLFISH_DEVICE float from_bits<float>(u32 bits) { return __uint_as_float(bits); }

// The same by a cluster whose blocks share one tile: every block leaves its sums in its shared
// memory and then adds those of all blocks for some of the tokens, in the order of k. kSums: of a
// thread. V: u32, or float.
template <int kSums, class V = u32>
struct ClusterPlace {
    u32 at;  // room for kSums x 256 threads x 4 bytes
    BILLFISH_DEVICE ClusterPlace(u32 room, int thread) : at(room + thread * 16) {}
    BILLFISH_DEVICE void leave(const V* acc) const {
#pragma unroll
        for (int i = 0; i < kSums; i += 4) {
            const V four[4] = {acc[i], acc[i + 1], acc[i + 2], acc[i + 3]};
            store_smem_16(at + i * 1024, four);
        }
    }
    // Of all blocks the sums [first, first + 8) of this thread.
    BILLFISH_DEVICE void collect(V (&sums)[8], int first, int blocks) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i] = 0;
#pragma unroll 4
        for (int block = 0; block < blocks; ++block) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 v = load_cluster_16(in_block(at + (first + half * 4) * 1024, block));
                sums[half * 4] += from_bits<V>(v.x), sums[half * 4 + 1] += from_bits<V>(v.y);
                sums[half * 4 + 2] += from_bits<V>(v.z), sums[half * 4 + 3] += from_bits<V>(v.w);
            }
        }
    }
};

#endif

}  // namespace billfish
