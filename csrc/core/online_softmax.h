// The running softmax of a row over base-2 logits (FlashAttention-2, algorithm 1).
#pragma once

#include "mask.h"
#include "philox.h"
#include "product.h"

namespace {

// Replaces the logits of columns [begin, end) by probabilities relative to the new maximum, as
// operands of a product, and returns the factor that brings earlier sums to it.
template <class Product>
PAGED_ATTN_INLINE float update_softmax(float* scores, int begin, int end, float& m, float& l) {
  F top = set1(m);
  for (int c = begin; c < end; c += W) top = max(top, load(scores + c));
  const float m_new = reduce_max(top);
  // a row that has seen no key keeps m = -inf; shifting by 0 instead avoids inf - inf
  const float shift = m_new == -INFINITY ? 0.f : m_new;
  F sum = {};
  constexpr int DEPTH = Product::DEPTH;
  for (int c = begin; c < end; c += W * DEPTH) {
    F p[DEPTH] = {};
    for (int i = 0; i < DEPTH && c + i * W < end; ++i) {
      p[i] = Product::exp2_for_operand(load(scores + c + i * W) - set1(shift));
      sum += p[i];
    }
    store(scores + c / DEPTH, Product::narrow(p));
  }
  const float rescale = m == m_new ? 1.f : exp2(m - shift);
  l = l * rescale + reduce_add(sum);
  m = m_new;
  return rescale;
}

// Turns probabilities into operands, in place.
template <class Product>
PAGED_ATTN_INLINE void narrow(float* scores, int begin, int end) {
  constexpr int DEPTH = Product::DEPTH;
  for (int c = begin; c < end; c += W * DEPTH) {
    F p[DEPTH] = {};
    for (int i = 0; i < DEPTH && c + i * W < end; ++i) p[i] = load(scores + c + i * W);
    store(scores + c / DEPTH, Product::narrow(p));
  }
}

// Drops probabilities after they entered the sum.
PAGED_ATTN_INLINE void drop_probabilities(const Attention& a, const Sequence& s,
                                          const ScoreRow& row, const KeyBlock& block, int begin,
                                          int end, float* scores) {
  for (int i = 0; i < block.num_segments; ++i) {
    const Segment& segment = block.segments[i];
    const int first = int(max64(segment.begin, begin)), last = int(min64(segment.end, end));
    if (first < last)
      apply_dropout(a.dropout, s.index, row.head, row.token, segment.key + first - segment.begin,
                    scores + first, last - first);
  }
}

// Mask, softmax and dropout of one row over columns [begin, end) of a block.
template <class Product>
PAGED_ATTN_INLINE float softmax_row(const Attention& a, const Sequence& s, const ScoreRow& row,
                                    const KeyBlock& block, int begin, int end, float* scores,
                                    float& m, float& l) {
  finish_row(a, row, block, begin, end, scores);
  if (!a.dropout.enabled) return update_softmax<Product>(scores, begin, end, m, l);
  const float rescale = update_softmax<FloatProduct>(scores, begin, end, m, l);
  drop_probabilities(a, s, row, block, begin, end, scores);
  narrow<Product>(scores, begin, end);
  return rescale;
}

// Normalises a finished accumulator and writes it out with its lse.
inline void write_row(const Attention& a, const Sequence& s, int64_t token, int64_t head,
                      const float* acc, float m, float l) {
  float lse = l > 0 ? m * LN_2 + logf(l) : (l == 0 ? -INFINITY : l);
  if (a.sinks) {
    const float sink = a.sinks(head);
    if (l == 0) {
      lse = sink;
    } else if (sink != -INFINITY) {
      const float top = sink * LOG2_E > m ? sink * LOG2_E : m;
      // the sum relative to m, which is what the accumulator is relative to
      const float sum = l * exp2(m - top) + exp2(sink * LOG2_E - top);
      lse = top * LN_2 + logf(sum);
      l += exp2(sink * LOG2_E - m);
    }
  }
  const int64_t kv_head = head * a.num_kv_heads / a.num_heads;
  float factor = a.v_descale ? a.v_descale(s.index, kv_head) : 1.f;
  if (a.dropout.enabled) factor *= a.dropout.keep_scale;
  const float out_scale = a.out_scale ? *a.out_scale : 1.f;
  const bool empty = l == 0;
  const int64_t row = s.q_start + token;
  a.lse[head * a.total_q + row] = lse;
  with_type(a.out_dtype, [&](auto tag) __attribute__((always_inline)) {
    typedef typename decltype(tag)::type T;
    T* out = (T*)a.out + (row * a.num_heads + head) * a.head_dim_v;
    for (int64_t d = 0; d < a.head_dim_v; d += W) {
      // a row without keys is 0 even if nothing ever wrote its accumulator
      const F x = empty ? F{} : load(acc + d) / set1(l) * set1(factor) / set1(out_scale);
      store(out + d, x, int(min64(W, a.head_dim_v - d)));
    }
  });
}

}  // namespace
