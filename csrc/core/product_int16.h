// Products of 8-bit integers with 16-bit ones: keys and values of an int8 cache (or of int4,
// unpacked) with queries and probabilities in fixed point. Bytes are widened by one instruction,
// where bfloat16 would take five, and float32 two for half as many; sums are exact.
//
// Each lane of a row's queries has a unit of its own, a power of two. Numbers of bfloat16 of at
// least 2^-7 of the lane's largest are exact. What rounding takes away from others is kept as a
// second row of integers, for the rare queries whose logits would be off too far. Probabilities are
// multiples of 1/32767 of the largest one of a row in a block of keys; bfloat16 has 8 bits.
#pragma once

#include "product.h"
#include "unpack.h"

#define PAGED_ATTN_FIXED_PRODUCT

namespace {

// What both instruction sets do.
struct FixedPoint {
  static constexpr bool FIXED = true;
  static constexpr int PACKED = 1;
  template <class T>
  static constexpr bool by_floats = false;
  template <class T>
  static constexpr bool by_bytes = false;
  static constexpr int DEPTH = 2;
  static constexpr int GRAIN = 1;
  static constexpr int ROWS = TILE_ROWS;
  static constexpr int PANEL = TILE_VECS * W;
  static constexpr float ONE = 32767.f;
  // sums of products of a row have to fit 32 bits
  static constexpr int64_t MOST_DIMS = 2048;

  typedef I Sum;
  static PAGED_ATTN_INLINE F to_float(I sum) { return __builtin_convertvector(sum, F); }
  static PAGED_ATTN_INLINE F dots(I sum, const float* lane_scales) {
    return to_float(sum) * load(lane_scales);
  }
  static PAGED_ATTN_INLINE F to_memory(I sum) { return (F)sum; }
  static PAGED_ATTN_INLINE I from_memory(F kept) { return (I)kept; }
  static PAGED_ATTN_INLINE F as_floats(F kept) { return to_float((I)kept); }

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
      const U a = (U) __builtin_convertvector(round(x[0]), I);
      const U b = (U) __builtin_convertvector(round(x[1]), I);
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
};

#if PAGED_ATTN_LANES == 16

struct FixedProduct : FixedPoint {
  typedef PairProduct Queries;    // queries are loaded as its operands
  typedef PairProduct Otherwise;  // for queries that do not fit

  template <class T>
  static constexpr bool accepts = false;

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
  // of numbers from -1 to 1
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

 private:
  // keeps GCC from computing it anew for every product
  static PAGED_ATTN_INLINE F once(F x) {
    asm("" : "+v"(x));
    return x;
  }
};

#else

// Pairs of bfloat16, from which queries become integers.
struct QueryPairs : Bfloat16Pairs {
  static PAGED_ATTN_INLINE F load_operands(const bfloat16* p) { return load((const float*)p); }
  static PAGED_ATTN_INLINE F load_operands(const bfloat16* p, int n) {
    F x = {};
    memcpy(&x, p, n * sizeof(bfloat16));
    return x;
  }
  // numbers of 8 bits, which bfloat16 holds
  template <class T>
  static PAGED_ATTN_INLINE F load_operands(const T* p) {
    return pack(load(p), load(p + W));
  }
  template <class T>
  static PAGED_ATTN_INLINE F load_operands(const T* p, int n) {
    return n <= W ? pack(load(p, n), F{}) : pack(load(p), load(p + W, n - W));
  }

 private:
  static PAGED_ATTN_INLINE F pack(F low, F high) {
    const __m256i halves =
        _mm256_packus_epi32((__m256i)(bits(low) >> 16), (__m256i)(bits(high) >> 16));
    return (F)_mm256_permute4x64_epi64(halves, 0xd8);
  }
};

struct FixedProduct : FixedPoint {
  typedef QueryPairs Queries;
  typedef FloatProduct Otherwise;

  template <class T>
  static constexpr bool accepts = false;

  static PAGED_ATTN_INLINE I multiply_add(F a, F b, I sum) {
    sum += (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
    // or GCC adds up the products of several steps first, and has no registers left for sums
    asm("" : "+x"(sum));
    return sum;
  }
  static PAGED_ATTN_INLINE F load_operands(const int8_t* p) {
    return once((F)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)));
  }
  static PAGED_ATTN_INLINE F load_operands(const int8_t* p, int n) {
    int8_t some[2 * W] = {};
    memcpy(some, p, n);
    return load_operands(some);
  }
  template <class T>
  static constexpr bool by_bytes = SAME<T, int8_t>;
  // pairs of numbers of two rows
  static PAGED_ATTN_INLINE void load_down(const int8_t* a, const int8_t* b, F* x) {
    const __m128i above = _mm_loadu_si128((const __m128i*)a);
    const __m128i below = _mm_loadu_si128((const __m128i*)b);
    x[0] = once((F)_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(above, below)));
    x[1] = once((F)_mm256_cvtepi8_epi16(_mm_unpackhi_epi8(above, below)));
  }
  static PAGED_ATTN_INLINE void interleave(F* x) {
    const __m256i a = (__m256i)x[0], b = (__m256i)x[1];
    const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
    x[0] = once((F)_mm256_permute2x128_si256(low, high, 0x20));
    x[1] = once((F)_mm256_permute2x128_si256(low, high, 0x31));
  }
  // of numbers from -1 to 1
  static PAGED_ATTN_INLINE F narrow(const F* x) {
    const auto fixed = [](F y) __attribute__((always_inline)) {
      return _mm256_cvtps_epi32((__m256)(y * set1(ONE)));
    };
    return (F)_mm256_permute4x64_epi64(_mm256_packs_epi32(fixed(x[0]), fixed(x[1])), 0xd8);
  }
  static PAGED_ATTN_INLINE F exp2_for_operand(F x) { return exp2(x); }

 private:
  // keeps GCC from computing it anew for every product
  static PAGED_ATTN_INLINE F once(F x) {
    asm("" : "+x"(x));
    return x;
  }
};

#endif

template <>
constexpr bool FixedProduct::accepts<int8_t> = true;

// The same for int4, whose bytes become operands without being int8 in memory first. An operand has
// even numbers alone or odd ones, so queries are dealt out to operands, and sums of values are
// gathered from them.
struct NibbleProduct : FixedProduct {
  static constexpr int PACKED = 2;

  template <class T>
  static constexpr bool accepts = false;

  // the even numbers of 4 W neighbours in a row, then the odd ones
  static PAGED_ATTN_INLINE void load_both(const int4x2* p, F* x) {
#if PAGED_ATTN_LANES == 16
    split(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)), x);
#else
    split(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), x);
#endif
  }
  static PAGED_ATTN_INLINE void load_both(const int4x2* p, int n, F* x) {
    int4x2 some[2 * W] = {};
    memcpy(some, p, n / 2);
    load_both(some, x);
  }
  // pairs of numbers of two rows: of the even ones of 2 W neighbours, then of the odd ones
  static PAGED_ATTN_INLINE void load_down(const int4x2* a, const int4x2* b, F* x) {
#if PAGED_ATTN_LANES == 16
    const __m128i above = _mm_loadu_si128((const __m128i*)a);
    const __m128i below = _mm_loadu_si128((const __m128i*)b);
    const __m128i low = _mm_unpacklo_epi8(above, below), high = _mm_unpackhi_epi8(above, below);
    split(_mm512_cvtepi8_epi16(_mm256_set_m128i(high, low)), x);
#else
    const __m128i above = _mm_loadl_epi64((const __m128i*)a);
    const __m128i below = _mm_loadl_epi64((const __m128i*)b);
    split(_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(above, below)), x);
#endif
  }
  static PAGED_ATTN_INLINE void load_down(const int4x2* a, const int4x2* b, int n, F* x) {
    int4x2 above[W] = {}, below[W] = {};
    memcpy(above, a, n / 2);
    memcpy(below, b, n / 2);
    load_down(above, below, x);
  }
  // a row's operands of neighbours become those that `load_both` has
  static inline void deal_out(float* row, int64_t operands) {
    for (int64_t d = 0; d < operands; d += 2 * W) {
      uint16_t from[4 * W], to[4 * W];
      memcpy(from, row + d, sizeof from);
      for (int i = 0; i < 2 * W; ++i) to[i] = from[2 * i], to[2 * W + i] = from[2 * i + 1];
      memcpy(row + d, to, sizeof to);
    }
  }
  // a row's sums become those of neighbours
  static inline void gather(float* row, int64_t numbers) {
    for (int64_t d = 0; d < numbers; d += 2 * W) {
      float to[2 * W];
      for (int i = 0; i < W; ++i) to[2 * i] = row[d + i], to[2 * i + 1] = row[d + W + i];
      memcpy(row + d, to, sizeof to);
    }
  }

 private:
#if PAGED_ATTN_LANES == 16
  static PAGED_ATTN_INLINE void split(__m512i bytes, F* x) {
    x[0] = (F)_mm512_srai_epi16(_mm512_slli_epi16(bytes, 12), 12);
    x[1] = (F)_mm512_srai_epi16(bytes, 4);
    asm("" : "+v"(x[0]), "+v"(x[1]));  // or GCC computes them anew for every product
  }
#else
  static PAGED_ATTN_INLINE void split(__m256i bytes, F* x) {
    x[0] = (F)_mm256_srai_epi16(_mm256_slli_epi16(bytes, 12), 12);
    x[1] = (F)_mm256_srai_epi16(bytes, 4);
    asm("" : "+x"(x[0]), "+x"(x[1]));  // or GCC computes them anew for every product
  }
#endif
};

template <>
constexpr bool NibbleProduct::accepts<int4x2> = true;

}  // namespace
