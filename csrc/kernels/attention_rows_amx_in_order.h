// Few query rows on AMX that add up as attention_amx.h's tiles do, bit by bit: for calls whose
// queries have the same result alone and among others.
//
// A product of tiles adds up its even operands, its odd ones, and then both: so a step has the same
// 32 dims of a key here as there, and the same 32 values. Which of two tiles stands on the left does
// not matter. Keys are multiplied where they lie, as in attention_rows_amx.h; values are packed.
#pragma once

#include "attention_amx.h"
#include "attention_rows_amx.h"

namespace {

constexpr int PAIR_KEYS = 2 * TILE_KEYS;  // of a step over values

// Tile 0: keys or values. 1 and 2: queries and scores, (16, ROWS). 3 and 4: probabilities and sums.
template <int ROWS>
struct AmxInOrderRegisters : AmxRegisters {
  constexpr AmxInOrderRegisters() {
    for (int i = 1; i < 3; ++i) row_bytes[i] = ROWS * 4;
    for (int i = 3; i < 5; ++i) rows[i] = ROWS;
  }
};

struct AmxInOrderWorkspace {
  int64_t rows, key_tiles, stride_acc;
  float *q, *acc, *m, *l, *scores, *scale, *tiles, *turned;
  int64_t floats;
};

PAGED_ATTN_INLINE AmxInOrderWorkspace amx_in_order_workspace(const Attention& a, int64_t rows,
                                                             int64_t groups, float* memory) {
  AmxInOrderWorkspace w;
  Workspace space(memory);
  w.rows = register_rows(rows);
  w.key_tiles = key_depth<AmxProduct>(a) / W;
  w.stride_acc = round_up(a.head_dim_v, W) + PADDING;
  w.q = space.take(groups * w.rows * w.key_tiles * W);
  w.acc = space.take(groups * w.rows * w.stride_acc);
  w.m = space.take(groups * w.rows);
  w.l = space.take(groups * w.rows * W);
  w.scores = space.take(groups * w.rows * SCORES);
  w.scale = space.take(groups);
  w.turned = space.take(TILE_FLOATS);
  // rows of queries, a tile of keys, or a step's values
  w.tiles = space.take(max64(w.key_tiles * TILE_FLOATS, round_up(a.head_dim_v, 2 * W) * W));
  w.floats = space.floats();
  return w;
}

// Logits of a group's rows become probabilities; sums of rows that outgrew theirs are rescaled.
template <int ROWS>
PAGED_ATTN_INLINE void softmax_in_order(const Attention& a, const Sequence& s,
                                        const paged_attn::Task& task, int group,
                                        const KeyBlock& block, bool finished,
                                        const AmxInOrderWorkspace& w) {
  constexpr int TOGETHER = ROWS < 8 ? ROWS : 8;
  const int columns = block.num_columns;
  const int64_t rows = rows_of(a, task), g = group - task.group_begin;
  const float scale = w.scale[g], late_scale = is_plain(a) && scale > 0 ? scale : 1.f;
  for (int64_t r0 = 0; r0 < rows; r0 += TOGETHER) {
    const int64_t first = g * ROWS + r0;
    float* scores = w.scores + first * SCORES;
    float *m = w.m + first, *l = w.l + first * W, *acc = w.acc + first * w.stride_acc;
    const int count = int(min64(TOGETHER, rows - r0));
    const auto row_at = [&](int64_t r) __attribute__((always_inline)) {
      return row_of(a, s, task, group, r0 + r);
    };
    for (int r = 0; r < count && late_scale != scale; ++r)
      for (int c = 0; c < columns; c += W)
        store(scores + r * SCORES + c, load(scores + r * SCORES + c) * set1(scale));
    for (int r = 0; r < count && !finished; ++r)
      finish_row(a, row_at(r), block, 0, columns, scores + r * SCORES);
    AmxQueue nothing;
    if (!a.dropout.enabled) {
      update_softmax_lazily<AmxProduct, TOGETHER>(scores, 0, columns, late_scale, m, l, acc,
                                                  w.stride_acc, nothing);
      continue;
    }
    update_softmax_lazily<FloatProduct, TOGETHER>(scores, 0, columns, late_scale, m, l, acc,
                                                  w.stride_acc, nothing);
    for (int r = 0; r < count; ++r) {
      drop_probabilities(a, s, row_at(r), block, 0, columns, scores + r * SCORES);
      narrow<AmxProduct>(scores + r * SCORES, 0, columns);
    }
  }
}

// acc (rows, dims) += p (rows, 32 keys) @ v
template <class T>
PAGED_ATTN_INLINE void weigh_in_order(const T* v, const int64_t* offset, int columns,
                                      int64_t head_dim, ReadAhead<T>* ahead, const float* p,
                                      float* acc, int64_t stride_acc, float* packed) {
  constexpr int64_t BYTES = sizeof(float), PANEL = AmxProduct::PANEL;
  if (ahead) {
    const int64_t elements = columns * head_dim;
    const T* later = (const T*)ahead->claim(elements * int64_t(sizeof(T)));
    for (int64_t i = 0; i < elements; i += CACHE_LINE) ahead->ask(later, i, CACHE_LINE);
  }
  pack_values<AmxProduct>(v, offset, columns, head_dim, PAIR_KEYS, packed);
  if (columns < PAIR_KEYS)
    for (int64_t d = 0; d < head_dim; d += PANEL)
      memset(packed + (d / PANEL * PAIR_KEYS + columns) / 2 * PANEL, 0,
             (PAIR_KEYS - columns) / 2 * PANEL * BYTES);
  PAGED_ATTN_LOAD_TILE(3, p, SCORES * BYTES);
  for (int64_t d = 0; d < head_dim; d += W) {
    const float* values = packed + d / PANEL * PAIR_KEYS / 2 * PANEL + d % PANEL;
    PAGED_ATTN_LOAD_TILE(0, values, PANEL * BYTES);
    PAGED_ATTN_LOAD_TILE(4, acc + d, stride_acc * BYTES);
    _tile_dpbf16ps(4, 3, 0);
    _tile_stored(4, acc + d, stride_acc * BYTES);
  }
}

// One block of keys for every group of the task.
template <class T, int ROWS>
inline void attend_block_in_order(const Attention& a, const Sequence& s,
                                  const paged_attn::Task& task, const KeyBlock& block,
                                  const KeyBlock& next, const AmxInOrderWorkspace& w) {
  const int columns = block.num_columns;
  const int groups = task.group_end - task.group_begin;
  const auto data_of = [&](const paged_attn::KeyValue& x, int group)
      __attribute__((always_inline)) {
    return (const T*)x.data + kv_head_of(a, group) * x.stride_head;
  };
  // what is left of a sequence is not asked for
  const auto is_whole = [](const KeyBlock& x) { return x.num_columns % PAIR_KEYS == 0; };
  ReadAhead<T> cursor(a, kv_head_of(a, task.group_begin), groups, PAIR_KEYS,
                      ahead_bytes<T>(a, groups));
  ReadAhead<T>* ahead = is_whole(block) ? &cursor : nullptr;
  if (ahead) cursor.enter(block, is_whole(next) ? next : block);

  for (int c = 0; c < columns; c += PAIR_KEYS)
    for (int group = task.group_begin; group < task.group_end; ++group) {
      const int64_t g = group - task.group_begin;
      for (int i = c; i < min64(columns, c + PAIR_KEYS); i += TILE_KEYS) {
        const TileRows<T> k = tile_rows(data_of(a.k, group), block.k_offset + i,
                                        spacing(block.k_offset + i), a.head_dim, ahead, w.tiles);
        dot_tiles<ROWS>(k, ahead, w.q + g * ROWS * w.key_tiles * W, w.key_tiles, w.turned);
        F x[ROWS];
        for (int r = 0; r < ROWS; ++r) x[r] = load(w.turned + r * W);
        uninterleave<ROWS>(x);
        for (int r = 0; r < ROWS; ++r) store(w.scores + (g * ROWS + r) * SCORES + i, x[r]);
      }
    }
  const bool finished =
      is_plain(a) && all_visible(a, s, task.token_begin, task.token_end - 1, block, 0, columns);
  for (int c = 0; c < columns; c += PAIR_KEYS)
    for (int group = task.group_begin; group < task.group_end; ++group) {
      // not all at once: memory would be idle for as long
      if (c == 0) softmax_in_order<ROWS>(a, s, task, group, block, finished, w);
      const int64_t g = group - task.group_begin;
      weigh_in_order<T>(data_of(a.v, group), block.v_offset + c,
                        int(min64(PAIR_KEYS, columns - c)), a.head_dim_v, ahead,
                        w.scores + g * ROWS * SCORES + c / 2, w.acc + g * ROWS * w.stride_acc,
                        w.stride_acc, w.tiles);
    }
}

template <int ROWS>
inline void attend_rows_in_order(const Attention& a, const Sequence& s,
                                 const paged_attn::Task& task, float* memory) {
  static constexpr AmxInOrderRegisters<ROWS> registers;
  _tile_loadconfig(&registers);
  const int64_t rows = rows_of(a, task);
  const int groups = task.group_end - task.group_begin;
  const AmxInOrderWorkspace w = amx_in_order_workspace(a, rows, groups, memory);
  memset(w.acc, 0, groups * ROWS * w.stride_acc * sizeof(float));
  memset(w.l, 0, groups * ROWS * W * sizeof(float));
  for (int64_t i = 0; i < groups * ROWS; ++i) w.m[i] = -INFINITY;
  for (int g = 0; g < groups; ++g) {
    w.scale[g] = logit_scale(a, s, kv_head_of(a, task.group_begin + g));
    turn_queries<ROWS>(a, s, task, task.group_begin + g, w.key_tiles * W, w.tiles,
                       w.q + g * ROWS * w.key_tiles * W);
  }
  for_each_block(a, s, task, MAX_COLUMNS, [&](const KeyBlock& block, const KeyBlock& next, bool more)
                                     __attribute__((always_inline)) {
    with_type(a.kv_dtype, [&](auto tag) __attribute__((always_inline)) {
      typedef typename decltype(tag)::type T;
      if constexpr (AmxProduct::accepts<T>)
        attend_block_in_order<T, ROWS>(a, s, task, block, more ? next : block, w);
    });
  });
  _tile_release();
  for (int64_t i = 0; i < groups; ++i)
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = i * ROWS + r;
      finish(a, s, task, task.group_begin + i, r, w.acc + row * w.stride_acc, w.m[row],
             reduce_add(load(w.l + row * W)));
    }
}

}  // namespace
