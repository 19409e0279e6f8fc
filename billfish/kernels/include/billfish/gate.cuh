// SwiGLU in the epilogue of a product.
#pragma once

#include "billfish/mma.cuh"
#include "billfish/warp.cuh"

namespace billfish {

// silu(gate) * up of two numbers each, rounded after every operation as torch does.
template <class T>
BILLFISH_DEVICE u32 swiglu(u32 gate, u32 up) {
    float silu[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float v = T::to_float(gate >> 16 * i & 0xffff);
        silu[i] = __fdividef(v, 1.0f + exp2_fast(-1.4426950408889634f * v));
    }
    return T::mul(T::pack(silu[0], silu[1]), up);
}

}  // namespace billfish
