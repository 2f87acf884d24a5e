// Few query rows on AMX with the same bits as prefill_amx.h's tiles: for calls whose queries must
// have the same result alone and among others (`batch_invariant`).
//
// A tile product adds up the even halves of operands, then the odd halves, and then both sums. So a
// step has the same 32 dims of a key here as there, and the same 32 values. Which of two tiles is
// the left operand does not matter. Keys are multiplied where they are in memory, as in
// decode_amx.h.
//
// So are values. Of a step's 32 keys, the first sixteen are even halves and the others odd ones
// (AmxValueProduct). Sixteen values times probabilities paired with zeros, as in
// decode_amx.h, give one of the two sums, and the next sixteen add the other one. Vectors
// add the result to the output, rounding as tiles do. If a zero was multiplied by an infinity, the
// task is computed again with packed values.
#pragma once

#include "decode_amx.h"
#include "prefill_amx.h"

namespace {

constexpr int PAIR_KEYS = 2 * TILE_KEYS;  // of a step over values

// How probabilities meet values: in pairs if these are packed, else alone.
template <class Product>
constexpr bool PACKED = Product::DEPTH > 1;

// As AmxRowsRegisters. For packed values tiles 3 and 4 have probabilities and sums of single rows.
template <int ROWS, class Product>
struct AmxInOrderRegisters : AmxRowsRegisters<ROWS> {
  constexpr AmxInOrderRegisters() {
    for (int i = 3; i < 5 && PACKED<Product>; ++i) this->rows[i] = ROWS;
  }
};

struct AmxInOrderWorkspace {
  int64_t rows, key_tiles, value_tiles, stride_acc;
  float *q, *acc, *m, *l, *scores, *scale, *tiles, *sums;
  int64_t floats;
};

PAGED_ATTN_INLINE AmxInOrderWorkspace amx_in_order_workspace(const Attention& a, int64_t rows,
                                                             int64_t groups, float* memory) {
  AmxInOrderWorkspace w;
  Workspace space(memory);
  w.rows = register_rows(rows);
  w.key_tiles = round_up(a.head_dim, TILE_DIMS) / TILE_DIMS;
  w.value_tiles = round_up(a.head_dim_v, TILE_DIMS) / TILE_DIMS;
  w.stride_acc = w.value_tiles * TILE_DIMS + PADDING;
  w.q = space.take(groups * w.rows * w.key_tiles * W);
  w.acc = space.take(groups * w.rows * w.stride_acc);
  w.m = space.take(groups * w.rows);
  w.l = space.take(groups * w.rows * W);
  w.scores = space.take(groups * 2 * w.rows * SCORES);
  w.scale = space.take(groups);
  // of a group: for each 32 dims the rows' even ones, then their odd ones
  w.sums = space.take(groups * w.value_tiles * 2 * w.rows * W);
  // rows of queries, a tile of keys or values, or a step's packed values
  w.tiles = space.take(max64(w.key_tiles, 2 * w.value_tiles) * TILE_FLOATS);
  w.floats = space.floats();
  return w;
}

// Scores (16 keys, ROWS) of each tile become rows of logits and these of probabilities, in pairs if
// values are packed, else alone and twice. Sums of rows that outgrew theirs are rescaled.
template <int ROWS, class Product>
PAGED_ATTN_INLINE void softmax_in_order(const Attention& a, const Sequence& s,
                                        const paged_attn::Task& task, int group,
                                        const KeyBlock& block, bool finished,
                                        const AmxInOrderWorkspace& w) {
  constexpr int TOGETHER = ROWS < 8 ? ROWS : 8;
  const int columns = block.num_columns;
  const int64_t rows = rows_of(a, task), g = group - task.group_begin;
  float *all = w.scores + 2 * g * ROWS * SCORES, *duplicated_p = all + ROWS * SCORES;
  const float scale = w.scale[g], late_scale = is_plain(a) && scale > 0 ? scale : 1.f;
  const float early_scale = late_scale == scale ? 1.f : scale;
  for (int c = 0; c < columns; c += TILE_KEYS) {
    F x[ROWS];
    for (int r = 0; r < ROWS; ++r) x[r] = load(duplicated_p + c * ROWS + r * W);
    uninterleave<ROWS>(x);
    for (int r = 0; r < ROWS; ++r) store(all + r * SCORES + c, x[r] * set1(early_scale));
  }
  for (int64_t r0 = 0; r0 < rows; r0 += TOGETHER) {
    const int64_t first = g * ROWS + r0;
    float* scores = all + r0 * SCORES;
    float *m = w.m + first, *l = w.l + first * W, *acc = w.acc + first * w.stride_acc;
    const int count = int(min64(TOGETHER, rows - r0));
    const auto row_at = [&](int64_t r) __attribute__((always_inline)) {
      return row_of(a, s, task, group, r0 + r);
    };
    for (int r = 0; r < count && !finished; ++r)
      finish_row(a, row_at(r), block, 0, columns, scores + r * SCORES);
    AmxQueue nothing;
    if (!a.dropout.enabled) {
      update_softmax_lazily<Product, TOGETHER>(scores, 0, columns, late_scale, m, l, acc,
                                               w.stride_acc, nothing);
    } else {
      update_softmax_lazily<FloatProduct, TOGETHER>(scores, 0, columns, late_scale, m, l, acc,
                                                    w.stride_acc, nothing);
      for (int r = 0; r < count; ++r) {
        drop_probabilities(a, s, row_at(r), block, 0, columns, scores + r * SCORES);
        narrow<Product>(scores + r * SCORES, 0, columns);
      }
    }
    for (int r = 0; r < TOGETHER && !PACKED<Product>; ++r)
      for (int c = 0; c < columns; c += W)
        store(duplicated_p + (r0 + r) * SCORES + c,
              as_float(bits(load(scores + r * SCORES + c)) << 16));
  }
}

// sums (even and odd dims of rows) = p (rows twice, 16 keys) @ v, or += that
template <int ROWS, class T>
PAGED_ATTN_INLINE void weigh_half(const TileRows<T>& v, const ReadAhead<T>* ahead, const float* p,
                                  int64_t tiles, bool add, float* sums) {
  constexpr int64_t STRIDE = SCORES * sizeof(float);
  PAGED_ATTN_LOAD_TILE(3, p, STRIDE);
  if (ROWS == 16) PAGED_ATTN_LOAD_TILE(2, p + 16 * SCORES, STRIDE);
  for (int64_t i = 0; i < tiles; ++i, sums += 2 * ROWS * W) {
    ask_for_tile(v, i, ahead);
    PAGED_ATTN_LOAD_TILE(0, v.first + i * 64, v.stride);
    if (add)
      PAGED_ATTN_LOAD_TILE(4, sums, CACHE_LINE);
    else
      _tile_zero(4);
    _tile_dpbf16ps(4, 3, 0);
    _tile_stored(4, sums, CACHE_LINE);
    if (ROWS < 16) continue;
    if (add)
      PAGED_ATTN_LOAD_TILE(5, sums + 16 * W, CACHE_LINE);
    else
      _tile_zero(5);
    _tile_dpbf16ps(5, 2, 0);
    _tile_stored(5, sums + 16 * W, CACHE_LINE);
  }
}

// acc (rows, dims: of each 32 the even ones, then the odd ones) += sums
template <int ROWS>
PAGED_ATTN_INLINE void add_step(int64_t rows, int64_t tiles, const float* sums, float* acc,
                                int64_t stride_acc) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < tiles; ++i)
      for (int odd = 0; odd < 2; ++odd) {
        float* to = acc + r * stride_acc + (2 * i + odd) * W;
        store(to, load(to) + load(sums + ((2 * i + odd) * ROWS + r) * W));
      }
}

// acc (rows, dims) += p (rows, 32 keys) @ v
template <class T>
PAGED_ATTN_INLINE void weigh_packed(const T* v, const int64_t* offset, int columns,
                                    int64_t head_dim, const float* p, float* acc,
                                    int64_t stride_acc, float* packed) {
  constexpr int64_t BYTES = sizeof(float), PANEL = AmxValueProduct::PANEL;
  pack_values<AmxValueProduct, AmxValueProduct::APART>(v, offset, columns, head_dim, PAIR_KEYS,
                                                       packed);
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
template <class T, int ROWS, class Product>
inline void decode_block_invariant(const Attention& a, const Sequence& s,
                                   const paged_attn::Task& task, const KeyBlock& block,
                                   const KeyBlock& next, const AmxInOrderWorkspace& w) {
  const int columns = block.num_columns;
  const int groups = task.group_end - task.group_begin;
  const int64_t rows = rows_of(a, task), floats_of_sums = w.value_tiles * 2 * ROWS * W;
  const auto data_of = [&](const paged_attn::KeyValue& x, int group)
                           __attribute__((always_inline)) {
                             return (const T*)x.data + kv_head_of(a, group) * x.stride_head;
                           };
  ReadAhead<T> cursor(a, kv_head_of(a, task.group_begin), groups, TILE_KEYS,
                      ahead_bytes<T>(a, groups));
  ReadAhead<T>* const ahead = PACKED<Product> ? nullptr : &cursor;
  if (ahead) cursor.seek(block, next);

  for (int c = 0; c < columns; c += TILE_KEYS) {
    const int64_t spaced = spacing(block.k_offset + c);
    for (int group = task.group_begin; group < task.group_end; ++group) {
      const int64_t g = group - task.group_begin;
      const TileRows<T> k =
          tile_rows(data_of(a.k, group), block.k_offset + c, spaced, a.head_dim, ahead, w.tiles);
      // in the place of the second copy of the probabilities
      float* scores = w.scores + (2 * g + 1) * ROWS * SCORES;
      dot_tiles<ROWS>(k, ahead, w.q + g * ROWS * w.key_tiles * W, w.key_tiles, scores + c * ROWS);
    }
  }
  const bool finished =
      is_plain(a) && all_visible(a, s, task.token_begin, task.token_end - 1, block, 0, columns);
  for (int c = 0; c < columns; c += TILE_KEYS) {
    const int64_t spaced = spacing(block.v_offset + c);
    const bool is_second = c % PAIR_KEYS != 0;
    for (int group = task.group_begin; group < task.group_end; ++group) {
      // not of all groups at once: no memory would be read meanwhile
      if (c == 0) softmax_in_order<ROWS, Product>(a, s, task, group, block, finished, w);
      const int64_t g = group - task.group_begin;
      const float* p = w.scores + 2 * g * ROWS * SCORES;
      float *acc = w.acc + g * ROWS * w.stride_acc, *sums = w.sums + g * floats_of_sums;
      const T* values = data_of(a.v, group);
      if (PACKED<Product>) {
        if (!is_second)
          weigh_packed(values, block.v_offset + c, int(min64(PAIR_KEYS, columns - c)), a.head_dim_v,
                       p + c / 2, acc, w.stride_acc, w.tiles);
        continue;
      }
      const TileRows<T> v =
          tile_rows(values, block.v_offset + c, spaced, a.head_dim_v, ahead, w.tiles);
      weigh_half<ROWS>(v, ahead, p + c, w.value_tiles, is_second, sums);
      if (is_second || c + TILE_KEYS == columns)
        add_step<ROWS>(rows, w.value_tiles, sums, acc, w.stride_acc);
    }
  }
}

// Returns false, and has written nothing, if a sum is not finite and values were not packed.
template <int ROWS, class Product>
inline bool decode_amx_invariant(const Attention& a, const Sequence& s,
                                 const paged_attn::Task& task, float* memory) {
  static constexpr AmxInOrderRegisters<ROWS, Product> registers;
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
  for_each_block(
      a, s, task, MAX_COLUMNS,
      [&](const KeyBlock& block, const KeyBlock& next, bool more) __attribute__((always_inline)) {
        with_type(a.kv_dtype, [&](auto tag) __attribute__((always_inline)) {
          typedef typename decltype(tag)::type T;
          if constexpr (AmxProduct::accepts<T>)
            decode_block_invariant<T, ROWS, Product>(a, s, task, block, more ? next : block, w);
        });
      });
  _tile_release();

  const int64_t floats = w.stride_acc - PADDING;
  I finite = I{} - 1;
  for (int64_t i = 0; i < groups * ROWS && !PACKED<Product>; ++i)
    for (int64_t d = 0; i % ROWS < rows && d < floats; d += W) {
      const F x = load(w.acc + i * w.stride_acc + d);
      finite &= (I)(x - x == F{});
    }
  if (_mm512_movepi32_mask((__m512i)finite) != 0xffff) return false;
  for (int64_t i = 0; i < groups; ++i)
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = i * ROWS + r;
      const float* acc = w.acc + row * w.stride_acc;
      for (int64_t d = 0; d < floats && !PACKED<Product>; d += 2 * W) {
        F x[2] = {load(acc + d), load(acc + d + W)};
        interleave<2>(x);
        for (int j = 0; j < 2; ++j) store(w.tiles + d + j * W, x[j]);
      }
      finish(a, s, task, task.group_begin + i, r, PACKED<Product> ? acc : w.tiles, w.m[row],
             reduce_add(load(w.l + row * W)));
    }
  return true;
}

template <int ROWS>
inline void decode_amx_invariant(const Attention& a, const Sequence& s,
                                 const paged_attn::Task& task, float* memory) {
  if (!decode_amx_invariant<ROWS, AmxHalves>(a, s, task, memory))
    decode_amx_invariant<ROWS, AmxValueProduct>(a, s, task, memory);
}

}  // namespace
