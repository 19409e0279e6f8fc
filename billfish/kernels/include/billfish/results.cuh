// Epilogue of a tile whose fp32 sums lie in a team's registers (a warpgroup, 64 outputs x kTokens):
// a cluster of two adds its parts, results are stored as whole lines.
#pragma once

#include "billfish/tiles.cuh"

namespace billfish {

// A team turns 16 tokens x 64 outputs in a buffer: lines of 128 bytes, padded by 16. Two buffers
// halve the number of barriers, unless 256 tokens leave too little shared memory.
constexpr int kResultLine = 144, kResultBytes = 16 * kResultLine;
constexpr BILLFISH_DEVICE int result_buffers(int tokens) { return tokens < 256 ? 2 : 1; }

#if __CUDA_ARCH_FEAT_SM90_ALL

// Up to eight results where a row's length is no multiple of eight.
BILLFISH_DEVICE void store_some(u16* to, uint4 v, int count) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < count) to[i] = words[i / 2] >> i % 2 * 16;
}

// Stores the 16s [first, last) of the tokens. `row_0` is the team's first output, `turn` its
// buffers, `barrier` its own. Each warp its 16 outputs, 32 bytes of a token, took 1.3 us for 128 x
// 128 results. kGated: a thread has gates r and their ups, rows r + 8; 32 outputs remain.
template <class T, int kTokens, bool kGated>
BILLFISH_DEVICE void store_lines(const float (&acc)[kTokens / 2], int first, int last,
                                 const u16* bias, u16* out, int m, int n, int token_0, int row_0,
                                 u32 turn, int barrier, int thread) {
    constexpr int kBuffers = result_buffers(kTokens), kParts = kTokens / 16;
    const int warp = thread / 32 % 4, lane = thread % 32;
    float add[2] = {0.0f, 0.0f};
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
        const int row = row_0 + warp * 16 + lane / 4 + lower * 8;
        if (bias != nullptr && row < n) add[lower] = T::to_float(bias[row]);
    }
    const int right = lane / 8 % 2;  // of a warp's 16 outputs; of gates nothing is read from there
    const u32 to = turn + (lane / 16 * 8 + lane % 8) * kResultLine +
                   (kGated ? right * 64 + warp * 16 : warp * 32 + right * 16);
    const u32 from = turn + (warp * 4 + lane / 8) * kResultLine + lane % 8 * 16;
    const int row = row_0 + (lane % 8 * 8 << kGated), token = token_0 + warp * 4 + lane / 8;
    // Tokens that are this lane's from its first on, and where it stores them.
    const int tokens = row >= n || (kGated && lane % 8 >= 4) ? 0 : m - token;
    u16* place = out + ((static_cast<u64>(token) * n + row) >> kGated);
    const u64 step = static_cast<u64>(16 * n) >> kGated;
    const bool aligned = n % 8 == 0;
#pragma unroll
    for (int part = 0; part < kParts; part += kBuffers) {
        if (part + kBuffers <= first || part >= last) continue;
        __syncwarp();
        sync_pair<kTeamThreads>(barrier);  // buffers have been read
#pragma unroll
        for (int i = 0; i < kBuffers && part + i < kParts; ++i) {
            u32 pair[4];  // [tokens 0-7, 8-15][outputs 0-7, 8-15]
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int e = (part + i) * 8 + j / 2 * 4 + j % 2 * 2;
                pair[j] = T::pack(acc[e] + add[j % 2], acc[e + 1] + add[j % 2]);
            }
            if (kGated)
                pair[0] = swiglu<T>(pair[0], pair[1]), pair[2] = swiglu<T>(pair[2], pair[3]);
            store_matrices_turned(to + i * kResultBytes, pair);
        }
        sync_pair<kTeamThreads>(barrier);
        uint4 v[kBuffers];
#pragma unroll
        for (int i = 0; i < kBuffers && part + i < kParts; ++i)
            v[i] = load_smem_16(from + i * kResultBytes);
#pragma unroll
        for (int i = 0; i < kBuffers && part + i < kParts; ++i) {
            if ((part + i) * 16 >= tokens || part + i < first || part + i >= last) continue;
            u16* here = place + (part + i) * step;
            if (aligned)
                *reinterpret_cast<uint4*>(here) = v[i];
            else
                store_some(here, v[i], n - row);
        }
    }
}

template <class T, int kTokens>
BILLFISH_DEVICE void store_tile(const float (&acc)[kTokens / 2], int first, int last,
                                const u16* bias, u16* out, int m, int n, int token_0, int row_0,
                                bool gated, u32 turn, int barrier, int thread) {
    if (gated)
        store_lines<T, kTokens, true>(acc, first, last, bias, out, m, n, token_0, row_0, turn,
                                      barrier, thread);
    else
        store_lines<T, kTokens, false>(acc, first, last, bias, out, m, n, token_0, row_0, turn,
                                       barrier, thread);
}

// The sums of a tile that two blocks of a cluster share: block 1 adds the second half of the tokens
// and block 0 the first, in 16s. Each is sent what is its own, to its shared memory at `room`,
// kBands x kTokens / 2 x kThreads numbers, and counts them on its `barrier`. All threads of both
// blocks take part in one barrier of the cluster.
template <int kBands, int kTokens, int kThreads>
struct Halves {
    static constexpr int kParts = kTokens / 16;
    int rank, first, last;  // this block's
    BILLFISH_DEVICE explicit Halves(int rank)
        : rank(rank), first(rank ? kParts / 2 : 0), last(rank ? kParts : kParts / 2) {}

    BILLFISH_DEVICE void add(float (&acc)[kBands][kTokens / 2], u32 room, u32 barrier,
                             int thread) const {
        if (thread == 0) barrier_arrive_expect(barrier, kBands * (last - first) * 8 * kThreads * 4);
        __syncwarp();
        cluster_arrive_release(), cluster_wait();  // both have read their rings
        const u32 mine = room + thread * 16, there = in_block(mine, rank ^ 1);
        const u32 signal = in_block(barrier, rank ^ 1);
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
#pragma unroll
            for (int i = 0; i < kTokens / 2; i += 4)
                if ((i / 8 >= kParts / 2) != rank)
                    store_remote(there + place(band, i), acc[band][i], acc[band][i + 1],
                                 acc[band][i + 2], acc[band][i + 3], signal);
        }
        barrier_wait(barrier, 0);
#pragma unroll
        for (int band = 0; band < kBands; ++band) {
#pragma unroll
            for (int i = 0; i < kTokens / 2; i += 4) {
                if ((i / 8 >= kParts / 2) != rank) continue;
                const uint4 v = load_smem_16(mine + place(band, i));
                acc[band][i] += __uint_as_float(v.x), acc[band][i + 1] += __uint_as_float(v.y);
                acc[band][i + 2] += __uint_as_float(v.z), acc[band][i + 3] += __uint_as_float(v.w);
            }
        }
    }

    static BILLFISH_DEVICE u32 place(int band, int i) {
        return (band * kTokens / 2 + i) * kThreads * 4;
    }
};

#endif

}  // namespace billfish
