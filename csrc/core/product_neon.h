// Pairs of bfloat16 on Arm (BFDOT, FEAT_BF16): the same product as AVX-512-BF16's.
#pragma once

#define PAGED_ATTN_PAIR_PRODUCT

namespace {

struct PairProduct : Bfloat16Pairs {
  typedef PairProduct Queries;
  static PAGED_ATTN_INLINE F multiply_add(F a, F b, F sum) {
    return (F)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
  }

  template <class T>
  static PAGED_ATTN_INLINE F load_operands(const T* p) {
    return pack(load(p), load(p + W));
  }
  template <class T>
  static PAGED_ATTN_INLINE F load_operands(const T* p, int n) {
    return n <= W ? pack(load(p, n), F{}) : pack(load(p), load(p + W, n - W));
  }
  static PAGED_ATTN_INLINE F load_operands(const bfloat16* p) { return (F)vld1q_u16(&p->raw); }
  static PAGED_ATTN_INLINE F load_operands(const bfloat16* p, int n) {
    F x = {};
    memcpy(&x, p, n * sizeof *p);
    return x;
  }

  static PAGED_ATTN_INLINE void interleave(F* x) {
    const uint16x8x2_t rows = vzipq_u16((uint16x8_t)x[0], (uint16x8_t)x[1]);
    x[0] = (F)rows.val[0], x[1] = (F)rows.val[1];
  }
  static PAGED_ATTN_INLINE F narrow(const F* x) { return pack(x[0], x[1]); }
  static PAGED_ATTN_INLINE F exp2_for_operand(F x) { return exp2(x); }

 private:
  static PAGED_ATTN_INLINE F pack(F low, F high) {
    const bfloat16x8_t half = vcvtq_low_bf16_f32((float32x4_t)low);
    return (F)vcvtq_high_bf16_f32(half, (float32x4_t)high);
  }
};

}  // namespace
