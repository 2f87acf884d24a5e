// From dot products to operands, row by row: from q . k to probabilities P, and from dout . v to
// dX, the gradients of q . k.
#pragma once

#include "../core/backward.h"
#include "../core/online_softmax.h"

namespace {

using paged_attn::Backward;
using paged_attn::KEY_TILE;

// Columns [begin, end) of a key tile, of which those in `granules`, of ALIGN columns each, take
// part. The others are zeros.
struct Columns {
  int begin, end;
  uint32_t granules;
  PAGED_ATTN_INLINE bool has(int c) const { return c < end && granules >> c / ALIGN & 1; }
};

// A row's statistics, and what its scores are multiplied by to be logits in base 2.
struct GradientRow {
  float scale, lse_2, delta;
};

// P and dX of a row whose logits are its scores times a scale, as operands in place.
template <class Product>
PAGED_ATTN_INLINE void gradient_row(const Columns& columns, const GradientRow& row, float* scores,
                                    float* gradients) {
  constexpr int DEPTH = Product::DEPTH;
  const F scale = set1(row.scale), shift = set1(-row.lse_2), delta = set1(row.delta);
  for (int c = columns.begin; c < columns.end; c += W * DEPTH) {
    F p[DEPTH] = {}, dx[DEPTH] = {};
#pragma GCC unroll 2
    for (int i = 0; i < DEPTH; ++i) {
      if (!columns.has(c + i * W)) continue;
      p[i] = Product::exp2_for_operand(fma(load(scores + c + i * W), scale, shift));
      const F x = p[i] * (load(gradients + c + i * W) - delta);
      // a hidden key gives no gradient, whatever numbers it has
      dx[i] = select((I)(p[i] != F{}), x, F{});
    }
    store(scores + c / DEPTH, Product::narrow(p));
    store(gradients + c / DEPTH, Product::narrow(dx));
  }
}

// Adds a row of dS to the gradient of the bias, or writes it there.
PAGED_ATTN_INLINE void write_bias_gradient(const Backward& b, const ScoreRow& row, int64_t query,
                                           int64_t key, const Columns& columns, const float* ds) {
  const Attention& a = b.forward;
  const int64_t place = row.head * b.dbias_stride_head + query * b.dbias_stride_query;
  const int first = int(max64(columns.begin, row.visible.begin - key));
  const int last = int(min64(columns.end, row.visible.end - key));
  if (b.dbias_stride_head == 0) {
    float* to = b.dbias_sums + place + key;
    for (int c = first; c < last; ++c) to[c] += ds[c];
    return;
  }
  with_type(a.bias_dtype, [&](auto tag) __attribute__((always_inline)) {
    typedef typename decltype(tag)::type T;
    T* to = (T*)b.dbias + place + key;
    for (int c = first; c < last; c += W) store(to + c, load(ds + c), int(min64(W, last - c)));
  });
}

// The same as gradient_row for any logits (softcap, ALiBi, bias, masks), and with dropout.
template <class Product>
PAGED_ATTN_APART void gradient_row_of_logits(const Backward& b, const Sequence& s,
                                             const ScoreRow& row, const KeyBlock& block,
                                             const Columns& columns, const GradientRow& g,
                                             float* scores, float* gradients) {
  const Attention& a = b.forward;
  const int64_t key = block.segments[0].key - block.segments[0].begin;  // of column 0
  float capped[KEY_TILE + W], kept[KEY_TILE + W];
  for (int c = columns.begin; c < columns.end; c += W) {
    const F x = load(scores + c) * set1(g.scale);
    store(scores + c, x);
    store(capped + c, x);
    store(kept + c, set1(1.f));
  }
  finish_row(a, row, block, columns.begin, columns.end, scores);
  F keep_scale = set1(1.f);
  if (a.dropout.enabled) {
    apply_dropout(a.dropout, s.index, row.head, row.token, key + columns.begin,
                  kept + columns.begin, columns.end - columns.begin);
    keep_scale = set1(a.dropout.keep_scale);
  }
  for (int c = columns.begin; c < columns.end; c += W) {
    F p = {}, ds = {};
    if (columns.has(c)) {
      const I keep = (I)(load(kept + c) != F{});
      p = Product::exp2_for_operand(load(scores + c) - set1(g.lse_2));
      const F dp = select(keep, load(gradients + c) * keep_scale, F{});
      ds = select((I)(p != F{}), p * (dp - set1(g.delta)), F{});
      p = select(keep, p, F{});
    }
    store(scores + c, p);
    store(gradients + c, ds);
  }
  if (b.dbias) write_bias_gradient(b, row, s.q_start + row.token, key, columns, gradients);
  if (a.softcap > 0)
    for (int c = columns.begin; c < columns.end; c += W) {
      const F t = tanh(load(capped + c)), ds = load(gradients + c);
      store(gradients + c, select((I)(ds != F{}), ds * (set1(1.f) - t * t), F{}));
    }
  narrow<Product>(scores, columns.begin, columns.end);
  narrow<Product>(gradients, columns.begin, columns.end);
}

}  // namespace
