// AVX-512 (F, BW, VL, DQ) with FMA: 16 lanes.
#pragma once

#include <immintrin.h>

namespace {

// Register tile of the matrix products: 6 x 4 accumulators, 4 columns and 1 broadcast of 32
// registers.
constexpr int TILE_ROWS = 6, TILE_VECS = 4;

PAGED_ATTN_INLINE F fma(F a, F b, F c) {
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
// of two operands of which one is NaN the second is the answer: min and max keep a NaN in `x`
PAGED_ATTN_INLINE F max(F bound, F x) { return (F)_mm512_max_ps((__m512)bound, (__m512)x); }
PAGED_ATTN_INLINE F min(F bound, F x) { return (F)_mm512_min_ps((__m512)bound, (__m512)x); }
PAGED_ATTN_INLINE F round(F x) { return (F)_mm512_roundscale_ps((__m512)x, 0); }
// x - floor(x), 0 for infinities
PAGED_ATTN_INLINE F fraction(F x) { return (F)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF); }
// by the power of the integer below n
PAGED_ATTN_INLINE F scale_by_power(F x, F n) { return (F)_mm512_scalef_ps((__m512)x, (__m512)n); }
PAGED_ATTN_INLINE float reduce_max(F x) { return _mm512_reduce_max_ps((__m512)x); }
PAGED_ATTN_INLINE float reduce_add(F x) { return _mm512_reduce_add_ps((__m512)x); }

PAGED_ATTN_INLINE U16 load_raw(const uint16_t* p, int n) {
  return (U16)_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p);
}
PAGED_ATTN_INLINE U8 load_raw(const uint8_t* p, int n) {
  return (U8)_mm_maskz_loadu_epi8(__mmask16((1u << n) - 1), p);
}
PAGED_ATTN_INLINE F load(const float* p, int n) {
  return (F)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
}

PAGED_ATTN_INLINE U widen(U16 x) { return (U)_mm512_cvtepu16_epi32((__m256i)x); }
PAGED_ATTN_INLINE U widen(U8 x) { return (U)_mm512_cvtepu8_epi32((__m128i)x); }
PAGED_ATTN_INLINE U16 widen_to_16(U8 x) { return (U16)_mm256_cvtepu8_epi16((__m128i)x); }
PAGED_ATTN_INLINE F signed_to_float(U8 x) {
  return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x));
}

PAGED_ATTN_INLINE F half_to_float(U16 h) { return (F)_mm512_cvtph_ps((__m256i)h); }
PAGED_ATTN_INLINE U16 float_to_half(F x) {
  return (U16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
}

// an e4m3 with its exponent and mantissa moved to a half's place reads 2^8 too small, subnormals
// included
PAGED_ATTN_INLINE F e4m3_to_float(U8 raw) {
  const U16 x = widen_to_16(raw);
  const F value = half_to_float((x & 0x80) << 8 | (x & 0x7f) << 7) * set1(256.f);
  const __mmask16 nan = _mm_cmpeq_epi8_mask((__m128i)(raw & 0x7f), _mm_set1_epi8(0x7f));
  return (F)_mm512_mask_mov_ps((__m512)value, nan, (__m512)set1(NAN));
}

// 64-bit products of the even lanes
PAGED_ATTN_INLINE U64 multiply_even(U x, uint32_t by) {
  return (U64)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi32(int(by)));
}

// Transposes W vectors of W lanes.
PAGED_ATTN_INLINE void transpose(F* rows) {
  __m512 r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = (__m512)rows[i];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = (__m512d)t[4 * i], b = (__m512d)t[4 * i + 1];
    const __m512d c = (__m512d)t[4 * i + 2], d = (__m512d)t[4 * i + 3];
    r[4 * i] = (__m512)_mm512_unpacklo_pd(a, c);
    r[4 * i + 1] = (__m512)_mm512_unpackhi_pd(a, c);
    r[4 * i + 2] = (__m512)_mm512_unpacklo_pd(b, d);
    r[4 * i + 3] = (__m512)_mm512_unpackhi_pd(b, d);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    rows[i] = (F)_mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    rows[i + 8] = (F)_mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    rows[i + 4] = (F)_mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    rows[i + 12] = (F)_mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Lane i of the result is the sum over the lanes of x[i]: a transpose that adds as it goes.
PAGED_ATTN_INLINE F sum_lanes(const F* x) {
  __m512 pair[8], quad[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512 a = (__m512)x[2 * i], b = (__m512)x[2 * i + 1];
    pair[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d a = (__m512d)pair[2 * i], b = (__m512d)pair[2 * i + 1];
    quad[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
  }
  const auto fold = [](__m512 a, __m512 b) __attribute__((always_inline)) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return (F)fold(fold(quad[0], quad[1]), fold(quad[2], quad[3]));
}

}  // namespace
