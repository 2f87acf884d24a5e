// Any processor GCC or clang knows: 4 lanes, plain vector arithmetic.
#pragma once

#include "portable.h"

namespace {

// 4 x 2 accumulators fit the 16 registers that every 64-bit ISA has.
constexpr int TILE_ROWS = 4, TILE_VECS = 2;

PAGED_ATTN_INLINE F fma(F a, F b, F c) { return a * b + c; }
PAGED_ATTN_INLINE F max(F bound, F x) { return x < bound ? bound : x; }
PAGED_ATTN_INLINE F min(F bound, F x) { return x > bound ? bound : x; }
// adding 1.5 * 2^23 leaves no bits below one
PAGED_ATTN_INLINE F round(F x) { return (x + set1(12582912.f)) - set1(12582912.f); }
PAGED_ATTN_INLINE float reduce_max(F x) {
  float m = x[0];
  for (int i = 1; i < W; ++i) m = x[i] < m ? m : x[i];
  return m;
}
PAGED_ATTN_INLINE float reduce_add(F x) { return (x[0] + x[1]) + (x[2] + x[3]); }

PAGED_ATTN_INLINE U widen(U16 x) { return __builtin_convertvector(x, U); }
PAGED_ATTN_INLINE U widen(U8 x) { return __builtin_convertvector(x, U); }
PAGED_ATTN_INLINE U16 widen_to_16(U8 x) { return __builtin_convertvector(x, U16); }
PAGED_ATTN_INLINE F signed_to_float(U8 x) {
  typedef int8_t I8 __attribute__((vector_size(W)));
  return __builtin_convertvector(__builtin_convertvector((I8)x, I), F);
}

// A narrow float's bits, moved to a float32's place, read 2^(127 - bias) too small.
PAGED_ATTN_INLINE F half_to_float(U16 h) {
  const U x = widen(h);
  const U magnitude = x & 0x7fffu;
  const U value = bits(as_float(magnitude << 13) * set1(0x1p112f));
  const U special = magnitude << 13 | 0x7f800000u;
  return as_float(select((I)(magnitude >= 0x7c00u), special, value) | (x & 0x8000u) << 16);
}
PAGED_ATTN_INLINE U16 float_to_half(F f) {
  const U sign = bits(f) & 0x80000000u;
  const U x = bits(f) ^ sign;
  // below the normal range the sum with 1/2 holds the rounded multiple of 2^-24 in its low bits
  const U subnormal = bits(as_float(x) + set1(0.5f)) - 0x3f000000u;
  const U normal = ((x + 0xfffu + (x >> 13 & 1u)) >> 13) - (112u << 10);
  U h = select((I)(x < 0x38800000u), subnormal, normal);
  h = select((I)(x >= 0x477ff000u), U{} + 0x7c00u, h);
  h = select((I)(x > 0x7f800000u), U{} + 0x7e00u, h);
  return __builtin_convertvector(h | sign >> 16, U16);
}
PAGED_ATTN_INLINE F e4m3_to_float(U8 raw) {
  const U x = widen(raw);
  const U value = bits(as_float((x & 0x7fu) << 20) * set1(0x1p120f));
  return as_float(select((I)((x & 0x7fu) == 0x7fu), U{} + 0x7fc00000u, value) | (x & 0x80u) << 24);
}

// 64-bit products of the even lanes
PAGED_ATTN_INLINE U64 multiply_even(U x, uint32_t by) { return ((U64)x & 0xffffffffu) * by; }

// Transposes W vectors of W lanes.
PAGED_ATTN_INLINE void transpose(F* rows) {
  for (int i = 0; i < W; ++i)
    for (int j = 0; j < i; ++j) {
      const float x = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = x;
    }
}

// Lane i of the result is the sum over the lanes of x[i].
PAGED_ATTN_INLINE F sum_lanes(const F* x) {
  F sums;
  for (int i = 0; i < W; ++i) sums[i] = reduce_add(x[i]);
  return sums;
}

}  // namespace
