// One stage of K and V, in shared memory, against the query heads that share it: scores, running
// softmax, weighted sums, all on the tensor cores and in a warp's registers. engine/attention.cuh
// says why it is so.
#pragma once

#include "billfish/page.cuh"
#include "billfish/warp.cuh"

namespace billfish {

#if __CUDA_ARCH__ >= 900

constexpr int kRingBytes = 27648;  // 8 blocks of this fit on an SM

template <class F, int kDim>
struct AttendStage {
    using R = PageRecord<F, kDim>;
    static constexpr int kTokens = F::kStageTokens;
    static constexpr int kTiles = kTokens / 16;
    static constexpr int kV = kTokens * R::kTokenBytes;
    static constexpr int kGrids = 2 * kV;
    static constexpr int kBytes = kGrids + kTokens * R::kGridBytes;
    static constexpr int kStages = kRingBytes / kBytes < 6 ? kRingBytes / kBytes : 6;
    static_assert(kBytes % 128 == 0 && kStages >= 2, "ring");
};

constexpr float kLeastStep = 5.421010862427522e-20f;  // 2^-64: what has no step has no codes

// Which tokens count: [begin, length).
struct Span {
    int begin, length;
    BILLFISH_DEVICE bool has(int token) const { return token >= begin && token < length; }
    BILLFISH_DEVICE bool has_all(int token, int count) const {
        return token >= begin && token + count <= length;
    }
};

// B fragments of the queries: lane (r, c) holds head r, channels 32 j + 8 c to + 7 of each j.
template <class T, class F, int kDim>
struct Queries {
    u32 b[kDim / 32][4];
    float unit[2], sum[2];  // of heads 2 c and 2 c + 1: what scores are multiplied by, and sum q

    BILLFISH_DEVICE void load(const uint4 (&q)[kDim / 32], float scale) {
        const int c = threadIdx.x % 4;
        float v[kDim / 32][8], most = 0, total = 0;
#pragma unroll
        for (int j = 0; j < kDim / 32; ++j)
            b[j][0] = q[j].x, b[j][1] = q[j].y, b[j][2] = q[j].z, b[j][3] = q[j].w;
        if constexpr (F::kBits == 16) {
            unit[0] = unit[1] = scale, sum[0] = sum[1] = 0;
            return;
        }
        // fp16 for any T: a power of two brings the largest to [128, 256). Of 4-bit codes every
        // second pair comes 16 times too large (see fragments), so its queries go 16 times smaller.
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

// Scores of kTiles x 16 tokens: rows r and r + 8, heads 2 c and 2 c + 1. All loads come first and
// products of different tiles take turns: one after the other they would wait 33 cycles each. A
// tile alone takes turns between two sums.
template <class T, class F, int kDim, int kTiles>
BILLFISH_DEVICE void multiply_keys(float (*s)[4], u32 k, int r, int c,
                                   const u32 (&b)[kDim / 32][4]) {
    constexpr int kRow = PageRecord<F, kDim>::kTokenBytes, kWords = kRow / 16;  // a lane's
    using N = typename F::template Number<T>;
    u32 words[kTiles][2][kWords];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 row = k + (tile * 16 + half * 8 + r) * kRow;
            if constexpr (F::kBits < 16) {
                load_words(words[tile][half], row + c * kWords * 4);
            } else {
#pragma unroll
                for (int j = 0; j < kDim / 32; ++j) {
                    const uint4 v = load_smem_16(row + ((4 * j + c) ^ (r & 1) << 2) * 16);
                    u32* to = words[tile][half] + 4 * j;
                    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
                }
            }
        }
    }
    float other[4];
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {  // 16 channels
        const int j = step / 2, i = step % 2;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            u32 a[4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32(&w)[kWords] = words[tile][half];
                if constexpr (F::kBits == 16) {
                    a[half] = w[4 * j + 2 * i], a[half + 2] = w[4 * j + 2 * i + 1];
                } else if constexpr (F::kBits == 8) {
                    a[half] = w[step] & F::kFirst, a[half + 2] = w[step] >> 8 & F::kFirst;
                } else {
                    const u32 word = w[j] >> 8 * i;
                    a[half] = word & F::kFirst, a[half + 2] = word & F::kFirst << 4;
                }
            }
            float(&sum)[4] = kTiles == 1 && i ? other : s[tile];
            if (step == 0 || (kTiles == 1 && step == 1))
                N::mma_first(sum, a, b[j][2 * i], b[j][2 * i + 1]);
            else
                N::mma(sum, a, b[j][2 * i], b[j][2 * i + 1]);
        }
    }
    if constexpr (kTiles == 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[0][i] += other[i];
    }
}

// o += V^T P^T of 16 tokens. `v` is where this lane's words of the first 8 tokens are, `keep` what
// of them counts: 16 bits a token.
template <class T, class F, int kDim>
BILLFISH_DEVICE void multiply_values(float (&o)[kDim / 16][4], u32 v, u32 b0, u32 b1,
                                     const u32 (&keep)[2]) {
    constexpr int kNext = 8 * PageRecord<F, kDim>::kTokenBytes;  // the other 8 tokens
    using N = typename F::template Number<T>;
    constexpr int kWords = kDim == 64 && F::kBits == 4 ? 2 : 4;  // of a piece
    constexpr int kTiles = kWords * 8 / F::kBits;                // of 16 channels, of a piece
#pragma unroll
    for (int piece = 0; piece < kDim / 16 / kTiles; ++piece) {
        u32 low[kWords], high[kWords];
        load_words(low, v + piece * 512);
        load_words(high, v + kNext + piece * 512);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
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
            N::mma(o[piece * kTiles + t], a, b0, b1);
        }
    }
}

// Running softmax of two heads a lane: the largest exponent so far, sums of weights, of weights
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
};

// One stage in shared memory at `stage`, whose first token is number `token`; kWhole: all of its
// tokens count.
template <class T, class F, int kDim, bool kWhole>
BILLFISH_DEVICE void take_stage(Sums<kDim>& sums, const Queries<T, F, kDim>& queries, u32 stage,
                                int token, Span span) {
    using Stage = AttendStage<F, kDim>;
    constexpr int kTiles = Stage::kTiles;
    using N = typename F::template Number<T>;
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    const float none = __uint_as_float(0xff800000u);
    float s[kTiles][4], most[2] = {none, none};
    constexpr int kAtOnce = kTiles < 2 ? 1 : 2;
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += kAtOnce)
        multiply_keys<T, F, kDim, kAtOnce>(
            s + tile, stage + tile * 16 * PageRecord<F, kDim>::kTokenBytes, r, c, queries.b);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = tile * 16 + half * 8 + r;
            float k_step = 1, k_low = 0, v_step = 0;
            if constexpr (F::kBits < 16) {
                const uint2 grid = load_smem_8(stage + Stage::kGrids + row * 8);
                k_step = T::to_float(grid.x & 0xffff), k_low = T::to_float(grid.x >> 16);
                v_step = log2_fast(fmaxf(T::to_float(grid.y & 0xffff), kLeastStep));
            }
            const bool counts = kWhole || span.has(token + row);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& score = s[tile][half * 2 + i];
                if constexpr (F::kBits < 16)  // of the weights that codes get: with V's step
                    score = fmaf(score, k_step * queries.unit[i],
                                 fmaf(k_low, queries.sum[i], v_step));
                else
                    score *= queries.unit[i];
                if (!counts) score = none;
                most[i] = fmaxf(most[i], score);
            }
        }
    }
    // Sums are brought to a new largest exponent only when it is 2^8 above the old one: weights of
    // up to 256 do no harm, and mostly a vote is all there is to do.
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
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        u32 b[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float weight[2], low = 0, without = 1;  // the step: of the weights that sum to 1
            if constexpr (F::kBits < 16) {
                const int row = tile * 16 + half * 8 + r;
                const u32 grid = load_smem_4(stage + Stage::kGrids + row * 8 + 4);
                without = reciprocal_fast(fmaxf(T::to_float(grid & 0xffff), kLeastStep));
                if (kWhole || span.has(token + row)) low = T::to_float(grid >> 16);  // else NaN?
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                weight[i] = exp2_fast(s[tile][half * 2 + i] - sums.most[i]);
                const float p = weight[i] * without;
                sums.weight[i] += p;
                if constexpr (F::kBits < 16)
                    sums.low[i] = fmaf(p, low, sums.low[i]);
            }
            b[half] = turn_matrix(N::pack(weight[0], weight[1]));
        }
        u32 keep[2] = {~0u, ~0u};
        if (F::kBits == 16 && !kWhole) {  // 0 times NaN is NaN
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = token + tile * 16 + half * 8 + 2 * c;
                keep[half] = (span.has(at) ? 0xffffu : 0) | (span.has(at + 1) ? 0xffff0000u : 0);
            }
        }
        constexpr int kLane = F::kBits == 4 ? kDim / 8 : 16;
        multiply_values<T, F, kDim>(
            sums.o, stage + Stage::kV + tile * 16 * PageRecord<F, kDim>::kTokenBytes + lane * kLane,
            b[0], b[1], keep);
    }
}

#endif

}  // namespace billfish
