// 8-bit floats as bfloat16 by products with bit matrices (GFNI), 64 numbers at a time: of a normal
// number each bit of the bfloat16 is a bit of the code, or its complement, or constant.
//
// Zero, subnormal numbers and what is not finite are mended. Their exponents have equal bits all
// along, so they are among so few codes that a shuffle of 16 bytes has what each of them lacks.
#pragma once

#include "product.h"

#if defined(__GFNI__)

namespace {

// The matrix whose product with a byte has bit i as the parity of bits `from[i]` of that byte.
constexpr uint64_t bit_matrix(const uint8_t* from) {
  uint64_t matrix = 0;
  for (int i = 0; i < 8; ++i) matrix |= uint64_t(from[i]) << 8 * (7 - i);
  return matrix;
}

template <int MANTISSA, int BIAS, bool INFINITE>
struct Float8Bits {
  // the bits of the upper byte that are complements: of the exponent's first bit, wherever bfloat16
  // has more of an exponent
  static constexpr int COMPLEMENT = 0x40 - (0x20 >> MANTISSA);
  static constexpr int EQUAL_BITS = 2 << MANTISSA;  // codes whose exponent has no differing bits
  // what is added to the index: it has bit 7 then, for which a shuffle gives zero, unless the bits
  // of the exponent are equal
  static constexpr int OFFSET = 0x80 - EQUAL_BITS;

  uint64_t low, high, index;
  alignas(16) uint8_t lacks_low[16], lacks_high[16];

  constexpr Float8Bits() : low(0), high(0), index(0), lacks_low(), lacks_high() {
    uint8_t word[16] = {}, order[8] = {};
    for (int bit = 0; bit < 6; ++bit) word[bit + 7 - MANTISSA] = uint8_t(1 << bit);
    for (int bit = 13 - MANTISSA; bit < 15; ++bit) word[bit] = 1 << 6;
    word[15] = 1 << 7;
    low = bit_matrix(word), high = bit_matrix(word + 8);
    // the mantissa and the exponent's last bit, then which neighbours in the exponent differ
    for (int bit = 0; bit < 7; ++bit) order[bit] = uint8_t((bit > MANTISSA ? 3 : 2) << bit >> 1);
    index = bit_matrix(order);

    const Float8Table<MANTISSA, BIAS, INFINITE> table;
    for (int i = 0; i < EQUAL_BITS; ++i) {
      const int code = i < EQUAL_BITS / 2 ? i : 128 - EQUAL_BITS + i;
      int normal = COMPLEMENT << 8;
      for (int bit = 0; bit < 15; ++bit)
        if (word[bit] & code) normal ^= 1 << bit;
      lacks_low[(i + OFFSET) & 15] = uint8_t(table.low[code] ^ normal);
      lacks_high[(i + OFFSET) & 15] = uint8_t(table.high[code] ^ normal >> 8);
    }
  }
};
constexpr Float8Bits<3, 7, false> E4M3_BITS;
constexpr Float8Bits<2, 15, true> E5M2_BITS;

// The lower and the upper bytes of 64 codes' bfloat16.
template <class Bits>
PAGED_ATTN_INLINE void float8_bytes(__m512i code, const Bits& bits, __m512i* low, __m512i* high) {
  const auto matrix = [](uint64_t x) __attribute__((always_inline)) {
    return _mm512_set1_epi64(int64_t(x));
  };
  const auto table = [](const uint8_t* x) __attribute__((always_inline)) {
    return _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)x));
  };
  const __m512i index = _mm512_add_epi8(
      _mm512_gf2p8affine_epi64_epi8(code, matrix(bits.index), 0), _mm512_set1_epi8(Bits::OFFSET));
  *low = _mm512_xor_si512(_mm512_gf2p8affine_epi64_epi8(code, matrix(bits.low), 0),
                          _mm512_shuffle_epi8(table(bits.lacks_low), index));
  *high = _mm512_xor_si512(_mm512_gf2p8affine_epi64_epi8(code, matrix(bits.high), Bits::COMPLEMENT),
                           _mm512_shuffle_epi8(table(bits.lacks_high), index));
}

}  // namespace

#endif
