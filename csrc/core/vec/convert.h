// Element types: how each is read into float32 lanes and written back (nearest even; the 8-bit ones
// saturate to their finite range).
#pragma once

#include "../attention.h"
#include "vec.h"

namespace {

struct bfloat16 {
  uint16_t raw;
};
struct float16 {
  uint16_t raw;
};
struct float8_e4m3fn {
  uint8_t raw;
};
struct float8_e5m2 {
  uint8_t raw;
};

PAGED_ATTN_INLINE U16 load_raw(const uint16_t* p) {
  U16 x;
  memcpy(&x, p, sizeof x);
  return x;
}
PAGED_ATTN_INLINE U8 load_raw(const uint8_t* p) {
  U8 x;
  memcpy(&x, p, sizeof x);
  return x;
}

PAGED_ATTN_INLINE F to_float(const bfloat16*, U16 x) { return as_float(widen(x) << 16); }
PAGED_ATTN_INLINE F to_float(const float16*, U16 x) { return half_to_float(x); }
PAGED_ATTN_INLINE F to_float(const float8_e4m3fn*, U8 x) { return e4m3_to_float(x); }
// an e5m2 is the upper half of a float16
PAGED_ATTN_INLINE F to_float(const float8_e5m2*, U8 x) {
  return half_to_float(widen_to_16(x) << 8);
}
PAGED_ATTN_INLINE F to_float(const int8_t*, U8 x) { return signed_to_float(x); }

template <int BYTES>
struct RawOf;
template <>
struct RawOf<1> {
  typedef uint8_t type;
};
template <>
struct RawOf<2> {
  typedef uint16_t type;
};

// W elements; with `n`, the first n of them and zeros, touching no memory beyond.
template <class T>
PAGED_ATTN_INLINE F load(const T* p) {
  return to_float(p, load_raw((const typename RawOf<sizeof(T)>::type*)p));
}
template <class T>
PAGED_ATTN_INLINE F load(const T* p, int n) {
  return to_float(p, load_raw((const typename RawOf<sizeof(T)>::type*)p, n));
}

// An 8-bit float of MANTISSA bits: the largest finite value, the exponent's bias, the code of NaN.
//
// `magic` is so large that its sum with a magnitude has the unit in the last place of the 8-bit
// float. The low byte of the sum is then the rounded mantissa, less a constant that makes it the
// code once the exponent is added; all other parts of the sum are multiples of 256.
template <int MANTISSA, int BIAS>
PAGED_ATTN_INLINE U float8_code(F x, float largest) {
  constexpr int DROP = 23 - MANTISSA;
  constexpr uint32_t SMALLEST_NORMAL = (128u - BIAS) << 23;
  constexpr uint32_t MAGIC = (DROP << 23) + 0x400000u - (SMALLEST_NORMAL >> DROP);
  const F magnitude = min(set1(largest), abs(x));
  const F power = max(as_float(set1(SMALLEST_NORMAL)), as_float(bits(magnitude) & 0x7f800000u));
  const F magic = as_float(bits(power) + MAGIC);
  U code = bits(magnitude + magic) + (bits(power) >> DROP);
  code = select((I)(x != x), set1(0x7fu), code);
  return (code & 0x7fu) | (bits(x) >> 24 & 0x80u);
}

// The bits of an 8-bit number, in the low byte of a lane whose others are 0.
PAGED_ATTN_INLINE U code_of(const float8_e4m3fn*, F x) { return float8_code<3, 7>(x, 448.f); }
PAGED_ATTN_INLINE U code_of(const float8_e5m2*, F x) { return float8_code<2, 15>(x, 57344.f); }
PAGED_ATTN_INLINE U code_of(const int8_t*, F x) {
  x = x == x ? x : F{};
  const F clamped = min(set1(127.f), max(set1(-128.f), x));
  return (U) __builtin_convertvector(round(clamped), I) & 0xffu;
}

PAGED_ATTN_INLINE U16 from_float(const bfloat16*, F x) {
  const U u = bits(x);
  const U rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  return __builtin_convertvector(select((I)(x != x), U{} + 0x7fc0u, rounded), U16);
}
PAGED_ATTN_INLINE U16 from_float(const float16*, F x) { return float_to_half(x); }
template <class T>
PAGED_ATTN_INLINE U8 from_float(const T* p, F x) {
#if PAGED_ATTN_LANES == 16
  return __builtin_convertvector(code_of(p, x), U8);
#else
  // by way of 16 bits, or GCC would take one lane after the other
  return __builtin_convertvector(__builtin_convertvector(code_of(p, x), U16), U8);
#endif
}
PAGED_ATTN_INLINE F from_float(const float*, F x) { return x; }

template <class T>
PAGED_ATTN_INLINE void store(T* p, F x, int n) {
  const auto raw = from_float(p, x);
  if (n == W)
    memcpy(p, &raw, sizeof raw);
  else
    memcpy(p, &raw, n * sizeof(T));
}

template <class T>
struct TypeTag {
  typedef T type;
};

// Calls f(TypeTag<element type>) for a dtype that q, k, v or an output may have.
template <class Function>
PAGED_ATTN_INLINE void with_type(paged_attn::DType dtype, Function f) {
  using paged_attn::DType;
  switch (dtype) {
    case DType::float32: return f(TypeTag<float>());
    case DType::bfloat16: return f(TypeTag<bfloat16>());
    case DType::float16: return f(TypeTag<float16>());
    case DType::float8_e4m3fn: return f(TypeTag<float8_e4m3fn>());
    case DType::float8_e5m2: return f(TypeTag<float8_e5m2>());
    case DType::int8: return f(TypeTag<int8_t>());
    default: return;
  }
}

}  // namespace
