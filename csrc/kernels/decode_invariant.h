// Dot products of few query rows with the same bits as tiles': a lane is a key, whose dims are
// added in their order.
#pragma once

#include "decode_products.h"

namespace {

// Calls f(first head, number of heads, first operand, operand) for W operands of W keys, transposed
// as prefill.h packs them: operand(head, i) is operand i of the W keys of a head. HEADS
// heads take turns.
template <class Product, int HEADS, class T, class Ahead, class Function>
PAGED_ATTN_INLINE void turn_keys(const T* const* k, const int64_t* offset, Ahead& ahead,
                                 int64_t head_dim, Function f) {
  constexpr int STEP = W * Product::DEPTH;
  const T* later[HEADS];
  for (int h = 0; h < HEADS; ++h)
    later[h] = (const T*)ahead.advance(W * head_dim * int64_t(sizeof(T)));
  const auto turn = [&](int h, int64_t d, int n, F* keys, auto load_key)
                        __attribute__((always_inline)) {
#pragma GCC unroll 16
                          for (int j = 0; j < W; ++j) {
                            ahead.prefetch(later[h], d * W + j * n, n);
                            keys[j] = load_key(k[h] + offset[j] + d);
                          }
                          transpose(keys);
                        };
  int64_t d = 0;
  if constexpr (Product::template by_floats<T>) {
    // transposed as bytes, four dims a lane, with half of the shuffles
    for (; d + 2 * STEP <= head_dim; d += 2 * STEP) {
      F keys[HEADS][W];
#pragma GCC unroll 4
      for (int h = 0; h < HEADS; ++h)
        turn(h, d, 2 * STEP, keys[h], [](const T* p) __attribute__((always_inline)) {
          F bytes;
          memcpy(&bytes, p, sizeof bytes);
          return bytes;
        });
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half)
        f(0, Count<HEADS>(), d / Product::DEPTH + half * W,
          [&](int h, int i) __attribute__((always_inline)) {
            return Product::pair_of_bytes(keys[h][(half * W + i) / 2], i % 2);
          });
    }
  }
  const auto turn_operands = [&](int n, auto load_key) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; ++h) {
      F keys[W];
      turn(h, d, n, keys, load_key);
      f(h, Count<1>(), d / Product::DEPTH,
        [&](int, int i) __attribute__((always_inline)) { return keys[i]; });
    }
  };
  for (; d + STEP <= head_dim; d += STEP)
    turn_operands(
        STEP, [](const T* p) __attribute__((always_inline)) { return Product::load_operands(p); });
  if (d < head_dim) {
    const int n = int(head_dim - d);
    turn_operands(
        n, [n](const T* p) __attribute__((always_inline)) { return Product::load_operands(p, n); });
  }
}

// Dot products of ROWS queries with W keys, a lane each, with the same bits as tiles'.
template <class Product, int ROWS>
struct DotsInOrder {
  F acc[ROWS] = {};

  PAGED_ATTN_INLINE void add(F operands, const float* q, int64_t stride_q) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
      acc[r] = Product::multiply_add(operands, set1(q[r * stride_q]), acc[r]);
  }
  // to be called after each chain of `MAX_CHAIN` operands, and after the last one
  PAGED_ATTN_INLINE void close(bool first, float scale, float* scores) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      float* to = scores + r * ROW_COLUMNS;
      const F product = acc[r] * set1(scale);
      store(to, first ? product : fma(load(to), set1(1.f), product));
      acc[r] = F{};
    }
  }
};

template <class Product, int ROWS>
inline void dot_turned(const float* turned, const float* q, int64_t stride_q, int64_t depth,
                       float scale, float* scores) {
  DotsInOrder<Product, ROWS> dots;
  for (int64_t first = 0; first < depth; first += MAX_CHAIN) {
    const int64_t end = min64(depth, first + MAX_CHAIN);
#pragma GCC unroll 4
    for (int64_t i = first; i < end; ++i) dots.add(load(turned + i * W), q + i, stride_q);
    dots.close(first == 0, scale, scores);
  }
}

// Dot products of more rows than registers have room for: transposed keys are kept in `turned`.
template <class Product, class T, class Ahead>
PAGED_ATTN_APART void dot_many(const T* k, const int64_t* offset, Ahead& ahead, const float* q,
                               int64_t rows, int64_t head_dim, float scale, float* scores,
                               float* turned) {
  const int64_t depth = depth_of<Product>(head_dim);
  const int64_t stride_q = padded<Product>(head_dim) / Product::DEPTH;
  turn_keys<Product, 1>(&k, offset, ahead, head_dim,
                        [&](int, auto, int64_t first, auto operand) __attribute__((always_inline)) {
#pragma GCC unroll 16
                          for (int i = 0; i < W; ++i)
                            store(turned + (first + i) * W, operand(0, i));
                        });
  for (int64_t r = 0; r < rows;) {
    const auto some = [&](auto count) __attribute__((always_inline)) {
      constexpr int ROWS = decltype(count)::value;
      dot_turned<Product, ROWS>(turned, q + r * stride_q, stride_q, depth, scale,
                                scores + r * ROW_COLUMNS);
      r += ROWS;
    };
    rows - r >= 8 ? some(Count<8>()) : rows - r >= 4 ? some(Count<4>()) : some(Count<1>());
  }
}

// The same for so few rows of HEADS heads that the keys stay in registers.
template <class Product, int ROWS, int HEADS, class T, class Ahead>
PAGED_ATTN_INLINE void dot_few(const T* const* k, const int64_t* offset, Ahead& ahead,
                               const float* q, int64_t head_dim, const float* scale,
                               float* scores) {
  const int64_t depth = depth_of<Product>(head_dim);
  const int64_t stride_q = padded<Product>(head_dim) / Product::DEPTH;
  DotsInOrder<Product, ROWS> dots[HEADS];
  turn_keys<Product, HEADS>(
      k, offset, ahead, head_dim,
      [&](int head, auto heads, int64_t first, auto operand) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i)
#pragma GCC unroll 4
          for (int h = head; h < head + heads.value; ++h)
            dots[h].add(operand(h, i), q + h * ROWS * stride_q + first + i, stride_q);
        const int64_t end = first + W;
        if (end % MAX_CHAIN == 0 || end >= depth)
          for (int h = head; h < head + heads.value; ++h)
            dots[h].close(end <= MAX_CHAIN, scale[h], scores + h * ROWS * ROW_COLUMNS);
      });
}

// Heads whose dot products are computed together. One head has a chain of sums for each row, and
// each sum waits for the one before it.
template <class Product, class T, int ROWS>
constexpr int HEADS_IN_ORDER = W < 16 || Product::DEPTH == 1    ? 1
                               : Product::template by_floats<T> ? (ROWS == 4 ? 2 : 1)
                               : sizeof(T) == 1                 ? 1
                               : ROWS == 4                      ? 2
                                                                : 4;

constexpr int MOST_HEADS_IN_ORDER = 4;

// dot_keys where each score is a lane's sum over the dims in their order, for HEADS heads.
template <class Product, int HEADS, class T, int ROWS, class Ahead>
PAGED_ATTN_INLINE void dot_keys_in_order(const T* const* k, const int64_t* offset, int columns,
                                         Ahead& ahead, const float* q, int64_t rows,
                                         int64_t head_dim, const float* scale, float* scores,
                                         float* turned) {
  const int64_t stride_q = padded<Product>(head_dim) / Product::DEPTH;
  for (int c = 0; c < columns; c += W) {
    if (ROWS == 4 ? rows == 4 : HEADS > 1) {
      dot_few<Product, ROWS, HEADS>(k, offset + c, ahead, q, head_dim, scale, scores + c);
      continue;
    }
    for (int h = 0; h < HEADS; ++h)
      dot_many<Product>(k[h], offset + c, ahead, q + h * rows * stride_q, rows, head_dim, scale[h],
                        scores + h * rows * ROW_COLUMNS + c, turned);
  }
}

}  // namespace
