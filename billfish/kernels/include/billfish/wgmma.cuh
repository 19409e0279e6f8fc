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
#define BILLFISH_NAMES_8 \
    "%0,%1,%2,%3,%4,%5,%6,%7"
#define BILLFISH_SUMS_8(C) \
    C(d[0]), C(d[1]), C(d[2]), C(d[3]), C(d[4]), C(d[5]), \
    C(d[6]), C(d[7])
#define BILLFISH_NAMES_16 BILLFISH_NAMES_8 \
    ",%8,%9,%10,%11,%12,%13,%14,%15"
#define BILLFISH_SUMS_16(C) BILLFISH_SUMS_8(C), \
    C(d[8]), C(d[9]), C(d[10]), C(d[11]), C(d[12]), C(d[13]), \
    C(d[14]), C(d[15])
#define BILLFISH_NAMES_32 BILLFISH_NAMES_16 \
    ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define BILLFISH_SUMS_32(C) BILLFISH_SUMS_16(C), \
    C(d[16]), C(d[17]), C(d[18]), C(d[19]), C(d[20]), C(d[21]), \
    C(d[22]), C(d[23]), C(d[24]), C(d[25]), C(d[26]), C(d[27]), \
    C(d[28]), C(d[29]), C(d[30]), C(d[31])
#define BILLFISH_NAMES_48 BILLFISH_NAMES_32 \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define BILLFISH_SUMS_48(C) BILLFISH_SUMS_32(C), \
    C(d[32]), C(d[33]), C(d[34]), C(d[35]), C(d[36]), C(d[37]), \
    C(d[38]), C(d[39]), C(d[40]), C(d[41]), C(d[42]), C(d[43]), \
    C(d[44]), C(d[45]), C(d[46]), C(d[47])
#define BILLFISH_NAMES_64 BILLFISH_NAMES_48 \
    ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define BILLFISH_SUMS_64(C) BILLFISH_SUMS_48(C), \
    C(d[48]), C(d[49]), C(d[50]), C(d[51]), C(d[52]), C(d[53]), \
    C(d[54]), C(d[55]), C(d[56]), C(d[57]), C(d[58]), C(d[59]), \
    C(d[60]), C(d[61]), C(d[62]), C(d[63])
#define BILLFISH_NAMES_96 BILLFISH_NAMES_64 \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
    ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define BILLFISH_SUMS_96(C) BILLFISH_SUMS_64(C), \
    C(d[64]), C(d[65]), C(d[66]), C(d[67]), C(d[68]), C(d[69]), \
    C(d[70]), C(d[71]), C(d[72]), C(d[73]), C(d[74]), C(d[75]), \
    C(d[76]), C(d[77]), C(d[78]), C(d[79]), C(d[80]), C(d[81]), \
    C(d[82]), C(d[83]), C(d[84]), C(d[85]), C(d[86]), C(d[87]), \
    C(d[88]), C(d[89]), C(d[90]), C(d[91]), C(d[92]), C(d[93]), \
    C(d[94]), C(d[95])
#define BILLFISH_NAMES_128 BILLFISH_NAMES_96 \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
    ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define BILLFISH_SUMS_128(C) BILLFISH_SUMS_96(C), \
    C(d[96]), C(d[97]), C(d[98]), C(d[99]), C(d[100]), C(d[101]), \
    C(d[102]), C(d[103]), C(d[104]), C(d[105]), C(d[106]), C(d[107]), \
    C(d[108]), C(d[109]), C(d[110]), C(d[111]), C(d[112]), C(d[113]), \
    C(d[114]), C(d[115]), C(d[116]), C(d[117]), C(d[118]), C(d[119]), \
    C(d[120]), C(d[121]), C(d[122]), C(d[123]), C(d[124]), C(d[125]), \
    C(d[126]), C(d[127])
#define BILLFISH_WGMMA(TAG, TYPE, N, R, A0, A1, A2, A3, B)                                  \
    BILLFISH_DEVICE void wgmma(TAG, float (&d)[R], const u32 (&a)[4], u64 b) {              \
        asm volatile(                                                                       \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE              \
            " {" BILLFISH_NAMES_##R "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B        \
            ", 1, 1, 1, 0;"                                                                 \
            : BILLFISH_SUMS_##R("+f")                                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                          \
    }
#define BILLFISH_WIDTHS(TAG, TYPE)                             \
    BILLFISH_WGMMA(TAG, TYPE, 32, 16, 16, 17, 18, 19, 20)          \
    BILLFISH_WGMMA(TAG, TYPE, 64, 32, 32, 33, 34, 35, 36)          \
    BILLFISH_WGMMA(TAG, TYPE, 96, 48, 48, 49, 50, 51, 52)          \
    BILLFISH_WGMMA(TAG, TYPE, 128, 64, 64, 65, 66, 67, 68)         \
    BILLFISH_WGMMA(TAG, TYPE, 192, 96, 96, 97, 98, 99, 100)        \
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
