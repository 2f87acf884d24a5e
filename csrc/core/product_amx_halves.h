// Products of float16 on tiles that multiply bfloat16 (AMX-BF16). A number is the sum of two of
// bfloat16: its upper bits, and the rest. That is exact for float16; float32 numbers lose what is
// 16 bits below the leading one, which is less than rounding to float16 takes.
//
// An operand is such a pair. So one tile product gives high * high + low * low, and a second one,
// by columns whose pairs are swapped, high * low + low * high.
#pragma once

#include "product_amx.h"

namespace {

struct AmxHalfProduct : FloatSums {
  typedef AmxHalfProduct Queries;
  static constexpr int DEPTH = 1;
  static constexpr int GRAIN = 16;
  static constexpr int ROWS = 32;
  static constexpr int PANEL = AmxProduct::PANEL;

  template <class T>
  static constexpr bool accepts = SAME<T, float16>;

  // The first half is cut off, so that the second has its sign; the second is rounded.
  static PAGED_ATTN_INLINE F narrow(const F* x) {
    const __m512i bits = (__m512i)x[0], upper = _mm512_set1_epi32(int32_t(0xffff0000));
    const F rest = x[0] - (F)_mm512_and_si512(bits, upper);
    const __m512i low = _mm512_add_epi32((__m512i)rest, _mm512_set1_epi32(0x8000));
    const __m512i high = _mm512_srli_epi32(bits, 16);
    return (F)_mm512_ternarylogic_epi32(high, low, upper, 0xf8);  // high | (low & upper)
  }
  static PAGED_ATTN_INLINE F load_operands(const float16* p) {
    const F x = load(p);
    return narrow(&x);
  }
  static PAGED_ATTN_INLINE F load_operands(const float16* p, int n) {
    const F x = load(p, n);
    return narrow(&x);
  }
  static PAGED_ATTN_INLINE void interleave(F*) {}
  static PAGED_ATTN_INLINE F exp2_for_operand(F x) { return PairProduct::exp2_for_operand(x); }
};

// Columns are turned once for all rows, up to a chain's length at a time.
template <>
struct Matrix<AmxHalfProduct> {
  static constexpr int ROW_STEP = W;

  static inline void multiply(const float* a, int64_t stride_a, int64_t rows, const float* b,
                              int64_t stride_b, int64_t begin, int64_t end, float* c,
                              int64_t stride_c, int64_t depth, bool add, Fetch fetch = {}) {
    constexpr int PANEL = AmxHalfProduct::PANEL;
    constexpr int64_t STEP = AmxHalfProduct::GRAIN;
    const int64_t chains = (depth + MAX_CHAIN - 1) / MAX_CHAIN;
    const int64_t calls = ((end - begin + PANEL - 1) / PANEL) * chains * ((rows + 31) / 32);
    fetch.per_call = (fetch.lines() + calls - 1) / calls;
    alignas(64) float space[MAX_CHAIN * PANEL];
    float* turned = space;
    asm("" : "+r"(turned));  // hides its size: `declare_read` reads more bytes than this array has
    for (int64_t i = begin, n; i < end; i += n) {
      n = min64(PANEL - i % PANEL, end - i);
      for (int64_t d = 0; d < depth; d += MAX_CHAIN) {
        const int64_t steps = min64(MAX_CHAIN, depth - d) / STEP;
        const float* columns = b + i / PANEL * stride_b + i % PANEL + d * PANEL;
        for (int64_t k = 0; k < steps * STEP; ++k)
          for (int64_t j = 0; j < n; j += W)
            store(turned + k * PANEL + j, turn(load(columns + k * PANEL + j)));
        for (int64_t r = 0; r < rows; r += 2 * W) {
          fetch.issue();
          square(a + r * stride_a + d, stride_a, columns, turned, c + r * stride_c + i, stride_c,
                 steps, n > W, rows - r > W, add || d > 0);
        }
      }
    }
  }

 private:
  // swaps high and low of each pair
  static PAGED_ATTN_INLINE F turn(F x) { return (F)_mm512_rol_epi32((__m512i)x, 16); }

  // Two vectors of columns if `wide`, twice 16 rows if `tall`.
  static PAGED_ATTN_INLINE void square(const float* a, int64_t stride_a, const float* b,
                                       const float* turned, float* c, int64_t stride_c,
                                       int64_t steps, bool wide, bool tall, bool add) {
    constexpr int64_t PANEL = AmxHalfProduct::PANEL;
    const AmxSquare sums = {wide, tall};
    sums.begin(c, stride_c, add);
    for (int64_t i = 0; i < steps; ++i) {
      sums.load_rows(a + i * W, stride_a);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half)
        sums.multiply((half ? turned : b) + i * W * PANEL, PANEL);
    }
    sums.store(c, stride_c);
  }
};

}  // namespace
