// How K and V lie in a page of the cache: 64 tokens of one K head are one record, [K][V][grids].
//
// K is token by token, V by groups of 8 tokens, both in the order in which lanes take fragments of
// mma.m16n8k16 (engine/pool.py says where each number is), and each token's bits are bytes and
// halves of its own, so that appending never reads. A grid is (step, low) of K, then of V.
#pragma once

#include "billfish/mma.cuh"

namespace billfish {

constexpr int kPageTokens = 64;

// kStageTokens: what is copied at once, 8 KB at 128 channels. Number: what is multiplied; codes are
// fp16 subnormals whatever the model's type is.
struct Kv4 {
    static constexpr int kBits = 4, kStageTokens = 64;
    static constexpr u32 kFirst = 0x000f000fu;  // a pair of codes; the next are to its left
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
