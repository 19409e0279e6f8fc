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

// A cluster's share: bands [begin, end) of all items laid end to end.
struct ItemSpan {
    int begin, end, most;
    BILLFISH_DEVICE ItemSpan(u32 items, u32 bands) {
        const u32 total = items * bands, index = cluster_index(), count = cluster_count();
        begin = total * index / count;  // some 10^5 bands x 10^2 clusters
        end = total * (index + 1) / count;
        most = (total + count - 1) / count;
    }
};

// Tables in shared memory, from `base` on: the number of items, pairs of each expert, the cluster's
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

    BILLFISH_DEVICE ItemSpan span(int bands) const { return ItemSpan(load_smem_4(base), bands); }
    BILLFISH_DEVICE int expert(int i) const { return load_smem_4(item(i)) & 0xffff; }
    BILLFISH_DEVICE int tokens(int i) const {  // of an own item
        const u32 v = load_smem_4(item(i));
        return min(kTokens, static_cast<int>(load_smem_4(count(v & 0xffff)) - (v >> 16) * kTokens));
    }
    BILLFISH_DEVICE int pair(int i, int token) const { return load_smem_2(place(i, token)); }

    // Before `make`, by all kThreads threads of the block; needs nothing of earlier kernels.
    template <int kThreads>
    BILLFISH_DEVICE void clear() const {
        for (int i = threadIdx.x; i < experts; i += kThreads) store_smem_4(count(i), 0);
    }

    // `index`: 64-bit numbers, of which the lower halves are read; not through L1, since this may
    // run before the kernel has waited for the previous one.
    template <int kThreads>
    BILLFISH_DEVICE void make(const u32* index, int pairs, int bands) const {
        const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
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
        if (warp == 0) list_items(pairs, lane);
        __syncthreads();
        const ItemSpan mine = span(bands);
        const int first = mine.begin / bands;
        const int last = mine.begin < mine.end ? (mine.end - 1) / bands : first - 1;
        for (int i = warp; i <= last - first; i += kThreads / 32)
            list_pairs(i, load_smem_4(listed(first + i, pairs)), pairs, lane);
        __syncthreads();
    }

private:
    // By one warp, 32 pairs at a time. Every kTokens-th pair of an expert begins an item.
    BILLFISH_DEVICE void list_items(int pairs, int lane) const {
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
        if (lane == 0) store_smem_4(base, items);
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
