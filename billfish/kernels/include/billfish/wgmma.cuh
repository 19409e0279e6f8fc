// wgmma: a warpgroup's asynchronous product of 64 outputs x 16 inputs in registers and 16 inputs x
// N tokens in shared memory. Sums and fragments of a group in flight must not be touched.
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

// Operands: sums are %0 to %(N / 2 - 1); then the fragment and the descriptor of x.
// clang-format off
#define BILLFISH_NAMES_8 \
    "%0,%1,%2,%3,%4,%5,%6,%7"
#define BILLFISH_SUMS_8 \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
    "+f"(d[6]), "+f"(d[7])
#define BILLFISH_NAMES_16 BILLFISH_NAMES_8 \
    ",%8,%9,%10,%11,%12,%13,%14,%15"
#define BILLFISH_SUMS_16 BILLFISH_SUMS_8, \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
    "+f"(d[14]), "+f"(d[15])
#define BILLFISH_NAMES_32 BILLFISH_NAMES_16 \
    ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define BILLFISH_SUMS_32 BILLFISH_SUMS_16, \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), \
    "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
    "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define BILLFISH_NAMES_48 BILLFISH_NAMES_32 \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define BILLFISH_SUMS_48 BILLFISH_SUMS_32, \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), \
    "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), \
    "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define BILLFISH_NAMES_64 BILLFISH_NAMES_48 \
    ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define BILLFISH_SUMS_64 BILLFISH_SUMS_48, \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), \
    "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
    "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define BILLFISH_NAMES_128 BILLFISH_NAMES_64 \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
    ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95" \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
    ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define BILLFISH_SUMS_128 BILLFISH_SUMS_64, \
    "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), \
    "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), \
    "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), \
    "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), \
    "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), \
    "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), \
    "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), \
    "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), \
    "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), \
    "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), \
    "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
#define BILLFISH_WGMMA(TAG, TYPE, N, R, A0, A1, A2, A3, B)                                  \
    BILLFISH_DEVICE void wgmma(TAG, float (&d)[R], const u32 (&a)[4], u64 b) {              \
        asm volatile(                                                                       \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE              \
            " {" BILLFISH_NAMES_##R "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B        \
            ", 1, 1, 1, 0;"                                                                 \
            : BILLFISH_SUMS_##R                                                             \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                          \
    }
#define BILLFISH_WIDTHS(TAG, TYPE)                             \
    BILLFISH_WGMMA(TAG, TYPE, 32, 16, 16, 17, 18, 19, 20)          \
    BILLFISH_WGMMA(TAG, TYPE, 64, 32, 32, 33, 34, 35, 36)          \
    BILLFISH_WGMMA(TAG, TYPE, 128, 64, 64, 65, 66, 67, 68)         \
    BILLFISH_WGMMA(TAG, TYPE, 256, 128, 128, 129, 130, 131, 132)

// d (64, 2 R) += a (64, 16) x^T (16, 2 R); d is distributed like mma's, 16 outputs a warp.
BILLFISH_WIDTHS(Half, f16)
BILLFISH_WIDTHS(Bfloat, bf16)
// clang-format on

#endif

}  // namespace billfish
