// wgmma: a warpgroup's asynchronous product of 64 outputs x 16 inputs (of bytes, and of 2:4 sparse
// ones: 32) in registers and as many inputs x N tokens in shared memory. Sums and fragments of a
// group in flight must not be touched.
#pragma once

#include "billfish/mma.cuh"

namespace billfish {

#if __CUDA_ARCH_FEAT_SM90_ALL

// Before the first product, and after registers that a product uses were written.
BILLFISH_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes a group of products.
BILLFISH_DEVICE void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the newest groups are still under way.
template <int kPending>
BILLFISH_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Moves registers from the warpgroup that copies to those that multiply.
template <int kRegisters>
BILLFISH_DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
BILLFISH_DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The shared-memory descriptor of x: lines of 128 bytes (64 inputs) a token, 8 tokens in 1024
// bytes, 128-byte swizzle. The next 16 inputs are 32 bytes further on.
BILLFISH_DEVICE u64 x_descriptor(u32 address) {
    constexpr u64 kSwizzle128 = 1ull << 62, kEightTokens = static_cast<u64>(1024 >> 4) << 32;
    return kSwizzle128 | kEightTokens | 1ull << 16 | (address & 0x3ffff) >> 4;
}

// The same `bytes` further on: its upper half stays as it is, a constant without instructions.
BILLFISH_DEVICE u64 x_further(u64 descriptor, u32 bytes) {
    return descriptor >> 32 << 32 | (static_cast<u32>(descriptor) + bytes / 16);
}

// Operands: sums are %0 to %(N / 2 - 1), C their constraint; then the fragment and x's descriptor.
// clang-format off
#define BILLFISH_EIGHT(C, I) \
    C(d[I]), C(d[I + 1]), C(d[I + 2]), C(d[I + 3]), \
    C(d[I + 4]), C(d[I + 5]), C(d[I + 6]), C(d[I + 7])
#define BILLFISH_NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define BILLFISH_SUMS_8(C) BILLFISH_EIGHT(C, 0)
#define BILLFISH_NAMES_16 BILLFISH_NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define BILLFISH_SUMS_16(C) BILLFISH_SUMS_8(C), BILLFISH_EIGHT(C, 8)
#define BILLFISH_NAMES_24 BILLFISH_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define BILLFISH_SUMS_24(C) BILLFISH_SUMS_16(C), BILLFISH_EIGHT(C, 16)
#define BILLFISH_NAMES_32 BILLFISH_NAMES_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define BILLFISH_SUMS_32(C) BILLFISH_SUMS_24(C), BILLFISH_EIGHT(C, 24)
#define BILLFISH_NAMES_40 BILLFISH_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define BILLFISH_SUMS_40(C) BILLFISH_SUMS_32(C), BILLFISH_EIGHT(C, 32)
#define BILLFISH_NAMES_48 BILLFISH_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define BILLFISH_SUMS_48(C) BILLFISH_SUMS_40(C), BILLFISH_EIGHT(C, 40)
#define BILLFISH_NAMES_56 BILLFISH_NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define BILLFISH_SUMS_56(C) BILLFISH_SUMS_48(C), BILLFISH_EIGHT(C, 48)
#define BILLFISH_NAMES_64 BILLFISH_NAMES_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define BILLFISH_SUMS_64(C) BILLFISH_SUMS_56(C), BILLFISH_EIGHT(C, 56)
#define BILLFISH_NAMES_72 BILLFISH_NAMES_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define BILLFISH_SUMS_72(C) BILLFISH_SUMS_64(C), BILLFISH_EIGHT(C, 64)
#define BILLFISH_NAMES_80 BILLFISH_NAMES_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define BILLFISH_SUMS_80(C) BILLFISH_SUMS_72(C), BILLFISH_EIGHT(C, 72)
#define BILLFISH_NAMES_88 BILLFISH_NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define BILLFISH_SUMS_88(C) BILLFISH_SUMS_80(C), BILLFISH_EIGHT(C, 80)
#define BILLFISH_NAMES_96 BILLFISH_NAMES_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define BILLFISH_SUMS_96(C) BILLFISH_SUMS_88(C), BILLFISH_EIGHT(C, 88)
#define BILLFISH_NAMES_104 BILLFISH_NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define BILLFISH_SUMS_104(C) BILLFISH_SUMS_96(C), BILLFISH_EIGHT(C, 96)
#define BILLFISH_NAMES_112 BILLFISH_NAMES_104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define BILLFISH_SUMS_112(C) BILLFISH_SUMS_104(C), BILLFISH_EIGHT(C, 104)
#define BILLFISH_NAMES_120 BILLFISH_NAMES_112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define BILLFISH_SUMS_120(C) BILLFISH_SUMS_112(C), BILLFISH_EIGHT(C, 112)
#define BILLFISH_NAMES_128 BILLFISH_NAMES_120 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define BILLFISH_SUMS_128(C) BILLFISH_SUMS_120(C), BILLFISH_EIGHT(C, 120)
#define BILLFISH_WGMMA(TAG, TYPE, N, R, A0, A1, A2, A3, B)                                  \
    BILLFISH_DEVICE void wgmma(TAG, float (&d)[R], const u32 (&a)[4], u64 b) {              \
        asm volatile(                                                                       \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE              \
            " {" BILLFISH_NAMES_##R "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B        \
            ", 1, 1, 1, 0;"                                                                 \
            : BILLFISH_SUMS_##R("+f")                                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                          \
    }
#define BILLFISH_WIDTHS(TAG, TYPE) \
    BILLFISH_WGMMA(TAG, TYPE, 16, 8, 8, 9, 10, 11, 12) \
    BILLFISH_WGMMA(TAG, TYPE, 32, 16, 16, 17, 18, 19, 20) \
    BILLFISH_WGMMA(TAG, TYPE, 48, 24, 24, 25, 26, 27, 28) \
    BILLFISH_WGMMA(TAG, TYPE, 64, 32, 32, 33, 34, 35, 36) \
    BILLFISH_WGMMA(TAG, TYPE, 80, 40, 40, 41, 42, 43, 44) \
    BILLFISH_WGMMA(TAG, TYPE, 96, 48, 48, 49, 50, 51, 52) \
    BILLFISH_WGMMA(TAG, TYPE, 112, 56, 56, 57, 58, 59, 60) \
    BILLFISH_WGMMA(TAG, TYPE, 128, 64, 64, 65, 66, 67, 68) \
    BILLFISH_WGMMA(TAG, TYPE, 144, 72, 72, 73, 74, 75, 76) \
    BILLFISH_WGMMA(TAG, TYPE, 160, 80, 80, 81, 82, 83, 84) \
    BILLFISH_WGMMA(TAG, TYPE, 176, 88, 88, 89, 90, 91, 92) \
    BILLFISH_WGMMA(TAG, TYPE, 192, 96, 96, 97, 98, 99, 100) \
    BILLFISH_WGMMA(TAG, TYPE, 208, 104, 104, 105, 106, 107, 108) \
    BILLFISH_WGMMA(TAG, TYPE, 224, 112, 112, 113, 114, 115, 116) \
    BILLFISH_WGMMA(TAG, TYPE, 240, 120, 120, 121, 122, 123, 124) \
    BILLFISH_WGMMA(TAG, TYPE, 256, 128, 128, 129, 130, 131, 132)

// d (64, 2 R) += a (64, 16) x^T (16, 2 R); d is distributed like mma's, 16 outputs a warp.
BILLFISH_WIDTHS(Half, f16)
BILLFISH_WIDTHS(Bfloat, bf16)

#define BILLFISH_WGMMA_SP(TYPE, N, R, A0, A1, A2, A3, B, M, SELECTOR)                           \
        asm volatile(                                                                       \
            "wgmma.mma_async.sp.sync.aligned.m64n" #N "k32.f32." #TYPE "." #TYPE           \
            " {" BILLFISH_NAMES_##R "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B        \
            ", %" #M ", " SELECTOR ", 1, 1, 1, 0;"                                          \
            : BILLFISH_SUMS_##R("+f")                                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(meta))
#define BILLFISH_WGMMA_SPARSE(TAG, TYPE, N, R, A0, A1, A2, A3, B, M)                        \
    BILLFISH_DEVICE void wgmma_sparse(TAG, float (&d)[R], const u32 (&a)[4], u64 b,         \
                                      u32 meta, bool odd) {                                 \
        if (odd)                                                                            \
            BILLFISH_WGMMA_SP(TYPE, N, R, A0, A1, A2, A3, B, M, "1");                       \
        else                                                                                \
            BILLFISH_WGMMA_SP(TYPE, N, R, A0, A1, A2, A3, B, M, "0");                       \
    }
#define BILLFISH_SPARSE_WIDTHS(TAG, TYPE)                                                   \
    BILLFISH_WGMMA_SPARSE(TAG, TYPE, 32, 16, 16, 17, 18, 19, 20, 21)                        \
    BILLFISH_WGMMA_SPARSE(TAG, TYPE, 64, 32, 32, 33, 34, 35, 36, 37)                        \
    BILLFISH_WGMMA_SPARSE(TAG, TYPE, 128, 64, 64, 65, 66, 67, 68, 69)                       \
    BILLFISH_WGMMA_SPARSE(TAG, TYPE, 256, 128, 128, 129, 130, 131, 132, 133)

// d (64, 2 R) += a (64, 32) x^T (32, 2 R), a 2:4 sparse: as mma_sparse, 16 outputs a warp. The next
// 32 inputs of x are 64 bytes further on.
BILLFISH_SPARSE_WIDTHS(Half, f16)
BILLFISH_SPARSE_WIDTHS(Bfloat, bf16)

#define BILLFISH_WGMMA_BYTES(N, R, A0, A1, A2, A3, B)                                       \
    BILLFISH_DEVICE void wgmma_bytes(u32 (&d)[R], const u32 (&a)[4], u64 b) {               \
        asm volatile(                                                                       \
            "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.u8.s8"                          \
            " {" BILLFISH_NAMES_##R "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", 1;" \
            : BILLFISH_SUMS_##R("+r")                                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                          \
    }

// d (64, 2 R) += a (64, 32) x^T (32, 2 R): unsigned bytes of a, signed ones of x, sums modulo 2^32.
// x's lines have 128 inputs; the next 32 are 32 bytes further on.
BILLFISH_WGMMA_BYTES(32, 16, 16, 17, 18, 19, 20)
BILLFISH_WGMMA_BYTES(64, 32, 32, 33, 34, 35, 36)
BILLFISH_WGMMA_BYTES(128, 64, 64, 65, 66, 67, 68)
BILLFISH_WGMMA_BYTES(256, 128, 128, 129, 130, 131, 132)
// clang-format on

#endif

}  // namespace billfish
