// The operands of matrix products. An operand has the size of a float32 and holds DEPTH numbers
// that are neighbours along the depth of a product: along head_dim in products of queries and keys,
// along keys in products of probabilities and values.
#pragma once

#include "vec/convert.h"

namespace {

// What products with float32 sums have in common.
struct FloatSums {
  static constexpr bool FIXED = false;  // true only in product_int16.h
  static constexpr int PACKED = 1;      // numbers of a key in an element of a cache
  // whether numbers of type T become operands by way of floats, by `pair_up` and `pair_of_bytes`
  template <class T>
  static constexpr bool by_floats = false;
  // whether two rows are interleaved while they are bytes, by `load_down`
  template <class T>
  static constexpr bool by_bytes = false;
  typedef F Sum;
  // the float32 sums of a row's products
  static PAGED_ATTN_INLINE F dots(F sum, const float*) { return sum; }
  // sums as they are kept in memory, and back; and these as floats
  static PAGED_ATTN_INLINE F to_memory(F sum) { return sum; }
  static PAGED_ATTN_INLINE F from_memory(F kept) { return kept; }
  static PAGED_ATTN_INLINE F as_floats(F kept) { return kept; }
};

template <class A, class B>
constexpr bool SAME = false;
template <class A>
constexpr bool SAME<A, A> = true;

// What the engines need of a Product, checked while compiling. Besides: `accepts<T>`,
// `load_operands` of W operands or fewer, `interleave`, `narrow`, `exp2_for_operand`, and
// `Queries`, the Product whose operands queries are loaded as.
template <class Product>
constexpr bool is_product() {
  typedef typename Product::Sum Sum;
  static_assert(Product::DEPTH == 1 || Product::DEPTH == 2, "an operand is as large as a float");
  static_assert(Product::GRAIN > 0 && (Product::GRAIN & (Product::GRAIN - 1)) == 0,
                "depths are rounded up to a power of two of operands");
  static_assert(Product::PANEL % W == 0, "a panel is whole vectors");
  static_assert(Product::ROWS > 0, "a tile has rows");
  static_assert(SAME<decltype(Product::multiply_add(F{}, F{}, Sum{})), Sum> &&
                    SAME<decltype(Product::from_memory(F{})), Sum> &&
                    SAME<decltype(Product::dots(Sum{}, nullptr)), F> &&
                    SAME<decltype(Product::to_memory(Sum{})), F> &&
                    SAME<decltype(Product::as_floats(F{})), F>,
                "sums are kept as vectors of floats, and end as floats");
  return true;
}

// For any dtypes: an operand is one float32.
struct FloatProduct : FloatSums {
  typedef FloatProduct Queries;
  static constexpr int DEPTH = 1;
  static constexpr int GRAIN = 1;              // operands that the depth is a multiple of
  static constexpr int ROWS = TILE_ROWS;       // of a register tile
  static constexpr int PANEL = TILE_VECS * W;  // packed operands lie in panels of this many columns

  template <class T>
  static constexpr bool accepts = true;

  static PAGED_ATTN_INLINE F multiply_add(F a, F b, F sum) { return fma(a, b, sum); }

  // W operands from numbers at `p` and after it; with `n`, from the first n numbers, then zeros
  template <class T>
  static PAGED_ATTN_INLINE F load_operands(const T* p) {
    return load(p);
  }
  template <class T>
  static PAGED_ATTN_INLINE F load_operands(const T* p, int n) {
    return load(p, n);
  }
  // DEPTH vectors, of operands of one row each, become DEPTH vectors of operands of one number of
  // each row, in order
  static PAGED_ATTN_INLINE void interleave(F*) {}
  // W operands from DEPTH * W float32 numbers
  static PAGED_ATTN_INLINE F narrow(const F* x) { return x[0]; }
  // 2^x about as exact as an operand holds it
  static PAGED_ATTN_INLINE F exp2_for_operand(F x) {
#if PAGED_ATTN_LANES == 16
    // to 2e-7: the minimax polynomial of degree 5 over the fractional part
    const F f = fraction(x);
    F p = set1(1.85611378e-3f);
    p = fma(p, f, set1(9.04704072e-3f));
    p = fma(p, f, set1(5.57723157e-2f));
    p = fma(p, f, set1(2.40174055e-1f));
    p = fma(p, f, set1(6.93150342e-1f));
    p = fma(p, f, set1(1.f));
    return scale_by_power(p, x);
#else
    return exp2(x);
#endif
  }
};

// What products of bfloat16 pairs have in common.
struct Bfloat16Pairs : FloatSums {
  static constexpr int DEPTH = 2;
  static constexpr int GRAIN = 1;
  static constexpr int ROWS = TILE_ROWS;
  static constexpr int PANEL = TILE_VECS * W;

  template <class T>
  static constexpr bool accepts = sizeof(T) == 1;
};
template <>
constexpr bool Bfloat16Pairs::accepts<bfloat16> = true;

#if defined(__AVX512BF16__)
#define PAGED_ATTN_PAIR_PRODUCT

// The bfloat16 of each magnitude of an 8-bit float with MANTISSA bits, as a table of low bytes and
// one of high bytes.
template <int MANTISSA, int BIAS, bool INFINITE>
struct Float8Table {
  alignas(64) uint8_t low[128], high[128];
  constexpr Float8Table() : low(), high() {
    constexpr int UNIT = 1 << MANTISSA;
    for (int code = 0; code < 128; ++code) {
      int exponent = code / UNIT, mantissa = code % UNIT;
      const bool special = INFINITE ? exponent == 31 : code == 127;
      if (exponent == 0) {
        for (exponent = 1; mantissa < UNIT && mantissa > 0; --exponent) mantissa *= 2;
        mantissa %= UNIT;
      }
      int bits = (exponent + 127 - BIAS) << 7 | mantissa << (7 - MANTISSA);
      if (code == 0) bits = 0;
      if (special) bits = INFINITE && mantissa == 0 ? 0x7f80 : 0x7fc0;
      low[code] = uint8_t(bits), high[code] = uint8_t(bits >> 8);
    }
  }
};
constexpr Float8Table<3, 7, false> E4M3;
constexpr Float8Table<2, 15, true> E5M2;

// Pairs with float32 sums on AVX-512-BF16.
struct PairProduct : Bfloat16Pairs {
  typedef PairProduct Queries;
  template <class T>
  static constexpr bool by_floats = SAME<T, int8_t>;
  static PAGED_ATTN_INLINE F multiply_add(F a, F b, F sum) {
#if defined(__clang__) && __clang_major__ < 18
    // it recurses without end where it sees a shuffle, such as a broadcast, cast to bfloat16
    asm("" : "+v"(a), "+v"(b));
#endif
    return (F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }

  template <class T>
  static PAGED_ATTN_INLINE F load_operands(const T* p) {
    return pack(load(p), load(p + W));
  }
  template <class T>
  static PAGED_ATTN_INLINE F load_operands(const T* p, int n) {
    return n <= W ? pack(load(p, n), F{}) : pack(load(p), load(p + W, n - W));
  }
  static PAGED_ATTN_INLINE F load_operands(const bfloat16* p) { return (F)_mm512_loadu_si512(p); }
  static PAGED_ATTN_INLINE F load_operands(const bfloat16* p, int n) {
    return (F)_mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << n) - 1), p);
  }

  // int8: the upper half of a number's float32 holds it exactly
  static PAGED_ATTN_INLINE F load_operands(const int8_t* p) {
    U16x32 upper;
    for (int i = 0; i < 32; ++i) upper[i] = uint16_t(2 * i + 1);
    return (F)_mm512_permutex2var_epi16((__m512i)load(p), (__m512i)upper, (__m512i)load(p + W));
  }
  static PAGED_ATTN_INLINE F pair_up(F a, F b) {
    U16x32 upper;
    for (int i = 0; i < W; ++i)
      upper[2 * i] = uint16_t(2 * i + 1), upper[2 * i + 1] = uint16_t(2 * i + 33);
    return (F)_mm512_permutex2var_epi16((__m512i)a, (__m512i)upper, (__m512i)b);
  }
  // an operand of each lane's first or last two of four int8
  static PAGED_ATTN_INLINE F pair_of_bytes(F bytes, bool last) {
    const auto number = [&](int i) __attribute__((always_inline)) {
      const __m512i one = _mm512_set1_epi32(1 << 8 * i);  // in the place of one byte
      return (F)_mm512_cvtepi32_ps(
          _mm512_dpbusd_epi32(_mm512_setzero_si512(), one, (__m512i)bytes));
    };
    return pair_up(number(2 * last), number(2 * last + 1));
  }

  static PAGED_ATTN_INLINE F load_operands(const float8_e4m3fn* p) { return look_up(p, 32, E4M3); }
  static PAGED_ATTN_INLINE F load_operands(const float8_e4m3fn* p, int n) {
    return look_up(p, n, E4M3);
  }
  static PAGED_ATTN_INLINE F load_operands(const float8_e5m2* p) { return look_up(p, 32, E5M2); }
  static PAGED_ATTN_INLINE F load_operands(const float8_e5m2* p, int n) {
    return look_up(p, n, E5M2);
  }

  static PAGED_ATTN_INLINE void interleave(F* x) {
    U16x32 low, high;
    for (int i = 0; i < W; ++i) {
      low[2 * i] = i, low[2 * i + 1] = i + 32;
      high[2 * i] = i + 16, high[2 * i + 1] = i + 48;
    }
    const __m512i a = (__m512i)x[0], b = (__m512i)x[1];
    x[0] = (F)_mm512_permutex2var_epi16(a, (__m512i)low, b);
    x[1] = (F)_mm512_permutex2var_epi16(a, (__m512i)high, b);
  }
  static PAGED_ATTN_INLINE F narrow(const F* x) { return pack(x[0], x[1]); }

  // to 3e-6: the minimax polynomial of degree 4 over the fractional part
  static PAGED_ATTN_INLINE F exp2_for_operand(F x) {
    const F f = fraction(x);
    F p = set1(1.3426684e-2f);
    p = fma(p, f, set1(5.2242474e-2f));
    p = fma(p, f, set1(2.412802e-1f));
    p = fma(p, f, set1(6.9304484e-1f));
    p = fma(p, f, set1(1.f));
    return scale_by_power(p, x);
  }

 private:
  typedef uint16_t U16x32 __attribute__((vector_size(64)));
  typedef uint8_t U8x64 __attribute__((vector_size(64)));
  // every byte twice, then its low and its high half from the tables, which ignore the sign
  template <class Table>
  static PAGED_ATTN_INLINE F look_up(const void* p, int n, const Table& table) {
    U8x64 twice;
    for (int i = 0; i < 64; ++i) twice[i] = uint8_t(i / 2);
    const __m256i raw = _mm256_maskz_loadu_epi8(__mmask32((uint64_t(1) << n) - 1), p);
    const __m512i x = _mm512_permutexvar_epi8((__m512i)twice, _mm512_castsi256_si512(raw));
    const auto half = [&](const uint8_t* bytes, __m512i i, uint64_t lanes)
                          __attribute__((always_inline)) {
                            const __m512i a = _mm512_load_si512(bytes);
                            const __m512i b = _mm512_load_si512(bytes + 64);
                            return _mm512_mask2_permutex2var_epi8(a, i, lanes, b);
                          };
    const __m512i y = half(table.low, x, 0x5555555555555555);
    const __m512i z = half(table.high, y, 0xaaaaaaaaaaaaaaaa);
    const __m512i sign = _mm512_set1_epi16(int16_t(0x8000));
    return (F)_mm512_ternarylogic_epi32(z, x, sign, 0xf8);  // z | (x & sign)
  }
  static PAGED_ATTN_INLINE F pack(F low, F high) {
    return (F)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  }
};

#endif

}  // namespace

#if (defined(__AVX512VNNI__) && defined(__AVX512BF16__)) || PAGED_ATTN_LANES == 8
#include "product_int16.h"
#endif
#if defined(PAGED_ATTN_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "product_neon.h"
#endif
