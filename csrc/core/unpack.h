// int4, two numbers a byte with the even one in the low bits, as int8.
#pragma once

#include "vec/vec.h"

namespace {

struct int4x2 {
  uint8_t bits;
};

// `numbers` is even.
PAGED_ATTN_INLINE void unpack_row(const uint8_t* from, int64_t numbers, int8_t* to) {
  int64_t i = 0;
#if PAGED_ATTN_LANES >= 8
  // a byte in the place of two: the low bits stay in the first, the high ones move to the second
  const __m256i bits = _mm256_set1_epi8(15), sign = _mm256_set1_epi8(8);
  for (; i + 16 <= numbers / 2; i += 16) {
    const __m256i pair = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(from + i)));
    const __m256i both = _mm256_and_si256(_mm256_or_si256(pair, _mm256_slli_epi16(pair, 4)), bits);
    const __m256i number = _mm256_sub_epi8(_mm256_xor_si256(both, sign), sign);
    _mm256_storeu_si256((__m256i*)(to + 2 * i), number);
  }
#endif
  for (; i < numbers / 2; ++i) {
    to[2 * i] = int8_t(int8_t(from[i] << 4) >> 4);
    to[2 * i + 1] = int8_t(int8_t(from[i]) >> 4);
  }
}

}  // namespace
