// rope_store: q, k, v of one projection -> RoPE -> q for attention, k and v coded into the cache;
// gather decodes them again. heads.cuh has what is done to one head.
//     block (token, kv head)   a warp for each head of the group, one for k, one for v
//     kTurned (kv4)            rotation.py's k' = (k - mean) Tk, q' = q Tq: all warps, 16 outputs
//                              each. k' is coded in four blocks of channels with error feedback:
//                              the error of each, times `carry`, is added to the later ones.
//                              Four tokens at once, and the next four are fetched meanwhile: what
//                              a token takes is latency
// Decodes of kv16 and kv8 do not need it: rope_attend (attention.cuh) does the same.
#pragma once

#include "billfish/heads.cuh"

namespace billfish {

// The record of a slot and this block's kv head.
template <class R>
BILLFISH_DEVICE unsigned char* record_of(unsigned char* pool, int slot) {
    return pool + (static_cast<u64>(slot / kPageTokens) * gridDim.y + blockIdx.y) * R::kBytes;
}

constexpr int kMostGroup = 8;   // query heads of a kv head, where they are rotated
constexpr int kBlocks = 4;      // of channels, with error feedback: kv/codes.py's BLOCKS
constexpr int kTogether = 4;    // tokens: a number and its remainder are two of mma's 8 columns

// d (16 outputs, 8 rows) = a matrix, a fragment for each 16 inputs, times rows in shared memory.
template <int kSteps>
BILLFISH_DEVICE void turn(float (&d)[4], const u32 (&a)[kSteps][4], const u16* row, int pair) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const u32* b = reinterpret_cast<const u32*>(row + step * 16) + pair;
        if (step == 0) Half::mma_first(d, a[0], b[0], b[4]);
        else Half::mma(d, a[step], b[0], b[4]);
    }
}

// What the warps of a block share of its tokens' k'.
template <int kHeadDim>
struct Told {
    uint4 carry[kHeadDim / 16 / kBlocks * (kBlocks - 1)][2 * kHeadDim];  // private to each thread
    float4 mean[32];                                      // of the warp that has k, by lane
    u16 errors[kTogether][2][kHeadDim + 8];               // in steps: fp16, and the remainder
    float lowest[kTogether][kHeadDim / 16], highest[kTogether][kHeadDim / 16];  // of each warp
};
template <>
struct Told<0> {};

// Codes k' with error feedback, in units of the step: lane % 4 is the token, and its slot < 0 if
// nothing is stored.
template <class T, class R, int kHeadDim>
BILLFISH_DEVICE void store_carried(unsigned char* pool, int slot, int warp, int lane,
                                   float (&x)[2], Told<kHeadDim>& told) {
    constexpr int kWarps = kHeadDim / 16, kPer = kWarps / kBlocks;  // warps for a block of channels
    const int r = lane / 4, which = lane % 4, first = warp * 16 + 2 * r;
    float lowest = told.lowest[which][0], highest = told.highest[which][0];
    bool strange = lowest != lowest;
#pragma unroll
    for (int i = 1; i < kWarps; ++i) {
        const float other = told.lowest[which][i];
        strange |= other != other;
        lowest = fminf(lowest, other), highest = fmaxf(highest, told.highest[which][i]);
    }
    const u32 grid = grid_of<T, R::kBits>(strange ? not_a_number() : lowest, highest);
    const float step = T::to_float(grid & 0xffff), low = T::to_float(grid >> 16);
    x[0] = (x[0] - low) / step, x[1] = (x[1] - low) / step;
#pragma unroll
    for (int now = 0; now < kBlocks - 1; ++now) {
        if (warp / kPer == now) {
            const float a = x[0] - code_of<R::kBits>(x[0]), b = x[1] - code_of<R::kBits>(x[1]);
            const u32 error = Half::pack(a, b);
            *reinterpret_cast<u32*>(told.errors[which][0] + first) = error;
            *reinterpret_cast<u32*>(told.errors[which][1] + first) =
                Half::pack(a - Half::to_float(error), b - Half::to_float(error >> 16));
        }
        __syncthreads();
        if (warp / kPer <= now) continue;
        float d[4];
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
            const uint4 a = told.carry[now * kPer + i][threadIdx.x];
            const u32 fragment[4] = {a.x, a.y, a.z, a.w};
            const u16* row = told.errors[r / 2][r % 2] + (now * kPer + i) * 16;
            const u32* b = reinterpret_cast<const u32*>(row) + which;
            if (i == 0) Half::mma_first(d, fragment, b[0], b[4]);
            else Half::mma(d, fragment, b[0], b[4]);
        }
        x[0] += d[0] + d[1], x[1] += d[2] + d[3];
    }
    u32 word = static_cast<u32>(code_of<R::kBits>(x[0])) |
               static_cast<u32>(code_of<R::kBits>(x[1])) << 16;
    word <<= r % 4 * R::kBits;
    word |= shuffle_xor(word, 4);
    word |= shuffle_xor(word, 8);
    if (slot < 0) return;
    unsigned char* const record = record_of<R>(pool, slot);
    const int t = slot % kPageTokens;
    if (r % 4 == 0) reinterpret_cast<u32*>(record)[R::k(t, first) / 8] = word;
    if (warp == 0 && r == 0) reinterpret_cast<u32*>(record + R::kGrids)[t * 2] = grid;
}

// qkv (tokens, heads + 2 kv heads, kHeadDim); cos and sin (positions, rotary / 2); norms, mean and
// matrices (as fused.py orders them) may be null. slots < 0: padding, of which only q is written.
// Blocks take every gridDim.x-th set of `each` tokens, 1, 2 or kTogether where kTurned and else 1:
// many tokens share the matrices that a block has loaded.
template <class T, class Format, int kHeadDim, bool kTurned>
__global__ void __launch_bounds__(kTurned ? 2 * kHeadDim : 512, 2)
rope_store(const u16* qkv, const u16* __restrict__ cos, const u16* __restrict__ sin,
           const int* __restrict__ positions, const int* __restrict__ slots,
           const u16* __restrict__ q_norm, const u16* __restrict__ k_norm,
           const float* __restrict__ mean, const uint4* __restrict__ to_keys,
           const uint4* __restrict__ to_queries, const uint4* __restrict__ carry, u16* q_out,
           unsigned char* pool, int tokens, int each, int group, int rotary, float eps,
           float limit) {
    static_assert(!kTurned || Format::kBits == 4);
    using R = Places<Format, kHeadDim>;
    constexpr int kLanes = kHeadDim / 4, kSteps = kTurned ? kHeadDim / 16 : 1;
    constexpr int kStride = kHeadDim + 8;  // eight rows lie in different banks
    constexpr int kSet = kTurned ? kTogether : 1, kHeads = kTurned ? kMostGroup + 2 : 1;
    __shared__ __align__(16) u16 rows[kSet][kHeads][kStride];
    __shared__ __align__(16) u16 raw[kSet * kHeads * kHeadDim];  // of qkv: [token][head]
    __shared__ __align__(16) Told<kTurned ? kHeadDim : 0> told;
#if __CUDA_ARCH__ >= 900
    launch_dependents();
#endif
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int l = lane % kLanes, kv_head = blockIdx.y, kv_heads = gridDim.y;

    u32 keys[kSteps][4], queries[kSteps][4];
    if constexpr (kTurned) {
        // In shared memory: the registers are taken by the two matrices.
        if (warp == group % warps)
            told.mean[lane] = reinterpret_cast<const float4*>(mean)[kv_head * kLanes + l];
#pragma unroll
        for (int step = 0; step < kSteps - kSteps / kBlocks; ++step)
            told.carry[step][threadIdx.x] =
                carry[((kv_head * kSteps + warp) * kSteps + step) * 32 + lane];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int at = ((kv_head * kSteps + warp) * kSteps + step) * 32 + lane;
            const uint4 k = to_keys[at], q = to_queries[at];
            keys[step][0] = k.x, keys[step][1] = k.y, keys[step][2] = k.z, keys[step][3] = k.w;
            queries[step][0] = q.x, queries[step][1] = q.y;
            queries[step][2] = q.z, queries[step][3] = q.w;
        }
    }
    const RopeLane rope(l, rotary);

    const int heads = group + 2, of_token = warps / each;  // warps
    const int which = warp / of_token;                      // this warp's token of a set
    int slot = -1;
    uint2 c = {}, s = {};
    const auto look_up = [&](int start) {
        const int token = start + which;
        if (token >= tokens) return;
        slot = slots[token];
        if (!rope.rotated) return;
        const u64 at = static_cast<u64>(positions[token]) * (rotary / 8) + rope.angle;
        c = reinterpret_cast<const uint2*>(cos)[at], s = reinterpret_cast<const uint2*>(sin)[at];
    };
    const auto place_of = [&](int token, int head) {
        const int place = head < group ? kv_head * group + head : head * kv_heads + kv_head;
        return static_cast<u64>(token) * heads * kv_heads + place;
    };
    const auto fetch = [&](int start) {
        constexpr int kChunks = kHeadDim / 8;  // of 16 bytes
        const int count = min(each, tokens - start);
        for (int chunk = threadIdx.x; chunk < count * heads * kChunks; chunk += blockDim.x) {
            const int row = chunk / kChunks;
            const u64 from = place_of(start + row / heads, row % heads) * kHeadDim;
            copy_async_16(smem_address(raw + chunk * 8), qkv + from + chunk % kChunks * 8);
        }
        commit_copies();
    };

    look_up(blockIdx.x * each);
#if __CUDA_ARCH__ >= 900
    dependency_wait();
#endif
    if constexpr (kTurned) fetch(blockIdx.x * each);
    for (int start = blockIdx.x * each; start < tokens; start += gridDim.x * each) {
        const int count = min(each, tokens - start), next = start + gridDim.x * each;
        if constexpr (kTurned) {
            wait_copies<0>();
            __syncthreads();
        }
        unsigned char* const record = record_of<R>(pool, slot);
        const Parts<unsigned char*> parts{record, record + R::kV, record + R::kGrids};
        const int t = slot % kPageTokens;
        for (int head = warp % of_token; which < count && head < heads; head += of_token) {
            const u64 place = place_of(start + which, head);
            const u16* from =
                kTurned ? raw + (which * heads + head) * kHeadDim : qkv + place * kHeadDim;
            float x[4];
            if (head == group + 1) {
#pragma unroll
                for (int i = 0; i < 4; ++i) x[i] = T::to_float(from[channel_of_v(l, i)]);
                if (slot >= 0) store_v<T, R, kLanes>(t, lane, x, limit, parts);
                continue;
            }
            uint2 v = reinterpret_cast<const uint2*>(from)[l];
            const u16* norm = head < group ? q_norm : k_norm;
            if (norm != nullptr)
                v = head_norm<T, kLanes>(v, reinterpret_cast<const uint2*>(norm)[l], eps);
            v = rope.turn<T>(v, c, s);
            unpack<T>(v, x);
            if constexpr (kTurned) {
                // k - mean has more bits than fp16: the remainder is a second row of the product.
                const bool key = head == group;
                if (key) {
                    const float4 middle = told.mean[lane];
                    x[0] -= middle.x, x[1] -= middle.y, x[2] -= middle.z, x[3] -= middle.w;
                }
                u16* row = rows[which][key ? kMostGroup : head] + 4 * l;
                u32 rounded[4], rest[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    x[i] = clamped(x[i], 65504.0f);
                    rounded[i] = Half::from_float(x[i]);
                    rest[i] = Half::from_float(x[i] - Half::to_float(rounded[i]));
                }
                *reinterpret_cast<uint2*>(row) = {rounded[0] | rounded[1] << 16,
                                                  rounded[2] | rounded[3] << 16};
                if (key)
                    *reinterpret_cast<uint2*>(row + kStride) = {rest[0] | rest[1] << 16,
                                                                rest[2] | rest[3] << 16};
            } else if (head == group) {
                if (slot >= 0) store_k<T, R, kLanes>(t, lane, x, limit, parts);
            } else if (lane < kLanes) {
                const u64 to = static_cast<u64>(start + which) * group * kv_heads;
                reinterpret_cast<uint2*>(q_out)[(to + kv_head * group + head) * kLanes + l] = v;
            }
        }
        look_up(next);
        if constexpr (kTurned) {
            // Rows r and r + 8 of a fragment are outputs 2r and 2r + 1: neighbours in a lane.
            // Of the keys, columns 2i and 2i + 1 are token i: lane % 4 has its sum.
            const int r = lane / 4, pair = lane % 4, first = warp * 16 + 2 * r;
            const int stored = pair < count ? slots[start + pair] : -1, columns = count * group;
            float d[4];
            __syncthreads();
            if (next < tokens) fetch(next);
            turn<kSteps>(d, keys, rows[r / 2][kMostGroup + r % 2], pair);
            float x[2] = {clamped(d[0] + d[1], limit), clamped(d[2] + d[3], limit)};
            const bool strange = x[0] != x[0] || x[1] != x[1];
            const float lowest = min_over<32, 4>(fminf(x[0], x[1]));
            told.highest[pair][warp] = max_over<32, 4>(fmaxf(x[0], x[1]));
            told.lowest[pair][warp] =
                ballot(strange) & 0x11111111u << pair ? not_a_number() : lowest;
            for (int some = 0; some < columns; some += 8) {
                const int mine = min(some + r, columns - 1);
                turn<kSteps>(d, queries, rows[mine / group][mine % group], pair);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int column = some + 2 * pair + i;
                    if (column >= columns) continue;
                    const u64 to = static_cast<u64>(start + column / group) * kv_heads + kv_head;
                    *reinterpret_cast<u32*>(
                        q_out + (to * group + column % group) * kHeadDim + first) =
                        T::pack(d[i], d[i + 2]);
                }
            }
            __syncthreads();
            store_carried<T, R, kHeadDim>(pool, stored, warp, lane, x, told);
        }
    }
}

constexpr int kGatherSlots = 8;  // of a block, a warp each: those of a page share V's cache lines

template <class T, class R>
BILLFISH_DEVICE u32 decoded(const unsigned char* record, int place, u32 grid) {
    if constexpr (R::kBits == 16) return reinterpret_cast<const u16*>(record)[place];
    u32 code = record[place * R::kBits / 8];
    if constexpr (R::kBits == 4) code = code >> place % 2 * 4 & 15;
    return T::from_float(static_cast<float>(code) * T::to_float(grid) + T::to_float(grid >> 16));
}

// The first `count` slots -> k and v (slots, kv heads, kHeadDim). Block: kGatherSlots slots of a kv
// head at a time; in a graph there may be fewer slots than blocks.
template <class T, class Format, int kHeadDim>
__global__ void __launch_bounds__(32 * kGatherSlots)
gather(unsigned char* pool, const int* __restrict__ slots, u16* k, u16* v,
       const int* count) {
    using R = Places<Format, kHeadDim>;
    constexpr int kLanes = kHeadDim / 4;
#if __CUDA_ARCH__ >= 900
    launch_dependents();
    dependency_wait();
#endif
    const int lane = threadIdx.x % 32, end = *count;
    if (lane >= kLanes) return;
    for (int index = blockIdx.x * kGatherSlots + threadIdx.x / 32; index < end;
         index += gridDim.x * kGatherSlots) {
        const int slot = slots[index], t = slot % kPageTokens;
        const unsigned char* record = record_of<R>(pool, slot);
        uint2 grid = {};
        if constexpr (R::kBits < 16) grid = reinterpret_cast<const uint2*>(record + R::kGrids)[t];
        u32 a[4], b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i] = decoded<T, R>(record, R::k(t, 4 * lane + i), grid.x);
            b[i] = decoded<T, R>(record + R::kV, R::v(t, 4 * lane + i), grid.y);
        }
        const u64 to = (static_cast<u64>(index) * gridDim.y + blockIdx.y) * kLanes + lane;
        reinterpret_cast<uint2*>(k)[to] = {a[0] | a[1] << 16, a[2] | a[3] << 16};
        reinterpret_cast<uint2*>(v)[to] = {b[0] | b[1] << 16, b[2] | b[3] << 16};
    }
}

}  // namespace billfish
