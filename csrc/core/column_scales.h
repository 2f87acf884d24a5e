// Scales by token of a block's columns: those of keys multiply scores, those of values
// probabilities.
#pragma once

#include "paged_kv.h"
#include "vec/vec.h"

namespace {

struct ColumnScales {
  alignas(64) float k[MAX_COLUMNS], v[MAX_COLUMNS];
  const float *of_keys = nullptr, *of_values = nullptr;  // null where there are none
};

// Where tokens have several scales, those of values go to `several`, MAX_COLUMNS of each.
PAGED_ATTN_INLINE void load_column_scales(const Attention& a, int64_t kv_head,
                                          const KeyBlock& block, ColumnScales& to,
                                          float* several = nullptr) {
  const auto load_all = [&](const paged_attn::TokenScales& from, const int64_t* offset, float* x)
                            __attribute__((always_inline)) -> const float* {
    if (!from) return nullptr;
    const float* first = from.data + kv_head * from.stride_head;
    for (int c = 0; c < block.num_columns; ++c)
      for (int64_t i = 0; i < from.count; ++i)
        x[i * MAX_COLUMNS + c] = first[offset[c] + i * from.stride_scale];
    return x;
  };
  to.of_keys = load_all(a.k_scales, block.k_scale, to.k);
  to.of_values = load_all(a.v_scales, block.v_scale, a.v_scales.count > 1 ? several : to.v);
}

// The largest magnitude of the keys' scales.
PAGED_ATTN_INLINE float largest_key_scale(const Attention& a, int64_t kv_head,
                                          const KeyBlock& block) {
  const float* first = a.k_scales.data + kv_head * a.k_scales.stride_head;
  float largest = 0;
  for (int c = 0; c < block.num_columns; ++c) {
    const float scale = fabsf(first[block.k_scale[c]]);
    largest = scale > largest ? scale : largest;
  }
  return largest;
}

// Multiplies columns [begin, end) of rows of scores.
PAGED_ATTN_INLINE void scale_columns(float* scores, int64_t stride, int rows, int begin, int end,
                                     const float* scales) {
  for (int c = begin; c < end; c += W) {
    const F scale = load(scales + c);
    for (int r = 0; r < rows; ++r)
      store(scores + r * stride + c, load(scores + r * stride + c) * scale);
  }
}

// Adds the same columns of other scores, multiplied by scales.
PAGED_ATTN_INLINE void add_scaled_columns(const float* from, float* scores, int64_t stride,
                                          int rows, int begin, int end, const float* scales) {
  for (int c = begin; c < end; c += W) {
    const F scale = load(scales + c);
    for (int r = 0; r < rows; ++r) {
      float* to = scores + r * stride + c;
      store(to, fma(load(from + r * stride + c), scale, load(to)));
    }
  }
}

// Asks for the scales of a block under a head, a cache line for each ALIGN columns: as many as one
// has where a head's scales are contiguous.
PAGED_ATTN_INLINE void fetch_column_scales(const Attention& a, int64_t kv_head,
                                           const KeyBlock& block) {
  const auto fetch = [&](const paged_attn::TokenScales& from, const int64_t* offset)
                         __attribute__((always_inline)) {
                           if (!from) return;
                           for (int c = 0; c < block.num_columns; c += ALIGN)
                             __builtin_prefetch(from.data + kv_head * from.stride_head + offset[c]);
                         };
  fetch(a.k_scales, block.k_scale);
  fetch(a.v_scales, block.v_scale);
}

}  // namespace
