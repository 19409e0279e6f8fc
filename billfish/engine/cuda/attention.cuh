// attend: split-KV decode attention over pages of 4, 8 or 16 bits, sm_90 (COMET 5). rope_attend:
// the same of a projection's q, k and v, with RoPE, and k and v stored on the way.
//
// An item is one chunk of a sequence's pages of one KV head; the query heads that share it are the
// n of mma.m16n8k16. A block takes item after item: one producer warp fetches ahead, and four
// consumer warps take a tile of 16 tokens each of every page, with accumulators of their own.
//
//     S^T (16 tokens x 8 heads) = K Q^T        K's codes are the A fragment as they lie in memory
//     O^T (16 channels x 8 heads) += V^T P^T   V's, too; P^T is S^T transposed in registers
//
// Codes are multiplied raw (dequant.cuh). K's step and low are applied to the scores, V's step to
// the softmax weights and V's low to their sum: a code costs 0.6 instructions and no rounding.
//
// A block adds its warps' sums in order, and the block that finishes a sequence's last chunk adds
// the chunks' in order: bits depend on where chunks begin (chunks.py) and on nothing else. A block
// does not wait for the atomic that says whether it was the last: it reads the answer at the end of
// its next item.
//
// A stage is 8 KB in every format: 64, 32 or 16 tokens, and its slot is empty once 4, 2 or 1 warps
// have read it. Six stages for each of 3 blocks, or eight for each of 2, are four times the bytes
// that must be in flight on an SM (34 KB per us). Pages of earlier steps are fetched before the
// kernel that writes this step's token has ended (PDL).
//
// rope_attend saves a launch: 2 % of a step of 8B, less where all texts are short (LOG 2026-11-19).
#pragma once

#include "billfish/attend_item.cuh"

namespace billfish {

#if __CUDA_ARCH__ >= 900

// Partial results, of the warps of a block or of the chunks of a sequence. Of each: (kDim / 2 rows,
// pairs of heads) x (channels n and n + 8 of both), and for each pair the largest scores and the
// sums of weights. There are 1, 2 or 4 pairs, as the group of heads needs.
template <int kDim>
struct WarpParts {
    u32 exchange, weight;
    BILLFISH_DEVICE float4 weights(int warp, int pair) const {
        return load_smem_floats(weight + (warp * 4 + pair) * 16);
    }
    BILLFISH_DEVICE float4 channels(int warp, int unit) const {
        return load_smem_floats(exchange + warp * kDim * 32 + unit * 16);
    }
};
template <int kDim>
struct ChunkParts {
    static constexpr int kFloats = kDim * 8 + 16;
    const float* first;
    u64 stride;  // from a chunk to the next
    BILLFISH_DEVICE float4 weights(int chunk, int pair) const {
        return load_global_16(first + chunk * stride + kDim * 8 + pair * 4);
    }
    BILLFISH_DEVICE float4 channels(int chunk, int unit) const {
        return load_global_16(first + chunk * stride + unit * 4);
    }
};

// One thread's share of the combined result: 2 channels of 2 heads.
struct Total {
    float most[2], weight[2], o[4];

    // In order; kAtOnce are loaded together, since one by one each chunk takes 1 us.
    template <int kAtOnce, class Parts>
    BILLFISH_DEVICE void add(const Parts& parts, int count, int unit, int pair) {
        most[0] = most[1] = __uint_as_float(0xff800000u);
        weight[0] = weight[1] = o[0] = o[1] = o[2] = o[3] = 0;
#pragma unroll 1
        for (int i = 0; i < count; i += kAtOnce) {
            float4 w[kAtOnce], v[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const int part = min(i + j, count - 1);
                w[j] = parts.weights(part, pair), v[j] = parts.channels(part, unit);
            }
            const float before[2] = {most[0], most[1]};
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j)
                most[0] = fmaxf(most[0], w[j].x), most[1] = fmaxf(most[1], w[j].z);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const float by = exp2_fast(before[k] - most[k]);
                weight[k] *= by, o[k] *= by, o[k + 2] *= by;
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                if (i + j >= count) break;
                const float to[2] = {exp2_fast(w[j].x - most[0]), exp2_fast(w[j].z - most[1])};
                weight[0] = fmaf(to[0], w[j].y, weight[0]);
                weight[1] = fmaf(to[1], w[j].w, weight[1]);
                o[0] = fmaf(to[0], v[j].x, o[0]), o[1] = fmaf(to[1], v[j].y, o[1]);
                o[2] = fmaf(to[0], v[j].z, o[2]), o[3] = fmaf(to[1], v[j].w, o[3]);
            }
        }
    }
    template <class T, int kDim>
    BILLFISH_DEVICE void store(u16* out, int row, int pair, int group) const {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            if (2 * pair + k >= group) continue;
            const float by = reciprocal_fast(weight[k]);
            u16* to = out + (2 * pair + k) * kDim + row / 8 * 16 + row % 8;
            to[0] = T::from_float(o[k] * by), to[8] = T::from_float(o[k + 2] * by);
        }
    }
};

// The producer warp: loads everything in the order in which the consumers use it.
template <class F, int kDim, class Given>
BILLFISH_DEVICE void fetch_items(u32 smem, const unsigned char* pool, const Given& given,
                                 const int* table, const Chunk* rows, int items, int kv_heads,
                                 int group, bool fresh) {
    using Block = AttendBlock<F, kDim>;
    using R = PageRecord<F, kDim>;
    constexpr int kStages = Block::kStages;
    const u32 full = smem + Block::kBarriers, empty = full + kStages * 8;
    const u32 told = empty + kStages * 8, heard = told + 16;
    const int lane = threadIdx.x % 32, blocks = gridDim.x;
    int item = blockIdx.x, slot = 0, count = 0;
    u32 parity = 1;  // the first round finds every slot empty
    const u64 policy = evict_first_policy(), keep = keep_policy();
    Work now, ahead;
    now.find(rows, item, items, kv_heads);
    now.name(table, 0);

    const auto fetch = [&](int stage) {
        const int page = stage / Block::kOfPage, within = stage % Block::kOfPage;
        const int token = now.chunk.token + stage * Block::kTokens;
        if (page / 32 != now.known) now.name(table, page / 32);
        const u64 name = shuffle(now.names, page % 32);
        if (lane == 0) {
            const unsigned char* record = pool + (name * kv_heads + now.head) * R::kBytes;
            const u32 to = smem + slot * Block::kBytes, barrier = full + 8 * slot;
            barrier_wait(empty + 8 * slot, parity);
            if constexpr (Block::kOfPage == 1) {
                barrier_arrive_expect(barrier, Block::kBytes);
                copy_bulk(to, record, R::kBytes, barrier, policy);
            } else if (token >= now.chunk.length || token + Block::kTokens <= now.chunk.begin) {
                barrier_arrive(barrier);  // none of its tokens is attended to
            } else {
                const unsigned char* part = record + within * Block::kV;
                barrier_arrive_expect(barrier, Block::kBytes);
                copy_bulk(to, part, Block::kV, barrier, policy);
                copy_bulk(to + Block::kV, part + R::kV, Block::kV, barrier, policy);
                if constexpr (R::kGridBytes > 0)
                    copy_bulk(to + Block::kGrids,
                              record + R::kGrids + within * Block::kTokens * R::kGridBytes,
                              Block::kTokens * R::kGridBytes, barrier, policy);
            }
        }
        if (++slot == kStages) slot = 0, parity ^= 1;
    };

    // All stages before the one with the newest token were written by earlier steps, unless a
    // prompt's tokens are rows of this one. Where that token comes raw, all that is fetched is old.
    int stage = 0;
    if constexpr (!Given::kRaw) {
        const int old = fresh ? 0 : (now.chunk.length - 1 - now.chunk.token) / Block::kTokens;
        while (stage < min(min(old, now.chunk.pages * Block::kOfPage), kStages)) fetch(stage++);
        dependency_wait();
    }
    for (; item < items; item += blocks, ++count) {
        if (lane == 0) {
            const u32 to = smem + Block::kItems + count % 2 * Block::kItem;
            barrier_wait(heard + count % 2 * 8, (count / 2 + 1) % 2);
            Told::tell(to + Block::kAbout, now, item, kv_heads);
            if constexpr (Given::kRaw)
                barrier_arrive(told + count % 2 * 8);
            else
                given.template copy<kDim>(to, told + count % 2 * 8, now.chunk, now.head, kv_heads,
                                          group, keep);
        }
        ahead.find(rows, item + blocks, items, kv_heads);
        const int all = now.chunk.pages * Block::kOfPage;
        const bool more = item + blocks < items;
        if (stage == all && more) ahead.name(table, 0);
        for (; stage < all; ++stage) {
            if (stage + 1 == all && more) ahead.name(table, 0);  // a wait hides it
            fetch(stage);
        }
        now = ahead, stage = 0;
    }
}

// The four consumer warps: attention of tiles, then the reduction.
template <class T, class F, int kDim, class Given>
BILLFISH_DEVICE void take_items(u32 smem, const Given& given, u16* out, float* workspace,
                                u32* arrived, int items, int kv_heads, int group, float scale) {
    using Block = AttendBlock<F, kDim>;
    constexpr int kStages = Block::kStages, kThreads = kTakers * 32;
    const u32 full = smem + Block::kBarriers, empty = full + kStages * 8;
    const u32 told = empty + kStages * 8, heard = told + 16, owed = smem + Block::kOwed;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int shift = group <= 2 ? 0 : group <= 4 ? 1 : 2;  // log2 of pairs of heads
    const int pair = thread & (1 << shift) - 1, units = kDim / 2 << shift;
    const Lane at = Lane::of<T, F, kDim>(warp % Block::kShare);
    const WarpParts<kDim> warps{smem + Block::kExchange, smem + Block::kWeights};
    int slot = warp / Block::kShare;
    u32 parity = 0, which = 0, item_parity = 0;
    u32 before = ~0u;  // in thread 0: chunks that were finished before the last item's
    bool owes = false;
    // Rather than polling a barrier, beside the product that makes q.
    if constexpr (!Given::kRaw) dependency_wait();

    // If the previous item was the last chunk of its sequence to finish: combines the chunks.
    const auto ask = [&] {
        if (thread != 0) return;
        uint4 v = load_smem_16(owed);  // row, first item, chunks
        if (before + 1 != v.z) {
            v.z = 0;
        } else {
            arrived[v.x] = 0;
            fence_gpu();
        }
        store_smem_bits_16(owed, v);
    };
    const auto settle = [&] {
        const uint4 v = load_smem_16(owed);
        if (v.z == 0) return;
        constexpr int kFloats = ChunkParts<kDim>::kFloats;
        const ChunkParts<kDim> parts{workspace + static_cast<u64>(v.y) * kFloats,
                                     static_cast<u64>(kv_heads) * kFloats};
        for (int unit = thread; unit < units; unit += kThreads) {
            Total total;
            total.add<8>(parts, v.z, unit, pair);
            total.store<T, kDim>(out + static_cast<u64>(v.x) * group * kDim, unit >> shift, pair,
                                 group);
        }
    };

    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const u32 about = smem + Block::kItems + which * Block::kItem;
        barrier_wait(told + which * 8, item_parity);
        Told of;
        of.hear(about + Block::kAbout);
        if constexpr (Given::kRaw) {
            given.template take<T, Block, kDim>(about, item == blockIdx.x, kv_heads, group);
            sync_some<1, kThreads>();
        }
        Queries<T, F, kDim> queries;
        queries.load(about, group, scale);
        Sums<kDim> sums;
        sums.clear();
        int token = of.token + warp * kTile;
        for (const int end = of.token + of.pages * kPageTokens; token < end; token += kPageTokens) {
            const u32 stage = smem + slot * Block::kBytes, done = empty + 8 * slot;
            barrier_wait(full + 8 * slot, parity);
            if constexpr (Given::kRaw) {
                if (of.span.length > token && of.span.length <= token + kTile) {
                    given.template append<T, F, kDim>(about, stage, kv_heads);
                    if (item + gridDim.x < items) fence_copies();  // the stage is used again
                }
            }
            if (of.span.has_all(token, kTile))
                take_tile<T, F, kDim, true>(sums, queries, at, stage, done, token, of.span);
            else if (of.span.has_some(token, kTile))
                take_tile<T, F, kDim, false>(sums, queries, at, stage, done, token, of.span);
            else if (at.number == 0)
                barrier_arrive(done);
            slot += Block::kStep;
            if (slot >= kStages) slot -= kStages, parity ^= 1;
        }

        sums.template finish<F>();
        if ((lane % 4) >> shift == 0) {
            const u32 to = (lane / 4 << shift) + lane % 4;
#pragma unroll
            for (int t = 0; t < kDim / 16; ++t)
                store_smem_16(warps.exchange + warp * kDim * 32 + ((t * 8 << shift) + to) * 16,
                              sums.o[t]);
            const float all[4] = {sums.most[0], sums.weight[0], sums.most[1], sums.weight[1]};
            if (lane < 4) store_smem_16(warps.weight + (warp * 4 + lane) * 16, all);
        }
        of.hear_more(about + Block::kAbout);
        if (owes) ask();
        sync_some<1, kThreads>();
        if (owes) settle();
        owes = of.chunks > 1;
        float* part = workspace + static_cast<u64>(of.item) * ChunkParts<kDim>::kFloats;
        for (int unit = thread; unit < units; unit += kThreads) {
            Total total;
            total.add<kTakers>(warps, kTakers, unit, pair);
            if (owes) {
                *reinterpret_cast<float4*>(part + unit * 4) =
                    make_float4(total.o[0], total.o[1], total.o[2], total.o[3]);
                if (unit == pair)
                    *reinterpret_cast<float4*>(part + kDim * 8 + pair * 4) = make_float4(
                        total.most[0], total.weight[0], total.most[1], total.weight[1]);
            } else {
                total.store<T, kDim>(out + static_cast<u64>(of.row) * group * kDim, unit >> shift,
                                     pair, group);
            }
        }
        sync_some<1, kThreads>();
        if (thread == 0) {
            barrier_arrive(heard + which * 8);
            if (owes) {
                store_smem_bits_16(owed, {of.row, of.item - of.number * kv_heads, of.chunks, 0});
                before = add_release(arrived + of.row, 1);
            }
        }
        which ^= 1;
        if (which == 0) item_parity ^= 1;
    }
    if (owes) {
        ask();
        sync_some<1, kThreads>();
        settle();
    }
}

#endif

// Both kernels. `head` is the number of chunks, where in `table` their rows begin, and whether this
// step wrote more than the newest token of a sequence; `table` holds the page table, too; `scale`
// is log2(e) times the model's; `arrived` (sequences x kv heads) is 0 before and after.
#if __CUDA_ARCH__ >= 900
template <class T, class F, int kDim, class Given>
BILLFISH_DEVICE void attend_to(const unsigned char* pool, const Given& given, u16* out,
                               const int* __restrict__ table, const int* __restrict__ head,
                               float* workspace, u32* arrived, int kv_heads, int group,
                               float scale) {
    using Block = AttendBlock<F, kDim>;
    extern __shared__ __align__(128) unsigned char smem[];
    const u32 base = smem_address(smem), full = base + Block::kBarriers;
    launch_dependents();
    const int items = head[0] * kv_heads, fresh = head[2];
    const Chunk* rows = reinterpret_cast<const Chunk*>(table + head[1]);
    if (static_cast<int>(blockIdx.x) >= items) {  // frees its slot for the next kernel
        // One block waits all the same: a kernel that waits for this one relies on all before it.
        if (blockIdx.x == 0) dependency_wait();
        return;
    }
    if (threadIdx.x == kTakers * 32) {
        for (int i = 0; i < Block::kStages; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(full + 8 * (Block::kStages + i), Block::kShare);
        }
        for (int i = 0; i < 4; ++i) barrier_init(full + 8 * (2 * Block::kStages + i), 1);
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= kTakers * 32)
        fetch_items<F, kDim>(base, pool, given, table, rows, items, kv_heads, group, fresh);
    else
        take_items<T, F, kDim>(base, given, out, workspace, arrived, items, kv_heads, group,
                               scale);
}
#endif

// `pool` is one layer's (pages, kv heads) records; `q` and `out` are (sequences, heads, kDim).
template <class T, class F, int kDim>
__global__ void __launch_bounds__(kAttendThreads, kAttendResident)
attend(const unsigned char* __restrict__ pool, const u16* q, u16* out,
       const int* __restrict__ table, const int* __restrict__ head, float* workspace,
       u32* arrived, int kv_heads, int group, float scale) {
#if __CUDA_ARCH__ >= 900
    attend_to<T, F, kDim>(pool, TurnedQueries{q}, out, table, head, workspace, arrived, kv_heads,
                          group, scale);
#endif
}

// The same of `qkv` (sequences, heads + 2 kv heads, kDim), of a step that writes no more than the
// newest token of each sequence; `rotary` is a multiple of 8.
template <class T, class F, int kDim>
__global__ void __launch_bounds__(kAttendThreads, kAttendResident)
rope_attend(unsigned char* pool, const u16* qkv, const u16* cos, const u16* sin,
            const u16* __restrict__ q_norm, const u16* __restrict__ k_norm, int rotary, float eps,
            float limit, u16* out, const int* __restrict__ table, const int* __restrict__ head,
            float* workspace, u32* arrived, int kv_heads, int group, float scale) {
#if __CUDA_ARCH__ >= 900
    const Projected given{qkv, cos, sin, q_norm, k_norm, pool, rotary, eps, limit};
    attend_to<T, F, kDim>(pool, given, out, table, head, workspace, arrived, kv_heads, group,
                          scale);
#endif
}

}  // namespace billfish
