// Deferred RMS norms of few tokens: W (g x / rms) is (W (g x)) / rms, so the division moves into
// the epilogue of the product after the norm, and the norm needs no launch.
//
//     the product before  adds its results to the hidden states; stores the new hidden states,
//                         those times the norm's weights g, and a sum of squares of every 16
//     the product after   takes the hidden states times g as its input, adds up the squares before
//                         it multiplies, and multiplies its results by 1 / rms of their row
//
// Sums of squares are added in the same order whatever the tile and the number of tokens. Results
// are rounded once less than after a norm's own launch, which rounds x / rms and g x / rms.
#pragma once

#include "billfish/norm.cuh"
#include "billfish/team_loops.cuh"

namespace billfish {

constexpr int kPart = 16;         // outputs of a sum of squares
constexpr int kScaleBytes = 128;  // of shared memory: a scale for each token

#if __CUDA_ARCH__ >= 900

BILLFISH_DEVICE int parts_of(int width) { return (width + kPart - 1) / kPart; }

// The epilogue of the product after a deferred norm (with `squares`) or before one (with `hidden`),
// in place of Stored (team_loops.cuh).
template <class T>
struct Deferred {
    static constexpr bool kDeferred = true;
    const u16* bias;
    u16* out;  // results; with `hidden` the sums times `weight`
    bool gated;
    const float* squares;  // of the input, (m, parts_of(width)), or null
    int width;
    float eps, unit;  // weights were divided by `unit`, so that no product overflows
    u16* hidden;  // (m, n) or null: results are added to it
    const u16* weight;
    float* left;  // (m, parts_of(n)): sums of squares of `hidden`

    // In shared memory, of each token: what its results are multiplied by.
    static BILLFISH_DEVICE u32 scale_at(const Ring& ring, int token) {
        return ring.stages_at - kScaleBytes + 4 * token;
    }

    // Math warp `warp` computes the scales of its rows; `ready` says that all warps have.
    BILLFISH_DEVICE void prepare(const Ring& ring, int warp, int lane, int m) const {
        if (squares == nullptr) return;
        dependency_wait();
        const int parts = parts_of(width);
        for (int token = warp; token < m; token += kMathWarps) {
            const float* const from = squares + token * parts;
            float sum = 0;
#pragma unroll 8
            for (int i = lane; i < parts; i += 32)
                sum = __fadd_rn(sum, __uint_as_float(load_global_bits_4(from + i)));
            sum = sum_over(sum);
            if (lane == 0)
                store_smem_float(scale_at(ring, token), unit * norm_scale(sum, width, eps));
        }
        barrier_arrive(ring.ready);
    }

    BILLFISH_DEVICE float scaled(const Ring& ring, float sum, int token) const {
        return squares == nullptr ? sum : sum * load_smem_float(scale_at(ring, token));
    }

    // A result, if it is `here`; its sum's square.
    BILLFISH_DEVICE float put(float total, int token, int output, int n, bool here) const {
        if (!here) return 0;
        const u32 at = token * n + output;  // 64 bits would cost registers, and spill
        if (bias != nullptr) total += T::to_float(bias[output]);
        const u32 result = T::from_float(total);
        if (hidden == nullptr) {
            out[at] = result;
            return 0;
        }
        const u32 sum = T::add(hidden[at], result);
        hidden[at] = sum, out[at] = T::mul(sum, weight[output]);
        const float v = T::to_float(sum);
        return __fmul_rn(v, v);
    }

    template <class Exchange, class Worker>
    BILLFISH_DEVICE void rows(const Ring& ring, u32 buffer, const Worker& me, int m, int n,
                              int first, int rows) const {
        if (squares != nullptr) barrier_wait(ring.ready, 0);
#pragma unroll 1
        for (int token = me.index; token < m; token += kMathWarps) {
            const int row = me.lane, output = first + row;  // a block of one band has 32
            const float sum =
                scaled(ring, Exchange::template add<float>(buffer, token, row, rows), token);
            if (gated) {
                const float up = shuffle_xor(sum, 8);
                const u32 y = swiglu<T>(T::from_float(sum), T::from_float(up));
                if (me.lane % 16 < 8 && output < n)
                    out[(token * n + output & ~15u) / 2 + row % 8] = y;
                continue;
            }
            const float part = sum_over<kPart>(put(sum, token, output, n, output < n));
            if (hidden != nullptr && me.lane % kPart == 0 && output < n)
                left[token * parts_of(n) + output / kPart] = part;
        }
    }

    template <class Exchange, class Sums, class Me, class Finish>
    BILLFISH_DEVICE void bricks(const Ring& ring, const Sums& acc, u32 buffer, const Me& me,
                                int rank, int have, int m, int n, int first,
                                Finish finish) const {
        if (squares != nullptr) barrier_wait(ring.ready, 0);
        const auto put_all = [&](int token, int output, const float (&sum)[2][2]) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const int row = token + odd;
                const bool here = row < m;
                const float upper = scaled(ring, sum[0][odd], row);
                const float lower = scaled(ring, sum[1][odd], row);
                if (gated) {
                    if (here && output + 8 < n)
                        out[(row * n + output & ~15u) / 2 + me.lane / 4] =
                            swiglu<T>(T::from_float(upper), T::from_float(lower));
                    continue;
                }
                const float square = put(upper, row, output, n, here && output < n) +
                                     put(lower, row, output + 8, n, here && output + 8 < n);
                const float part = sum_over<32, 4>(square);  // over outputs: a lane's tokens stay
                if (hidden != nullptr && me.lane < 4 && here && output < n)
                    left[row * parts_of(n) + output / kPart] = part;
            }
        };
        Exchange::template add<true>(acc, buffer, me, rank, have, m, first, finish, put_all);
    }
};

#endif

}  // namespace billfish
