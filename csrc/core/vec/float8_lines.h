// bfloat16 numbers to 8-bit floats, a cache line of them at a time, where AVX-512 has 16-bit lanes.
#pragma once

#include "convert.h"
#include "stream.h"

namespace {

// How many of `count` numbers were converted and multiplied by `factor`, a power of two; here none.
template <class From, class To>
PAGED_ATTN_INLINE int64_t convert_lines(const From*, To*, int64_t, float, bool) {
  return 0;
}

#if PAGED_ATTN_LANES == 16

// A float16 holds what a bfloat16 of its range is worth, but for its smallest, which are rounded up
// and so stay on their side of every tie. With a magnitude scaled to where the 8-bit float has a
// float16's exponent, that is the float16's upper bits rounded to nearest even, subnormals too.
template <int MANTISSA, int LARGEST>
PAGED_ATTN_INLINE __m256i to_float8(__m512i raw, __m512 factor) {
  constexpr int DROP = 10 - MANTISSA;
  const auto half = [&](__m512i upper) __attribute__((always_inline)) {
    const __m512 x = _mm512_mul_ps((__m512)upper, factor);
    return _mm512_castsi256_si512(_mm512_cvtps_ph(x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
  };
  const __m512i magnitude = _mm512_and_si512(raw, _mm512_set1_epi16(0x7fff));
  const __m512i zero = _mm512_setzero_si512();
  const __m512i in_order = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  const __m512i x =
      _mm512_permutex2var_epi64(half(_mm512_unpacklo_epi16(zero, magnitude)), in_order,
                                half(_mm512_unpackhi_epi16(zero, magnitude)));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(x, DROP), _mm512_set1_epi16(1));
  const __m512i tie = _mm512_set1_epi16((1 << (DROP - 1)) - 1);
  const __m512i sum = _mm512_add_epi16(_mm512_add_epi16(x, tie), odd);
  __m512i code = _mm512_min_epu16(_mm512_srli_epi16(sum, DROP), _mm512_set1_epi16(LARGEST));
  const __mmask32 nan = _mm512_cmpgt_epu16_mask(x, _mm512_set1_epi16(0x7c00));
  code = _mm512_mask_mov_epi16(code, nan, _mm512_set1_epi16(0x7f));
  const __m512i sign = _mm512_srli_epi16(raw, 8);
  code = _mm512_ternarylogic_epi32(code, sign, _mm512_set1_epi16(0x80), 0xf8);  // | (sign & 0x80)
  return _mm512_cvtepi16_epi8(code);
}

template <int MANTISSA, int LARGEST>
PAGED_ATTN_INLINE int64_t convert_lines(const bfloat16* from, void* to, int64_t count, float factor,
                                        bool streamed) {
  const __m512 factors = _mm512_set1_ps(factor);
  int64_t i = 0;
  for (; i + 64 <= count; i += 64) {
    const __m256i low = to_float8<MANTISSA, LARGEST>(_mm512_loadu_si512(from + i), factors);
    const __m256i high = to_float8<MANTISSA, LARGEST>(_mm512_loadu_si512(from + i + 32), factors);
    __m256i* target = (__m256i*)((char*)to + i);
    if (streamed) {
      stream_halves(target, low, high);
      continue;
    }
    _mm256_storeu_si256(target, low);
    _mm256_storeu_si256(target + 1, high);
  }
  return i;
}

PAGED_ATTN_INLINE int64_t convert_lines(const bfloat16* from, float8_e4m3fn* to, int64_t count,
                                        float factor, bool streamed) {
  return convert_lines<3, 0x7e>(from, (void*)to, count, factor * 0x1p-8f, streamed);
}
PAGED_ATTN_INLINE int64_t convert_lines(const bfloat16* from, float8_e5m2* to, int64_t count,
                                        float factor, bool streamed) {
  return convert_lines<2, 0x7b>(from, (void*)to, count, factor, streamed);
}

#endif

}  // namespace
