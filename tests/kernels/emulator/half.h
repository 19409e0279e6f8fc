// Half precision in integers: no 16-bit type of C++ is known to every compiler.
#pragma once

#include <cstdint>
#include <cstring>

inline float half_to_float(uint16_t half) {
    const uint32_t rest = half & 0x7fff;
    const float subnormal = rest * 0x1p-24f;
    uint32_t bits;
    memcpy(&bits, &subnormal, 4);
    if (rest >= 0x400) bits = (rest << 13) + ((rest < 0x7c00 ? 127 - 15 : 255 - 31) << 23);
    bits |= (half & 0x8000u) << 16;
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

// To the nearest, of two as near to the even one.
inline uint16_t float_to_half(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    const uint32_t sign = bits >> 16 & 0x8000;
    uint32_t rest = bits & 0x7fffffff, shift = 13;
    if (rest > 0x7f800000) return sign | 0x7e00 | (rest >> 13 & 0x3ff);  // NaN
    if (rest > 0x47800000) rest = 0x47800000;  // 65536, which is infinity's code
    if (rest >= 113 << 23) {
        rest -= (127 - 15) << 23;
    } else {  // a subnormal, in units of 2^-24; below 2^-25 a zero
        const uint32_t exponent = rest >> 23;
        shift = exponent < 101 ? 25 : 126 - exponent;
        rest = (rest & 0x7fffff) | 0x800000;
    }
    return sign | (rest + (1 << (shift - 1)) - 1 + (rest >> shift & 1)) >> shift;
}
