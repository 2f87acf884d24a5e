// The products of few query rows with keys and values that are read in place, once, in the order of
// memory. The rows of a group share each load and each conversion.
#pragma once

#include "../core/matrix.h"
#include "../core/query_rows.h"
#include "../core/read_ahead.h"

namespace {

constexpr int ROW_COLUMNS = 128;  // keys per softmax update
static_assert(ROW_COLUMNS == MAX_COLUMNS, "rows add up what tiles do");

// Dot products that are computed together, enough to hide the latency of one.
constexpr int DOTS = W < 8 ? 8 : W;

// A row's numbers in whole vectors of operands.
template <class Product>
PAGED_ATTN_INLINE int64_t padded(int64_t head_dim) {
  return round_up(head_dim, W * Product::DEPTH * Product::PACKED);
}

// scores (rows, columns) = scale * q (rows, head_dim) . k; ROWS x KEYS dot products at a time, W of
// them summed over the lanes in one transpose. With ADD, that is added to scores, and nothing is
// prefetched.
template <class Product, class T, int ROWS, bool ADD = false, class Ahead>
PAGED_ATTN_INLINE void dot_keys(const T* k, const int64_t* offset, int columns, Ahead& ahead,
                                const float* q, const float* lane_scales, int64_t rows,
                                int64_t head_dim, float scale, float* scores) {
  constexpr int KEYS = DOTS / ROWS;
  constexpr int PACKED = Product::PACKED;
  constexpr int STEP = W * Product::DEPTH * PACKED;
  const int64_t stride_q = padded<Product>(head_dim) / Product::DEPTH;
  const int64_t row_elements = head_dim / PACKED;
  const int64_t row_bytes = row_elements * int64_t(sizeof(T));
  // one advance for all columns where they are contiguous, else one for each step of the loop
  const bool whole = !ADD && ahead.has(columns * row_bytes);
  const T* first_later = whole ? (const T*)ahead.advance(columns * row_bytes) : nullptr;
  for (int c = 0; c < columns; c += KEYS) {
    const T* key[KEYS];
    for (int i = 0; i < KEYS; ++i) key[i] = k + offset[c + i];
    const T* later = nullptr;
    if (!ADD)
      later = whole ? first_later + c * row_elements : (const T*)ahead.advance(KEYS * row_bytes);
    for (int64_t r = 0; r < rows; r += ROWS) {
      typename Product::Sum acc[DOTS] = {};
      const float* x = q + r * stride_q;
      // what is prefetched for a step, or where that is less than a line, for some steps at once
      constexpr int STEP_BYTES = KEYS * STEP / PACKED * int(sizeof(T));
      constexpr int STEPS = STEP_BYTES < CACHE_LINE ? CACHE_LINE / STEP_BYTES : 1;
      const bool prefetches = !ADD && r == 0;
      const auto step_packed = [&](int64_t d, int n, bool apart,
                                   auto load_key) __attribute__((always_inline)) {
        // as many keys as registers have room for, beside the sums
        constexpr int SOME = KEYS < W / 4 ? KEYS : W / 4;
#pragma GCC unroll 16
        for (int j = 0; j < KEYS; j += SOME) {
          F y[SOME][PACKED];
#pragma GCC unroll 4
          for (int h = 0; h < SOME; ++h) {
            if (apart) ahead.prefetch(later, (d * KEYS + (j + h) * n) / PACKED, n / PACKED);
            load_key(key[j + h] + d / PACKED, y[h]);
          }
#pragma GCC unroll 8
          for (int i = 0; i < ROWS * PACKED; ++i) {
            const int from = i % ROWS * KEYS + j, half = i / ROWS;
            const F row = load(x + i % ROWS * stride_q + d / Product::DEPTH + half * W);
#pragma GCC unroll 4
            for (int h = 0; h < SOME; ++h)
              acc[from + h] = Product::multiply_add(y[h][half], row, acc[from + h]);
          }
        }
      };
      const auto step_plain = [&](int64_t d, int n, bool apart,
                                  auto load_key) __attribute__((always_inline)) {
        F row[ROWS];
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; ++i) row[i] = load(x + i * stride_q + d / Product::DEPTH);
#pragma GCC unroll 16
        for (int j = 0; j < KEYS; ++j) {
          if (apart) ahead.prefetch(later, d * KEYS + j * n, n);
          const F y = load_key(key[j] + d);
#pragma GCC unroll 4
          for (int i = 0; i < ROWS; ++i)
            acc[i * KEYS + j] = Product::multiply_add(y, row[i], acc[i * KEYS + j]);
        }
      };
      const auto step = [&](int64_t d, bool apart) __attribute__((always_inline)) {
        if constexpr (PACKED == 2)
          step_packed(d, STEP, apart, [](const T* p, F* y) __attribute__((always_inline)) {
            Product::load_both(p, y);
          });
        else
          step_plain(d, STEP, apart, [](const T* p) __attribute__((always_inline)) {
            return Product::load_operands(p);
          });
      };
      int64_t d = 0;
#pragma GCC unroll 4
      for (; STEPS > 1 && d + STEPS * STEP <= head_dim; d += STEPS * STEP) {
        if (prefetches) ahead.prefetch(later, d * KEYS / PACKED, CACHE_LINE / int(sizeof(T)));
#pragma GCC unroll 8
        for (int i = 0; i < STEPS; ++i) step(d + i * STEP, false);
      }
#pragma GCC unroll 4
      for (; d + STEP <= head_dim; d += STEP) step(d, prefetches);
      if (d < head_dim) {
        const int n = int(head_dim - d);
        if constexpr (PACKED == 2)
          step_packed(d, n, prefetches, [n](const T* p, F* y) __attribute__((always_inline)) {
            Product::load_both(p, n, y);
          });
        else
          step_plain(d, n, prefetches, [n](const T* p) __attribute__((always_inline)) {
            return Product::load_operands(p, n);
          });
      }
      float sums[DOTS];
      for (int i = 0; ADD && i < ROWS; ++i)
        memcpy(sums + i * KEYS, scores + (r + i) * ROW_COLUMNS + c, KEYS * sizeof(float));
      F dots[DOTS];
#pragma GCC unroll 16
      for (int i = 0; i < DOTS; ++i)
        dots[i] = Product::dots(acc[i], lane_scales + (r + i / KEYS) * W);
      for (int i = 0; i < DOTS; i += W) {
        const F total = sum_lanes(dots + i) * set1(scale);
        store(sums + i, ADD ? total + load(sums + i) : total);
      }
      for (int i = 0; i < ROWS; ++i)
        memcpy(scores + (r + i) * ROW_COLUMNS + c, sums + i * KEYS, KEYS * sizeof(float));
    }
  }
}

// VECS vectors of operands down DEPTH rows of values; or of their first n dims.
template <class Product, int VECS, class T>
PAGED_ATTN_INLINE void load_down(const T* v, const int64_t* offset, int n, F* x) {
  constexpr int DEPTH = Product::DEPTH;
  if constexpr (Product::PACKED == 2) {
#pragma GCC unroll 2
    for (int j = 0; j < VECS; j += 2) {
      const T *first = v + offset[0] + j * W / 2, *second = v + offset[1] + j * W / 2;
      if (n == VECS * W)
        Product::load_down(first, second, x + j);
      else
        Product::load_down(first, second, n, x + j);
    }
  } else {
    if constexpr (Product::template by_bytes<T>)
      if (n == VECS * W) {
#pragma GCC unroll 2
        for (int j = 0; j < VECS; j += DEPTH)
          Product::load_down(v + offset[0] + j * W, v + offset[1] + j * W, x + j);
        return;
      }
    if constexpr (Product::template by_floats<T>)
      if (n == VECS * W) {
#pragma GCC unroll 4
        for (int j = 0; j < VECS; ++j)
          x[j] = Product::pair_up(load(v + offset[0] + j * W), load(v + offset[1] + j * W));
        return;
      }
#pragma GCC unroll 2
    for (int i = 0; i < DEPTH; ++i) {
      const T* row = v + offset[i];
#pragma GCC unroll 4
      for (int j = 0; j < VECS; j += DEPTH)
        x[i + j] =
            n == VECS * W ? Product::load_operands(row + j * W) : Product::load_operands(row, n);
    }
#pragma GCC unroll 4
    for (int j = 0; j < VECS; j += DEPTH) Product::interleave(x + j);
  }
}

// acc (ROWS, VECS * W) += p (ROWS, columns) @ v (columns, VECS * W); or the first n dims of them
template <class Product, class T, int ROWS, int VECS, class Ahead>
PAGED_ATTN_INLINE void add_values(const T* v, const int64_t* offset, int columns, Ahead& ahead,
                                  bool first, int n, const float* p, float* acc,
                                  int64_t stride_acc) {
  constexpr int DEPTH = Product::DEPTH;
  constexpr int PACKED = Product::PACKED;
  const T* later =
      first ? (const T*)ahead.advance(columns * n / PACKED * int64_t(sizeof(T))) : nullptr;
  typename Product::Sum sum[ROWS][VECS];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j)
      sum[r][j] = Product::from_memory(load(acc + r * stride_acc + j * W));
  // prefetched row by row, or where a row's share is less than a line, for some columns at once
  constexpr int SHARE = DEPTH * VECS * W / ROWS / PACKED, LINE = CACHE_LINE / int(sizeof(T));
  constexpr int LINE_COLUMNS = LINE * PACKED / (VECS * W);
  constexpr int COLUMNS = SHARE >= LINE ? 0 : LINE_COLUMNS < DEPTH ? DEPTH : LINE_COLUMNS;
  const auto add_column = [&](int c) __attribute__((always_inline)) {
    F x[VECS];
    load_down<Product, VECS>(v, offset + c, n, x);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      if (first && COLUMNS == 0) ahead.prefetch(later, c * n / PACKED + r * SHARE, SHARE);
      const F weight = set1(p[r * ROW_COLUMNS + c / DEPTH]);
#pragma GCC unroll 4
      for (int j = 0; j < VECS; ++j) sum[r][j] = Product::multiply_add(x[j], weight, sum[r][j]);
    }
  };
  int c = 0;
  if constexpr (COLUMNS > DEPTH)
    for (; c + COLUMNS <= columns; c += COLUMNS) {
      if (first) ahead.prefetch(later, c * n / PACKED, COLUMNS * n / PACKED);
#pragma GCC unroll 8
      for (int i = 0; i < COLUMNS; i += DEPTH) add_column(c + i);
    }
  for (; c < columns; c += DEPTH) {
    if (first && COLUMNS > 0 && c % (COLUMNS + (COLUMNS == 0)) == 0)
      ahead.prefetch(later, c * n / PACKED, COLUMNS * n / PACKED);
    add_column(c);
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j) {
      store(acc + r * stride_acc + j * W, Product::to_memory(sum[r][j]));
    }
}

template <class Product, class T, int ROWS, class Ahead>
PAGED_ATTN_INLINE void weigh_values(const T* v, const int64_t* offset, int columns, Ahead& ahead,
                                    const float* p, int64_t rows, int64_t head_dim, float* acc) {
  // no more accumulators than the products keep, and enough to hide the latency of one
  constexpr int VECS = ROWS == 4 ? TILE_VECS : 4;
  constexpr int FEW = Product::DEPTH, STEP = W * FEW, PACKED = Product::PACKED;
  const int64_t stride_acc = padded<Product>(head_dim);
  for (int64_t r = 0; r < rows; r += ROWS) {
    const float* weights = p + r * ROW_COLUMNS;
    float* to = acc + r * stride_acc;
    const bool first = r == 0;
    int64_t d = 0;
    for (; d + VECS * W <= head_dim; d += VECS * W)
      add_values<Product, T, ROWS, VECS>(v + d / PACKED, offset, columns, ahead, first, VECS * W,
                                         weights, to + d, stride_acc);
    for (; d + STEP <= head_dim; d += STEP)
      add_values<Product, T, ROWS, FEW>(v + d / PACKED, offset, columns, ahead, first, STEP,
                                        weights, to + d, stride_acc);
    if (d < head_dim)
      add_values<Product, T, ROWS, FEW>(v + d / PACKED, offset, columns, ahead, first,
                                        int(head_dim - d), weights, to + d, stride_acc);
  }
}

// Calls f(head_dim), which is compiled once more for the head_dim that most models have: with a
// constant, loops need no counters and addresses no arithmetic.
template <class Function>
PAGED_ATTN_INLINE void with_head_dim(int64_t head_dim, Function f) {
  if (head_dim == 128)
    f(128);
  else
    f(head_dim);
}

}  // namespace
