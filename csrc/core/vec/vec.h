// Vectors of W float32 lanes, written with GCC vector extensions so that one text serves every ISA;
// what an ISA does better than the compiler's own choice comes from its header.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../inline.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PAGED_ATTN_LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define PAGED_ATTN_LANES 8
#else
#define PAGED_ATTN_LANES 4
#endif

namespace {

constexpr int W = PAGED_ATTN_LANES;

typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef uint64_t U64 __attribute__((vector_size(4 * W)));
typedef uint16_t U16 __attribute__((vector_size(2 * W)));
typedef uint8_t U8 __attribute__((vector_size(W)));

PAGED_ATTN_INLINE F set1(float x) { return x - F{}; }
PAGED_ATTN_INLINE U set1(uint32_t x) { return x - U{}; }
PAGED_ATTN_INLINE U bits(F x) { return (U)x; }
PAGED_ATTN_INLINE F as_float(U x) { return (F)x; }
PAGED_ATTN_INLINE F select(I mask, F yes, F no) { return mask ? yes : no; }
PAGED_ATTN_INLINE U select(I mask, U yes, U no) { return mask ? yes : no; }

PAGED_ATTN_INLINE F load(const float* p) {
  F x;
  memcpy(&x, p, sizeof x);
  return x;
}
PAGED_ATTN_INLINE void store(float* p, F x) { memcpy(p, &x, sizeof x); }

}  // namespace

#if PAGED_ATTN_LANES == 16
#include "avx512.h"
#elif PAGED_ATTN_LANES == 8
#include "avx2.h"
#elif defined(PAGED_ATTN_NEON)
#include "neon.h"
#else
#include "generic.h"
#endif

namespace {

PAGED_ATTN_INLINE F lane_index() {
  F x;
  for (int i = 0; i < W; ++i) x[i] = float(i);
  return x;
}

PAGED_ATTN_INLINE F abs(F x) { return as_float(bits(x) & set1(0x7fffffffu)); }

// 2^x to about one ulp: round off the integer part, then the minimax polynomial of degree 6 on
// [-1/2, 1/2]. -inf gives 0, NaN stays NaN.
PAGED_ATTN_INLINE F exp2(F x) {
  // -inf - n would be NaN. An x above -512 whose result underflows takes 200 cycles on Intel's
  // AVX-512
  x = max(set1(-512.f), x);
  const F n = round(x);
  const F f = x - n;
  F p = set1(1.5353362e-4f);
  p = fma(p, f, set1(1.3398875e-3f));
  p = fma(p, f, set1(9.618437e-3f));
  p = fma(p, f, set1(5.5503324e-2f));
  p = fma(p, f, set1(2.4022648e-1f));
  p = fma(p, f, set1(6.931472e-1f));
  p = fma(p, f, set1(1.f));
  return scale_by_power(p, n);
}

PAGED_ATTN_INLINE float exp2(float x) { return exp2(set1(x))[0]; }

// tanh to about two ulps: an odd polynomial near 0 (Cephes tanhf), the exponential elsewhere.
PAGED_ATTN_INLINE F tanh(F x) {
  const F magnitude = abs(x);
  const F square = x * x;
  F p = set1(-5.70498872745e-3f);
  p = fma(p, square, set1(2.06390887954e-2f));
  p = fma(p, square, set1(-5.37397155531e-2f));
  p = fma(p, square, set1(1.33314422036e-1f));
  p = fma(p, square, set1(-3.33332819422e-1f));
  const F near = fma(p * square, x, x);
  // 2 log2(e) |x|, capped where tanh is 1 in float32
  const F doubled = min(set1(64.f), magnitude * set1(2.88539008f));
  const F far = set1(1.f) - set1(2.f) / (exp2(doubled) + set1(1.f));
  const U sign = bits(x) & set1(0x80000000u);
  return select(magnitude < set1(0.625f), near, as_float(bits(far) | sign));
}

}  // namespace
