// The running softmax of a row over base-2 logits (FlashAttention-2, algorithm 1).
#pragma once

#include "column_scales.h"
#include "mask.h"
#include "philox.h"
#include "product.h"

namespace {

// Replaces numbers of a row, which scales by token have made as large or small as they are, by
// their shares of the largest one, as operands in fixed point. Returns that one; NaN if some are
// not finite.
template <class Product>
PAGED_ATTN_INLINE float fix_row(float* row, int begin, int end) {
  constexpr int DEPTH = Product::DEPTH;
  F top = {}, is_finite = {};
  for (int c = begin; c < end; c += W) {
    const F x = load(row + c);
    top = max(top, abs(x));
    is_finite += x - x;
  }
  const float largest = reduce_max(top), bad = reduce_add(is_finite);
  // nothing of a row of zeros; of one that is not finite, whatever it becomes is multiplied by NaN
  const F share = set1(largest > 0x1p-126f && bad == 0 ? 1 / largest : 0.f);
  for (int c = begin; c < end; c += W * DEPTH) {
    F p[DEPTH] = {};
#pragma GCC unroll 2
    for (int i = 0; i < DEPTH; ++i)
      if (c + i * W < end) p[i] = load(row + c + i * W) * share;
    store(row + c / DEPTH, Product::narrow(p));
  }
  return largest + bad;
}

// Replaces the logits of columns [begin, end) of ROWS rows by probabilities relative to a row's new
// maximum, as operands of a product. Earlier sums of a row have to be multiplied by its `rescale`
// to be relative to that maximum. Each step is done for all rows before the next one: a single row
// would wait for its own reductions.
//
// In fixed point, probabilities are relative to the row's maximum in these columns, and the sums of
// their products have to be multiplied by `weight` to be relative to the new maximum.
//
// `v_scales`: if not null, of the columns' values. Operands are multiplied by them, sums are not.
template <class Product, int ROWS>
PAGED_ATTN_INLINE void update_softmax(float* scores, int64_t stride, int begin, int end, float* m,
                                      float* l, float* rescale, float* weight,
                                      const float* v_scales = nullptr) {
  constexpr int DEPTH = Product::DEPTH;
  F top[ROWS], sum[ROWS] = {};
  float shift[ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) top[r] = set1(Product::FIXED ? -INFINITY : m[r]);
  for (int c = begin; c < end; c += W)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) top[r] = max(top[r], load(scores + r * stride + c));
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
    const float highest = reduce_max(top[r]);
    const float m_new = Product::FIXED && highest < m[r] ? m[r] : highest;
    // a row that has seen no key keeps m = -inf; shifting by 0 instead avoids inf - inf
    const float reference = m_new == -INFINITY ? 0.f : m_new;
    shift[r] = !Product::FIXED ? reference : highest == -INFINITY ? 0.f : highest;
    rescale[r] = exp2(m[r] - reference);
    if constexpr (Product::FIXED) weight[r] = exp2(highest - reference);
    m[r] = m_new;
  }
  for (int c = begin; c < end; c += W * DEPTH)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      F p[DEPTH] = {};
#pragma GCC unroll 2
      for (int i = 0; i < DEPTH; ++i) {
        if (i > 0 && c + i * W >= end) continue;
        p[i] = Product::exp2_for_operand(load(scores + r * stride + c + i * W) - set1(shift[r]));
        sum[r] += p[i];
        if (v_scales) p[i] *= load(v_scales + c + i * W);
        if (Product::FIXED && v_scales) store(scores + r * stride + c + i * W, p[i]);
      }
      if (!Product::FIXED || !v_scales) store(scores + r * stride + c / DEPTH, Product::narrow(p));
    }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
    float added = reduce_add(sum[r]);
    if constexpr (Product::FIXED) {
      added *= weight[r];
      weight[r] *= 1 / Product::ONE;
      if (v_scales) weight[r] *= fix_row<Product>(scores + r * stride, begin, end);
    }
    l[r] = l[r] * rescale[r] + added;
  }
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

// Rows of probabilities, multiplied by scales of their columns, as operands.
template <class Product>
PAGED_ATTN_INLINE void scale_rows(const float* scores, float* to, int64_t stride, int rows,
                                  int begin, int end, const float* scales) {
  constexpr int DEPTH = Product::DEPTH;
  for (int r = 0; r < rows; ++r, scores += stride, to += stride)
    for (int c = begin; c < end; c += W * DEPTH) {
      F p[DEPTH] = {};
      for (int i = 0; i < DEPTH && c + i * W < end; ++i)
        p[i] = load(scores + c + i * W) * load(scales + c + i * W);
      store(to + c / DEPTH, Product::narrow(p));
    }
}

// Applies dropout to a row's probabilities, which are in the sum already.
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

// Mask, softmax and dropout of the first `count` of ROWS rows over columns [begin, end) of a block;
// the other rows only fill a register tile. row_at(r) is the r-th row of scores. `finished`: the
// scores need no mask.
template <class Product, int ROWS, class RowAt>
PAGED_ATTN_INLINE void softmax_rows(const Attention& a, const Sequence& s, const KeyBlock& block,
                                    int begin, int end, bool finished, int count, RowAt row_at,
                                    float* scores, int64_t stride, float* m, float* l,
                                    float* rescale, float* weight = nullptr,
                                    const float* v_scales = nullptr) {
  for (int r = 0; r < count && !finished; ++r)
    finish_row(a, row_at(r), block, begin, end, scores + r * stride);
  if (!a.dropout.enabled)
    return update_softmax<Product, ROWS>(scores, stride, begin, end, m, l, rescale, weight,
                                         v_scales);
  update_softmax<FloatProduct, ROWS>(scores, stride, begin, end, m, l, rescale, weight);
  for (int r = 0; r < count; ++r) {
    drop_probabilities(a, s, row_at(r), block, begin, end, scores + r * stride);
    if (v_scales) scale_columns(scores + r * stride, 0, 1, begin, end, v_scales);
    narrow<Product>(scores + r * stride, begin, end);
  }
}

// A head's rows are further apart than the processor's own prefetcher looks: while one is read or
// written, the row this many tokens later is prefetched.
constexpr int TOKENS_AHEAD = 4;

// Divides a row's sums of values by its sum of weights, and writes the result and the lse.
inline void write_row(const Attention& a, const Sequence& s, int64_t token, int64_t head,
                      const float* acc, float m, float l) {
  float lse = l > 0 ? base_e(m) + logf(l) : (l == 0 ? -INFINITY : l);
  if (a.sinks) {
    const float sink = a.sinks(head);
    if (l == 0) {
      lse = sink;
    } else if (sink != -INFINITY) {
      const float extra = base_2(sink), top = extra > m ? extra : m;
      const float sum = l * exp2(m - top) + exp2(extra - top);
      lse = base_e(top) + logf(sum);
      // the sum relative to m, which is what the accumulator is relative to
      l += exp2(extra - m);
    }
  }
  const int64_t kv_head = head * a.num_kv_heads / a.num_heads;
  float factor = a.v_descale ? a.v_descale(s.index, kv_head) : 1.f;
  if (a.dropout.enabled) factor *= a.dropout.keep_scale;
  const bool empty = l == 0;
  factor /= l;
  const int64_t row = s.q_start + token;
  a.lse[head * a.total_q + row] = lse;
  with_type(a.out_dtype, [&](auto tag) __attribute__((always_inline)) {
    typedef typename decltype(tag)::type T;
    T* out = (T*)a.out + row * a.out_stride_token + head * a.out_stride_head;
    for (int64_t d = 0; d < a.head_dim_v; d += W) {
      __builtin_prefetch(out + TOKENS_AHEAD * a.out_stride_token + d, 1);
      // a row without keys is 0 even if nothing ever wrote its accumulator
      F x = empty ? F{} : load(acc + d) * set1(factor);
      if (a.out_scale) x = x / set1(*a.out_scale);
      store(out + d, x, int(min64(W, a.head_dim_v - d)));
    }
  });
}

}  // namespace
