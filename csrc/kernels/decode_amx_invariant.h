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

// The order of prefill_amx.h: values are added up 32 keys at a time, and rows' sums are relative to
// an old maximum until theirs outgrows it.
template <int R, class Product>
struct StepSums {
  static constexpr int ROWS = R, COLUMNS = MAX_COLUMNS, STRIDE = SCORES, LANES = W;
  static constexpr bool PACKED = Product::DEPTH > 1, BY_STEPS = true;
  // for packed values tiles 3 and 4 have probabilities and sums of single rows
  struct Registers : AmxRowsRegisters<ROWS> {
    constexpr Registers() {
      for (int i = 3; i < 5 && PACKED; ++i) this->rows[i] = ROWS;
    }
  };

  // of each 32 dims the even ones, then the odd ones; packed values leave dims in their order
  static PAGED_ATTN_INLINE void lay_out(AmxDecodeWorkspace& w) {
    w.stride_acc = w.value_tiles * TILE_DIMS + PADDING;
    w.stride_odd = W;
    w.stride_dims = TILE_DIMS;
    w.group_acc = w.rows * w.stride_acc;
  }

  static PAGED_ATTN_INLINE float late_scale(const Attention& a, float scale) {
    return is_plain(a) && scale > 0 ? scale : 1.f;
  }

  template <int TOGETHER, class Row>
  static PAGED_ATTN_INLINE void softmax(const Attention& a, const Sequence& s,
                                        const KeyBlock& block, bool finished, int count, Row row_at,
                                        float late_scale, float* scores, float* m, float* l,
                                        float* acc, const AmxDecodeWorkspace& w) {
    const int columns = block.num_columns;
    for (int r = 0; r < count && !finished; ++r)
      finish_row(a, row_at(r), block, 0, columns, scores + r * SCORES);
    AmxQueue nothing;
    if (!a.dropout.enabled) {
      update_softmax_lazily<Product, TOGETHER>(scores, 0, columns, late_scale, m, l, acc,
                                               w.stride_acc, nothing);
      return;
    }
    update_softmax_lazily<FloatProduct, TOGETHER>(scores, 0, columns, late_scale, m, l, acc,
                                                  w.stride_acc, nothing);
    for (int r = 0; r < count; ++r) {
      drop_probabilities(a, s, row_at(r), block, 0, columns, scores + r * SCORES);
      narrow<Product>(scores + r * SCORES, 0, columns);
    }
  }
  static PAGED_ATTN_INLINE float sum_of(const float* l) { return reduce_add(load(l)); }

  // acc (rows, dims) += p (rows, 32 keys) @ v, once the second half of the keys is there
  template <class T>
  static PAGED_ATTN_INLINE void weigh(const Attention& a, const T* values, const KeyBlock& block,
                                      int c, int64_t spaced, ReadAhead<T>* ahead, const float* p,
                                      int64_t rows, float* acc, float* sums,
                                      const AmxDecodeWorkspace& w) {
    const int columns = block.num_columns;
    const bool is_second = c % PAIR_KEYS != 0;
    if (PACKED) {
      if (!is_second)
        weigh_packed(values, block.v_offset + c, int(min64(PAIR_KEYS, columns - c)), a.head_dim_v,
                     p + c / 2, acc, w.stride_acc, w.tiles);
      return;
    }
    const TileRows<T> v =
        tile_rows(values, block.v_offset + c, spaced, a.head_dim_v, ahead, w.tiles);
    weigh_half(v, ahead, p + c, w.value_tiles, is_second, sums);
    if (is_second || c + TILE_KEYS == columns)
      add_step(rows, w.value_tiles, sums, acc, w.stride_acc);
  }

 private:
  // sums (even and odd dims of rows) = p (rows twice, 16 keys) @ v, or += that
  template <class T>
  static PAGED_ATTN_INLINE void weigh_half(const TileRows<T>& v, const ReadAhead<T>* ahead,
                                           const float* p, int64_t tiles, bool add, float* sums) {
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
  static PAGED_ATTN_INLINE void add_step(int64_t rows, int64_t tiles, const float* sums, float* acc,
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
  static PAGED_ATTN_INLINE void weigh_packed(const T* v, const int64_t* offset, int columns,
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
};

template <int ROWS>
inline void decode_amx_invariant(const Attention& a, const Sequence& s,
                                 const paged_attn::Task& task, float* memory) {
  if (!decode_amx<StepSums<ROWS, AmxHalves>>(a, s, task, memory))
    decode_amx<StepSums<ROWS, AmxValueProduct>>(a, s, task, memory);
}

}  // namespace
