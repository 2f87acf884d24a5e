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

struct AmxDecodeWorkspace : SoftmaxWorkspace {
  using SoftmaxWorkspace::SoftmaxWorkspace;

  int64_t key_tiles, value_tiles;
  // floats of a group's sums, from even dims to the odd ones and from 32 dims to the next
  int64_t group_acc, stride_odd, stride_dims;
  float *scale, *tiles;
  float*
      sums;  // over a step, of a group: for each 32 dims the rows' even ones, then their odd ones
};

// `Sums` says in which order values are added up, and so where the sums are: BlockSums below, or
// StepSums of decode_amx_invariant.h.
template <class Sums>
PAGED_ATTN_INLINE AmxDecodeWorkspace amx_decode_workspace(const Attention& a, int64_t rows,
                                                          int64_t groups, float* memory) {
  AmxDecodeWorkspace w(memory);
  w.rows = register_rows(rows);
  w.key_tiles = round_up(a.head_dim, TILE_DIMS) / TILE_DIMS;
  w.value_tiles = round_up(a.head_dim_v, TILE_DIMS) / TILE_DIMS;
  w.stride_q = w.key_tiles * W;
  Sums::lay_out(w);
  w.take_rows(groups, w.group_acc, Sums::LANES, groups * 2 * w.rows * Sums::STRIDE);
  w.scale = w.take(groups);
  w.sums = w.take(Sums::BY_STEPS ? groups * w.value_tiles * 2 * w.rows * W : 0);
  // rows of queries, a tile of keys or values, or a step's packed values
  w.tiles = w.take(max64(w.key_tiles, 2 * w.value_tiles) * TILE_FLOATS);
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

// The order of decode.h: a block's values are added to the sums one tile after the other.
template <int R>
struct BlockSums {
  static constexpr int ROWS = R, COLUMNS = ROW_COLUMNS, STRIDE = ROW_COLUMNS, LANES = 1;
  static constexpr bool PACKED = false, BY_STEPS = false;
  typedef AmxRowsRegisters<ROWS> Registers;

  // all even dims of a group's rows, then the odd ones
  static PAGED_ATTN_INLINE void lay_out(AmxDecodeWorkspace& w) {
    w.stride_acc = w.value_tiles * W;
    w.stride_odd = w.rows * w.stride_acc;
    w.stride_dims = W;
    w.group_acc = 2 * w.stride_odd;
  }

  static PAGED_ATTN_INLINE float late_scale(const Attention&, float) { return 1.f; }

  template <int TOGETHER, class Row>
  static PAGED_ATTN_INLINE void softmax(const Attention& a, const Sequence& s,
                                        const KeyBlock& block, bool finished, int count, Row row_at,
                                        float, float* scores, float* m, float* l, float* acc,
                                        const AmxDecodeWorkspace& w) {
    float rescale[TOGETHER];
    softmax_rows<AmxHalves, TOGETHER>(a, s, block, 0, block.num_columns, finished, count, row_at,
                                      scores, STRIDE, m, l, rescale);
    for (int r = 0; r < TOGETHER; ++r, acc += w.stride_acc) {
      if (rescale[r] == 1) continue;
      for (int odd = 0; odd < 2; ++odd)
        for (int64_t d = 0; d < w.stride_acc; d += W) {
          float* to = acc + odd * w.stride_odd + d;
          store(to, load(to) * set1(rescale[r]));
        }
    }
  }
  static PAGED_ATTN_INLINE float sum_of(const float* l) { return *l; }

  // acc (even and odd dims of rows) += p (rows twice, 16 keys) @ v
  template <class T>
  static PAGED_ATTN_INLINE void weigh(const Attention& a, const T* values, const KeyBlock& block,
                                      int c, int64_t spaced, ReadAhead<T>* ahead, const float* p,
                                      int64_t, float* acc, float*, const AmxDecodeWorkspace& w) {
    const TileRows<T> v =
        tile_rows(values, block.v_offset + c, spaced, a.head_dim_v, ahead, w.tiles);
    const int64_t stride = w.stride_acc * int64_t(sizeof(float));
    PAGED_ATTN_LOAD_TILE(3, p + c, STRIDE * sizeof(float));
    if (ROWS == 16) PAGED_ATTN_LOAD_TILE(2, p + c + 16 * STRIDE, STRIDE * sizeof(float));
    for (int64_t i = 0; i < w.value_tiles; ++i) {
      ask_for_tile(v, i, ahead);
      float* sums = acc + i * W;
      PAGED_ATTN_LOAD_TILE(0, v.first + i * 64, v.stride);
      PAGED_ATTN_LOAD_TILE(4, sums, stride);
      _tile_dpbf16ps(4, 3, 0);
      _tile_stored(4, sums, stride);
      if (ROWS == 16) {
        sums += 16 * w.stride_acc;
        PAGED_ATTN_LOAD_TILE(5, sums, stride);
        _tile_dpbf16ps(5, 2, 0);
        _tile_stored(5, sums, stride);
      }
    }
  }
};

// Scores (16 keys, ROWS) of each tile become rows of logits and these of probabilities: in pairs if
// values are packed, else alone and twice.
template <class Sums>
PAGED_ATTN_INLINE void softmax_tiles(const Attention& a, const Sequence& s,
                                     const paged_attn::Task& task, int group, const KeyBlock& block,
                                     bool finished, const AmxDecodeWorkspace& w) {
  constexpr int ROWS = Sums::ROWS, STRIDE = Sums::STRIDE, TOGETHER = ROWS < 8 ? ROWS : 8;
  const int columns = block.num_columns;
  const int64_t rows = rows_of(a, task), g = group - task.group_begin;
  float *all = w.scores + 2 * g * ROWS * STRIDE, *duplicated_p = all + ROWS * STRIDE;
  const float scale = w.scale[g], late_scale = Sums::late_scale(a, scale);
  const float early_scale = late_scale == scale ? 1.f : scale;
  for (int c = 0; c < columns; c += TILE_KEYS) {
    F x[ROWS];
    for (int r = 0; r < ROWS; ++r) x[r] = load(duplicated_p + c * ROWS + r * W);
    uninterleave<ROWS>(x);
    for (int r = 0; r < ROWS; ++r) store(all + r * STRIDE + c, x[r] * set1(early_scale));
  }
  for (int64_t r0 = 0; r0 < rows; r0 += TOGETHER) {
    float* scores = all + r0 * STRIDE;
    const int64_t first = g * ROWS + r0;
    const auto row_at = [&](int64_t r) __attribute__((always_inline)) {
      return row_of(a, s, task, group, r0 + r);
    };
    Sums::template softmax<TOGETHER>(a, s, block, finished, int(min64(TOGETHER, rows - r0)), row_at,
                                     late_scale, scores, w.m + first, w.l + first * Sums::LANES,
                                     w.acc + g * w.group_acc + r0 * w.stride_acc, w);
    for (int r = 0; r < TOGETHER && !Sums::PACKED; ++r)
      for (int c = 0; c < columns; c += W)
        store(duplicated_p + (r0 + r) * STRIDE + c,
              as_float(bits(load(scores + r * STRIDE + c)) << 16));
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
template <class T, class Sums>
inline void decode_block_amx(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                             const KeyBlock& block, const KeyBlock& next,
                             const AmxDecodeWorkspace& w) {
  constexpr int ROWS = Sums::ROWS;
  const int columns = block.num_columns;
  const int groups = task.group_end - task.group_begin;
  const int64_t rows = rows_of(a, task);
  const auto data_of = [&](const paged_attn::KeyValue& x, int group)
                           __attribute__((always_inline)) {
                             return (const T*)x.data + kv_head_of(a, group) * x.stride_head;
                           };
  ReadAhead<T> cursor(a, kv_head_of(a, task.group_begin), groups, TILE_KEYS,
                      ahead_bytes<T>(a, groups));
  ReadAhead<T>* const ahead = Sums::PACKED ? nullptr : &cursor;
  if (ahead) cursor.seek(block, next);
  for (int c = 0; c < columns; c += TILE_KEYS) {
    const int64_t spaced = spacing(block.k_offset + c);
    for (int group = task.group_begin; group < task.group_end; ++group) {
      const int64_t g = group - task.group_begin;
      const TileRows<T> k =
          tile_rows(data_of(a.k, group), block.k_offset + c, spaced, a.head_dim, ahead, w.tiles);
      // in the place of the second copy of the probabilities
      float* scores = w.scores + (2 * g + 1) * ROWS * Sums::STRIDE;
      dot_tiles<ROWS>(k, ahead, w.q + g * ROWS * w.stride_q, w.key_tiles, scores + c * ROWS);
    }
  }
  const bool finished =
      is_plain(a) && all_visible(a, s, task.token_begin, task.token_end - 1, block, 0, columns);
  for (int c = 0; c < columns; c += TILE_KEYS) {
    const int64_t spaced = spacing(block.v_offset + c);
    for (int group = task.group_begin; group < task.group_end; ++group) {
      // not of all groups at once: no memory would be read meanwhile
      if (c == 0) softmax_tiles<Sums>(a, s, task, group, block, finished, w);
      const int64_t g = group - task.group_begin;
      Sums::weigh(a, data_of(a.v, group), block, c, spaced, ahead,
                  w.scores + 2 * g * ROWS * Sums::STRIDE, rows, w.acc + g * w.group_acc,
                  w.sums + g * w.value_tiles * 2 * ROWS * W, w);
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

// Returns false, and has written nothing, if a sum is not finite and values were not packed.
template <class Sums>
inline bool decode_amx(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                       float* memory) {
  constexpr int ROWS = Sums::ROWS;
  static constexpr typename Sums::Registers registers;
  _tile_loadconfig(&registers);
  const int64_t rows = rows_of(a, task);
  const int groups = task.group_end - task.group_begin;
  const AmxDecodeWorkspace w = amx_decode_workspace<Sums>(a, rows, groups, memory);
  memset(w.acc, 0, groups * w.group_acc * sizeof(float));
  memset(w.l, 0, groups * ROWS * Sums::LANES * sizeof(float));
  for (int64_t i = 0; i < groups * ROWS; ++i) w.m[i] = -INFINITY;
  for (int g = 0; g < groups; ++g) {
    w.scale[g] = logit_scale(a, s, kv_head_of(a, task.group_begin + g));
    turn_queries<ROWS>(a, s, task, task.group_begin + g, w.stride_q, w.tiles,
                       w.q + g * w.stride_q * ROWS);
  }
  for_each_block(a, s, task, Sums::COLUMNS,
                 [&](const KeyBlock& block, const KeyBlock& next, bool more)
                     __attribute__((always_inline)) {
                       with_type(a.kv_dtype, [&](auto tag) __attribute__((always_inline)) {
                         typedef typename decltype(tag)::type T;
                         if constexpr (AmxProduct::accepts<T>)
                           decode_block_amx<T, Sums>(a, s, task, block, more ? next : block, w);
                       });
                     });
  _tile_release();

  I finite = I{} - 1;
  for (int64_t i = 0; i < groups * rows && !Sums::PACKED; ++i) {
    const float* acc = w.acc + i / rows * w.group_acc + i % rows * w.stride_acc;
    for (int64_t d = 0; d < 2 * w.value_tiles; ++d) {
      const F x = load(acc + d / 2 * w.stride_dims + d % 2 * w.stride_odd);
      finite &= (I)(x - x == F{});
    }
  }
  if (_mm512_movepi32_mask((__m512i)finite) != 0xffff) return false;
  for (int g = 0; g < groups; ++g)
    for (int64_t r = 0; r < rows; ++r) {
      const float* acc = w.acc + g * w.group_acc + r * w.stride_acc;
      for (int64_t i = 0; i < w.value_tiles && !Sums::PACKED; ++i) {
        const float* even = acc + i * w.stride_dims;
        F x[2] = {load(even), load(even + w.stride_odd)};
        interleave<2>(x);
        for (int j = 0; j < 2; ++j) store(w.tiles + i * TILE_DIMS + j * W, x[j]);
      }
      const int64_t row = g * ROWS + r;
      finish(a, s, task, task.group_begin + g, r, Sums::PACKED ? acc : w.tiles, w.m[row],
             Sums::sum_of(w.l + row * Sums::LANES));
    }
  return true;
}

}  // namespace
