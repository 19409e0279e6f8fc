// Layout of a page of the KV cache: 64 tokens of one KV head are one record, [K][V][grids].
//
// K is stored token by token, V in groups of 8 tokens, both in the order in which lanes load
// fragments of mma.m16n8k16 (engine/cuda/pool.py has the place of each number). No two tokens
// share a byte of K or a halfword of V, so that appending never reads. A grid is (step, low) of K,
// then of V.
#pragma once

#include "billfish/mma.cuh"

namespace billfish {

constexpr int kPageTokens = 64;

// kStageTokens: tokens of one stage, 8 KB at head_dim 128. Number: the type that is multiplied;
// codes are fp16 subnormals whatever the model's type is.
struct Kv4 {
    static constexpr int kBits = 4, kStageTokens = 64;
    static constexpr u32 kFirst = 0x000f000fu;  // lowest code of each half; then those above
    template <class T>
    using Number = Half;
};
struct Kv8 {
    static constexpr int kBits = 8, kStageTokens = 32;
    static constexpr u32 kFirst = 0x00ff00ffu;
    template <class T>
    using Number = Half;
};
struct Kv16 {
    static constexpr int kBits = 16, kStageTokens = 16;
    template <class T>
    using Number = T;
};

template <class F, int kDim>
struct PageRecord {
    static constexpr int kTokenBytes = kDim * F::kBits / 8;  // of K or of V
    static constexpr int kV = kPageTokens * kTokenBytes, kGrids = 2 * kV;
    static constexpr int kGridBytes = F::kBits < 16 ? 8 : 0;
    static constexpr int kBytes = kGrids + kPageTokens * kGridBytes;
};

}  // namespace billfish
