// attend: one new token of each sequence against its pages of 4, 8 or 16 bits, sm_90 (COMET 5).
//
// A warp is a block and works alone: no barrier but its own. An item is one chunk of a sequence's
// pages under one K head; the query heads that share it are columns of the tensor cores' tile.
//
//     S^T (16 tokens x 8 heads) = K Q^T        K's codes are the A fragment as they lie in memory
//     O^T (16 channels x 8 heads) += V^T P^T   V's, too; P^T is S^T turned in registers
//
// Codes are multiplied raw (dequant.cuh). K's step and low meet the scores, V's step the weights
// and V's low their sum: a code costs 0.6 instructions and no rounding.
//
// Where a chunk begins follows from the sequence's own length, and chunks are added in order by
// the warp that finishes last: a text's bits do not depend on what else is in the batch.
//
// A stage is 8 KB in every format: 64, 32 or 16 tokens. Three of them for each of 8 warps are four
// times what an SM must have under way (34 KB per us). Pages of earlier steps are fetched before
// the kernel that writes this step's token has ended (PDL).
#pragma once

#include "billfish/attend_stage.cuh"

namespace billfish {

// One chunk of a sequence, as engine/decode.py lists them; the same for all heads.
struct Chunk {
    int sequence;
    int table;  // where its pages are named
    int token;  // the first of its first page
    int pages, number, chunks;
    int begin, length;  // tokens of the sequence that count
};

#if __CUDA_ARCH__ >= 900

// What a warp has to do: a chunk under one head. Its row, names of pages and queries are asked for
// while the one before is under way: one after the other these are 2 us.
template <int kDim>
struct Work {
    Chunk chunk;
    int head;
    u32 names;  // of 32 pages, one a lane
    int known;  // which 32

    BILLFISH_DEVICE void find(const Chunk* rows, int item, int items, int kv_heads) {
        if (item >= items) return;
        const uint4* row = reinterpret_cast<const uint4*>(rows + item / kv_heads);
        const uint4 v = load_table_16(row), w = load_table_16(row + 1);
        chunk = {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z),
                 static_cast<int>(v.w), static_cast<int>(w.x), static_cast<int>(w.y),
                 static_cast<int>(w.z), static_cast<int>(w.w)};
        head = item % kv_heads;
    }
    BILLFISH_DEVICE void name(const int* table, int which) {
        const int at = which * 32 + static_cast<int>(threadIdx.x);
        known = which, names = at < chunk.pages ? table[chunk.table + at] : 0;
    }
    BILLFISH_DEVICE u64 row(int kv_heads, int group) const {  // in q and out
        return (static_cast<u64>(chunk.sequence) * kv_heads + head) * group * kDim;
    }
    BILLFISH_DEVICE void ask(uint4 (&q)[kDim / 32], const u16* from, int group) const {
        const int lane = threadIdx.x, r = lane / 4, c = lane % 4;
#pragma unroll
        for (int j = 0; j < kDim / 32; ++j) {
            q[j] = {0, 0, 0, 0};
            if (r < group) q[j] = load_global_bits_16(from + r * kDim + 32 * j + 8 * c);
        }
    }
    // Stages from the first that has a token that counts to the last.
    template <int kTokens>
    BILLFISH_DEVICE int first() const { return max(chunk.begin - chunk.token, 0) / kTokens; }
    template <int kTokens>
    BILLFISH_DEVICE int stages() const {
        const int tokens = min(chunk.length - chunk.token, chunk.pages * kPageTokens);
        return (tokens + kTokens - 1) / kTokens - first<kTokens>();
    }
};

// A chunk's sums where the last warp finds them: of each item kDim / 16 x 32 lanes x 16 bytes, then
// 4 lanes x 16 bytes of largest exponents and weights.
template <int kDim>
struct Parts {
    static constexpr int kFloats = kDim / 16 * 128 + 16;
    float* at;
    BILLFISH_DEVICE Parts(float* workspace, int item)
        : at(workspace + static_cast<u64>(item) * kFloats) {}
    BILLFISH_DEVICE void leave(const Sums<kDim>& sums, int lane, int group) {
        if (lane % 4 * 2 < group) {
#pragma unroll
            for (int t = 0; t < kDim / 16; ++t)
                *reinterpret_cast<float4*>(at + t * 128 + lane * 4) =
                    make_float4(sums.o[t][0], sums.o[t][1], sums.o[t][2], sums.o[t][3]);
        }
        if (lane < 4)
            *reinterpret_cast<float4*>(at + kDim / 16 * 128 + lane * 4) =
                make_float4(sums.most[0], sums.weight[0], sums.most[1], sums.weight[1]);
    }
    BILLFISH_DEVICE float4 weights(int c) const {
        return load_global_16(at + kDim / 16 * 128 + c * 4);
    }
    BILLFISH_DEVICE float4 channels(int t, int of_lane) const {
        return load_global_16(at + t * 128 + of_lane * 4);
    }
};

// Adds all chunks of a sequence in order and stores the result; `stride` items lie between two. The
// kernel's end waits for the last warp here, so several chunks are asked for at once (one by one
// each takes 1 us), and lanes whose heads are not there work for others: with kPairs of a quad's
// lanes in use, lane l takes what lane l / kPairs * 4 + l % kPairs left, 32 / kPairs rows at once.
template <class T, int kDim, int kPairs>
BILLFISH_DEVICE void merge(float* workspace, int first, int stride, int chunks, u16* out, int group,
                           int lane) {
    constexpr int kSlots = kDim / 64 * kPairs, kAtOnce = kSlots <= 4 ? 4 : 1;
    const int c = lane % kPairs;
    float most[2], weight[2] = {0, 0}, o[kSlots][4] = {};
    most[0] = most[1] = __uint_as_float(0xff800000u);
    const auto row = [&](int slot) { return (slot * 32 + lane) / kPairs; };  // 8 t + r
#pragma unroll 1
    for (int i = 0; i < chunks; i += kAtOnce) {
        float4 w[kAtOnce], v[kAtOnce][kSlots];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const Parts<kDim> part(workspace, first + min(i + j, chunks - 1) * stride);
            w[j] = part.weights(c);
#pragma unroll
            for (int slot = 0; slot < kSlots; ++slot)
                v[j][slot] = part.channels(row(slot) / 8, row(slot) % 8 * 4 + c);
        }
        float before[2] = {most[0], most[1]};
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
            most[0] = fmaxf(most[0], w[j].x), most[1] = fmaxf(most[1], w[j].z);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float by = exp2_fast(before[k] - most[k]);
            weight[k] *= by;
#pragma unroll
            for (int slot = 0; slot < kSlots; ++slot) o[slot][k] *= by, o[slot][k + 2] *= by;
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            if (i + j >= chunks) break;
            const float to[2] = {exp2_fast(w[j].x - most[0]), exp2_fast(w[j].z - most[1])};
            weight[0] = fmaf(to[0], w[j].y, weight[0]);
            weight[1] = fmaf(to[1], w[j].w, weight[1]);
#pragma unroll
            for (int slot = 0; slot < kSlots; ++slot) {
                o[slot][0] = fmaf(to[0], v[j][slot].x, o[slot][0]);
                o[slot][1] = fmaf(to[1], v[j][slot].y, o[slot][1]);
                o[slot][2] = fmaf(to[0], v[j][slot].z, o[slot][2]);
                o[slot][3] = fmaf(to[1], v[j][slot].w, o[slot][3]);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        if (2 * c + k >= group) continue;
        const float by = 1.0f / weight[k];
#pragma unroll
        for (int slot = 0; slot < kSlots; ++slot) {
            u16* to = out + (2 * c + k) * kDim + row(slot) / 8 * 16 + row(slot) % 8;
            to[0] = T::from_float(o[slot][k] * by), to[8] = T::from_float(o[slot][k + 2] * by);
        }
    }
}

template <class T, int kDim>
BILLFISH_DEVICE void store_channels(const Sums<kDim>& sums, u16* out, int group, int lane) {
    const float by[2] = {1.0f / sums.weight[0], 1.0f / sums.weight[1]};
    const int r = lane / 4, c = lane % 4;
#pragma unroll
    for (int t = 0; t < kDim / 16; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 pair = turn_matrix(
                T::pack(sums.o[t][half * 2] * by[0], sums.o[t][half * 2 + 1] * by[1]));
            if (r < group)
                *reinterpret_cast<u32*>(out + r * kDim + t * 16 + half * 8 + 2 * c) = pair;
        }
    }
}

#endif

// `pool` is one layer's (pages, kv heads) records; `q` and `out` are (sequences, heads, kDim);
// `head` says how many chunks there are and where in `table` they are listed; pages are named
// there, too; `scale` is log2(e) times the model's; `arrived` (sequences x kv heads) is 0 before
// and after.
template <class T, class F, int kDim>
__global__ void __launch_bounds__(32, 8)
attend(const unsigned char* __restrict__ pool, const u16* q, u16* out,
       const int* __restrict__ table, const int* __restrict__ head, float* workspace,
       u32* arrived, int kv_heads, int group, float scale) {
#if __CUDA_ARCH__ >= 900
    using Stage = AttendStage<F, kDim>;
    using R = PageRecord<F, kDim>;
    constexpr int kStages = Stage::kStages, kOfPage = kPageTokens / Stage::kTokens;

    extern __shared__ __align__(128) unsigned char smem[];
    const u32 ring = smem_address(smem), full = ring + kStages * Stage::kBytes;
    const u32 empty = full + kStages * 8;
    const int lane = threadIdx.x, blocks = gridDim.x;
    launch_dependents();
    const int items = head[0] * kv_heads;
    const Chunk* rows = reinterpret_cast<const Chunk*>(table + head[1]);
    int item = blockIdx.x;
    if (item >= items) {  // its memory is the next kernel's, at once
        // But somebody waits: whoever waits for this kernel counts on those before it.
        if (item == 0) dependency_wait();
        return;
    }
    Work<kDim> now, ahead;
    now.find(rows, item, items, kv_heads);
    if (lane == 0) {
        for (int i = 0; i < kStages; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 1);
        }
        barrier_init_fence();
    }
    now.name(table, 0);
    __syncwarp();

    const u64 policy = evict_first_policy();
    int slot = 0, fetch_slot = 0, flying = 0;  // flying: stages fetched and not yet taken
    u32 parity = 0, fetch_parity = 1;          // the first round finds every slot empty
    const auto fetch = [&](Work<kDim>& work, int stage) {
        stage += work.template first<Stage::kTokens>();
        const int page = stage / kOfPage, within = stage % kOfPage;
        if (page / 32 != work.known) work.name(table, page / 32);
        const u64 name = shuffle(work.names, page % 32);
        if (lane == 0) {
            const unsigned char* record = pool + (name * kv_heads + work.head) * R::kBytes;
            const u32 to = ring + fetch_slot * Stage::kBytes, barrier = full + 8 * fetch_slot;
            barrier_wait(empty + 8 * fetch_slot, fetch_parity);
            barrier_arrive_expect(barrier, Stage::kBytes);
            if constexpr (kOfPage == 1) {
                copy_bulk(to, record, R::kBytes, barrier, policy);
            } else {
                const unsigned char* part = record + within * Stage::kV;
                copy_bulk(to, part, Stage::kV, barrier, policy);
                copy_bulk(to + Stage::kV, part + R::kV, Stage::kV, barrier, policy);
                if constexpr (R::kGridBytes > 0)
                    copy_bulk(to + Stage::kGrids,
                              record + R::kGrids + within * Stage::kTokens * R::kGridBytes,
                              Stage::kTokens * R::kGridBytes, barrier, policy);
            }
        }
        ++flying;
        if (++fetch_slot == kStages) fetch_slot = 0, fetch_parity ^= 1;
    };

    // All but the stage with the newest token lay there before this step.
    int stages = now.template stages<Stage::kTokens>(), fetched = 0, fetched_ahead = 0;
    const int old = now.chunk.number + 1 == now.chunk.chunks ? stages - 1 : stages;
    while (fetched < min(old, kStages)) fetch(now, fetched++);
    dependency_wait();
    for (; item < items; item += blocks) {
        const bool more = item + blocks < items;
        uint4 bits[kDim / 32];
        now.ask(bits, q + now.row(kv_heads, group), group);
        ahead.find(rows, item + blocks, items, kv_heads);
        int stages_ahead = 0;  // known once there is time
        const auto top_up = [&] {
            while (flying < kStages && fetched < stages) fetch(now, fetched++);
            while (flying < kStages && fetched == stages && fetched_ahead < stages_ahead)
                fetch(ahead, fetched_ahead++);
        };
        top_up();
        const Span span{now.chunk.begin, now.chunk.length};
        int token = now.chunk.token + now.template first<Stage::kTokens>() * Stage::kTokens;
        Queries<T, F, kDim> queries;
        queries.load(bits, scale);
        Sums<kDim> sums;
        sums.clear();
        for (int i = 0; i < stages; ++i, token += Stage::kTokens) {
            barrier_wait(full + 8 * slot, parity);
            const u32 stage = ring + slot * Stage::kBytes;
            if (span.has_all(token, Stage::kTokens))
                take_stage<T, F, kDim, true>(sums, queries, stage, token, span);
            else
                take_stage<T, F, kDim, false>(sums, queries, stage, token, span);
            // Nothing is copied over what a lane still reads: see barrier_arrive_after.
            __syncwarp();
            barrier_arrive_after(empty + 8 * slot, sums.o[kDim / 16 - 1][0], lane == 0);
            if (++slot == kStages) slot = 0, parity ^= 1;
            --flying;
            if (i == 0 && more) {
                ahead.name(table, 0);
                stages_ahead = ahead.template stages<Stage::kTokens>();
            }
            top_up();
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sums.weight[i] = sum_over<32, 4>(sums.weight[i]);
            sums.low[i] = sum_over<32, 4>(sums.low[i]);
        }
        if constexpr (F::kBits < 16) {  // codes were n * 2^-24, of 4 bits in rows r + 8 n * 2^-20
#pragma unroll
            for (int t = 0; t < kDim / 16; ++t) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float unit = F::kBits == 4 && i / 2 ? 1048576.0f : 16777216.0f;
                    sums.o[t][i] = fmaf(sums.o[t][i], unit, sums.low[i % 2]);
                }
            }
        }
        u16* to = out + now.row(kv_heads, group);
        if (now.chunk.chunks == 1) {
            store_channels<T, kDim>(sums, to, group, lane);
        } else {
            Parts<kDim>(workspace, item).leave(sums, lane, group);
            __syncwarp();
            u32 before = 0;
            u32* counter = arrived + now.chunk.sequence * kv_heads + now.head;
            if (lane == 0) before = add_acq_rel(counter, 1);
            before = shuffle(before, 0);
            if (before + 1 == static_cast<u32>(now.chunk.chunks)) {  // the last to come
                if (lane == 0) *counter = 0;
                const int first = item - now.chunk.number * kv_heads, all = now.chunk.chunks;
                if (group <= 4)
                    merge<T, kDim, 2>(workspace, first, kv_heads, all, to, group, lane);
                else
                    merge<T, kDim, 4>(workspace, first, kv_heads, all, to, group, lane);
            }
        }
        now = ahead;
        stages = stages_ahead, fetched = fetched_ahead, fetched_ahead = 0;
    }
#endif
}

}  // namespace billfish
