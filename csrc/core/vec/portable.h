// What every ISA but AVX-512 leaves to the compiler.
#pragma once

namespace {

// the ISA's own
PAGED_ATTN_INLINE F max(F bound, F x);
PAGED_ATTN_INLINE F min(F bound, F x);

// x * 2^n for an x in [1/2, 2); results below the normal range are 0
PAGED_ATTN_INLINE F scale_by_power(F x, F n) {
  // half the power first: 2^128 is past the exponent field, and its codes 0 and 255 read 0 and inf
  const F power = min(set1(129.f), max(set1(-126.f), n));
  const F half = x * as_float((U)(__builtin_convertvector(power, I) + 126) << 23);
  return half + half;
}

template <class T>
PAGED_ATTN_INLINE auto load_raw_as(T& x, const void* p, int bytes) {
  x = T{};
  memcpy(&x, p, bytes);
  return x;
}
PAGED_ATTN_INLINE U16 load_raw(const uint16_t* p, int n) {
  U16 x;
  return load_raw_as(x, p, 2 * n);
}
PAGED_ATTN_INLINE U8 load_raw(const uint8_t* p, int n) {
  U8 x;
  return load_raw_as(x, p, n);
}
PAGED_ATTN_INLINE F load(const float* p, int n) {
  F x;
  return load_raw_as(x, p, 4 * n);
}

PAGED_ATTN_INLINE U widen(U16 x) { return __builtin_convertvector(x, U); }
PAGED_ATTN_INLINE U widen(U8 x) { return __builtin_convertvector(x, U); }
PAGED_ATTN_INLINE U16 widen_to_16(U8 x) { return __builtin_convertvector(x, U16); }
PAGED_ATTN_INLINE F signed_to_float(U8 x) {
  typedef int8_t I8 __attribute__((vector_size(W)));
  return __builtin_convertvector(__builtin_convertvector((I8)x, I), F);
}

PAGED_ATTN_INLINE F e4m3_to_float(U8 raw) {
  const U x = widen(raw);
  const U value = bits(as_float((x & 0x7fu) << 20) * set1(0x1p120f));
  return as_float(select((I)((x & 0x7fu) == 0x7fu), U{} + 0x7fc00000u, value) | (x & 0x80u) << 24);
}

}  // namespace
