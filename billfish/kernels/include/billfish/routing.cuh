// Which tokens belong to which expert, for products that run all experts of a layer in one launch.
//
// A pair is a token and one of its experts: pair p is choice p % several of token p / several, and
// `index` has its expert. An item is up to kTokens pairs of one expert, the first ones first; items
// are ordered by their first pair. A layer's work is items x bands of 64 outputs; every cluster has
// the same share of it, and finds its own items, which saves a launch before the product.
#pragma once

#include "billfish/warp.cuh"

namespace billfish {

#if __CUDA_ARCH__ >= 900

// A cluster's share: bands [begin, end) of all items laid end to end, in passes of up to
// `at_once` of one item. Where one pass suffices for each cluster, no share reaches into a second
// item, which would be a pass more (one token, 8 experts x 24 bands, 66 clusters: 64 of them have 3
// bands of one item, instead of two passes for seven).
struct ItemSpan {
    int begin, end, most;
    static BILLFISH_DEVICE ItemSpan of(u32 items, u32 bands, u32 at_once) {
        const u32 total = items * bands, index = cluster_index(), count = cluster_count();
        const u32 share = (total + count - 1) / count, passes = (bands + share - 1) / share;
        ItemSpan mine{0, 0, static_cast<int>(share)};
        if (share <= at_once && items * passes <= count) {
            const u32 item = index / passes, pass = index - item * passes;
            if (item >= items) return mine;
            mine.begin = item * bands + bands * pass / passes;
            mine.end = item * bands + bands * (pass + 1) / passes;
        } else {
            mine.begin = total * index / count;  // some 10^5 bands x 10^2 clusters
            mine.end = total * (index + 1) / count;
        }
        return mine;
    }
};

// Tables in shared memory, from `base` on: the cluster's share, pairs of each expert, the cluster's
// own items (at most `own`: experts_tile.py) and their pairs, the expert of each pair, all items.
// An item is its expert, and from bit 16 on which kTokens of the expert's pairs it has.
template <int kTokens>
struct Routing {
    u32 base;
    int experts, own;

    constexpr BILLFISH_DEVICE u32 count(int expert) const { return base + 16 + expert * 4; }
    constexpr BILLFISH_DEVICE u32 item(int i) const { return count(experts) + i * 4; }
    constexpr BILLFISH_DEVICE u32 place(int i, int token) const {
        return item(own) + (i * kTokens + token) * 2;
    }
    constexpr BILLFISH_DEVICE u32 choice(int pair) const { return place(own, 0) + pair * 2; }
    constexpr BILLFISH_DEVICE u32 listed(int i, int pairs) const {
        return choice(pairs + pairs % 2) + i * 4;
    }

    BILLFISH_DEVICE ItemSpan span() const {
        const uint4 v = load_smem_16(base);
        return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z)};
    }
    BILLFISH_DEVICE int expert(int i) const { return load_smem_4(item(i)) & 0xffff; }
    BILLFISH_DEVICE int tokens(int i) const {  // of an own item
        const u32 v = load_smem_4(item(i));
        return min(kTokens, static_cast<int>(load_smem_4(count(v & 0xffff)) - (v >> 16) * kTokens));
    }
    BILLFISH_DEVICE int pair(int i, int token) const { return load_smem_2(place(i, token)); }

    // Before `make`, by all kThreads threads of the block; needs nothing of earlier kernels.
    template <int kThreads>
    BILLFISH_DEVICE void clear(int pairs) const {
        if (pairs <= 32) return;  // by_lanes
        for (int i = threadIdx.x; i < experts; i += kThreads) store_smem_4(count(i), 0);
    }

    // `index`: 64-bit numbers, of which the lower halves are read; not through L1, since this may
    // run before the kernel has waited for the previous one.
    template <int kThreads, int kBands>
    BILLFISH_DEVICE void make(const u32* index, int pairs, int bands) const {
        const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
        if (pairs <= 32) {
            if (warp == 0) by_lanes<kBands>(index, pairs, bands, lane);
            __syncthreads();
            return;
        }
        for (int first = thread; first < pairs; first += 4 * kThreads) {
            u32 found[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)  // all in flight
                if (first + i * kThreads < pairs)
                    found[i] = load_global_4(index + 2 * (first + i * kThreads));
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (first + i * kThreads < pairs)
                    store_smem_2(choice(first + i * kThreads), found[i]);
        }
        __syncthreads();
        if (warp == 0) keep(ItemSpan::of(list_items(pairs, lane), bands, kBands), lane);
        __syncthreads();
        const ItemSpan mine = span();
        const int first = mine.begin / bands, items = own_items(mine, bands);
        for (int i = warp; i < items; i += kThreads / 32)
            list_pairs(i, load_smem_4(listed(first + i, pairs)), pairs, lane);
        __syncthreads();
    }

private:
    BILLFISH_DEVICE void keep(const ItemSpan& mine, int lane) const {
        const u32 v[4] = {static_cast<u32>(mine.begin), static_cast<u32>(mine.end),
                          static_cast<u32>(mine.most), 0};
        if (lane == 0) store_smem_16(base, v);
    }

    static BILLFISH_DEVICE int own_items(const ItemSpan& mine, int bands) {
        return mine.begin < mine.end ? (mine.end - 1) / bands - mine.begin / bands + 1 : 0;
    }

    // All of it by one warp, a pair a lane, without a table of pairs or a count to clear: weights
    // wait for this.
    template <int kBands>
    BILLFISH_DEVICE void by_lanes(const u32* index, int pairs, int bands, int lane) const {
        const bool is = lane < pairs;
        const u32 expert = is ? load_global_4(index + 2 * lane) : ~0u, below = (1u << lane) - 1;
        const u32 same = alike(expert), rank = __popc(same & below);
        const u32 all = ballot(is && rank % kTokens == 0);
        const ItemSpan mine = ItemSpan::of(__popc(all), bands, kBands);
        keep(mine, lane);
        u32 left = same;  // from the first pair of its item on
        for (u32 i = 0; i < rank / kTokens * kTokens; ++i) left &= left - 1;
        const int first = __popc(~left & left - 1);
        const int i = __popc(all & (1u << first) - 1) - mine.begin / bands;
        if (is && rank == 0) store_smem_4(count(expert), __popc(same));
        if (!is || i < 0 || i >= own_items(mine, bands)) return;
        if (first == lane) store_smem_4(item(i), expert | rank / kTokens << 16);
        store_smem_2(place(i, rank % kTokens), lane);
    }

    // By one warp, 32 pairs at a time. Every kTokens-th pair of an expert begins an item.
    BILLFISH_DEVICE int list_items(int pairs, int lane) const {
        int items = 0;
        for (int first = 0; first < pairs; first += 32) {
            const bool is = first + lane < pairs;
            const u32 expert = is ? load_smem_2(choice(first + lane)) : ~0u;
            const u32 same = alike(expert), before = same & (1u << lane) - 1;
            const u32 rank = __popc(before) + (is ? load_smem_4(count(expert)) : 0);
            const bool begins = is && rank % kTokens == 0;
            const u32 all = ballot(begins);
            if (begins)
                store_smem_4(listed(items + __popc(all & (1u << lane) - 1), pairs),
                             expert | rank / kTokens << 16);
            items += __popc(all);
            __syncwarp();
            if (is && before == 0) add_smem_4(count(expert), __popc(same));
            __syncwarp();
        }
        return items;
    }

    BILLFISH_DEVICE void list_pairs(int i, u32 v, int pairs, int lane) const {
        int token = -static_cast<int>((v >> 16) * kTokens);
        if (lane == 0) store_smem_4(item(i), v);
        for (int first = 0; first < pairs; first += 32) {
            const bool is =
                first + lane < pairs && load_smem_2(choice(first + lane)) == (v & 0xffff);
            const u32 all = ballot(is);
            const int mine = token + __popc(all & (1u << lane) - 1);
            if (is && mine >= 0 && mine < kTokens) store_smem_2(place(i, mine), first + lane);
            token += __popc(all);
        }
    }
};

#endif

}  // namespace billfish
