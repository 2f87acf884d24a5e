// Packs rows of tokens, keys or values, into panels: right-hand sides of matrix products.
#pragma once

#include "product.h"
#include "seqlen_info.h"

namespace {

// Packs `count` tokens as the right-hand side of a product whose depth is head_dim:
// (token / PANEL, operand of head_dim, token % PANEL). `count` is a multiple of W; `depth` is in
// operands.
template <class Product, class T>
inline void pack_keys(const T* k, const int64_t* offset, int count, int64_t head_dim, int64_t depth,
                      float* packed) {
  constexpr int STEP = W * Product::DEPTH, PANEL = Product::PANEL;
  for (int c = 0; c < count; c += W) {
    float* panel = packed + c / PANEL * depth * PANEL + c % PANEL;
    for (int64_t d = 0; d < head_dim; d += STEP) {
      const int n = int(min64(STEP, head_dim - d));
      F rows[W];
      if (n == STEP) {
        for (int i = 0; i < W; ++i) rows[i] = Product::load_operands(k + offset[c + i] + d);
      } else {
        for (int i = 0; i < W; ++i) rows[i] = Product::load_operands(k + offset[c + i] + d, n);
      }
      transpose(rows);
      const int64_t first = d / Product::DEPTH;
      for (int i = 0; i < min64(W, depth - first); ++i) store(panel + (first + i) * PANEL, rows[i]);
    }
  }
}

// Packs tokens as the right-hand side of a product whose depth is the tokens: (head_dim / PANEL,
// operand of `max_count` tokens, head_dim % PANEL). `count` is a multiple of DEPTH. The tokens of
// an operand are APART from each other. If that is more than one, W operands hold the next W *
// DEPTH tokens, and tokens from `count` on are zeros.
template <class Product, int APART = 1, class T>
inline void pack_values(const T* v, const int64_t* offset, int count, int64_t head_dim,
                        int64_t max_count, float* packed) {
  constexpr int DEPTH = Product::DEPTH, STEP = W * DEPTH, PANEL = Product::PANEL;
  static_assert(APART == 1 || APART == W, "tokens of an operand are neighbours or a vector apart");
  const int operands = int(APART == 1 ? count : round_up(count, STEP)) / DEPTH;
  for (int o = 0; o < operands; ++o) {
    const int first = APART == 1 ? o * DEPTH : o / W * STEP + o % W;
    const T* row[DEPTH];
    for (int i = 0; i < DEPTH; ++i) {
      const int c = first + i * APART;
      row[i] = APART == 1 || c < count ? v + offset[c] : nullptr;
    }
    for (int64_t d = 0; d < head_dim; d += STEP) {
      const int n = int(min64(STEP, head_dim - d));
      F x[DEPTH] = {};
      for (int i = 0; i < DEPTH; ++i) {
        if (row[i] == nullptr) continue;
        x[i] =
            n == STEP ? Product::load_operands(row[i] + d) : Product::load_operands(row[i] + d, n);
      }
      Product::interleave(x);
      for (int i = 0; i < DEPTH; ++i) {
        const int64_t dim = d + i * W;
        store(packed + (dim / PANEL * (max_count / DEPTH) + o) * PANEL + dim % PANEL, x[i]);
      }
    }
  }
}

}  // namespace
