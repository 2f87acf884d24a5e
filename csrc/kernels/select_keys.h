// Scores of all units of keys of a sequence, for some query tokens. A block of keys is packed once
// for all tokens and heads.
#pragma once

#include "../core/matrix.h"
#include "../core/packing.h"
#include "../core/query_rows.h"
#include "../core/select_keys.h"
#include "../core/workspace.h"

namespace {

using paged_attn::Pool;
using paged_attn::SelectKeys;
using paged_attn::SelectTask;

struct SelectWorkspace : Workspace {
  using Workspace::Workspace;

  int64_t rows, stride_q;
  float *q, *weights, *keys, *scores;
  float* sums;  // (token, column): a key's score
};

template <class Product>
PAGED_ATTN_INLINE SelectWorkspace select_workspace(const Attention& a, int64_t tokens,
                                                   float* memory) {
  SelectWorkspace w(memory);
  w.rows = round_up(tokens * a.group_size, Product::ROWS);
  w.stride_q = round_up(key_depth<Product>(a), W);
  w.q = w.take(w.rows * w.stride_q);
  w.weights = w.take(w.rows);
  w.keys = w.take(key_depth<Product>(a) * MAX_COLUMNS);
  w.scores = w.take(Product::ROWS * MAX_COLUMNS);
  w.sums = w.take(tokens * MAX_COLUMNS);
  return w;
}

inline void load_weights(const SelectKeys& x, const Sequence& s, const paged_attn::Task& task,
                         float* to) {
  const Attention& a = x.forward;
  const int64_t rows = rows_of(a, task);
  for (int64_t r = 0; r < rows; ++r) to[r] = 1.f;
  if (x.weights == nullptr) return;
  with_type(x.weights_dtype, [&](auto tag) __attribute__((always_inline)) {
    typedef typename decltype(tag)::type T;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t token = s.q_start + token_of(a, task, r);
      const int64_t head = head_of(a, task.group_begin, r);
      const T* weight =
          (const T*)x.weights + token * x.weights_stride_token + head * x.weights_stride_head;
      to[r] = load(weight, 1)[0];
    }
  });
}

// The scores of a block's keys for all tokens of a task.
template <class Product>
inline void score_block(const SelectKeys& x, const paged_attn::Task& task, const KeyBlock& block,
                        float scale, const SelectWorkspace& w) {
  constexpr int ROWS = Product::ROWS, PANEL = Product::PANEL;
  const Attention& a = x.forward;
  const int64_t depth = key_depth<Product>(a), rows = rows_of(a, task);
  const int end = block.num_columns;
  float all[ROWS];
  for (float& y : all) y = 1.f;
  memset(w.sums, 0, (task.token_end - task.token_begin) * MAX_COLUMNS * sizeof(float));
  for (int64_t r0 = 0; r0 < rows; r0 += ROWS) {
    for (int c = 0, n; c < end; c += n) {
      n = int(min64(PANEL, end - c));
      const float* keep = nullptr;
      for (int64_t d = 0; d < depth; d += MAX_CHAIN, keep = all)
        multiply<Product>(n / W, w.q + r0 * w.stride_q + d, w.stride_q,
                          w.keys + c * depth + d * PANEL, w.scores + c, MAX_COLUMNS,
                          min64(MAX_CHAIN, depth - d), scale, keep);
    }
    for (int64_t r = r0; r < min64(r0 + ROWS, rows); ++r) {
      const float* scores = w.scores + (r - r0) * MAX_COLUMNS;
      float* sums = w.sums + r / a.group_size * MAX_COLUMNS;
      const F weight = set1(w.weights[r]);
      for (int c = 0; c < end; c += W) {
        const F score = load(scores + c);
        store(sums + c, fma(weight, x.has_relu ? max(F{}, score) : score, load(sums + c)));
      }
    }
  }
}

// Adds the scores of keys [first, last) to those of their units.
PAGED_ATTN_INLINE void pool_keys(const SelectKeys& x, const float* scores, int64_t first,
                                 int64_t last, float* units) {
  if (x.unit_size == 1) {
    memcpy(units + first, scores, (last - first) * sizeof(float));
    return;
  }
  for (int64_t key = first; key < last;) {
    const int64_t unit = key / x.unit_size, end = min64((unit + 1) * x.unit_size, last);
    float found = units[unit];
    // the first key of a unit finds -inf there
    if (x.pool != Pool::max && found == -INFINITY) found = 0;
    for (; key < end; ++key, ++scores)
      found = x.pool != Pool::max ? found + *scores : *scores > found ? *scores : found;
    units[unit] = found;
  }
}

// Fills (token, unit) with the scores of units, or with their sums where the mean is asked for;
// -inf for a unit of which a token sees no key.
template <class Product>
inline void score_units_of(const SelectKeys& x, const SelectTask& select, int64_t count,
                           float* units, float* memory) {
  const Attention& a = x.forward;
  const Sequence s = sequence_at(a, select.sequence);
  const int64_t tokens = select.token_end - select.token_begin;
  const SelectWorkspace w = select_workspace<Product>(a, tokens, memory);
  for (int64_t i = 0; i < tokens * count; ++i) units[i] = -INFINITY;
  paged_attn::Task task = {};
  task.sequence = int32_t(select.sequence);
  task.token_begin = int32_t(select.token_begin);
  task.token_end = int32_t(select.token_end);
  task.group_begin = int32_t(select.group);
  task.group_end = int32_t(select.group + 1);
  task.part_end = s.k_len;
  memset(w.q, 0, w.rows * w.stride_q * sizeof(float));
  load_queries<Product>(a, s, task, select.group, w.q, w.stride_q);
  load_weights(x, s, task, w.weights);
  float scale = 1.f;
  if (a.q_descale) scale *= a.q_descale(s.index, select.group);
  if (a.k_descale) scale *= a.k_descale(s.index, select.group);
  for_each_block(a, s, task, MAX_COLUMNS,
                 [&](const KeyBlock& block, const KeyBlock&, bool) __attribute__((always_inline)) {
                   with_type(a.kv_dtype, [&](auto tag) __attribute__((always_inline)) {
                     typedef typename decltype(tag)::type T;
                     if constexpr (Product::template accepts<T>)
                       pack_keys<Product>((const T*)a.k.data + select.group * a.k.stride_head,
                                          block.k_offset, block.num_columns, a.head_dim,
                                          key_depth<Product>(a), w.keys);
                   });
                   score_block<Product>(x, task, block, scale, w);
                   const int64_t key = block.segments[0].key;
                   for (int64_t t = 0; t < tokens; ++t) {
                     const KeyRange visible = visible_keys(a, s, select.token_begin + t);
                     const int64_t last = min64(visible.end, key + block.num_columns);
                     if (key < last)
                       pool_keys(x, w.sums + t * MAX_COLUMNS, key, last, units + t * count);
                   }
                 });
}

}  // namespace
