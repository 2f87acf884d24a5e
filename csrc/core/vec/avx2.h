// AVX2 with FMA and F16C: 8 lanes.
#pragma once

#include <immintrin.h>

#include "portable.h"

namespace {

// Register tile of the matrix products: 6 x 2 accumulators, 2 columns and 1 broadcast of 16
// registers.
constexpr int TILE_ROWS = 6, TILE_VECS = 2;

PAGED_ATTN_INLINE F fma(F a, F b, F c) {
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
// of two operands of which one is NaN the second is the answer: min and max keep a NaN in `x`
PAGED_ATTN_INLINE F max(F bound, F x) { return (F)_mm256_max_ps((__m256)bound, (__m256)x); }
PAGED_ATTN_INLINE F min(F bound, F x) { return (F)_mm256_min_ps((__m256)bound, (__m256)x); }
PAGED_ATTN_INLINE F round(F x) { return (F)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT); }
PAGED_ATTN_INLINE float reduce_max(F x) {
  const __m128 low = _mm256_castps256_ps128((__m256)x), high = _mm256_extractf128_ps((__m256)x, 1);
  const __m128 four = _mm_max_ps(low, high);
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
PAGED_ATTN_INLINE float reduce_add(F x) {
  const __m128 low = _mm256_castps256_ps128((__m256)x), high = _mm256_extractf128_ps((__m256)x, 1);
  const __m128 four = _mm_add_ps(low, high);
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// in the lower half of a register
PAGED_ATTN_INLINE __m128i in_register(U8 x) { return _mm_cvtsi64_si128((int64_t)x); }

PAGED_ATTN_INLINE U widen(U16 x) { return (U)_mm256_cvtepu16_epi32((__m128i)x); }
PAGED_ATTN_INLINE U widen(U8 x) { return (U)_mm256_cvtepu8_epi32(in_register(x)); }
PAGED_ATTN_INLINE U16 widen_to_16(U8 x) { return (U16)_mm_cvtepu8_epi16(in_register(x)); }
PAGED_ATTN_INLINE F signed_to_float(U8 x) {
  return (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(in_register(x)));
}

PAGED_ATTN_INLINE F half_to_float(U16 h) { return (F)_mm256_cvtph_ps((__m128i)h); }
PAGED_ATTN_INLINE U16 float_to_half(F x) {
  return (U16)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
}

// an e4m3 with its exponent and mantissa moved to a half's place reads 2^8 too small, subnormals
// included
PAGED_ATTN_INLINE F e4m3_to_float(U8 raw) {
  const U16 x = (U16)_mm_cvtepi8_epi16(in_register(raw)) << 7;  // the sign twice
  const U16 nan = (U16)((x & 0x3f80) == 0x3f80) & 0x7c00;
  return half_to_float((x & 0xbf80) | nan) * set1(256.f);
}

// 64-bit products of the even lanes
PAGED_ATTN_INLINE U64 multiply_even(U x, uint32_t by) {
  return (U64)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi32(int(by)));
}

// Transposes W vectors of W lanes.
PAGED_ATTN_INLINE void transpose(F* rows) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = (__m256)rows[i];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    rows[i] = (F)_mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    rows[i + 4] = (F)_mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
}

// Lane i of the result is the sum over the lanes of x[i]: a transpose that adds as it goes.
PAGED_ATTN_INLINE F sum_lanes(const F* x) {
  __m256 pair[4], quad[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256 a = (__m256)x[2 * i], b = (__m256)x[2 * i + 1];
    pair[i] = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256 a = pair[2 * i], b = pair[2 * i + 1];
    quad[i] = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  }
  return (F)_mm256_add_ps(_mm256_permute2f128_ps(quad[0], quad[1], 0x20),
                          _mm256_permute2f128_ps(quad[0], quad[1], 0x31));
}

}  // namespace
