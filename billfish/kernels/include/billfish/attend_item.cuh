// An item of decode attention: what the producer warp tells of it, and how its queries come to
// shared memory: turned ones by a bulk copy, or of a projection.
//
// Of a projection the consumers load an item's queries and turn them by RoPE. The newest token's K
// and V are read by the block of its sequence's last chunk alone; the warp whose tile has them puts
// them into the stage that it is about to read, and into the pool for later steps. Until the
// queries are there, all of it is latency: what does not depend on the projection is fetched before
// its kernel has ended, and nothing takes the way through a bulk copy (6.7 us a launch, now 4.9).
#pragma once

#include "billfish/attend_stage.cuh"
#include "billfish/heads.cuh"

namespace billfish {

// One chunk of a sequence, the same for all heads; tables.py writes them.
struct Chunk {
    int sequence;
    int table;  // index of its first entry in the page table
    int token;  // the first of its first page
    int pages, number, chunks;
    int begin, length;  // tokens that are attended to: at least one of every page
};

#if __CUDA_ARCH__ >= 900

// The producer warp's state of an item. The next item's row and page table entries are loaded while
// this one is copied: the two dependent loads take 2 us.
struct Work {
    Chunk chunk;
    int head;
    u32 names;   // page numbers of 32 pages, one a lane
    int known;   // which 32 pages
    u32 newest;  // the last page's number

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
        const int at = which * 32 + static_cast<int>(threadIdx.x) % 32;
        known = which, names = at < chunk.pages ? table[chunk.table + at] : 0;
        if (which == 0) newest = table[chunk.table + chunk.pages - 1];
    }
};

// What the consumer warps need of it, in shared memory after its queries.
struct Told {
    u32 row, item, number, chunks;  // row: of q and out, in units of query groups
    int token, pages;
    Span span;
    u32 page, head;  // the last page's number
    BILLFISH_DEVICE static void tell(u32 at, const Work& work, u32 item, int kv_heads) {
        const Chunk& c = work.chunk;
        store_smem_bits_16(at, {static_cast<u32>(c.sequence * kv_heads + work.head), item,
                                static_cast<u32>(c.number), static_cast<u32>(c.chunks)});
        store_smem_bits_16(at + 16, {static_cast<u32>(c.token), static_cast<u32>(c.pages),
                                     static_cast<u32>(c.begin), static_cast<u32>(c.length)});
        store_smem_bits_16(at + 32, {work.newest, static_cast<u32>(work.head), 0, 0});
    }
    BILLFISH_DEVICE void hear(u32 at) {
        const uint4 v = load_smem_16(at + 16);
        token = v.x, pages = v.y, span = {static_cast<int>(v.z), static_cast<int>(v.w)};
    }
    BILLFISH_DEVICE void hear_more(u32 at) {
        const uint4 v = load_smem_16(at);
        row = v.x, item = v.y, number = v.z, chunks = v.w;
    }
    BILLFISH_DEVICE void hear_where(u32 at) {
        const uint4 v = load_smem_16(at + 32);
        page = v.x, head = v.y;
    }
};

// What attend is given: queries (sequences, heads, kDim).
struct TurnedQueries {
    static constexpr bool kRaw = false;
    const u16* q;

    // Those of an item, to its place in shared memory.
    template <int kDim>
    BILLFISH_DEVICE void copy(u32 to, u32 barrier, const Chunk& chunk, int head, int kv_heads,
                              int group, u64 policy) const {
        const u64 row = chunk.sequence * kv_heads + head;
        barrier_arrive_expect(barrier, group * kDim * 2);
        copy_bulk(to, q + row * group * kDim, group * kDim * 2, barrier, policy);
    }
};

// What rope_attend is given: rows of a projection, [q heads][k heads][v heads], of the newest token
// of each sequence; cosines and sines (positions, rotary / 2); weights of the heads' norms or null.
struct Projected {
    static constexpr bool kRaw = true;
    const u16 *qkv, *cos, *sin, *q_norm, *k_norm;
    unsigned char* pool;
    int rotary;
    float eps, limit;

    // An item's queries, and of a sequence's last chunk the newest K and V, to their place in
    // shared memory: a head a warp at a time, all loaded before one is turned. `first`: of this
    // block.
    template <class T, class Block, int kDim>
    BILLFISH_DEVICE void take(u32 item, bool first, int kv_heads, int group) const {
        constexpr int kLanes = kDim / 4, kMost = (kMostHeads + 2 + kTakers - 1) / kTakers;
        Told of;
        of.hear(item + Block::kAbout), of.hear_more(item + Block::kAbout);
        const int position = of.span.length - 1;
        const bool newest = position < of.token + of.pages * kPageTokens;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, l = lane % kLanes;
        const RopeLane rope(l, rotary);
        const int angle = position * (rotary / 8) + (rope.rotated ? rope.angle : 0);
        const uint2 c = reinterpret_cast<const uint2*>(cos)[angle];
        const uint2 s = reinterpret_cast<const uint2*>(sin)[angle];
        uint2 of_q = {}, of_k = {}, v[kMost];
        if (q_norm != nullptr)
            of_q = reinterpret_cast<const uint2*>(q_norm)[l],
            of_k = reinterpret_cast<const uint2*>(k_norm)[l];
        const int heads = group + 2 * newest, all = group * kv_heads;
        const int head = of.row % kv_heads;
        const u16* row = qkv + static_cast<u64>(of.row / kv_heads) * (group + 2) * kv_heads * kDim;
        if (first) dependency_wait();
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
            const int h = warp + i * kTakers;
            const int from = h < group ? head * group + h : all + (h - group) * kv_heads + head;
            if (h < heads) v[i] = load_global_8(row + from * kDim + l * 4);
        }
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
            const int h = warp + i * kTakers;
            if (h >= heads) break;
            if (h <= group) {
                if (q_norm != nullptr)
                    v[i] = head_norm<T, kLanes>(v[i], h == group ? of_k : of_q, eps);
                v[i] = rope.turn<T>(v[i], c, s);
            }
            const u32 to = h < group ? item + h * kDim * 2
                                     : item + Block::kNewest + (h - group) * kDim * 2;
            if (lane < kLanes) put_8(to + l * 8, v[i]);
        }
    }

    // The newest token's K and V to the sequence's last page and to the part of it that is in a
    // stage of the ring.
    template <class T, class F, int kDim>
    BILLFISH_DEVICE void append(u32 item, u32 stage, int kv_heads) const {
        using Block = AttendBlock<F, kDim>;
        using R = Places<F, kDim>;
        constexpr int kLanes = kDim / 4;
        Told of;
        of.hear(item + Block::kAbout), of.hear_where(item + Block::kAbout);
        const int slot = (of.span.length - 1) % kPageTokens;
        unsigned char* record = pool + (static_cast<u64>(of.page) * kv_heads + of.head) * R::kBytes;
        const int lane = threadIdx.x % 32, l = lane % kLanes, part = slot / Block::kTokens;
        const u32 before = part * Block::kV;
        const Parts<u32> ring{stage - before, stage + Block::kV - before,
                              stage + Block::kGrids - part * Block::kTokens * 8};
        const Parts<unsigned char*> all{record, record + R::kV, record + R::kGrids};
        const u32 k = item + Block::kNewest, v = k + kDim * 2;
        float x[4];
        unpack<T>(load_smem_8(k + l * 8), x);
        store_k<T, R, kLanes>(slot, lane, x, limit, ring, all);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = T::to_float(load_smem_2(v + channel_of_v(l, i) * 2));
        store_v<T, R, kLanes>(slot, lane, x, limit, ring, all);
        __syncwarp();
    }
};

#endif

}  // namespace billfish
