// w4a16_decode: y (m, n) = x (m, k) W^T for m <= 16 at the speed of memory, sm_90.
//
// Every cluster gets the same share of the outputs, in bands of 64, and its two blocks split the
// inputs: MARLIN's stripes, chosen so that a stripe never leaves its cluster. The split-K reduction
// then needs no locks and no workspace, only distributed shared memory, and every SM streams the
// same number of bytes.
//
//     cluster c of C:  bands [c, c + 1) / C, in passes of at most kBands
//     block r of 2:    inputs [r, r + 1) / 2 of each pass, in slices of 128
//
//     warp 0       producer: bulk copies of records, `stages` deep; the first are issued before the
//                  previous kernel has ended (PDL), since weights do not depend on it
//     warp 1       producer: activations of each stage, once the previous kernel has ended
//     warps 2-9    consumers: 32 outputs x 128 inputs at a time
//     reduction    partial sums go to the block that owns the outputs (st.async), which adds them
//                  in the order of k: the same bits in every run, for every m and batch
//
// Two blocks fit on an SM: one that computes, and one of the next kernel that prefetches weights.
#pragma once

#include "billfish/gate.cuh"
#include "billfish/record.cuh"

namespace billfish {

constexpr int kMathWarps = 8;
constexpr int kCluster = 2;  // the only size that reaches every SM: GPCs have odd numbers of pairs
constexpr int kFirstMathWarp = 2;
constexpr int kDecodeThreads = 32 * (kFirstMathWarp + kMathWarps);

// One stage of the ring: four records, of one, two or four bands. Each math warp takes half a
// record, and there is one round of barriers for 16 KB: with 8 KB, 28672 x 8192 took 35.5 us
// instead of 30.1.
template <int kGroup, bool kAsymmetric, int kTokens, int kBands>
struct DecodeStage {
    static constexpr int kSlices = 4 / kBands;  // of 128 inputs
    static constexpr int kRecordBytes = Record<kGroup, kAsymmetric>::kBytes;
    static constexpr int kX = kBands * kSlices * kRecordBytes;  // byte offsets
    static constexpr int kBytes = kX + kSlices * x_bytes(kTokens);
    static_assert(kX % 128 == 0 && kBytes % 128 == 0, "LanePlaces");
};

// Shared memory: [barriers, 256 B][stages][partial sums, two buffers]. tile.py counts the same.
constexpr int kBarrierBytes = 256;

// A slot of the ring and the parity its barriers are waited for. A warp must not skip a stage:
// copies arrive out of order, and parity does not tell the next round from the previous one.
struct Slot {
    int index = 0;
    u32 parity = 0;
    BILLFISH_DEVICE bool advance(int stages) {  // true: it wrapped around
        if (++index != stages) return false;
        index = 0, parity ^= 1;
        return true;
    }
};

#if __CUDA_ARCH__ >= 900

// A block's share of the work. Recomputed wherever it is needed: kept, it would cost the inner loop
// registers, and special registers are cheap to read.
struct Share {
    int rank, first_band, bands, most_bands, k_begin, span;
    BILLFISH_DEVICE Share(int n, int k_tiles) {
        const u32 total = (n + kRecordN - 1) / kRecordN;
        const u32 index = cluster_index(), count = cluster_count();
        rank = cluster_rank();
        first_band = total * index / count;  // some 10^5 bands x 10^2 clusters
        bands = total * (index + 1) / count - first_band;
        most_bands = (total + count - 1) / count;
        k_begin = k_tiles * rank / kCluster;
        span = k_tiles * (rank + 1) / kCluster - k_begin;
    }
    BILLFISH_DEVICE int passes(int most) const { return (bands + most - 1) / most; }
    // Bands before pass `pass` of `passes`, as even as possible.
    BILLFISH_DEVICE int before(int pass, int passes) const { return bands * pass / passes; }
};

// A math warp: slice `sub` of a stage, the `within`-th 32 outputs. Recomputed like Share.
template <int kWarpsN>
struct Worker {
    int lane, index, sub, within, band;
    BILLFISH_DEVICE Worker() {
        const int thread = thread_index() - 32 * kFirstMathWarp;
        lane = thread % 32, index = thread / 32;
        sub = index / kWarpsN, within = index % kWarpsN, band = within / 2;
    }
};

// A block without work stays about as long as the others need: an SM with both slots free would get
// two blocks of a later kernel, which then waits for that SM (9.4 us became 13.3 for 14336 x 4096,
// 64 bands on 66 clusters). A record takes 128 ns of an SM's bandwidth.
BILLFISH_DEVICE void linger(int records) {
    dependency_wait();
    for (const u64 begin = nanoseconds(); nanoseconds() - begin < 100u * records;)
        sleep_nanoseconds(200);
}

#endif

// `records` is (bands, k tiles) records, `x` (m, x_k), `out` (m, n). Columns of x repeat after its
// last tile: codes of more than 4 bits are two planes of nibbles along k. `gated`: of every 16 rows
// the first 8 are gates and the others their ups (gated.py), and `out` is (m, n / 2).
template <class T, class S, int kGroup, bool kAsymmetric, int kTokens, int kBands>
__global__ void __launch_bounds__(kDecodeThreads, 2)
w4a16_decode(const unsigned char* __restrict__ records, const u16* __restrict__ x,
             const u16* __restrict__ bias, u16* __restrict__ out, int m, int n, int x_k,
             int k_tiles, int stages, bool gated) {
#if __CUDA_ARCH__ >= 900
    using Stage = DecodeStage<kGroup, kAsymmetric, kTokens, kBands>;
    constexpr int kSlices = Stage::kSlices;
    constexpr int kWarpsN = kBands * 2;  // warps that share a slice
    constexpr int kBlocks = kTokens / 8;
    static_assert(kWarpsN * kSlices == kMathWarps, "a half record for each warp");

    extern __shared__ __align__(128) unsigned char smem[];
    const u32 base = smem_address(smem);
    const u32 full = base, empty = base + 64, reduced = base + 128;
    const u32 ring = base + kBarrierBytes;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(full + 8 * i, 1 + 32);  // the bulk copy, and each lane's copies of x
            barrier_init(empty + 8 * i, kMathWarps);
        }
        barrier_init(reduced, 1);
        barrier_init(reduced + 8, 1);
        barrier_init_fence();
    }
    __syncthreads();
    cluster_arrive();

    if (warp < kFirstMathWarp) {
        const Share share(n, k_tiles);
        const int passes = share.passes(kBands), span = share.span;
        if (warp == 0) {
            if (lane == 0) {
                const u64 policy = evict_first_policy();
                const u64 band_bytes = static_cast<u64>(k_tiles) * Stage::kRecordBytes;
                Slot slot;
                slot.parity = 1;  // the first round finds every slot empty
                for (int pass = 0; pass < passes; ++pass) {
                    const int begin = share.before(pass, passes);
                    const int have = share.before(pass + 1, passes) - begin;
                    const unsigned char* from =
                        records + (share.first_band + begin) * band_bytes +
                        static_cast<u64>(share.k_begin) * Stage::kRecordBytes;
                    for (int slice = 0; slice < span; slice += kSlices) {
                        const u32 bytes = min(kSlices, span - slice) * Stage::kRecordBytes;
                        const u32 to = ring + slot.index * Stage::kBytes;
                        const u32 barrier = full + 8 * slot.index;
                        barrier_wait(empty + 8 * slot.index, slot.parity);
                        barrier_arrive_expect(barrier, have * bytes);
#pragma unroll
                        for (int band = 0; band < kBands; ++band) {
                            if (band < have)
                                copy_bulk(to + band * kSlices * Stage::kRecordBytes,
                                          from + band * band_bytes, bytes, barrier, policy);
                        }
                        from += kSlices * Stage::kRecordBytes;
                        slot.advance(stages);
                    }
                }
                if (passes == 0) linger(share.most_bands * span);
            }
            __syncwarp();
        } else {
            // Lanes 0-15 copy even tokens, 16-31 odd ones: a slice is one addition, one XOR and one
            // copy for every two tokens. An odd m copies one row twice.
            const int chunk = lane % 16, x_tiles = (x_k + kRecordK - 1) / kRecordK;
            const u32 to = ring + Stage::kX + x_smem_offset<kTokens>(lane / 16, chunk);
            int from[kTokens / 2];
#pragma unroll
            for (int pair = 0; pair < kTokens / 2; ++pair)
                from[pair] = min(2 * pair + lane / 16, m - 1) * x_k + chunk * 8;
            Slot slot;
            slot.parity = 1;
            dependency_wait();
            for (int pass = 0; pass < passes; ++pass) {
                for (int slice = 0; slice < span; slice += kSlices) {
                    barrier_wait(empty + 8 * slot.index, slot.parity);
#pragma unroll
                    for (int sub = 0; sub < kSlices; ++sub) {
                        const int tile = share.k_begin + slice + sub;
                        const int column = (tile >= x_tiles ? tile - x_tiles : tile) * kRecordK;
                        const u32 bytes = column + chunk * 8 < x_k ? 16 : 0;
                        const u32 here =
                            to + slot.index * Stage::kBytes + sub * x_bytes(kTokens);
#pragma unroll
                        for (int pair = 0; pair < kTokens / 2; ++pair) {
                            if (2 * pair < m)
                                copy_async_16((here ^ pair % 4 * 32) + pair * 2 * kXLine,
                                              x + (from[pair] + column), bytes);
                        }
                    }
                    barrier_arrive_after_copies(full + 8 * slot.index);
                    slot.advance(stages);
                }
            }
        }
        cluster_wait();
        return;
    }

    LanePlaces<kTokens> places;
    {
        const Worker<kWarpsN> me;
        places = LanePlaces<kTokens>::template of<Record<kGroup, kAsymmetric>>(
            ring + (me.band * kSlices + me.sub) * Stage::kRecordBytes,
            ring + Stage::kX + me.sub * x_bytes(kTokens), me.lane, me.within % 2);
    }
    Slot slot;
    cluster_wait();     // the other block's barriers must exist before the first remote store
    dependency_wait();  // rather than polling a barrier until x arrives
    for (int pass = 0; pass < Share(n, k_tiles).passes(kBands); ++pass) {
        float acc[2][kBlocks][4] = {};
        int rounds, mine;  // stages, and those in which this warp has work
        {
            const Share share(n, k_tiles);
            const Worker<kWarpsN> me;
            const int passes = share.passes(kBands);
            const int have = share.before(pass + 1, passes) - share.before(pass, passes);
            rounds = (share.span + kSlices - 1) / kSlices;
            mine = me.band < have ? (share.span - me.sub + kSlices - 1) / kSlices : 0;
        }
        for (; rounds > 0; --rounds, --mine) {
            const auto release = [&](float seen) {
                __syncwarp();
                barrier_arrive_after(empty + 8 * slot.index, seen, thread_index() % 32 == 0);
            };
            barrier_wait(full + 8 * slot.index, slot.parity);
            if (mine > 0)
                multiply<T, S, kGroup, kAsymmetric, kTokens>(places, acc, release);
            else
                release(0);
            places.move(slot.advance(stages) ? (1 - stages) * Stage::kBytes : Stage::kBytes);
        }

        // Partial sums are reduced once a tile (MARLIN 3.4). With two buffers a block can be one
        // pass ahead: all its warps have read a buffer before any sends sums of the next pass, and
        // whoever writes that buffer again has sums of the next pass from both blocks
        // (tests/kernels/test_decode_protocol.py).
        constexpr int kSumsBytes = kSlices * kBands * kRecordN * kTokens * 4;
        const Share share(n, k_tiles);
        const Worker<kWarpsN> me;
        const int passes = share.passes(kBands);
        const int have = share.before(pass + 1, passes) - share.before(pass, passes);
        const int rank = cluster_rank(), rows = have * (kRecordN / kCluster);  // that a block owns
        const u32 buffer = ring + stages * Stage::kBytes + (pass & 1) * kSumsBytes;
        const u32 barrier = reduced + (pass & 1) * 8;
        if (me.index == 0 && me.lane == 0)
            barrier_arrive_expect(barrier, kCluster * kSlices * rows * ((m + 1) / 2) * 8);
        if (me.band < have) {
#pragma unroll
            for (int brick = 0; brick < 2; ++brick) {
#pragma unroll
                for (int lower = 0; lower < 2; ++lower) {
                    const int row = me.within * 32 + brick * 16 + lower * 8 + me.lane / 4;
                    const int owner = row >= rows, part = rank * kSlices + me.sub;
                    const int place = part * rows + row - owner * rows;
                    const u32 to =
                        in_block(buffer + (place * kTokens + me.lane % 4 * 2) * 4, owner);
                    const u32 signal = in_block(barrier, owner);
#pragma unroll
                    for (int block = 0; block < kBlocks; ++block) {
                        const float(&sum)[4] = acc[brick][block];
                        if (block * 8 + me.lane % 4 * 2 < m)
                            store_remote(to + block * 32, finish<T>(sum[lower * 2], lower),
                                         finish<T>(sum[lower * 2 + 1], lower), signal);
                    }
                }
            }
        }
        const int first = (share.first_band + share.before(pass, passes)) * kRecordN + rank * rows;
        barrier_wait(barrier, pass >> 1 & 1);
        for (int item = me.index; item < m * kBands; item += kMathWarps) {
            const int token = item / kBands, row = item % kBands * 32 + me.lane;
            if (row >= rows) continue;  // all lanes: rows are a multiple of 32
            float part[kCluster * kSlices], total = 0;
#pragma unroll
            for (int i = 0; i < kCluster * kSlices; ++i)
                part[i] = load_smem_float(buffer + ((i * rows + row) * kTokens + token) * 4);
#pragma unroll
            for (int i = 0; i < kCluster * kSlices; ++i) total += part[i];
            if (gated) {  // n is a multiple of 16; n / 2 would cost a register, and spill
                const float up = shuffle_xor(total, 8);
                const u32 y = swiglu<T>(T::from_float(total), T::from_float(up));
                if (me.lane % 16 < 8 && first + row < n)
                    out[(static_cast<u64>(token) * n + first + row & ~15ull) / 2 + row % 8] = y;
                continue;
            }
            if (first + row >= n) continue;
            if (bias != nullptr) total += T::to_float(bias[first + row]);
            out[static_cast<u64>(token) * n + first + row] = T::from_float(total);
        }
        if (pass + 1 < passes) sync_some<1, 32 * kMathWarps>();
    }
#endif
}

}  // namespace billfish
