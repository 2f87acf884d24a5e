// Pairs of bfloat16 on Intel's tile registers (AMX-BF16): what the vectors of AVX-512-BF16 pack,
// multiplied 16 rows x 16 columns x 16 operands at a time.
#pragma once

#include "product.h"

namespace {

struct AmxProduct : PairProduct {
  static constexpr int GRAIN = 8;
  static constexpr int ROWS = 16;
  static constexpr bool HAS_TILE = true;

  // Registers 0 to 3 hold sums, 4 and 5 sixteen operands of rows and columns, 6 and 7 eight.
  struct alignas(64) Registers {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 32, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 8};
  };

  // As the function of this name in attention_tile.h.
  template <int VECS>
  static inline void multiply_tile(const float* a, int64_t stride_a, const float* b, float* c,
                                   int64_t stride_c, int64_t depth, float scale,
                                   const float* keep) {
    constexpr int64_t STRIDE = PANEL * sizeof(float);
    fence();
    _tile_zero(0);
    if constexpr (VECS > 1) _tile_zero(1);
    if constexpr (VECS > 2) _tile_zero(2);
    if constexpr (VECS > 3) _tile_zero(3);
// the names of registers are part of an instruction
#define MULTIPLY(ROWS_OF_A, COLUMNS_OF_B, SUMS)                 \
  if constexpr (VECS > SUMS) {                                  \
    _tile_loadd(COLUMNS_OF_B, b + k * PANEL + SUMS * W, STRIDE); \
    _tile_dpbf16ps(SUMS, ROWS_OF_A, COLUMNS_OF_B);              \
  }
#define MULTIPLY_ALL(ROWS_OF_A, COLUMNS_OF_B)                   \
  _tile_loadd(ROWS_OF_A, a + k, stride_a * int64_t(sizeof *a)); \
  MULTIPLY(ROWS_OF_A, COLUMNS_OF_B, 0)                          \
  MULTIPLY(ROWS_OF_A, COLUMNS_OF_B, 1)                          \
  MULTIPLY(ROWS_OF_A, COLUMNS_OF_B, 2)                          \
  MULTIPLY(ROWS_OF_A, COLUMNS_OF_B, 3)
    int64_t k = 0;
    for (; k + 16 <= depth; k += 16) {
      MULTIPLY_ALL(4, 5)
    }
    if (k < depth) {
      MULTIPLY_ALL(6, 7)
    }
#undef MULTIPLY_ALL
#undef MULTIPLY
    alignas(64) float sums[ROWS * PANEL];
    _tile_stored(0, sums, STRIDE);
    if constexpr (VECS > 1) _tile_stored(1, sums + W, STRIDE);
    if constexpr (VECS > 2) _tile_stored(2, sums + 2 * W, STRIDE);
    if constexpr (VECS > 3) _tile_stored(3, sums + 3 * W, STRIDE);
    fence();
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < VECS; ++j) {
        float* to = c + r * stride_c + j * W;
        const F product = load(sums + r * PANEL + j * W) * set1(scale);
        store(to, keep ? fma(load(to), set1(keep[r]), product) : product);
      }
  }

 private:
  // GCC's loads of tiles do not say that they read memory
  static PAGED_ATTN_INLINE void fence() { asm volatile("" ::: "memory"); }
};

}  // namespace
