// Matrix products by register tiles.
#pragma once

#include "product.h"
#include "seqlen_info.h"

namespace {

template <int N>
struct Count {
  static constexpr int value = N;
};

// operands of a chain of float32 sums, at most: a longer one would round more than a good library's
constexpr int64_t MAX_CHAIN = 128;

// C (TILE_ROWS, VECS * W) becomes scale * A (TILE_ROWS, depth) @ B (depth, one panel), plus
// diag(keep) @ C if `keep` is not null. `depth` is in operands.
template <class Product, int VECS>
inline void multiply_tile(const float* a, int64_t stride_a, const float* b, float* c,
                          int64_t stride_c, int64_t depth, float scale, const float* keep) {
  constexpr int PANEL = Product::PANEL;
  F acc[TILE_ROWS][VECS] = {};
  for (int64_t k = 0; k < depth; ++k, b += PANEL) {
    F column[VECS];
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j) column[j] = load(b + j * W);
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; ++r) {
      const F x = set1(a[r * stride_a + k]);
#pragma GCC unroll 4
      for (int j = 0; j < VECS; ++j) acc[r][j] = Product::multiply_add(column[j], x, acc[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < TILE_ROWS; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j) {
      float* to = c + r * stride_c + j * W;
      const F product = acc[r][j] * set1(scale);
      store(to, keep ? fma(load(to), set1(keep[r]), product) : product);
    }
}

template <class Product>
PAGED_ATTN_INLINE void multiply(int vecs, const float* a, int64_t stride_a, const float* b,
                                float* c, int64_t stride_c, int64_t depth, float scale,
                                const float* keep) {
  const auto tile = [&](auto count) __attribute__((always_inline)) {
    multiply_tile<Product, decltype(count)::value>(a, stride_a, b, c, stride_c, depth, scale, keep);
  };
  if constexpr (TILE_VECS == 4) {
    if (vecs == 4) return tile(Count<4>());
    if (vecs == 3) return tile(Count<3>());
  }
  return vecs == 2 ? tile(Count<2>()) : tile(Count<1>());
}

// Memory that is prefetched while a product runs, `per_call` cache lines for each register tile:
// `rows` rows of `row_bytes`, `step` bytes from one to the next, but `jump` after each `group`.
struct Fetch {
  const char* at = nullptr;
  int64_t row_bytes = 0, step = 0, jump = 0, group = 1, rows = 0;
  int64_t row = 0, byte = 0, per_call = 0;

  PAGED_ATTN_INLINE int64_t lines() const { return rows * ((row_bytes + 63) / 64); }
  PAGED_ATTN_INLINE void issue() {
    for (int64_t i = 0; i < per_call && row < rows; ++i) {
      __builtin_prefetch(at + byte, 0, 2);
      byte += 64;
      if (byte < row_bytes) continue;
      byte = 0;
      at += ++row % group == 0 ? jump : step;
    }
  }
};

// A product of larger matrices.
template <class Product>
struct Matrix {
  static constexpr int ROW_STEP = Product::ROWS;

  // C (rows, columns [begin, end)) = A (rows, depth) @ B, or C += that. B lies in panels,
  // `stride_b` floats apart; columns are whole vectors, and A and C have room for rows in whole
  // steps.
  static inline void multiply(const float* a, int64_t stride_a, int64_t rows, const float* b,
                              int64_t stride_b, int64_t begin, int64_t end, float* c,
                              int64_t stride_c, int64_t depth, bool add, Fetch fetch = {}) {
    constexpr int ROWS = Product::ROWS, PANEL = Product::PANEL;
    float ones[ROWS];
    for (float& x : ones) x = 1.f;
    const int64_t calls = ((end - begin + PANEL - 1) / PANEL) * ((rows + ROWS - 1) / ROWS);
    fetch.per_call = (fetch.lines() + calls - 1) / calls;
    for (int64_t i = begin, n; i < end; i += n) {
      n = min64(PANEL - i % PANEL, end - i);
      const float* panel = b + i / PANEL * stride_b + i % PANEL;
      for (int64_t r = 0; r < rows; r += ROWS) {
        fetch.issue();
        const float* keep = add ? ones : nullptr;
        for (int64_t d = 0; d < depth; d += MAX_CHAIN, keep = ones)
          ::multiply<Product>(int(n / W), a + r * stride_a + d, stride_a, panel + d * PANEL,
                              c + r * stride_c + i, stride_c, min64(MAX_CHAIN, depth - d), 1.f,
                              keep);
      }
    }
  }
};

}  // namespace
