// Around the products of a layer's experts, for every scheme: which experts a token gets, which
// rows an expert, their activations side by side, and the weighted sum of a token's experts. Pairs
// and items are those of routing.cuh. Launched early (PDL); nothing is read before the previous
// kernel has ended.
#pragma once

#include "billfish/mma.cuh"
#include "billfish/warp.cuh"

namespace billfish {

constexpr int kRouteThreads = 1024, kRouteWarps = kRouteThreads / 32;
constexpr int kGatherThreads = 256, kCombineThreads = 128;
constexpr int kItemInts = 4, kRouteBatch = 4;
constexpr int kChooseThreads = 128, kMostExperts = 512;

constexpr float kNone = -3.4e38f;  // as a logit: below all that 16 bits hold

// A router's choice: softmax of the logits (tokens, experts) in fp32, its `several` largest, of
// equal ones the first, and `normalized` these divided by their sum. A warp for each token. `index`
// and `weights` are (tokens, several); weights are fp32 (kWide) or T.
template <class T, bool kWide>
__global__ void __launch_bounds__(kChooseThreads)
choose(const u16* logits, u64* index, void* weights, int tokens, int experts, int several,
       bool normalized) {
#if __CUDA_ARCH__ >= 900
    launch_dependents();
    dependency_wait();
    const int token = blockIdx.x * (kChooseThreads / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (token >= tokens) return;
    const u16* const mine = logits + static_cast<u64>(token) * experts;
    constexpr int kEach = kMostExperts / 32;  // of a lane: experts lane, lane + 32 ...
    float value[kEach], most = kNone, sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int expert = lane + i * 32;
        value[i] = expert < experts ? T::to_float(mine[expert]) : kNone;
        most = fmaxf(most, value[i]);
    }
    most = max_over(most);
    // As whole numbers, which compare like the numbers whose bits they are; 0: none, or taken.
    u32 key[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const float v = exp2_fast(1.4426950408889634f * (value[i] - most));
        key[i] = lane + i * 32 < experts ? float_bits(v) + 1 : 0;
        sum += v;
    }
    sum = sum_over(sum);
    float part = 0, all = 0;  // lane i has choice i
    u32 choice = 0;
    for (int i = 0; i < several; ++i) {
        u32 best = 0, at = 0;
#pragma unroll
        for (int j = 0; j < kEach; ++j)
            if (key[j] > best) best = key[j], at = lane + j * 32;
        const u32 top = max_over_warp(best), first = ~max_over_warp(best == top ? ~at : 0);
#pragma unroll
        for (int j = 0; j < kEach; ++j)
            if (lane + j * 32 == first) key[j] = 0;
        const float share = __uint_as_float(top - 1) / sum;
        all += share;
        if (lane == i) part = share, choice = first;
    }
    if (lane >= several) return;
    const u64 to = static_cast<u64>(token) * several + lane;
    const float weight = normalized ? part / all : part;
    index[to] = choice;
    if (kWide)
        static_cast<float*>(weights)[to] = weight;
    else
        static_cast<u16*>(weights)[to] = T::from_float(weight);
#endif
}

// One block: a stable counting sort of the pairs by expert. `place` (pairs): where a pair's row is.
// `items`: their number in the first of four, then (expert, first row, end of its rows, 0) for each
// `tokens` rows or fewer of an expert. Shared memory: pairs of each expert by warp, then all of
// them, u32. Every warp counts its own stretch of pairs, 32 at a time: no atomics, and the order
// does not depend on the run.
__global__ void __launch_bounds__(kRouteThreads)
route(const u32* index, int* place, int* items, int pairs, int experts, int tokens) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char smem[];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const u32 all = smem_address(smem), mine = all + (warp + 1) * experts * 4;
    const int stretch = (pairs + kRouteThreads - 1) / kRouteThreads * 32, begin = warp * stretch;
    const int end = min(pairs, begin + stretch);
    launch_dependents();
    dependency_wait();
    for (int i = lane; i < experts; i += 32) store_smem_4(mine + i * 4, 0);
    __syncwarp();
    // Calls visit(pair, its expert, lanes before it with the same) and counts the pairs.
    const auto walk = [&](auto visit) {
        for (int first = begin; first < end; first += 32 * kRouteBatch) {
            u32 found[kRouteBatch];
#pragma unroll
            for (int i = 0; i < kRouteBatch; ++i) {  // all in flight
                const int pair = first + i * 32 + lane;
                found[i] = pair < end ? load_global_4(index + 2 * pair) : ~0u;
            }
#pragma unroll
            for (int i = 0; i < kRouteBatch; ++i) {
                const u32 same = alike(found[i]), before = same & (1u << lane) - 1;
                if (found[i] != ~0u) visit(first + i * 32 + lane, found[i], before);
                __syncwarp();
                if (found[i] != ~0u && before == 0) add_smem_4(mine + found[i] * 4, __popc(same));
                __syncwarp();
            }
        }
    };
    walk([](int, u32, u32) {});
    __syncthreads();
    for (int i = thread; i < experts; i += kRouteThreads) {
        u32 sum = 0;
        for (int other = 1; other <= kRouteWarps; ++other) {
            const u32 at = all + (other * experts + i) * 4, count = load_smem_4(at);
            store_smem_4(at, sum);  // of the warps before
            sum += count;
        }
        store_smem_4(all + i * 4, sum);
    }
    __syncthreads();
    if (warp == 0) {
        int row = 0, item = 0;
        for (int first = 0; first < experts; first += 32) {
            const int expert = first + lane;
            const int rows = expert < experts ? load_smem_4(all + expert * 4) : 0;
            const int some = (rows + tokens - 1) / tokens;
            const int last = row + sum_up_to(rows, lane), behind = item + sum_up_to(some, lane);
            if (expert < experts) store_smem_4(all + expert * 4, last - rows);
            for (int i = 0; i < some; ++i) {
                int* const to = items + (1 + behind - some + i) * kItemInts;
                const int from = last - rows + i * tokens;
                to[0] = expert, to[1] = from, to[2] = min(from + tokens, last), to[3] = 0;
            }
            row = shuffle(static_cast<u32>(last), 31), item = shuffle(static_cast<u32>(behind), 31);
        }
        if (lane == 0) items[0] = item;
    }
    __syncthreads();
    walk([&](int pair, u32 expert, u32 before) {
        const u32 first = load_smem_4(all + expert * 4) + load_smem_4(mine + expert * 4);
        place[pair] = first + __popc(before);
    });
#endif
}

// out (pairs, width) row place[pair] = x row pair / several; a warp for each pair. `chunks` of 16
// bytes in a row.
__global__ void __launch_bounds__(kGatherThreads)
gather_rows(const uint4* x, const int* place, uint4* out, int pairs, int several, int chunks) {
#if __CUDA_ARCH__ >= 900
    launch_dependents();
    dependency_wait();
    const int pair = blockIdx.x * (kGatherThreads / 32) + threadIdx.x / 32;
    if (pair >= pairs) return;
    const uint4* const from = x + static_cast<u64>(pair / several) * chunks;
    uint4* const to = out + static_cast<u64>(place[pair]) * chunks;
    for (int i = threadIdx.x % 32; i < chunks; i += 32) to[i] = from[i];
#endif
}

// out (tokens, width) = the sum of a token's `several` rows times their weights, in fp32, in the
// order of its choices. Rows are at place[pair], or, without it, at pair. Weights are fp32 (kWide)
// or T. Grid (parts of a row, tokens); a thread has 8 numbers.
template <class T, bool kWide>
__global__ void __launch_bounds__(kCombineThreads)
combine(const uint4* rows, const int* place, const void* weights, uint4* out, int several,
        int chunks) {
#if __CUDA_ARCH__ >= 900
    launch_dependents();
    dependency_wait();
    const int at = blockIdx.x * kCombineThreads + threadIdx.x;
    if (at >= chunks) return;
    float sum[8] = {};
#pragma unroll 8
    for (int i = 0; i < several; ++i) {
        const int pair = blockIdx.y * several + i;
        const u64 row = place == nullptr ? pair : place[pair];
        const float weight = kWide ? static_cast<const float*>(weights)[pair]
                                   : T::to_float(static_cast<const u16*>(weights)[pair]);
        const uint4 v = rows[row * chunks + at];
        const u32 two[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 8; ++j)
            sum[j] = __fmaf_rn(weight, T::to_float(two[j / 2] >> j % 2 * 16 & 0xffff), sum[j]);
    }
    out[static_cast<u64>(blockIdx.y) * chunks + at] = {T::pack(sum[0], sum[1]),
                                                       T::pack(sum[2], sum[3]),
                                                       T::pack(sum[4], sum[5]),
                                                       T::pack(sum[6], sum[7])};
#endif
}

}  // namespace billfish
