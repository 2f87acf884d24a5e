// Few query rows beside latent queries: keys and latents of a block become floats once, multiplied
// by their scales, and serve every row where they are. Packing them, as prefill.h does, would take
// longer than multiplying so few rows.
#pragma once

#include "decode.h"
#include "prefill.h"

namespace {

struct LatentRowsWorkspace : SoftmaxWorkspace {
  using SoftmaxWorkspace::SoftmaxWorkspace;

  int64_t stride_latent, stride_row;  // of latent queries; of a key and its latents
  float *latent, *converted, *latent_scales, *unpacked;
};

PAGED_ATTN_INLINE LatentRowsWorkspace latent_rows_workspace(const Attention& a, int64_t rows,
                                                            float* memory) {
  LatentRowsWorkspace w(memory);
  w.rows = rows <= 2 ? rows : round_up(rows, 4);
  w.stride_q = padded<FloatProduct>(a.head_dim);
  w.stride_latent = w.stride_acc = padded<FloatProduct>(a.head_dim_v);
  w.stride_row = w.stride_q + w.stride_latent;
  w.take_rows(1, w.rows * w.stride_acc, 1, w.rows * ROW_COLUMNS);
  w.latent = w.take(w.rows * w.stride_latent);
  w.converted = w.take(ROW_COLUMNS * w.stride_row);
  w.latent_scales = w.take(a.v_scales.count > 1 ? a.v_scales.count * MAX_COLUMNS : 0);
  w.unpacked = w.take(floats_of_unpacked(a));
  return w;
}

// Rows of a block as floats. `scales`, if not null: of each column MAX_COLUMNS behind one another,
// for each `part` numbers.
PAGED_ATTN_INLINE void convert_rows(const paged_attn::KeyValue& x, paged_attn::DType dtype,
                                    int64_t kv_head, const int64_t* offset, int columns,
                                    int64_t numbers, const float* scales, int64_t part,
                                    float* unpacked, float* to, int64_t stride) {
  with_rows<FloatProduct>(
      x, dtype, kv_head, offset, columns, numbers, unpacked,
      [&](auto* rows, const int64_t* places) __attribute__((always_inline)) {
        for (int c = 0; c < columns; ++c) {
          const auto* from = rows + places[c];
          for (int64_t first = 0; first < numbers; first += part) {
            const F scale = set1(scales ? scales[first / part * MAX_COLUMNS + c] : 1.f);
            int64_t d = first;
            for (; d + W <= first + part; d += W)
              store(to + c * stride + d, load(from + d) * scale);
            if (d < first + part)
              store(to + c * stride + d, load(from + d, int(first + part - d)) * scale);
          }
        }
      });
}

template <int ROWS>
inline void attend_latents(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                           const KeyBlock& block, const KeyBlock& next,
                           const LatentRowsWorkspace& w) {
  constexpr int STEP = DOTS / ROWS, WEIGHED = 8;
  const int64_t rows = rows_of(a, task), kv_head = kv_head_of(a, task.group_begin);
  const int columns = block.num_columns;
  const float scale = logit_scale(a, s, kv_head);
  const float scale_latent = product_scale(a, s, kv_head, a.v_descale);
  float *keys = w.converted, *latents = w.converted + w.stride_q;
  ColumnScales scales;
  load_column_scales(a, kv_head, block, scales, w.latent_scales);
  convert_rows(a.k, a.kv_dtype, kv_head, block.k_offset, columns, a.head_dim, scales.of_keys,
               a.head_dim, w.unpacked, keys, w.stride_row);
  convert_rows(a.v, a.v_dtype, kv_head, block.v_offset, columns, a.head_dim_v, scales.of_values,
               a.head_dim_v / a.v_scales.count, w.unpacked, latents, w.stride_row);
  int64_t offset[ROW_COLUMNS];
  for (int c = 0; c < columns; ++c) offset[c] = c * w.stride_row;

  NoReadAhead ahead;
  const float* unread = w.q;  // lanes of floats have no scales
  for (int c = 0; c < columns; c += STEP) {
    fetch_columns(a, kv_head, next, c, c + STEP);
    float* scores = w.scores + c;
    dot_keys<FloatProduct, float, ROWS>(keys, offset + c, STEP, ahead, w.q, unread, w.rows,
                                        a.head_dim, scale, scores);
    dot_keys<FloatProduct, float, ROWS, true>(latents, offset + c, STEP, ahead, w.latent, unread,
                                              w.rows, a.head_dim_v, scale_latent, scores);
  }
  const bool finished =
      is_plain(a) && all_visible(a, s, task.token_begin, task.token_end - 1, block, 0, columns);
  for (int64_t r0 = 0; r0 < rows; r0 += ROWS) {
    const auto row_at = [&](int r) __attribute__((always_inline)) {
      return row_of(a, s, task, task.group_begin, r0 + r);
    };
    float rescale[ROWS];
    softmax_rows<FloatProduct, ROWS>(a, s, block, 0, columns, finished, int(min64(ROWS, rows - r0)),
                                     row_at, w.scores + r0 * ROW_COLUMNS, ROW_COLUMNS, w.m + r0,
                                     w.l + r0, rescale);
    for (int r = 0; r < ROWS; ++r) {
      float* acc = w.acc + (r0 + r) * w.stride_acc;
      for (int64_t d = 0; d < w.stride_acc && rescale[r] != 1; d += W)
        store(acc + d, load(acc + d) * set1(rescale[r]));
    }
  }
  for (int c = 0; c < columns; c += WEIGHED)
    weigh_values<FloatProduct, float, ROWS>(latents, offset + c, WEIGHED, ahead, w.scores + c,
                                            w.rows, a.head_dim_v, w.acc);
}

// The keys of a task under its one group.
inline void decode_latents_of_group(const Attention& a, const Sequence& s,
                                    const paged_attn::Task& task, float* memory) {
  const int64_t rows = rows_of(a, task);
  const LatentRowsWorkspace w = latent_rows_workspace(a, rows, memory);
  memset(w.q, 0, w.rows * w.stride_q * sizeof(float));
  memset(w.latent, 0, w.rows * w.stride_latent * sizeof(float));
  memset(w.acc, 0, w.rows * w.stride_acc * sizeof(float));
  for (int64_t r = 0; r < w.rows; ++r) w.m[r] = -INFINITY, w.l[r] = 0;
  load_queries<FloatProduct>(a, s, task, task.group_begin, w.q, w.stride_q);
  load_queries<FloatProduct>(a, s, task, task.group_begin, w.latent, w.stride_latent, true);
  for_each_block(a, s, task, ROW_COLUMNS,
                 [&](const KeyBlock& block, const KeyBlock& next, bool more)
                     __attribute__((always_inline)) {
                       const KeyBlock& upcoming = more ? next : block;
                       switch (w.rows) {
                         case 1: return attend_latents<1>(a, s, task, block, upcoming, w);
                         case 2: return attend_latents<2>(a, s, task, block, upcoming, w);
                         default: return attend_latents<4>(a, s, task, block, upcoming, w);
                       }
                     });
  for (int64_t r = 0; r < rows; ++r)
    finish(a, s, task, task.group_begin, r, w.acc + r * w.stride_acc, w.m[r], w.l[r]);
}

inline void decode_latents(const Attention& a, const Sequence& s, paged_attn::Task task,
                           float* memory) {
  const int32_t end = task.group_end;
  for (; task.group_begin < end; ++task.group_begin) {
    task.group_end = task.group_begin + 1;
    decode_latents_of_group(a, s, task, memory);
    if (task.partial >= 0) task.partial += rows_of(a, task) * partial_row_floats(a);
  }
}

}  // namespace
