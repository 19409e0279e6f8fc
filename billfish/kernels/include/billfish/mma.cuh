// The 16-bit types as tags: conversions and the tensor-core product of each.
// Values travel as raw bits (u16, or two of them in a u32), so no CUDA header is needed.
#pragma once

#include "billfish/ptx.cuh"

namespace billfish {

// clang-format off
#define BILLFISH_MMA_SPARSE(TYPE, SELECTOR)                                                       \
    asm volatile(                                                                                 \
        "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." TYPE "." TYPE ".f32"        \
        " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, " SELECTOR ";"       \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                          \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), \
          "r"(meta))
// clang-format on

struct Half {
    static BILLFISH_DEVICE float to_float(u32 bits) {
        float v;
        asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(static_cast<u16>(bits)));
        return v;
    }
    static BILLFISH_DEVICE u16 from_float(float v) {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
        return bits;
    }
    static BILLFISH_DEVICE u32 pack(float low, float high) {
        u32 v;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
        return v;
    }
    // Two numbers in a register, rounded once.
    static BILLFISH_DEVICE u32 add(u32 a, u32 b) {
        u32 v;
        asm("add.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
        return v;
    }
    static BILLFISH_DEVICE u32 mul(u32 a, u32 b) {
        u32 v;
        asm("mul.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
        return v;
    }
    static BILLFISH_DEVICE u32 fma(u32 a, u32 b, u32 c) {
        u32 v;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
        return v;
    }
    // d (16, 8) += a (16, 16) b (16, 8), fp32 sums; formats/fragment.py has the lanes' elements.
    static BILLFISH_DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
            " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    // d = a b: the first product of a sum, without zeroing d.
    static BILLFISH_DEVICE void mma_first(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
            " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
    }
    // d (16, 8) += a (16, 32) b (32, 8), a 2:4 sparse: of four inputs two, in a's registers like 16
    // dense ones. b[i]: inputs 8 i + 2 (lane % 4) and the next. `meta`: formats/layout.py,
    // brick_places; the lanes that hold it for even or `odd` steps of 32 inputs are asked.
    static BILLFISH_DEVICE void mma_sparse(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4],
                                           u32 meta, bool odd) {
        if (odd)
            BILLFISH_MMA_SPARSE("f16", "0x1");
        else
            BILLFISH_MMA_SPARSE("f16", "0x0");
    }
};

struct Bfloat {
    static BILLFISH_DEVICE float to_float(u32 bits) { return __uint_as_float(bits << 16); }
    static BILLFISH_DEVICE u16 from_float(float v) {
        u16 bits;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
        return bits;
    }
    static BILLFISH_DEVICE u32 pack(float low, float high) {
        u32 v;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
        return v;
    }
    static BILLFISH_DEVICE u32 fma(u32 a, u32 b, u32 c) {
        u32 v;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
        return v;
    }
#if __CUDA_ARCH__ >= 900
    static BILLFISH_DEVICE u32 add(u32 a, u32 b) {
        u32 v;
        asm("add.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
        return v;
    }
    static BILLFISH_DEVICE u32 mul(u32 a, u32 b) {
        u32 v;
        asm("mul.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
        return v;
    }
#else  // sm_80 has fma.bf16x2 only
    static BILLFISH_DEVICE u32 add(u32 a, u32 b) { return fma(a, 0x3f803f80u, b); }
    static BILLFISH_DEVICE u32 mul(u32 a, u32 b) { return fma(a, b, 0x80008000u); }
#endif
    static BILLFISH_DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
            " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    // d = a b: the first product of a sum, without zeroing d.
    static BILLFISH_DEVICE void mma_first(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
            " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
    }
    static BILLFISH_DEVICE void mma_sparse(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4],
                                           u32 meta, bool odd) {
        if (odd)
            BILLFISH_MMA_SPARSE("bf16", "0x1");
        else
            BILLFISH_MMA_SPARSE("bf16", "0x0");
    }
};

template <class T, class S>
BILLFISH_DEVICE u32 convert(u32 bits) {
    return T::from_float(S::to_float(bits));
}
template <>
BILLFISH_DEVICE u32 convert<Half, Half>(u32 bits) { return bits; }
template <>
BILLFISH_DEVICE u32 convert<Bfloat, Bfloat>(u32 bits) { return bits; }

// d (16, 8) += a (16, 32) b (32, 8): unsigned bytes of a, signed ones of b, sums modulo 2^32. A
// register has four neighbours along k: of a, row lane / 4 (+ 8: a[1], a[3]) and input 4 (lane % 4)
// (+ 16: a[2], a[3]); of b, column lane / 4 and input 4 (lane % 4) (+ 16: b1).
BILLFISH_DEVICE void mma_bytes(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32"
        " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d (16, 8) += a (16, 64) b (64, 8): unsigned numbers of 4 bits of a, signed ones of b. A register
// has eight neighbours along k: of a, row lane / 4 (+ 8: a[1], a[3]) and input 8 (lane % 4) (+ 32:
// a[2], a[3]); of b, column lane / 4 and input 8 (lane % 4) (+ 32: b1). sm_80 to sm_89 run it in
// half the time of mma_bytes for as many inputs, later ones emulate it.
BILLFISH_DEVICE void mma_nibbles(u32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k64.row.col.s32.u4.s4.s32"
        " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace billfish
