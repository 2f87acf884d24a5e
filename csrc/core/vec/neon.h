// NEON (AdvSIMD of any 64-bit Arm): 4 lanes, 32 registers.
#pragma once

#include <arm_neon.h>

#include "portable.h"

namespace {

// Register tile of the matrix products: 6 x 4 accumulators, 4 columns and 1 broadcast of 32
// registers.
constexpr int TILE_ROWS = 6, TILE_VECS = 4;

PAGED_ATTN_INLINE F fma(F a, F b, F c) {
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
PAGED_ATTN_INLINE F max(F bound, F x) { return (F)vmaxq_f32((float32x4_t)bound, (float32x4_t)x); }
PAGED_ATTN_INLINE F min(F bound, F x) { return (F)vminq_f32((float32x4_t)bound, (float32x4_t)x); }
PAGED_ATTN_INLINE F round(F x) { return (F)vrndnq_f32((float32x4_t)x); }
PAGED_ATTN_INLINE float reduce_max(F x) { return vmaxvq_f32((float32x4_t)x); }
PAGED_ATTN_INLINE float reduce_add(F x) { return vaddvq_f32((float32x4_t)x); }

// in the lower half of a register
PAGED_ATTN_INLINE uint8x8_t in_register(U8 x) { return vcreate_u8((uint64_t)(uint32_t)x); }

PAGED_ATTN_INLINE U widen(U16 x) { return (U)vmovl_u16((uint16x4_t)x); }
PAGED_ATTN_INLINE U16 widen_to_16(U8 x) { return (U16)vget_low_u16(vmovl_u8(in_register(x))); }
PAGED_ATTN_INLINE U widen(U8 x) { return widen(widen_to_16(x)); }
PAGED_ATTN_INLINE int16x4_t widen_signed(U8 x) {
  return vget_low_s16(vmovl_s8(vreinterpret_s8_u8(in_register(x))));
}
PAGED_ATTN_INLINE F signed_to_float(U8 x) { return (F)vcvtq_f32_s32(vmovl_s16(widen_signed(x))); }

PAGED_ATTN_INLINE F half_to_float(U16 h) { return (F)vcvt_f32_f16((float16x4_t)h); }
PAGED_ATTN_INLINE U16 float_to_half(F x) { return (U16)vcvt_f16_f32((float32x4_t)x); }

// an e4m3 with its exponent and mantissa moved to a half's place reads 2^8 too small, subnormals
// included
PAGED_ATTN_INLINE F e4m3_to_float(U8 raw) {
  const U16 x = (U16)widen_signed(raw) << 7;  // the sign twice
  const U16 nan = (U16)((x & 0x3f80) == 0x3f80) & 0x7c00;
  return half_to_float((x & 0xbf80) | nan) * set1(256.f);
}

// 64-bit products of the even lanes
PAGED_ATTN_INLINE U64 multiply_even(U x, uint32_t by) {
  return (U64)vmull_u32(vmovn_u64((uint64x2_t)x), vdup_n_u32(by));
}

// Transposes W vectors of W lanes.
PAGED_ATTN_INLINE void transpose(F* rows) {
  const auto pair = [&](int i) __attribute__((always_inline)) {
    return vtrnq_f32((float32x4_t)rows[i], (float32x4_t)rows[i + 1]);
  };
  const float32x4x2_t ab = pair(0), cd = pair(2);
  for (int i = 0; i < 2; ++i) {
    rows[i] = (F)vtrn1q_f64((float64x2_t)ab.val[i], (float64x2_t)cd.val[i]);
    rows[i + 2] = (F)vtrn2q_f64((float64x2_t)ab.val[i], (float64x2_t)cd.val[i]);
  }
}

// Lane i of the result is the sum over the lanes of x[i].
PAGED_ATTN_INLINE F sum_lanes(const F* x) {
  const float32x4_t ab = vpaddq_f32((float32x4_t)x[0], (float32x4_t)x[1]);
  return (F)vpaddq_f32(ab, vpaddq_f32((float32x4_t)x[2], (float32x4_t)x[3]));
}

}  // namespace
