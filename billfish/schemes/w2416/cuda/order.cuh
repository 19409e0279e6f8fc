// w2416_order: x (m, k) -> (m, inputs) in the order in which w2416_batch reads it, so that TMA can
// fetch it: groups of 16 inputs in the order of the records, and of each 64 inputs of 2 bits those
// of a k16 step together (mixed.cuh: a lane decodes 16 inputs of a row, 4 a step).
#pragma once

#include "billfish/warp.cuh"

namespace billfish {

constexpr int kOrderThreads = 256;

// A thread stores 8 inputs. `columns` as in outliers.cuh, for inputs / 16 groups, of which the
// first 4 * blocks_2 have 2 bits.
__global__ void __launch_bounds__(kOrderThreads)
w2416_order(const u16* __restrict__ x, const int* __restrict__ columns, u16* __restrict__ ordered,
            int m, int k, int inputs, int blocks_2) {
    launch_dependents();
    const int chunks = inputs / 8;
    const int chunk = blockIdx.x * kOrderThreads + threadIdx.x, block = chunk / 8, part = chunk % 8;
    if (chunk >= chunks) return;
    const bool two = block < blocks_2;
    int column[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        column[i] = columns[block * 4 + (two ? i : part / 2)];
    dependency_wait();
    for (int token = blockIdx.y; token < m; token += gridDim.y) {
        const u16* row = x + static_cast<u64>(token) * k;
        uint4 v = {0, 0, 0, 0};
        if (two) {  // inputs 2 part and 2 part + 1 of four groups
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[i] = column[i] < 0 ? 0 : load_global_bits_4(row + column[i] + part * 2);
            v = {words[0], words[1], words[2], words[3]};
        } else if (column[0] >= 0) {
            v = load_global_bits_16(row + column[0] + part % 2 * 8);
        }
        *reinterpret_cast<uint4*>(ordered + static_cast<u64>(token) * inputs + chunk * 8) = v;
    }
}

}  // namespace billfish
