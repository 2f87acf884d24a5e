// Pairs of bfloat16 on Intel's tile registers (AMX-BF16): what the vectors of AVX-512-BF16 pack,
// multiplied 16 rows x 16 columns x 16 operands at a time.
#pragma once

#include "product.h"

namespace {

struct AmxProduct : PairProduct {
  static constexpr int GRAIN = 16;
  static constexpr int ROWS = 32;
  static constexpr int PANEL = 32;  // the columns of a step adjoin in memory
};

// Registers 0 to 3 hold sums, 4 and 5 operands of rows, 6 and 7 of columns.
struct alignas(64) AmxRegisters {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// GCC's loads of tiles do not say that they read memory.
PAGED_ATTN_INLINE void amx_fence() { asm volatile("" ::: "memory"); }

// C (16 x rows, 16 x panels) = A (16 x rows, 16 x steps) @ B, or C += that, by squares of 32 x 32.
// It is taken a step at a time, so that vector instructions can stand between the steps, which run
// beside them. All rows take two panels while these are in L1.
struct AmxWork {
  const float* a;
  int64_t stride_a;
  const float* b;
  int64_t stride_b;  // from one pair of panels to the next
  float* c;
  int64_t stride_c;
  int steps, panels, rows;
  bool add;
  int step, row;

  int left() const { return (panels + 1) / 2 * ((rows + 1) / 2) * steps; }

  // One step of a square. Needs panels > 0; returns whether work is left.
  PAGED_ATTN_INLINE void take() {
    constexpr int64_t BYTES = sizeof(float), PANEL = AmxProduct::PANEL;
    const bool wide = panels > 1, tall = rows - row > 1;
    float *top = c + row * W * stride_c, *low = top + W * stride_c;
    if (step == 0) {
      if (add) {
        _tile_loadd(0, top, stride_c * BYTES);
        if (wide) _tile_loadd(1, top + W, stride_c * BYTES);
        if (tall) _tile_loadd(2, low, stride_c * BYTES);
        if (tall && wide) _tile_loadd(3, low + W, stride_c * BYTES);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
    }
    const float *left = a + row * W * stride_a + step * W, *columns = b + step * W * PANEL;
    _tile_loadd(4, left, stride_a * BYTES);
    _tile_loadd(6, columns, PANEL * BYTES);
    _tile_dpbf16ps(0, 4, 6);
    if (tall) {
      _tile_loadd(5, left + W * stride_a, stride_a * BYTES);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (wide) {
      _tile_loadd(7, columns + W, PANEL * BYTES);
      _tile_dpbf16ps(1, 4, 7);
      if (tall) _tile_dpbf16ps(3, 5, 7);
    }
    if (++step < steps) return;
    _tile_stored(0, top, stride_c * BYTES);
    if (wide) _tile_stored(1, top + W, stride_c * BYTES);
    if (tall) _tile_stored(2, low, stride_c * BYTES);
    if (tall && wide) _tile_stored(3, low + W, stride_c * BYTES);
    step = 0;
    row += 2;
    if (row < rows) return;
    row = 0;
    panels -= 2;
    c += 2 * W;
    b += stride_b;
  }
};

}  // namespace
