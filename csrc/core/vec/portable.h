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

// the first n elements and zeros
PAGED_ATTN_INLINE U16 load_raw(const uint16_t* p, int n) {
  U16 x = {};
  memcpy(&x, p, n * sizeof *p);
  return x;
}
PAGED_ATTN_INLINE U8 load_raw(const uint8_t* p, int n) {
  U8 x = {};
  memcpy(&x, p, n * sizeof *p);
  return x;
}
PAGED_ATTN_INLINE F load(const float* p, int n) {
  F x = {};
  memcpy(&x, p, n * sizeof *p);
  return x;
}

}  // namespace
