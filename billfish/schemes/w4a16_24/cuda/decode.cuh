// w4a16_24_decode: y (m, n) = x (m, k) W^T for m <= 16 at the speed of memory, with 2:4 sparse 4-bit
// weights, sm_90. Clusters, stages and sums are share.cuh's.
//
//     warp 0       producer: bulk copies of records, `stages` deep; the first are issued before the
//                  previous kernel has ended (PDL), since weights do not depend on it
//     warp 1       producer: TMA copies of x, once the previous kernel has ended
//     warps 2-9    consumers: 32 outputs x 128 inputs at a time on sparse tensor cores (sparse.cuh)
//
// Two blocks fit on an SM: one that computes, and one of the next kernel that prefetches weights.
#pragma once

#include "billfish/share.cuh"
#include "billfish/sparse.cuh"

namespace billfish {

constexpr int kFirstMathWarp = 2;
constexpr int kDecodeThreads = 32 * (kFirstMathWarp + kMathWarps);

// One stage of the ring: x of its slices of 128 inputs, then four records, of one, two or four
// bands. x first: the swizzle needs an alignment of 1024 bytes.
template <int kGroup, int kTokens, int kBands>
struct DecodeStage {
    static constexpr int kSlices = 4 / kBands;
    static constexpr int kRecordBytes = SparseRecord<kGroup>::kBytes;
    static constexpr int kXBytes = x_bytes(kTokens);     // of a slice
    static constexpr int kRecords = kSlices * kXBytes;  // byte offset
    static constexpr int kBytes = (kRecords + 4 * kRecordBytes + 1023) / 1024 * 1024;
};

// Shared memory: [barriers, 1 KB][stages][partial sums, two buffers]. tile.py counts the same.
constexpr int kBarrierBytes = 1024;

// `records` is (bands, k tiles) records, `x` maps (m, k) in boxes of 64 inputs x kTokens tokens,
// `out` is (m, n). `gated`: of every 16 rows the first 8 are gates and the others their ups, and
// `out` is (m, n / 2).
template <class T, class S, int kGroup, int kTokens, int kBands>
__global__ void __launch_bounds__(kDecodeThreads, 2)
w4a16_24_decode(const unsigned char* __restrict__ records, const __grid_constant__ TensorMap x,
                const u16* __restrict__ bias, u16* __restrict__ out, int m, int n, int k_tiles,
                int stages, bool gated) {
#if __CUDA_ARCH__ >= 900
    using Stage = DecodeStage<kGroup, kTokens, kBands>;
    using Exchange = Sums<kTokens, kBands>;
    constexpr int kSlices = Stage::kSlices, kBlocks = kTokens / 8;

    extern __shared__ __align__(1024) unsigned char smem[];
    const u32 base = smem_address(smem);
    const u32 full = base, empty = base + 64, reduced = base + 128;
    const u32 ring = base + kBarrierBytes;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) {
            barrier_init(full + 8 * i, 2);  // two producers, and the bytes of their copies
            barrier_init(empty + 8 * i, kMathWarps);
        }
        barrier_init(reduced, 1);
        barrier_init(reduced + 8, 1);
        barrier_init_fence();
    }
    __syncthreads();
    cluster_arrive();

    const PairedShare share(n, k_tiles);
    const int passes = share.passes(kBands), span = share.span;
    Slot slot;
    if (warp < kFirstMathWarp) {
        slot.parity = 1;  // the first round finds every slot empty
        if (lane == 0) {
            const u64 policy = evict_first_policy();
            const u64 band_bytes = static_cast<u64>(k_tiles) * Stage::kRecordBytes;
            if (warp == 1) dependency_wait();
            for (int pass = 0; pass < passes; ++pass) {
                const int begin = share.before(pass, passes);
                const int have = share.before(pass + 1, passes) - begin;
                const unsigned char* from = records + (share.first_band + begin) * band_bytes +
                                            static_cast<u64>(share.k_begin) * Stage::kRecordBytes;
                for (int slice = 0; slice < span; slice += kSlices) {
                    const int slices = min(kSlices, span - slice);
                    const u32 to = ring + slot.index * Stage::kBytes;
                    const u32 barrier = full + 8 * slot.index;
                    barrier_wait(empty + 8 * slot.index, slot.parity);
                    if (warp == 0) {
                        const u32 bytes = slices * Stage::kRecordBytes;
                        barrier_arrive_expect(barrier, have * bytes);
                        for (int band = 0; band < have; ++band)
                            copy_bulk(to + Stage::kRecords + band * kSlices * Stage::kRecordBytes,
                                      from + band * band_bytes, bytes, barrier, policy);
                        from += kSlices * Stage::kRecordBytes;
                    } else {
                        barrier_arrive_expect(barrier, slices * Stage::kXBytes);
                        const int first = (share.k_begin + slice) * 2;  // boxes; zeros past x's end
                        for (int box = 0; box < 2 * slices; ++box)
                            copy_tensor(to + box * kTokens * kXLine, x,
                                        (first + box) * (kXLine / 2), 0, barrier);
                    }
                    slot.advance(stages);
                }
            }
            if (warp == 0 && passes == 0) linger(share.most_bands * span);
        }
        __syncwarp();
        cluster_wait();
        return;
    }

    const Worker<kBands * 2, kFirstMathWarp> me;
    cluster_wait();     // the other block's barriers must exist before the first remote store
    dependency_wait();  // rather than polling a barrier until x arrives
    for (int pass = 0; pass < passes; ++pass) {
        float acc[2][kBlocks][4] = {};
        const int begin = share.before(pass, passes);
        const int have = share.before(pass + 1, passes) - begin;
        const int works = me.band < have ? span - me.sub : 0;
        for (int slice = 0; slice < span; slice += kSlices) {
            const u32 stage = ring + slot.index * Stage::kBytes;
            barrier_wait(full + 8 * slot.index, slot.parity);
            if (slice < works)
                multiply_sparse<T, S, kGroup, kTokens>(
                    stage + Stage::kRecords +
                        (me.band * kSlices + me.sub) * Stage::kRecordBytes,
                    stage + me.sub * Stage::kXBytes, me.within % 2, lane, acc);
            float seen = 0;  // it depends on every byte read
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
                seen += acc[0][block][0] + acc[1][block][0];
            __syncwarp();
            barrier_arrive_after(empty + 8 * slot.index, seen, lane == 0);
            slot.advance(stages);
        }

        // With two buffers a block can be one pass ahead: all its warps have read a buffer before
        // any sends sums of the next pass, and whoever writes that buffer again has sums of the
        // next pass from both blocks (tests/kernels/test_decode_protocol.py).
        const int rank = cluster_rank(), rows = have * (kRecordN / kCluster);  // that a block owns
        const u32 buffer = ring + stages * Stage::kBytes + (pass & 1) * Exchange::kBytes;
        const u32 barrier = reduced + (pass & 1) * 8;
        if (me.index == 0 && lane == 0)
            barrier_arrive_expect(barrier, Exchange::expected(rows, m));
        if (me.band < have)
            Exchange::send(acc, buffer, barrier, me, rank, rows, m,
                           [](float sum, bool) { return sum; });
        const int first = (share.first_band + begin) * kRecordN + rank * rows;
        barrier_wait(barrier, pass >> 1 & 1);
        Exchange::template store<T, 8>(buffer, bias, out, me, m, n, first, rows, gated);
        if (pass + 1 < passes) sync_some<1, 32 * kMathWarps>();
    }
#endif
}

}  // namespace billfish
