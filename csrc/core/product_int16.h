// Products of 8-bit integers with 16-bit ones on AVX-512-VNNI: keys and values of an int8 cache
// with queries and probabilities in fixed point. Bytes are widened by one instruction, where
// bfloat16 would take five, and sums are exact.
//
// Each lane of a row's queries has a unit of its own, a power of two. Numbers of bfloat16 of at
// least 2^-7 of the lane's largest are exact. What rounding takes away from others is kept as a
// second row of integers, for the rare queries whose logits would be off too far. Probabilities are
// multiples of 1/32767 of the largest one of a row in a block of keys; bfloat16 has 8 bits.
#pragma once

#include "product.h"

#define PAGED_ATTN_FIXED_PRODUCT

namespace {

struct FixedProduct {
  typedef PairProduct Queries;  // queries are loaded as its operands
  static constexpr bool FIXED = true;
  template <class T>
  static constexpr bool by_floats = false;
  static constexpr int DEPTH = 2;
  static constexpr int GRAIN = 1;
  static constexpr int ROWS = TILE_ROWS;
  static constexpr int PANEL = TILE_VECS * W;
  static constexpr float ONE = 32767.f;

  template <class T>
  static constexpr bool accepts = false;

  typedef I Sum;
  static PAGED_ATTN_INLINE I multiply_add(F a, F b, I sum) {
    return (I)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
  }
  static PAGED_ATTN_INLINE F load_operands(const int8_t* p) {
    return once((F)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)));
  }
  static PAGED_ATTN_INLINE F load_operands(const int8_t* p, int n) {
    const __mmask32 some = __mmask32((uint64_t(1) << n) - 1);
    return once((F)_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(some, p)));
  }
  static PAGED_ATTN_INLINE void interleave(F* x) {
    PairProduct::interleave(x);
    x[0] = once(x[0]), x[1] = once(x[1]);
  }
  // of numbers from 0 to 1
  static PAGED_ATTN_INLINE F narrow(const F* x) {
    typedef uint16_t U16x32 __attribute__((vector_size(64)));
    U16x32 lower;
    for (int i = 0; i < 32; ++i) lower[i] = uint16_t(2 * i);
    const auto fixed = [](F y) __attribute__((always_inline)) {
      return _mm512_cvtps_epi32((__m512)(y * set1(ONE)));
    };
    return (F)_mm512_permutex2var_epi16(fixed(x[0]), (__m512i)lower, fixed(x[1]));
  }
  static PAGED_ATTN_INLINE F exp2_for_operand(F x) { return PairProduct::exp2_for_operand(x); }

  static PAGED_ATTN_INLINE F to_float(I sum) { return (F)_mm512_cvtepi32_ps((__m512i)sum); }
  static PAGED_ATTN_INLINE F dots(I sum, const float* lane_scales) {
    return to_float(sum) * load(lane_scales);
  }
  static PAGED_ATTN_INLINE I begin(F) { return I{}; }
  static PAGED_ATTN_INLINE F add_up(I sum, F acc, float weight) {
    return fma(to_float(sum), set1(weight), acc);
  }

  // Turns a row of operands of bfloat16 pairs into one of integers, in place, and writes the scales
  // of its lanes. `low`: what that rounding took away, as integers with scales 2^15 times as small.
  // Returns the sum of squares of what was taken away; it is not finite if some number of the row
  // is not.
  static inline float quantize_row(float* row, int64_t operands, float* lane_scales, float* low,
                                   float* low_scales) {
    const auto numbers = [&](int64_t d, F* x) __attribute__((always_inline)) {
      const U pair = bits(load(row + d));
      x[0] = as_float(pair << 16);
      x[1] = as_float(pair & 0xffff0000u);
    };
    const auto pair_up = [](F* x) __attribute__((always_inline)) {
      const U a = (U)_mm512_cvtps_epi32((__m512)x[0]), b = (U)_mm512_cvtps_epi32((__m512)x[1]);
      return as_float((a & 0xffffu) | b << 16);
    };
    F top = set1(0x1p-80f);
    for (int64_t d = 0; d < operands; d += W) {
      F x[2];
      numbers(d, x);
      for (int i = 0; i < 2; ++i) top = max(abs(x[i]), top);
    }
    // 2^-14 of the power of two that is not above `top`
    const F unit = as_float(bits(top) & 0x7f800000u) * set1(0x1p-14f);
    const F inverse = set1(1.f) / unit;
    F lost = {};
    for (int64_t d = 0; d < operands; d += W) {
      F x[2], rest[2];
      numbers(d, x);
      for (int i = 0; i < 2; ++i) {
        const F scaled = x[i] * inverse;
        x[i] = round(scaled);
        rest[i] = scaled - x[i];
        lost = fma(rest[i] * unit, rest[i] * unit, lost);
        rest[i] = rest[i] * set1(0x1p15f);
      }
      store(row + d, pair_up(x));
      store(low + d, pair_up(rest));
    }
    store(lane_scales, unit);
    store(low_scales, unit * set1(0x1p-15f));
    return reduce_add(lost);
  }

 private:
  // keeps GCC from computing it anew for every product
  static PAGED_ATTN_INLINE F once(F x) {
    asm("" : "+v"(x));
    return x;
  }
};
template <>
constexpr bool FixedProduct::accepts<int8_t> = true;

}  // namespace
