// Few query rows on AMX: decode.h's tasks and order, with tiles of keys and values that are
// multiplied where they are in memory.
//
// Sixteen keys of a head are the rows of a left operand, so scores are (keys, rows). Sixteen values
// of a head are the rows of a right operand. Its pairs should be of two keys, but are of two dims.
// So each row of probabilities is there twice, paired with zeros: once to be multiplied with the
// even dims, once with the odd ones. Keys and values that are not bfloat16, not evenly spaced or no
// whole tiles are first copied to L1 in that form.
//
// A zero times an infinity of the neighbouring dim is a NaN that does not belong to the result. So
// a task whose sums are not finite is computed again by vectors.
#pragma once

#include "../core/product_amx.h"
#include "decode.h"

namespace {

constexpr int TILE_KEYS = 16, TILE_DIMS = 32;
constexpr int TILE_FLOATS = TILE_KEYS * W;
static_assert(TILE_KEYS == ALIGN, "segments are whole tiles");

// Rows of a group, rounded up to those that registers are configured for.
PAGED_ATTN_INLINE int64_t register_rows(int64_t rows) { return rows <= 4 ? 4 : rows <= 8 ? 8 : 16; }

struct AmxRowsWorkspace {
  int64_t rows, key_tiles, value_tiles, stride_acc;
  float *q, *acc, *m, *l, *scores, *scale, *tiles;
  int64_t floats;
};

PAGED_ATTN_INLINE AmxRowsWorkspace amx_rows_workspace(const Attention& a, int64_t rows,
                                                      int64_t groups, float* memory) {
  AmxRowsWorkspace w;
  Workspace space(memory);
  w.rows = register_rows(rows);
  w.key_tiles = round_up(a.head_dim, TILE_DIMS) / TILE_DIMS;
  w.value_tiles = round_up(a.head_dim_v, TILE_DIMS) / TILE_DIMS;
  w.stride_acc = w.value_tiles * W;
  w.q = space.take(groups * w.rows * w.key_tiles * W);
  w.acc = space.take(groups * 2 * w.rows * w.stride_acc);
  w.m = space.take(groups * w.rows);
  w.l = space.take(groups * w.rows);
  w.scores = space.take(groups * 2 * w.rows * ROW_COLUMNS);
  w.scale = space.take(groups);
  w.tiles = space.take(max64(w.key_tiles, w.value_tiles) * TILE_FLOATS);
  w.floats = space.floats();
  return w;
}

// Sixteen rows of a head as whole tiles of operands.
template <class T>
struct TileRows {
  const char* first;
  int64_t stride;  // in bytes
  const T* later;  // what to prefetch while they are multiplied, or null
};

// How far apart a tile's rows are, or 0 if they are not evenly spaced.
PAGED_ATTN_INLINE int64_t spacing(const int64_t* offset) {
  const int64_t stride = offset[1] - offset[0];
  bool even = true;
  for (int i = 1; i < TILE_KEYS; ++i) even &= offset[i] - offset[i - 1] == stride;
  return even ? stride : 0;
}

template <class T>
PAGED_ATTN_INLINE TileRows<T> tile_rows(const T* x, const int64_t* offset, int64_t spaced,
                                        int64_t head_dim, ReadAhead<T>* ahead, float* buffer) {
  const int64_t bytes = TILE_KEYS * head_dim * int64_t(sizeof(T));
  const T* later = ahead ? (const T*)ahead->advance(bytes) : nullptr;
  if (sizeof(T) == 2 && spaced && head_dim % TILE_DIMS == 0)
    return {(const char*)(x + offset[0]), spaced * int64_t(sizeof(T)), later};
  constexpr int LINE = CACHE_LINE / int(sizeof(T));
  const int64_t stride = round_up(head_dim, TILE_DIMS) / 2;
  for (int i = 0; i < TILE_KEYS; ++i) {
    const T* row = x + offset[i];
    for (int64_t d = 0; d < head_dim; d += LINE) {
      const int n = int(min64(LINE, head_dim - d));
      if (later) ahead->prefetch(later, i * head_dim + d, n);
      F operands[LINE / TILE_DIMS];
      AmxProduct::load_line(row + d, n, operands);
      for (int j = 0; j < n; j += TILE_DIMS)
        store(buffer + i * stride + (d + j) / 2, operands[j / TILE_DIMS]);
    }
  }
  return {(const char*)buffer, stride * int64_t(sizeof(float)), nullptr};
}

// Prefetches as many bytes as tile i of x has, while that is multiplied.
template <class T>
PAGED_ATTN_INLINE void ask_for_tile(const TileRows<T>& x, int64_t i, const ReadAhead<T>* ahead) {
  constexpr int ELEMENTS = TILE_KEYS * TILE_DIMS;
  if (x.later) ahead->prefetch(x.later, i * ELEMENTS, ELEMENTS);
}

// scores (16 keys, rows) = k . q
template <int ROWS, class T>
PAGED_ATTN_INLINE void dot_tiles(const TileRows<T>& k, const ReadAhead<T>* ahead, const float* q,
                                 int64_t tiles, float* scores) {
  constexpr int64_t STRIDE = ROWS * sizeof(float);
  _tile_zero(2);
  for (int64_t i = 0; i < tiles; ++i) {
    ask_for_tile(k, i, ahead);
    PAGED_ATTN_LOAD_TILE(0, k.first + i * 64, k.stride);
    PAGED_ATTN_LOAD_TILE(1, q + i * ROWS * W, STRIDE);
    _tile_dpbf16ps(2, 0, 1);
  }
  _tile_stored(2, scores, STRIDE);
}

// acc (even and odd dims of rows) += p (rows twice, 16 keys) @ v
template <int ROWS, class T>
PAGED_ATTN_INLINE void weigh_tiles(const TileRows<T>& v, const ReadAhead<T>* ahead, const float* p,
                                   int64_t tiles, float* acc, int64_t stride_acc) {
  constexpr int64_t STRIDE = ROW_COLUMNS * sizeof(float);
  const int64_t stride = stride_acc * int64_t(sizeof(float));
  PAGED_ATTN_LOAD_TILE(3, p, STRIDE);
  if (ROWS == 16) PAGED_ATTN_LOAD_TILE(2, p + 16 * ROW_COLUMNS, STRIDE);
  for (int64_t i = 0; i < tiles; ++i) {
    ask_for_tile(v, i, ahead);
    float* sums = acc + i * W;
    PAGED_ATTN_LOAD_TILE(0, v.first + i * 64, v.stride);
    PAGED_ATTN_LOAD_TILE(4, sums, stride);
    _tile_dpbf16ps(4, 3, 0);
    _tile_stored(4, sums, stride);
    if (ROWS == 16) {
      sums += 16 * stride_acc;
      PAGED_ATTN_LOAD_TILE(5, sums, stride);
      _tile_dpbf16ps(5, 2, 0);
      _tile_stored(5, sums, stride);
    }
  }
}

// Scores (16 keys, ROWS) of each tile become rows of probabilities, twice.
template <int ROWS>
PAGED_ATTN_INLINE void softmax_tiles(const Attention& a, const Sequence& s,
                                     const paged_attn::Task& task, int group, const KeyBlock& block,
                                     bool finished, const AmxRowsWorkspace& w) {
  constexpr int TOGETHER = ROWS < 8 ? ROWS : 8;
  const int columns = block.num_columns;
  const int64_t rows = rows_of(a, task);
  const int64_t in_group = (group - task.group_begin) * w.rows;
  float* scores = w.scores + 2 * in_group * ROW_COLUMNS;
  float* duplicated_p = scores + ROWS * ROW_COLUMNS;
  const float scale = w.scale[group - task.group_begin];
  for (int c = 0; c < columns; c += TILE_KEYS) {
    F x[ROWS];
    for (int r = 0; r < ROWS; ++r) x[r] = load(duplicated_p + c * ROWS + r * W);
    uninterleave<ROWS>(x);
    for (int r = 0; r < ROWS; ++r) store(scores + r * ROW_COLUMNS + c, x[r] * set1(scale));
  }
  for (int64_t r0 = 0; r0 < rows; r0 += TOGETHER) {
    const auto row_at = [&](int r) __attribute__((always_inline)) {
      return row_of(a, s, task, group, r0 + r);
    };
    float rescale[TOGETHER];
    softmax_rows<AmxHalves, TOGETHER>(
        a, s, block, 0, columns, finished, int(min64(TOGETHER, rows - r0)), row_at,
        scores + r0 * ROW_COLUMNS, ROW_COLUMNS, w.m + in_group + r0, w.l + in_group + r0, rescale);
    for (int64_t r = r0; r < r0 + TOGETHER; ++r) {
      for (int c = 0; c < columns; c += W)
        store(duplicated_p + r * ROW_COLUMNS + c,
              as_float(bits(load(scores + r * ROW_COLUMNS + c)) << 16));
      if (rescale[r - r0] == 1) continue;
      for (int odd = 0; odd < 2; ++odd) {
        float* acc = w.acc + (2 * in_group + odd * ROWS + r) * w.stride_acc;
        for (int64_t d = 0; d < w.stride_acc; d += W)
          store(acc + d, load(acc + d) * set1(rescale[r - r0]));
      }
    }
  }
}

// How far ahead to prefetch: half as far as vectors do, since tiles read a chunk at once. Where a
// token's heads are contiguous, a chunk is prefetched token by token and read head by head, so that
// all of it has to be there first.
template <class T>
PAGED_ATTN_INLINE int64_t ahead_bytes(const Attention& a, int groups) {
  if (a.k.stride_head >= a.k.stride_token) return AHEAD_BYTES / 2;
  return AHEAD_BYTES + TILE_KEYS * groups * max64(a.head_dim, a.head_dim_v) * int64_t(sizeof(T));
}

// One block of keys for every group of the task.
template <class T, int ROWS>
inline void decode_block_amx(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                             const KeyBlock& block, const KeyBlock& next,
                             const AmxRowsWorkspace& w) {
  const int columns = block.num_columns;
  const auto data_of = [&](const paged_attn::KeyValue& x, int group)
                           __attribute__((always_inline)) {
                             return (const T*)x.data + kv_head_of(a, group) * x.stride_head;
                           };
  const int groups = task.group_end - task.group_begin;
  ReadAhead<T> cursor(a, kv_head_of(a, task.group_begin), groups, TILE_KEYS,
                      ahead_bytes<T>(a, groups));
  cursor.seek(block, next);
  ReadAhead<T>* const ahead = &cursor;
  for (int c = 0; c < columns; c += TILE_KEYS) {
    const int64_t spaced = spacing(block.k_offset + c);
    for (int group = task.group_begin; group < task.group_end; ++group) {
      const int64_t g = group - task.group_begin;
      const TileRows<T> k =
          tile_rows(data_of(a.k, group), block.k_offset + c, spaced, a.head_dim, ahead, w.tiles);
      // in the place of the second copy of the probabilities
      float* scores = w.scores + (2 * g + 1) * ROWS * ROW_COLUMNS;
      dot_tiles<ROWS>(k, ahead, w.q + g * ROWS * w.key_tiles * W, w.key_tiles, scores + c * ROWS);
    }
  }
  const bool finished =
      is_plain(a) && all_visible(a, s, task.token_begin, task.token_end - 1, block, 0, columns);
  for (int c = 0; c < columns; c += TILE_KEYS) {
    const int64_t spaced = spacing(block.v_offset + c);
    for (int group = task.group_begin; group < task.group_end; ++group) {
      // not of all groups at once: no memory would be read meanwhile
      if (c == 0) {
        softmax_tiles<ROWS>(a, s, task, group, block, finished, w);
      }
      const int64_t g = group - task.group_begin;
      const TileRows<T> v =
          tile_rows(data_of(a.v, group), block.v_offset + c, spaced, a.head_dim_v, ahead, w.tiles);
      weigh_tiles<ROWS>(v, ahead, w.scores + 2 * g * ROWS * ROW_COLUMNS + c, w.value_tiles,
                        w.acc + 2 * g * ROWS * w.stride_acc, w.stride_acc);
    }
  }
}

// Queries of a group as right operands: (operand of head_dim, ROWS).
template <int ROWS>
PAGED_ATTN_INLINE void turn_queries(const Attention& a, const Sequence& s,
                                    const paged_attn::Task& task, int64_t group, int64_t depth,
                                    float* rows, float* turned) {
  memset(rows, 0, ROWS * depth * sizeof(float));
  load_queries<AmxProduct>(a, s, task, group, rows, depth);
  for (int64_t d = 0; d < depth; d += W) {
    F x[ROWS];
    for (int r = 0; r < ROWS; ++r) x[r] = load(rows + r * depth + d);
    interleave<ROWS>(x);
    for (int r = 0; r < ROWS; ++r) store(turned + d * ROWS + r * W, x[r]);
  }
}

// Returns false, and has written nothing, if a sum is not finite.
template <int ROWS>
inline bool decode_amx(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                       float* memory) {
  const int64_t rows = rows_of(a, task);
  const int groups = task.group_end - task.group_begin;
  const AmxRowsWorkspace w = amx_rows_workspace(a, rows, groups, memory);
  memset(w.acc, 0, groups * 2 * ROWS * w.stride_acc * sizeof(float));
  for (int64_t i = 0; i < groups * ROWS; ++i) w.m[i] = -INFINITY, w.l[i] = 0;
  const int64_t depth = w.key_tiles * W;
  for (int g = 0; g < groups; ++g) {
    w.scale[g] = logit_scale(a, s, kv_head_of(a, task.group_begin + g));
    turn_queries<ROWS>(a, s, task, task.group_begin + g, depth, w.tiles, w.q + g * depth * ROWS);
  }

  for_each_block(a, s, task, ROW_COLUMNS,
                 [&](const KeyBlock& block, const KeyBlock& next, bool more)
                     __attribute__((always_inline)) {
                       with_type(a.kv_dtype, [&](auto tag) __attribute__((always_inline)) {
                         typedef typename decltype(tag)::type T;
                         if constexpr (AmxProduct::accepts<T>)
                           decode_block_amx<T, ROWS>(a, s, task, block, more ? next : block, w);
                       });
                     });

  I finite = I{} - 1;
  for (int64_t i = 0; i < groups * 2 * ROWS; ++i)
    for (int64_t d = 0; i % ROWS < rows && d < w.stride_acc; d += W) {
      const F x = load(w.acc + i * w.stride_acc + d);
      finite &= (I)(x - x == F{});
    }
  if (_mm512_movepi32_mask((__m512i)finite) != 0xffff) return false;
  for (int g = 0; g < groups; ++g)
    for (int64_t r = 0; r < rows; ++r) {
      const float* acc = w.acc + (2 * g * ROWS + r) * w.stride_acc;
      for (int64_t d = 0; d < w.stride_acc; d += W) {
        F x[2] = {load(acc + d), load(acc + ROWS * w.stride_acc + d)};
        interleave<2>(x);
        for (int i = 0; i < 2; ++i) store(w.tiles + 2 * d + i * W, x[i]);
      }
      finish(a, s, task, task.group_begin + g, r, w.tiles, w.m[g * ROWS + r], w.l[g * ROWS + r]);
    }
  return true;
}

}  // namespace
