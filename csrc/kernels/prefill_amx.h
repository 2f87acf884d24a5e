// Many query rows on AMX: prefill.h's tasks, packing and order, with another inner loop.
//
// Multiplying 32 rows by 128 keys takes the tile unit about as long as their softmax takes the
// vector units, and the two share no ports. So the steps of one row tile's softmax alternate with
// steps of its neighbours' products: of the tile before it with the values, of the tile after it
// with the keys. Sums stay relative to an old maximum until a row's maximum exceeds it by HEADROOM
// (the lazy rescaling of FlashAttention-4), so that they are added up in place.
#pragma once

#include "../core/product_amx.h"
#include "prefill.h"

namespace {

// By how much, in powers of two, a row's maximum may exceed what its sums are relative to.
constexpr float HEADROOM = 8.f;

// Floats between one row and the next. Rows a power of two apart would share a few sets of the
// first-level cache, and a tile is one line of each of sixteen rows.
constexpr int64_t PADDING = W;
constexpr int SCORES = MAX_COLUMNS + int(PADDING);

struct AmxWorkspace : SoftmaxWorkspace {
  using SoftmaxWorkspace::SoftmaxWorkspace;

  float *keys, *values;
  float* unpacked;  // rows of int4 as int8
};

PAGED_ATTN_INLINE AmxWorkspace amx_workspace(const Attention& a, int64_t rows, float* memory) {
  AmxWorkspace w(memory);
  w.rows = round_up(rows, AmxProduct::ROWS);
  w.stride_q = key_depth<AmxProduct>(a) + PADDING;
  w.stride_acc = round_up(a.head_dim_v, W) + PADDING;
  w.take_rows(1, w.rows * w.stride_acc, W, 2 * AmxProduct::ROWS * SCORES);
  w.keys = w.take(key_depth<AmxProduct>(a) * MAX_COLUMNS);
  w.values = w.take(round_up(a.head_dim_v, 2 * W) * (MAX_COLUMNS / AmxProduct::DEPTH));
  w.unpacked = w.take(floats_of_unpacked(a));
  return w;
}

// Two products, one after the other, that run beside vector instructions.
struct AmxQueue {
  AmxWork work[2];
  int next = 2, per_call = 0;

  // Spreads all steps evenly over `calls` calls of `issue`.
  PAGED_ATTN_INLINE void spread(int calls) {
    int left = 0;
    for (int i = next; i < 2; ++i) left += work[i].left();
    per_call = (left + calls - 1) / calls;
  }
  PAGED_ATTN_INLINE void issue() {
    for (int i = 0; i < per_call && next < 2; ++i) {
      AmxWork& current = work[next];
      if (i + 1 < per_call && current.has_two()) {
        current.take_two();
        ++i;
      } else {
        current.take();
      }
      next += current.panels <= 0;
    }
  }
  PAGED_ATTN_INLINE void finish() {
    for (; next < 2; next += work[next].panels <= 0) work[next].take();
  }
};

// Makes rows' sums relative to their new maxima, where these exceed the old ones by HEADROOM.
template <int ROWS>
PAGED_ATTN_APART void raise_references(const F* top, float scale, float* m, float* l, float* acc,
                                       int64_t stride_acc) {
  for (int r = 0; r < ROWS; ++r) {
    const float m_new = reduce_max(top[r]) * scale;
    if (m_new <= m[r] + HEADROOM) continue;
    // sums of a row that has seen no key are 0, or nothing wrote them yet
    if (m[r] != -INFINITY) {
      const F rescale = set1(exp2(m[r] - m_new));
      store(l + r * W, load(l + r * W) * rescale);
      for (int64_t d = 0; d < stride_acc - PADDING; d += W) {
        float* to = acc + r * stride_acc + d;
        store(to, load(to) * rescale);
      }
    }
    m[r] = m_new;
  }
}

// As update_softmax, for logits that are the scores times a positive scale.
template <class Product, int ROWS>
PAGED_ATTN_INLINE void update_softmax_lazily(float* scores, int begin, int end, float scale,
                                             float* m, float* l, float* acc, int64_t stride_acc,
                                             AmxQueue& beside, const float* v_scales = nullptr) {
  constexpr int DEPTH = Product::DEPTH;
  F top[ROWS], sum[ROWS];
  float shift[ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) top[r] = set1(-INFINITY);
  for (int c = begin; c < end; c += W)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) top[r] = max(top[r], load(scores + r * SCORES + c));
  __mmask16 grown = 0;
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
    grown |= _mm512_cmp_ps_mask((__m512)(top[r] * set1(scale)), (__m512)set1(m[r] + HEADROOM),
                                _CMP_NLE_UQ);
  if (grown) raise_references<ROWS>(top, scale, m, l, acc, stride_acc);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
    // a row that has seen no key keeps m = -inf; shifting by 0 instead avoids inf - inf
    shift[r] = m[r] == -INFINITY ? 0.f : m[r];
    sum[r] = load(l + r * W);
  }
  for (int c = begin; c < end; c += W * DEPTH) {
    beside.issue();
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      F p[DEPTH] = {};
#pragma GCC unroll 2
      for (int i = 0; i < DEPTH; ++i) {
        if (i > 0 && c + i * W >= end) continue;
        const F x = load(scores + r * SCORES + c + i * W);
        p[i] = Product::exp2_for_operand(fma(x, set1(scale), set1(-shift[r])));
        sum[r] += p[i];
        if (v_scales) p[i] *= load(v_scales + c + i * W);
      }
      store(scores + r * SCORES + c / DEPTH, Product::narrow(p));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) store(l + r * W, sum[r]);
}

// A row tile and the columns of a block that it sees; without rows there is none.
struct AmxTile {
  int64_t first, rows;
  VisibleColumns columns;
  float* scores;
};

// Attention of all rows of a task to one packed block, while the next one is fetched.
inline void prefill_block_amx(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                              const KeyBlock& block, const KeyBlock& next, const AmxWorkspace& w) {
  constexpr int ROWS = AmxProduct::ROWS, TOGETHER = 8, STEP = W * AmxProduct::DEPTH;
  const int64_t kv_head = kv_head_of(a, task.group_begin);
  const int64_t rows = rows_of(a, task);
  const int64_t depth = key_depth<AmxProduct>(a);
  const float scale = logit_scale(a, s, kv_head);
  ColumnScales by_token;
  load_column_scales(a, kv_head, block, by_token);
  // scores that only masks change are scaled when their exponentials are computed
  const float late_scale = is_plain(a) && scale > 0 && !by_token.of_keys ? scale : 1.f;

  int64_t row = 0;
  int turn = 0;
  const auto next_tile = [&]() __attribute__((always_inline)) {
    for (; row < rows; row += ROWS) {
      fetch_columns(a, kv_head, next, row * MAX_COLUMNS / w.rows,
                    (row + ROWS) * MAX_COLUMNS / w.rows);
      const int64_t count = min64(ROWS, rows - row);
      const KeyRange range =
          visible_keys(a, s, token_of(a, task, row), token_of(a, task, row + count - 1));
      VisibleColumns columns = visible_columns(block, range);
      columns.depth += columns.begin % STEP;
      columns.begin -= columns.begin % STEP;
      if (columns.begin >= columns.end) continue;
      const AmxTile tile = {row, count, columns, w.scores + turn * ROWS * SCORES};
      turn ^= 1;
      row += ROWS;
      return tile;
    }
    return AmxTile{rows, 0, {}, nullptr};
  };
  const auto by_keys = [&](const AmxTile& tile) __attribute__((always_inline)) {
    const int begin = tile.columns.begin;
    return AmxWork{w.q + tile.first * w.stride_q,
                   w.stride_q,
                   w.keys + begin * depth,
                   2 * W * depth,
                   tile.scores + begin,
                   SCORES,
                   int(depth / W),
                   (tile.columns.end - begin) / W,
                   int(tile.rows + W - 1) / W,
                   false,
                   0,
                   0};
  };
  const auto by_values = [&](const AmxTile& tile, bool add) __attribute__((always_inline)) {
    const int begin = tile.columns.begin;
    return AmxWork{tile.scores + begin / 2,
                   SCORES,
                   w.values + begin / 2 * 2 * W,
                   MAX_COLUMNS / 2 * 2 * W,
                   w.acc + tile.first * w.stride_acc,
                   w.stride_acc,
                   (tile.columns.depth + STEP - 1) / STEP,
                   int(round_up(a.head_dim_v, W) / W),
                   int(tile.rows + W - 1) / W,
                   add,
                   0,
                   0};
  };

  AmxQueue queue;
  AmxTile before = {}, tile = next_tile();
  if (tile.rows == 0) return;
  bool add_before = false;
  queue.work[1] = by_keys(tile);
  queue.next = 1;
  queue.finish();
  while (tile.rows > 0) {
    const AmxTile after = next_tile();
    queue.next = 2;
    if (after.rows > 0) queue.work[--queue.next] = by_keys(after);
    if (before.rows > 0) queue.work[--queue.next] = by_values(before, add_before);

    const int begin = tile.columns.begin, end = tile.columns.end;
    const int64_t last_token = token_of(a, task, tile.first + tile.rows - 1);
    const bool finished = is_plain(a) && all_visible(a, s, token_of(a, task, tile.first),
                                                     last_token, block, begin, end);
    const int chunks = int(tile.rows + TOGETHER - 1) / TOGETHER;
    queue.spread(chunks * ((end - begin + STEP - 1) / STEP));
    // a tile none of whose rows has seen a key has no sums yet
    I seen = {};
    for (int i = 0; i < ROWS; i += W) seen |= (I)(load(w.m + tile.first + i) != set1(-INFINITY));
    const bool add = _mm512_test_epi32_mask((__m512i)seen, (__m512i)seen);
    for (int i = 0; i < tile.rows; i += TOGETHER) {
      const int64_t first = tile.first + i;
      float* scores = tile.scores + i * SCORES;
      float *m = w.m + first, *l = w.l + first * W, *acc = w.acc + first * w.stride_acc;
      const auto row_at = [&](int r) __attribute__((always_inline)) {
        return row_of(a, s, task, task.group_begin, first + r);
      };
      const int count = int(min64(TOGETHER, tile.rows - i));
      for (int r = 0; r < count && late_scale != scale; ++r)
        for (int c = begin; c < end; c += W)
          store(scores + r * SCORES + c, load(scores + r * SCORES + c) * set1(scale));
      if (by_token.of_keys) scale_columns(scores, SCORES, count, begin, end, by_token.of_keys);
      for (int r = 0; r < count && !finished; ++r)
        finish_row(a, row_at(r), block, begin, end, scores + r * SCORES);
      if (!a.dropout.enabled) {
        update_softmax_lazily<AmxValueProduct, TOGETHER>(scores, begin, end, late_scale, m, l, acc,
                                                         w.stride_acc, queue, by_token.of_values);
        continue;
      }
      update_softmax_lazily<FloatProduct, TOGETHER>(scores, begin, end, late_scale, m, l, acc,
                                                    w.stride_acc, queue);
      for (int r = 0; r < count; ++r) {
        drop_probabilities(a, s, row_at(r), block, begin, end, scores + r * SCORES);
        if (by_token.of_values)
          scale_columns(scores + r * SCORES, 0, 1, begin, end, by_token.of_values);
        narrow<AmxValueProduct>(scores + r * SCORES, begin, end);
      }
    }
    queue.finish();
    before = tile;
    add_before = add;
    tile = after;
  }
  queue.work[1] = by_values(before, add_before);
  queue.next = 1;
  queue.finish();
}

inline void prefill_amx(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                        float* memory) {
  const int64_t rows = rows_of(a, task);
  const int64_t kv_head = kv_head_of(a, task.group_begin);
  const AmxWorkspace w = amx_workspace(a, rows, memory);
  load_queries<AmxProduct>(a, s, task, task.group_begin, w.q, w.stride_q);
  // rows that only fill the last register tile are zeros
  memset(w.q + rows * w.stride_q, 0, (w.rows - rows) * w.stride_q * sizeof(float));
  memset(w.l, 0, w.rows * W * sizeof(float));
  for (int64_t r = 0; r < w.rows; ++r) w.m[r] = -INFINITY;

  for_each_block(a, s, task, MAX_COLUMNS,
                 [&](const KeyBlock& block, const KeyBlock& next, bool)
                     __attribute__((always_inline)) {
                       pack_block<AmxProduct, AmxValueProduct::APART>(a, kv_head, block, w.keys,
                                                                      w.values, w.unpacked);
                       prefill_block_amx(a, s, task, block, next, w);
                     });
  for (int64_t r = 0; r < rows; ++r)
    finish(a, s, task, task.group_begin, r, w.acc + r * w.stride_acc, w.m[r],
           reduce_add(load(w.l + r * W)));
}

}  // namespace
