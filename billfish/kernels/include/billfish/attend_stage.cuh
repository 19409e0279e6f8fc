// Attention of one stage of K and V in shared memory for the query heads that share it: scores,
// online softmax and weighted sums, on the tensor cores and in a warp's registers.
// engine/cuda/attention.cuh gives the reasons.
#pragma once

#include "billfish/page.cuh"
#include "billfish/warp.cuh"

namespace billfish {

#if __CUDA_ARCH__ >= 900

constexpr int kMostHeads = 8;          // query heads of a KV head: the n of mma
constexpr int kTakers = 4;             // warps that multiply; one more fetches
constexpr int kAttendThreads = kTakers * 32 + 32;
// Three, of 15 warps: at most 128 registers. With 148, of which an SM holds two as well, a block
// did not start before those of the product before it had ended: each quarter of an SM has
// 16384 registers, and two of the five warps are in one.
constexpr int kAttendResident = 3;
constexpr int kAttendBytes = 230400;   // of shared memory: an SM's, less 1 KB a block
constexpr int kTile = 16;              // tokens a warp takes at a time

// A block's shared memory: ring of stages | queries and description of an item, twice | partial
// sums of the warps | barriers. engine/cuda/tables.py counts the same.
template <class F, int kDim>
struct AttendBlock {
    using R = PageRecord<F, kDim>;
    static constexpr int kTokens = F::kStageTokens, kShare = kTokens / kTile;  // warps of a stage
    static constexpr int kOfPage = kPageTokens / kTokens;
    static constexpr int kV = kTokens * R::kTokenBytes, kGrids = 2 * kV;
    static constexpr int kBytes = kGrids + kTokens * R::kGridBytes;
    // An item: 8 queries; the newest K and V, where they come raw; 12 integers.
    static constexpr int kNewest = kMostHeads * kDim * 2;
    static constexpr int kAbout = kNewest + kDim * 4, kItem = kAbout + 48;
    static constexpr int kSums = kDim * 32;                        // of a warp
    static constexpr int kFixed = 2 * kItem + kTakers * (kSums + 64) + 16 + 4 * 8;
    // Three blocks an SM are 15 warps of up to 128 registers. At 16 bits a warp's tile is a whole
    // stage, and three blocks would leave each warp one: 129 us instead of 126 at 32 x 4096.
    static constexpr int kBlocks = F::kBits == 16 ? 2 : 3;
    static constexpr int kRoom = (kAttendBytes / kBlocks - kFixed) / (kBytes + 16);
    // A multiple of the stages that four tiles fill, so that a slot always belongs to the same
    // warps: else a warp that is ahead could take the slot's previous round for its own, since a
    // wait tells rounds apart by parity alone.
    static constexpr int kStep = kTakers / kShare;
    static constexpr int kStages = (kRoom < 8 ? kRoom : 8) / kStep * kStep;
    static constexpr int kItems = kStages * kBytes, kExchange = kItems + 2 * kItem;
    static constexpr int kWeights = kExchange + kTakers * kSums, kOwed = kWeights + kTakers * 64;
    static constexpr int kBarriers = kOwed + 16;
    static_assert(kBytes % 128 == 0 && kStages > kStep, "ring");
};

constexpr float kLeastStep = 5.421010862427522e-20f;  // 2^-64: a step of 0 has only codes 0

// The tokens that are attended to: [begin, length).
struct Span {
    int begin, length;
    BILLFISH_DEVICE bool has(int token) const { return token >= begin && token < length; }
    BILLFISH_DEVICE bool has_all(int token, int count) const {
        return token >= begin && token + count <= length;
    }
    BILLFISH_DEVICE bool has_some(int token, int count) const {
        return token + count > begin && token < length;
    }
};

// B fragments of the queries: lane (r, c) holds head r, channels 32 j + 8 c to + 7 of each j.
template <class T, class F, int kDim>
struct Queries {
    u32 b[kDim / 32][4];
    float unit[2], sum[2];  // of heads 2 c and 2 c + 1: factor of the scores, and sum of q

    BILLFISH_DEVICE void load(u32 from, int group, float scale) {
        const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
        float v[kDim / 32][8], most = 0, total = 0;
#pragma unroll
        for (int j = 0; j < kDim / 32; ++j) {
            uint4 q = {0, 0, 0, 0};
            if (r < group) q = load_smem_16(from + (r * kDim + 32 * j + 8 * c) * 2);
            b[j][0] = q.x, b[j][1] = q.y, b[j][2] = q.z, b[j][3] = q.w;
        }
        if constexpr (F::kBits == 16) {
            unit[0] = unit[1] = scale, sum[0] = sum[1] = 0;
            return;
        }
        // fp16 for any T: a power of two brings the largest to [128, 256). Every second pair of
        // 4-bit codes comes out 16 times too large (see Keys), so its queries are divided by 16.
#pragma unroll
        for (int j = 0; j < kDim / 32; ++j) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                v[j][i] = T::to_float(b[j][i / 2] >> i % 2 * 16 & 0xffff);
                most = fmaxf(most, fabsf(v[j][i]));
            }
        }
        most = max_over<4>(most);
        // 2^(134 - e) for the biased exponent e of `most`, kept in fp32's range.
        const int exponent = min(max(static_cast<int>(float_bits(most) >> 23 & 255), 10), 250);
        const float up = __uint_as_float((127 + 134 - exponent) << 23 & 0x7f800000u);
        const float down = __uint_as_float(static_cast<u32>(exponent - 134 + 127) << 23);
#pragma unroll
        for (int j = 0; j < kDim / 32; ++j) {
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                const float less = F::kBits == 4 && i % 4 == 2 ? 0.0625f : 1.0f;
                b[j][i / 2] = Half::pack(v[j][i] * up * less, v[j][i + 1] * up * less);
                total += v[j][i] + v[j][i + 1];
            }
        }
        total = sum_over<4>(total) * scale;
        const float factor = down * 16777216.0f * scale;  // raw codes are n * 2^-24
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            unit[i] = shuffle(factor, (2 * c + i) * 4);
            sum[i] = shuffle(total, (2 * c + i) * 4);
        }
    }
};

template <int kWords>
BILLFISH_DEVICE void load_words(u32 (&to)[kWords], u32 from) {
    if constexpr (kWords == 2) {
        const uint2 v = load_smem_8(from);
        to[0] = v.x, to[1] = v.y;
    } else {
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
            const uint4 v = load_smem_16(from + i * 4);
            to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
        }
    }
}

// A lane's words of K of 16 tokens, and their scores: rows r and r + 8, heads 2 c and 2 c + 1.
// Products alternate between two accumulators: a chain on one would wait 33 cycles a product.
template <class T, class F, int kDim>
struct Keys {
    static constexpr int kRow = PageRecord<F, kDim>::kTokenBytes, kWords = kRow / 16;
    using N = typename F::template Number<T>;
    u32 words[2][kWords];

    BILLFISH_DEVICE void load(u32 from) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 row = from + half * 8 * kRow;
            if constexpr (F::kBits < 16) {
                load_words(words[half], row);
            } else {  // odd tokens have the two halves of 128 bytes swapped (bank conflicts)
#pragma unroll
                for (int j = 0; j < kDim / 32; ++j) {
                    const uint4 v = load_smem_16((j % 2 ? row ^ 64 : row) + j / 2 * 128);
                    u32* to = words[half] + 4 * j;
                    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
                }
            }
        }
    }
    BILLFISH_DEVICE void multiply(float (&s)[4], const u32 (&b)[kDim / 32][4]) const {
        float other[4];
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {  // 16 channels
            const int j = step / 2, i = step % 2;
            u32 a[4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32(&w)[kWords] = words[half];
                if constexpr (F::kBits == 16) {
                    a[half] = w[4 * j + 2 * i], a[half + 2] = w[4 * j + 2 * i + 1];
                } else if constexpr (F::kBits == 8) {
                    a[half] = w[step] & F::kFirst, a[half + 2] = w[step] >> 8 & F::kFirst;
                } else {
                    const u32 word = w[j] >> 8 * i;
                    a[half] = word & F::kFirst, a[half + 2] = word & F::kFirst << 4;
                }
            }
            float(&sum)[4] = i ? other : s;
            if (step < 2)
                N::mma_first(sum, a, b[j][2 * i], b[j][2 * i + 1]);
            else
                N::mma(sum, a, b[j][2 * i], b[j][2 * i + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] += other[i];
    }
};

// A lane's words of V of 16 tokens, and o += V^T P^T.
template <class T, class F, int kDim>
struct Values {
    static constexpr int kNext = 8 * PageRecord<F, kDim>::kTokenBytes;  // the other 8 tokens
    static constexpr int kWords = kDim == 64 && F::kBits == 4 ? 2 : 4;  // of 512 bytes
    static constexpr int kTiles = kWords * 8 / F::kBits;                // of 16 channels, in them
    static constexpr int kPieces = kDim / 16 / kTiles;
    static constexpr int kLane = kWords * 4;  // bytes of a lane in a piece
    using N = typename F::template Number<T>;
    u32 words[kPieces][2][kWords];

    BILLFISH_DEVICE void load(u32 from) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            load_words(words[piece][0], from + piece * 512);
            load_words(words[piece][1], from + kNext + piece * 512);
        }
    }
    BILLFISH_DEVICE u32 seen() const {  // depends on every load
        u32 all = 0;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece)
            all ^= words[piece][0][0] ^ words[piece][1][0];
        return all;
    }
    BILLFISH_DEVICE void multiply(float (&o)[kDim / 16][4], const u32 (&b)[2],
                                  const u32 (&keep)[2]) const {  // keep: a mask of 16 bits a token
#pragma unroll
        for (int tile = 0; tile < kDim / 16; ++tile) {
            const u32(&low)[kWords] = words[tile / kTiles][0];
            const u32(&high)[kWords] = words[tile / kTiles][1];
            const int t = tile % kTiles;
            u32 a[4];
            if constexpr (F::kBits == 16) {
                a[0] = low[2 * t] & keep[0], a[1] = low[2 * t + 1] & keep[0];
                a[2] = high[2 * t] & keep[1], a[3] = high[2 * t + 1] & keep[1];
            } else if constexpr (F::kBits == 8) {
                a[0] = low[t] & F::kFirst, a[1] = low[t] >> 8 & F::kFirst;
                a[2] = high[t] & F::kFirst, a[3] = high[t] >> 8 & F::kFirst;
            } else {
                const u32 x = low[t / 2] >> t % 2 * 8, y = high[t / 2] >> t % 2 * 8;
                a[0] = x & F::kFirst, a[1] = x & F::kFirst << 4;
                a[2] = y & F::kFirst, a[3] = y & F::kFirst << 4;
            }
            N::mma(o[tile], a, b[0], b[1]);
        }
    }
};

// Online softmax of two heads a lane: the largest score so far, and the sums of weights, of weights
// times V's low, and of weights times V's codes.
template <int kDim>
struct Sums {
    float most[2], weight[2], low[2], o[kDim / 16][4];
    BILLFISH_DEVICE void clear() {
        const float none = __uint_as_float(0xff800000u);
        most[0] = most[1] = none;
        weight[0] = weight[1] = low[0] = low[1] = 0;
#pragma unroll
        for (int t = 0; t < kDim / 16; ++t)
            o[t][0] = o[t][1] = o[t][2] = o[t][3] = 0;
    }
    BILLFISH_DEVICE void scale(const float (&by)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) weight[i] *= by[i], low[i] *= by[i];
#pragma unroll
        for (int t = 0; t < kDim / 16; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i) o[t][i] *= by[i % 2];
        }
    }
    template <class F>
    BILLFISH_DEVICE void finish() {  // sums over the warp's tokens; adds low to the codes' sums
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            weight[i] = sum_over<32, 4>(weight[i]);
            if constexpr (F::kBits < 16) low[i] = sum_over<32, 4>(low[i]);
        }
        if constexpr (F::kBits < 16) {  // codes were n * 2^-24, of 4 bits in rows r + 8 n * 2^-20
#pragma unroll
            for (int t = 0; t < kDim / 16; ++t) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float unit = F::kBits == 4 && i / 2 ? 1048576.0f : 16777216.0f;
                    o[t][i] = fmaf(o[t][i], unit, low[i % 2]);
                }
            }
        }
    }
};

// Offsets of a lane's numbers of a tile within a stage. The shuffles hide that they follow from
// threadIdx: else ptxas recomputes them for every tile, 12 instructions before the first load.
struct Lane {
    u32 number, k, v, grid;
    template <class T, class F, int kDim>
    BILLFISH_DEVICE static Lane of(int tile) {
        using R = PageRecord<F, kDim>;
        using Block = AttendBlock<F, kDim>;
        const u32 lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, first = tile * kTile;
        const u32 word = F::kBits < 16 ? c * (R::kTokenBytes / 4) : (c ^ (r & 1) << 2) * 16;
        const u32 value = first * R::kTokenBytes + lane * Values<T, F, kDim>::kLane;
        return {shuffle(lane, lane), shuffle((first + r) * R::kTokenBytes + word, lane),
                shuffle(Block::kV + value, lane), shuffle(Block::kGrids + (first + r) * 8, lane)};
    }
};

// 16 tokens from number `token` on, in shared memory at `stage`; kWhole: all are attended to, else
// at least one is. Arrives on `empty` once all is in registers: see barrier_arrive_after.
template <class T, class F, int kDim, bool kWhole>
BILLFISH_DEVICE void take_tile(Sums<kDim>& sums, const Queries<T, F, kDim>& queries, Lane at,
                               u32 stage, u32 empty, int token, Span span) {
    using N = typename F::template Number<T>;
    const int r = at.number / 4, c = at.number % 4;
    const float none = __uint_as_float(0xff800000u);
    float s[4], most[2], v_low[2], v_one[2] = {1, 1};  // 1 / V's step
    uint2 grid[2];
    Keys<T, F, kDim> keys;
    Values<T, F, kDim> values;
    keys.load(stage + at.k);
    if constexpr (F::kBits < 16) {
        grid[0] = load_smem_8(stage + at.grid), grid[1] = load_smem_8(stage + at.grid + 64);
        values.load(stage + at.v);
    }
    keys.multiply(s, queries.b);
    if constexpr (F::kBits == 16) values.load(stage + at.v);  // into K's registers: 32 fewer
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bool counts = kWhole || span.has(token + half * 8 + r);
        float k_step = 1, k_low = 0, v_step = 0;
        if constexpr (F::kBits < 16) {
            const float step = fmaxf(T::to_float(grid[half].y & 0xffff), kLeastStep);
            k_step = T::to_float(grid[half].x & 0xffff), k_low = T::to_float(grid[half].x >> 16);
            v_step = log2_fast(step), v_one[half] = reciprocal_fast(step);
            v_low[half] = counts ? T::to_float(grid[half].y >> 16) : 0;  // unwritten: maybe NaN
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float& score = s[half * 2 + i];
            if constexpr (F::kBits < 16)  // V's step is a factor of the weight: + log2
                score = fmaf(score, k_step * queries.unit[i], fmaf(k_low, queries.sum[i], v_step));
            else
                score *= queries.unit[i];
            if (!counts) score = none;
            most[i] = half ? fmaxf(most[i], score) : score;
        }
    }
    // Before the vote: after it, ptxas would sink V's loads below it, too.
    const u32 seen = values.seen() ^ float_bits(most[0]);
    barrier_arrive_after(empty, __uint_as_float(seen), at.number == 0);
    // Sums are rescaled only when a score exceeds the old maximum by more than 8 (2^8): weights of
    // up to 256 do no harm, and mostly the vote is all there is to do.
    if (ballot(most[0] > sums.most[0] + 8 || most[1] > sums.most[1] + 8)) {
        float by[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            most[i] = fmaxf(max_over<32, 4>(most[i]), sums.most[i]);
            by[i] = exp2_fast(sums.most[i] - most[i]);
            sums.most[i] = most[i];
        }
        sums.scale(by);
    }
    u32 b[2], keep[2] = {~0u, ~0u};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float weight[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            weight[i] = exp2_fast(s[half * 2 + i] - sums.most[i]);
            const float p = F::kBits < 16 ? weight[i] * v_one[half] : weight[i];  // sum to 1
            sums.weight[i] += p;
            if constexpr (F::kBits < 16) sums.low[i] = fmaf(p, v_low[half], sums.low[i]);
        }
        b[half] = turn_matrix(N::pack(weight[0], weight[1]));
        if (F::kBits == 16 && !kWhole) {  // 0 times NaN is NaN
            const int first = token + half * 8 + 2 * c;
            keep[half] = (span.has(first) ? 0xffffu : 0) | (span.has(first + 1) ? 0xffff0000u : 0);
        }
    }
    values.multiply(sums.o, b, keep);
}

#endif

}  // namespace billfish
